// CPU handlers of the statistics; the operands stand in statistics_ffi.h.
#ifndef JAX_MOE_DET_FFI_STATISTICS_STATISTICS_CPU_H_
#define JAX_MOE_DET_FFI_STATISTICS_STATISTICS_CPU_H_

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

XLA_FFI_DECLARE_HANDLER_SYMBOL(RoutingStatsCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ExpertBiasUpdateCpu);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_STATISTICS_STATISTICS_CPU_H_
