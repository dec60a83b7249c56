// Launchers of the router step: raw structs and a stream, so that the .cu files need no FFI header.
#ifndef JAX_MOE_DET_FFI_ROUTE_ROUTE_LAUNCH_H_
#define JAX_MOE_DET_FFI_ROUTE_ROUTE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "route/route.h"

namespace jax_moe_det {

// None allocates or synchronises; all may be captured into a graph. After LaunchRoutePass the
// next two may follow as its dependents: each waits for the kernel before it by itself.
cudaError_t LaunchRoutePass(cudaStream_t stream, const RoutePass& pass);
cudaError_t LaunchRoutePartials(cudaStream_t stream, const RoutePartials& partials);
cudaError_t LaunchRouteFinal(cudaStream_t stream, const RouteFinal& final_sum);
cudaError_t LaunchRouteBwd(cudaStream_t stream, const RouteBwd& op);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_ROUTE_ROUTE_LAUNCH_H_
