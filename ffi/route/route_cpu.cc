// CPU handlers of the router step: a task per slot forward, a task per run of rows backward.
#include "route/route_cpu.h"

#include <algorithm>
#include <cstdint>

#include "core/float_mode.h"
#include "core/numerics.h"
#include "core/parallel_for.h"
#include "route/route.h"
#include "route/route_ffi.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

constexpr int64_t kRowsPerTask = 64;

template <class Logit>
MOE_HOST void ComputeTask(const RoutePass& r, int64_t task) {
  internal::RouteScratch scratch;
  RouteSlot<Logit>(r, task / r.num_slots, task % r.num_slots, &scratch);
}

template <class Logit>
MOE_HOST void ComputeTask(const RouteBwd& r, int64_t task) {
  struct {
    internal::TopkRouterScratch row;
    float aux[kMaxExperts];
  } scratch;
  const int n = r.num_experts;
  const int topk = r.options.topk;
  const int64_t end = std::min((task + 1) * kRowsPerTask, r.batch * r.num_tokens);
  int64_t cotangents_of = -1;
  RouteCotangent cotangent = {};
  for (int64_t index = task * kRowsPerTask; index < end; ++index) {
    const int64_t item = index / r.num_tokens;
    const int64_t token = index % r.num_tokens;
    if (item != cotangents_of) {
      cotangent = RouteCotangents(r, item, scratch.aux);
      cotangents_of = item;
    }
    const auto at = [&](bool batched) { return batched ? index : token; };
    const Logit* d_weights = static_cast<const Logit*>(r.d_weights);
    if (d_weights != nullptr) d_weights += at(r.d_weights_batched) * topk;
    RouteBwdRow(static_cast<const Logit*>(r.logits) + at(r.logits_batched) * n,
                r.indices + at(r.indices_batched) * topk, d_weights,
                r.valid_mask == nullptr || r.valid_mask[at(r.valid_mask_batched)], cotangent, n,
                r.options, &scratch.row, static_cast<Logit*>(r.d_logits) + index * n);
  }
}

template <class Logit, class Op>
void TaskBaseline(const Op& op, int64_t task) {
  ComputeTask<Logit>(op, task);
}

#if defined(__x86_64__)
// The same operations in wider vectors, with the fused multiply-add as an instruction.
template <class Logit, class Op>
__attribute__((target("avx2,fma"))) void TaskAvx2(const Op& op, int64_t task) {
  ComputeTask<Logit>(op, task);
}
#endif

template <class Logit, class Op>
void RunTasks(ffi::ThreadPool& pool, const Op& op, int64_t num_tasks) {
  void (*compute)(const Op&, int64_t) = TaskBaseline<Logit, Op>;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    compute = TaskAvx2<Logit, Op>;
  }
#endif
  // The work of a row is that of reading it several times.
  const int64_t bytes = op.batch * op.num_tokens * op.num_experts * 16;
  ParallelFor(pool, num_tasks, bytes, [&op, compute](int64_t task) { compute(op, task); });
}

template <class Op>
void RunTasks(ffi::ThreadPool& pool, const Op& op, int64_t num_tasks) {
  switch (op.logits_type) {
    case ScoreType::kFloat32:
      return RunTasks<float>(pool, op, num_tasks);
    case ScoreType::kBFloat16:
      return RunTasks<BFloat16>(pool, op, num_tasks);
    case ScoreType::kFloat16:
      return RunTasks<Float16>(pool, op, num_tasks);
  }
}

void ComputePass(ffi::ThreadPool& pool, const RoutePass& pass) {
  const int64_t size = pass.batch * pass.num_experts;
  std::fill_n(pass.counts, size, 0);  // an empty array may be null
  if (pass.plain != nullptr) std::fill_n(pass.plain, size, 0);
  RunTasks(pool, pass, pass.batch * pass.num_slots);
}

void ComputePartials(ffi::ThreadPool& pool, const RoutePartials& r) {
  const int64_t n = r.num_experts;
  ParallelFor(pool, r.batch * r.num_slots, r.batch * r.num_slots * n * 8, [&r, n](int64_t index) {
    const int64_t offset = r.counts.batched ? index / r.num_slots * n : 0;
    r.partials[index] = PartialFromColumnSums(r.column_sums + index * n, n, r.counts, offset);
  });
}

void ComputeFinal(const RouteFinal& r) {
  IeeeFloatMode ieee;
  for (int64_t item = 0; item < r.batch; ++item) RouteLosses(r, item);
}

ffi::Error RouteFwdImpl(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> indices,
                        ffi::Result<ffi::AnyBuffer> counts, ffi::Result<ffi::AnyBuffer> plain,
                        ffi::Result<ffi::AnyBuffer> aux_loss, ffi::Result<ffi::AnyBuffer> z_loss,
                        ffi::Result<ffi::AnyBuffer> workspace, ffi::Dictionary attributes) {
  RoutePass pass;
  RoutePartials partials;
  RouteFinal final_sum;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRouteFwd(
      logits, rest, {*weights, *indices, *counts, *plain, *aux_loss, *z_loss, *workspace},
      attributes, &pass, &partials, &final_sum));
  ComputePass(pool, pass);
  if (pass.column_sums != nullptr) ComputePartials(pool, partials);
  ComputeFinal(final_sum);
  return ffi::Error::Success();
}

ffi::Error RoutePassImpl(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                         ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> indices,
                         ffi::Result<ffi::AnyBuffer> counts, ffi::Result<ffi::AnyBuffer> plain,
                         ffi::Result<ffi::AnyBuffer> column_sums,
                         ffi::Result<ffi::AnyBuffer> z_partials,
                         ffi::Result<ffi::AnyBuffer> row_stats, ffi::Dictionary attributes) {
  RoutePass pass;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRoutePass(
      logits, rest, {*weights, *indices, *counts, *plain, *column_sums, *z_partials, *row_stats},
      attributes, &pass));
  ComputePass(pool, pass);
  return ffi::Error::Success();
}

ffi::Error RoutePartialsImpl(ffi::ThreadPool pool, ffi::AnyBuffer column_sums,
                             ffi::AnyBuffer counts, ffi::Result<ffi::AnyBuffer> out) {
  RoutePartials partials;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRoutePartials(column_sums, counts, *out, &partials));
  ComputePartials(pool, partials);
  return ffi::Error::Success();
}

ffi::Error RouteFinalImpl(ffi::AnyBuffer aux_partials, ffi::AnyBuffer z_partials,
                          ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> aux_loss,
                          ffi::Result<ffi::AnyBuffer> z_loss, ffi::Dictionary attributes) {
  RouteFinal final_sum;
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseRouteFinal(aux_partials, z_partials, rest, *aux_loss, *z_loss, attributes, &final_sum));
  ComputeFinal(final_sum);
  return ffi::Error::Success();
}

ffi::Error RouteBwdImpl(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer indices,
                        ffi::AnyBuffer counts, ffi::AnyBuffer d_weights, ffi::AnyBuffer d_aux_loss,
                        ffi::AnyBuffer d_z_loss, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> d_logits, ffi::Dictionary attributes) {
  RouteBwd op;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRouteBwd(logits, indices, counts, d_weights, d_aux_loss,
                                            d_z_loss, rest, *d_logits, attributes, &op));
  RunTasks(pool, op, (op.batch * op.num_tokens + kRowsPerTask - 1) / kRowsPerTask);
  return ffi::Error::Success();
}

auto OnPool() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteFwdCpu, RouteFwdImpl, BindRouteFwd(OnPool()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(RoutePassCpu, RoutePassImpl, BindRoutePass(OnPool()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(RoutePartialsCpu, RoutePartialsImpl, BindRoutePartials(OnPool()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteFinalCpu, RouteFinalImpl, BindRouteFinal(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteBwdCpu, RouteBwdImpl, BindRouteBwd(OnPool()));

}  // namespace jax_moe_det
