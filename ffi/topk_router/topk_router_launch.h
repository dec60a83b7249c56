// Launchers of the top-k router: raw structs and a stream, so that the .cu files need no FFI
// header.
#ifndef JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_LAUNCH_H_
#define JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "topk_router/topk_router.h"

namespace jax_moe_det {

// Neither allocates or synchronises; both may be captured into a graph.
cudaError_t LaunchTopkRouterFwd(cudaStream_t stream, const TopkRouterFwd& op);
cudaError_t LaunchTopkRouterBwd(cudaStream_t stream, const TopkRouterBwd& op);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_LAUNCH_H_
