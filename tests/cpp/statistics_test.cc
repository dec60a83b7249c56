// The numerics of statistics/statistics.h against exact integers, an oracle of the documented
// order, hand cases and float64.
#include "statistics/statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "aux_loss/aux_loss.h"
#include "core/numerics.h"
#include "tests/cpp/aux_loss_oracle.h"

namespace jax_moe_det {
namespace {

using testing::FoldByHalves;
using testing::SameBits;
using Floats = std::vector<float>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

CountType TypeOf(int32_t) { return CountType::kInt32; }
CountType TypeOf(int64_t) { return CountType::kInt64; }
CountType TypeOf(float) { return CountType::kFloat32; }

// Results start as garbage.
struct Stats {
  Floats load;
  float max_violation = kNan, min_violation = kNan, entropy = kNan, effective = kNan;
  int32_t dead = -7;
};

template <class T>
Stats RunStats(const std::vector<T>& counts) {
  Stats out;
  out.load.assign(counts.size(), kNan);
  float summary[4] = {kNan, kNan, kNan, kNan};
  const RoutingStatsOp op = {{TypeOf(T{}), counts.data(), false},
                             1,
                             static_cast<int64_t>(counts.size()),
                             out.load.data(),
                             summary,
                             &out.dead};
  ComputeStats<T>(op, 0);
  out.max_violation = summary[0];
  out.min_violation = summary[1];
  out.entropy = summary[2];
  out.effective = summary[3];
  return out;
}

template <class T>
Floats RunUpdate(const Floats& bias, const std::vector<T>& counts, float rate) {
  Floats out(bias.size(), kNan);
  const ExpertBiasUpdate op = {bias.data(), false, {TypeOf(T{}), counts.data(), false}, &rate,
                               false,       1,     static_cast<int64_t>(bias.size()),   out.data()};
  ComputeUpdate<T>(op, 0);
  return out;
}

// ---- The oracle.

// A lane's experts ascend; lanes fold by halves.
double ExpectedLaneSum(const std::vector<double>& values) {
  std::vector<double> lanes(128, 0.0);
  for (size_t e = 0; e < values.size(); ++e) lanes[e % 128] += values[e];
  return FoldByHalves(lanes);
}

double ExpectedTotal(const std::vector<float>& counts) {
  return ExpectedLaneSum({counts.begin(), counts.end()});
}

template <class Int>
__int128 ExpectedTotal(const std::vector<Int>& counts) {
  __int128 total = 0;
  for (const Int count : counts) total += count;
  return total;
}

template <class T>
void CheckStats(const std::vector<T>& counts) {
  const auto total = ExpectedTotal(counts);
  using Sum = std::remove_const_t<decltype(total)>;
  const Sum n = static_cast<Sum>(counts.size());
  const double sum = static_cast<double>(total);
  const Stats got = RunStats(counts);
  std::vector<double> terms;
  for (size_t e = 0; e < counts.size(); ++e) {
    const double q = static_cast<double>(counts[e]) / sum;
    ASSERT_PRED2(SameBits, got.load[e], static_cast<float>(q)) << e << " of " << counts.size();
    terms.push_back(q == 0.0 ? 0.0 : -(q * Log(q)));
  }
  const Sum largest = *std::max_element(counts.begin(), counts.end());
  const Sum smallest = *std::min_element(counts.begin(), counts.end());
  const double above = static_cast<double>(largest * n - total);
  const double below = static_cast<double>(total - smallest * n);
  EXPECT_PRED2(SameBits, got.max_violation, static_cast<float>(above / sum));
  EXPECT_PRED2(SameBits, got.min_violation, static_cast<float>(below / sum));
  const double entropy = ExpectedLaneSum(terms);
  EXPECT_PRED2(SameBits, got.entropy, static_cast<float>(entropy));
  EXPECT_NEAR(got.effective, std::exp(entropy), 2e-7 * std::exp(entropy));
  EXPECT_EQ(got.dead, std::count(counts.begin(), counts.end(), T{0}));
}

// Sizes around the 128 lanes.
constexpr int kSizes[] = {1, 2, 3, 8, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000};

TEST(StatsTest, HaveTheBitsOfTheDocumentedOrder) {
  std::mt19937_64 random(1);
  for (const int n : kSizes) {
    for (const int64_t limit : {int64_t{3}, int64_t{100000}, int64_t{1} << 31}) {
      std::vector<int32_t> narrow;
      std::vector<int64_t> wide;
      Floats floats;
      for (int e = 0; e < n; ++e) {
        narrow.push_back(static_cast<int32_t>(random() % limit));
        wide.push_back(static_cast<int64_t>(random() % limit) * (kMaxInt64 / limit));
        floats.push_back(static_cast<float>(narrow[e]) * 0.1f);
      }
      narrow[n / 2] = 1;  // so that there is a token
      wide[n / 2] = 1;
      floats[n / 2] = 0.1f;
      CheckStats(narrow);
      CheckStats(wide);
      CheckStats(floats);
      if (HasFatalFailure()) return;
    }
  }
}

// A lane is summed before lanes are folded: in the order of the experts, 1 would be lost beside
// 2^60.
TEST(StatsTest, OrderOfFloatCounts) {
  Floats counts(256, 0.0f);
  counts[0] = 0x1p60f;
  counts[1] = 3.0f;
  counts[64] = 1.0f;
  counts[128] = -0x1p60f;  // in the lane of expert 0
  EXPECT_EQ(RunStats(counts).load[1], 0.75f);
}

TEST(StatsTest, HandCases) {
  const Stats even = RunStats<int32_t>({2, 2, 2, 2});
  EXPECT_EQ(even.load, Floats(4, 0.25f));
  EXPECT_PRED2(SameBits, even.max_violation, 0.0f);
  EXPECT_PRED2(SameBits, even.min_violation, 0.0f);
  EXPECT_EQ(even.entropy, static_cast<float>(std::log(4.0)));
  EXPECT_NEAR(even.effective, 4.0f, 1e-6);
  EXPECT_EQ(even.dead, 0);

  const Stats one = RunStats<int64_t>({0, 4, 0, 0});
  EXPECT_EQ(one.load, Floats({0.0f, 1.0f, 0.0f, 0.0f}));
  EXPECT_EQ(one.max_violation, 3.0f);
  EXPECT_EQ(one.min_violation, 1.0f);
  EXPECT_PRED2(SameBits, one.entropy, 0.0f);
  EXPECT_EQ(one.effective, 1.0f);
  EXPECT_EQ(one.dead, 3);

  const Stats uneven = RunStats<float>({1.0f, 3.0f});
  EXPECT_EQ(uneven.load, Floats({0.25f, 0.75f}));
  EXPECT_EQ(uneven.max_violation, 0.5f);
  EXPECT_EQ(uneven.min_violation, 0.5f);
  EXPECT_NEAR(uneven.entropy, 0.562335145, 1e-7);
  EXPECT_NEAR(uneven.effective, 1.754765350, 2e-7);
}

template <class T>
void CheckNoTokens() {
  for (const int n : kSizes) {
    const Stats none = RunStats(std::vector<T>(n, T{0}));
    for (const float load : none.load) EXPECT_PRED2(SameBits, load, 0.0f);
    for (const float value :
         {none.max_violation, none.min_violation, none.entropy, none.effective}) {
      EXPECT_PRED2(SameBits, value, 0.0f);
    }
    EXPECT_EQ(none.dead, n);
  }
}

TEST(StatsTest, NoTokens) {
  CheckNoTokens<int32_t>();
  CheckNoTokens<int64_t>();
  CheckNoTokens<float>();
}

// Sums above 64 bits, and differences that float64 would lose.
TEST(StatsTest, LargeCountsAreExact) {
  const Stats large = RunStats(std::vector<int64_t>(1000, kMaxInt64));
  EXPECT_EQ(large.load, Floats(1000, 0.001f));
  EXPECT_PRED2(SameBits, large.max_violation, 0.0f);
  EXPECT_PRED2(SameBits, large.min_violation, 0.0f);
  std::vector<int64_t> almost(4, int64_t{1} << 60);
  almost[2] += 1;
  const Stats off_by_one = RunStats(almost);
  EXPECT_EQ(off_by_one.max_violation, 3 * 0x1p-62f);
  EXPECT_EQ(off_by_one.min_violation, 0x1p-62f);
}

// Not counts, but an answer all the same.
TEST(StatsTest, NanAndInfinity) {
  for (const int at : {0, 1, 130, 199}) {
    Floats counts(200, 1.0f);
    counts[at] = kNan;
    const Stats nan = RunStats(counts);
    for (const float load : nan.load) EXPECT_PRED2(SameBits, load, kNan);
    for (const float value : {nan.max_violation, nan.min_violation, nan.entropy, nan.effective}) {
      EXPECT_PRED2(SameBits, value, kNan);
    }
    EXPECT_EQ(nan.dead, 0);
    counts[at] = kInfinity;
    const Stats infinite = RunStats(counts);
    EXPECT_PRED2(SameBits, infinite.load[at], kNan);
    EXPECT_PRED2(SameBits, infinite.load[at == 0 ? 1 : 0], 0.0f);
    EXPECT_PRED2(SameBits, infinite.max_violation, kNan);
    EXPECT_PRED2(SameBits, infinite.entropy, kNan);
  }
}

template <class T>
void CheckNegative() {
  const Stats got = RunStats<T>({-1, 3});
  EXPECT_EQ(got.load, Floats({-0.5f, 1.5f}));
  EXPECT_EQ(got.max_violation, 2.0f);
  EXPECT_EQ(got.min_violation, 2.0f);
  EXPECT_PRED2(SameBits, got.entropy, kNan);  // of no shares
  EXPECT_PRED2(SameBits, got.effective, kNan);
}

TEST(StatsTest, NegativeCounts) {
  CheckNegative<int32_t>();
  CheckNegative<int64_t>();
  CheckNegative<float>();
}

// ---- Its functions.

TEST(ToDoubleTest, Int128) {
  const auto exact = [](__int128 x) { return ToDouble(x); };
  EXPECT_EQ(exact(0), 0.0);
  EXPECT_EQ(exact(-1), -1.0);
  EXPECT_EQ(exact(-(__int128{1} << 53) + 1), -0x1p53 + 1);
  EXPECT_EQ(exact(-(__int128{1} << 64)), -0x1p64);
  EXPECT_EQ(exact((__int128{1} << 53) - 1), 0x1p53 - 1);
  EXPECT_EQ(exact((__int128{1} << 53) + 1), 0x1p53);  // to even
  EXPECT_EQ(exact(kMaxInt64), 0x1p63);
  EXPECT_EQ(exact(__int128{1} << 64), 0x1p64);
  EXPECT_EQ(exact((__int128{3} << 100)), 0x3p100);
}

TEST(LogTest, IsTheLogarithm) {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  const auto check = [](double x) {
    const double want = std::log(x);
    EXPECT_NEAR(Log(x), want, std::max(4e-16, 1e-15 * std::fabs(want))) << x;
  };
  for (int i = 0; i < 100000; ++i) {
    check(1.0 - unit(random));
    check(std::ldexp(1.0 + unit(random), -static_cast<int>(random() % 1020)));
    check(1.0 - unit(random) * 1e-6);
  }
  for (const double x : {0.75, std::nextafter(0.75, 0.0), std::nextafter(0.75, 1.0), 0.5, 0.375,
                         2.2250738585072014e-308, 1e300, 3.0, 1.5}) {
    check(x);
  }
  EXPECT_EQ(Log(1.0), 0.0);
}

TEST(EntropyTermTest, Edges) {
  EXPECT_EQ(EntropyTerm(0.0), 0.0);
  EXPECT_EQ(EntropyTerm(-0.0), 0.0);
  EXPECT_EQ(EntropyTerm(1.0), 0.0);
  EXPECT_EQ(EntropyTerm(0.5), 0.5 * 0x1.62e42fefa39efp-1);
  EXPECT_EQ(EntropyTerm(0x1p-1050), 0.0);
  EXPECT_GT(EntropyTerm(0x1p-1022), 0.0);
  for (const double x : {-0x1p-1074, -1.0, double{kNan}, double{kInfinity}, -double{kInfinity}}) {
    EXPECT_TRUE(std::isnan(EntropyTerm(x))) << x;
  }
}

TEST(EffectiveExpertsTest, IsTheExponential) {
  EXPECT_EQ(EffectiveExperts(0.0), 1.0f);
  EXPECT_PRED2(SameBits, EffectiveExperts(kNan), kNan);
  // The part below float32 counts: exp(9) has a slope of 8103.
  for (double entropy = 0.0; entropy < 9.1; entropy += 0.00123) {
    EXPECT_NEAR(EffectiveExperts(entropy), std::exp(entropy), 1.4e-7 * std::exp(entropy));
  }
}

// ---- The bias update.

TEST(UpdateTest, RaisesBelowTheMeanAndLowersAbove) {
  const Floats bias = {0.5f, -0.0f, 1.0f, -2.0f};
  EXPECT_EQ(RunUpdate<int32_t>(bias, {1, 2, 3, 2}, 0.25f), Floats({0.75f, -0.0f, 0.75f, -2.0f}));
  EXPECT_EQ(RunUpdate<int64_t>(bias, {1, 2, 3, 2}, 0.25f), Floats({0.75f, -0.0f, 0.75f, -2.0f}));
  EXPECT_EQ(RunUpdate<float>(bias, {1, 2, 3, 2}, 0.25f), Floats({0.75f, -0.0f, 0.75f, -2.0f}));
  EXPECT_EQ(RunUpdate<int32_t>(bias, {1, 2, 3, 2}, -0.25f), Floats({0.25f, -0.0f, 1.25f, -2.0f}));
  // No tokens: nobody is below the mean.
  EXPECT_EQ(RunUpdate<int32_t>(bias, {0, 0, 0, 0}, 0.25f), bias);
}

TEST(UpdateTest, SignZeroKeepsTheBits) {
  const float bits[] = {-0.0f, BitCast<float>(0xffc12345u), kInfinity, 0x1p-149f};
  for (const float bias : bits) {
    for (const float rate : {0.25f, kNan, kInfinity, 0.0f}) {
      const float got = RunUpdate<int64_t>({bias, bias}, {5, 5}, rate)[0];
      EXPECT_EQ(BitCast<uint32_t>(got), BitCast<uint32_t>(bias));
    }
  }
}

// Of the sign: one float32 addition; a computed NaN is canonical.
TEST(UpdateTest, OneRoundedAddition) {
  const auto raised = [](float bias, float rate) {
    return RunUpdate<int32_t>({bias, 0.0f}, {0, 1}, rate)[0];
  };
  EXPECT_EQ(raised(0x1p24f, 1.0f), 0x1p24f);
  EXPECT_EQ(raised(0.1f, 0.2f), 0.1f + 0.2f);
  EXPECT_EQ(raised(-0x1p-149f, 0x1p-148f), 0x1p-149f);
  EXPECT_PRED2(SameBits, raised(-0.25f, 0.25f), 0.0f);
  EXPECT_PRED2(SameBits, raised(BitCast<float>(0xffc12345u), 1.0f), kNan);
  EXPECT_PRED2(SameBits, raised(kInfinity, -kInfinity), kNan);
}

// A difference of one in counts that float64 cannot tell apart.
TEST(UpdateTest, SignsOfIntegersAreExact) {
  std::vector<int64_t> counts(1000, kMaxInt64 - 1);
  counts[500] += 1;
  const Floats got = RunUpdate(Floats(1000, 0.0f), counts, 1.0f);
  for (int e = 0; e < 1000; ++e) EXPECT_EQ(got[e], e == 500 ? -1.0f : 1.0f) << e;
  const std::vector<int32_t> large(8192, std::numeric_limits<int32_t>::max());
  EXPECT_EQ(RunUpdate(Floats(8192, 3.0f), large, 1.0f), Floats(8192, 3.0f));
}

TEST(UpdateTest, NanCounts) {
  const Floats got = RunUpdate<float>({1.0f, 2.0f}, {kNan, 1.0f}, 0.5f);
  EXPECT_PRED2(SameBits, got[0], kNan);
  EXPECT_PRED2(SameBits, got[1], kNan);  // nor is there a mean
}

}  // namespace
}  // namespace jax_moe_det
