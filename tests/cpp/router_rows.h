// Rows of logits of every kind and type, for the tests of the router and of the router step.
#ifndef JAX_MOE_DET_TESTS_CPP_ROUTER_ROWS_H_
#define JAX_MOE_DET_TESTS_CPP_ROUTER_ROWS_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "core/numerics.h"
#include "tests/cpp/float_format.h"
#include "tests/cpp/topk_router_oracle.h"
#include "topk_router/topk_router.h"

namespace jax_moe_det::testing {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSubnormal = 0x1p-149f;
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr ScoreKind kKinds[] = {ScoreKind::kSoftmaxAfterTopk, ScoreKind::kSoftmax,
                                ScoreKind::kSigmoid, ScoreKind::kSqrtSoftplus};

inline const FloatFormat& FormatOf(float) { return kFloat32Format; }
inline const FloatFormat& FormatOf(BFloat16) { return kBFloat16Format; }
inline const FloatFormat& FormatOf(Float16) { return kFloat16Format; }

inline double DecodeLogit(float x) { return x; }
inline double DecodeLogit(BFloat16 x) { return Decode(x.bits, kBFloat16Format); }
inline double DecodeLogit(Float16 x) { return Decode(x.bits, kFloat16Format); }

// `got` is `want` rounded once to its type: the same value and sign, or the canonical NaN.
template <class Logit>
bool IsRounded(Logit got, float want) {
  Logit canonical;
  RoundTo(std::nan(""), &canonical);
  if (std::isnan(want)) return std::memcmp(&got, &canonical, sizeof(got)) == 0;
  const double value = Round(want, FormatOf(got));
  return DecodeLogit(got) == value && std::signbit(DecodeLogit(got)) == std::signbit(value);
}

// ---- Rows of every kind.

enum class Values {
  kRandom,
  kTies,      // few distinct ones
  kEqual,     // all the same
  kFar,       // hundreds: scores that are 0 or 1, or tiny
  kZeros,     // +0, -0 and subnormal ones
  kSpecial,   // some NaN and infinities
  kMinusInf,  // all -infinity
  kNan,       // all NaN, of both signs
};
constexpr Values kValues[] = {Values::kRandom, Values::kTies,    Values::kEqual,    Values::kFar,
                              Values::kZeros,  Values::kSpecial, Values::kMinusInf, Values::kNan};

inline float RandomValue(Values values, std::mt19937& random) {
  std::normal_distribution<float> normal;
  switch (values) {
    case Values::kRandom:
      return normal(random);
    case Values::kTies:
      return static_cast<float>(random() % 5) * 0.5f - 1.0f;
    case Values::kEqual:
      return 0.25f;
    case Values::kFar:
      return normal(random) * 150.0f;
    case Values::kZeros: {
      constexpr float kSome[] = {0.0f, -0.0f, kSubnormal, -kSubnormal, 0x1p-130f, -0x1p-130f};
      return kSome[random() % std::size(kSome)];
    }
    case Values::kSpecial: {
      constexpr float kSome[] = {kNan, -kNan, kInfinity, -kInfinity, 0.0f, -0.0f, 3e38f, -3e38f};
      return random() % 12 == 0 ? kSome[random() % std::size(kSome)] : normal(random);
    }
    case Values::kMinusInf:
      return -kInfinity;
    default:
      return random() % 2 == 0 ? kNan : -kNan;
  }
}

inline Floats RandomValues(Values values, int n, std::mt19937& random) {
  Floats out;
  for (int e = 0; e < n; ++e) out.push_back(RandomValue(values, random));
  return out;
}

// A row in the operand's type, and the same values as the oracle reads them.
template <class Logit>
struct Row {
  explicit Row(const Floats& values) {
    for (const float value : values) {
      Logit rounded;
      RoundTo(value, &rounded);
      storage.push_back(rounded);
      floats.push_back(static_cast<float>(DecodeLogit(rounded)));
    }
  }
  std::vector<Logit> storage;
  Floats floats;
};

inline TopkRouterOptions Options(ScoreKind kind, int topk, float scale = 1.0f, float eps = 1e-20f) {
  TopkRouterOptions options = {};
  options.kind = kind;
  options.topk = topk;
  options.num_groups = options.group_topk = options.group_values = 1;
  options.scaling_factor = scale;
  options.eps = eps;
  return options;
}

}  // namespace jax_moe_det::testing

#endif  // JAX_MOE_DET_TESTS_CPP_ROUTER_ROWS_H_
