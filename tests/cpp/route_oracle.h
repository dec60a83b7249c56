// The oracles of the route tests. One has the documented bits, written the slow and obvious way
// from the words at the top of ffi/route/route.h: a whole matrix of aux scores, a vector for each
// step. The other is the formula in float64. They share the functions of core/exact_math.h and
// TopkRouterOptions with the code.
#ifndef JAX_MOE_DET_TESTS_CPP_ROUTE_ORACLE_H_
#define JAX_MOE_DET_TESTS_CPP_ROUTE_ORACLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/exact_math.h"
#include "tests/cpp/aux_loss_oracle.h"
#include "tests/cpp/topk_router_oracle.h"
#include "topk_router/topk_router.h"

namespace jax_moe_det::testing {

inline bool InRange(int32_t expert, size_t num_experts) {
  return expert >= 0 && expert < static_cast<int64_t>(num_experts);
}

inline float ExpectedScore(ScoreKind kind, float x) {
  return kind == ScoreKind::kSigmoid ? Sigmoid(x) : SqrtSoftplus(x);
}

inline float ExpectedSlope(ScoreKind kind, float x) {
  return kind == ScoreKind::kSigmoid ? SigmoidSlope(x) : SqrtSoftplusSlope(x);
}

// ---- One row of the forward.

struct ExpectedRoutedRow {
  std::vector<int32_t> chosen;  // in order of selection, or as replayed
  Floats weights;               // float32, before they are rounded to the logits' dtype
  Floats aux_scores;
  std::vector<int> plain;  // the topk highest aux scores
  float square;            // of logsumexp
};

// exp(x - max) of the chosen experts' logits, +0 where there is no expert.
inline Floats ExpectedChosenExp(const Floats& logits, const std::vector<int32_t>& chosen) {
  Floats existing;
  for (const int32_t e : chosen) {
    if (InRange(e, logits.size())) existing.push_back(logits[e]);
  }
  const float max = ExpectedMax(existing);
  Floats out;
  for (const int32_t e : chosen) {
    out.push_back(InRange(e, logits.size()) ? ExpNonPositive(logits[e] - max) : 0.0f);
  }
  return out;
}

inline Floats ExpectedWeights(const Floats& logits, const std::vector<int32_t>& chosen,
                              const TopkRouterOptions& options) {
  Floats weights;
  if (options.kind == ScoreKind::kSoftmaxAfterTopk) {
    const Floats e = ExpectedChosenExp(logits, chosen);
    weights = Times(e, 1.0f / ExpectedListSum(e));
  } else {
    Floats scores;
    if (options.kind == ScoreKind::kSoftmax) {
      const Floats e = ExpectedExp(logits);
      scores = Times(e, 1.0f / ExpectedRowSum(e));
    } else {
      for (const float x : logits) scores.push_back(ExpectedScore(options.kind, x));
    }
    for (const int32_t e : chosen) weights.push_back(InRange(e, scores.size()) ? scores[e] : 0.0f);
    if (IsSigmoidKind(options.kind) && options.topk > 1) {
      weights = Times(weights, ExpectedFactor(ExpectedListSum(weights), options.eps));
    }
  }
  weights = Times(weights, options.scaling_factor);
  bool has_nan = false;
  for (size_t i = 0; i < chosen.size(); ++i) {
    has_nan |= InRange(chosen[i], logits.size()) && std::isnan(weights[i]);
  }
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (has_nan) weights[i] = std::numeric_limits<float>::quiet_NaN();
    if (!InRange(chosen[i], logits.size())) weights[i] = 0.0f;
  }
  return weights;
}

// Of a valid row. Empty bias and replay: none.
inline ExpectedRoutedRow ExpectedRoute(const Floats& logits, const Floats& bias,
                                       const std::vector<int32_t>& replay,
                                       const TopkRouterOptions& options) {
  ExpectedRoutedRow row;
  row.chosen = replay;
  if (replay.empty()) {
    const std::vector<int> chosen = ExpectedForward(logits, bias, true, options).chosen;
    row.chosen.assign(chosen.begin(), chosen.end());
  }
  row.weights = ExpectedWeights(logits, row.chosen, options);
  TopkRouterOptions aux = options;
  aux.aux_scores = true;
  aux.num_groups = 1;
  if (aux.kind == ScoreKind::kSoftmaxAfterTopk) aux.kind = ScoreKind::kSoftmax;
  const ExpectedRow scores = ExpectedForward(logits, {}, true, aux);
  row.aux_scores = scores.out;
  row.plain = scores.chosen;
  const float sum = ExpectedRowSum(ExpectedExp(logits));
  const float lse = ExpectedMax(logits) + Log1p(sum - 1.0f);
  row.square = lse * lse;
  return row;
}

// ---- Losses.

inline float ExpectedZLoss(const Floats& partials, double coeff, double total) {
  if (coeff == 0.0 || total == 0.0) return 0.0f;
  std::vector<double> sums(256, 0.0);
  std::copy(partials.begin(), partials.end(), sums.begin());
  return static_cast<float>(FoldByPairs(sums) * (coeff / total));
}

// h of route.h's words.
inline float ExpectedZSlope(double coeff, double total, float d_loss) {
  double slope = coeff / total;
  slope = slope * 2.0;
  return static_cast<float>(slope * static_cast<double>(d_loss));
}

// ---- One row of the gradient.

// What the row-independent cotangents are; a loss that is switched off has none.
struct ExpectedCotangents {
  Floats aux;  // a[num_experts]; empty: none
  bool has_z;
  float h;
};

// c of each choice.
inline Floats ExpectedChosenGradient(const Floats& logits, const std::vector<int32_t>& chosen,
                                     const Floats& d_weights, const TopkRouterOptions& options) {
  const auto exists = [&](size_t i) { return InRange(chosen[i], logits.size()); };
  Floats g;
  for (size_t i = 0; i < chosen.size(); ++i) {
    g.push_back(exists(i) ? options.scaling_factor * d_weights[i] : 0.0f);
  }
  Floats c(chosen.size(), 0.0f);
  if (options.kind == ScoreKind::kSoftmax) return g;
  if (options.kind == ScoreKind::kSoftmaxAfterTopk) {
    const Floats e = ExpectedChosenExp(logits, chosen);
    const float inverse = 1.0f / ExpectedListSum(e);
    Floats p = Times(e, inverse);
    for (size_t i = 0; i < p.size(); ++i) p[i] = exists(i) ? p[i] : 0.0f;
    const float dot = ExpectedListSum(Times(p, g));
    for (size_t i = 0; i < c.size(); ++i) c[i] = p[i] * (g[i] - dot);
    return c;
  }
  Floats s, slope;
  for (size_t i = 0; i < chosen.size(); ++i) {
    s.push_back(exists(i) ? ExpectedScore(options.kind, logits[chosen[i]]) : 0.0f);
    slope.push_back(exists(i) ? ExpectedSlope(options.kind, logits[chosen[i]]) : 0.0f);
  }
  if (options.topk == 1) return Times(slope, g);
  const float n = ExpectedFactor(ExpectedListSum(s), options.eps);
  Floats terms = Times(Times(s, n), g);
  for (size_t i = 0; i < terms.size(); ++i) terms[i] = exists(i) ? terms[i] : 0.0f;
  const float dot = ExpectedListSum(terms);
  for (size_t i = 0; i < c.size(); ++i) {
    if (exists(i)) c[i] = (slope[i] * n) * (g[i] - dot);
  }
  return c;
}

// Of a valid row. Empty d_weights: no cotangent.
inline Floats ExpectedRouteGradient(const Floats& logits, const std::vector<int32_t>& chosen,
                                    const Floats& d_weights, const ExpectedCotangents& cotangents,
                                    const TopkRouterOptions& options) {
  const size_t n = logits.size();
  const bool in_softmax = options.kind == ScoreKind::kSoftmax;
  const bool has_aux = !cotangents.aux.empty();
  Floats sparse(n, 0.0f);
  if (!d_weights.empty()) {
    const Floats c = ExpectedChosenGradient(logits, chosen, d_weights, options);
    for (size_t i = 0; i < c.size(); ++i) {
      if (InRange(chosen[i], n)) sparse[chosen[i]] += c[i];
    }
  }

  const Floats e = ExpectedExp(logits);
  const float sum = ExpectedRowSum(e);
  const Floats p = Times(e, 1.0f / sum);
  const float zg =
      cotangents.has_z ? cotangents.h * (ExpectedMax(logits) + Log1p(sum - 1.0f)) : 0.0f;
  Floats dense(n, 0.0f);
  if (!IsSigmoidKind(options.kind)) {
    if (!has_aux && !cotangents.has_z && !(in_softmax && !d_weights.empty())) {
      return in_softmax ? dense : sparse;
    }
    Floats total = has_aux ? cotangents.aux : Floats(n, 0.0f);
    for (size_t i = 0; in_softmax && i < n; ++i) total[i] = total[i] + sparse[i];
    const float dot = ExpectedRowSum(Times(p, total));
    for (size_t i = 0; i < n; ++i) dense[i] = p[i] * ((total[i] - dot) + zg);
    if (in_softmax) return dense;
  } else {
    if (has_aux) {
      Floats s, slope;
      for (const float x : logits) {
        s.push_back(ExpectedScore(options.kind, x));
        slope.push_back(ExpectedSlope(options.kind, x));
      }
      const float factor = ExpectedFactor(ExpectedRowSum(s), options.eps);
      const float dot = ExpectedRowSum(Times(Times(s, factor), cotangents.aux));
      for (size_t i = 0; i < n; ++i) dense[i] = (slope[i] * factor) * (cotangents.aux[i] - dot);
    }
    for (size_t i = 0; cotangents.has_z && i < n; ++i) dense[i] = dense[i] + p[i] * zg;
  }
  for (size_t i = 0; i < n; ++i) dense[i] = dense[i] + sparse[i];
  return dense;
}

// ---- The formulas in float64, for a given choice.

struct LossesInFloat64 {
  double aux, z;
};

// The losses of rows of logits, without their coefficients: sum_e f[e] * sum_t p[t, e], and the
// sum of the squares of logsumexp.
inline LossesInFloat64 RouteLossesInFloat64(const std::vector<std::vector<double>>& logits,
                                            const std::vector<double>& counts,
                                            const TopkRouterOptions& options) {
  LossesInFloat64 losses = {0.0, 0.0};
  TopkRouterOptions aux = options;
  aux.aux_scores = true;
  if (aux.kind == ScoreKind::kSoftmaxAfterTopk) aux.kind = ScoreKind::kSoftmax;
  for (const std::vector<double>& row : logits) {
    const std::vector<double> scores = ForwardInFloat64(row, {}, aux);
    for (size_t e = 0; e < row.size(); ++e) losses.aux += counts[e] * scores[e];
    const double max = *std::max_element(row.begin(), row.end());
    double sum = 0.0;
    for (const double x : row) sum += std::exp(x - max);
    const double lse = max + std::log(sum);
    losses.z += lse * lse;
  }
  return losses;
}

}  // namespace jax_moe_det::testing

#endif  // JAX_MOE_DET_TESTS_CPP_ROUTE_ORACLE_H_
