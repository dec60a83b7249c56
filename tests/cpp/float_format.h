// The oracle of the conversion tests: binary floating-point formats by their definition, in
// arithmetic on doubles. No bit tricks, no code shared with ffi/core/numerics.h.
#ifndef JAX_MOE_DET_TESTS_CPP_FLOAT_FORMAT_H_
#define JAX_MOE_DET_TESTS_CPP_FLOAT_FORMAT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace jax_moe_det::testing {

struct FloatFormat {
  int mantissa_bits;
  int min_exponent;  // of the smallest normal value
  int max_exponent;  // of the largest finite value
};

inline constexpr FloatFormat kFloat32Format = {23, -126, 127};
inline constexpr FloatFormat kBFloat16Format = {7, -126, 127};
inline constexpr FloatFormat kFloat16Format = {10, -14, 15};

// Every finite value of the three formats is exact as a double. NaN comes out as some NaN.
inline double Decode(uint32_t bits, const FloatFormat& format) {
  const int exponent_bits = format.max_exponent == 15 ? 5 : 8;
  const uint32_t mantissa = bits & ((1u << format.mantissa_bits) - 1u);
  const uint32_t exponent = (bits >> format.mantissa_bits) & ((1u << exponent_bits) - 1u);
  const bool negative = (bits >> (format.mantissa_bits + exponent_bits)) & 1u;
  double magnitude;
  if (exponent == (1u << exponent_bits) - 1u) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, format.min_exponent - format.mantissa_bits);
  } else {
    magnitude =
        std::ldexp((1u << format.mantissa_bits) + mantissa,
                   format.min_exponent - format.mantissa_bits + static_cast<int>(exponent) - 1);
  }
  return negative ? -magnitude : magnitude;
}

// `x` rounded once to the format, to nearest, ties to even; as a double.
inline double Round(double x, const FloatFormat& format) {
  if (x == 0.0 || std::isnan(x) || std::isinf(x)) return x;
  const int unit = std::max(std::ilogb(x), format.min_exponent) - format.mantissa_bits;
  const double scaled = std::ldexp(std::fabs(x), -unit);  // below 2^24: exact, as is the rest
  double whole = std::floor(scaled);
  const double rest = scaled - whole;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2.0) == 1.0)) whole += 1.0;
  double magnitude = std::ldexp(whole, unit);
  if (magnitude >= std::ldexp(1.0, format.max_exponent + 1)) {
    magnitude = std::numeric_limits<double>::infinity();
  }
  return std::copysign(magnitude, x);
}

}  // namespace jax_moe_det::testing

#endif  // JAX_MOE_DET_TESTS_CPP_FLOAT_FORMAT_H_
