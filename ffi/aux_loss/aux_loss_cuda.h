// CUDA handlers of the auxiliary loss; the operands and attributes stand in aux_loss_ffi.h.
#ifndef JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_CUDA_H_
#define JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_CUDA_H_

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

XLA_FFI_DECLARE_HANDLER_SYMBOL(AuxLossFwdCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AuxLossFwdAtomicCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AuxLossPartialsCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AuxLossFinalCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AuxLossBwdCuda);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_CUDA_H_
