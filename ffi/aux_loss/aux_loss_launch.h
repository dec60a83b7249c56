// Launchers of the auxiliary loss: raw structs and a stream, so that the .cu file needs no FFI
// header (which nvcc takes ten seconds to read).
#ifndef JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_LAUNCH_H_
#define JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "aux_loss/aux_loss.h"

namespace jax_moe_det {

// None allocates or synchronises; all may be captured into a graph.
cudaError_t LaunchAuxLossFwd(cudaStream_t stream, const AuxLossPartials& partials,
                             const AuxLossFinal& final_sum);
cudaError_t LaunchAuxLossFwdAtomic(cudaStream_t stream, const AuxLossPartials& partials,
                                   const AuxLossFinal& final_sum);
cudaError_t LaunchAuxLossPartials(cudaStream_t stream, const AuxLossPartials& partials);
cudaError_t LaunchAuxLossFinal(cudaStream_t stream, const AuxLossFinal& final_sum);
cudaError_t LaunchAuxLossBwd(cudaStream_t stream, const AuxLossRow& row);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_LAUNCH_H_
