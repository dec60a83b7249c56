// CUDA handlers of the auxiliary loss: checks, then a launcher.
#include "aux_loss/aux_loss_cuda.h"

#include <cuda_runtime_api.h>

#include <cstdint>

#include "aux_loss/aux_loss_ffi.h"
#include "aux_loss/aux_loss_launch.h"
#include "core/cuda_checks.h"
#include "core/ffi_checks.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

template <cudaError_t (*kLaunch)(cudaStream_t, const AuxLossPartials&, const AuxLossFinal&)>
ffi::Error AuxLossFwd(cudaStream_t stream, ffi::AnyBuffer probs, ffi::AnyBuffer counts,
                      ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> loss,
                      ffi::Result<ffi::AnyBuffer> workspace, int64_t num_experts, int64_t topk,
                      double coeff, double total_num_tokens) {
  AuxLossPartials partials;
  AuxLossFinal final_sum;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseAuxLossFwd(probs, counts, rest, loss, workspace, num_experts,
                                              topk, coeff, total_num_tokens, &partials,
                                              &final_sum));
  return FromCuda("aux_loss_fwd", kLaunch(stream, partials, final_sum));
}

ffi::Error AuxLossPartialsImpl(cudaStream_t stream, ffi::AnyBuffer probs, ffi::AnyBuffer counts,
                               ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                               int64_t rows_per_slot) {
  AuxLossPartials partials;
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseAuxLossPartials(probs, counts, rest, out, rows_per_slot, &partials));
  return FromCuda("aux_loss_partials", LaunchAuxLossPartials(stream, partials));
}

ffi::Error AuxLossFinalImpl(cudaStream_t stream, ffi::AnyBuffer partials, ffi::RemainingArgs rest,
                            ffi::Result<ffi::AnyBuffer> loss, int64_t num_experts, int64_t topk,
                            double coeff, double total_num_tokens) {
  AuxLossFinal final_sum;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseAuxLossFinal(partials, rest, loss, num_experts, topk, coeff,
                                                total_num_tokens, &final_sum));
  return FromCuda("aux_loss_final", LaunchAuxLossFinal(stream, final_sum));
}

ffi::Error AuxLossBwd(cudaStream_t stream, ffi::AnyBuffer counts, ffi::AnyBuffer d_loss,
                      ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> d_probs_row,
                      int64_t num_experts, int64_t topk, double coeff, double total_num_tokens) {
  AuxLossRow row;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseAuxLossBwd(counts, d_loss, rest, d_probs_row, num_experts, topk,
                                              coeff, total_num_tokens, &row));
  return FromCuda("aux_loss_bwd", LaunchAuxLossBwd(stream, row));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AuxLossFwdCuda, AuxLossFwd<LaunchAuxLossFwd>,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // probs
                                  .Arg<ffi::AnyBuffer>()  // tokens_per_expert
                                  .RemainingArgs()        // valid_mask, total_num_tokens
                                  .Ret<ffi::AnyBuffer>()  // loss
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("topk")
                                  .Attr<double>("coeff")
                                  .Attr<double>("total_num_tokens"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(AuxLossFwdAtomicCuda, AuxLossFwd<LaunchAuxLossFwdAtomic>,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // probs
                                  .Arg<ffi::AnyBuffer>()  // tokens_per_expert
                                  .RemainingArgs()        // valid_mask, total_num_tokens
                                  .Ret<ffi::AnyBuffer>()  // loss
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("topk")
                                  .Attr<double>("coeff")
                                  .Attr<double>("total_num_tokens"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(AuxLossPartialsCuda, AuxLossPartialsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // probs
                                  .Arg<ffi::AnyBuffer>()  // tokens_per_expert
                                  .RemainingArgs()        // valid_mask
                                  .Ret<ffi::AnyBuffer>()  // partials
                                  .Attr<int64_t>("rows_per_slot"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(AuxLossFinalCuda, AuxLossFinalImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // partials
                                  .RemainingArgs()        // total_num_tokens
                                  .Ret<ffi::AnyBuffer>()  // loss
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("topk")
                                  .Attr<double>("coeff")
                                  .Attr<double>("total_num_tokens"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(AuxLossBwdCuda, AuxLossBwd,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // tokens_per_expert
                                  .Arg<ffi::AnyBuffer>()  // d_loss
                                  .RemainingArgs()        // total_num_tokens
                                  .Ret<ffi::AnyBuffer>()  // d_probs_row
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("topk")
                                  .Attr<double>("coeff")
                                  .Attr<double>("total_num_tokens"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_moe_det
