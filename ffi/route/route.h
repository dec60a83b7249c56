// The router step in one pass over the logits: choice, weights, counts and both losses; and its
// gradient in one more. No FFI, no CUDA runtime.
//
//   choice, weights  as in topk_router/topk_router.h
//   aux loss         of aux_loss/aux_loss.h on the aux scores of topk_router.h, in its order: a
//                    slot's column sums are kept until the counts are known
//   z loss           z_loss_coeff / N * sum over valid rows of lse^2, lse = max + log1p(S - 1), S =
//                    RowSum(exp(x - max)). The squares are summed like one more column of the aux
//                    loss: slots, lanes, chunks, fold (core/slots.h), rounded to float32 in each
//                    slot; then the adjacent-pair float64 fold of the 256 partials times
//                    z_loss_coeff / N in float64, rounded once to float32.
//
// Gradient of a row, of
//   a[e]     the aux loss's gradient of an aux score, float32, of aux_loss.h
//   zg       h * lse, with h = float32(z_loss_coeff / N * 2 * d_z_loss) in float64, left to right
//   g        scale * d_weight of each chosen expert
// in two parts:
//   chosen   for each choice i, in order of selection, the gradient of topk_router.h with ListSum
//            over the choices in that order: c_i. Softmax before top-k: c_i = g_i. sparse[e] = +0 +
//            the c_i of expert e, in order (a replayed choice may repeat an expert).
//   dense    softmax kinds: p * ((G - dot) + zg), dot = RowSum(p * G), G = a, or a + sparse for the
//            softmax before top-k; p of the softmax over all experts
//            sigmoid kinds: (slope * n) * (a - RowSum((s * n) * a)) + p * zg
//   result   dense + sparse; softmax before top-k: dense
// A loss that is switched off (coefficient 0, N = 0, or no cotangent) has a = +0 and zg = +0, and
// where no dense part is left it is +0.
#ifndef JAX_MOE_DET_FFI_ROUTE_ROUTE_H_
#define JAX_MOE_DET_FFI_ROUTE_ROUTE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "aux_loss/aux_loss.h"
#include "core/exact_math.h"
#include "core/numerics.h"
#include "core/slots.h"
#include "topk_router/topk_router.h"

namespace jax_moe_det {

// Operands are [1, ...] or [batch, ...], dense and row-major. The pass over one shard's logits.
struct RoutePass {
  ScoreType logits_type;
  const void* logits;  // [num_tokens, num_experts]
  bool logits_batched;
  const float* expert_bias;  // [num_experts]; null: none
  bool expert_bias_batched;
  const bool* valid_mask;  // [num_tokens]; null: all rows are valid
  bool valid_mask_batched;
  const int32_t* replay;  // [num_tokens, topk]: the choice; null: the router's own
  bool replay_batched;
  int64_t batch;
  int64_t num_tokens;
  int num_experts;
  int64_t rows_per_slot;  // of the whole loss, of which these rows may be one shard
  int64_t num_slots;
  TopkRouterOptions options;
  void* weights;       // [batch, num_tokens, topk], logits' dtype
  int32_t* indices;    // [batch, num_tokens, topk]; num_experts: no expert
  int32_t* counts;     // [batch, num_experts]
  int32_t* plain;      // [batch, num_experts]: counts of the topk aux scores; null: not wanted
  float* column_sums;  // [batch, num_slots, num_experts]; null: no aux loss
  float* z_partials;   // [batch, num_slots]; null: no z loss
  float* row_stats;    // [batch, num_tokens, 3], scratch of rows that do not fit registers; or null
};

// Column sums and counts to the aux loss's partials.
struct RoutePartials {
  const float* column_sums;  // [batch, num_slots, num_experts]
  AuxLossCounts counts;
  int64_t batch;
  int64_t num_slots;
  int num_experts;
  float* partials;  // [batch, num_slots]
};

struct RouteFinal {
  const float* aux_partials;  // [batch, num_slots]; null: the loss is +0
  const float* z_partials;    // [batch, num_slots]; null: the loss is +0
  int64_t batch;
  int64_t num_slots;
  AuxLossScale scale;
  double z_loss_coeff;
  float* aux_loss;  // [batch]
  float* z_loss;    // [batch]
};

struct RouteBwd {
  ScoreType logits_type;
  const void* logits;
  bool logits_batched;
  const int32_t* indices;  // of the forward
  bool indices_batched;
  const void* d_weights;  // [num_tokens, topk], logits' dtype; null: no cotangent
  bool d_weights_batched;
  const bool* valid_mask;
  bool valid_mask_batched;
  AuxLossCounts counts;     // of the aux loss
  const float* d_aux_loss;  // [1] or [batch]; null: no cotangent
  bool d_aux_loss_batched;
  const float* d_z_loss;
  bool d_z_loss_batched;
  int64_t batch;
  int64_t num_tokens;
  int num_experts;
  bool distinct;  // no expert is chosen twice by a token
  TopkRouterOptions options;
  AuxLossScale scale;
  double z_loss_coeff;
  void* d_logits;  // [batch, num_tokens, num_experts]
};

// Scratch of the whole op, for each batch item: column sums and both losses' partials, and three
// numbers for each token where the CUDA kernel does not keep rows in registers. `data` null: the
// query fills the size and nothing runs.
struct RouteWorkspace {
  float* data;
  int64_t num_elements;
};

inline int64_t RouteRowStats(int64_t num_tokens, int num_experts, const TopkRouterOptions& o) {
  return FitsRegisters(num_experts, o) ? 0 : 3 * num_tokens;
}

inline void RouteWorkspaceQuery(int64_t num_tokens, int num_experts, const TopkRouterOptions& o,
                                RouteWorkspace* workspace) {
  workspace->num_elements =
      int64_t{kSlots} * (num_experts + 2) + RouteRowStats(num_tokens, num_experts, o);
}

MOE_HOST_DEVICE float LogSumExp(float max, float sum) { return max + Log1p(sum - 1.0f); }

MOE_HOST_DEVICE bool IsZeroZ(double z_loss_coeff, double total_num_tokens) {
  return z_loss_coeff == 0.0 || total_num_tokens == 0.0;
}

MOE_HOST_DEVICE float ZLossFromSum(double z_loss_coeff, double total_num_tokens, double sum) {
  if (IsZeroZ(z_loss_coeff, total_num_tokens)) return 0.0f;
  return CanonicalNan(static_cast<float>(sum * (z_loss_coeff / total_num_tokens)));
}

// h of the gradient.
MOE_HOST_DEVICE float ZLossSlope(double z_loss_coeff, double total_num_tokens, float d_z_loss) {
  return static_cast<float>(z_loss_coeff / total_num_tokens * 2.0 * static_cast<double>(d_z_loss));
}

// The parts of one row's gradient that do not depend on the row.
struct RouteCotangent {
  bool has_aux;
  bool has_z;
  const float* aux;  // a[num_experts], where has_aux
  float z;           // h
};

// ---- The loops of one slot and one row, which the CPU backend runs.

namespace internal {

struct RouteScratch {
  TopkRouterScratch row;
  float aux[kMaxExperts];
  float chunk[kMaxExperts];
  double lane[kMaxExperts];
  // Sums of lanes that wait for their partner in the fold, a row each: rows of more than 128
  // experts have 16 lanes.
  float waiting[5 * kMaxExperts];
  float z_waiting[8];
};

// The row in s->row.logit: aux scores in s->aux and the return value's lse^2, where wanted.
MOE_HOST float RowLosses(const float* score, int n, const TopkRouterOptions& o, bool wants_aux,
                         bool wants_z, RouteScratch* s) {
  SoftmaxStats stats = s->row.softmax;
  if (o.kind == ScoreKind::kSoftmax) {
    if (wants_aux) std::memcpy(s->aux, score, n * sizeof(float));
  } else if (o.kind == ScoreKind::kSoftmaxAfterTopk || wants_z) {
    stats = RowSoftmax(s->row.logit, n, s->aux);
  }
  if (!IsSoftmax(o.kind) && wants_aux) NormalizeRow(score, n, o.eps, s->aux);
  if (!wants_z) return 0.0f;
  const float lse = LogSumExp(stats.max, stats.sum);
  return lse * lse;
}

}  // namespace internal

// One slot of one batch item: its rows' outputs, its column sums and partial. Adds to the counts.
template <class Logit>
MOE_HOST void RouteSlot(const RoutePass& r, int64_t item, int64_t slot, internal::RouteScratch* s) {
  const TopkRouterOptions& o = r.options;
  const int n = r.num_experts;
  const int64_t begin = slot * r.rows_per_slot;
  const int64_t num_rows = std::max(int64_t{0}, std::min(r.rows_per_slot, r.num_tokens - begin));
  const bool wants_aux = r.column_sums != nullptr;
  const bool wants_z = r.z_partials != nullptr;
  const float* bias = r.expert_bias;
  if (bias != nullptr && r.expert_bias_batched) bias += item * n;
  TopkRouterOptions plain_options = o;
  plain_options.num_groups = 1;

  const int lanes = NumLanes(n);
  int used = lanes;  // lanes without rows are +0
  while (used / 2 >= num_rows && used > 1) used /= 2;
  int waiting = 0;
  for (int leaf = 0; leaf < used; ++leaf) {
    // Folding by halves joins the lanes whose numbers differ in the highest bit first: depth
    // first, that is the order of the lanes' mirrored bits.
    int l = 0;
    for (int bit = 1, mirrored = used / 2; bit < used; bit *= 2, mirrored /= 2) {
      if (leaf & bit) l |= mirrored;
    }
    for (int e = 0; e < n; ++e) s->chunk[e] = 0.0f;
    for (int e = 0; e < n; ++e) s->lane[e] = 0.0;
    float z_chunk = 0.0f;
    double z_lane = 0.0;
    int in_chunk = 0;
    for (int64_t row = l; row < num_rows; row += lanes) {
      const int64_t token = begin + row;
      const int64_t index = item * r.num_tokens + token;
      const auto at = [&](bool batched) { return batched ? index : token; };
      Logit* weights = static_cast<Logit*>(r.weights) + index * o.topk;
      int32_t* indices = r.indices + index * o.topk;
      const bool valid = r.valid_mask == nullptr || r.valid_mask[at(r.valid_mask_batched)];
      if (!valid) {
        for (int i = 0; i < o.topk; ++i) {
          indices[i] = n;
          RoundTo(0.0f, weights + i);
        }
      } else {
        internal::LoadRow(static_cast<const Logit*>(r.logits) + at(r.logits_batched) * n, n,
                          s->row.logit);
        const float* score = internal::RowScores(o.kind, n, &s->row);
        if (r.replay != nullptr) {
          std::memcpy(s->row.chosen, r.replay + at(r.replay_batched) * o.topk,
                      o.topk * sizeof(int32_t));
        } else {
          internal::SelectExperts(score, bias, n, o, &s->row);
        }
        const float* weight = internal::RowWeights(score, n, o, &s->row);
        for (int i = 0; i < o.topk; ++i) {
          RoundTo(weight[i], weights + i);
          const bool is_expert = IsExpert(s->row.chosen[i], n);
          indices[i] = is_expert ? s->row.chosen[i] : n;
          if (is_expert) {
            __atomic_fetch_add(r.counts + item * n + indices[i], 1, __ATOMIC_RELAXED);
          }
        }
        if (wants_aux || wants_z) {
          z_chunk += internal::RowLosses(score, n, o, wants_aux, wants_z, s);
        }
        if (wants_aux) {
          for (int e = 0; e < n; ++e) s->chunk[e] = s->chunk[e] + s->aux[e];
        }
        if (r.plain != nullptr) {
          internal::SelectExperts(s->aux, nullptr, n, plain_options, &s->row);
          for (int i = 0; i < o.topk; ++i) {
            __atomic_fetch_add(r.plain + item * n + s->row.chosen[i], 1, __ATOMIC_RELAXED);
          }
        }
      }
      if (++in_chunk == kChunk || row + lanes >= num_rows) {
        for (int e = 0; e < n; ++e) {
          s->lane[e] = s->lane[e] + static_cast<double>(s->chunk[e]);
          s->chunk[e] = 0.0f;
        }
        z_lane = z_lane + static_cast<double>(z_chunk);
        z_chunk = 0.0f;
        in_chunk = 0;
      }
    }
    float* top = s->waiting + int64_t{waiting} * n;
    for (int e = 0; e < n; ++e) top[e] = static_cast<float>(s->lane[e]);
    s->z_waiting[waiting++] = static_cast<float>(z_lane);
    for (int done = leaf; done & 1; done /= 2) {
      --waiting;
      float* low = s->waiting + int64_t{waiting - 1} * n;
      const float* high = low + n;
      for (int e = 0; e < n; ++e) low[e] = low[e] + high[e];
      s->z_waiting[waiting - 1] = s->z_waiting[waiting - 1] + s->z_waiting[waiting];
    }
  }
  if (wants_aux) {
    std::memcpy(r.column_sums + (item * r.num_slots + slot) * n, s->waiting, n * sizeof(float));
  }
  if (wants_z) r.z_partials[item * r.num_slots + slot] = CanonicalNan(s->z_waiting[0]);
}

MOE_HOST void RouteLosses(const RouteFinal& r, int64_t item) {
  const double total = Total(r.scale.total_num_tokens, item);
  r.aux_loss[item] = 0.0f;
  r.z_loss[item] = 0.0f;
  if (r.aux_partials != nullptr) {
    r.aux_loss[item] =
        LossFromPartials(r.aux_partials + item * r.num_slots, r.num_slots, r.scale, total);
  }
  if (r.z_partials != nullptr) {
    double sums[kSlots];
    for (int64_t s = 0; s < kSlots; ++s) {
      sums[s] = s < r.num_slots ? static_cast<double>(r.z_partials[item * r.num_slots + s]) : 0.0;
    }
    r.z_loss[item] = ZLossFromSum(r.z_loss_coeff, total, FoldAdjacentPairs(sums, kSlots));
  }
}

// The row-independent cotangents of an item; `aux` is room for a[num_experts].
MOE_HOST RouteCotangent RouteCotangents(const RouteBwd& r, int64_t item, float* aux) {
  const double total = Total(r.scale.total_num_tokens, item);
  RouteCotangent out = {};
  out.has_aux = r.d_aux_loss != nullptr && !IsZero(r.scale, total);
  out.has_z = r.d_z_loss != nullptr && !IsZeroZ(r.z_loss_coeff, total);
  out.aux = aux;
  if (out.has_aux) {
    const float d_loss = r.d_aux_loss[r.d_aux_loss_batched ? item : 0];
    const int64_t offset = r.counts.batched ? item * r.num_experts : 0;
    for (int e = 0; e < r.num_experts; ++e) {
      aux[e] = GradientElement<float>(r.scale, total, Count(r.counts, offset + e), d_loss);
    }
  }
  if (out.has_z) {
    out.z = ZLossSlope(r.z_loss_coeff, total, r.d_z_loss[r.d_z_loss_batched ? item : 0]);
  }
  return out;
}

// `d_weights` null: no cotangent.
template <class Logit>
MOE_HOST void RouteBwdRow(const Logit* logits, const int32_t* indices, const Logit* d_weights,
                          bool valid, const RouteCotangent& cotangent, int num_experts,
                          const TopkRouterOptions& o, internal::TopkRouterScratch* s,
                          Logit* d_logits) {
  const int n = num_experts;
  if (!valid) {
    for (int e = 0; e < n; ++e) RoundTo(0.0f, d_logits + e);
    return;
  }
  float* x = s->logit;
  float* sparse = s->by_rank;
  internal::LoadRow(logits, n, x);
  for (int e = 0; e < n; ++e) sparse[e] = 0.0f;
  if (d_weights != nullptr) {
    // The choices' scores in s->score, their g and then c in s->gradient; +0 where there is none.
    float* p = s->score;
    float* g = s->gradient;
    float* terms = s->term;
    float max = -__builtin_huge_valf();
    for (int i = 0; i < o.topk; ++i) {
      const bool is_expert = IsExpert(indices[i], n);
      g[i] = is_expert ? o.scaling_factor * ToFloat(d_weights[i]) : 0.0f;
      if (is_expert) max = MaxOrNan(max, x[indices[i]]);
    }
    if (o.kind == ScoreKind::kSoftmaxAfterTopk) {
      for (int i = 0; i < o.topk; ++i) {
        p[i] = IsExpert(indices[i], n) ? ExpNonPositive(x[indices[i]] - max) : 0.0f;
        terms[i] = p[i];
      }
      const float inverse = 1.0f / internal::ListSum(terms, o.topk);
      for (int i = 0; i < o.topk; ++i) {
        p[i] = IsExpert(indices[i], n) ? p[i] * inverse : 0.0f;
        terms[i] = p[i] * g[i];
      }
      const float dot = internal::ListSum(terms, o.topk);
      for (int i = 0; i < o.topk; ++i) g[i] = SoftmaxGradient(p[i], g[i], dot);
    } else if (!IsSoftmax(o.kind)) {
      for (int i = 0; i < o.topk; ++i) {
        p[i] = IsExpert(indices[i], n) ? Score(o.kind, x[indices[i]]) : 0.0f;
        terms[i] = p[i];
      }
      float factor = 1.0f;
      float dot = 0.0f;
      if (o.topk > 1) {
        factor = NormalizingFactor(internal::ListSum(terms, o.topk), o.eps);
        for (int i = 0; i < o.topk; ++i) {
          terms[i] = IsExpert(indices[i], n) ? p[i] * factor * g[i] : 0.0f;
        }
        dot = internal::ListSum(terms, o.topk);
      }
      for (int i = 0; i < o.topk; ++i) {
        if (!IsExpert(indices[i], n)) continue;
        const float slope = ScoreSlope(o.kind, x[indices[i]]);
        g[i] =
            o.topk > 1 ? NormalizedGradient(slope, factor, g[i], dot) : CanonicalNan(slope * g[i]);
      }
    }
    for (int i = 0; i < o.topk; ++i) {
      if (IsExpert(indices[i], n)) sparse[indices[i]] = sparse[indices[i]] + g[i];
    }
  }
  const bool in_softmax = o.kind == ScoreKind::kSoftmax;  // sparse goes through the softmax
  float* dense = s->gradient;
  for (int e = 0; e < n; ++e) dense[e] = 0.0f;
  float* p = s->score;
  float* terms = s->term;
  if (!IsSoftmax(o.kind) && cotangent.has_aux) {
    for (int e = 0; e < n; ++e) p[e] = Score(o.kind, x[e]);
    const float factor = NormalizingFactor(internal::RowSum(p, n), o.eps);
    for (int e = 0; e < n; ++e) terms[e] = p[e] * factor * cotangent.aux[e];
    const float dot = internal::RowSum(terms, n);
    for (int e = 0; e < n; ++e) {
      dense[e] = NormalizedGradient(ScoreSlope(o.kind, x[e]), factor, cotangent.aux[e], dot);
    }
  }
  const bool wants_softmax =
      cotangent.has_z ||
      (IsSoftmax(o.kind) && (cotangent.has_aux || (in_softmax && d_weights != nullptr)));
  if (wants_softmax) {
    const internal::SoftmaxStats stats = internal::RowSoftmax(x, n, p);
    const float zg = cotangent.has_z ? cotangent.z * LogSumExp(stats.max, stats.sum) : 0.0f;
    if (IsSoftmax(o.kind)) {
      for (int e = 0; e < n; ++e) {
        dense[e] = cotangent.has_aux ? cotangent.aux[e] : 0.0f;
        if (in_softmax) dense[e] = dense[e] + sparse[e];
        terms[e] = p[e] * dense[e];
      }
      const float dot = internal::RowSum(terms, n);
      for (int e = 0; e < n; ++e) dense[e] = p[e] * ((dense[e] - dot) + zg);
    } else {
      for (int e = 0; e < n; ++e) dense[e] = dense[e] + p[e] * zg;
    }
  }
  for (int e = 0; e < n; ++e) {
    RoundTo(in_softmax ? dense[e] : dense[e] + sparse[e], d_logits + e);
  }
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_ROUTE_ROUTE_H_
