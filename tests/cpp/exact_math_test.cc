// core/exact_math.h: errors against long double, special values, and checksums of the bits, which
// every compiler, processor and instruction set must meet. A sample of every exponent and the
// neighbourhood of every place where a function changes its way; all 2^32 inputs are
// benchmarks/exact_math_exhaustive.cu's.
#include "core/exact_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "core/numerics.h"
#include "tests/cpp/exact_math_oracle.h"

namespace jax_moe_det {
namespace {

using testing::Checksum;
using testing::ExpFunction;
using testing::ExpNonPositiveFunction;
using testing::Log1pFunction;
using testing::SigmoidFunction;
using testing::SigmoidSlopeFunction;
using testing::SqrtSoftplusFunction;
using testing::SqrtSoftplusSlopeFunction;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallestNormal = std::numeric_limits<float>::min();
constexpr uint32_t kNanBits = 0x7fc00000u;

uint32_t Bits(float x) { return BitCast<uint32_t>(x); }

// The contract's largest error, and what was measured over all inputs, rounded up.
struct Bounds {
  double contract_relative;
  double relative;
  double ulps;
  double underflow;  // absolute, where the definition is below the normal float32
};

// What a result below the cut of ExpNonPositive, about 2^-126.5, may miss.
constexpr double kCutOff = 0.71 * 0x1p-126;

template <class Function>
Bounds BoundsOf();
template <>
Bounds BoundsOf<ExpFunction>() {
  return {1e-6, 7.8e-8, 0.9, 0x1p-149};
}
template <>
Bounds BoundsOf<ExpNonPositiveFunction>() {
  return {1e-6, 7.8e-8, 0.9, kCutOff};
}
template <>
Bounds BoundsOf<Log1pFunction>() {
  return {1e-6, 9.4e-8, 1.27, 0.0};
}
template <>
Bounds BoundsOf<SigmoidFunction>() {
  return {1e-6, 2.1e-7, 2.8, kCutOff};
}
template <>
Bounds BoundsOf<SigmoidSlopeFunction>() {
  return {2e-6, 3.4e-7, 5.1, kCutOff};
}
template <>
Bounds BoundsOf<SqrtSoftplusFunction>() {
  return {1e-6, 1.3e-7, 1.7, kCutOff};
}
template <>
Bounds BoundsOf<SqrtSoftplusSlopeFunction>() {
  return {2e-6, 2.9e-7, 3.9, kCutOff};
}

// Checksum of Function over every kStride-th input, as `exact_math_exhaustive --stride 4099`
// prints it.
constexpr uint32_t kStride = 4099;
template <class Function>
uint64_t GoldenChecksum();
template <>
uint64_t GoldenChecksum<ExpFunction>() {
  return 0xe6aa2787fa9eb02eu;
}
template <>
uint64_t GoldenChecksum<ExpNonPositiveFunction>() {
  return 0x9c8b0907241d1bb4u;
}
template <>
uint64_t GoldenChecksum<Log1pFunction>() {
  return 0x5e346d9843004655u;
}
template <>
uint64_t GoldenChecksum<SigmoidFunction>() {
  return 0x5c601c9ef116725au;
}
template <>
uint64_t GoldenChecksum<SigmoidSlopeFunction>() {
  return 0xdc56e1dacd13aa84u;
}
template <>
uint64_t GoldenChecksum<SqrtSoftplusFunction>() {
  return 0xef3afa7549cf7ca4u;
}
template <>
uint64_t GoldenChecksum<SqrtSoftplusSlopeFunction>() {
  return 0x4e2066dd895d5c6cu;
}

// 256 mantissas or so of every exponent and sign, ends included.
std::vector<float> SampleOfEveryExponent() {
  std::vector<float> sample;
  std::mt19937 random(1);
  for (uint32_t top = 0; top < 512; ++top) {  // sign and exponent
    for (uint32_t i = 0; i < 256; ++i) {
      const uint32_t mantissa = i < 16   ? i
                                : i < 32 ? 0x7fffffu - (i - 16)
                                         : static_cast<uint32_t>(random()) & 0x7fffffu;
      sample.push_back(BitCast<float>(top << 23 | mantissa));
    }
  }
  return sample;
}

// 65 values around every place where a function changes its way.
std::vector<float> SampleOfBoundaries() {
  std::vector<double> places = {0.0,     1.0,   -1.0,   88.03,  87.68,   87.3365, 88.7229,
                                103.973, 104.0, 103.28, 174.67, 176.06,  173.29,  20.0,
                                17.33,   16.64, 89.0,   40.0,   kLargest};
  for (int k = -151; k <= 129; ++k) places.push_back((k + 0.5) * std::log(2.0));  // ReduceExp's k
  for (int k = -151; k <= 129; ++k) places.push_back(k * std::log(2.0));
  for (int e = -24; e <= 127; ++e) places.push_back(std::ldexp(0.75, e) - 1.0);  // Log1p's e
  std::vector<float> sample;
  for (const double place : places) {
    for (const double signed_place : {place, -place}) {
      const uint32_t bits = Bits(static_cast<float>(signed_place));
      for (uint32_t i = 0; i < 65; ++i) sample.push_back(BitCast<float>(bits + i - 32));
    }
  }
  return sample;
}

std::vector<float> Sample() {
  std::vector<float> sample = SampleOfEveryExponent();
  const std::vector<float> boundaries = SampleOfBoundaries();
  sample.insert(sample.end(), boundaries.begin(), boundaries.end());
  return sample;
}

template <class Function>
class ExactMathTest : public ::testing::Test {};

using Functions =
    ::testing::Types<ExpFunction, ExpNonPositiveFunction, Log1pFunction, SigmoidFunction,
                     SigmoidSlopeFunction, SqrtSoftplusFunction, SqrtSoftplusSlopeFunction>;

struct FunctionNames {
  template <class Function>
  static std::string GetName(int) {
    return Function::kName;
  }
};
TYPED_TEST_SUITE(ExactMathTest, Functions, FunctionNames);

TYPED_TEST(ExactMathTest, ErrorAgainstLongDouble) {
  const Bounds bounds = BoundsOf<TypeParam>();
  testing::Errors<long double> errors;
  for (const float x : Sample()) {
    errors.Add(x, TypeParam::Apply(x), TypeParam::template Define<long double>(x));
  }
  EXPECT_LE(errors.relative, bounds.contract_relative) << "at " << errors.relative_at;
  EXPECT_LE(errors.relative, bounds.relative) << "at " << errors.relative_at;
  EXPECT_LE(errors.ulps, bounds.ulps) << "at " << errors.ulps_at;
  EXPECT_LE(errors.underflow, bounds.underflow);
  EXPECT_EQ(errors.wrong_class, 0);
}

TYPED_TEST(ExactMathTest, GoldenBits) {
  Checksum checksum;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += kStride) {
    const uint32_t x = static_cast<uint32_t>(bits);
    checksum.Add(x, Bits(TypeParam::Apply(BitCast<float>(x))));
  }
  EXPECT_EQ(checksum.Value(), GoldenChecksum<TypeParam>()) << std::hex << checksum.Value();
}

TYPED_TEST(ExactMathTest, NanIsCanonical) {
  for (const uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u,
                              0xff800001u, 0x7fa00000u}) {
    EXPECT_EQ(Bits(TypeParam::Apply(BitCast<float>(bits))), kNanBits) << std::hex << bits;
  }
}

// NaN and infinities come from Exp's overflow and Log1p's domain, and from nowhere else.
TYPED_TEST(ExactMathTest, FiniteOfFinite) {
  for (const float x : Sample()) {
    if (!std::isfinite(x)) continue;
    if (std::is_same_v<TypeParam, ExpFunction> && x > 88.722) continue;
    if (std::is_same_v<TypeParam, Log1pFunction> && x <= -1.0f) continue;
    ASSERT_TRUE(std::isfinite(TypeParam::Apply(x))) << x;
  }
}

template <class Function>
class MonotonicTest : public ::testing::Test {};

using Increasing =
    ::testing::Types<ExpFunction, Log1pFunction, SigmoidFunction, SqrtSoftplusFunction>;
TYPED_TEST_SUITE(MonotonicTest, Increasing, FunctionNames);

TYPED_TEST(MonotonicTest, NeverFallsByMoreThanItsError) {
  std::vector<float> sample = Sample();
  sample.erase(std::remove_if(sample.begin(), sample.end(),
                              [](float x) {
                                return std::isnan(x) ||
                                       (std::is_same_v<TypeParam, Log1pFunction> && x < -1.0f);
                              }),
               sample.end());
  std::sort(sample.begin(), sample.end());
  float highest = -kInfinity;
  for (const float x : sample) {
    const float y = TypeParam::Apply(x);
    // A little more than the largest error of two results.
    ASSERT_TRUE(y >= highest || highest - y <= 4e-7f * highest) << x;
    highest = std::max(highest, y);
  }
}

struct Value {
  float x;
  float want;
};

template <class Function>
void ExpectValues(std::initializer_list<Value> values) {
  for (const Value& value : values) {
    EXPECT_EQ(Bits(Function::Apply(value.x)), Bits(value.want)) << Function::kName << value.x;
  }
}

TEST(ExactMathValuesTest, Exp) {
  ExpectValues<ExpFunction>({{0.0f, 1.0f},
                             {-0.0f, 1.0f},
                             {1e-30f, 1.0f},
                             {-1e-45f, 1.0f},
                             {kInfinity, kInfinity},
                             {-kInfinity, 0.0f},
                             {kLargest, kInfinity},
                             {-kLargest, 0.0f},
                             {88.73f, kInfinity},
                             {89.0f, kInfinity},
                             {-103.0f, 0x1p-149f},
                             {-103.98f, 0.0f},
                             {-104.0f, 0.0f}});
}

TEST(ExactMathValuesTest, ExpNonPositive) {
  ExpectValues<ExpNonPositiveFunction>({{-0.0f, 1.0f},
                                        {0.0f, 1.0f},
                                        {-kInfinity, 0.0f},
                                        {-kLargest, 0.0f},
                                        {-1e-45f, 1.0f},
                                        {-87.69f, 0.0f},
                                        {-88.02f, 0.0f},
                                        {-88.03f, 0.0f},
                                        {-88.04f, 0.0f},
                                        {-1e6f, 0.0f}});
  EXPECT_GT(ExpNonPositive(-87.67f), 0.0f);
  EXPECT_TRUE(std::isnan(ExpNonPositive(BitCast<float>(0xffc00001u))));
}

TEST(ExactMathValuesTest, ExpNonPositiveHasTheBitsOfExpAboveItsCut) {
  for (const float x : Sample()) {
    if (!(x <= 0.0f)) continue;
    const float got = ExpNonPositive(x);
    ASSERT_EQ(Bits(got), x > -87.68f || got != 0.0f ? Bits(Exp(x)) : 0u) << x;
  }
}

TEST(ExactMathValuesTest, Log1p) {
  ExpectValues<Log1pFunction>({{0.0f, 0.0f},
                               {-0.0f, -0.0f},
                               {0x1p-149f, 0x1p-149f},
                               {-0x1p-149f, -0x1p-149f},
                               {kSmallestNormal, kSmallestNormal},
                               {1.0f, 0x1.62e430p-1f},
                               {kInfinity, kInfinity},
                               {-1.0f, -kInfinity}});
  for (const float x : {-1.0000001f, -2.0f, -kLargest, -kInfinity}) {
    EXPECT_EQ(Bits(Log1p(x)), kNanBits) << x;
  }
}

TEST(ExactMathValuesTest, Sigmoid) {
  ExpectValues<SigmoidFunction>({{0.0f, 0.5f},
                                 {-0.0f, 0.5f},
                                 {kInfinity, 1.0f},
                                 {kLargest, 1.0f},
                                 {20.0f, 1.0f},
                                 {-kInfinity, 0.0f},
                                 {-kLargest, 0.0f},
                                 {-87.69f, 0.0f}});
  ExpectValues<SigmoidSlopeFunction>({{0.0f, 0.25f},
                                      {-0.0f, 0.25f},
                                      {kInfinity, 0.0f},
                                      {-kInfinity, 0.0f},
                                      {kLargest, 0.0f},
                                      {-kLargest, 0.0f},
                                      {88.0f, 0.0f},
                                      {-88.0f, 0.0f}});
}

TEST(ExactMathValuesTest, SqrtSoftplus) {
  ExpectValues<SqrtSoftplusFunction>({{kInfinity, kInfinity},
                                      {kLargest, 0x1.fffffep+63f},
                                      {0x1p100f, 0x1p50f},
                                      {-kInfinity, 0.0f},
                                      {-kLargest, 0.0f},
                                      {-175.5f, 0.0f}});
  ExpectValues<SqrtSoftplusSlopeFunction>({{kInfinity, 0.0f},
                                           {0x1p100f, 0x1p-51f},
                                           {-kInfinity, 0.0f},
                                           {-kLargest, 0.0f},
                                           {-175.5f, 0.0f}});
  // Both are normal long after exp(x) is not.
  EXPECT_GT(SqrtSoftplus(-174.6f), kSmallestNormal);
  EXPECT_GT(SqrtSoftplusSlope(-173.2f), kSmallestNormal);
}

TEST(ExactMathValuesTest, SigmoidSlopeIsWithinTheAbsoluteBound) {
  testing::Errors<long double> errors;
  for (const float x : Sample()) {
    errors.Add(x, SigmoidSlope(x), SigmoidSlopeFunction::Define<long double>(x));
  }
  EXPECT_LE(errors.absolute, 1e-7);
}

TEST(ExactMathValuesTest, ScoreOfZeroHasSlopeZero) {
  for (const float x : Sample()) {
    ASSERT_TRUE(Sigmoid(x) != 0.0f || Bits(SigmoidSlope(x)) == 0) << x;
    ASSERT_TRUE(SqrtSoftplus(x) != 0.0f || Bits(SqrtSoftplusSlope(x)) == 0) << x;
  }
}

TEST(ExactMathValuesTest, SigmoidIsAProbabilityAndItsSlopeIsEven) {
  for (const float x : Sample()) {
    if (std::isnan(x)) continue;
    const float s = Sigmoid(x);
    ASSERT_TRUE(s >= 0.0f && s <= 1.0f && !std::signbit(s)) << x;
    ASSERT_EQ(Bits(SigmoidSlope(x)), Bits(SigmoidSlope(-x))) << x;
  }
}

TEST(ExactMathValuesTest, FmaFRoundsOnce) {
  EXPECT_EQ(FmaF(1.0f + 0x1p-20f, 1.0f - 0x1p-20f, -1.0f), -0x1p-40f);
  // The product is a tie between two float32; a float64 sum loses what breaks it.
  EXPECT_EQ(FmaF(1.0f + 0x1p-12f, 1.0f + 0x1p-12f, 0x1p-80f), 1.0f + 0x1p-11f + 0x1p-23f);
}

}  // namespace
}  // namespace jax_moe_det
