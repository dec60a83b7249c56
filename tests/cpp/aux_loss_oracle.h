// The oracle of the loss tests: the documented order of every sum, written the slow and obvious
// way, on one matrix of float32 scores. No code shared with ffi/.
#ifndef JAX_MOE_DET_TESTS_CPP_AUX_LOSS_ORACLE_H_
#define JAX_MOE_DET_TESTS_CPP_AUX_LOSS_ORACLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/cpp/float_format.h"

namespace jax_moe_det::testing {

struct Matrix {
  int64_t num_rows;
  int64_t num_columns;
  std::vector<float> values;  // row-major
};

// Bit equality, except that any NaN must be the canonical one.
inline bool SameBits(float got, float want) {
  if (std::isnan(want)) {
    const uint32_t canonical = 0x7fc00000u;
    return std::memcmp(&got, &canonical, sizeof(got)) == 0;
  }
  return std::memcmp(&got, &want, sizeof(got)) == 0;
}

// Second half added to the first until one value is left.
template <class Float>
Float FoldByHalves(std::vector<Float> values) {
  while (values.size() > 1) {
    const size_t half = values.size() / 2;
    std::vector<Float> sums(half);
    for (size_t i = 0; i < half; ++i) sums[i] = values[i] + values[i + half];
    values = sums;
  }
  return values[0];
}

// Neighbours added until one value is left.
template <class Float>
Float FoldByPairs(std::vector<Float> values) {
  while (values.size() > 1) {
    std::vector<Float> sums;
    for (size_t i = 0; i < values.size(); i += 2) sums.push_back(values[i] + values[i + 1]);
    values = sums;
  }
  return values[0];
}

inline int64_t ExpectedLanes(int64_t columns) {
  return columns > 128 ? 16 : columns > 32 ? 32 : columns > 16 ? 64 : 128;
}

// Sum of column e over the rows [begin, end), which are one slot. An empty mask means that all rows
// are valid; a masked or missing row adds +0 in its place.
inline float ExpectedColumnSum(const Matrix& scores, const std::vector<bool>& valid_mask, int64_t e,
                               int64_t lanes, int64_t begin, int64_t end) {
  std::vector<float> lane_sums;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    double lane_sum = 0.0;
    for (int64_t first = begin + lane; first < end; first += 4 * lanes) {
      float chunk = 0.0f;
      for (int64_t row = first; row < first + 4 * lanes; row += lanes) {
        const bool valid = row < end && (valid_mask.empty() || valid_mask[row]);
        chunk += valid ? scores.values[row * scores.num_columns + e] : 0.0f;
      }
      lane_sum += static_cast<double>(chunk);
    }
    lane_sums.push_back(static_cast<float>(lane_sum));
  }
  return FoldByHalves(lane_sums);
}

// Of one slot, from its column sums.
inline float ExpectedDot(const std::vector<float>& column_sums, const std::vector<double>& counts) {
  std::vector<double> dot(256, 0.0);
  for (size_t e = 0; e < column_sums.size(); ++e) {
    dot[e % 256] = std::fma(counts[e], static_cast<double>(column_sums[e]), dot[e % 256]);
  }
  return static_cast<float>(FoldByPairs(dot));
}

inline float ExpectedPartial(const Matrix& scores, const std::vector<bool>& valid_mask,
                             const std::vector<double>& counts, int64_t begin, int64_t end) {
  std::vector<float> sums;
  for (int64_t e = 0; e < scores.num_columns; ++e) {
    const int64_t lanes = ExpectedLanes(scores.num_columns);
    sums.push_back(ExpectedColumnSum(scores, valid_mask, e, lanes, begin, end));
  }
  return ExpectedDot(sums, counts);
}

// All 256 partials of the whole matrix.
inline std::vector<float> ExpectedPartials(const Matrix& scores,
                                           const std::vector<bool>& valid_mask,
                                           const std::vector<double>& counts) {
  const int64_t per_slot = (scores.num_rows + 255) / 256;
  std::vector<float> partials;
  for (int64_t slot = 0; slot < 256; ++slot) {
    const int64_t begin = std::min(slot * per_slot, scores.num_rows);
    const int64_t end = std::min(begin + per_slot, scores.num_rows);
    partials.push_back(ExpectedPartial(scores, valid_mask, counts, begin, end));
  }
  return partials;
}

inline double ExpectedScale(int64_t num_experts, int64_t topk, double coeff, double total) {
  const double numerator = static_cast<double>(num_experts) * coeff;
  double denominator = static_cast<double>(topk) * total;
  denominator = denominator * total;
  return numerator / denominator;
}

inline float ExpectedLoss(const std::vector<float>& partials, int64_t num_experts, int64_t topk,
                          double coeff, double total) {
  if (coeff == 0.0 || total == 0.0) return 0.0f;
  std::vector<double> sums(256, 0.0);
  for (size_t i = 0; i < partials.size(); ++i) sums[i] = static_cast<double>(partials[i]);
  return static_cast<float>(FoldByPairs(sums) * ExpectedScale(num_experts, topk, coeff, total));
}

// As a double: exact in every format.
inline double ExpectedGradient(int64_t num_experts, int64_t topk, double coeff, double total,
                               double count, float d_loss, const FloatFormat& format) {
  if (coeff == 0.0 || total == 0.0) return 0.0;
  double gradient = ExpectedScale(num_experts, topk, coeff, total) * count;
  gradient = gradient * static_cast<double>(d_loss);
  return Round(gradient, format);
}

}  // namespace jax_moe_det::testing

#endif  // JAX_MOE_DET_TESTS_CPP_AUX_LOSS_ORACLE_H_
