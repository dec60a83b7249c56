// CUDA handlers of the top-k router; the operands and attributes stand in topk_router_ffi.h.
#ifndef JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_CUDA_H_
#define JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_CUDA_H_

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

XLA_FFI_DECLARE_HANDLER_SYMBOL(TopkRouterFwdCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TopkRouterBwdCuda);

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_CUDA_H_
