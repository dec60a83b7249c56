// CPU handlers of the auxiliary loss: a task per slot, then one fold.
#include "aux_loss/aux_loss_cpu.h"

#include <cstdint>

#include "aux_loss/aux_loss.h"
#include "aux_loss/aux_loss_ffi.h"
#include "core/float_mode.h"
#include "core/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

template <class Score>
MOE_HOST_DEVICE void ComputePartial(const AuxLossPartials& p, int64_t index) {
  const int64_t b = index / p.num_slots;
  const int64_t begin = index % p.num_slots * p.rows_per_slot;
  float partial = 0.0f;
  if (begin < p.num_tokens) {  // shapes of few tokens leave slots unused
    const int64_t rest = p.num_tokens - begin;
    const int64_t first_row = (p.probs_batched ? b * p.num_tokens : 0) + begin;
    const bool* mask = p.valid_mask;
    if (mask != nullptr) mask += (p.valid_mask_batched ? b * p.num_tokens : 0) + begin;
    partial = SlotPartial(static_cast<const Score*>(p.probs) + first_row * p.num_columns, mask,
                          rest < p.rows_per_slot ? rest : p.rows_per_slot, p.num_columns, p.counts,
                          p.counts.batched ? b * p.num_columns : 0);
  }
  p.partials[index] = partial;
}

using PartialFn = void (*)(const AuxLossPartials&, int64_t);

template <class Score>
void PartialBaseline(const AuxLossPartials& p, int64_t index) {
  ComputePartial<Score>(p, index);
}

#if defined(__x86_64__)
// The same operations in wider vectors, with the fused multiply-add as an instruction.
template <class Score>
__attribute__((target("avx2,fma"))) void PartialAvx2(const AuxLossPartials& p, int64_t index) {
  ComputePartial<Score>(p, index);
}
#endif

template <class Score>
PartialFn SelectPartial() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return PartialAvx2<Score>;
#endif
  return PartialBaseline<Score>;
}

void ComputePartials(ffi::ThreadPool& pool, const AuxLossPartials& p) {
  PartialFn partial = nullptr;
  int64_t score_bytes = 2;
  switch (p.score_type) {
    case ScoreType::kFloat32:
      partial = SelectPartial<float>();
      score_bytes = 4;
      break;
    case ScoreType::kBFloat16:
      partial = SelectPartial<BFloat16>();
      break;
    case ScoreType::kFloat16:
      partial = SelectPartial<Float16>();
      break;
  }
  ParallelFor(pool, p.batch * p.num_slots, p.batch * p.num_tokens * p.num_columns * score_bytes,
              [&p, partial](int64_t index) { partial(p, index); });
}

void ComputeFinal(const AuxLossFinal& f) {
  IeeeFloatMode ieee;
  for (int64_t b = 0; b < f.batch; ++b) {
    f.loss[b] = LossFromPartials(f.partials + b * f.num_slots, f.num_slots, f.scale,
                                 Total(f.scale.total_num_tokens, b));
  }
}

template <class Score>
void ComputeRow(const AuxLossRow& r) {
  IeeeFloatMode ieee;
  Score* out = static_cast<Score*>(r.d_probs_row);
  for (int64_t b = 0; b < r.batch; ++b) {
    const double total = Total(r.scale.total_num_tokens, b);
    const float d_loss = r.d_loss[r.d_loss_batched ? b : 0];
    const int64_t offset = r.counts.batched ? b * r.num_columns : 0;
    for (int64_t e = 0; e < r.num_columns; ++e) {
      *out++ = GradientElement<Score>(r.scale, total, Count(r.counts, offset + e), d_loss);
    }
  }
}

ffi::Error AuxLossFwd(ffi::ThreadPool pool, ffi::AnyBuffer probs, ffi::AnyBuffer counts,
                      ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> loss,
                      ffi::Result<ffi::AnyBuffer> workspace, int64_t num_experts, int64_t topk,
                      double coeff, double total_num_tokens) {
  AuxLossPartials partials;
  AuxLossFinal final_sum;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseAuxLossFwd(probs, counts, rest, loss, workspace, num_experts,
                                              topk, coeff, total_num_tokens, &partials,
                                              &final_sum));
  ComputePartials(pool, partials);
  ComputeFinal(final_sum);
  return ffi::Error::Success();
}

ffi::Error AuxLossPartialsImpl(ffi::ThreadPool pool, ffi::AnyBuffer probs, ffi::AnyBuffer counts,
                               ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                               int64_t rows_per_slot) {
  AuxLossPartials partials;
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseAuxLossPartials(probs, counts, rest, out, rows_per_slot, &partials));
  ComputePartials(pool, partials);
  return ffi::Error::Success();
}

ffi::Error AuxLossFinalImpl(ffi::AnyBuffer partials, ffi::RemainingArgs rest,
                            ffi::Result<ffi::AnyBuffer> loss, int64_t num_experts, int64_t topk,
                            double coeff, double total_num_tokens) {
  AuxLossFinal final_sum;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseAuxLossFinal(partials, rest, loss, num_experts, topk, coeff,
                                                total_num_tokens, &final_sum));
  ComputeFinal(final_sum);
  return ffi::Error::Success();
}

ffi::Error AuxLossBwd(ffi::AnyBuffer counts, ffi::AnyBuffer d_loss, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> d_probs_row, int64_t num_experts, int64_t topk,
                      double coeff, double total_num_tokens) {
  AuxLossRow row;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseAuxLossBwd(counts, d_loss, rest, d_probs_row, num_experts, topk,
                                              coeff, total_num_tokens, &row));
  switch (row.score_type) {
    case ScoreType::kFloat32:
      ComputeRow<float>(row);
      break;
    case ScoreType::kBFloat16:
      ComputeRow<BFloat16>(row);
      break;
    case ScoreType::kFloat16:
      ComputeRow<Float16>(row);
      break;
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AuxLossFwdCpu, AuxLossFwd,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // probs
                                  .Arg<ffi::AnyBuffer>()  // tokens_per_expert
                                  .RemainingArgs()        // valid_mask, total_num_tokens
                                  .Ret<ffi::AnyBuffer>()  // loss
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("topk")
                                  .Attr<double>("coeff")
                                  .Attr<double>("total_num_tokens"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(AuxLossPartialsCpu, AuxLossPartialsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // probs
                                  .Arg<ffi::AnyBuffer>()  // tokens_per_expert
                                  .RemainingArgs()        // valid_mask
                                  .Ret<ffi::AnyBuffer>()  // partials
                                  .Attr<int64_t>("rows_per_slot"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(AuxLossFinalCpu, AuxLossFinalImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // partials
                                  .RemainingArgs()        // total_num_tokens
                                  .Ret<ffi::AnyBuffer>()  // loss
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("topk")
                                  .Attr<double>("coeff")
                                  .Attr<double>("total_num_tokens"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(AuxLossBwdCpu, AuxLossBwd,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // tokens_per_expert
                                  .Arg<ffi::AnyBuffer>()  // d_loss
                                  .RemainingArgs()        // total_num_tokens
                                  .Ret<ffi::AnyBuffer>()  // d_probs_row
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("topk")
                                  .Attr<double>("coeff")
                                  .Attr<double>("total_num_tokens"));

}  // namespace jax_moe_det
