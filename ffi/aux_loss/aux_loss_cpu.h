// CPU handlers of the auxiliary loss; the operands and attributes stand in aux_loss_ffi.h.
#ifndef JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_CPU_H_
#define JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_CPU_H_

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

XLA_FFI_DECLARE_HANDLER_SYMBOL(AuxLossFwdCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AuxLossPartialsCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AuxLossFinalCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AuxLossBwdCpu);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_CPU_H_
