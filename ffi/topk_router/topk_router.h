// The top-k router: scores, selection, weights and their gradient. No FFI, no CUDA runtime.
//
// A row is one token's logits, converted to float32. Rows do not meet.
//
//   scores     softmax     p = e * (1 / S), e = exp(x - max), S = RowSum(e)
//              sigmoid, sqrtsoftplus: core/exact_math.h
//   selection  the topk highest of score + bias (softmax after top-k: logit + bias) in the order of
//              core/selection_key.h, of the experts of the kept groups
//   group      the adjacent-pair tree of its highest selection values, descending; the group_topk
//              highest groups, in the same order, are kept
//   weights    softmax after top-k   (e * (1 / S)) * scale over the chosen, S = ListSum(e)
//              softmax               p * scale
//              sigmoid kinds         (s * NormalizingFactor(ListSum(s), eps)) * scale; for topk = 1
//                                    s * scale. One NaN among a row's weights makes them all NaN.
//   aux scores softmax               p
//              sigmoid kinds         s * NormalizingFactor(RowSum(s), eps)
//
// Two orders of float32 sums:
//   RowSum     column e goes to lane e mod 128, ascending, from +0; the 128 lanes fold over
//              adjacent pairs. Absent columns add +0, so they may be skipped.
//   ListSum    of a list of values: adjacent pairs, padded with +0 to a power of two. The lists of
//              the forward are in order of selection, those of the gradient in order of column.
//
// Gradient, with g = scale * d_weight at the chosen experts and +0 elsewhere (aux scores: g =
// d_score everywhere). Sum is RowSum over all experts for aux scores and the softmax before top-k,
// else ListSum over the chosen ones:
//   softmax kinds     p * (g - dot), p = e * (1 / Sum(e)), dot = Sum(p * g)
//   sigmoid kinds     (slope * n) * (g - dot), n = NormalizingFactor(Sum(s), eps),
//                     dot = Sum((s * n) * g); weights of topk = 1: slope * g
// Unchosen experts get +0, but for the softmax before top-k. So the gradient needs the logits and
// the map, and no weight.
#ifndef JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_H_
#define JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/exact_math.h"
#include "core/numerics.h"
#include "core/selection_key.h"
#include "core/slots.h"

namespace jax_moe_det {

// The largest row that every GPU's shared memory holds.
constexpr int kMaxExperts = 8192;
constexpr int kRowLanes = 128;

enum class ScoreKind { kSoftmaxAfterTopk, kSoftmax, kSigmoid, kSqrtSoftplus };

struct TopkRouterOptions {
  ScoreKind kind;
  bool aux_scores;       // dense scores in place of weights; no bias, one group
  bool bitmap;           // the map has a bit per expert, lowest first, in place of a byte
  int topk;              // 1 to num_experts
  int num_groups;        // 1: no groups
  int group_topk;        // kept groups
  int group_values;      // highest selection values in a group's score
  float scaling_factor;  // finite
  float eps;             // finite, >= 0
};

// Operands are [1, ...] or [batch, ...], dense and row-major.
struct TopkRouterFwd {
  ScoreType logits_type;
  const void* logits;  // [num_tokens, num_experts]
  bool logits_batched;
  const float* expert_bias;  // [num_experts]; null: none
  bool expert_bias_batched;
  const bool* valid_mask;  // [num_tokens]; null: all rows are valid
  bool valid_mask_batched;
  int64_t batch;
  int64_t num_tokens;
  int num_experts;
  TopkRouterOptions options;
  void* out;             // [batch, num_tokens, num_experts], logits' dtype; aux scores: float32
  uint8_t* routing_map;  // [batch, num_tokens, MapBytes]
};

struct TopkRouterBwd {
  ScoreType logits_type;
  const void* logits;  // [num_tokens, num_experts]
  bool logits_batched;
  const void* d_out;  // as TopkRouterFwd::out
  bool d_out_batched;
  const uint8_t* routing_map;  // [num_tokens, MapBytes]; null: aux scores
  bool routing_map_batched;
  const bool* valid_mask;  // [num_tokens], for aux scores; a masked row's map is empty
  bool valid_mask_batched;
  int64_t batch;
  int64_t num_tokens;
  int num_experts;
  TopkRouterOptions options;
  void* d_logits;  // [batch, num_tokens, num_experts]
};

MOE_HOST_DEVICE int MapBytes(int num_experts, bool bitmap) {
  return bitmap ? (num_experts + 7) / 8 : num_experts;
}

// Is this a number of an expert? (A replayed choice may be none.)
MOE_HOST_DEVICE bool IsExpert(int32_t expert, int num_experts) {
  return static_cast<uint32_t>(expert) < static_cast<uint32_t>(num_experts);
}

MOE_HOST_DEVICE bool IsSoftmax(ScoreKind kind) {
  return kind == ScoreKind::kSoftmaxAfterTopk || kind == ScoreKind::kSoftmax;
}

// Does every expert of the row have a score that enters the result, or only the chosen ones?
MOE_HOST_DEVICE bool IsDense(const TopkRouterOptions& options) {
  return options.aux_scores || options.kind == ScoreKind::kSoftmax;
}

// The sigmoid kinds' weight of a single expert is its score.
MOE_HOST_DEVICE bool IsNormalized(const TopkRouterOptions& options) {
  return options.aux_scores || options.topk > 1;
}

MOE_HOST_DEVICE float Score(ScoreKind kind, float logit) {
  return kind == ScoreKind::kSigmoid ? Sigmoid(logit) : SqrtSoftplus(logit);
}

MOE_HOST_DEVICE float ScoreSlope(ScoreKind kind, float logit) {
  return kind == ScoreKind::kSigmoid ? SigmoidSlope(logit) : SqrtSoftplusSlope(logit);
}

// What scores are multiplied by: 1 / (sum + eps). Finite where sum + eps is not 0, so that scores
// that are all 0 stay 0, however small eps is.
MOE_HOST_DEVICE float NormalizingFactor(float sum, float eps) {
  const float denominator = sum + eps;
  const float factor = 1.0f / denominator;
  constexpr float kLargest = 0x1.fffffep+127f;
  return denominator > 0.0f && factor > kLargest ? kLargest : factor;
}

MOE_HOST_DEVICE float SoftmaxGradient(float p, float g, float dot) {
  return CanonicalNan(p * (g - dot));
}

// slope * factor is at most about 1: it comes first, or a small score's gradient could overflow.
MOE_HOST_DEVICE float NormalizedGradient(float slope, float factor, float g, float dot) {
  return CanonicalNan((slope * factor) * (g - dot));
}

// The larger one; a NaN of either stays. The maximum of a row in any order.
MOE_HOST_DEVICE float MaxOrNan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return a < b || b != b ? b : a;
#endif
}

// ---- Which rows the CUDA kernels keep in registers. A thread of a warp holds NeighbouringColumns
// columns side by side, in blocks of 32 times as many.

constexpr int kMaxRegisterExperts = 512;
constexpr int kMaxRegisterTopk = 31;  // a lane for each, and one for the best of the rest
constexpr int kMaxRegisterGroupValues = 4;

MOE_HOST_DEVICE int NeighbouringColumns(int num_experts) { return num_experts <= 64 ? 2 : 4; }

// A group must be a run of threads of one block, and its score a sum of few values.
MOE_HOST_DEVICE bool FitsRegisters(int num_experts, const TopkRouterOptions& o) {
  if (num_experts > kMaxRegisterExperts || o.topk > kMaxRegisterTopk) return false;
  if (o.num_groups == 1) return true;
  const int group_size = num_experts / o.num_groups;
  const int vec = NeighbouringColumns(num_experts);
  const int threads = group_size / vec;
  return o.num_groups <= 32 && group_size % vec == 0 && threads <= 32 &&
         (threads & (threads - 1)) == 0 && o.group_values <= kMaxRegisterGroupValues;
}

// ---- The loops of one row, which the CPU backend runs.

namespace internal {

// What a softmax's row has in common: exp(x - max) has the sum `sum`.
struct SoftmaxStats {
  float max;
  float sum;
};

struct TopkRouterScratch {
  SoftmaxStats softmax;
  float logit[kMaxExperts];
  float score[kMaxExperts];
  float by_rank[kMaxExperts];
  float term[kMaxExperts];
  float gradient[kMaxExperts];
  uint32_t key[kMaxExperts];
  uint32_t group_key[kMaxExperts];
  uint64_t ranked[kMaxExperts];
  int32_t chosen[kMaxExperts];
};

MOE_HOST_DEVICE int NextPowerOfTwo(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Overwrites values[0, n), n <= 128, and scratch of the same size. n need not be a power of two:
// what is missing is +0.
MOE_HOST float FoldRow(float* __restrict values, float* __restrict scratch, int n) {
  while (n > 1) {
    if (n % 2 != 0) values[n++] = 0.0f;
    n /= 2;
    for (int i = 0; i < n; ++i) scratch[i] = values[2 * i] + values[2 * i + 1];
    for (int i = 0; i < n; ++i) values[i] = scratch[i];
  }
  return values[0];
}

MOE_HOST float RowSum(const float* values, int n) {
  float lanes[kRowLanes + 1] = {};
  float scratch[kRowLanes];
  for (int first = 0; first < n; first += kRowLanes) {
    const int width = std::min(kRowLanes, n - first);
    for (int c = 0; c < width; ++c) lanes[c] = lanes[c] + values[first + c];
  }
  return FoldRow(lanes, scratch, std::min(n, kRowLanes));
}

// Overwrites values, which has room for a power of two of them.
MOE_HOST float ListSum(float* values, int n) {
  const int padded = NextPowerOfTwo(n);
  for (int i = n; i < padded; ++i) values[i] = 0.0f;
  return FoldAdjacentPairs(values, padded);
}

MOE_HOST float RowMax(const float* values, int n) {
  constexpr int kWidth = 16;
  float max[kWidth];
  for (int c = 0; c < kWidth; ++c) max[c] = values[0];
  int first = 0;
  for (; first + kWidth <= n; first += kWidth) {
    for (int c = 0; c < kWidth; ++c) max[c] = MaxOrNan(max[c], values[first + c]);
  }
  for (; first < n; ++first) max[0] = MaxOrNan(max[0], values[first]);
  for (int c = 1; c < kWidth; ++c) max[0] = MaxOrNan(max[0], max[c]);
  return max[0];
}

// out = exp(x - max) * (1 / S): the softmax of a whole row.
MOE_HOST SoftmaxStats RowSoftmax(const float* __restrict x, int n, float* __restrict out) {
  const float max = RowMax(x, n);
  for (int e = 0; e < n; ++e) out[e] = ExpNonPositive(x[e] - max);
  const float sum = RowSum(out, n);
  const float inverse = 1.0f / sum;
  for (int e = 0; e < n; ++e) out[e] = CanonicalNan(out[e] * inverse);
  return {max, sum};
}

template <class Logit>
MOE_HOST void LoadRow(const Logit* __restrict row, int n, float* __restrict out) {
  for (int e = 0; e < n; ++e) out[e] = ToFloat(row[e]);
}

// The k highest of keys[0, n), descending, the lower index first among equals. `ranked` has room
// for n.
MOE_HOST void SelectTopk(const uint32_t* keys, int n, int k, uint64_t* ranked, int32_t* chosen) {
  constexpr int kFew = 64;
  constexpr int kWidth = 16;
  if (k <= kFew) {
    // A sorted list of the best so far. Later indices lose ties, so only a higher key enters, and
    // most runs of keys hold none.
    int size = 0;
    uint32_t lowest = 0;  // of a full list
    int e = 0;
    while (e < n) {
      if (size == k && e + kWidth <= n) {
        uint32_t max = 0;
        for (int i = 0; i < kWidth; ++i) max = keys[e + i] > max ? keys[e + i] : max;
        if (max <= lowest) {
          e += kWidth;
          continue;
        }
      }
      const int end = std::min(n, e + kWidth);
      for (; e < end; ++e) {
        if (size == k && keys[e] <= lowest) continue;
        int place = size < k ? size++ : k - 1;
        const uint64_t entry = RankedKey(keys[e], e);
        for (; place > 0 && ranked[place - 1] < entry; --place) ranked[place] = ranked[place - 1];
        ranked[place] = entry;
        if (size == k) lowest = static_cast<uint32_t>(ranked[k - 1] >> 32);
      }
    }
  } else {
    for (int e = 0; e < n; ++e) ranked[e] = RankedKey(keys[e], e);
    const auto higher = [](uint64_t a, uint64_t b) { return a > b; };
    if (k < n) std::nth_element(ranked, ranked + k, ranked + n, higher);
    std::sort(ranked, ranked + k, higher);
  }
  for (int i = 0; i < k; ++i) {
    chosen[i] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(ranked[i]));
  }
}

// Excludes the experts of the losing groups.
MOE_HOST void KeepGroups(const TopkRouterOptions& o, int num_experts, TopkRouterScratch* s) {
  const int group_size = num_experts / o.num_groups;
  for (int g = 0; g < o.num_groups; ++g) {
    const uint32_t* keys = s->key + g * group_size;
    SelectTopk(keys, group_size, o.group_values, s->ranked, s->chosen);
    for (int i = 0; i < o.group_values; ++i) s->by_rank[i] = SelectionValue(keys[s->chosen[i]]);
    s->group_key[g] = SelectionKey(ListSum(s->by_rank, o.group_values));
  }
  SelectTopk(s->group_key, o.num_groups, o.group_topk, s->ranked, s->chosen);
  constexpr uint32_t kKept = kExcludedKey;  // no score has this key
  for (int i = 0; i < o.group_topk; ++i) s->group_key[s->chosen[i]] = kKept;
  for (int g = 0; g < o.num_groups; ++g) {
    if (s->group_key[g] == kKept) continue;
    for (int e = 0; e < group_size; ++e) s->key[g * group_size + e] = kExcludedKey;
  }
}

MOE_HOST void SetMap(bool bitmap, int expert, uint8_t* map) {
  if (bitmap) {
    map[expert / 8] = static_cast<uint8_t>(map[expert / 8] | (1u << (expert % 8)));
  } else {
    map[expert] = 1;
  }
}

MOE_HOST bool GetMap(bool bitmap, int expert, const uint8_t* map) {
  return bitmap ? (map[expert / 8] >> (expert % 8)) & 1u : map[expert] != 0;
}

// Scores of the row in s->logit, in s->score; softmax after top-k: the logits themselves.
MOE_HOST float* RowScores(ScoreKind kind, int n, TopkRouterScratch* s) {
  switch (kind) {
    case ScoreKind::kSoftmaxAfterTopk:
      return s->logit;
    case ScoreKind::kSoftmax:
      s->softmax = RowSoftmax(s->logit, n, s->score);
      break;
    case ScoreKind::kSigmoid:
      for (int e = 0; e < n; ++e) s->score[e] = Sigmoid(s->logit[e]);
      break;
    case ScoreKind::kSqrtSoftplus:
      for (int e = 0; e < n; ++e) s->score[e] = SqrtSoftplus(s->logit[e]);
      break;
  }
  return s->score;
}

// The sigmoid kinds' aux scores, from scores to `out` (which may be `score`).
MOE_HOST void NormalizeRow(const float* score, int n, float eps, float* out) {
  const float factor = NormalizingFactor(RowSum(score, n), eps);
  for (int e = 0; e < n; ++e) out[e] = CanonicalNan(score[e] * factor);
}

// s->chosen = the experts of a row, in order of selection.
MOE_HOST void SelectExperts(const float* score, const float* bias, int n,
                            const TopkRouterOptions& o, TopkRouterScratch* s) {
  if (bias != nullptr) {
    for (int e = 0; e < n; ++e) s->key[e] = SelectionKey(score[e] + bias[e]);
  } else {
    for (int e = 0; e < n; ++e) s->key[e] = SelectionKey(score[e]);
  }
  if (o.num_groups > 1) KeepGroups(o, n, s);
  SelectTopk(s->key, n, o.topk, s->ranked, s->chosen);
}

// Weights of the experts s->chosen from RowScores, in s->gradient; +0 where there is no expert.
MOE_HOST const float* RowWeights(const float* score, int n, const TopkRouterOptions& o,
                                 TopkRouterScratch* s) {
  float* weight = s->gradient;
  float max = -__builtin_huge_valf();
  for (int i = 0; i < o.topk; ++i) {
    if (IsExpert(s->chosen[i], n)) max = MaxOrNan(max, score[s->chosen[i]]);
  }
  for (int i = 0; i < o.topk; ++i) {
    weight[i] = 0.0f;
    if (!IsExpert(s->chosen[i], n)) continue;
    weight[i] = score[s->chosen[i]];
    if (o.kind == ScoreKind::kSoftmaxAfterTopk) weight[i] = ExpNonPositive(weight[i] - max);
  }
  if (o.kind == ScoreKind::kSoftmaxAfterTopk || (!IsSoftmax(o.kind) && o.topk > 1)) {
    std::memcpy(s->by_rank, weight, o.topk * sizeof(float));
    const float sum = ListSum(s->by_rank, o.topk);
    const float factor = IsSoftmax(o.kind) ? 1.0f / sum : NormalizingFactor(sum, o.eps);
    for (int i = 0; i < o.topk; ++i) weight[i] = weight[i] * factor;
  }
  bool has_nan = false;
  for (int i = 0; i < o.topk; ++i) {
    weight[i] = weight[i] * o.scaling_factor;
    has_nan |= IsExpert(s->chosen[i], n) && weight[i] != weight[i];
  }
  for (int i = 0; i < o.topk; ++i) {
    if (has_nan) weight[i] = BitCast<float>(0x7fc00000u);
    if (!IsExpert(s->chosen[i], n)) weight[i] = 0.0f;
  }
  return weight;
}

}  // namespace internal

// `out` is the weights in the logits' dtype, or float32 aux scores; `valid`: false for a masked
// row.
template <class Logit>
MOE_HOST void TopkRouterFwdRow(const Logit* logits, const float* bias, bool valid, int num_experts,
                               const TopkRouterOptions& o, internal::TopkRouterScratch* s,
                               void* out, uint8_t* map) {
  std::memset(out, 0, num_experts * (o.aux_scores ? sizeof(float) : sizeof(Logit)));
  std::memset(map, 0, MapBytes(num_experts, o.bitmap));
  if (!valid) return;
  const int n = num_experts;
  internal::LoadRow(logits, n, s->logit);
  float* score = internal::RowScores(o.kind, n, s);
  if (o.aux_scores) {
    if (!IsSoftmax(o.kind)) internal::NormalizeRow(score, n, o.eps, score);
    std::memcpy(out, score, n * sizeof(float));
  }
  internal::SelectExperts(score, bias, n, o, s);
  for (int i = 0; i < o.topk; ++i) internal::SetMap(o.bitmap, s->chosen[i], map);
  if (o.aux_scores) return;
  const float* weight = internal::RowWeights(score, n, o, s);
  for (int i = 0; i < o.topk; ++i) RoundTo(weight[i], static_cast<Logit*>(out) + s->chosen[i]);
}

// `map` null: aux scores, whose d_out is float32; else a row without chosen experts is masked. No
// map of the forward has more than topk experts; of another one the first topk count.
template <class Logit>
MOE_HOST void TopkRouterBwdRow(const Logit* logits, const void* d_out, const uint8_t* map,
                               bool valid, int num_experts, const TopkRouterOptions& o,
                               internal::TopkRouterScratch* s, Logit* d_logits) {
  const int n = num_experts;
  const bool dense = IsDense(o);
  for (int e = 0; e < n; ++e) RoundTo(0.0f, d_logits + e);
  // The experts whose scores enter, ascending, and of them x, g and the results.
  int32_t* column = s->chosen;
  int count = 0;
  if (map == nullptr) {
    if (!valid) return;
    for (int e = 0; e < n; ++e) column[e] = e;
    count = n;
  } else {
    for (int e = 0; e < n && count < o.topk; ++e) {
      if (internal::GetMap(o.bitmap, e, map)) column[count++] = e;
    }
    if (count == 0) return;
  }
  float* g = s->gradient;
  float* p = s->score;
  float* x = s->logit;
  if (map == nullptr) {
    std::memcpy(g, d_out, n * sizeof(float));
  } else if (o.kind == ScoreKind::kSoftmax) {
    for (int e = 0; e < n; ++e) g[e] = 0.0f;
    for (int i = 0; i < count; ++i) {
      g[column[i]] = o.scaling_factor * ToFloat(static_cast<const Logit*>(d_out)[column[i]]);
    }
    for (int e = 0; e < n; ++e) column[e] = e;
    count = n;
  } else {
    for (int i = 0; i < count; ++i) {
      g[i] = o.scaling_factor * ToFloat(static_cast<const Logit*>(d_out)[column[i]]);
    }
  }
  if (dense) {
    internal::LoadRow(logits, n, x);
  } else {
    for (int i = 0; i < count; ++i) x[i] = ToFloat(logits[column[i]]);
  }
  // Of s->by_rank, which it may overwrite.
  const auto sum = [&]() __attribute__((always_inline)) {
    return dense ? internal::RowSum(s->by_rank, n) : internal::ListSum(s->by_rank, count);
  };

  if (IsSoftmax(o.kind)) {
    const float max = internal::RowMax(x, count);
    for (int i = 0; i < count; ++i) p[i] = ExpNonPositive(x[i] - max);
    std::memcpy(s->by_rank, p, count * sizeof(float));
    const float inverse = 1.0f / sum();
    for (int i = 0; i < count; ++i) p[i] = p[i] * inverse;
    for (int i = 0; i < count; ++i) s->by_rank[i] = p[i] * g[i];
    const float dot = sum();
    for (int i = 0; i < count; ++i) g[i] = SoftmaxGradient(p[i], g[i], dot);
  } else if (IsNormalized(o)) {
    for (int i = 0; i < count; ++i) p[i] = Score(o.kind, x[i]);
    std::memcpy(s->by_rank, p, count * sizeof(float));
    const float factor = NormalizingFactor(sum(), o.eps);
    for (int i = 0; i < count; ++i) s->by_rank[i] = p[i] * factor * g[i];
    const float dot = sum();
    for (int i = 0; i < count; ++i) {
      g[i] = NormalizedGradient(ScoreSlope(o.kind, x[i]), factor, g[i], dot);
    }
  } else {
    for (int i = 0; i < count; ++i) g[i] = CanonicalNan(ScoreSlope(o.kind, x[i]) * g[i]);
  }
  for (int i = 0; i < count; ++i) RoundTo(g[i], d_logits + column[i]);
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_H_
