// The functions of core/exact_math.h with their definitions in libm, and the checksum that compares
// their bits between compilers and machines. Shared by exact_math_test.cc, which takes a sample in
// long double, and benchmarks/exact_math_exhaustive.cu, which takes every input in float64.
#ifndef JAX_MOE_DET_TESTS_CPP_EXACT_MATH_ORACLE_H_
#define JAX_MOE_DET_TESTS_CPP_EXACT_MATH_ORACLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/exact_math.h"
#include "core/numerics.h"

namespace jax_moe_det::testing {

// Each has a name, the function, and its definition.

struct ExpFunction {
  static constexpr const char* kName = "Exp";
  MOE_HOST_DEVICE static float Apply(float x) { return Exp(x); }
  template <class Real>
  static Real Define(Real x) {
    return std::exp(x);
  }
};

// Over every input, as a function of -|x|.
struct ExpNonPositiveFunction {
  static constexpr const char* kName = "ExpNonPositive";
  MOE_HOST_DEVICE static float Apply(float x) {
    return CanonicalNan(ExpNonPositive(BitCast<float>(BitCast<uint32_t>(x) | 0x80000000u)));
  }
  template <class Real>
  static Real Define(Real x) {
    return std::exp(-std::fabs(x));
  }
};

struct Log1pFunction {
  static constexpr const char* kName = "Log1p";
  MOE_HOST_DEVICE static float Apply(float x) { return Log1p(x); }
  template <class Real>
  static Real Define(Real x) {
    return std::log1p(x);
  }
};

struct SigmoidFunction {
  static constexpr const char* kName = "Sigmoid";
  MOE_HOST_DEVICE static float Apply(float x) { return Sigmoid(x); }
  template <class Real>
  static Real Define(Real x) {
    const Real z = std::exp(-std::fabs(x));
    return x < 0 ? z / (1 + z) : 1 / (1 + z);
  }
};

struct SigmoidSlopeFunction {
  static constexpr const char* kName = "SigmoidSlope";
  MOE_HOST_DEVICE static float Apply(float x) { return SigmoidSlope(x); }
  template <class Real>
  static Real Define(Real x) {
    const Real z = std::exp(-std::fabs(x));
    return z / ((1 + z) * (1 + z));
  }
};

struct SqrtSoftplusFunction {
  static constexpr const char* kName = "SqrtSoftplus";
  MOE_HOST_DEVICE static float Apply(float x) { return SqrtSoftplus(x); }
  template <class Real>
  static Real Define(Real x) {
    const Real z = std::exp(-std::fabs(x));
    return std::sqrt((x > 0 ? x : 0) + std::log1p(z));
  }
};

struct SqrtSoftplusSlopeFunction {
  static constexpr const char* kName = "SqrtSoftplusSlope";
  MOE_HOST_DEVICE static float Apply(float x) { return SqrtSoftplusSlope(x); }
  template <class Real>
  static Real Define(Real x) {
    if (x < -700) return 0;  // far below float32, where 0 / 0 would follow
    return SigmoidFunction::Define(x) / (2 * SqrtSoftplusFunction::Define(x));
  }
};

// The largest errors seen of one function, and where.
template <class Real>
struct Errors {
  double relative = 0;    // where the definition is a normal float32
  double ulps = 0;        // there too
  double absolute = 0;    // there too
  double underflow = 0;   // absolute, where the definition is below the normal float32
  float relative_at = 0;  // arguments
  float ulps_at = 0;
  int64_t wrong_class = 0;  // infinite, NaN or of another sign where the definition is not

  void Add(float x, float got, Real want) {
    constexpr double kLargest = std::numeric_limits<float>::max();
    constexpr double kSmallest = std::numeric_limits<float>::min();
    const double rounded = static_cast<float>(want);
    if (std::isnan(want) || std::isnan(got) || std::fabs(rounded) > kLargest || std::isinf(got)) {
      const bool equal = std::isnan(want) ? std::isnan(got) : got == rounded;
      wrong_class += !equal;
      return;
    }
    wrong_class += got != 0.0f && std::signbit(got) != std::signbit(want);
    const double size = static_cast<double>(std::fabs(want));
    const double error = static_cast<double>(std::fabs(static_cast<Real>(got) - want));
    if (size < kSmallest) {
      underflow = std::max(underflow, error);
      return;
    }
    absolute = std::max(absolute, error);
    if (error > relative * size) {
      relative = error / size;
      relative_at = x;
    }
    // The power of two at or below `size`, without a call.
    const double power = BitCast<double>(BitCast<uint64_t>(size) & 0x7ff0000000000000u);
    const double in_ulps = error / power * 0x1p23;
    if (in_ulps > ulps) {
      ulps = in_ulps;
      ulps_at = x;
    }
  }

  void Add(const Errors& other) {
    if (other.relative > relative) relative_at = other.relative_at;
    if (other.ulps > ulps) ulps_at = other.ulps_at;
    relative = std::max(relative, other.relative);
    ulps = std::max(ulps, other.ulps);
    absolute = std::max(absolute, other.absolute);
    underflow = std::max(underflow, other.underflow);
    wrong_class += other.wrong_class;
  }
};

// Two sums over (argument, result) pairs, in any order: a GPU adds them as it likes. A single
// result that differs always shows.
struct Checksum {
  uint32_t first = 0;
  uint32_t second = 0;

  MOE_HOST_DEVICE void Add(uint32_t argument, uint32_t result) {
    uint32_t h = result ^ argument * 0x9e3779b1u;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    h ^= h >> 16;
    first += h;
    h = (h + 0x7f4a7c15u) * 0x2c1b3c6du;
    second += (h ^ h >> 15) * 0x297a2d39u;
  }

  void Add(const Checksum& other) {
    first += other.first;
    second += other.second;
  }

  uint64_t Value() const { return static_cast<uint64_t>(first) << 32 | second; }
};

}  // namespace jax_moe_det::testing

#endif  // JAX_MOE_DET_TESTS_CPP_EXACT_MATH_ORACLE_H_
