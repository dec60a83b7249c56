// CUDA kernels of the auxiliary loss: a block per slot (of small slots, a warp) writes one partial,
// one warp folds them.
//
// The order of every sum is that of aux_loss.h; the block shape below changes speed only. The two
// kernels are joined by programmatic dependent launch: the fold is resident while the slots are
// read, and waits for their writes.
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "aux_loss/aux_loss.h"
#include "aux_loss/aux_loss_launch.h"
#include "core/fold_halves.cuh"
#include "core/numerics.h"
#include "core/slots.h"

namespace jax_moe_det {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;  // of a block; two fit on a multiprocessor: 256 slots on 132
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int64_t kMaxGridY = 65535;

// What the kernel reads of AuxLossPartials, in the widths that addresses are computed in: 64-bit
// sizes in the inner loop cost more instructions than the sums. A stride of 0 shares an operand.
struct PartialsParams {
  // What every block reads comes first: it shares a line of the constant cache.
  const char* probs;
  const char* counts;
  float* partials;
  int64_t slot_bytes;
  int rows_per_slot;
  unsigned whole_slots;  // have rows_per_slot rows; the next one has last_rows, the others none
  int last_rows;
  unsigned num_slots;
  int row_bytes;
  int num_columns;
  CountType count_type;
  const bool* valid_mask;
  int64_t probs_stride;  // bytes from item to item
  int64_t counts_stride;
  int64_t mask_stride;
};

// ---- Loads of kVec neighbouring elements, kept raw until they are added (bfloat16 would spill).

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
  static __device__ __forceinline__ Vec Load(const char* p) {
    Vec v;
    if constexpr (sizeof(Raw) == 16) {
      asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(v.raw.x), "=r"(v.raw.y), "=r"(v.raw.z), "=r"(v.raw.w)
          : "l"(p));
    } else if constexpr (sizeof(Raw) == 8) {
      asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
          : "=r"(v.raw.x), "=r"(v.raw.y)
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
  // The first row of a chunk: +0 + x differs from x for x = -0 only, and the dot, which starts at
  // +0, does not see that sign.
  __device__ __forceinline__ void Start(float* sums) const {
    Score scores[kVec];
    memcpy(scores, &raw, sizeof(raw));
#pragma unroll
    for (int c = 0; c < kVec; ++c) sums[c] = ToFloat(scores[c]);
  }
};

// ---- The lane sums of one thread, folded to one row of kVec values.
//
// Thread l of kLaneThreads owns lanes l, l + kLaneThreads, ...: the first folds by halves happen
// in its registers.

// What a thread loads before it adds: chunks of neighbouring lanes, so that a block reads its rows
// from first to last, and of 32-bit scores two chunks, to hide the memory's latency. 16-bit scores
// hold twice the sums per load and have registers for one.
template <class Score, int kLanesPerThread>
constexpr int kLanesInFlight = sizeof(Score) == 4 && kLanesPerThread > 1 ? 2 : 1;
template <class Score, int kLanesPerThread>
constexpr int kRowsInFlight =
    sizeof(Score) == 4 && kLanesInFlight<Score, kLanesPerThread> == 1 ? 2 * kChunk : kChunk;

// Adds kRows rows: chunks of kChunk in float32, then to the lane sum.
template <class Score, int kVec, int kRows>
__device__ __forceinline__ void AddRows(const Vec<Score, kVec>* rows, double* lane_sum) {
#pragma unroll
  for (int first = 0; first < kRows; first += kChunk) {
    float chunk[kVec];
    rows[first].Start(chunk);
#pragma unroll
    for (int u = first + 1; u < first + kChunk; ++u) rows[u].AddTo(chunk);
#pragma unroll
    for (int c = 0; c < kVec; ++c) lane_sum[c] += static_cast<double>(chunk[c]);
  }
}

// Lanes `lane`, `lane` + kLanes / kCount, ... of a slot, folded by halves. Any number of rows.
template <class Score, int kVec, int kLanes, int kCount, int kRows, bool kMasked>
__device__ __forceinline__ void LaneSums(const char* column, int row_bytes, const bool* valid_mask,
                                         int num_rows, int lane, float* sum) {
  using V = Vec<Score, kVec>;
  constexpr int kApart = kLanes / kCount;
  const int64_t step = static_cast<int64_t>(kLanes) * row_bytes;
  double lane_sums[kCount][kVec];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) lane_sums[i][c] = 0.0;
  }
  int first = lane;  // row of the first lane
  const char* next = column + static_cast<int64_t>(lane) * row_bytes;
  if constexpr (!kMasked) {
    const int64_t apart = static_cast<int64_t>(kApart) * row_bytes;
#pragma unroll 1
    for (; first + (kCount - 1) * kApart + (kRows - 1) * kLanes < num_rows;
         first += kRows * kLanes) {
      V rows[kCount][kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const char* from = next;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          rows[i][u] = V::Load(from);
          from += apart;
        }
        next += step;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) AddRows<Score, kVec, kRows>(rows[i], lane_sums[i]);
    }
  }
  // The rest, row by row whether it exists; of a mask, everything.
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const char* from = next + static_cast<int64_t>(i * kApart) * row_bytes;
#pragma unroll 1
    for (int row = first + i * kApart; row < num_rows; row += kRows * kLanes) {
      V rows[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int r = row + u * kLanes;
        const bool exists = r < num_rows && (!kMasked || valid_mask[r]);
        rows[u] = exists ? V::Load(from) : V::Zero();
        from += step;
      }
      AddRows<Score, kVec, kRows>(rows, lane_sums[i]);
    }
  }
  FoldHalves<kCount, kVec>(
      [&lane_sums](int i, float* folded) {
#pragma unroll
        for (int c = 0; c < kVec; ++c) folded[c] = static_cast<float>(lane_sums[i][c]);
      },
      sum);
}

// Any number of rows.
template <class Score, int kVec, int kLanes, int kLanesPerThread, bool kMasked>
__device__ __forceinline__ void ManyRows(const char* column, int row_bytes, const bool* valid_mask,
                                         int num_rows, int l, float* sum) {
  constexpr int kCount = kLanesInFlight<Score, kLanesPerThread>;
  constexpr int kRows = kRowsInFlight<Score, kLanesPerThread>;
  FoldHalves<kLanesPerThread / kCount, kVec>(
      [=](int i, float* lane_sum) {
        LaneSums<Score, kVec, kLanes, kCount, kRows, kMasked>(
            column, row_bytes, valid_mask, num_rows, l + i * (kLanes / kLanesPerThread), lane_sum);
      },
      sum);
}

// At most kRowsPerLane rows a lane, one chunk: every load is issued before the first add. The
// float64 lane sum of a single chunk is that chunk.
// `meanwhile` runs while they are under way.
template <class Score, int kVec, int kLanes, int kLanesPerThread, int kRowsPerLane, class Meanwhile>
__device__ __forceinline__ void FewRows(const char* column, int row_bytes, int num_rows, int l,
                                        const Meanwhile& meanwhile, float* sum) {
  static_assert(kRowsPerLane <= kChunk, "one chunk only");
  constexpr int kLaneThreads = kLanes / kLanesPerThread;
  using V = Vec<Score, kVec>;
  V loaded[kRowsPerLane][kLanesPerThread];
  const char* row = column + static_cast<int64_t>(l) * row_bytes;
  const int64_t step = static_cast<int64_t>(kLaneThreads) * row_bytes;
#pragma unroll
  for (int u = 0; u < kRowsPerLane; ++u) {
#pragma unroll
    for (int i = 0; i < kLanesPerThread; ++i) {
      const bool exists = l + i * kLaneThreads + u * kLanes < num_rows;
      loaded[u][i] = exists ? V::Load(row) : V::Zero();
      row += step;
    }
  }
  meanwhile();
  FoldHalves<kLanesPerThread, kVec>(
      [&loaded](int i, float* lane_sum) {
        loaded[0][i].Start(lane_sum);
#pragma unroll
        for (int u = 1; u < kRowsPerLane; ++u) loaded[u][i].AddTo(lane_sum);
      },
      sum);
}

// Sum over the warp's first kCount values, adjacent pairs first; each of those lanes holds it. IEEE
// addition commutes, so the exchange order within a pair does not matter.
template <int kCount = kWarp>
__device__ __forceinline__ double WarpFoldAdjacentPairs(double value) {
#pragma unroll
  for (int stride = 1; stride < kCount; stride *= 2) {
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

// ---- The dot of one slot.

constexpr int kMaxTile = 512;  // columns that a block holds at once

// What a block keeps in shared memory.
struct Tile {
  const float* lane_sums;  // [lane threads, columns]
  int columns;
  int width;  // columns that exist
  // Copied while the scores are read: after the barrier nothing waits for global memory.
  const void* counts;
  CountType count_type;
};

__device__ __forceinline__ void CopyCounts(const char* counts, CountType type, int first, int width,
                                           int thread, int num_threads, void* shared) {
  char* to = static_cast<char*>(shared);
  if (type == CountType::kInt64) {
    counts += static_cast<int64_t>(first) * 8;
#pragma unroll 1
    for (int e = thread * 8; e < width * 8; e += num_threads * 8) {
      __pipeline_memcpy_async(to + e, counts + e, 8);
    }
  } else {
    counts += static_cast<int64_t>(first) * 4;
#pragma unroll 1
    for (int e = thread * 4; e < width * 4; e += num_threads * 4) {
      __pipeline_memcpy_async(to + e, counts + e, 4);
    }
  }
  __pipeline_commit();
}

// kDotColumns neighbouring sums of columns: the block's lane threads folded by halves. Columns
// that do not exist are +0. kQuads: rows of lane_sums start at multiples of 16 bytes.
template <int kLaneThreads, int kDotColumns, bool kQuads>
__device__ __forceinline__ void ColumnSums(const Tile& tile, int first, float* sums) {
  FoldHalves<kLaneThreads, kDotColumns>(
      [&tile, first](int i, float* lane) {
        const float* row = tile.lane_sums + i * tile.columns + first;
        if constexpr (kQuads) {
          static_assert(kDotColumns % 4 == 0, "whole quads");
#pragma unroll
          for (int c = 0; c < kDotColumns; c += 4) {
            const float4 quad = first + c < tile.width ? *reinterpret_cast<const float4*>(row + c)
                                                       : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            lane[c] = quad.x;
            lane[c + 1] = quad.y;
            lane[c + 2] = quad.z;
            lane[c + 3] = quad.w;
          }
        } else {
#pragma unroll
          for (int c = 0; c < kDotColumns; ++c) lane[c] = first + c < tile.width ? row[c] : 0.0f;
        }
      },
      sums);
}

template <int kCount>
__device__ __forceinline__ void LoadCounts(const Tile& tile, int first, double* counts) {
  if (tile.count_type == CountType::kInt64) {
    const int64_t* from = static_cast<const int64_t*>(tile.counts) + first;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      counts[c] = first + c < tile.width ? static_cast<double>(from[c]) : 0.0;
    }
  } else {
    const int32_t* from = static_cast<const int32_t*>(tile.counts) + first;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const int32_t raw = first + c < tile.width ? from[c] : 0;
      counts[c] = tile.count_type == CountType::kInt32 ? static_cast<double>(raw)
                                                       : static_cast<double>(BitCast<float>(raw));
    }
  }
}

// The dot lanes thread * kDotColumns + c of a warp. Dot lane i takes columns i, i + 256, ....
// kPart of them at a time: fewer registers, less overlap.
template <int kLaneThreads, int kDotColumns, int kPart, bool kQuads>
__device__ __forceinline__ double DotOfTile(const Tile& tile, int thread) {
  double dot[kDotColumns];
#pragma unroll
  for (int c = 0; c < kDotColumns; ++c) dot[c] = 0.0;
#pragma unroll 1
  for (int first = thread * kDotColumns; first < tile.width; first += kDotLanes) {
#pragma unroll
    for (int part = 0; part < kDotColumns; part += kPart) {
      double counts[kPart];
      LoadCounts<kPart>(tile, first + part, counts);
      float sums[kPart];
      ColumnSums<kLaneThreads, kPart, kQuads>(tile, first + part, sums);
#pragma unroll
      for (int c = 0; c < kPart; ++c) {
        dot[part + c] = Fma(counts[c], static_cast<double>(sums[c]), dot[part + c]);
      }
    }
  }
  return WarpFoldAdjacentPairs(FoldAdjacentPairsOf<kDotColumns>(dot));
}

// ---- The same where the compiler knows the number of columns, and the counts are quads of int32:
// straight-line code, which starts and ends sooner.

template <int kColumns, int kDotColumns>
constexpr int kDotThreads = (kColumns < kDotLanes ? kColumns : kDotLanes) / kDotColumns;

// The counts of the columns of dot lanes thread * kDotColumns + c.
template <int kColumns, int kDotColumns>
struct DotCounts {
  static constexpr int kRounds = (kColumns + kDotLanes - 1) / kDotLanes;
  int4 quads[kRounds][kDotColumns / 4];

  __device__ __forceinline__ void Load(const int32_t* counts, int thread) {
    if (thread >= kDotThreads<kColumns, kDotColumns>) return;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
#pragma unroll
      for (int q = 0; q < kDotColumns / 4; ++q) {
        const int first = r * kDotLanes + thread * kDotColumns + q * 4;
        quads[r][q] = __ldg(reinterpret_cast<const int4*>(counts + first));
      }
    }
  }
};

// x, exactly: x + 2^52 + 2^31 is a double with those low bits. Conversions run at a quarter of the
// rate of this subtraction.
__device__ __forceinline__ double ToDouble(int x) {
  constexpr double kOffset = 0x1.000008p52;
  return __hiloint2double(0x43300000, x ^ static_cast<int>(0x80000000u)) - kOffset;
}

// Where the four columns from `column` on lie in a row of lane sums. Of eight columns a thread, the
// dot reads every second quad at a time: in every other run of eight quads neighbours trade places,
// so that no two threads meet in a bank.
template <int kDotColumns>
__device__ __forceinline__ int QuadAt(int column) {
  return kDotColumns == 8 ? column ^ ((column >> 3) & 4) : column;
}

template <int kLaneThreads, int kDotColumns, int kColumns>
__device__ __forceinline__ double DotOfColumns(const float* lane_sums,
                                               const DotCounts<kColumns, kDotColumns>& counts,
                                               int thread) {
  constexpr int kThreads = kDotThreads<kColumns, kDotColumns>;
  double dot[kDotColumns];
#pragma unroll
  for (int c = 0; c < kDotColumns; ++c) dot[c] = 0.0;
  if (thread < kThreads) {
#pragma unroll
    for (int r = 0; r < DotCounts<kColumns, kDotColumns>::kRounds; ++r) {
#pragma unroll
      for (int q = 0; q < kDotColumns / 4; ++q) {
        const float* quad =
            lane_sums + QuadAt<kDotColumns>(r * kDotLanes + thread * kDotColumns + q * 4);
        float sums[4];
        FoldHalves<kLaneThreads, 4>(
            [quad](int i, float* lane) {
              const float4 raw = *reinterpret_cast<const float4*>(quad + i * kColumns);
              lane[0] = raw.x;
              lane[1] = raw.y;
              lane[2] = raw.z;
              lane[3] = raw.w;
            },
            sums);
        const int4 n = counts.quads[r][q];
        double* to = dot + q * 4;
        to[0] = Fma(ToDouble(n.x), static_cast<double>(sums[0]), to[0]);
        to[1] = Fma(ToDouble(n.y), static_cast<double>(sums[1]), to[1]);
        to[2] = Fma(ToDouble(n.z), static_cast<double>(sums[2]), to[2]);
        to[3] = Fma(ToDouble(n.w), static_cast<double>(sums[3]), to[3]);
      }
    }
  }
  return WarpFoldAdjacentPairs<kThreads>(FoldAdjacentPairsOf<kDotColumns>(dot));
}

// The dot lanes of a block that takes one tile after the other lie in shared memory. Not inlined:
// it would be compiled once more for every kernel.
template <int kLaneThreads>
__device__ __noinline__ void AddTileToDot(Tile tile, int thread, int num_threads,
                                          double* dot_lanes) {
  AuxLossCounts counts = {tile.count_type, tile.counts, false};
#pragma unroll 1
  for (int i = thread; i < kDotLanes; i += num_threads) {
#pragma unroll 1
    for (int e = i; e < tile.width; e += kDotLanes) {
      float sum;
      ColumnSums<kLaneThreads, 1, false>(tile, e, &sum);
      dot_lanes[i] = Fma(Count(counts, e), static_cast<double>(sum), dot_lanes[i]);
    }
  }
}

__device__ __noinline__ double DotOfLanes(const double* dot_lanes, int thread) {
  constexpr int kPerThread = kDotLanes / kWarp;
  double dot[kPerThread];
#pragma unroll
  for (int c = 0; c < kPerThread; ++c) dot[c] = dot_lanes[thread * kPerThread + c];
  return WarpFoldAdjacentPairs(FoldAdjacentPairsOf<kPerThread>(dot));
}

// threadIdx, read anew: kept over the loop over the rows, it costs registers there, and the last
// load of a round then waits for the first sum (65536 x 160: 6 % of the time).
struct Position {
  int x;
  int y;
};

__device__ __forceinline__ Position PositionInBlock() {
  Position self;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(self.x));
  asm volatile("mov.u32 %0, %%tid.y;" : "=r"(self.y));
  return self;
}

// A slot of one warp shares its block with others: it needs no barrier.
template <int kVec, int kLaneThreads, int kColumns>
constexpr int kSlotsPerBlock = kColumns / kVec * kLaneThreads == kWarp ? 4 : 1;

// Grid (blocks of slots, batch), block (column groups, kLaneThreads, slots); a group is kVec
// neighbouring columns.
// `kLanes` may be less than NumLanes where the slots have no more rows: the missing lanes are +0.
// kRowsPerLane 0: any number. kDotColumns: neighbouring dot lanes of one thread. kColumns: the
// number of columns, with counts that are aligned quads of int32; 0: any. kManyTiles: the columns
// exceed a block.
template <class Score, int kVec, int kLanes, int kLanesPerThread, int kRowsPerLane, int kDotColumns,
          int kColumns, bool kMasked, bool kManyTiles>
__global__ void __launch_bounds__(kMaxThreads, 2)
    AuxLossPartialsKernel(const __grid_constant__ PartialsParams p) {
  constexpr int kLaneThreads = kLanes / kLanesPerThread;
  constexpr bool kKnown = kColumns > 0;
  extern __shared__ __align__(16) float shared_sums[];  // [slots, kLaneThreads, tile]
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int num_columns = kKnown ? kColumns : p.num_columns;
  const int row_bytes = kKnown ? kColumns * static_cast<int>(sizeof(Score)) : p.row_bytes;
  const int groups = kKnown ? kColumns / kVec : blockDim.x;
  const int tile = groups * kVec;
  const int thread = threadIdx.y * groups + threadIdx.x;
  constexpr int kBlockSlots = kSlotsPerBlock<kVec, kLaneThreads, kColumns>;
  float* lane_sums = shared_sums;
  unsigned slot = blockIdx.x;
  if constexpr (kBlockSlots > 1) {
    slot = slot * kBlockSlots + threadIdx.z;
    lane_sums += threadIdx.z * (kLaneThreads * kColumns);
  }
  const int num_rows = slot < p.whole_slots    ? p.rows_per_slot
                       : slot == p.whole_slots ? p.last_rows
                                               : 0;
  const char* probs = p.probs + slot * p.slot_bytes;
  const char* item_counts = p.counts;
  const bool* valid_mask =
      kMasked ? p.valid_mask + static_cast<int64_t>(slot) * p.rows_per_slot : nullptr;
  if (__builtin_expect(gridDim.y > 1, false)) {  // a single loss does without these products
    const int64_t item = blockIdx.y;
    probs += item * p.probs_stride;
    item_counts += item * p.counts_stride;
    if constexpr (kMasked) valid_mask += item * p.mask_stride;
  }

  // Leaves the lane sums of a tile in shared memory, for the next barrier. `get_counts` runs where
  // it delays no score: while they are under way, or after them where registers are short.
  const auto sum_lanes = [&](int first, int width, const auto& get_counts) {
    const int column = threadIdx.x * kVec;
    const char* from = probs + static_cast<int64_t>(first + column) * sizeof(Score);
    float sum[kVec];
    if constexpr (kRowsPerLane > 0) {
      FewRows<Score, kVec, kLanes, kLanesPerThread, kRowsPerLane>(from, row_bytes, num_rows,
                                                                  threadIdx.y, get_counts, sum);
    } else {
      if constexpr (!kKnown) get_counts();
#pragma unroll
      for (int c = 0; c < kVec; ++c) sum[c] = 0.0f;
      if (!kManyTiles || column < width) {
        ManyRows<Score, kVec, kLanes, kLanesPerThread, kMasked>(from, row_bytes, valid_mask,
                                                                num_rows, threadIdx.y, sum);
      }
      if constexpr (kKnown) get_counts();
    }
    const Position self = PositionInBlock();
    const int mine = self.x * kVec;
    float* row = lane_sums + self.y * tile;
    if constexpr (kVec % 4 == 0) {
#pragma unroll
      for (int c = 0; c < kVec; c += 4) {
        const int at = kKnown ? QuadAt<kDotColumns>(mine + c) : mine + c;
        *reinterpret_cast<float4*>(row + at) =
            make_float4(sum[c], sum[c + 1], sum[c + 2], sum[c + 3]);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kVec; ++c) row[mine + c] = sum[c];
    }
  };

  double dot;
  if constexpr (kKnown) {
    DotCounts<kColumns, kDotColumns> counts;
    sum_lanes(0, kColumns,
              [&] { counts.Load(reinterpret_cast<const int32_t*>(item_counts), thread); });
    if constexpr (kBlockSlots > 1) {
      __syncwarp();
    } else {
      __syncthreads();
      // One warp finishes: a second barrier would cost more than the idle threads.
      if (thread >= kWarp) return;
    }
    dot = DotOfColumns<kLaneThreads>(lane_sums, counts, thread);
  } else {
    __shared__ __align__(16) int64_t counts[kMaxTile];  // raw, of count_type
    const int num_threads = groups * kLaneThreads;
    const auto sum_tile = [&](int first, int width) {
      sum_lanes(first, width, [&] {
        CopyCounts(item_counts, p.count_type, first, width, thread, num_threads, counts);
      });
      __pipeline_wait_prior(0);
      __syncthreads();
    };
    if constexpr (kManyTiles) {
      __shared__ double dot_lanes[kDotLanes];
      for (int i = thread; i < kDotLanes; i += num_threads) dot_lanes[i] = 0.0;
      for (int first = 0; first < num_columns; first += tile) {
        const int width = num_columns - first < tile ? num_columns - first : tile;
        sum_tile(first, width);
        AddTileToDot<kLaneThreads>({lane_sums, tile, width, counts, p.count_type}, thread,
                                   num_threads, dot_lanes);
        __syncthreads();
      }
      if (thread >= kWarp) return;
      dot = DotOfLanes(dot_lanes, thread);
    } else {
      sum_tile(0, num_columns);
      if (thread >= kWarp) return;
      constexpr int kPart = kVec > 1 && kDotColumns > 4 ? 4 : kDotColumns;
      constexpr bool kQuads = kVec % 4 == 0 && kPart % 4 == 0;
      const Tile whole = {lane_sums, tile, num_columns, counts, p.count_type};
      dot = DotOfTile<kLaneThreads, kDotColumns, kPart, kQuads>(whole, thread);
    }
  }
  if (thread == 0 && (kBlockSlots == 1 || slot < p.num_slots)) {
    const unsigned item = gridDim.y > 1 ? blockIdx.y : 0;
    p.partials[item * p.num_slots + slot] = CanonicalNan(static_cast<float>(dot));
  }
}

// One warp a loss; lane i holds the 8 partials from 8 i. kWhole: all 256 slots are there, at a
// multiple of 16 bytes.
template <bool kWhole>
__global__ void __launch_bounds__(kWarp)
    AuxLossFinalKernel(const __grid_constant__ AuxLossFinal f) {
  constexpr int kPerThread = kSlots / kWarp;
  const int64_t b = blockIdx.x;
  const int lane = threadIdx.x;
  // Before the wait: N is older than the partials, and a float64 division takes a while.
  const double total = Total(f.scale.total_num_tokens, b);
  const double factor = ScaleFactor(f.scale, total);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  double values[kPerThread];
  if constexpr (kWhole) {
    const float4* partials = reinterpret_cast<const float4*>(f.partials + b * kSlots) + lane * 2;
    const float4 first = __ldcg(partials);
    const float4 second = __ldcg(partials + 1);
    const float all[kPerThread] = {first.x,  first.y,  first.z,  first.w,
                                   second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = static_cast<double>(all[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int slot = lane * kPerThread + i;
      values[i] = slot < f.num_slots
                      ? static_cast<double>(__ldcg(f.partials + b * f.num_slots + slot))
                      : 0.0;
    }
  }
  const double sum = WarpFoldAdjacentPairs(FoldAdjacentPairsOf<kPerThread>(values));
  if (lane == 0) f.loss[b] = LossFromSum(f.scale, total, factor, sum);
}

template <class Score>
__global__ void AuxLossRowKernel(const AuxLossRow r) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= r.batch * r.num_columns) return;
  const int64_t b = i / r.num_columns;
  static_cast<Score*>(r.d_probs_row)[i] =
      GradientElement<Score>(r.scale, Total(r.scale.total_num_tokens, b),
                             Count(r.counts, r.counts.batched ? i : i - b * r.num_columns),
                             r.d_loss[r.d_loss_batched ? b : 0]);
}

// The negative control: blocks add their float32 sums with an atomic, in whatever order they end.
template <class Score>
__global__ void AuxLossAtomicKernel(const AuxLossPartials p, const AuxLossFinal f) {
  for (int64_t b = blockIdx.y; b < p.batch; b += gridDim.y) {
    const double total = Total(f.scale.total_num_tokens, b);
    if (IsZero(f.scale, total)) continue;
    const int64_t first = p.probs_batched ? b * p.num_tokens * p.num_columns : 0;
    const Score* probs = static_cast<const Score*>(p.probs) + first;
    const int64_t counts_offset = p.counts.batched ? b * p.num_columns : 0;
    const int64_t mask_offset = p.valid_mask_batched ? b * p.num_tokens : 0;
    float sum = 0.0f;
    for (int64_t row = blockIdx.x; row < p.num_tokens; row += gridDim.x) {
      if (p.valid_mask != nullptr && !p.valid_mask[mask_offset + row]) continue;
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
}

// ---- Launchers.

// Programmatic dependent launch needs code of compute capability 9.0 on both sides: older code
// lacks the wait. The loaded image decides, not the device alone.
cudaError_t SupportsDependentLaunch(bool* supported) {
  cudaFuncAttributes attributes;
  const cudaError_t status =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(AuxLossFinalKernel<true>));
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
  const bool whole = f.num_slots == kSlots && reinterpret_cast<uint64_t>(f.partials) % 16 == 0;
  return cudaLaunchKernelEx(&config, whole ? AuxLossFinalKernel<true> : AuxLossFinalKernel<false>,
                            f);
}

// Launches blocks of column groups by lane threads.
template <class Score, int kVec, int kLanes, int kLanesPerThread, int kRowsPerLane, int kDotColumns,
          int kColumns, bool kMasked, bool kManyTiles>
cudaError_t LaunchBlocks(cudaStream_t stream, const AuxLossPartials& p, int groups) {
  constexpr int kLaneThreads = kLanes / kLanesPerThread;
  // The last warp's shuffles need a whole one: SelectRows chooses no fewer threads.
  if (groups * kLaneThreads < kWarp) return cudaErrorInvalidConfiguration;
  constexpr int kBlockSlots = kSlotsPerBlock<kVec, kLaneThreads, kColumns>;
  const dim3 block(groups, kLaneThreads, kBlockSlots);
  const size_t shared = sizeof(float) * kLaneThreads * groups * kVec * kBlockSlots;
  const int64_t count_bytes = p.counts.type == CountType::kInt64 ? 8 : 4;
  PartialsParams params;
  params.probs_stride =
      p.probs_batched ? p.num_tokens * p.num_columns * static_cast<int64_t>(sizeof(Score)) : 0;
  params.counts_stride = p.counts.batched ? p.num_columns * count_bytes : 0;
  params.mask_stride = p.valid_mask_batched ? p.num_tokens : 0;
  params.row_bytes = static_cast<int>(p.num_columns * sizeof(Score));
  params.num_columns = static_cast<int>(p.num_columns);
  params.rows_per_slot = static_cast<int>(p.rows_per_slot);
  params.whole_slots =
      p.rows_per_slot > 0 ? static_cast<unsigned>(p.num_tokens / p.rows_per_slot) : 0;
  params.num_slots = static_cast<unsigned>(p.num_slots);
  params.slot_bytes = p.rows_per_slot * params.row_bytes;
  params.last_rows = static_cast<int>(p.num_tokens - params.whole_slots * p.rows_per_slot);
  params.count_type = p.counts.type;
  for (int64_t first = 0; first < p.batch; first += kMaxGridY) {
    const int64_t items = p.batch - first < kMaxGridY ? p.batch - first : kMaxGridY;
    params.probs = static_cast<const char*>(p.probs) + first * params.probs_stride;
    params.counts = static_cast<const char*>(p.counts.data) + first * params.counts_stride;
    params.valid_mask = kMasked ? p.valid_mask + first * params.mask_stride : nullptr;
    params.partials = p.partials + first * p.num_slots;
    const dim3 grid((params.num_slots + kBlockSlots - 1) / kBlockSlots,
                    static_cast<unsigned>(items));
    AuxLossPartialsKernel<Score, kVec, kLanes, kLanesPerThread, kRowsPerLane, kDotColumns, kColumns,
                          kMasked, kManyTiles><<<grid, block, shared, stream>>>(params);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Whether SelectRows ever chooses this block for `columns` columns: of many rows a lane, it makes
// blocks as large as may be.
template <int kVec, int kLanes, int kLanesPerThread, int kRowsPerLane>
constexpr bool IsReached(int columns) {
  const int threads = columns / kVec * (kLanes / kLanesPerThread);
  return threads >= kWarp && threads <= kMaxThreads &&
         (kRowsPerLane > 0 || kLanesPerThread == 1 || threads == kMaxThreads);
}

// 64, 128, 256 and 512 columns are common: the compiler may know them. Float16 scores, rare in
// routers, do without, for the sake of compile time.
template <class Score, int kVec, int kLanes, int kLanesPerThread, int kRowsPerLane, int kDotColumns,
          bool kMasked, bool kManyTiles = false>
cudaError_t LaunchPartialsKernel(cudaStream_t stream, const AuxLossPartials& p, int groups) {
  if constexpr (!kMasked && !kManyTiles && kVec > 1 && kDotColumns >= 4 &&
                !std::is_same_v<Score, Float16>) {
    constexpr int kNarrow = kDotColumns == 8 ? 256 : 64;
    constexpr auto kReached = IsReached<kVec, kLanes, kLanesPerThread, kRowsPerLane>;
    if (p.counts.type == CountType::kInt32 && reinterpret_cast<uint64_t>(p.counts.data) % 16 == 0) {
      if constexpr (kReached(kNarrow)) {
        if (p.num_columns == kNarrow) {
          return LaunchBlocks<Score, kVec, kLanes, kLanesPerThread, kRowsPerLane, kDotColumns,
                              kNarrow, false, false>(stream, p, groups);
        }
      }
      if constexpr (kReached(2 * kNarrow)) {
        if (p.num_columns == 2 * kNarrow) {
          return LaunchBlocks<Score, kVec, kLanes, kLanesPerThread, kRowsPerLane, kDotColumns,
                              2 * kNarrow, false, false>(stream, p, groups);
        }
      }
    }
  }
  return LaunchBlocks<Score, kVec, kLanes, kLanesPerThread, kRowsPerLane, kDotColumns, 0, kMasked,
                      kManyTiles>(stream, p, groups);
}

// Chooses the block: lanes per thread, so that a block has at most kMaxThreads threads, and few or
// many rows a lane. kLanes, kDotColumns: see NumLanes; narrow shapes need fewer dot lanes a thread.
template <class Score, int kVec, int kLanes, int kDotColumns, bool kMasked>
cudaError_t SelectRows(cudaStream_t stream, const AuxLossPartials& p) {
  constexpr int kMaxGroups = kVec == 1 ? kMaxTile / 2 : kMaxTile / kVec;
  const int64_t wanted = (p.num_columns + kVec - 1) / kVec;
  const int groups = static_cast<int>(wanted < kMaxGroups ? wanted : kMaxGroups);
  if constexpr (kLanes == 16) {
    if (wanted > kMaxGroups) {
      constexpr int kLanesPerThread = kMaxGroups * kLanes / kMaxThreads;
      return LaunchPartialsKernel<Score, kVec, kLanes, kLanesPerThread, 0, kDotColumns, kMasked,
                                  true>(stream, p, groups);
    }
  }
  if constexpr (kVec == 1) {
    // At most 256 x 16, 128 x 32, 32 x 64 or 16 x 128 column lanes.
    return LaunchPartialsKernel<Score, 1, kLanes, kLanes <= 32 ? 8 : 4, 0, kDotColumns, kMasked>(
        stream, p, groups);
  } else if constexpr (kLanes > 32) {
    return LaunchPartialsKernel<Score, kVec, kLanes, 1, 0, kDotColumns, kMasked>(stream, p, groups);
  } else {
    const int lane_groups = groups * kLanes;
    if constexpr (!kMasked) {
      const int64_t rows_per_lane = (p.rows_per_slot + kLanes - 1) / kLanes;
      if (kLanes == 32 && p.rows_per_slot <= 16 && groups * 16 / 4 >= kWarp) {
        // Half of the lanes hold no row. 64 columns: a slot is one warp.
        if constexpr (kVec == 4) {
          if (p.num_columns == 64) {
            return LaunchPartialsKernel<Score, kVec, 16, 8, 1, kDotColumns, false>(stream, p,
                                                                                   groups);
          }
        }
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
      if constexpr (sizeof(Score) == 2) {
        // Half as wide, twice as many threads: 5 % faster here than at fewer or more rows.
        if (rows_per_lane <= 4 && 2 * lane_groups <= 4 * kMaxThreads) {
          return LaunchPartialsKernel<Score, 4, kLanes, 4, 4, kDotColumns, false>(stream, p,
                                                                                  2 * groups);
        }
      }
      if (rows_per_lane <= 4 && lane_groups <= 2 * kMaxThreads) {
        return LaunchPartialsKernel<Score, kVec, kLanes, 2, 4, kDotColumns, false>(stream, p,
                                                                                   groups);
      }
    }
    if constexpr (kLanes == 32 || sizeof(Score) == 2) {
      if (lane_groups <= kMaxThreads) {
        return LaunchPartialsKernel<Score, kVec, kLanes, 1, 0, kDotColumns, kMasked>(stream, p,
                                                                                     groups);
      }
    }
    if (lane_groups <= 2 * kMaxThreads) {
      return LaunchPartialsKernel<Score, kVec, kLanes, 2, 0, kDotColumns, kMasked>(stream, p,
                                                                                   groups);
    }
    return LaunchPartialsKernel<Score, kVec, kLanes, 4, 0, kDotColumns, kMasked>(stream, p, groups);
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
  const uint64_t alignment = reinterpret_cast<uint64_t>(p.probs) | (p.num_columns * sizeof(Score));
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
  cudaError_t status = cudaMemsetAsync(final_sum.loss, 0, sizeof(float) * final_sum.batch, stream);
  if (status != cudaSuccess || partials.num_tokens == 0) return status;
  const int64_t rows = partials.num_tokens < 1024 ? partials.num_tokens : 1024;
  const int64_t items = partials.batch < kMaxGridY ? partials.batch : kMaxGridY;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(items));
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
