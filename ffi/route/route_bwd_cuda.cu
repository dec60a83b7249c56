// CUDA kernels of the router step, backward: a warp per token, which reads the logits once and
// writes their gradient once.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "aux_loss/aux_loss.h"
#include "core/numerics.h"
#include "route/route.h"
#include "route/route_common.cuh"
#include "route/route_launch.h"
#include "topk_router/topk_router.h"
#include "topk_router/topk_router_row.cuh"

namespace jax_moe_det {
namespace {

constexpr int kWarps = 8;  // of a block, at most

// A stride of 0 shares an operand.
struct BwdParams {
  RouteBwd op;
  int64_t logits_stride;  // elements from item to item
  int64_t indices_stride;
  int64_t d_weights_stride;
  int64_t mask_stride;
  bool vector;
};

// What the rows of an item have in common, a[e] aside.
struct ItemCotangent {
  bool has_weights;
  bool has_aux;
  bool has_z;
  float h;
};

__device__ __forceinline__ ItemCotangent CotangentOf(const RouteBwd& r, int64_t item) {
  const double total = Total(r.scale.total_num_tokens, item);
  ItemCotangent out = {};
  out.has_weights = r.d_weights != nullptr;
  out.has_aux = r.d_aux_loss != nullptr && !IsZero(r.scale, total);
  out.has_z = r.d_z_loss != nullptr && !IsZeroZ(r.z_loss_coeff, total);
  if (out.has_z) {
    out.h = ZLossSlope(r.z_loss_coeff, total, r.d_z_loss[r.d_z_loss_batched ? item : 0]);
  }
  return out;
}

// a[expert] of an item with an aux loss.
__device__ __forceinline__ float AuxCotangent(const RouteBwd& r, int64_t item, int expert) {
  const int64_t counts = r.counts.batched ? item * r.num_experts : 0;
  return GradientElement<float>(r.scale, Total(r.scale.total_num_tokens, item),
                                Count(r.counts, counts + expert),
                                r.d_aux_loss[r.d_aux_loss_batched ? item : 0]);
}

// The dense part of the aux loss for the sigmoid kinds: a in `g` becomes its result.
template <class Columns>
__device__ __forceinline__ void SigmoidKindsPart(const TopkRouterOptions& o,
                                                 const RegisterRow<Columns>& x,
                                                 RegisterRow<Columns>& g) {
  // Together, where they share an exponential.
  RegisterRow<Columns> scores, slopes;
#pragma unroll
  for (int j = 0; j < x.size(); ++j) {
    const bool sigmoid = o.kind == ScoreKind::kSigmoid;
    scores[j] = sigmoid ? SigmoidRaw(x.values[j]) : SqrtSoftplus(x.values[j]);
    slopes[j] = sigmoid ? SigmoidSlopeRaw(x.values[j]) : SqrtSoftplusSlope(x.values[j]);
  }
  const float sum = WarpRowSum(x, [&](int j) { return scores[j]; });
  const float factor = NormalizingFactor(sum, o.eps);
  const float dot = WarpRowSum(x, [&](int j) { return scores[j] * factor * g[j]; });
#pragma unroll
  for (int j = 0; j < x.size(); ++j) g[j] = (slopes[j] * factor) * (g[j] - dot);
}

__device__ __forceinline__ void SigmoidKindsPart(const TopkRouterOptions& o, SharedRow& x,
                                                 SharedRow& g) {
  const auto score = [&](int j) { return Score(o.kind, x[j]); };
  const float factor = NormalizingFactor(WarpRowSum(x, score), o.eps);
  const float dot = WarpRowSum(x, [&](int j) { return score(j) * factor * g[j]; });
  for (int j = 0; j < x.size(); ++j) {
    g[j] = NormalizedGradient(ScoreSlope(o.kind, x[j]), factor, g[j], dot);
  }
}

// The dense part of a row. `x` holds the logits, -infinity past the last expert, and is lost; `g`
// holds a (+0 without an aux loss), with the chosen part added for the softmax before top-k, and
// gets the result.
template <class Row>
__device__ __forceinline__ void DensePart(const TopkRouterOptions& o,
                                          const ItemCotangent& cotangent, Row& x, Row& g) {
  const bool softmax = IsSoftmax(o.kind);
  const bool wants_softmax =
      cotangent.has_z ||
      (softmax && (cotangent.has_aux || (o.kind == ScoreKind::kSoftmax && cotangent.has_weights)));
  if (!softmax && cotangent.has_aux) SigmoidKindsPart(o, x, g);
  if (!wants_softmax) return;
  const RowScale scale = SoftmaxRow(x, WarpRowMax(x));
  const float zg = cotangent.has_z ? cotangent.h * LogSumExp(scale.max, scale.sum) : 0.0f;
  if (softmax) {
    const float dot = WarpRowSum(x, [&](int j) { return x[j] * g[j]; });
#pragma unroll
    for (int j = 0; j < x.size(); ++j) g[j] = x[j] * ((g[j] - dot) + zg);
  } else {
#pragma unroll
    for (int j = 0; j < x.size(); ++j) g[j] = g[j] + x[j] * zg;
  }
}

// c of one choice in each of the first topk lanes, in order of selection. `x` is its logit, `g` its
// cotangent times the scaling factor.
__device__ __forceinline__ float ChosenPart(const TopkRouterOptions& o, bool chosen, float x,
                                            float g) {
  if (o.kind == ScoreKind::kSoftmax) return g;
  if (o.kind == ScoreKind::kSoftmaxAfterTopk) {
    const float e = ExpNonPositive(x - WarpChosenMax(x, chosen));
    const float weight = e * Reciprocal(WarpListSum(chosen ? e : 0.0f, o.topk));
    return SoftmaxGradient(weight, g, WarpListSum(chosen ? weight * g : 0.0f, o.topk));
  }
  const float slope = ScoreSlope(o.kind, x);
  if (o.topk == 1) return CanonicalNan(slope * g);
  const float s = Score(o.kind, x);
  const float factor = NormalizingFactor(WarpListSum(chosen ? s : 0.0f, o.topk), o.eps);
  const float dot = WarpListSum(chosen ? s * factor * g : 0.0f, o.topk);
  return NormalizedGradient(slope, factor, g, dot);
}

// ---- Rows in registers, a lane for each choice.

// What a thread reads of a row, one row ahead.
template <class Logit, class Columns>
struct RowInputs {
  bool valid;
  int column;      // of choice `lane`; no expert where there is none
  Logit d_weight;  // its cotangent
  Raw<Logit, Columns::kVec> logits[Columns::kSize / Columns::kVec];
};

// `kKind`: the score kind of a common call (route_common.cuh), with cotangents of weights and aux
// loss and distinct choices; or kAnyKind.
template <class Logit, class Columns, int kKind>
__global__ void __launch_bounds__(kWarps* kWarp, Columns::kSize > 8 ? 3 : 4)
    RouteBwdKernel(const BwdParams p) {
  constexpr bool kCommon = kKind != kAnyKind;
  constexpr int kVec = Columns::kVec;
  constexpr int kSize = Columns::kSize;
  __shared__ __align__(16) float aux[Columns::kPitch];
  __shared__ __align__(16) float sparse_rows[kWarps][Columns::kPitch];
  __shared__ __align__(16) float logit_rows[kWarps][Columns::kPitch];
  const RouteBwd& r = p.op;
  TopkRouterOptions o = r.options;
  if (kCommon) o.kind = static_cast<ScoreKind>(kKind);
  const int n = kCommon ? Columns::kPitch : r.num_experts;
  const int warp = WarpIndex();
  const int lane = threadIdx.x % kWarp;
  float* logit_row = logit_rows[warp];
  // +0 between rows: a few elements are set, added, and cleared.
  float* sparse = sparse_rows[warp];
  for (int e = lane; e < Columns::kPitch; e += kWarp) sparse[e] = 0.0f;
  using Row = std::conditional_t<kCommon, int, int64_t>;

  for (int64_t item = blockIdx.y; item < r.batch; item += gridDim.y) {
    ItemCotangent cotangent = CotangentOf(r, item);
    if (kCommon) {
      cotangent.has_weights = true;
      if (!IsSoftmax(o.kind)) cotangent.has_z = false;
    }
    const Logit* logits = static_cast<const Logit*>(r.logits) + item * p.logits_stride;
    const int32_t* indices = r.indices + item * p.indices_stride;
    const Logit* d_weights = static_cast<const Logit*>(r.d_weights) + item * p.d_weights_stride;
    const bool* valid_mask = r.valid_mask;
    if (valid_mask != nullptr) valid_mask += item * p.mask_stride;
    Logit* d_logits = static_cast<Logit*>(r.d_logits) + item * r.num_tokens * n;
    const bool needs_logits =
        kCommon || cotangent.has_aux || cotangent.has_z || o.kind == ScoreKind::kSoftmax;
    const bool has_choice = cotangent.has_weights && lane < o.topk;
    const auto load = [&](Row row) {
      RowInputs<Logit, Columns> in;
      in.valid = valid_mask == nullptr || valid_mask[row];
      in.column = n;
      if (has_choice) {
        const Row choice = row * o.topk + lane;
        in.column = indices[choice];
        in.d_weight = d_weights[choice];
      }
      if (needs_logits) {
        const Logit* first = logits + lane * kVec + int64_t{row} * n;
#pragma unroll
        for (int b = 0; b < kSize / kVec; ++b) {
          const int present = kCommon ? kVec : n - Columns::Of(lane, b * kVec);
          in.logits[b] = LoadRaw<kVec>(first + b * Columns::kWidth, present, kCommon || p.vector);
        }
      }
      return in;
    };

    const Row num_tokens = r.num_tokens;
    const Row step = gridDim.x * kWarps;
    Row row = blockIdx.x * kWarps + warp;
    RowInputs<Logit, Columns> next;
    if (row < num_tokens) next = load(row);
    __syncthreads();
    for (int e = threadIdx.x; e < Columns::kPitch; e += blockDim.x) {
      aux[e] = cotangent.has_aux && e < n ? AuxCotangent(r, item, e) : 0.0f;
    }
    __syncthreads();
    for (; row < num_tokens; row += step) {
      const RowInputs<Logit, Columns> in = next;
      if (row + step < num_tokens) next = load(row + step);
      const bool valid = valid_mask == nullptr || __all_sync(kAllLanes, in.valid);
      const bool chosen = valid && IsExpert(in.column, n);
      RegisterRow<Columns> x, g;
      if (valid) {
        if (needs_logits) {
#pragma unroll
          for (int j = 0; j < kSize; j += kVec) {
            Unpack<Logit, kVec>(in.logits[j / kVec], x.values + j);
          }
          if (n < Columns::kPitch) {
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
              if (Columns::Of(lane, j) >= n) x[j] = kMinusInfinity;
            }
          }
          if (o.kind != ScoreKind::kSoftmax) {
#pragma unroll
            for (int j = 0; j < kSize; ++j) logit_row[Columns::Of(lane, j)] = x[j];
            __syncwarp();
          }
        }
        if (cotangent.has_weights) {
          float logit = kMinusInfinity;
          if (chosen && o.kind != ScoreKind::kSoftmax) {
            logit = needs_logits ? logit_row[in.column] : ToFloat(logits[row * n + in.column]);
          }
          float c = chosen ? o.scaling_factor * ToFloat(in.d_weight) : 0.0f;
          c = ChosenPart(o, chosen, logit, c);
          if (kCommon || r.distinct) {
            if (chosen) sparse[in.column] = 0.0f + c;
          } else {
            for (int i = 0; i < o.topk; ++i) {
              if (lane == i && chosen) sparse[in.column] = sparse[in.column] + c;
              __syncwarp();
            }
          }
          __syncwarp();
        }
#pragma unroll
        for (int j = 0; j < kSize; ++j) g[j] = aux[Columns::Of(lane, j)];
        if (o.kind == ScoreKind::kSoftmax) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) g[j] = g[j] + sparse[Columns::Of(lane, j)];
        }
        if (needs_logits) DensePart(o, cotangent, x, g);
        if (o.kind != ScoreKind::kSoftmax) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) g[j] = g[j] + sparse[Columns::Of(lane, j)];
        }
      } else {
#pragma unroll
        for (int j = 0; j < kSize; ++j) g[j] = 0.0f;
      }
      Logit* out = d_logits + lane * kVec + int64_t{row} * n;
#pragma unroll
      for (int b = 0; b < kSize / kVec; ++b) {
        const int present = kCommon ? kVec : n - Columns::Of(lane, b * kVec);
        StoreRaw<kVec>(Pack<Logit, kVec>(g.values + b * kVec), out + b * Columns::kWidth, present,
                       kCommon || p.vector);
      }
      __syncwarp();
      if (chosen) sparse[in.column] = 0.0f;
      __syncwarp();
    }
  }
}

// ---- Rows in shared memory: any number of experts and choices.

// A warp has three rows; the terms of a sum over choices lie where two of them come later.
template <class Logit>
__global__ void RouteBwdAnyKernel(const BwdParams p, int blocks) {
  using Columns = SharedRow::Columns;
  extern __shared__ __align__(16) float rows[];
  const RouteBwd& r = p.op;
  const TopkRouterOptions& o = r.options;
  const int n = r.num_experts;
  const int warp = WarpIndex();
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  const int pitch = blocks * Columns::kWidth;
  float* sparse = rows + int64_t{warp} * 3 * pitch;
  float* terms = sparse + pitch;
  const int num_values = blocks * Columns::kVec;
  SharedRow g = {sparse, lane, num_values};
  SharedRow x = {terms, lane, num_values};
  SharedRow d = {terms + pitch, lane, num_values};

  for (int64_t index = int64_t{blockIdx.x} * warps + warp; index < r.batch * r.num_tokens;
       index += int64_t{gridDim.x} * warps) {
    const int64_t item = index / r.num_tokens;
    const int64_t row = index % r.num_tokens;
    const ItemCotangent cotangent = CotangentOf(r, item);
    const Logit* logits = static_cast<const Logit*>(r.logits) + item * p.logits_stride + row * n;
    const int32_t* indices = r.indices + item * p.indices_stride + row * o.topk;
    const Logit* d_weights =
        static_cast<const Logit*>(r.d_weights) + item * p.d_weights_stride + row * o.topk;
    Logit* d_logits = static_cast<Logit*>(r.d_logits) + index * n;
    const bool valid = r.valid_mask == nullptr || r.valid_mask[item * p.mask_stride + row];
    for (int e = lane; e < pitch; e += kWarp) sparse[e] = 0.0f;
    __syncwarp();
    if (!valid) {
      for (int e = lane; e < n; e += kWarp) RoundTo(0.0f, d_logits + e);
      continue;
    }
    if (cotangent.has_weights) {
      const auto logit = [&](int i) { return ToFloat(logits[indices[i]]); };
      const auto weight_g = [&](int i) { return o.scaling_factor * ToFloat(d_weights[i]); };
      // Sum over the choices that are experts.
      const auto sum = [&](const auto& term) {
        for (int i = lane; i < o.topk; i += kWarp) {
          terms[i] = IsExpert(indices[i], n) ? term(i) : 0.0f;
        }
        return WarpListSumShared(terms, o.topk, lane);
      };
      float max = 0.0f;
      float factor = 1.0f;
      float dot = 0.0f;
      const auto score = [&](int i) {
        return IsSoftmax(o.kind) ? ExpNonPositive(logit(i) - max) : Score(o.kind, logit(i));
      };
      if (o.kind == ScoreKind::kSoftmaxAfterTopk) {
        uint32_t key = kExcludedKey;
        for (int i = lane; i < o.topk; i += kWarp) {
          if (!IsExpert(indices[i], n)) continue;
          const uint32_t other = SelectionKey(logit(i));
          key = key > other ? key : other;
        }
        max = SelectionValue(__reduce_max_sync(kAllLanes, key));
        factor = Reciprocal(sum(score));
      } else if (!IsSoftmax(o.kind) && o.topk > 1) {
        factor = NormalizingFactor(sum(score), o.eps);
      }
      if (o.kind == ScoreKind::kSoftmaxAfterTopk || (!IsSoftmax(o.kind) && o.topk > 1)) {
        dot = sum([&](int i) { return score(i) * factor * weight_g(i); });
      }
      const auto part = [&](int i) {
        if (o.kind == ScoreKind::kSoftmax) return weight_g(i);
        if (IsSoftmax(o.kind)) return SoftmaxGradient(score(i) * factor, weight_g(i), dot);
        const float slope = ScoreSlope(o.kind, logit(i));
        return o.topk == 1 ? CanonicalNan(slope * weight_g(i))
                           : NormalizedGradient(slope, factor, weight_g(i), dot);
      };
      for (int i = lane; i < o.topk; i += kWarp)
        terms[i] = IsExpert(indices[i], n) ? part(i) : 0.0f;
      __syncwarp();
      if (r.distinct) {
        for (int i = lane; i < o.topk; i += kWarp) {
          if (IsExpert(indices[i], n)) sparse[indices[i]] = 0.0f + terms[i];
        }
      } else if (lane == 0) {
        for (int i = 0; i < o.topk; ++i) {
          if (IsExpert(indices[i], n)) sparse[indices[i]] = sparse[indices[i]] + terms[i];
        }
      }
      __syncwarp();
    }
    for (int j = 0; j < x.size(); ++j) {
      const int column = Columns::Of(lane, j);
      x[j] = column < n ? ToFloat(logits[column]) : kMinusInfinity;
    }
    // No thread reads another's elements from here on.
    if (o.kind == ScoreKind::kSoftmax) {
      for (int j = 0; j < x.size(); ++j) {
        const int column = Columns::Of(lane, j);
        const float a = cotangent.has_aux && column < n ? AuxCotangent(r, item, column) : 0.0f;
        g[j] = a + g[j];
      }
      DensePart(o, cotangent, x, g);
      for (int j = 0; j < x.size(); ++j) {
        const int column = Columns::Of(lane, j);
        if (column < n) RoundTo(g[j], d_logits + column);
      }
    } else {
      for (int j = 0; j < x.size(); ++j) {
        const int column = Columns::Of(lane, j);
        d[j] = cotangent.has_aux && column < n ? AuxCotangent(r, item, column) : 0.0f;
      }
      DensePart(o, cotangent, x, d);
      for (int j = 0; j < x.size(); ++j) {
        const int column = Columns::Of(lane, j);
        if (column < n) RoundTo(d[j] + g[j], d_logits + column);
      }
    }
    __syncwarp();
  }
}

// ---- Launches.

template <class Logit, class Columns, int kKind>
cudaError_t LaunchRegisters(cudaStream_t stream, const BwdParams& p) {
  dim3 grid;
  const cudaError_t status = FillDevice((p.op.num_tokens + kWarps - 1) / kWarps,
                                        Columns::kSize > 8 ? 3 : 4, p.op.batch, &grid);
  if (status != cudaSuccess) return status;
  RouteBwdKernel<Logit, Columns, kKind><<<grid, kWarp * kWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

template <class Logit, class Columns>
cudaError_t LaunchRegisters(cudaStream_t stream, const BwdParams& p) {
  const RouteBwd& r = p.op;
  if constexpr (kHasCommon<Logit>) {
    if (IsCommonRow<Columns>(r.num_tokens, r.num_experts, p.vector, r.options.kind,
                             r.d_z_loss != nullptr) &&
        r.distinct && r.d_weights != nullptr && r.d_aux_loss != nullptr) {
      switch (r.options.kind) {
        case ScoreKind::kSoftmaxAfterTopk:
          return LaunchRegisters<Logit, Columns, kSoftmaxAfterTopk>(stream, p);
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
cudaError_t LaunchAny(cudaStream_t stream, const BwdParams& p) {
  using Columns = SharedRow::Columns;
  const int blocks = (p.op.num_experts + Columns::kWidth - 1) / Columns::kWidth;
  const int bytes = 3 * blocks * Columns::kWidth * static_cast<int>(sizeof(float));
  constexpr int kSharedBytes = 96 * 1024;
  int warps = kSharedBytes / bytes;
  warps = warps > kWarps ? kWarps : warps;
  cudaError_t status = cudaFuncSetAttribute(
      RouteBwdAnyKernel<Logit>, cudaFuncAttributeMaxDynamicSharedMemorySize, warps * bytes);
  if (status != cudaSuccess) return status;
  dim3 grid;
  status = FillDevice((p.op.batch * p.op.num_tokens + warps - 1) / warps, 4, 1, &grid);
  if (status != cudaSuccess) return status;
  RouteBwdAnyKernel<Logit><<<grid, kWarp * warps, warps * bytes, stream>>>(p, blocks);
  return cudaGetLastError();
}

template <class Logit>
cudaError_t Launch(cudaStream_t stream, const BwdParams& p) {
  const int n = p.op.num_experts;
  if (n > kMaxRegisterExperts || p.op.options.topk > kWarp) return LaunchAny<Logit>(stream, p);
  if (n <= 64) return LaunchRegisters<Logit, Columns<2, 1>>(stream, p);
  if (n <= 128) return LaunchRegisters<Logit, Columns<4, 1>>(stream, p);
  if (n <= 256) return LaunchRegisters<Logit, Columns<4, 2>>(stream, p);
  return LaunchRegisters<Logit, Columns<4, 4>>(stream, p);
}

}  // namespace

cudaError_t LaunchRouteBwd(cudaStream_t stream, const RouteBwd& op) {
  if (op.batch == 0 || op.num_tokens == 0) return cudaSuccess;
  BwdParams p = {};
  p.op = op;
  p.logits_stride = op.logits_batched ? op.num_tokens * op.num_experts : 0;
  p.indices_stride = op.indices_batched ? op.num_tokens * op.options.topk : 0;
  p.d_weights_stride = op.d_weights_batched ? op.num_tokens * op.options.topk : 0;
  p.mask_stride = op.valid_mask_batched ? op.num_tokens : 0;
  p.vector = RowsAllowVectors(NeighbouringColumns(op.num_experts), op.num_experts,
                              {op.logits, op.d_logits});
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
