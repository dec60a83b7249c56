// CUDA handlers of the top-k router: checks, then a launcher.
#include "topk_router/topk_router_cuda.h"

#include <cuda_runtime_api.h>

#include "core/cuda_checks.h"
#include "core/ffi_checks.h"
#include "topk_router/topk_router_ffi.h"
#include "topk_router/topk_router_launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

ffi::Error TopkRouterFwdImpl(cudaStream_t stream, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                             ffi::Result<ffi::AnyBuffer> out,
                             ffi::Result<ffi::AnyBuffer> routing_map, ffi::Dictionary attributes) {
  TopkRouterFwd op;
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseTopkRouterFwd(logits, rest, *out, *routing_map, attributes, &op));
  return FromCuda("topk_router_fwd", LaunchTopkRouterFwd(stream, op));
}

ffi::Error TopkRouterBwdImpl(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer d_out,
                             ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> d_logits,
                             ffi::Dictionary attributes) {
  TopkRouterBwd op;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseTopkRouterBwd(logits, d_out, rest, *d_logits, attributes, &op));
  return FromCuda("topk_router_bwd", LaunchTopkRouterBwd(stream, op));
}

auto OnStream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopkRouterFwdCuda, TopkRouterFwdImpl, BindTopkRouterFwd(OnStream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(TopkRouterBwdCuda, TopkRouterBwdImpl, BindTopkRouterBwd(OnStream()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_moe_det
