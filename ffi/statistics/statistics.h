// Numbers about the load of the experts, and the bias update that evens it out. No FFI, no CUDA
// runtime.
//
// Sums of integer counts are exact: 128 bits hold any count times any number of experts. Float32
// counts are summed in float64, in the order of the lanes: expert e goes to lane e mod 128, a lane
// adds its experts in ascending order, and halves of the lanes are folded, 64, 32, ..., 1.
//
//   load           count / sum, in float64, rounded once to float32
//   max_violation  (largest count * E - sum) / sum, the difference exact for integers
//   min_violation  (sum - smallest count * E) / sum
//   entropy        - sum over counts > 0 of q * log(q), q = count / sum, in float64 and the order
//                  of the lanes
//   effective      exp(entropy), from float64's entropy
//   bias update    bias + rate * sign(sum - count * E)
#ifndef JAX_MOE_DET_FFI_STATISTICS_STATISTICS_H_
#define JAX_MOE_DET_FFI_STATISTICS_STATISTICS_H_

#include <cstdint>
#include <type_traits>

#include "aux_loss/aux_loss.h"
#include "core/exact_math.h"
#include "core/numerics.h"

namespace jax_moe_det {

// Operands are [1, ...] or [batch, ...], dense and row-major.
struct RoutingStatsOp {
  AuxLossCounts counts;  // [num_experts]
  int64_t batch;
  int64_t num_experts;
  float* load;     // [batch, num_experts]
  float* summary;  // [batch, 4]: max_violation, min_violation, entropy, effective experts
  int32_t* dead;   // [batch]
};

struct ExpertBiasUpdate {
  const float* bias;  // [num_experts]
  bool bias_batched;
  AuxLossCounts counts;  // [num_experts]
  const float* rate;     // []
  bool rate_batched;
  int64_t batch;
  int64_t num_experts;
  float* out;  // [batch, num_experts]
};

constexpr int kStatisticsLanes = 128;

// What counts of a type are summed in.
template <class T>
using CountSum = std::conditional_t<std::is_floating_point_v<T>, double, __int128>;

MOE_HOST_DEVICE double ToDouble(double x) { return x; }

// Not the compiler's conversion, which is a call on some platforms. Exact below 2^53.
MOE_HOST_DEVICE double ToDouble(__int128 x) {
  const __int128 size = x < 0 ? -x : x;
  const double magnitude = static_cast<double>(static_cast<int64_t>(size >> 64)) * 0x1p64 +
                           static_cast<double>(static_cast<uint64_t>(size));
  return x < 0 ? -magnitude : magnitude;
}

// The load of some of the experts; one expert's is {count, count, count, count == 0}.
template <class Sum>
struct LoadSums {
  Sum total, largest, smallest;
  int32_t dead;
};

// NaN stays, whichever side it is on.
template <class Sum>
MOE_HOST_DEVICE Sum Larger(Sum a, Sum b) {
  return b > a || b != b ? b : a;
}
template <class Sum>
MOE_HOST_DEVICE Sum Smaller(Sum a, Sum b) {
  return b < a || b != b ? b : a;
}

template <class Sum>
MOE_HOST_DEVICE LoadSums<Sum> Join(const LoadSums<Sum>& a, const LoadSums<Sum>& b) {
  return {a.total + b.total, Larger(a.largest, b.largest), Smaller(a.smallest, b.smallest),
          a.dead + b.dead};
}

// One lane, which has an expert.
template <class T>
MOE_HOST_DEVICE LoadSums<CountSum<T>> LaneLoad(const T* counts, int64_t num_experts, int lane) {
  using Sum = CountSum<T>;
  LoadSums<Sum> sums = {};
  for (int64_t e = lane; e < num_experts; e += kStatisticsLanes) {
    const Sum count = counts[e];
    const LoadSums<Sum> one = {count, count, count, count == Sum{0}};
    sums = e == lane ? one : Join(sums, one);
  }
  return sums;
}

// log(x) of a normal x > 0, to 1e-15 relative or 4e-16 absolute: x = 2^e * m with m in [3/4, 3/2),
// log(m) = 2 * atanh(s), s = (m - 1) / (m + 1), by its series.
MOE_HOST_DEVICE double Log(double x) {
  const uint64_t e = (BitCast<uint64_t>(x) - BitCast<uint64_t>(0.75)) & 0xfff0000000000000u;
  const double m = BitCast<double>(BitCast<uint64_t>(x) - e);
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double series = 1.0 / 25.0;
  for (int k = 23; k >= 1; k -= 2) series = Fma(series, s2, 1.0 / k);
  const double exponent = static_cast<double>(static_cast<int64_t>(e) >> 52);
  return Fma(exponent, 0x1.62e42fefa39efp-1, 2.0 * s * series);
}

// -q * log(q), 0 where there is no load; NaN for what is no share. q below the normal numbers,
// which only float32 counts can have, is as good as 0.
MOE_HOST_DEVICE double EntropyTerm(double q) {
  if (q == 0.0) return 0.0;
  if (!(q > 0.0 && q <= 1.7976931348623157e308)) return BitCast<double>(0x7ff8000000000000u);
  return q < 2.2250738585072014e-308 ? 0.0 : -(q * Log(q));
}

template <class T>
MOE_HOST_DEVICE double LaneEntropy(const T* counts, int64_t num_experts, int lane, double total) {
  double sum = 0.0;
  for (int64_t e = lane; e < num_experts; e += kStatisticsLanes) {
    sum = sum + EntropyTerm(ToDouble(CountSum<T>(counts[e])) / total);
  }
  return sum;
}

template <class T>
MOE_HOST_DEVICE float Load(T count, double total) {
  if (total == 0.0) return 0.0f;
  return CanonicalNan(static_cast<float>(ToDouble(CountSum<T>(count)) / total));
}

// exp(entropy) with one rounding more than Exp's: the part of `entropy` below float32 is its own
// factor.
MOE_HOST_DEVICE float EffectiveExperts(double entropy) {
  const float high = static_cast<float>(entropy);
  const double low = entropy - static_cast<double>(high);
  return CanonicalNan(static_cast<float>(static_cast<double>(Exp(high)) * (1.0 + low)));
}

// max_violation, min_violation, entropy, effective experts.
template <class Sum>
MOE_HOST_DEVICE void Summarize(const LoadSums<Sum>& sums, int64_t num_experts, double entropy,
                               float* summary) {
  const double total = ToDouble(sums.total);
  for (int i = 0; i < 4; ++i) summary[i] = 0.0f;
  if (total == 0.0) return;
  const Sum n = static_cast<Sum>(num_experts);
  RoundTo(ToDouble(sums.largest * n - sums.total) / total, summary + 0);
  RoundTo(ToDouble(sums.total - sums.smallest * n) / total, summary + 1);
  RoundTo(entropy, summary + 2);
  summary[3] = EffectiveExperts(entropy);
}

// Where the sign is 0, the bits stay; a NaN count has no sign.
template <class T>
MOE_HOST_DEVICE float UpdatedBias(float bias, T count, CountSum<T> total, int64_t num_experts,
                                  float rate) {
  using Sum = CountSum<T>;
  const Sum excess = static_cast<Sum>(count) * static_cast<Sum>(num_experts);
  if (excess < total) return CanonicalNan(bias + rate);
  if (excess > total) return CanonicalNan(bias - rate);
  return excess == total ? bias : BitCast<float>(0x7fc00000u);
}

// ---- What the CPU backend runs.

template <class T>
MOE_HOST LoadSums<CountSum<T>> FoldLoad(const T* counts, int64_t num_experts) {
  LoadSums<CountSum<T>> lanes[kStatisticsLanes];
  int used = kStatisticsLanes;
  for (int l = 0; l < used && l < num_experts; ++l) lanes[l] = LaneLoad(counts, num_experts, l);
  while ((used /= 2) > 0) {
    for (int l = 0; l < used && l + used < num_experts; ++l) {
      lanes[l] = Join(lanes[l], lanes[l + used]);
    }
  }
  return lanes[0];
}

template <class T>
MOE_HOST double FoldEntropy(const T* counts, int64_t num_experts, double total) {
  double lanes[kStatisticsLanes];
  for (int l = 0; l < kStatisticsLanes; ++l) lanes[l] = LaneEntropy(counts, num_experts, l, total);
  for (int used = kStatisticsLanes / 2; used > 0; used /= 2) {
    for (int l = 0; l < used; ++l) lanes[l] = lanes[l] + lanes[l + used];
  }
  return lanes[0];
}

template <class T>
MOE_HOST void ComputeStats(const RoutingStatsOp& op, int64_t item) {
  const int64_t n = op.num_experts;
  const T* counts = static_cast<const T*>(op.counts.data) + (op.counts.batched ? item * n : 0);
  const auto sums = FoldLoad(counts, n);
  const double total = ToDouble(sums.total);
  for (int64_t e = 0; e < n; ++e) op.load[item * n + e] = Load(counts[e], total);
  Summarize(sums, n, FoldEntropy(counts, n, total), op.summary + item * 4);
  op.dead[item] = sums.dead;
}

template <class T>
MOE_HOST void ComputeUpdate(const ExpertBiasUpdate& op, int64_t item) {
  const int64_t n = op.num_experts;
  const T* counts = static_cast<const T*>(op.counts.data) + (op.counts.batched ? item * n : 0);
  const float* bias = op.bias + (op.bias_batched ? item * n : 0);
  const float rate = op.rate[op.rate_batched ? item : 0];
  const auto total = FoldLoad(counts, n).total;
  for (int64_t e = 0; e < n; ++e) {
    op.out[item * n + e] = UpdatedBias(bias[e], counts[e], total, n, rate);
  }
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_STATISTICS_STATISTICS_H_
