// CUDA kernels of the top-k router, forward: a warp per token.
//
// Rows of at most 512 experts live in registers, and few experts are chosen from them by whole-warp
// maxima; every other case goes through shared memory. Both give the bits of topk_router.h.
#include <cuda_runtime.h>

#include <cstdint>

#include "core/numerics.h"
#include "core/selection_key.h"
#include "topk_router/topk_router.h"
#include "topk_router/topk_router_launch.h"
#include "topk_router/topk_router_row.cuh"

namespace jax_moe_det {
namespace {

constexpr int kWarps = 8;  // of a block, at most

// A stride of 0 shares an operand.
struct FwdParams {
  const void* logits;
  const float* expert_bias;
  const bool* valid_mask;
  void* out;
  uint8_t* routing_map;
  int64_t logits_stride;  // elements from item to item
  int64_t bias_stride;
  int64_t mask_stride;
  int64_t batch;
  int64_t num_tokens;
  int num_experts;
  int map_bytes;
  bool vector;
  bool cut_is_exact;
  TopkRouterOptions options;
};

// ---- Rows in registers.

// Of a warp, in shared memory. The last two are zero between rows: a few elements are set, the row
// is written, and they are cleared.
template <class Logit, class Columns>
struct alignas(16) WarpRow {
  float scores[Columns::kPitch];
  Logit weights[Columns::kPitch];
  uint8_t map[Columns::kPitch];
};

template <class Logit, class Columns>
__device__ __forceinline__ void LoadLogits(const FwdParams& p, const Logit* row, int lane,
                                           Raw<Logit, Columns::kVec>* raw) {
#pragma unroll
  for (int j = 0; j < Columns::kSize; j += Columns::kVec) {
    const int column = Columns::Of(lane, j);
    raw[j / Columns::kVec] = LoadRaw<Columns::kVec>(row + column, p.num_experts - column, p.vector);
  }
}

// Eight bytes of 0 or 1 to the bits of one, lowest first.
__device__ __forceinline__ uint8_t PackBits(uint64_t bytes) {
  return static_cast<uint8_t>((bytes * 0x0102040810204080ull) >> 56);
}

template <class Columns>
__device__ __forceinline__ void StoreMap(const FwdParams& p, const uint8_t* map, int lane,
                                         uint8_t* out) {
  constexpr int kVec = Columns::kVec;
  if (p.options.bitmap) {
    for (int i = lane; i < p.map_bytes; i += kWarp) {
      out[i] = PackBits(reinterpret_cast<const uint64_t*>(map)[i]);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < Columns::kSize; j += kVec) {
    const int column = Columns::Of(lane, j);
    StoreRaw<kVec>(*reinterpret_cast<const Raw<uint8_t, kVec>*>(map + column), out + column,
                   p.num_experts - column, p.vector);
  }
}

template <class Logit, class Columns>
__global__ void __launch_bounds__(kWarp* kWarps, Columns::kSize > 8 ? 3 : 4)
    TopkRouterFwdKernel(const FwdParams p) {
  constexpr int kVec = Columns::kVec;
  extern __shared__ __align__(16) char shared[];
  float* bias = reinterpret_cast<float*>(shared);
  const int warp = WarpIndex();
  const int lane = threadIdx.x % kWarp;
  WarpRow<Logit, Columns>& mine =
      reinterpret_cast<WarpRow<Logit, Columns>*>(bias + Columns::kPitch)[warp];
  for (int e = lane; e < Columns::kPitch; e += kWarp) {
    RoundTo(0.0f, mine.weights + e);
    mine.map[e] = 0;
  }
  const TopkRouterOptions& o = p.options;
  const int log_group_threads = LogGroupThreads(o, p.num_experts);
  const int64_t step = int64_t{gridDim.x} * kWarps;

  for (int64_t item = blockIdx.y; item < p.batch; item += gridDim.y) {
    __syncthreads();
    for (int e = threadIdx.x; e < Columns::kPitch; e += blockDim.x) {
      const float* item_bias = p.expert_bias + item * p.bias_stride;
      bias[e] = e >= p.num_experts         ? kMinusInfinity
                : p.expert_bias != nullptr ? item_bias[e]
                                           : -0.0f;
    }
    __syncthreads();
    const Logit* logits = static_cast<const Logit*>(p.logits) + item * p.logits_stride;
    const bool* mask = p.valid_mask;
    if (mask != nullptr) mask += item * p.mask_stride;

    int64_t row = int64_t{blockIdx.x} * kWarps + warp;
    Raw<Logit, kVec> raw[Columns::kSize / kVec];
    if (row < p.num_tokens) {
      LoadLogits<Logit, Columns>(p, logits + row * p.num_experts, lane, raw);
    }
    for (; row < p.num_tokens; row += step) {
      RegisterRow<Columns> x;
#pragma unroll
      for (int j = 0; j < Columns::kSize; j += kVec) {
        Unpack<Logit, kVec>(raw[j / kVec], x.values + j);
      }
      if (p.num_experts < Columns::kPitch) {
#pragma unroll
        for (int j = 0; j < Columns::kSize; ++j) {
          if (Columns::Of(lane, j) >= p.num_experts) x[j] = kMinusInfinity;
        }
      }
      if (row + step < p.num_tokens) {
        LoadLogits<Logit, Columns>(p, logits + (row + step) * p.num_experts, lane, raw);
      }
      const int64_t index = item * p.num_tokens + row;
      const bool valid = __all_sync(kAllLanes, mask == nullptr || mask[row]);
      int column = 0;
      float weight = 0.0f;
      if (valid) {
        ScoreRow(o, x);
#pragma unroll
        for (int j = 0; j < Columns::kSize; ++j) mine.scores[Columns::Of(lane, j)] = x[j];
        __syncwarp();
        column = SelectFew<Columns>(o, log_group_threads, x.values, mine.scores, bias,
                                    p.cut_is_exact, lane);
        if (!o.aux_scores) {
          const float score = mine.scores[column];
          float max = 0.0f;
          if (o.kind == ScoreKind::kSoftmaxAfterTopk) max = WarpChosenMax(score, lane < o.topk);
          weight = WarpWeight(o, score, lane < o.topk, max);
        }
        if (lane < o.topk) {
          RoundTo(weight, mine.weights + column);
          mine.map[column] = 1;
        }
      } else {
#pragma unroll
        for (int j = 0; j < Columns::kSize; ++j) x[j] = 0.0f;  // aux scores of a masked row
      }
      __syncwarp();
      StoreMap<Columns>(p, mine.map, lane, p.routing_map + index * p.map_bytes);
#pragma unroll
      for (int j = 0; j < Columns::kSize; j += kVec) {
        const int first = Columns::Of(lane, j);
        const int present = p.num_experts - first;
        if (o.aux_scores) {
          StoreRaw<kVec>(Pack<float, kVec>(x.values + j),
                         static_cast<float*>(p.out) + index * p.num_experts + first, present,
                         p.vector);
        } else {
          StoreRaw<kVec>(*reinterpret_cast<const Raw<Logit, kVec>*>(mine.weights + first),
                         static_cast<Logit*>(p.out) + index * p.num_experts + first, present,
                         p.vector);
        }
      }
      __syncwarp();
      if (valid && lane < o.topk) {
        RoundTo(0.0f, mine.weights + column);
        mine.map[column] = 0;
      }
    }
  }
}

// ---- Rows in shared memory: any number of experts, of chosen ones and of groups.

template <class Logit>
__global__ void TopkRouterFwdAnyKernel(const FwdParams p, const AnySize size) {
  using Columns = SharedRow::Columns;
  extern __shared__ __align__(16) char shared[];
  const int warp = WarpIndex();
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  float* first = reinterpret_cast<float*>(shared + int64_t{warp} * size.bytes);
  float* values = first + size.blocks * Columns::kWidth;
  uint16_t* chosen = reinterpret_cast<uint16_t*>(values + size.values);
  SharedRow x = {first, lane, size.blocks * Columns::kVec};
  const TopkRouterOptions& o = p.options;
  const int n = p.num_experts;

  for (int64_t item = blockIdx.y; item < p.batch; item += gridDim.y) {
    const float* bias = p.expert_bias;
    if (bias != nullptr) bias += item * p.bias_stride;
    for (int64_t row = int64_t{blockIdx.x} * warps + warp; row < p.num_tokens;
         row += int64_t{gridDim.x} * warps) {
      const Logit* logits = static_cast<const Logit*>(p.logits) + item * p.logits_stride + row * n;
      const int64_t index = item * p.num_tokens + row;
      uint8_t* map = p.routing_map + index * p.map_bytes;
      const bool valid = p.valid_mask == nullptr || p.valid_mask[item * p.mask_stride + row];
      float* scores_out = static_cast<float*>(p.out) + index * n;
      Logit* weights_out = static_cast<Logit*>(p.out) + index * n;
      RowScale scale = {};
      if (valid) {
        for (int j = 0; j < x.size(); ++j) {
          const int column = Columns::Of(lane, j);
          x[j] = column < n ? ToFloat(logits[column]) : kMinusInfinity;
        }
        scale = ScoreRow(o, x);
        for (int j = 0; j < x.size(); ++j) {
          const int column = Columns::Of(lane, j);
          uint32_t key = kExcludedKey;
          if (column < n) {
            if (o.aux_scores) scores_out[column] = CanonicalNan(x[j]);
            key = SelectionKey(bias == nullptr ? x[j] : x[j] + bias[column]);
          }
          x[j] = __uint_as_float(key);
        }
        __syncwarp();
        if (o.num_groups > 1) KeepGroupsShared(o, n, first, values, lane);
        SelectAny(x, o.topk, chosen, lane);
      }
      // The map, and zeros that the weights then replace.
      for (int i = lane; i < p.map_bytes; i += kWarp) {
        unsigned byte = 0;
        for (int b = 0; valid && b < (o.bitmap ? 8 : 1); ++b) {
          const int column = o.bitmap ? 8 * i + b : i;
          const bool is_chosen = column < n && __float_as_uint(first[column]) == kChosenKey;
          byte |= is_chosen ? 1u << b : 0u;
        }
        map[i] = static_cast<uint8_t>(byte);
      }
      for (int e = lane; e < n; e += kWarp) {
        if (!o.aux_scores) {
          RoundTo(0.0f, weights_out + e);
        } else if (!valid) {
          scores_out[e] = 0.0f;
        }
      }
      __syncwarp();
      if (!valid || o.aux_scores) continue;

      WarpWeightsShared(
          o, values, lane, [&](int) { return true; },
          [&](int i) { return ScoreOf(o, scale, ToFloat(logits[chosen[i]])); },
          [&](int i, float weight) { RoundTo(weight, weights_out + chosen[i]); });
      __syncwarp();
    }
  }
}

// ---- Launches.

template <class Logit, class Columns>
cudaError_t LaunchRegisters(cudaStream_t stream, const FwdParams& p) {
  dim3 grid;
  const cudaError_t status =
      FillDevice((p.num_tokens + kWarps - 1) / kWarps, Columns::kSize > 8 ? 3 : 4, p.batch, &grid);
  if (status != cudaSuccess) return status;
  const size_t shared = sizeof(float) * Columns::kPitch + kWarps * sizeof(WarpRow<Logit, Columns>);
  static_assert(
      sizeof(float) * Columns::kPitch + kWarps * sizeof(WarpRow<Logit, Columns>) <= 48 * 1024,
      "what every device gives without asking");
  TopkRouterFwdKernel<Logit, Columns><<<grid, kWarp * kWarps, shared, stream>>>(p);
  return cudaGetLastError();
}

template <class Logit>
cudaError_t LaunchAny(cudaStream_t stream, const FwdParams& p) {
  const AnySize size = AnySizeOf(p.num_experts, p.options);
  constexpr int kSharedBytes = 96 * 1024;
  int warps = kSharedBytes / size.bytes;
  warps = warps > kWarps ? kWarps : warps;
  const int shared = warps * size.bytes;
  cudaError_t status = cudaFuncSetAttribute(TopkRouterFwdAnyKernel<Logit>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  dim3 grid;
  status = FillDevice((p.num_tokens + warps - 1) / warps, 4, p.batch, &grid);
  if (status != cudaSuccess) return status;
  TopkRouterFwdAnyKernel<Logit><<<grid, kWarp * warps, shared, stream>>>(p, size);
  return cudaGetLastError();
}

template <class Logit>
cudaError_t Launch(cudaStream_t stream, FwdParams p) {
  // 16-bit logits fill at most the upper 19 bits of a key, and columns the lower 9.
  p.cut_is_exact = sizeof(Logit) == 2 && p.expert_bias == nullptr &&
                   p.options.kind == ScoreKind::kSoftmaxAfterTopk;
  if (!FitsRegisters(p.num_experts, p.options)) return LaunchAny<Logit>(stream, p);
  if (p.num_experts <= 64) return LaunchRegisters<Logit, Columns<2, 1>>(stream, p);
  if (p.num_experts <= 128) return LaunchRegisters<Logit, Columns<4, 1>>(stream, p);
  if (p.num_experts <= 256) return LaunchRegisters<Logit, Columns<4, 2>>(stream, p);
  return LaunchRegisters<Logit, Columns<4, 4>>(stream, p);
}

}  // namespace

cudaError_t LaunchTopkRouterFwd(cudaStream_t stream, const TopkRouterFwd& op) {
  if (op.batch == 0 || op.num_tokens == 0) return cudaSuccess;
  FwdParams p = {};
  p.logits = op.logits;
  p.expert_bias = op.expert_bias;
  p.valid_mask = op.valid_mask;
  p.out = op.out;
  p.routing_map = op.routing_map;
  p.logits_stride = op.logits_batched ? op.num_tokens * op.num_experts : 0;
  p.bias_stride = op.expert_bias_batched ? op.num_experts : 0;
  p.mask_stride = op.valid_mask_batched ? op.num_tokens : 0;
  p.batch = op.batch;
  p.num_tokens = op.num_tokens;
  p.num_experts = op.num_experts;
  p.map_bytes = MapBytes(op.num_experts, op.options.bitmap);
  p.options = op.options;
  p.vector = RowsAllowVectors(NeighbouringColumns(op.num_experts), op.num_experts,
                              {op.logits, op.out, op.routing_map});
  const bool one_run = op.logits_batched && p.bias_stride == 0 &&
                       (op.valid_mask == nullptr || op.valid_mask_batched);
  if (one_run) {  // a batch of whole items is one long item
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
