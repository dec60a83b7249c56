// CUDA kernels of the auxiliary loss: a block per slot writes one partial, one warp folds them.
//
// The order of every sum is that of aux_loss.h; the block shape below changes speed only. The two
// kernels are joined by programmatic dependent launch: the fold is resident while the slots are
// read, and waits for their writes.
#include <cuda_runtime.h>

#include <cstdint>

#include "aux_loss/aux_loss.h"
#include "aux_loss/aux_loss_launch.h"
#include "core/numerics.h"
#include "core/slots.h"

namespace jax_moe_det {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;  // of a block; two fit on a multiprocessor: 256 slots on 132
constexpr unsigned kAllLanes = 0xffffffffu;

// ---- Loads of kVec neighbouring elements, kept raw until they are added (bfloat16 would spill).

template <int kBytes>
struct RawBits;
template <>
struct RawBits<16> {
  using Type = uint4;
};
template <>
struct RawBits<4> {
  using Type = uint32_t;
};
template <>
struct RawBits<2> {
  using Type = uint16_t;
};

template <class Score, int kVec>
struct alignas(sizeof(Score) * kVec) Vec {
  using Raw = typename RawBits<sizeof(Score) * kVec>::Type;
  Raw raw;

  static __device__ __forceinline__ Vec Zero() {
    Vec v;
    v.raw = Raw{};
    return v;
  }
  // Scores are read once: past the L1 cache.
  static __device__ __forceinline__ Vec Load(const Score* p) {
    Vec v;
    if constexpr (sizeof(Raw) == 16) {
      asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(v.raw.x), "=r"(v.raw.y), "=r"(v.raw.z), "=r"(v.raw.w)
          : "l"(p));
    } else {
      v.raw = __ldg(reinterpret_cast<const Raw*>(p));
    }
    return v;
  }
  __device__ __forceinline__ void AddTo(float* sums) const {
    Score scores[kVec];
    memcpy(scores, &raw, sizeof(raw));
#pragma unroll
    for (int c = 0; c < kVec; ++c) sums[c] = sums[c] + ToFloat(scores[c]);
  }
};

// Sum of leaves kFirst, kFirst + kStep, ... below kCount, folded by halves: the last addition joins
// the even and the odd leaves. Depth first, so that only log2(kCount) sums are alive.
template <int kCount, int kVec, int kFirst = 0, int kStep = 1, class Leaf>
__device__ __forceinline__ void FoldHalves(const Leaf& leaf, float* sum) {
  if constexpr (kStep == kCount) {
    leaf(kFirst, sum);
  } else {
    float other[kVec];
    FoldHalves<kCount, kVec, kFirst, 2 * kStep>(leaf, sum);
    FoldHalves<kCount, kVec, kFirst + kStep, 2 * kStep>(leaf, other);
#pragma unroll
    for (int c = 0; c < kVec; ++c) sum[c] = sum[c] + other[c];
  }
}

// ---- The lane sums of one thread, folded to one row of kVec values.
//
// Thread l of kLaneThreads owns lanes l, l + kLaneThreads, ...: the first folds by halves happen
// in its registers.

// Rows in flight of one lane. Two chunks hide the memory's latency; 16-bit scores hold twice the
// sums per load and have registers for one.
template <class Score>
constexpr int kRowsInFlight = sizeof(Score) == 4 ? 2 * kChunk : kChunk;

template <class Score, int kVec, int kLanes, bool kMasked>
__device__ __forceinline__ void LaneSum(const Score* column, const bool* valid_mask,
                                        int num_columns, int num_rows, int lane, float* sum) {
  constexpr int kUnroll = kRowsInFlight<Score>;
  using V = Vec<Score, kVec>;
  double lane_sum[kVec];
#pragma unroll
  for (int c = 0; c < kVec; ++c) lane_sum[c] = 0.0;
#pragma unroll 1
  for (int row = lane; row < num_rows; row += kUnroll * kLanes) {
    V loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int r = row + u * kLanes;
      const bool valid = r < num_rows && (!kMasked || valid_mask[r]);
      loaded[u] = valid ? V::Load(column + static_cast<int64_t>(r) * num_columns) : V::Zero();
    }
#pragma unroll
    for (int first = 0; first < kUnroll; first += kChunk) {
      float chunk[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) chunk[c] = 0.0f;
#pragma unroll
      for (int u = first; u < first + kChunk; ++u) loaded[u].AddTo(chunk);
#pragma unroll
      for (int c = 0; c < kVec; ++c) lane_sum[c] += static_cast<double>(chunk[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < kVec; ++c) sum[c] = static_cast<float>(lane_sum[c]);
}

// Any number of rows.
template <class Score, int kVec, int kLanes, int kLanesPerThread, bool kMasked>
__device__ __forceinline__ void ManyRows(const Score* column, const bool* valid_mask,
                                         int num_columns, int num_rows, int l, float* sum) {
  constexpr int kLaneThreads = kLanes / kLanesPerThread;
  FoldHalves<kLanesPerThread, kVec>(
      [=](int i, float* lane_sum) {
        LaneSum<Score, kVec, kLanes, kMasked>(column, valid_mask, num_columns, num_rows,
                                              l + i * kLaneThreads, lane_sum);
      },
      sum);
}

// At most kRowsPerLane rows a lane, one chunk: every load is issued before the first add. The
// float64 lane sum of a single chunk is that chunk.
template <class Score, int kVec, int kLanes, int kLanesPerThread, int kRowsPerLane>
__device__ __forceinline__ void FewRows(const Score* column, int num_columns, int num_rows, int l,
                                        float* sum) {
  static_assert(kRowsPerLane <= kChunk, "one chunk only");
  constexpr int kLaneThreads = kLanes / kLanesPerThread;
  using V = Vec<Score, kVec>;
  V loaded[kLanesPerThread][kRowsPerLane];
#pragma unroll
  for (int i = 0; i < kLanesPerThread; ++i) {
#pragma unroll
    for (int u = 0; u < kRowsPerLane; ++u) {
      const int r = l + i * kLaneThreads + u * kLanes;
      loaded[i][u] =
          r < num_rows ? V::Load(column + static_cast<int64_t>(r) * num_columns) : V::Zero();
    }
  }
  FoldHalves<kLanesPerThread, kVec>(
      [&loaded](int i, float* lane_sum) {
#pragma unroll
        for (int c = 0; c < kVec; ++c) lane_sum[c] = 0.0f;
#pragma unroll
        for (int u = 0; u < kRowsPerLane; ++u) loaded[i][u].AddTo(lane_sum);
      },
      sum);
}

// Sum over the warp's 32 values, adjacent pairs first; every lane holds it. IEEE addition
// commutes, so the exchange order within a pair does not matter.
__device__ __forceinline__ double WarpFoldAdjacentPairs(double value) {
#pragma unroll
  for (int stride = 1; stride < kWarp; stride *= 2) {
    value = value + __shfl_xor_sync(kAllLanes, value, stride);
  }
  return value;
}

template <int kCount>
__device__ __forceinline__ double FoldAdjacentPairsOf(double* values) {
#pragma unroll
  for (int stride = 1; stride < kCount; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * stride) values[i] = values[i] + values[i + stride];
  }
  return values[0];
}

// Column sum: the block's lane threads folded by halves.
template <int kLaneThreads>
__device__ __forceinline__ double ColumnSum(const float* lane_sums, int tile, int column) {
  float sum;
  FoldHalves<kLaneThreads, 1>([=](int i, float* lane) { *lane = lane_sums[i * tile + column]; },
                              &sum);
  return static_cast<double>(sum);
}

// Block (column groups, kLaneThreads); a group is kVec neighbouring columns. `kLanes` may be less
// than NumLanes where the slots have no more rows: the missing lanes are +0.
// kRowsPerLane 0: any number. kDotColumns: neighbouring dot lanes of one thread.
template <class Score, int kVec, int kLanes, int kLanesPerThread, int kRowsPerLane,
          int kDotColumns, bool kMasked>
__global__ void __launch_bounds__(kMaxThreads, 2) AuxLossPartialsKernel(const AuxLossPartials p) {
  constexpr int kLaneThreads = kLanes / kLanesPerThread;
  extern __shared__ __align__(16) float lane_sums[];  // [kLaneThreads, tile]
  __shared__ double dot_lanes[kDotLanes];             // used where columns exceed one tile
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int num_columns = static_cast<int>(p.num_columns);
  const int tile = blockDim.x * kVec;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int num_threads = blockDim.x * blockDim.y;
  int64_t b = 0;
  int slot = blockIdx.x;
  if (p.batch > 1) {
    b = blockIdx.x / static_cast<unsigned>(p.num_slots);
    slot = blockIdx.x % static_cast<unsigned>(p.num_slots);
  }
  const int64_t begin = slot * p.rows_per_slot;
  const int64_t rest = p.num_tokens > begin ? p.num_tokens - begin : 0;
  const int num_rows = static_cast<int>(rest < p.rows_per_slot ? rest : p.rows_per_slot);
  const int64_t first_row = (p.probs_batched ? b * p.num_tokens : 0) + begin;
  const Score* probs = static_cast<const Score*>(p.probs) + first_row * p.num_columns;
  const int64_t counts_offset = p.counts.batched ? b * p.num_columns : 0;
  const bool* valid_mask =
      kMasked ? p.valid_mask + (p.valid_mask_batched ? b * p.num_tokens : 0) + begin : nullptr;
  const bool one_tile = num_columns <= tile;

  if (!one_tile) {
    for (int i = thread; i < kDotLanes; i += num_threads) dot_lanes[i] = 0.0;
  }
  for (int first = 0; first < num_columns; first += tile) {
    const int column = first + threadIdx.x * kVec;
    float sum[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) sum[c] = 0.0f;
    if (column < num_columns) {
      if constexpr (kRowsPerLane > 0) {
        FewRows<Score, kVec, kLanes, kLanesPerThread, kRowsPerLane>(probs + column, num_columns,
                                                                    num_rows, threadIdx.y, sum);
      } else {
        ManyRows<Score, kVec, kLanes, kLanesPerThread, kMasked>(
            probs + column, valid_mask, num_columns, num_rows, threadIdx.y, sum);
      }
    }
    float* mine = lane_sums + threadIdx.y * tile + threadIdx.x * kVec;
    if constexpr (kVec % 4 == 0) {
#pragma unroll
      for (int c = 0; c < kVec; c += 4) {
        *reinterpret_cast<float4*>(mine + c) =
            make_float4(sum[c], sum[c + 1], sum[c + 2], sum[c + 3]);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kVec; ++c) mine[c] = sum[c];
    }
    __syncthreads();
    if (one_tile) break;
    // Dot lane i takes columns i, i + 256, ... of this tile; tiles come in ascending order.
    const int width = num_columns - first < tile ? num_columns - first : tile;
#pragma unroll 1
    for (int i = thread; i < kDotLanes; i += num_threads) {
#pragma unroll 1
      for (int e = i; e < width; e += kDotLanes) {
        dot_lanes[i] = Fma(Count(p.counts, counts_offset + first + e),
                           ColumnSum<kLaneThreads>(lane_sums, tile, e), dot_lanes[i]);
      }
    }
    __syncthreads();
  }
  // One warp finishes: a second barrier would cost more than the idle threads.
  if (thread >= kWarp) return;
  double dot[kDotColumns];
#pragma unroll
  for (int c = 0; c < kDotColumns; ++c) {
    const int lane = thread * kDotColumns + c;
    if (one_tile) {
      dot[c] = 0.0;
      for (int e = lane; e < num_columns; e += kDotLanes) {
        dot[c] = Fma(Count(p.counts, counts_offset + e),
                     ColumnSum<kLaneThreads>(lane_sums, tile, e), dot[c]);
      }
    } else {
      dot[c] = dot_lanes[lane];
    }
  }
  const double sum = WarpFoldAdjacentPairs(FoldAdjacentPairsOf<kDotColumns>(dot));
  if (thread == 0) p.partials[blockIdx.x] = CanonicalNan(static_cast<float>(sum));
}

// One warp a loss; lane i holds the 8 partials from 8 i.
__global__ void __launch_bounds__(kWarp) AuxLossFinalKernel(const AuxLossFinal f) {
  const int64_t b = blockIdx.x;
  const int lane = threadIdx.x;
  // Before the wait: nothing of the previous kernel is read here.
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  constexpr int kPerThread = kSlots / kWarp;
  const float* partials = f.partials + b * f.num_slots;
  double values[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int slot = lane * kPerThread + i;
    values[i] = slot < f.num_slots ? static_cast<double>(__ldcg(partials + slot)) : 0.0;
  }
  const double sum = WarpFoldAdjacentPairs(FoldAdjacentPairsOf<kPerThread>(values));
  if (lane == 0) {
    f.loss[b] = LossFromSum(f.scale, Total(f.scale.total_num_tokens, b), sum);
  }
}

template <class Score>
__global__ void AuxLossRowKernel(const AuxLossRow r) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= r.batch * r.num_columns) return;
  const int64_t b = i / r.num_columns;
  static_cast<Score*>(r.d_probs_row)[i] = GradientElement<Score>(
      r.scale, Total(r.scale.total_num_tokens, b),
      Count(r.counts, r.counts.batched ? i : i - b * r.num_columns),
      r.d_loss[r.d_loss_batched ? b : 0]);
}

// The negative control: blocks add their float32 sums with an atomic, in whatever order they end.
template <class Score>
__global__ void AuxLossAtomicKernel(const AuxLossPartials p, const AuxLossFinal f) {
  const int64_t b = blockIdx.y;
  const double total = Total(f.scale.total_num_tokens, b);
  if (IsZero(f.scale, total)) return;
  const Score* probs = static_cast<const Score*>(p.probs) +
                       (p.probs_batched ? b * p.num_tokens * p.num_columns : 0);
  const int64_t counts_offset = p.counts.batched ? b * p.num_columns : 0;
  float sum = 0.0f;
  for (int64_t row = blockIdx.x; row < p.num_tokens; row += gridDim.x) {
    if (p.valid_mask != nullptr &&
        !p.valid_mask[(p.valid_mask_batched ? b * p.num_tokens : 0) + row]) {
      continue;
    }
    for (int64_t e = threadIdx.x; e < p.num_columns; e += blockDim.x) {
      sum += ToFloat(probs[row * p.num_columns + e]) *
             static_cast<float>(Count(p.counts, counts_offset + e));
    }
  }
  for (int stride = kWarp / 2; stride > 0; stride /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, stride);
  }
  if (threadIdx.x % kWarp == 0) {
    atomicAdd(f.loss + b, sum * static_cast<float>(ScaleFactor(f.scale, total)));
  }
}

// ---- Launchers.

// Programmatic dependent launch needs code of compute capability 9.0 on both sides: older code
// lacks the wait. The loaded image decides, not the device alone.
cudaError_t SupportsDependentLaunch(bool* supported) {
  cudaFuncAttributes attributes;
  const cudaError_t status =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(AuxLossFinalKernel));
  *supported = status == cudaSuccess && attributes.ptxVersion >= 90;
  return status;
}

cudaError_t LaunchFinal(cudaStream_t stream, const AuxLossFinal& f, bool dependent) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(f.batch));
  config.blockDim = dim3(kWarp);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, AuxLossFinalKernel, f);
}

// The block's shape: column groups by lane threads.
template <class Score, int kVec, int kLanes, int kLanesPerThread, int kRowsPerLane,
          int kDotColumns, bool kMasked>
cudaError_t LaunchPartialsKernel(cudaStream_t stream, const AuxLossPartials& p, int groups) {
  constexpr int kLaneThreads = kLanes / kLanesPerThread;
  const dim3 block(groups, kLaneThreads);
  const size_t shared = sizeof(float) * kLaneThreads * groups * kVec;
  AuxLossPartialsKernel<Score, kVec, kLanes, kLanesPerThread, kRowsPerLane, kDotColumns, kMasked>
      <<<static_cast<unsigned>(p.batch * p.num_slots), block, shared, stream>>>(p);
  return cudaGetLastError();
}

// Chooses the block: lanes per thread, so that a block has at most kMaxThreads threads, and few or
// many rows a lane. kLanes, kDotColumns: see NumLanes; narrow shapes need fewer dot lanes a thread.
template <class Score, int kVec, int kLanes, int kDotColumns, bool kMasked>
cudaError_t SelectRows(cudaStream_t stream, const AuxLossPartials& p) {
  constexpr int kMaxGroups = kVec == 1 ? 256 : 512 / kVec;
  const int64_t wanted = (p.num_columns + kVec - 1) / kVec;
  const int groups = static_cast<int>(wanted < kMaxGroups ? wanted : kMaxGroups);
  if constexpr (kVec == 1) {
    // At most 256 x 16, 128 x 32, 32 x 64 or 16 x 128 column lanes.
    return LaunchPartialsKernel<Score, 1, kLanes, kLanes <= 32 ? 8 : 4, 0, kDotColumns, kMasked>(
        stream, p, groups);
  } else if constexpr (kLanes > 32) {
    return LaunchPartialsKernel<Score, kVec, kLanes, 1, 0, kDotColumns, kMasked>(stream, p,
                                                                                 groups);
  } else {
    const int lane_groups = groups * kLanes;
    if constexpr (!kMasked) {
      const int64_t rows_per_lane = (p.rows_per_slot + kLanes - 1) / kLanes;
      if (kLanes == 32 && p.rows_per_slot <= 16 && lane_groups <= 8 * kMaxThreads) {
        // Half of the lanes hold no row.
        return LaunchPartialsKernel<Score, kVec, 16, 4, 1, kDotColumns, false>(stream, p, groups);
      }
      if (rows_per_lane == 1 && lane_groups >= 8 * kWarp) {
        return LaunchPartialsKernel<Score, kVec, kLanes, 8, 1, kDotColumns, false>(stream, p,
                                                                                   groups);
      }
      if (rows_per_lane == 2 && lane_groups <= 4 * kMaxThreads) {
        return LaunchPartialsKernel<Score, kVec, kLanes, 4, 2, kDotColumns, false>(stream, p,
                                                                                   groups);
      }
      if (rows_per_lane <= 4 && lane_groups <= 2 * kMaxThreads) {
        return LaunchPartialsKernel<Score, kVec, kLanes, 2, 4, kDotColumns, false>(stream, p,
                                                                                   groups);
      }
    }
    if (lane_groups <= 2 * kMaxThreads) {
      return LaunchPartialsKernel<Score, kVec, kLanes, 2, 0, kDotColumns, kMasked>(stream, p,
                                                                                   groups);
    }
    return LaunchPartialsKernel<Score, kVec, kLanes, 4, 0, kDotColumns, kMasked>(stream, p,
                                                                                 groups);
  }
}

template <class Score, int kVec, bool kMasked>
cudaError_t SelectLanes(cudaStream_t stream, const AuxLossPartials& p) {
  switch (NumLanes(p.num_columns)) {
    case 16:
      return SelectRows<Score, kVec, 16, 8, kMasked>(stream, p);
    case 32:
      return SelectRows<Score, kVec, 32, 4, kMasked>(stream, p);
    case 64:
      return SelectRows<Score, kVec, 64, 1, kMasked>(stream, p);
    default:
      return SelectRows<Score, kVec, kMaxLanes, 1, kMasked>(stream, p);
  }
}

// The widest load that every row's start allows. XLA may hand out a slice of a buffer: the
// pointer's alignment counts too.
template <class Score>
cudaError_t SelectKernel(cudaStream_t stream, const AuxLossPartials& p) {
  constexpr int kWideVec = 16 / sizeof(Score);
  const uint64_t alignment =
      reinterpret_cast<uint64_t>(p.probs) | (p.num_columns * sizeof(Score));
  const bool wide = alignment % 16 == 0;
  if (p.valid_mask != nullptr) {
    return wide ? SelectLanes<Score, kWideVec, true>(stream, p)
                : SelectLanes<Score, 1, true>(stream, p);
  }
  return wide ? SelectLanes<Score, kWideVec, false>(stream, p)
              : SelectLanes<Score, 1, false>(stream, p);
}

}  // namespace

cudaError_t LaunchAuxLossPartials(cudaStream_t stream, const AuxLossPartials& partials) {
  if (partials.batch == 0 || partials.num_slots == 0) return cudaSuccess;
  switch (partials.score_type) {
    case ScoreType::kFloat32:
      return SelectKernel<float>(stream, partials);
    case ScoreType::kBFloat16:
      return SelectKernel<BFloat16>(stream, partials);
    default:
      return SelectKernel<Float16>(stream, partials);
  }
}

cudaError_t LaunchAuxLossFinal(cudaStream_t stream, const AuxLossFinal& final_sum) {
  if (final_sum.batch == 0) return cudaSuccess;
  return LaunchFinal(stream, final_sum, /*dependent=*/false);
}

cudaError_t LaunchAuxLossFwd(cudaStream_t stream, const AuxLossPartials& partials,
                             const AuxLossFinal& final_sum) {
  if (partials.batch == 0) return cudaSuccess;
  bool dependent = false;
  cudaError_t status = SupportsDependentLaunch(&dependent);
  if (status != cudaSuccess) return status;
  status = LaunchAuxLossPartials(stream, partials);
  if (status != cudaSuccess) return status;
  return LaunchFinal(stream, final_sum, dependent);
}

cudaError_t LaunchAuxLossFwdAtomic(cudaStream_t stream, const AuxLossPartials& partials,
                                   const AuxLossFinal& final_sum) {
  if (partials.batch == 0) return cudaSuccess;
  cudaError_t status =
      cudaMemsetAsync(final_sum.loss, 0, sizeof(float) * final_sum.batch, stream);
  if (status != cudaSuccess || partials.num_tokens == 0) return status;
  const int64_t rows = partials.num_tokens < 1024 ? partials.num_tokens : 1024;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(partials.batch));
  switch (partials.score_type) {
    case ScoreType::kFloat32:
      AuxLossAtomicKernel<float><<<grid, 256, 0, stream>>>(partials, final_sum);
      break;
    case ScoreType::kBFloat16:
      AuxLossAtomicKernel<BFloat16><<<grid, 256, 0, stream>>>(partials, final_sum);
      break;
    default:
      AuxLossAtomicKernel<Float16><<<grid, 256, 0, stream>>>(partials, final_sum);
      break;
  }
  return cudaGetLastError();
}

cudaError_t LaunchAuxLossBwd(cudaStream_t stream, const AuxLossRow& row) {
  constexpr int kThreads = 128;
  const int64_t size = row.batch * row.num_columns;
  if (size == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((size + kThreads - 1) / kThreads);
  switch (row.score_type) {
    case ScoreType::kFloat32:
      AuxLossRowKernel<float><<<blocks, kThreads, 0, stream>>>(row);
      break;
    case ScoreType::kBFloat16:
      AuxLossRowKernel<BFloat16><<<blocks, kThreads, 0, stream>>>(row);
      break;
    default:
      AuxLossRowKernel<Float16><<<blocks, kThreads, 0, stream>>>(row);
      break;
  }
  return cudaGetLastError();
}

}  // namespace jax_moe_det
