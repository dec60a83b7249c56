// CPU handlers of the router step; the operands and attributes stand in route_ffi.h.
#ifndef JAX_MOE_DET_FFI_ROUTE_ROUTE_CPU_H_
#define JAX_MOE_DET_FFI_ROUTE_ROUTE_CPU_H_

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteFwdCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RoutePassCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RoutePartialsCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteFinalCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteBwdCpu);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_ROUTE_ROUTE_CPU_H_
