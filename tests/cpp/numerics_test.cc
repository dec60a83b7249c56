// The conversions of core/numerics.h against the definition of the formats: all values of the
// 16-bit ones, and every place where rounding changes its mind.
#include "core/numerics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tests/cpp/float_format.h"

namespace jax_moe_det {
namespace {

using testing::Decode;
using testing::FloatFormat;
using testing::kBFloat16Format;
using testing::kFloat16Format;
using testing::kFloat32Format;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One type of test for three formats.
template <class T>
struct Traits;
template <>
struct Traits<float> {
  static constexpr FloatFormat kFormat = kFloat32Format;
  static constexpr uint32_t kSign = 0x80000000u, kInfinityBits = 0x7f800000u, kNan = 0x7fc00000u;
  static uint32_t Bits(float x) { return BitCast<uint32_t>(x); }
};
template <>
struct Traits<BFloat16> {
  static constexpr FloatFormat kFormat = kBFloat16Format;
  static constexpr uint32_t kSign = 0x8000u, kInfinityBits = 0x7f80u, kNan = 0x7fc0u;
  static uint32_t Bits(BFloat16 x) { return x.bits; }
};
template <>
struct Traits<Float16> {
  static constexpr FloatFormat kFormat = kFloat16Format;
  static constexpr uint32_t kSign = 0x8000u, kInfinityBits = 0x7c00u, kNan = 0x7e00u;
  static uint32_t Bits(Float16 x) { return x.bits; }
};

template <class T>
uint32_t RoundedBits(double x) {
  T out;
  RoundTo(x, &out);
  return Traits<T>::Bits(out);
}

template <class T>
class RoundToTest : public ::testing::Test {
 protected:
  using Info = Traits<T>;

  // What lies between the finite value `bits` and the next one away from zero, on both sides of 0:
  // the two values, their midpoint, and the doubles beside each of the three.
  static void ExpectRightBetween(uint32_t bits) {
    const double lower = Decode(bits, Info::kFormat);
    double upper = Decode(bits + 1, Info::kFormat);
    if (std::isinf(upper)) upper = std::ldexp(1.0, Info::kFormat.max_exponent + 1);
    const double middle = (lower + upper) / 2;  // exact
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ExpectBits(lower, bits);
    ExpectBits(std::nextafter(lower, kInfinity), bits);
    ExpectBits(std::nextafter(middle, 0.0), bits);
    ExpectBits(middle, even);
    ExpectBits(std::nextafter(middle, kInfinity), bits + 1);
    ExpectBits(std::nextafter(upper, 0.0), bits + 1);
  }

  static void ExpectBits(double x, uint32_t bits) {
    EXPECT_EQ(RoundedBits<T>(x), bits) << std::hexfloat << x;
    EXPECT_EQ(RoundedBits<T>(-x), bits | Info::kSign) << std::hexfloat << -x;
  }

  static void ExpectOracle(double x) {
    const double want = testing::Round(x, Info::kFormat);
    const double got = Decode(RoundedBits<T>(x), Info::kFormat);
    if (std::isnan(x)) {
      EXPECT_EQ(RoundedBits<T>(x), Info::kNan);
    } else {
      EXPECT_TRUE(got == want && std::signbit(got) == std::signbit(want))
          << std::hexfloat << x << ": got " << got << ", wanted " << want;
    }
  }
};

using Formats = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(RoundToTest, Formats);

TYPED_TEST(RoundToTest, EveryNeighbourhood) {
  using Info = Traits<TypeParam>;
  if (sizeof(TypeParam) == 2) {
    for (uint32_t bits = 0; bits < Info::kInfinityBits; ++bits) this->ExpectRightBetween(bits);
    return;
  }
  // float32: both ends of every exponent, and a sample of the rest.
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (uint32_t i = 0; i < 64; ++i) {
      this->ExpectRightBetween(exponent << 23 | i);
      this->ExpectRightBetween(exponent << 23 | (0x7fffffu - i));
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) this->ExpectRightBetween(random() % Info::kInfinityBits);
}

TYPED_TEST(RoundToTest, RandomDoubles) {
  std::mt19937_64 random(2);
  std::uniform_int_distribution<int> exponent(-180, 140);
  std::uniform_real_distribution<double> mantissa(-2.0, 2.0);
  for (int i = 0; i < 300000; ++i) {
    this->ExpectOracle(BitCast<double>(static_cast<uint64_t>(random())));
    this->ExpectOracle(std::ldexp(mantissa(random), exponent(random)));
  }
}

TYPED_TEST(RoundToTest, Extremes) {
  using Info = Traits<TypeParam>;
  using Double = std::numeric_limits<double>;
  this->ExpectBits(0.0, 0);
  this->ExpectBits(Double::denorm_min(), 0);
  this->ExpectBits(Double::min(), 0);
  this->ExpectBits(Double::max(), Info::kInfinityBits);
  this->ExpectBits(kInfinity, Info::kInfinityBits);
}

TYPED_TEST(RoundToTest, NanIsCanonical) {
  for (const uint64_t bits :
       {0x7ff8000000000000u, 0xfff8000000000000u, 0x7fffffffffffffffu, 0xffffffffffffffffu,
        0x7ff0000000000001u, 0xfff0000000000001u, 0x7ff00000dead0000u, 0x7ff0000020000000u}) {
    EXPECT_EQ(RoundedBits<TypeParam>(BitCast<double>(bits)), Traits<TypeParam>::kNan)
        << std::hex << bits;
  }
}

template <class T>
class ToFloatTest : public ::testing::Test {};

using Formats16 = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(ToFloatTest, Formats16);

TYPED_TEST(ToFloatTest, EveryValue) {
  using Info = Traits<TypeParam>;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const TypeParam x = {static_cast<uint16_t>(bits)};
    const float got = ToFloat(x);
    const double want = Decode(bits, Info::kFormat);
    if (std::isnan(want)) {
      // Sign and payload stay, at the top of the mantissa.
      const uint32_t mantissa = bits & ((1u << Info::kFormat.mantissa_bits) - 1u);
      EXPECT_EQ(BitCast<uint32_t>(got), (bits & 0x8000u) << 16 | 0x7f800000u |
                                            mantissa << (23 - Info::kFormat.mantissa_bits));
      EXPECT_EQ(RoundedBits<TypeParam>(got), Info::kNan);
    } else {
      EXPECT_TRUE(got == want && std::signbit(got) == std::signbit(want))
          << std::hex << bits << ": got " << got << ", wanted " << want;
      EXPECT_EQ(RoundedBits<TypeParam>(got), bits);
    }
  }
}

TEST(NumericsTest, CanonicalNan) {
  for (const uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u,
                              0xff800001u, 0x7fa00000u}) {
    EXPECT_EQ(BitCast<uint32_t>(CanonicalNan(BitCast<float>(bits))), 0x7fc00000u);
  }
  for (const uint32_t bits : {0x00000000u, 0x80000000u, 0x00000001u, 0x807fffffu, 0x3f800000u,
                              0x7f7fffffu, 0x7f800000u, 0xff800000u}) {
    EXPECT_EQ(BitCast<uint32_t>(CanonicalNan(BitCast<float>(bits))), bits);
  }
}

TEST(NumericsTest, FmaRoundsOnce) {
  const double tiny = std::ldexp(1.0, -30);
  EXPECT_EQ(Fma(1.0 + tiny, 1.0 - tiny, -1.0), -std::ldexp(1.0, -60));
}

// The other half of the promise: what the code writes as two roundings stays two. Fails where a
// compiler contracts a * b + c.
TEST(NumericsTest, ProductAndSumRoundTwice) {
  volatile double tiny = std::ldexp(1.0, -30);
  const double a = 1.0 + tiny;
  const double b = 1.0 - tiny;
  EXPECT_EQ(a * b + -1.0, 0.0);
}

}  // namespace
}  // namespace jax_moe_det
