// CUDA kernels of the router step, forward: a block per slot, a warp per lane of the sums.
//
// Four kernels, each a dependent launch of the one before: counts to zero; the pass over the
// logits, which leaves column sums; their dot with the counts; the losses. Rows that do not fit
// registers take two kernels for the pass: a warp per token, then a block per slot and 32 columns.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "aux_loss/aux_loss.h"
#include "core/dependent_launch.cuh"
#include "core/fold_halves.cuh"
#include "core/numerics.h"
#include "core/selection_key.h"
#include "core/slots.h"
#include "route/route.h"
#include "route/route_common.cuh"
#include "route/route_launch.h"
#include "topk_router/topk_router.h"
#include "topk_router/topk_router_row.cuh"

namespace jax_moe_det {
namespace {

constexpr int kWarps = 16;  // of a block of the pass; two blocks fit on a multiprocessor

// A stride of 0 shares an operand.
struct PassParams {
  const void* logits;
  const float* expert_bias;
  const bool* valid_mask;
  const int32_t* replay;
  void* weights;
  int32_t* indices;
  int32_t* counts;
  int32_t* plain;
  float* column_sums;
  float* z_partials;
  float* row_stats;
  int64_t logits_stride;  // elements from item to item
  int64_t bias_stride;
  int64_t mask_stride;
  int64_t replay_stride;
  int64_t batch;
  int64_t num_tokens;
  int64_t rows_per_slot;
  int num_slots;
  int num_experts;
  bool vector;
  bool cut_is_exact;
  TopkRouterOptions options;
};

__global__ void RouteZeroKernel(int32_t* counts, int32_t* plain, int64_t size) {
  LetDependentsStart();
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    counts[i] = 0;
    if (plain != nullptr) plain[i] = 0;
  }
}

// ---- Rows in registers.

// Shared memory of a block, in floats.
template <class Columns>
struct PassShared {
  static constexpr int kSumPitch = Columns::kPitch + 4;  // the last ones: the z loss
  static constexpr int kBias = 0;
  static constexpr int kNoBias = kBias + Columns::kPitch;
  static constexpr int kCounts = kNoBias + Columns::kPitch;
  static constexpr int kPlain = kCounts + Columns::kPitch;
  static constexpr int kScores = kPlain + Columns::kPitch;
  static constexpr int kLaneSums = kScores + kWarps * Columns::kPitch;

  static __host__ __device__ int Chunks(int lanes) { return kLaneSums + lanes * kSumPitch; }
  static __host__ __device__ size_t Bytes(int lanes, bool one_chunk) {
    return sizeof(float) * Chunks(lanes) +
           (one_chunk ? 0 : sizeof(double) * Columns::kSize * kWarps * kWarp);
  }
};

// `row`: the thread's first element of the row. `kFull`: rows fill their columns, and may be read
// in vectors.
template <class Logit, class Columns, bool kFull>
__device__ __forceinline__ void LoadLogits(const PassParams& p, const Logit* row, int lane,
                                           Raw<Logit, Columns::kVec>* raw) {
#pragma unroll
  for (int b = 0; b < Columns::kSize / Columns::kVec; ++b) {
    const int present =
        kFull ? Columns::kVec : p.num_experts - Columns::Of(lane, b * Columns::kVec);
    raw[b] = LoadRaw<Columns::kVec>(row + b * Columns::kWidth, present, kFull || p.vector);
  }
}

// `kKind`: the score kind of a common call (route_common.cuh), which has the aux loss of its own
// choice; or kAnyKind. `kPlainChoice`: a common call without bias and groups.
template <class Logit, class Columns, bool kOneChunk, int kKind, bool kPlainChoice>
__global__ void __launch_bounds__(kWarps* kWarp, Columns::kSize > 8 ? 1 : 2)
    RoutePassKernel(const PassParams p) {
  constexpr bool kCommon = kKind != kAnyKind;
  constexpr int kVec = Columns::kVec;
  constexpr int kSize = Columns::kSize;
  using Shared = PassShared<Columns>;
  extern __shared__ __align__(16) float shared[];
  LetDependentsStart();
  TopkRouterOptions o = p.options;
  if (kCommon) o.kind = static_cast<ScoreKind>(kKind);
  if (kPlainChoice) o.num_groups = 1;
  o.aux_scores = false;
  const int n = kCommon ? Columns::kPitch : p.num_experts;
  const int warp = WarpIndex();
  const int lane = threadIdx.x % kWarp;
  const int lanes = NumLanes(n);
  float* bias = shared + Shared::kBias;
  float* no_bias = shared + Shared::kNoBias;
  int* block_counts = reinterpret_cast<int*>(shared + Shared::kCounts);
  int* block_plain = reinterpret_cast<int*>(shared + Shared::kPlain);
  float* scores = shared + Shared::kScores + warp * Columns::kPitch;
  float* lane_sums = shared + Shared::kLaneSums;
  // Of a thread, with the stride of the block, which no two threads of a warp collide in.
  double* chunks = reinterpret_cast<double*>(shared + Shared::Chunks(lanes)) + threadIdx.x;
  const bool wants_aux = kCommon || p.column_sums != nullptr;
  const bool wants_z = !(kCommon && !IsSoftmax(o.kind)) && p.z_partials != nullptr;
  const bool wants_plain = !kCommon && p.plain != nullptr;
  const bool has_replay = !kCommon && p.replay != nullptr;
  const bool* valid_mask = p.valid_mask;
  if (valid_mask != nullptr) valid_mask += blockIdx.y * p.mask_stride;
  const int log_group_threads = LogGroupThreads(o, n);
  TopkRouterOptions plain_options = o;
  plain_options.num_groups = 1;

  // A slot has few rows.
  using Row = std::conditional_t<kCommon, int, int64_t>;
  const int64_t item = blockIdx.y;
  const int64_t begin = blockIdx.x * p.rows_per_slot;
  const int64_t left = p.num_tokens - begin;
  const Row num_rows = left < 0 ? 0 : left < p.rows_per_slot ? left : p.rows_per_slot;
  const Logit* logits =
      static_cast<const Logit*>(p.logits) + item * p.logits_stride + begin * n + lane * kVec;
  const int64_t first_choice = (item * p.num_tokens + begin) * o.topk;
  Logit* weights = static_cast<Logit*>(p.weights) + first_choice;
  int32_t* indices = p.indices + first_choice;

  // The row after `row` of this warp's lanes: the lane's next, or the first of its next lane.
  int l = warp;
  Row row = l;
  Raw<Logit, kVec> raw[kSize / kVec];
  if (l < lanes && row < num_rows) {
    LoadLogits<Logit, Columns, kCommon>(p, logits + int64_t{row} * n, lane, raw);
  }
  for (int e = threadIdx.x; e < Columns::kPitch; e += blockDim.x) {
    const float* item_bias = p.expert_bias + item * p.bias_stride;
    no_bias[e] = e < n ? -0.0f : kMinusInfinity;
    bias[e] = e < n && p.expert_bias != nullptr ? item_bias[e] : no_bias[e];
    block_counts[e] = 0;
    block_plain[e] = 0;
  }
  __syncthreads();

  for (; l < lanes; l += kWarps) {
    RegisterRow<Columns> chunk;
#pragma unroll
    for (int j = 0; j < kSize; ++j) chunk[j] = 0.0f;
    float z_chunk = 0.0f;
    double z_lane = 0.0;
    int in_lane = 0;  // rows of the lane so far
    for (row = l; row < num_rows; row += lanes) {
      RegisterRow<Columns> x;
#pragma unroll
      for (int j = 0; j < kSize; j += kVec) Unpack<Logit, kVec>(raw[j / kVec], x.values + j);
      if (n < Columns::kPitch) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          if (Columns::Of(lane, j) >= n) x[j] = kMinusInfinity;
        }
      }
      Row next = row + lanes;
      if (next >= num_rows) next = lanes > kWarps && l + kWarps < lanes ? l + kWarps : num_rows;
      if (next < num_rows) {
        LoadLogits<Logit, Columns, kCommon>(p, logits + int64_t{next} * n, lane, raw);
      }

      const bool valid = valid_mask == nullptr || __all_sync(kAllLanes, valid_mask[begin + row]);
      int column = n;
      float weight = 0.0f;
      if (valid) {
        RowScale logits_scale = {};
        if (wants_z && !IsSoftmax(o.kind)) {
          const float max = WarpRowMax(x);
          logits_scale.max = max;
          logits_scale.sum = WarpRowSum(x, [&](int j) { return ExpNonPositive(x[j] - max); });
        }
        RowScale scale = ScoreRow(o, x);
#pragma unroll
        for (int j = 0; j < kSize; ++j) scores[Columns::Of(lane, j)] = x[j];
        __syncwarp();
        if (!has_replay) {
          column = SelectFew<Columns>(o, log_group_threads, x.values, scores, bias, p.cut_is_exact,
                                      lane);
        } else if (lane < o.topk) {
          column = p.replay[item * p.replay_stride + (begin + row) * o.topk + lane];
        }
        const bool chosen = lane < o.topk && IsExpert(column, n);
        const float score = chosen ? scores[column] : 0.0f;
        float max = 0.0f;
        if (o.kind == ScoreKind::kSoftmaxAfterTopk) {
          max = kPlainChoice ? __shfl_sync(kAllLanes, score, 0) : WarpChosenMax(score, chosen);
        }
        weight = WarpWeight(o, score, chosen, max);
        if (chosen) {
          atomicAdd(block_counts + column, 1);
        } else {
          column = n;
          weight = 0.0f;
        }
        if (wants_aux || wants_z) {
          if (o.kind == ScoreKind::kSoftmaxAfterTopk) {
            // The first choice of all is the row's maximum.
            scale = SoftmaxRow(x, kPlainChoice ? max : WarpRowMax(x));
          }
          if (!IsSoftmax(o.kind)) NormalizeRow(x, o.eps);
#pragma unroll
          for (int j = 0; j < kSize; ++j) chunk[j] = chunk[j] + x[j];
        }
        if (wants_z) {
          const float lse = IsSoftmax(o.kind) ? LogSumExp(scale.max, scale.sum)
                                              : LogSumExp(logits_scale.max, logits_scale.sum);
          z_chunk = z_chunk + lse * lse;
        }
        if (wants_plain) {
          __syncwarp();
#pragma unroll
          for (int j = 0; j < kSize; ++j) scores[Columns::Of(lane, j)] = x[j];
          __syncwarp();
          const int plain =
              SelectFew<Columns>(plain_options, 0, x.values, scores, no_bias, false, lane);
          if (lane < o.topk) atomicAdd(block_plain + plain, 1);
        }
        __syncwarp();  // the scores are read before the next row's are written
      }
      if (lane < o.topk) {
        const Row choice = row * o.topk + lane;
        RoundTo(weight, weights + choice);
        indices[choice] = column;
      }
      ++in_lane;
      if (!kOneChunk && (in_lane % kChunk == 0 || row + lanes >= num_rows)) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          double* sum = chunks + j * kWarps * kWarp;
          const double before = in_lane <= kChunk ? 0.0 : *sum;
          *sum = before + static_cast<double>(chunk[j]);
          chunk[j] = 0.0f;
        }
        z_lane = z_lane + static_cast<double>(z_chunk);
        z_chunk = 0.0f;
      }
    }
    // The lane's sums; a single chunk is its own float64 sum.
    float* out = lane_sums + l * Shared::kSumPitch;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      float sum = chunk[j];
      if (!kOneChunk) sum = in_lane == 0 ? 0.0f : static_cast<float>(chunks[j * kWarps * kWarp]);
      out[Columns::Of(lane, j)] = sum;
    }
    if (lane == 0) out[Columns::kPitch] = kOneChunk ? z_chunk : static_cast<float>(z_lane);
  }
  __syncthreads();

  // Lanes fold by halves, the last of them in a thread for each column: barriers cost more.
  constexpr int kLast = 16;
  for (int half = lanes / 2; half >= kLast; half /= 2) {
    for (int i = threadIdx.x; i < half * Shared::kSumPitch; i += blockDim.x) {
      lane_sums[i] = lane_sums[i] + lane_sums[i + half * Shared::kSumPitch];
    }
    __syncthreads();
  }
  const auto column_sum = [&](int column) {
    float sum;
    FoldHalves<kLast, 1>(
        [&](int i, float* lane_sum) { *lane_sum = lane_sums[i * Shared::kSumPitch + column]; },
        &sum);
    return sum;
  };
  const int64_t slot = item * p.num_slots + blockIdx.x;
  WaitForPrecedingKernel();  // the counts are zero
  for (int e = threadIdx.x; e < n; e += blockDim.x) {
    if (wants_aux) p.column_sums[slot * n + e] = column_sum(e);
    if (block_counts[e] != 0) atomicAdd(p.counts + item * n + e, block_counts[e]);
    if (wants_plain && block_plain[e] != 0) {
      atomicAdd(p.plain + item * n + e, block_plain[e]);
    }
  }
  if (wants_z && threadIdx.x == 0) p.z_partials[slot] = CanonicalNan(column_sum(Columns::kPitch));
}

// ---- Rows in shared memory, or in none.

constexpr int kRowStats = 3;  // of a token: RowScale's max and inverse of its aux scores, and lse^2

template <class Logit>
__global__ void RouteRowsKernel(const PassParams p, const AnySize size) {
  using Columns = SharedRow::Columns;
  extern __shared__ __align__(16) char bytes[];
  const int warp = WarpIndex();
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  float* first = reinterpret_cast<float*>(bytes + int64_t{warp} * size.bytes);
  float* values = first + size.blocks * Columns::kWidth;
  uint16_t* chosen = reinterpret_cast<uint16_t*>(values + size.values);
  SharedRow x = {first, lane, size.blocks * Columns::kVec};
  const TopkRouterOptions& o = p.options;
  const int n = p.num_experts;
  const bool wants_losses = p.column_sums != nullptr || p.z_partials != nullptr;

  for (int64_t index = int64_t{blockIdx.x} * warps + warp; index < p.batch * p.num_tokens;
       index += int64_t{gridDim.x} * warps) {
    const int64_t item = index / p.num_tokens;
    const int64_t token = index % p.num_tokens;
    const Logit* logits = static_cast<const Logit*>(p.logits) + item * p.logits_stride + token * n;
    const float* bias = p.expert_bias;
    if (bias != nullptr) bias += item * p.bias_stride;
    Logit* weights = static_cast<Logit*>(p.weights) + index * o.topk;
    int32_t* indices = p.indices + index * o.topk;
    const auto load = [&]() {
      for (int j = 0; j < x.size(); ++j) {
        const int column = Columns::Of(lane, j);
        x[j] = column < n ? ToFloat(logits[column]) : kMinusInfinity;
      }
    };
    const auto to_keys = [&](const float* added) {
      for (int j = 0; j < x.size(); ++j) {
        const int column = Columns::Of(lane, j);
        uint32_t key = kExcludedKey;
        if (column < n) key = SelectionKey(added == nullptr ? x[j] : x[j] + added[column]);
        x[j] = __uint_as_float(key);
      }
      __syncwarp();
    };
    for (int i = lane; i < o.topk; i += kWarp) {
      RoundTo(0.0f, weights + i);
      indices[i] = n;
    }
    __syncwarp();
    if (p.valid_mask != nullptr && !p.valid_mask[item * p.mask_stride + token]) continue;

    load();
    const RowScale scale = ScoreRow(o, x);
    if (p.replay != nullptr) {
      for (int i = lane; i < o.topk; i += kWarp) {
        const int32_t expert = p.replay[item * p.replay_stride + token * o.topk + i];
        chosen[i] = static_cast<uint16_t>(IsExpert(expert, n) ? expert : n);
      }
    } else {
      to_keys(bias);
      if (o.num_groups > 1) KeepGroupsShared(o, n, first, values, lane);
      SelectAny(x, o.topk, chosen, lane);
    }
    __syncwarp();
    WarpWeightsShared(
        o, values, lane, [&](int i) { return chosen[i] < n; },
        [&](int i) { return ScoreOf(o, scale, ToFloat(logits[chosen[i]])); },
        [&](int i, float weight) {
          RoundTo(weight, weights + i);
          indices[i] = chosen[i];
          atomicAdd(p.counts + item * n + chosen[i], 1);
        });
    __syncwarp();
    if (!wants_losses) continue;

    RowScale aux = scale;
    if (o.kind != ScoreKind::kSoftmax) {
      load();
      if (IsSoftmax(o.kind) || p.z_partials != nullptr) aux = SoftmaxRow(x, WarpRowMax(x));
    }
    const float lse = LogSumExp(aux.max, aux.sum);
    if (!IsSoftmax(o.kind)) {
      load();
      ScoreRow(o, x);
      aux.inverse = NormalizeRow(x, o.eps);
    }
    if (lane == 0) {
      float* stats = p.row_stats + index * kRowStats;
      stats[0] = aux.max;
      stats[1] = aux.inverse;
      stats[2] = lse * lse;
    }
    if (p.plain != nullptr) {
      if (o.kind == ScoreKind::kSoftmax) {
        load();
        SoftmaxRow(x, WarpRowMax(x));
      }
      to_keys(nullptr);
      SelectAny(x, o.topk, chosen, lane);
      for (int i = lane; i < o.topk; i += kWarp) atomicAdd(p.plain + item * n + chosen[i], 1);
      __syncwarp();
    }
  }
}

// Column sums of one slot and 32 columns; the last block of columns sums lse^2.
constexpr int kColumnWarps = 8;

template <class Logit>
__global__ void RouteColumnsKernel(const PassParams p) {
  __shared__ float lane_sums[kMaxLanes][kWarp];
  const TopkRouterOptions& o = p.options;
  const int n = p.num_experts;
  const int lanes = NumLanes(n);
  const int lane = threadIdx.x % kWarp;
  const int column = blockIdx.x * kWarp + lane;
  const bool is_z = blockIdx.x == gridDim.x - 1;
  const int64_t item = blockIdx.z;
  const int64_t begin = blockIdx.y * p.rows_per_slot;
  const int64_t left = p.num_tokens - begin;
  const int64_t num_rows = left < 0 ? 0 : left < p.rows_per_slot ? left : p.rows_per_slot;
  for (int l = threadIdx.x / kWarp; l < lanes; l += kColumnWarps) {
    float chunk = 0.0f;
    double sum = 0.0;
    int in_chunk = 0;
    for (int64_t row = l; row < num_rows; row += lanes) {
      const int64_t token = begin + row;
      const bool valid = p.valid_mask == nullptr || p.valid_mask[item * p.mask_stride + token];
      if (valid && (is_z || column < n)) {
        const float* stats = p.row_stats + (item * p.num_tokens + token) * kRowStats;
        float term = stats[2];
        if (!is_z) {
          const float logit = ToFloat(
              static_cast<const Logit*>(p.logits)[item * p.logits_stride + token * n + column]);
          term = IsSoftmax(o.kind) ? ExpNonPositive(logit - stats[0]) * stats[1]
                                   : Score(o.kind, logit) * stats[1];
        }
        chunk = chunk + term;
      }
      if (++in_chunk == kChunk || row + lanes >= num_rows) {
        sum = sum + static_cast<double>(chunk);
        chunk = 0.0f;
        in_chunk = 0;
      }
    }
    lane_sums[l][lane] = static_cast<float>(sum);
  }
  __syncthreads();
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int l = threadIdx.x / kWarp; l < half; l += kColumnWarps) {
      lane_sums[l][lane] = lane_sums[l][lane] + lane_sums[l + half][lane];
    }
    __syncthreads();
  }
  if (threadIdx.x >= kWarp) return;
  const int64_t slot = item * p.num_slots + blockIdx.y;
  if (is_z) {
    if (lane == 0 && p.z_partials != nullptr) p.z_partials[slot] = CanonicalNan(lane_sums[0][0]);
  } else if (column < n && p.column_sums != nullptr) {
    p.column_sums[slot * n + column] = lane_sums[0][lane];
  }
}

// ---- The losses.

constexpr int kOwnLanes = kDotLanes / kWarp;  // neighbouring lanes of a dot that a thread owns
static_assert(kSlots == kDotLanes, "both folds are over 256 values");

// Every thread gets the fold over adjacent pairs of its own and all other threads' values.
__device__ __forceinline__ double FoldWarp(double* own) {
  double sum = FoldAdjacentPairs(own, kOwnLanes);
#pragma unroll
  for (int stride = 1; stride < kWarp; stride *= 2) {
    sum = sum + __shfl_xor_sync(kAllLanes, sum, stride);
  }
  return sum;
}

// A lane's part of the dot of counts and column sums. All loads come before the first product.
template <class T>
__device__ __forceinline__ double LaneDot(const T* counts, const float* column_sums, int n,
                                          int lane) {
  double dot[kOwnLanes] = {};
  for (int first = lane * kOwnLanes; first < n; first += kDotLanes) {
    T count[kOwnLanes];
    float sum[kOwnLanes];
#pragma unroll
    for (int i = 0; i < kOwnLanes; ++i) {
      const bool present = first + i < n;  // a missing column adds +0
      count[i] = present ? counts[first + i] : T{0};
      sum[i] = present ? column_sums[first + i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOwnLanes; ++i) {
      dot[i] = Fma(static_cast<double>(count[i]), static_cast<double>(sum[i]), dot[i]);
    }
  }
  return FoldWarp(dot);
}

// A warp per slot.
__global__ void RoutePartialsKernel(const RoutePartials r) {
  LetDependentsStart();
  const int lane = threadIdx.x % kWarp;
  const int64_t index = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
  if (index >= r.batch * r.num_slots) return;
  const int n = r.num_experts;
  const int64_t offset = r.counts.batched ? index / r.num_slots * n : 0;
  const float* column_sums = r.column_sums + index * n;
  WaitForPrecedingKernel();
  double sum = 0.0;
  switch (r.counts.type) {
    case CountType::kInt32:
      sum = LaneDot(static_cast<const int32_t*>(r.counts.data) + offset, column_sums, n, lane);
      break;
    case CountType::kInt64:
      sum = LaneDot(static_cast<const int64_t*>(r.counts.data) + offset, column_sums, n, lane);
      break;
    case CountType::kFloat32:
      sum = LaneDot(static_cast<const float*>(r.counts.data) + offset, column_sums, n, lane);
      break;
  }
  if (lane == 0) r.partials[index] = CanonicalNan(static_cast<float>(sum));
}

// Two warps: the aux loss and the z loss of an item.
__global__ void RouteFinalKernel(const RouteFinal r) {
  const int lane = threadIdx.x % kWarp;
  const bool is_z = threadIdx.x >= kWarp;
  const int64_t item = blockIdx.x;
  const double total = Total(r.scale.total_num_tokens, item);
  const double factor = ScaleFactor(r.scale, total);
  const float* partials = is_z ? r.z_partials : r.aux_partials;
  WaitForPrecedingKernel();
  float loss = 0.0f;
  if (partials != nullptr) {
    double own[kOwnLanes];
#pragma unroll
    for (int i = 0; i < kOwnLanes; ++i) {
      const int slot = lane * kOwnLanes + i;
      own[i] = slot < r.num_slots ? static_cast<double>(partials[item * r.num_slots + slot]) : 0.0;
    }
    const double sum = FoldWarp(own);
    loss =
        is_z ? ZLossFromSum(r.z_loss_coeff, total, sum) : LossFromSum(r.scale, total, factor, sum);
  }
  if (lane == 0) (is_z ? r.z_loss : r.aux_loss)[item] = loss;
}

// ---- Launches.

template <class Logit, class Columns, bool kOneChunk, int kKind, bool kPlainChoice>
cudaError_t LaunchRegisters(cudaStream_t stream, const PassParams& p) {
  const size_t shared = PassShared<Columns>::Bytes(NumLanes(p.num_experts), kOneChunk);
  const auto kernel = RoutePassKernel<Logit, Columns, kOneChunk, kKind, kPlainChoice>;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>(p.num_slots), static_cast<unsigned>(p.batch));
  return LaunchDependent(stream, kernel, grid, dim3(kWarps * kWarp), shared, p);
}

template <class Logit, class Columns, int kKind, bool kPlainChoice = false>
cudaError_t LaunchRegisters(cudaStream_t stream, const PassParams& p) {
  const bool one_chunk = p.rows_per_slot <= kChunk * NumLanes(p.num_experts);
  return one_chunk ? LaunchRegisters<Logit, Columns, true, kKind, kPlainChoice>(stream, p)
                   : LaunchRegisters<Logit, Columns, false, kKind, kPlainChoice>(stream, p);
}

template <class Logit, class Columns>
cudaError_t LaunchRegisters(cudaStream_t stream, const PassParams& p) {
  if constexpr (kHasCommon<Logit>) {
    if (IsCommonRow<Columns>(p.num_tokens, p.num_experts, p.vector, p.options.kind,
                             p.z_partials != nullptr) &&
        p.replay == nullptr && p.plain == nullptr && p.column_sums != nullptr) {
      const bool plain_choice = p.expert_bias == nullptr && p.options.num_groups == 1;
      switch (p.options.kind) {
        case ScoreKind::kSoftmaxAfterTopk:
          return plain_choice ? LaunchRegisters<Logit, Columns, kSoftmaxAfterTopk, true>(stream, p)
                              : LaunchRegisters<Logit, Columns, kSoftmaxAfterTopk>(stream, p);
        case ScoreKind::kSoftmax:
          return LaunchRegisters<Logit, Columns, kSoftmax>(stream, p);
        default:
          return LaunchRegisters<Logit, Columns, kSigmoid>(stream, p);
      }
    }
  }
  return LaunchRegisters<Logit, Columns, kAnyKind>(stream, p);
}

template <class Logit>
cudaError_t LaunchAny(cudaStream_t stream, const PassParams& p) {
  const AnySize size = AnySizeOf(p.num_experts, p.options);
  constexpr int kSharedBytes = 96 * 1024;
  constexpr int kMostWarps = 8;
  int warps = kSharedBytes / size.bytes;
  warps = warps > kMostWarps ? kMostWarps : warps;
  cudaError_t status = cudaFuncSetAttribute(
      RouteRowsKernel<Logit>, cudaFuncAttributeMaxDynamicSharedMemorySize, warps * size.bytes);
  if (status != cudaSuccess) return status;
  dim3 grid;
  if (p.num_tokens > 0) {
    status = FillDevice((p.batch * p.num_tokens + warps - 1) / warps, 4, 1, &grid);
    if (status != cudaSuccess) return status;
    RouteRowsKernel<Logit><<<grid, kWarp * warps, warps * size.bytes, stream>>>(p, size);
  }
  if (p.column_sums != nullptr || p.z_partials != nullptr) {
    const unsigned column_blocks = (p.num_experts + kWarp - 1) / kWarp + 1;
    grid = dim3(column_blocks, p.num_slots, static_cast<unsigned>(p.batch));
    RouteColumnsKernel<Logit><<<grid, kColumnWarps * kWarp, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

template <class Logit>
cudaError_t Launch(cudaStream_t stream, PassParams p) {
  // 16-bit logits fill at most the upper 19 bits of a key, and columns the lower 9.
  p.cut_is_exact = sizeof(Logit) == 2 && p.expert_bias == nullptr &&
                   p.options.kind == ScoreKind::kSoftmaxAfterTopk;
  if (!FitsRegisters(p.num_experts, p.options)) return LaunchAny<Logit>(stream, p);
  if (p.num_experts <= 64) return LaunchRegisters<Logit, Columns<2, 1>>(stream, p);
  if (p.num_experts <= 128) return LaunchRegisters<Logit, Columns<4, 1>>(stream, p);
  if (p.num_experts <= 256) return LaunchRegisters<Logit, Columns<4, 2>>(stream, p);
  return LaunchRegisters<Logit, Columns<4, 4>>(stream, p);
}

// Launches take at most this many items in one grid dimension.
constexpr int64_t kMaxItems = 65535;

}  // namespace

cudaError_t LaunchRoutePass(cudaStream_t stream, const RoutePass& pass) {
  const int64_t size = pass.batch * pass.num_experts;
  if (size == 0) return cudaSuccess;
  const int64_t blocks = (size + 255) / 256;
  RouteZeroKernel<<<static_cast<unsigned>(blocks < 1024 ? blocks : 1024), 256, 0, stream>>>(
      pass.counts, pass.plain, size);
  cudaError_t status = cudaGetLastError();

  PassParams p = {};
  p.logits = pass.logits;
  p.expert_bias = pass.expert_bias;
  p.valid_mask = pass.valid_mask;
  p.replay = pass.replay;
  p.weights = pass.weights;
  p.indices = pass.indices;
  p.counts = pass.counts;
  p.plain = pass.plain;
  p.column_sums = pass.column_sums;
  p.z_partials = pass.z_partials;
  p.row_stats = pass.row_stats;
  p.num_tokens = pass.num_tokens;
  p.rows_per_slot = pass.rows_per_slot;
  p.num_slots = static_cast<int>(pass.num_slots);
  p.num_experts = pass.num_experts;
  p.options = pass.options;
  p.vector =
      RowsAllowVectors(NeighbouringColumns(pass.num_experts), pass.num_experts, {pass.logits});
  p.logits_stride = pass.logits_batched ? pass.num_tokens * pass.num_experts : 0;
  p.bias_stride = pass.expert_bias_batched ? pass.num_experts : 0;
  p.mask_stride = pass.valid_mask_batched ? pass.num_tokens : 0;
  p.replay_stride = pass.replay_batched ? pass.num_tokens * pass.options.topk : 0;
  if (p.num_slots == 0) return status;
  const int64_t logit_bytes = pass.logits_type == ScoreType::kFloat32 ? 4 : 2;
  for (int64_t first = 0; status == cudaSuccess && first < pass.batch; first += kMaxItems) {
    p.batch = pass.batch - first < kMaxItems ? pass.batch - first : kMaxItems;
    PassParams run = p;
    run.logits = static_cast<const char*>(p.logits) + first * p.logits_stride * logit_bytes;
    if (p.expert_bias != nullptr) run.expert_bias += first * p.bias_stride;
    if (p.valid_mask != nullptr) run.valid_mask += first * p.mask_stride;
    if (p.replay != nullptr) run.replay += first * p.replay_stride;
    const int64_t chosen = first * p.num_tokens * p.options.topk;
    run.weights = static_cast<char*>(p.weights) + chosen * logit_bytes;
    run.indices += chosen;
    run.counts += first * p.num_experts;
    if (p.plain != nullptr) run.plain += first * p.num_experts;
    if (p.column_sums != nullptr) run.column_sums += first * p.num_slots * p.num_experts;
    if (p.z_partials != nullptr) run.z_partials += first * p.num_slots;
    run.row_stats += first * p.num_tokens * kRowStats;
    switch (pass.logits_type) {
      case ScoreType::kFloat32:
        status = Launch<float>(stream, run);
        break;
      case ScoreType::kBFloat16:
        status = Launch<BFloat16>(stream, run);
        break;
      case ScoreType::kFloat16:
        status = Launch<Float16>(stream, run);
        break;
    }
  }
  return status;
}

cudaError_t LaunchRoutePartials(cudaStream_t stream, const RoutePartials& partials) {
  constexpr int kThreads = 128;
  const int64_t warps = partials.batch * partials.num_slots;
  if (warps == 0) return cudaSuccess;
  const int64_t blocks = (warps * kWarp + kThreads - 1) / kThreads;
  return LaunchDependent(stream, RoutePartialsKernel, dim3(static_cast<unsigned>(blocks)),
                         dim3(kThreads), 0, partials);
}

cudaError_t LaunchRouteFinal(cudaStream_t stream, const RouteFinal& final_sum) {
  if (final_sum.batch == 0) return cudaSuccess;
  return LaunchDependent(stream, RouteFinalKernel, dim3(static_cast<unsigned>(final_sum.batch)),
                         dim3(2 * kWarp), 0, final_sum);
}

}  // namespace jax_moe_det
