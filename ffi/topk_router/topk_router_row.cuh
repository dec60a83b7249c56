// One row of the router on a warp: loads, scores, sums and selection, in topk_router.h's order.
//
// Thread t holds kVec neighbouring columns of each block of 32 * kVec columns: column
// b * 32 * kVec + t * kVec + c. So lane e mod 128 of a row sum lies in one thread, and the tree
// over adjacent lanes is first inside a thread, then over neighbouring threads.
#ifndef JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_ROW_CUH_
#define JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_ROW_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "core/exact_math.h"
#include "core/numerics.h"
#include "core/selection_key.h"
#include "topk_router/topk_router.h"

namespace jax_moe_det {

constexpr int kWarp = 32;

// The warp's number in its block, in a form that the compiler knows to be the same in all its
// threads: branches on it need no check for divergence.
__device__ __forceinline__ int WarpIndex() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
}
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kMinusInfinity = -__builtin_huge_valf();

// ---- kCount neighbouring elements of global memory, kept raw until they are used.

template <int kBytes>
struct RawBits;
template <>
struct RawBits<16> {
  using Type = uint4;
};
template <>
struct RawBits<8> {
  using Type = uint2;
};
template <>
struct RawBits<4> {
  using Type = uint32_t;
};
template <>
struct RawBits<2> {
  using Type = uint16_t;
};

template <class T, int kCount>
using Raw = typename RawBits<sizeof(T) * kCount>::Type;

// A vector where `vector` says that rows allow it, else the elements that the row has; the missing
// ones are 0. Read once: past the L1 cache.
template <int kCount, class T>
__device__ __forceinline__ Raw<T, kCount> LoadRaw(const T* p, int present, bool vector) {
  Raw<T, kCount> raw = {};
  if (vector) {
    if (present > 0) raw = __ldcs(reinterpret_cast<const Raw<T, kCount>*>(p));
  } else {
    T elements[kCount] = {};
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      if (c < present) elements[c] = p[c];
    }
    memcpy(&raw, elements, sizeof(raw));
  }
  return raw;
}

template <int kCount, class T>
__device__ __forceinline__ void StoreRaw(Raw<T, kCount> raw, T* p, int present, bool vector) {
  if (vector) {
    if (present > 0) __stcs(reinterpret_cast<Raw<T, kCount>*>(p), raw);
  } else {
    T elements[kCount];
    memcpy(elements, &raw, sizeof(raw));
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      if (c < present) p[c] = elements[c];
    }
  }
}

template <class T, int kCount>
__device__ __forceinline__ void Unpack(Raw<T, kCount> raw, float* out) {
  T elements[kCount];
  memcpy(elements, &raw, sizeof(raw));
#pragma unroll
  for (int c = 0; c < kCount; ++c) out[c] = ToFloat(elements[c]);
}

// Two 16-bit elements at once; neither value is a NaN.
__device__ __forceinline__ uint32_t NearestPair(BFloat16, float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint32_t NearestPair(Float16, float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The compiler makes one comparison of both.
__device__ __forceinline__ bool HasNan(float a, float b) { return (a != a) | (b != b); }

// RoundTo of each value, some of which are NaN. A call, so that the compiler cannot make selects of
// it, which would run for every row.
template <class T, int kCount>
__device__ __noinline__ Raw<T, kCount> PackNan(Raw<float, kCount> values) {
  float floats[kCount];
  memcpy(floats, &values, sizeof(values));
  T elements[kCount];
#pragma unroll
  for (int c = 0; c < kCount; ++c) RoundTo(floats[c], elements + c);
  Raw<T, kCount> raw;
  memcpy(&raw, elements, sizeof(raw));
  return raw;
}

// RoundTo of each value. NaN is rare, and looked for in pairs.
template <class T, int kCount>
__device__ __forceinline__ Raw<T, kCount> Pack(const float* values) {
  static_assert(kCount % 2 == 0, "pairs");
  bool has_nan = false;
#pragma unroll
  for (int c = 0; c < kCount; c += 2) has_nan |= HasNan(values[c], values[c + 1]);
  Raw<float, kCount> floats;
  memcpy(&floats, values, sizeof(floats));
  if (has_nan) return PackNan<T, kCount>(floats);
  Raw<T, kCount> raw;
  if constexpr (sizeof(T) == sizeof(float)) {
    raw = floats;
  } else {
    uint32_t pairs[kCount / 2];
#pragma unroll
    for (int c = 0; c < kCount; c += 2) pairs[c / 2] = NearestPair(T{}, values[c], values[c + 1]);
    memcpy(&raw, pairs, sizeof(raw));
  }
  return raw;
}

// ---- Where a thread's values of a row are: registers, or shared memory for rows of any size.

template <int kVecSize, int kBlocks>
struct Columns {
  static constexpr int kVec = kVecSize;
  static constexpr int kSize = kVec * kBlocks;     // values of a thread
  static constexpr int kWidth = kWarp * kVec;      // columns of a block
  static constexpr int kPitch = kWidth * kBlocks;  // columns that there is room for

  static __device__ __forceinline__ int Of(int lane, int j) {
    return j / kVec * kWidth + lane * kVec + j % kVec;
  }
};

template <class ColumnsType>
struct RegisterRow {
  using Columns = ColumnsType;
  float values[Columns::kSize];

  __device__ __forceinline__ float& operator[](int j) { return values[j]; }
  static __device__ __forceinline__ constexpr int size() { return Columns::kSize; }
};

struct SharedRow {
  using Columns = jax_moe_det::Columns<4, 1>;
  float* first;  // of the row
  int lane;
  int num_values;  // of a thread

  __device__ __forceinline__ float& operator[](int j) { return first[Columns::Of(lane, j)]; }
  __device__ __forceinline__ int size() const { return num_values; }
};

// ---- Sums and maxima of a row, which every thread gets.

// `lanes`: the thread's kVec lanes.
template <int kVec>
__device__ __forceinline__ float FoldRowLanes(float* lanes) {
#pragma unroll
  for (int stride = 1; stride < kVec; stride *= 2) {
#pragma unroll
    for (int c = 0; c + stride < kVec; c += 2 * stride) lanes[c] = lanes[c] + lanes[c + stride];
  }
  float sum = lanes[0];
#pragma unroll
  for (int stride = 1; stride < kWarp; stride *= 2) {
    sum = sum + __shfl_xor_sync(kAllLanes, sum, stride);
  }
  return sum;
}

// RowSum of term(j) over the thread's values.
template <class Row, class Term>
__device__ __forceinline__ float WarpRowSum(const Row& row, const Term& term) {
  constexpr int kVec = Row::Columns::kVec;
  float lanes[kVec] = {};
#pragma unroll
  for (int j = 0; j < row.size(); j += kVec) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) lanes[c] = lanes[c] + term(j + c);
  }
  return FoldRowLanes<kVec>(lanes);
}

// The key of a value that an addition or a maximum made: its NaN has one pattern already.
__device__ __forceinline__ uint32_t SumKey(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

template <class Row>
__device__ __forceinline__ float WarpRowMax(Row& row) {
  float max = row[0];  // a thread has more than one
#pragma unroll
  for (int j = 1; j < row.size(); ++j) max = MaxOrNan(max, row[j]);
  return SelectionValue(__reduce_max_sync(kAllLanes, SumKey(max)));
}

// ListSum of one value in each of the first `count` lanes, +0 in the others.
__device__ __forceinline__ float WarpListSum(float value, int count) {
#pragma unroll
  for (int stride = 1; stride < kWarp; stride *= 2) {
    if (stride >= count) break;
    value = value + __shfl_xor_sync(kAllLanes, value, stride);
  }
  return value;
}

// ListSum of values[0, n) in shared memory, which it overwrites; there is room for a power of two.
__device__ __forceinline__ float WarpListSumShared(float* values, int n, int lane) {
  const int size = internal::NextPowerOfTwo(n);
  for (int i = n + lane; i < size; i += kWarp) values[i] = 0.0f;
  __syncwarp();
  for (int stride = 1; stride < size; stride *= 2) {
    for (int i = lane * 2 * stride; i < size; i += kWarp * 2 * stride) {
      values[i] = values[i] + values[i + stride];
    }
    __syncwarp();
  }
  const float sum = values[0];
  __syncwarp();
  return sum;
}

// ---- Scores.

// What turns one logit of a row into its score.
struct RowScale {
  float max;      // softmax: the row's maximum
  float sum;      // softmax: S
  float inverse;  // softmax: 1 / S; aux scores of the sigmoid kinds: the normalizing factor
};

// Logits to their softmax, in place. `max`: of the row.
template <class Row>
__device__ __forceinline__ RowScale SoftmaxRow(Row& row, float max) {
  RowScale scale;
  scale.max = max;
#pragma unroll
  for (int j = 0; j < row.size(); ++j) row[j] = ExpNonPositive(row[j] - scale.max);
  scale.sum = WarpRowSum(row, [&](int j) { return row[j]; });
  scale.inverse = Reciprocal(scale.sum);
#pragma unroll
  for (int j = 0; j < row.size(); ++j) row[j] = row[j] * scale.inverse;
  return scale;
}

// The sigmoid kinds' scores to aux scores, in place. Returns the factor.
template <class Row>
__device__ __forceinline__ float NormalizeRow(Row& row, float eps) {
  const float factor = NormalizingFactor(WarpRowSum(row, [&](int j) { return row[j]; }), eps);
#pragma unroll
  for (int j = 0; j < row.size(); ++j) row[j] = row[j] * factor;
  return factor;
}

// Logits to scores, in place; missing columns are -infinity before, and score +0. Softmax after
// top-k: the logits stay.
template <class Row>
__device__ __forceinline__ RowScale ScoreRow(const TopkRouterOptions& o, Row& row) {
  RowScale scale = {0.0f, 1.0f, 1.0f};
  switch (o.kind) {
    case ScoreKind::kSoftmaxAfterTopk:
      break;
    case ScoreKind::kSoftmax:
      scale = SoftmaxRow(row, WarpRowMax(row));
      break;
    case ScoreKind::kSigmoid:
#pragma unroll
      for (int j = 0; j < row.size(); ++j) row[j] = SigmoidRaw(row[j]);
      break;
    case ScoreKind::kSqrtSoftplus:
#pragma unroll
      for (int j = 0; j < row.size(); ++j) row[j] = SqrtSoftplus(row[j]);
      break;
  }
  if (o.aux_scores && !IsSoftmax(o.kind)) scale.inverse = NormalizeRow(row, o.eps);
  return scale;
}

// The score of one logit, with the operations of ScoreRow.
__device__ __forceinline__ float ScoreOf(const TopkRouterOptions& o, const RowScale& scale,
                                         float logit) {
  if (o.kind == ScoreKind::kSoftmaxAfterTopk) return logit;
  if (o.kind == ScoreKind::kSoftmax) return ExpNonPositive(logit - scale.max) * scale.inverse;
  const float score = Score(o.kind, logit);
  return o.aux_scores ? score * scale.inverse : score;
}

// ---- Sorted lists of four keys.

__device__ __forceinline__ void SortPair(uint32_t* a, uint32_t* b) {
  const uint32_t high = max(*a, *b);
  *b = min(*a, *b);
  *a = high;
}

__device__ __forceinline__ void SortFour(uint32_t* a) {
  SortPair(a, a + 1);
  SortPair(a + 2, a + 3);
  SortPair(a, a + 2);
  SortPair(a + 1, a + 3);
  SortPair(a + 1, a + 2);
}

// The four highest of two descending lists, descending.
__device__ __forceinline__ void MergeFour(uint32_t* a, const uint32_t* b) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = max(a[i], b[3 - i]);
  SortPair(a, a + 2);
  SortPair(a + 1, a + 3);
  SortPair(a, a + 1);
  SortPair(a + 2, a + 3);
}

// Sorts keys[0, kSize) so that the four highest come first, descending.
template <int kSize>
__device__ __forceinline__ void TopFour(uint32_t* keys) {
  if constexpr (kSize == 2) {
    SortPair(keys, keys + 1);
  } else {
    static_assert(kSize % 4 == 0, "lists of four");
#pragma unroll
    for (int i = 0; i < kSize; i += 4) SortFour(keys + i);
#pragma unroll
    for (int i = 4; i < kSize; i += 4) MergeFour(keys, keys + i);
  }
}

// ---- Selection of few experts from a row in registers.

// The two highest of two descending pairs, descending.
__device__ __forceinline__ void MergeTwo(uint32_t* a, const uint32_t* b) {
  const uint32_t lower = min(a[0], b[0]);
  a[0] = max(a[0], b[0]);
  a[1] = max(lower, max(a[1], b[1]));
}

// log2 of the threads of a group, where FitsRegisters.
__device__ __forceinline__ int LogGroupThreads(const TopkRouterOptions& o, int num_experts) {
  const int vec = NeighbouringColumns(num_experts);
  return o.num_groups > 1 ? 31 - __clz(num_experts / o.num_groups / vec) : 0;
}

// Is block b's part of the thread's columns in a kept group? One bit for each block. `kDepth`, 2 or
// 4: a group's score is of at most so many values.
template <class Columns, int kDepth>
__device__ __forceinline__ uint32_t KeptBlocks(const TopkRouterOptions& o, int log_group_threads,
                                               const uint32_t* keys, int lane) {
  constexpr int kVec = Columns::kVec;
  constexpr int kBlocks = Columns::kSize / kVec;
  const int log_groups_of_block = 5 - log_group_threads;
  const int groups_of_block = 1 << log_groups_of_block;
  uint32_t mine = kExcludedKey;  // of group `lane`
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint32_t highest[4] = {};
#pragma unroll
    for (int c = 0; c < kVec; ++c) highest[c] = keys[b * kVec + c];
    if constexpr (kVec == 2) {
      SortPair(highest, highest + 1);
    } else if constexpr (kDepth == 2) {
      SortPair(highest, highest + 1);
      SortPair(highest + 2, highest + 3);
      MergeTwo(highest, highest + 2);
    } else {
      SortFour(highest);
    }
    for (int stride = 1; stride < 1 << log_group_threads; stride *= 2) {
      uint32_t others[4];
#pragma unroll
      for (int i = 0; i < kDepth; ++i) others[i] = __shfl_xor_sync(kAllLanes, highest[i], stride);
      if constexpr (kDepth == 2) {
        MergeTwo(highest, others);
      } else {
        MergeFour(highest, others);
      }
    }
    // The adjacent-pair tree, padded with +0.
    float sum = SelectionValue(highest[0]);
    if (o.group_values > 1) sum = sum + SelectionValue(highest[1]);
    if (kDepth > 2 && o.group_values > 2) {
      const float last = o.group_values > 3 ? SelectionValue(highest[3]) : 0.0f;
      sum = sum + (SelectionValue(highest[2]) + last);
    }
    const uint32_t key = __shfl_sync(kAllLanes, SelectionKey(sum),
                                     (lane & (groups_of_block - 1)) << log_group_threads);
    if (lane >> log_groups_of_block == b) mine = key;
  }
  if (lane >= o.num_groups) mine = kExcludedKey;
  // One after the other: the highest key, and of equal ones the lowest lane.
  uint32_t kept = 0;
  for (int i = 0; i < o.group_topk; ++i) {
    const uint32_t best = __reduce_max_sync(kAllLanes, mine);
    const uint32_t equal = __ballot_sync(kAllLanes, mine == best);
    const uint32_t first = equal & (0u - equal);
    kept |= first;
    if ((first >> lane) & 1u) mine = kExcludedKey;
  }
  uint32_t blocks = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int group = b * groups_of_block + (lane >> log_group_threads);
    if (group < o.num_groups) blocks |= ((kept >> group) & 1u) << b;
  }
  return blocks;
}

// The topk highest, one after the other: k rounds over all keys. Lane i gets the column of rank i.
template <class Columns>
__device__ __noinline__ int SelectByRounds(const float* scores, const float* bias, uint32_t kept,
                                           int topk, int lane) {
  uint32_t keys[Columns::kSize];
#pragma unroll
  for (int j = 0; j < Columns::kSize; ++j) {
    const int column = Columns::Of(lane, j);
    const uint32_t key = SumKey(scores[column] + bias[column]);
    keys[j] = (kept >> (j / Columns::kVec)) & 1u ? key : kExcludedKey;
  }
  int mine = 0;
  for (int i = 0; i < topk; ++i) {
    uint32_t best = keys[0];
#pragma unroll
    for (int j = 1; j < Columns::kSize; ++j) best = max(best, keys[j]);
    best = __reduce_max_sync(kAllLanes, best);
    unsigned column = Columns::kPitch;
#pragma unroll
    for (int j = Columns::kSize - 1; j >= 0; --j) {
      if (keys[j] == best) column = Columns::Of(lane, j);
    }
    column = __reduce_min_sync(kAllLanes, column);
#pragma unroll
    for (int j = 0; j < Columns::kSize; ++j) {
      if (Columns::Of(lane, j) == static_cast<int>(column)) keys[j] = kExcludedKey;
    }
    if (lane == i) mine = static_cast<int>(column);
  }
  return mine;
}

// Lane i < topk gets the column of rank i. `scores` and `bias` are in shared memory, as long as the
// columns' pitch; `bias` is -0 without a bias, and -infinity past the last expert, where the
// columns then rank behind every expert.
//
// Keys are cut to make room for the column, so that one integer maximum over the warp finds value
// and place; a thread offers its four highest. The cut keys' order is then checked against the
// exact keys, and any doubt (one thread had more than four, equal cut keys at the end or in a wrong
// order) goes to SelectByRounds. `cut_is_exact`: no key loses a bit, so equal ones are in order.
template <class Columns>
__device__ __forceinline__ int SelectFew(const TopkRouterOptions& o, int log_group_threads,
                                         const float* row, const float* scores, const float* bias,
                                         bool cut_is_exact, int lane) {
  constexpr int kVec = Columns::kVec;
  constexpr int kSize = Columns::kSize;
  // A whole byte where that is enough, for it moves in one instruction.
  constexpr uint32_t kColumnBits = Columns::kPitch <= 256 ? 0xff : Columns::kPitch - 1;
  static_assert((Columns::kPitch & (Columns::kPitch - 1)) == 0, "a power of two");
  uint32_t keys[kSize];
#pragma unroll
  for (int j = 0; j < kSize; ++j) keys[j] = SumKey(row[j] + bias[Columns::Of(lane, j)]);
  uint32_t kept = ~0u;
  if (o.num_groups > 1) {
    kept = o.group_values > 2 ? KeptBlocks<Columns, 4>(o, log_group_threads, keys, lane)
                              : KeptBlocks<Columns, 2>(o, log_group_threads, keys, lane);
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    // Lower columns rank first among equals.
    if constexpr (kColumnBits == 0xff) {
      // The lowest byte, out of four that a register keeps from row to row.
      const uint32_t four = 0x01010101u * (0xffu - Columns::Of(lane, j / 4 * 4)) - 0x03020100u;
      keys[j] = __byte_perm(keys[j], four, 0x3214 + j % 4);
    } else {
      keys[j] = (keys[j] & ~kColumnBits) | (kColumnBits - Columns::Of(lane, j));
    }
  }
  if (o.num_groups > 1) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (((kept >> (j / kVec)) & 1u) == 0) keys[j] = kExcludedKey;
    }
  }
  TopFour<kSize>(keys);
  constexpr int kDepth = kSize < 4 ? kSize : 4;
  uint32_t mine = 0;
  // Rounds in threes: a round more costs less than a branch in each.
  constexpr int kRounds = 3;
  for (int first = 0; first <= o.topk; first += kRounds) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const uint32_t best = __reduce_max_sync(kAllLanes, keys[0]);
      const bool own = keys[0] == best;
#pragma unroll
      for (int d = 0; d + 1 < kDepth; ++d) keys[d] = own ? keys[d + 1] : keys[d];
      // A list that may have lost some repeats its last key, which shows as a pair of equals.
      if (kSize <= 4) keys[kDepth - 1] = own ? 0u : keys[kDepth - 1];
      if (lane - first == i) mine = best;
    }
  }
  int column = static_cast<int>(~mine & (Columns::kPitch - 1));
  uint32_t exact = 0;
  if (lane <= o.topk && mine != kExcludedKey) exact = SumKey(scores[column] + bias[column]);
  const uint32_t next_exact = __shfl_down_sync(kAllLanes, exact, 1);
  const uint32_t next = __shfl_down_sync(kAllLanes, mine, 1);
  bool doubt = lane < o.topk && (exact < next_exact || mine == next);
  doubt |= lane == o.topk - 1 && !cut_is_exact && ((mine ^ next) & ~kColumnBits) == 0;
  if (__any_sync(kAllLanes, doubt)) {
    column = SelectByRounds<Columns>(scores, bias, kept, o.topk, lane);
  }
  return column;
}

// ---- Weights.

// The highest of the chosen experts' scores.
__device__ __forceinline__ float WarpChosenMax(float score, bool chosen) {
  const uint32_t key = chosen ? SelectionKey(score) : kExcludedKey;
  return SelectionValue(__reduce_max_sync(kAllLanes, key));
}

// The weight of each lane's chosen expert; lanes in order of selection. `max`: the highest of their
// scores, for the softmax after top-k.
__device__ __forceinline__ float WarpWeight(const TopkRouterOptions& o, float score, bool chosen,
                                            float max) {
  float weight = score;
  if (o.kind == ScoreKind::kSoftmaxAfterTopk) {
    weight = ExpNonPositive(score - max);
    weight = weight * Reciprocal(WarpListSum(chosen ? weight : 0.0f, o.topk));
  } else if (o.kind != ScoreKind::kSoftmax && o.topk > 1) {
    weight = weight * NormalizingFactor(WarpListSum(chosen ? weight : 0.0f, o.topk), o.eps);
  }
  weight = weight * o.scaling_factor;
  const bool has_nan = __any_sync(kAllLanes, chosen && weight != weight);
  return has_nan ? __uint_as_float(0x7fc00000u) : weight;
}

// The same for any number of choices, through `values` in shared memory: choice i is an expert
// where chosen(i), with the score score(i); its weight goes to store(i, weight).
template <class Chosen, class ScoreFn, class Store>
__device__ __forceinline__ void WarpWeightsShared(const TopkRouterOptions& o, float* values,
                                                  int lane, const Chosen& chosen,
                                                  const ScoreFn& score, const Store& store) {
  const auto for_each = [&](const auto& fn) {
    for (int i = lane; i < o.topk; i += kWarp) {
      if (chosen(i)) fn(i);
    }
  };
  for (int i = lane; i < o.topk; i += kWarp) values[i] = 0.0f;
  float max = 0.0f;
  float factor = 1.0f;
  if (o.kind == ScoreKind::kSoftmaxAfterTopk) {
    uint32_t key = kExcludedKey;
    for_each([&](int i) {
      const uint32_t other = SelectionKey(score(i));
      key = key > other ? key : other;
    });
    max = SelectionValue(__reduce_max_sync(kAllLanes, key));
    for_each([&](int i) { values[i] = ExpNonPositive(score(i) - max); });
    factor = Reciprocal(WarpListSumShared(values, o.topk, lane));
  } else if (o.kind != ScoreKind::kSoftmax && o.topk > 1) {
    for_each([&](int i) { values[i] = score(i); });
    factor = NormalizingFactor(WarpListSumShared(values, o.topk, lane), o.eps);
  }
  bool has_nan = false;
  for_each([&](int i) {
    const float s = score(i);
    const float weight = o.kind == ScoreKind::kSoftmaxAfterTopk ? ExpNonPositive(s - max) : s;
    values[i] = weight * factor * o.scaling_factor;
    has_nan |= values[i] != values[i];
  });
  has_nan = __any_sync(kAllLanes, has_nan);
  for_each([&](int i) { store(i, has_nan ? __uint_as_float(0x7fc00000u) : values[i]); });
}

// ---- Selection from a row in shared memory: any number of experts, of chosen ones, of groups.

// The key of a chosen expert, above kExcludedKey and below every value's.
constexpr uint32_t kChosenKey = 1;

struct Ranked {
  uint32_t key;
  unsigned index;
};

// The one that ranks first over the warp; every thread gets it.
__device__ __forceinline__ Ranked WarpFirst(Ranked mine) {
  const uint32_t key = __reduce_max_sync(kAllLanes, mine.key);
  return {key, __reduce_min_sync(kAllLanes, mine.key == key ? mine.index : ~0u)};
}

// The first of keys[begin, end) that ranks after `last`.
__device__ __forceinline__ Ranked FirstAfter(const float* keys, int begin, int end, Ranked last,
                                             int lane) {
  Ranked best = {kExcludedKey, ~0u};
  for (int i = begin + lane; i < end; i += kWarp) {
    const uint32_t key = __float_as_uint(keys[i]);
    const bool after = key < last.key || (key == last.key && i > static_cast<int>(last.index));
    if (after && (key > best.key || best.index == ~0u)) best = {key, static_cast<unsigned>(i)};
  }
  return WarpFirst(best);
}

// Sizes of a warp's part of shared memory.
struct AnySize {
  int blocks;  // of SharedRow's columns
  int values;  // floats of scratch: chosen scores, or a group's values and every group's key
  int bytes;   // of it all, chosen experts included
};

inline AnySize AnySizeOf(int num_experts, const TopkRouterOptions& o) {
  AnySize size;
  size.blocks = (num_experts + SharedRow::Columns::kWidth - 1) / SharedRow::Columns::kWidth;
  size.values = internal::NextPowerOfTwo(o.topk);
  if (o.num_groups > 1) {
    const int groups = internal::NextPowerOfTwo(o.group_values) + o.num_groups;
    if (size.values < groups) size.values = groups;
  }
  size.bytes =
      4 * (size.blocks * SharedRow::Columns::kWidth + size.values) + (2 * o.topk + 15) / 16 * 16;
  size.bytes = (size.bytes + 15) / 16 * 16;
  return size;
}

// Excludes the experts of the losing groups from `keys`.
__device__ inline void KeepGroupsShared(const TopkRouterOptions& o, int num_experts, float* keys,
                                        float* values, int lane) {
  const int group_size = num_experts / o.num_groups;
  float* group_keys = values + internal::NextPowerOfTwo(o.group_values);
  constexpr Ranked kBeforeAll = {~0u, 0};
  for (int g = 0; g < o.num_groups; ++g) {
    Ranked last = kBeforeAll;
    for (int i = 0; i < o.group_values; ++i) {
      last = FirstAfter(keys, g * group_size, (g + 1) * group_size, last, lane);
      if (lane == 0) values[i] = SelectionValue(last.key);
    }
    __syncwarp();
    const float sum = WarpListSumShared(values, o.group_values, lane);
    if (lane == 0) group_keys[g] = __uint_as_float(SelectionKey(sum));
  }
  __syncwarp();
  Ranked last = kBeforeAll;
  for (int i = 0; i < o.group_topk; ++i) {
    last = FirstAfter(group_keys, 0, o.num_groups, last, lane);
  }
  // Groups up to the last kept one stay.
  for (int e = lane; e < num_experts; e += kWarp) {
    const int g = e / group_size;
    const uint32_t key = __float_as_uint(group_keys[g]);
    const bool kept = key > last.key || (key == last.key && g <= static_cast<int>(last.index));
    if (!kept) keys[e] = __uint_as_float(kExcludedKey);
  }
  __syncwarp();
}

// Writes the topk columns in order of rank, and marks them in `keys`.
__device__ inline void SelectAny(const SharedRow& row, int topk, uint16_t* chosen, int lane) {
  using Columns = SharedRow::Columns;
  // A thread knows the best of its own columns.
  Ranked best = {kExcludedKey, ~0u};
  for (int j = 0; j < row.num_values; ++j) {
    const int column = Columns::Of(lane, j);
    const uint32_t key = __float_as_uint(row.first[column]);
    if (key > best.key) best = {key, static_cast<unsigned>(column)};
  }
  for (int i = 0; i < topk; ++i) {
    const Ranked first = WarpFirst(best);
    if (lane == 0) {
      chosen[i] = static_cast<uint16_t>(first.index);
      row.first[first.index] = __uint_as_float(kChosenKey);
    }
    __syncwarp();
    // All threads look for the next best of the one that lost it.
    const int owner = static_cast<int>(first.index) % Columns::kWidth / Columns::kVec;
    Ranked next = {kChosenKey, ~0u};
    for (int j = lane; j < row.num_values; j += kWarp) {
      const int column = Columns::Of(owner, j);
      const uint32_t key = __float_as_uint(row.first[column]);
      if (key > next.key) next = {key, static_cast<unsigned>(column)};
    }
    next = WarpFirst(next);
    if (lane == owner) best = next;
  }
  __syncwarp();
}

// ---- Launches.

constexpr int kMaxGridY = 65535;

// Blocks that fill the device, each of which takes several rows.
inline cudaError_t FillDevice(int64_t blocks_of_work, int blocks_per_multiprocessor, int64_t batch,
                              dim3* grid) {
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int64_t resident = int64_t{blocks_per_multiprocessor} * multiprocessors;
  grid->x = static_cast<unsigned>(blocks_of_work < resident ? blocks_of_work : resident);
  grid->y = static_cast<unsigned>(batch < kMaxGridY ? batch : kMaxGridY);
  return cudaSuccess;
}

// May rows be read and written in vectors of `size` elements?
inline bool RowsAllowVectors(int size, int num_experts, std::initializer_list<const void*> arrays) {
  if (num_experts % size != 0) return false;
  uintptr_t bits = 0;
  for (const void* array : arrays) bits |= reinterpret_cast<uintptr_t>(array);
  return bits % 16 == 0;
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_ROW_CUH_
