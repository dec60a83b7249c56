// The oracles of the router tests. One has the documented bits, written the slow and obvious way
// from the words at the top of ffi/topk_router/topk_router.h: sorted lists, whole trees, a vector
// for each step. The other is the formula in float64. They share the score functions of
// core/exact_math.h, which has a test of its own, and TopkRouterOptions with the router.
#ifndef JAX_MOE_DET_TESTS_CPP_TOPK_ROUTER_ORACLE_H_
#define JAX_MOE_DET_TESTS_CPP_TOPK_ROUTER_ORACLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "core/exact_math.h"
#include "tests/cpp/aux_loss_oracle.h"
#include "topk_router/topk_router.h"

namespace jax_moe_det::testing {

using Floats = std::vector<float>;

// Adjacent pairs, padded with +0 to a power of two.
inline float ExpectedListSum(Floats values) {
  size_t size = 1;
  while (size < values.size()) size *= 2;
  values.resize(size, 0.0f);
  return FoldByPairs(values);
}

// 128 lanes from +0, column e in lane e mod 128, ascending.
inline float ExpectedRowSum(const Floats& values) {
  Floats lanes(128, 0.0f);
  for (size_t e = 0; e < values.size(); ++e) lanes[e % 128] += values[e];
  return FoldByPairs(lanes);
}

inline float ExpectedMax(const Floats& values) {
  float max = -std::numeric_limits<float>::infinity();
  for (const float value : values) {
    if (std::isnan(value)) return value;
    max = std::max(max, value);
  }
  return max;
}

// Highest first: NaN, then by value, +0 before -0.
inline bool IsHigher(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && !std::isnan(b);
  if (a == 0.0f && b == 0.0f) return std::signbit(b) && !std::signbit(a);
  return a > b;
}

// Indices of the k highest, descending, the lower one first among equals; what is not allowed comes
// last.
inline std::vector<int> ExpectedHighest(const Floats& values, const std::vector<bool>& allowed,
                                        int k) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    if (allowed[a] != allowed[b]) return static_cast<bool>(allowed[a]);
    return allowed[a] && IsHigher(values[a], values[b]);
  });
  order.resize(k);
  return order;
}

// Which experts are in kept groups.
inline std::vector<bool> ExpectedAllowed(const Floats& values, const TopkRouterOptions& options) {
  const int size = static_cast<int>(values.size()) / options.num_groups;
  if (options.num_groups == 1) return std::vector<bool>(values.size(), true);
  Floats scores;
  for (int g = 0; g < options.num_groups; ++g) {
    const Floats group(values.begin() + g * size, values.begin() + (g + 1) * size);
    Floats highest;
    for (const int e :
         ExpectedHighest(group, std::vector<bool>(size, true), options.group_values)) {
      highest.push_back(group[e]);
    }
    scores.push_back(ExpectedListSum(highest));
  }
  std::vector<bool> allowed(values.size(), false);
  for (const int g :
       ExpectedHighest(scores, std::vector<bool>(options.num_groups, true), options.group_topk)) {
    std::fill_n(allowed.begin() + g * size, size, true);
  }
  return allowed;
}

inline float ExpectedFactor(float sum, float eps) {
  const float denominator = sum + eps;
  const float factor = 1.0f / denominator;
  if (denominator > 0.0f && std::isinf(factor)) return std::numeric_limits<float>::max();
  return factor;
}

// exp(x - max).
inline Floats ExpectedExp(const Floats& x) {
  const float max = ExpectedMax(x);
  Floats out;
  for (const float value : x) out.push_back(ExpNonPositive(value - max));
  return out;
}

inline Floats Times(Floats values, float factor) {
  for (float& value : values) value = value * factor;
  return values;
}

inline Floats Times(Floats values, const Floats& others) {
  for (size_t i = 0; i < values.size(); ++i) values[i] = values[i] * others[i];
  return values;
}

inline bool IsSigmoidKind(ScoreKind kind) {
  return kind == ScoreKind::kSigmoid || kind == ScoreKind::kSqrtSoftplus;
}

// One row of the forward.
struct ExpectedRow {
  Floats out;               // float32, before it is rounded to the logits' dtype
  std::vector<int> chosen;  // in order of selection
};

// An empty bias: none.
inline ExpectedRow ExpectedForward(const Floats& logits, const Floats& bias, bool valid,
                                   const TopkRouterOptions& options) {
  ExpectedRow row = {Floats(logits.size(), 0.0f), {}};
  if (!valid) return row;
  Floats scores = logits;
  if (options.kind == ScoreKind::kSoftmax) {
    const Floats e = ExpectedExp(logits);
    scores = Times(e, 1.0f / ExpectedRowSum(e));
  } else if (IsSigmoidKind(options.kind)) {
    for (float& x : scores) {
      x = options.kind == ScoreKind::kSigmoid ? Sigmoid(x) : SqrtSoftplus(x);
    }
    if (options.aux_scores) {
      scores = Times(scores, ExpectedFactor(ExpectedRowSum(scores), options.eps));
    }
  }
  Floats selection = scores;
  for (size_t e = 0; e < bias.size(); ++e) selection[e] += bias[e];
  row.chosen = ExpectedHighest(selection, ExpectedAllowed(selection, options), options.topk);
  if (options.aux_scores) {
    row.out = scores;
    return row;
  }

  Floats weights;
  for (const int e : row.chosen) weights.push_back(scores[e]);
  if (options.kind == ScoreKind::kSoftmaxAfterTopk) {
    weights = ExpectedExp(weights);
    weights = Times(weights, 1.0f / ExpectedListSum(weights));
  } else if (IsSigmoidKind(options.kind) && options.topk > 1) {
    weights = Times(weights, ExpectedFactor(ExpectedListSum(weights), options.eps));
  }
  weights = Times(weights, options.scaling_factor);
  for (const float weight : Floats(weights)) {
    if (std::isnan(weight)) weights.assign(weights.size(), weight);
  }
  for (int i = 0; i < options.topk; ++i) row.out[row.chosen[i]] = weights[i];
  return row;
}

// One row of the gradient. `chosen` ascends; it is not used for aux scores.
inline Floats ExpectedBackward(const Floats& logits, const Floats& d_out,
                               const std::vector<int>& chosen, const TopkRouterOptions& options) {
  const bool dense = options.aux_scores || options.kind == ScoreKind::kSoftmax;
  Floats x = logits;
  Floats g(logits.size(), 0.0f);
  if (options.aux_scores) g = d_out;
  if (!options.aux_scores) {
    for (const int e : chosen) g[e] = options.scaling_factor * d_out[e];
  }
  if (!dense) {
    x.clear();
    Floats chosen_g;
    for (const int e : chosen) {
      x.push_back(logits[e]);
      chosen_g.push_back(g[e]);
    }
    g = chosen_g;
  }
  const auto sum = [&](const Floats& values) {
    return dense ? ExpectedRowSum(values) : ExpectedListSum(values);
  };

  Floats result;
  if (!IsSigmoidKind(options.kind)) {
    const Floats e = ExpectedExp(x);
    const Floats p = Times(e, 1.0f / sum(e));
    const float dot = sum(Times(p, g));
    for (size_t i = 0; i < x.size(); ++i) result.push_back(p[i] * (g[i] - dot));
  } else {
    Floats s, slope;
    for (const float value : x) {
      const bool sigmoid = options.kind == ScoreKind::kSigmoid;
      s.push_back(sigmoid ? Sigmoid(value) : SqrtSoftplus(value));
      slope.push_back(sigmoid ? SigmoidSlope(value) : SqrtSoftplusSlope(value));
    }
    if (!options.aux_scores && options.topk == 1) {
      result = Times(slope, g);
    } else {
      const float n = ExpectedFactor(sum(s), options.eps);
      const float dot = sum(Times(Times(s, n), g));
      for (size_t i = 0; i < x.size(); ++i) result.push_back((slope[i] * n) * (g[i] - dot));
    }
  }
  if (dense) return result;
  Floats row(logits.size(), 0.0f);
  for (size_t i = 0; i < chosen.size(); ++i) row[chosen[i]] = result[i];
  return row;
}

// ---- The formula in float64, for a given choice.

inline double ScoreInFloat64(ScoreKind kind, double x) {
  if (kind == ScoreKind::kSigmoid) return 1.0 / (1.0 + std::exp(-x));
  return std::sqrt(x > 0.0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)));
}

// What the forward puts in the row: weights, or aux scores.
inline std::vector<double> ForwardInFloat64(const std::vector<double>& logits,
                                            const std::vector<int>& chosen,
                                            const TopkRouterOptions& options) {
  std::vector<double> scores;
  const double max = *std::max_element(logits.begin(), logits.end());
  for (const double x : logits) {
    scores.push_back(IsSigmoidKind(options.kind) ? ScoreInFloat64(options.kind, x)
                                                 : std::exp(x - max));
  }
  const bool dense = options.aux_scores || options.kind == ScoreKind::kSoftmax;
  std::vector<int> all(logits.size());
  std::iota(all.begin(), all.end(), 0);
  double sum = 0.0;
  for (const int e : dense ? all : chosen) sum += scores[e];
  if (IsSigmoidKind(options.kind)) sum += static_cast<double>(options.eps);
  if (IsSigmoidKind(options.kind) && options.topk == 1 && !options.aux_scores) sum = 1.0;
  const double scale = options.aux_scores ? 1.0 : static_cast<double>(options.scaling_factor);
  std::vector<double> out(logits.size(), 0.0);
  for (const int e : options.aux_scores ? all : chosen) out[e] = scores[e] / sum * scale;
  return out;
}

// Central differences of the sum of d_out times the above. Of a smooth function of size 1, with
// this step: right to about 1e-9.
inline std::vector<double> GradientInFloat64(const std::vector<double>& logits,
                                             const std::vector<double>& d_out,
                                             const std::vector<int>& chosen,
                                             const TopkRouterOptions& options) {
  constexpr double kStep = 1e-5;
  const auto loss = [&](size_t e, double step) {
    std::vector<double> moved = logits;
    moved[e] += step;
    const std::vector<double> out = ForwardInFloat64(moved, chosen, options);
    double sum = 0.0;
    for (size_t i = 0; i < out.size(); ++i) sum += out[i] * d_out[i];
    return sum;
  };
  std::vector<double> gradient;
  for (size_t e = 0; e < logits.size(); ++e) {
    gradient.push_back((loss(e, kStep) - loss(e, -kStep)) / (2.0 * kStep));
  }
  return gradient;
}

}  // namespace jax_moe_det::testing

#endif  // JAX_MOE_DET_TESTS_CPP_TOPK_ROUTER_ORACLE_H_
