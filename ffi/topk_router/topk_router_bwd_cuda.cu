// CUDA kernels of the top-k router, backward: a warp per token.
#include <cuda_runtime.h>

#include <cstdint>

#include "core/numerics.h"
#include "topk_router/topk_router.h"
#include "topk_router/topk_router_launch.h"
#include "topk_router/topk_router_row.cuh"

namespace jax_moe_det {
namespace {

constexpr int kWarps = 8;  // of a block, at most

// A stride of 0 shares an operand.
struct BwdParams {
  const void* logits;
  const void* d_out;
  const uint8_t* routing_map;
  const bool* valid_mask;
  void* d_logits;
  int64_t logits_stride;  // elements from item to item
  int64_t d_out_stride;
  int64_t map_stride;
  int64_t mask_stride;
  int64_t batch;
  int64_t num_tokens;
  int num_experts;
  int map_bytes;
  bool vector;
  TopkRouterOptions options;
};

// Which of kVec neighbouring experts are chosen, lowest bit first.
template <int kVec>
__device__ __forceinline__ uint32_t ChosenBits(const BwdParams& p, const uint8_t* map, int column) {
  if (column >= p.num_experts) return 0;
  if (p.options.bitmap) {
    // kVec divides 8: they are in one byte. Bits past the last expert are 0.
    return (static_cast<uint32_t>(map[column / 8]) >> (column % 8)) & ((1u << kVec) - 1u);
  }
  const uint32_t bytes = LoadRaw<kVec>(map + column, p.num_experts - column, p.vector);
  // Four bytes of 0 or 1 to four bits.
  return (bytes * 0x10204080u) >> 28;
}

// The pointers of one row.
template <class Logit>
struct RowPointers {
  const Logit* logits;
  const void* d_out;
  const uint8_t* map;
  bool valid;
  Logit* d_logits;
};

// Calls fn(RowPointers) for the rows of a warp.
template <class Logit, class Fn>
__device__ __forceinline__ void ForEachRow(const BwdParams& p, const Fn& fn) {
  const int n = p.num_experts;
  const int64_t d_out_bytes = p.options.aux_scores ? sizeof(float) : sizeof(Logit);
  const int64_t warps = blockDim.x / kWarp;
  const int warp = WarpIndex();
  for (int64_t item = blockIdx.y; item < p.batch; item += gridDim.y) {
    for (int64_t row = blockIdx.x * warps + warp; row < p.num_tokens; row += gridDim.x * warps) {
      fn(RowPointers<Logit>{
          static_cast<const Logit*>(p.logits) + item * p.logits_stride + row * n,
          static_cast<const char*>(p.d_out) + (item * p.d_out_stride + row * n) * d_out_bytes,
          p.routing_map == nullptr ? nullptr
                                   : p.routing_map + item * p.map_stride + row * p.map_bytes,
          p.valid_mask == nullptr || p.valid_mask[item * p.mask_stride + row],
          static_cast<Logit*>(p.d_logits) + (item * p.num_tokens + row) * n});
    }
  }
}

// ---- Every expert has a score: softmax before top-k, and aux scores.

// `x`, `g` and `s` are room for a row each.
template <class Logit, class Row>
__device__ __forceinline__ void DenseRow(const BwdParams& p, const RowPointers<Logit>& at, int lane,
                                         Row& x, Row& g, Row& s) {
  using Columns = typename Row::Columns;
  constexpr int kVec = Columns::kVec;
  const TopkRouterOptions& o = p.options;
  const int n = p.num_experts;

  uint32_t any_chosen = 0;
#pragma unroll
  for (int j = 0; j < x.size(); j += kVec) {
    const int column = Columns::Of(lane, j);
    float logit[kVec];
    Unpack<Logit, kVec>(LoadRaw<kVec>(at.logits + column, n - column, p.vector), logit);
    float d[kVec];
    if (o.aux_scores) {
      Unpack<float, kVec>(
          LoadRaw<kVec>(static_cast<const float*>(at.d_out) + column, n - column, p.vector), d);
    } else {
      const uint32_t chosen = ChosenBits<kVec>(p, at.map, column);
      any_chosen |= chosen;
      // Loads first: nothing waits between them.
      Logit raw[kVec] = {};
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if ((chosen >> c) & 1u) raw[c] = static_cast<const Logit*>(at.d_out)[column + c];
      }
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        d[c] = (chosen >> c) & 1u ? o.scaling_factor * ToFloat(raw[c]) : 0.0f;
      }
    }
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      x[j + c] = column + c < n ? logit[c] : kMinusInfinity;
      g[j + c] = d[c];
    }
  }
  const bool zero = o.aux_scores ? !at.valid : !__any_sync(kAllLanes, any_chosen != 0);

  if (zero) {
#pragma unroll
    for (int j = 0; j < x.size(); ++j) g[j] = 0.0f;
  } else if (IsSoftmax(o.kind)) {
    const float max = WarpRowMax(x);
#pragma unroll
    for (int j = 0; j < x.size(); ++j) x[j] = ExpNonPositive(x[j] - max);
    const float inverse = Reciprocal(WarpRowSum(x, [&](int j) { return x[j]; }));
#pragma unroll
    for (int j = 0; j < x.size(); ++j) x[j] = x[j] * inverse;
    const float dot = WarpRowSum(x, [&](int j) { return x[j] * g[j]; });
#pragma unroll
    for (int j = 0; j < x.size(); ++j) g[j] = SoftmaxGradient(x[j], g[j], dot);
  } else {
#pragma unroll
    for (int j = 0; j < x.size(); ++j) s[j] = Score(o.kind, x[j]);
    const float factor = NormalizingFactor(WarpRowSum(s, [&](int j) { return s[j]; }), o.eps);
    const float dot = WarpRowSum(s, [&](int j) { return s[j] * factor * g[j]; });
#pragma unroll
    for (int j = 0; j < x.size(); ++j) {
      g[j] = NormalizedGradient(ScoreSlope(o.kind, x[j]), factor, g[j], dot);
    }
  }
#pragma unroll
  for (int j = 0; j < x.size(); j += kVec) {
    const int column = Columns::Of(lane, j);
    float out[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) out[c] = g[j + c];
    StoreRaw<kVec>(Pack<Logit, kVec>(out), at.d_logits + column, n - column, p.vector);
  }
}

template <class Logit, class Columns>
__global__ void __launch_bounds__(kWarp* kWarps, Columns::kSize > 8 ? 3 : 4)
    TopkRouterBwdDenseKernel(const BwdParams p) {
  ForEachRow<Logit>(p, [&](const RowPointers<Logit>& at) {
    RegisterRow<Columns> x, g, s;
    DenseRow(p, at, threadIdx.x % kWarp, x, g, s);
  });
}

template <class Logit>
__global__ void TopkRouterBwdDenseAnyKernel(const BwdParams p, int blocks) {
  using Columns = SharedRow::Columns;
  extern __shared__ __align__(16) float rows[];
  const int lane = threadIdx.x % kWarp;
  const int pitch = blocks * Columns::kWidth;
  float* first = rows + int64_t{threadIdx.x / kWarp} * 3 * pitch;
  const int size = blocks * Columns::kVec;
  SharedRow x = {first, lane, size};
  SharedRow g = {first + pitch, lane, size};
  SharedRow s = {first + 2 * pitch, lane, size};
  // A thread reads and writes its own elements only.
  ForEachRow<Logit>(p, [&](const RowPointers<Logit>& at) { DenseRow(p, at, lane, x, g, s); });
}

// ---- Only the chosen experts have a score: a lane for each of them.

// Lists the chosen experts, ascending, and stores zeros in the row. Returns their number, at most
// topk.
template <class Logit>
__device__ __forceinline__ int ListChosen(const BwdParams& p, const RowPointers<Logit>& at,
                                          int lane, uint16_t* list) {
  constexpr int kVec = 4;
  constexpr int kBlocks = 4;  // whose loads are in flight together
  const int n = p.num_experts;
  const unsigned lower_lanes = (1u << lane) - 1u;
  int count = 0;
  for (int begin = 0; begin < n; begin += kBlocks * kWarp * kVec) {
    uint32_t chosen[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      chosen[b] = ChosenBits<kVec>(p, at.map, begin + (b * kWarp + lane) * kVec);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int column = begin + (b * kWarp + lane) * kVec;
      if (begin + b * kWarp * kVec >= n) break;
      StoreRaw<kVec>(Raw<Logit, kVec>{}, at.d_logits + column, n - column, p.vector);
      int place = count;
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const unsigned votes = __ballot_sync(kAllLanes, (chosen[b] >> c) & 1u);
        place += __popc(votes & lower_lanes);
        count += __popc(votes);
      }
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (((chosen[b] >> c) & 1u) == 0) continue;
        if (place < p.options.topk) list[place] = static_cast<uint16_t>(column + c);
        ++place;
      }
    }
  }
  __syncwarp();
  return count < p.options.topk ? count : p.options.topk;
}

template <class Logit>
__global__ void __launch_bounds__(kWarp* kWarps, 6) TopkRouterBwdKernel(const BwdParams p) {
  __shared__ uint16_t lists[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp;
  uint16_t* list = lists[threadIdx.x / kWarp];
  const TopkRouterOptions& o = p.options;
  ForEachRow<Logit>(p, [&](const RowPointers<Logit>& at) {
    const int count = ListChosen(p, at, lane, list);
    const bool chosen = lane < count;
    const int column = chosen ? list[lane] : 0;
    float x = kMinusInfinity;
    float g = 0.0f;
    if (chosen) {
      const Logit logit = at.logits[column];
      const Logit d = static_cast<const Logit*>(at.d_out)[column];
      x = ToFloat(logit);
      g = o.scaling_factor * ToFloat(d);
    }
    if (o.kind == ScoreKind::kSoftmaxAfterTopk) {
      const uint32_t key = chosen ? SelectionKey(x) : kExcludedKey;
      const float max = SelectionValue(__reduce_max_sync(kAllLanes, key));
      const float e = ExpNonPositive(x - max);
      const float weight = e * Reciprocal(WarpListSum(chosen ? e : 0.0f, count));
      g = SoftmaxGradient(weight, g, WarpListSum(chosen ? weight * g : 0.0f, count));
    } else if (IsNormalized(o)) {
      const float s = Score(o.kind, x);
      const float factor = NormalizingFactor(WarpListSum(chosen ? s : 0.0f, count), o.eps);
      const float dot = WarpListSum(chosen ? s * factor * g : 0.0f, count);
      g = NormalizedGradient(ScoreSlope(o.kind, x), factor, g, dot);
    } else {
      g = CanonicalNan(ScoreSlope(o.kind, x) * g);
    }
    if (chosen) RoundTo(g, at.d_logits + column);
    __syncwarp();  // the list is read before the next row's is written
  });
}

// More chosen experts than lanes: lists in shared memory. `stride`: bytes of a warp's part.
template <class Logit>
__global__ void TopkRouterBwdManyKernel(const BwdParams p, int stride) {
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % kWarp;
  const TopkRouterOptions& o = p.options;
  float* terms = reinterpret_cast<float*>(shared + int64_t{threadIdx.x / kWarp} * stride);
  float* score = terms + internal::NextPowerOfTwo(o.topk);
  uint16_t* list = reinterpret_cast<uint16_t*>(score + o.topk);
  ForEachRow<Logit>(p, [&](const RowPointers<Logit>& at) {
    const int count = ListChosen(p, at, lane, list);
    const auto x = [&](int i) { return ToFloat(at.logits[list[i]]); };
    const auto g = [&](int i) {
      return o.scaling_factor * ToFloat(static_cast<const Logit*>(at.d_out)[list[i]]);
    };
    // A thread's own elements of `score`, and so of `terms` until the sum.
    const auto sum = [&](const auto& term) {
      for (int i = lane; i < count; i += kWarp) terms[i] = term(i);
      return WarpListSumShared(terms, count, lane);
    };
    if (count == 0) return;
    if (o.kind == ScoreKind::kSoftmaxAfterTopk) {
      uint32_t key = kExcludedKey;
      for (int i = lane; i < count; i += kWarp) {
        const uint32_t other = SelectionKey(x(i));
        key = key > other ? key : other;
      }
      const float max = SelectionValue(__reduce_max_sync(kAllLanes, key));
      for (int i = lane; i < count; i += kWarp) score[i] = ExpNonPositive(x(i) - max);
      const float inverse = Reciprocal(sum([&](int i) { return score[i]; }));
      for (int i = lane; i < count; i += kWarp) score[i] = score[i] * inverse;
      const float dot = sum([&](int i) { return score[i] * g(i); });
      for (int i = lane; i < count; i += kWarp) {
        RoundTo(SoftmaxGradient(score[i], g(i), dot), at.d_logits + list[i]);
      }
    } else {  // topk is above 1: normalized
      for (int i = lane; i < count; i += kWarp) score[i] = Score(o.kind, x(i));
      const float factor = NormalizingFactor(sum([&](int i) { return score[i]; }), o.eps);
      const float dot = sum([&](int i) { return score[i] * factor * g(i); });
      for (int i = lane; i < count; i += kWarp) {
        RoundTo(NormalizedGradient(ScoreSlope(o.kind, x(i)), factor, g(i), dot),
                at.d_logits + list[i]);
      }
    }
    __syncwarp();
  });
}

// ---- Launches.

template <class Logit, class Columns>
cudaError_t LaunchDense(cudaStream_t stream, const BwdParams& p) {
  dim3 grid;
  const cudaError_t status =
      FillDevice((p.num_tokens + kWarps - 1) / kWarps, Columns::kSize > 8 ? 3 : 4, p.batch, &grid);
  if (status != cudaSuccess) return status;
  TopkRouterBwdDenseKernel<Logit, Columns><<<grid, kWarp * kWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

// Kernels whose warps need `warp_bytes` of shared memory each; `extra` is their last parameter.
cudaError_t LaunchShared(cudaStream_t stream, const BwdParams& p,
                         void (*kernel)(const BwdParams, int), int warp_bytes, int extra) {
  constexpr int kSharedBytes = 96 * 1024;
  int warps = kSharedBytes / warp_bytes;
  warps = warps > kWarps ? kWarps : warps;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, warps * warp_bytes);
  if (status != cudaSuccess) return status;
  dim3 grid;
  status = FillDevice((p.num_tokens + warps - 1) / warps, 4, p.batch, &grid);
  if (status != cudaSuccess) return status;
  kernel<<<grid, kWarp * warps, warps * warp_bytes, stream>>>(p, extra);
  return cudaGetLastError();
}

template <class Logit>
cudaError_t Launch(cudaStream_t stream, const BwdParams& p) {
  const TopkRouterOptions& o = p.options;
  if (!IsDense(o) && o.topk <= kWarp) {
    dim3 grid;
    const cudaError_t status = FillDevice((p.num_tokens + kWarps - 1) / kWarps, 6, p.batch, &grid);
    if (status != cudaSuccess) return status;
    TopkRouterBwdKernel<Logit><<<grid, kWarp * kWarps, 0, stream>>>(p);
    return cudaGetLastError();
  }
  if (!IsDense(o)) {
    const int bytes = 4 * internal::NextPowerOfTwo(o.topk) + 6 * o.topk;
    const int stride = (bytes + 15) / 16 * 16;
    return LaunchShared(stream, p, TopkRouterBwdManyKernel<Logit>, stride, stride);
  }
  if (p.num_experts <= 64) return LaunchDense<Logit, Columns<2, 1>>(stream, p);
  if (p.num_experts <= 128) return LaunchDense<Logit, Columns<4, 1>>(stream, p);
  if (p.num_experts <= 256) return LaunchDense<Logit, Columns<4, 2>>(stream, p);
  if (p.num_experts <= 512) return LaunchDense<Logit, Columns<4, 4>>(stream, p);
  const int blocks = (p.num_experts + SharedRow::Columns::kWidth - 1) / SharedRow::Columns::kWidth;
  const int bytes = 3 * blocks * SharedRow::Columns::kWidth * static_cast<int>(sizeof(float));
  return LaunchShared(stream, p, TopkRouterBwdDenseAnyKernel<Logit>, bytes, blocks);
}

}  // namespace

cudaError_t LaunchTopkRouterBwd(cudaStream_t stream, const TopkRouterBwd& op) {
  if (op.batch == 0 || op.num_tokens == 0) return cudaSuccess;
  BwdParams p = {};
  p.logits = op.logits;
  p.d_out = op.d_out;
  p.routing_map = op.routing_map;
  p.valid_mask = op.valid_mask;
  p.d_logits = op.d_logits;
  const int64_t row_elements = op.num_tokens * op.num_experts;
  p.map_bytes = MapBytes(op.num_experts, op.options.bitmap);
  p.logits_stride = op.logits_batched ? row_elements : 0;
  p.d_out_stride = op.d_out_batched ? row_elements : 0;
  p.map_stride = op.routing_map_batched ? op.num_tokens * p.map_bytes : 0;
  p.mask_stride = op.valid_mask_batched ? op.num_tokens : 0;
  p.batch = op.batch;
  p.num_tokens = op.num_tokens;
  p.num_experts = op.num_experts;
  p.options = op.options;
  p.vector = RowsAllowVectors(IsDense(op.options) ? NeighbouringColumns(op.num_experts) : 4,
                              op.num_experts, {op.logits, op.d_out, op.routing_map, op.d_logits});
  if (op.logits_batched && op.d_out_batched &&
      (op.routing_map == nullptr || op.routing_map_batched) &&
      (op.valid_mask == nullptr || op.valid_mask_batched)) {
    // A batch of whole items is one long item.
    p.num_tokens *= p.batch;
    p.batch = 1;
  }
  switch (op.logits_type) {
    case ScoreType::kFloat32:
      return Launch<float>(stream, p);
    case ScoreType::kBFloat16:
      return Launch<BFloat16>(stream, p);
    default:
      return Launch<Float16>(stream, p);
  }
}

}  // namespace jax_moe_det
