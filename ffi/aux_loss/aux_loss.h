// The auxiliary load-balancing loss: formula and order of every sum. No FFI, no CUDA runtime.
//
//   loss = C * sum_e f[e] * sum_t p[t, e]        C = num_experts * coeff / (topk * N * N)
//
// The column sums follow core/slots.h. A slot's partial is the dot of f with its column sums:
// column e is added to dot lane e mod 256 by a float64 fused multiply-add, ascending, from +0; the
// lanes fold over adjacent pairs; the result is rounded once to float32. The loss is the
// adjacent-pair float64 fold of the 256 partials, times C, rounded once to float32.
//
// Error: a chunk has at most 4 float32 roundings, the lane one, the lane fold log2(L) <= 7, the
// partial and the loss one each; the float64 sums are exact enough not to count. So no positive
// input is off by more than 13 roundings of 2^-24, 7.7e-7.
#ifndef JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_H_
#define JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_H_

#include <cstdint>

#include "core/numerics.h"
#include "core/slots.h"

namespace jax_moe_det {

constexpr int64_t kMaxColumns = int64_t{1} << 28;

enum class CountType { kInt32, kInt64, kFloat32 };
enum class TotalType { kStatic, kInt32, kInt64, kUint32, kUint64 };

// N: a static value, or a device integer that is read when the kernel runs.
struct TotalNumTokens {
  TotalType type;
  double value;      // kStatic
  const void* data;  // otherwise; one element, or one per batch item
  bool batched;
};

// What turns the sum into the loss. num_experts may be smaller than the number of columns (the
// folded sequence layout).
struct AuxLossScale {
  int64_t num_experts;
  int64_t topk;
  double coeff;
  TotalNumTokens total_num_tokens;
};

struct AuxLossCounts {
  CountType type;
  const void* data;  // [num_columns], or [batch, num_columns]
  bool batched;
};

// Operands of the sum over slots. Each is [1, ...] or [batch, ...], dense and row-major.
struct AuxLossPartials {
  ScoreType score_type;
  const void* probs;  // [num_tokens, num_columns]
  bool probs_batched;
  AuxLossCounts counts;
  const bool* valid_mask;  // [num_tokens]; null: all rows are valid
  bool valid_mask_batched;
  int64_t batch;
  int64_t num_tokens;
  int64_t num_columns;
  int64_t rows_per_slot;  // of the whole loss, of which these rows may be one shard
  int64_t num_slots;
  float* partials;  // [batch, num_slots]
};

struct AuxLossFinal {
  const float* partials;  // [batch, num_slots], num_slots <= kSlots, missing ones are +0
  int64_t batch;
  int64_t num_slots;
  AuxLossScale scale;
  float* loss;  // [batch]
};

// d loss / d probs[t, :] is the same for every valid row t.
struct AuxLossRow {
  AuxLossCounts counts;
  const float* d_loss;  // [1] or [batch]
  bool d_loss_batched;
  int64_t batch;
  int64_t num_columns;
  AuxLossScale scale;
  ScoreType score_type;
  void* d_probs_row;  // [batch, num_columns]
};

// Scratch of one loss. `data` null: AuxLossWorkspaceQuery fills the size and nothing runs.
struct AuxLossWorkspace {
  float* data;
  int64_t num_elements;
};

// 256 float32 for every shape and dtype.
inline void AuxLossWorkspaceQuery(AuxLossWorkspace* workspace) { workspace->num_elements = kSlots; }

MOE_HOST_DEVICE double Count(const AuxLossCounts& counts, int64_t i) {
  switch (counts.type) {
    case CountType::kInt32:
      return static_cast<double>(static_cast<const int32_t*>(counts.data)[i]);
    case CountType::kInt64:
      return static_cast<double>(static_cast<const int64_t*>(counts.data)[i]);
    default:
      return static_cast<double>(static_cast<const float*>(counts.data)[i]);
  }
}

MOE_HOST_DEVICE double Total(const TotalNumTokens& total, int64_t batch_index) {
  const int64_t i = total.batched ? batch_index : 0;
  switch (total.type) {
    case TotalType::kInt32:
      return static_cast<double>(static_cast<const int32_t*>(total.data)[i]);
    case TotalType::kInt64:
      return static_cast<double>(static_cast<const int64_t*>(total.data)[i]);
    case TotalType::kUint32:
      return static_cast<double>(static_cast<const uint32_t*>(total.data)[i]);
    case TotalType::kUint64:
      return static_cast<double>(static_cast<const uint64_t*>(total.data)[i]);
    default:
      return total.value;
  }
}

// A loss that is switched off, or of no tokens, is +0 whatever the other operands hold.
MOE_HOST_DEVICE bool IsZero(const AuxLossScale& scale, double total_num_tokens) {
  return scale.coeff == 0.0 || total_num_tokens == 0.0;
}

// C, left to right.
MOE_HOST_DEVICE double ScaleFactor(const AuxLossScale& scale, double total_num_tokens) {
  const double numerator = static_cast<double>(scale.num_experts) * scale.coeff;
  return numerator / (static_cast<double>(scale.topk) * total_num_tokens * total_num_tokens);
}

// `factor` is ScaleFactor: a kernel computes it before the sum is there.
MOE_HOST_DEVICE float LossFromSum(const AuxLossScale& scale, double total_num_tokens, double factor,
                                  double sum) {
  if (IsZero(scale, total_num_tokens)) return 0.0f;
  return CanonicalNan(static_cast<float>(sum * factor));
}

template <class Score>
MOE_HOST_DEVICE Score GradientElement(const AuxLossScale& scale, double total_num_tokens,
                                      double count, float d_loss) {
  Score out;
  if (IsZero(scale, total_num_tokens)) {
    RoundTo(0.0, &out);
  } else {
    RoundTo(ScaleFactor(scale, total_num_tokens) * count * static_cast<double>(d_loss), &out);
  }
  return out;
}

// ---- The reference loops of one slot, one loss and one row, which the CPU backend runs.

namespace internal {

// Columns are taken in blocks of kLaneSums / lanes, so that the lane sums stay in the L1 cache. The
// blocks (128, 64, 32 or 16 columns) divide kDotLanes.
constexpr int kLaneSums = 16 * kMaxLanes;

// out[c] (+)= the chunk of kRows rows, added one after the other in float32. The first row starts
// the chunk: +0 + x differs from x for x = -0 only, and no sum from +0 sees that sign.
template <int kRows, bool kAdd, class Score, class Sum>
MOE_HOST_DEVICE void AddChunk(const Score* const* rows, int64_t width, Sum* __restrict out) {
  for (int64_t c = 0; c < width; ++c) {
    float chunk = 0.0f;
    if (kRows > 0) chunk = ToFloat(rows[0][c]);
    if (kRows > 1) chunk += ToFloat(rows[1][c]);
    if (kRows > 2) chunk += ToFloat(rows[2][c]);
    if (kRows > 3) chunk += ToFloat(rows[3][c]);
    out[c] = kAdd ? out[c] + static_cast<Sum>(chunk) : static_cast<Sum>(chunk);
  }
}

template <bool kAdd, class Score, class Sum>
MOE_HOST_DEVICE void AddChunk(const Score* const* rows, int num_rows, int64_t width, Sum* out) {
  static_assert(kChunk == 4, "written for four rows");
  switch (num_rows) {
    case 4:
      return AddChunk<4, kAdd>(rows, width, out);
    case 3:
      return AddChunk<3, kAdd>(rows, width, out);
    case 2:
      return AddChunk<2, kAdd>(rows, width, out);
    case 1:
      return AddChunk<1, kAdd>(rows, width, out);
    default:
      if (!kAdd) AddChunk<0, kAdd>(rows, width, out);
  }
}

template <class Int>
MOE_HOST_DEVICE void CountsToDouble(const void* counts, int64_t offset, int64_t width,
                                    double* __restrict out) {
  const Int* from = static_cast<const Int*>(counts) + offset;
  for (int64_t c = 0; c < width; ++c) out[c] = static_cast<double>(from[c]);
}

}  // namespace internal

// Partial of one slot: `num_rows` rows from `probs` on.
template <class Score>
MOE_HOST_DEVICE float SlotPartial(const Score* probs, const bool* valid_mask, int64_t num_rows,
                                  int64_t num_columns, const AuxLossCounts& counts,
                                  int64_t counts_offset) {
  const int lanes = NumLanes(num_columns);
  const int64_t block = internal::kLaneSums / lanes;
  int used = lanes;  // lanes without rows are +0
  while (used / 2 >= num_rows && used > 1) used /= 2;
  const bool one_chunk = num_rows <= kChunk * lanes;
  double dot[kDotLanes] = {};
  double sums[internal::kLaneSums];
  float lane[internal::kLaneSums];
  double weights[internal::kLaneSums / 16];
  for (int64_t first = 0; first < num_columns; first += block) {
    const int64_t width = num_columns - first < block ? num_columns - first : block;
    for (int64_t start = 0; start == 0 || start < num_rows; start += kChunk * lanes) {
      for (int l = 0; l < used; ++l) {
        const Score* rows[kChunk];
        int valid = 0;
        for (int i = 0; i < kChunk; ++i) {
          const int64_t row = start + l + i * lanes;
          if (row >= num_rows) break;
          if (valid_mask == nullptr || valid_mask[row]) {
            rows[valid++] = probs + row * num_columns + first;
          }
        }
        // The float64 sum of a single chunk, rounded to float32, is that chunk.
        if (one_chunk) {
          internal::AddChunk<false>(rows, valid, width, lane + l * width);
        } else if (start == 0) {
          internal::AddChunk<false>(rows, valid, width, sums + l * width);
        } else {
          internal::AddChunk<true>(rows, valid, width, sums + l * width);
        }
      }
    }
    if (!one_chunk) {
      for (int64_t i = 0; i < used * width; ++i) lane[i] = static_cast<float>(sums[i]);
    }
    for (int half = used / 2; half > 0; half /= 2) {
      float* __restrict low = lane;
      const float* high = lane + half * width;
      for (int64_t i = 0; i < half * width; ++i) low[i] = low[i] + high[i];
    }
    switch (counts.type) {
      case CountType::kInt32:
        internal::CountsToDouble<int32_t>(counts.data, counts_offset + first, width, weights);
        break;
      case CountType::kInt64:
        internal::CountsToDouble<int64_t>(counts.data, counts_offset + first, width, weights);
        break;
      default:
        internal::CountsToDouble<float>(counts.data, counts_offset + first, width, weights);
        break;
    }
    double* __restrict sum = dot + first % kDotLanes;
    for (int64_t c = 0; c < width; ++c) {
      sum[c] = Fma(weights[c], static_cast<double>(lane[c]), sum[c]);
    }
  }
  int dot_lanes = 1;  // lanes without columns are +0
  while (dot_lanes < num_columns && dot_lanes < kDotLanes) dot_lanes *= 2;
  return CanonicalNan(static_cast<float>(FoldAdjacentPairs(dot, dot_lanes)));
}

// A slot's partial from its column sums, where those are known before the counts.
MOE_HOST_DEVICE float PartialFromColumnSums(const float* sums, int64_t num_columns,
                                            const AuxLossCounts& counts, int64_t counts_offset) {
  double dot[kDotLanes] = {};
  for (int64_t c = 0; c < num_columns; ++c) {
    double* lane = dot + c % kDotLanes;
    *lane = Fma(Count(counts, counts_offset + c), static_cast<double>(sums[c]), *lane);
  }
  return CanonicalNan(static_cast<float>(FoldAdjacentPairs(dot, kDotLanes)));
}

MOE_HOST_DEVICE float LossFromPartials(const float* partials, int64_t num_slots,
                                       const AuxLossScale& scale, double total_num_tokens) {
  double sums[kSlots];
  for (int64_t s = 0; s < kSlots; ++s) {
    sums[s] = s < num_slots ? static_cast<double>(partials[s]) : 0.0;
  }
  return LossFromSum(scale, total_num_tokens, ScaleFactor(scale, total_num_tokens),
                     FoldAdjacentPairs(sums, kSlots));
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_H_
