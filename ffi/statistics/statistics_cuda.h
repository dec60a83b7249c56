// CUDA handlers of the statistics; the operands stand in statistics_ffi.h.
#ifndef JAX_MOE_DET_FFI_STATISTICS_STATISTICS_CUDA_H_
#define JAX_MOE_DET_FFI_STATISTICS_STATISTICS_CUDA_H_

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

XLA_FFI_DECLARE_HANDLER_SYMBOL(RoutingStatsCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ExpertBiasUpdateCuda);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_STATISTICS_STATISTICS_CUDA_H_
