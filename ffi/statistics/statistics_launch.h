// Launchers of the statistics: raw structs and a stream, so that the .cu file needs no FFI header.
#ifndef JAX_MOE_DET_FFI_STATISTICS_STATISTICS_LAUNCH_H_
#define JAX_MOE_DET_FFI_STATISTICS_STATISTICS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "statistics/statistics.h"

namespace jax_moe_det {

// Neither allocates or synchronises; both may be captured into a graph.
cudaError_t LaunchRoutingStats(cudaStream_t stream, const RoutingStatsOp& op);
cudaError_t LaunchExpertBiasUpdate(cudaStream_t stream, const ExpertBiasUpdate& op);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_STATISTICS_STATISTICS_LAUNCH_H_
