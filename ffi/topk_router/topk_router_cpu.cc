// CPU handlers of the top-k router: a task per run of rows.
#include "topk_router/topk_router_cpu.h"

#include <algorithm>
#include <cstdint>

#include "core/numerics.h"
#include "core/parallel_for.h"
#include "topk_router/topk_router.h"
#include "topk_router/topk_router_ffi.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

constexpr int64_t kRowsPerTask = 64;

// The batch item and token of a row, numbered through the whole batch.
struct Row {
  int64_t index, item, token;
};

template <class Logit>
MOE_HOST void ComputeRow(const TopkRouterFwd& op, Row row, internal::TopkRouterScratch* scratch) {
  const int n = op.num_experts;
  const auto at = [&](bool batched) { return batched ? row.index : row.token; };
  const float* bias = op.expert_bias;
  if (bias != nullptr && op.expert_bias_batched) bias += row.item * n;
  const bool valid = op.valid_mask == nullptr || op.valid_mask[at(op.valid_mask_batched)];
  const int64_t out_bytes = op.options.aux_scores ? sizeof(float) : sizeof(Logit);
  TopkRouterFwdRow(static_cast<const Logit*>(op.logits) + at(op.logits_batched) * n, bias, valid, n,
                   op.options, scratch, static_cast<char*>(op.out) + row.index * n * out_bytes,
                   op.routing_map + row.index * MapBytes(n, op.options.bitmap));
}

template <class Logit>
MOE_HOST void ComputeRow(const TopkRouterBwd& op, Row row, internal::TopkRouterScratch* scratch) {
  const int n = op.num_experts;
  const auto at = [&](bool batched) { return batched ? row.index : row.token; };
  const uint8_t* map = op.routing_map;
  if (map != nullptr) map += at(op.routing_map_batched) * MapBytes(n, op.options.bitmap);
  const bool valid = op.valid_mask == nullptr || op.valid_mask[at(op.valid_mask_batched)];
  const int64_t out_bytes = op.options.aux_scores ? sizeof(float) : sizeof(Logit);
  TopkRouterBwdRow(static_cast<const Logit*>(op.logits) + at(op.logits_batched) * n,
                   static_cast<const char*>(op.d_out) + at(op.d_out_batched) * n * out_bytes, map,
                   valid, n, op.options, scratch, static_cast<Logit*>(op.d_logits) + row.index * n);
}

template <class Logit, class Op>
MOE_HOST void ComputeRows(const Op& op, int64_t task) {
  internal::TopkRouterScratch scratch;
  const int64_t end = std::min((task + 1) * kRowsPerTask, op.batch * op.num_tokens);
  for (int64_t row = task * kRowsPerTask; row < end; ++row) {
    ComputeRow<Logit>(op, {row, row / op.num_tokens, row % op.num_tokens}, &scratch);
  }
}

template <class Logit, class Op>
void RowsBaseline(const Op& op, int64_t task) {
  ComputeRows<Logit>(op, task);
}

#if defined(__x86_64__)
// The same operations in wider vectors, with the fused multiply-add as an instruction.
template <class Logit, class Op>
__attribute__((target("avx2,fma"))) void RowsAvx2(const Op& op, int64_t task) {
  ComputeRows<Logit>(op, task);
}
#endif

template <class Logit, class Op>
void ComputeAll(ffi::ThreadPool& pool, const Op& op) {
  void (*rows)(const Op&, int64_t) = RowsBaseline<Logit, Op>;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) rows = RowsAvx2<Logit, Op>;
#endif
  const int64_t num_rows = op.batch * op.num_tokens;
  // The work of a row is that of reading it several times.
  const int64_t bytes = num_rows * op.num_experts * 16;
  ParallelFor(pool, (num_rows + kRowsPerTask - 1) / kRowsPerTask, bytes,
              [&op, rows](int64_t task) { rows(op, task); });
}

template <class Op>
ffi::Error Compute(ffi::ThreadPool& pool, const Op& op) {
  switch (op.logits_type) {
    case ScoreType::kFloat32:
      ComputeAll<float>(pool, op);
      break;
    case ScoreType::kBFloat16:
      ComputeAll<BFloat16>(pool, op);
      break;
    case ScoreType::kFloat16:
      ComputeAll<Float16>(pool, op);
      break;
  }
  return ffi::Error::Success();
}

ffi::Error TopkRouterFwdImpl(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                             ffi::Result<ffi::AnyBuffer> out,
                             ffi::Result<ffi::AnyBuffer> routing_map, ffi::Dictionary attributes) {
  TopkRouterFwd op;
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseTopkRouterFwd(logits, rest, *out, *routing_map, attributes, &op));
  return Compute(pool, op);
}

ffi::Error TopkRouterBwdImpl(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer d_out,
                             ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> d_logits,
                             ffi::Dictionary attributes) {
  TopkRouterBwd op;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseTopkRouterBwd(logits, d_out, rest, *d_logits, attributes, &op));
  return Compute(pool, op);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopkRouterFwdCpu, TopkRouterFwdImpl,
                              BindTopkRouterFwd(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopkRouterBwdCpu, TopkRouterBwdImpl,
                              BindTopkRouterBwd(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace jax_moe_det
