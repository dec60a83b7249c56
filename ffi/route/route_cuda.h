// CUDA handlers of the router step; the operands and attributes stand in route_ffi.h.
#ifndef JAX_MOE_DET_FFI_ROUTE_ROUTE_CUDA_H_
#define JAX_MOE_DET_FFI_ROUTE_ROUTE_CUDA_H_

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteFwdCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RoutePassCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RoutePartialsCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteFinalCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteBwdCuda);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_ROUTE_ROUTE_CUDA_H_
