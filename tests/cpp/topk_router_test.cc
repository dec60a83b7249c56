// The numerics of topk_router/topk_router.h against an oracle of the documented orders, bit for
// bit, against hand cases, and against float64.
#include "topk_router/topk_router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/numerics.h"
#include "core/selection_key.h"
#include "tests/cpp/aux_loss_oracle.h"
#include "tests/cpp/router_rows.h"
#include "tests/cpp/topk_router_oracle.h"

namespace jax_moe_det {
namespace {

using internal::TopkRouterScratch;
using testing::DecodeLogit;
using testing::Floats;
using testing::IsRounded;
using testing::kInfinity;
using testing::kKinds;
using testing::kLargest;
using testing::kNan;
using testing::kSubnormal;
using testing::kValues;
using testing::Options;
using testing::RandomValues;
using testing::Row;
using testing::SameBits;
using testing::Values;

std::string Describe(int n, const TopkRouterOptions& o) {
  return std::to_string(n) + " experts, topk " + std::to_string(o.topk) + ", kind " +
         std::to_string(static_cast<int>(o.kind)) + ", aux " + std::to_string(o.aux_scores) +
         ", bitmap " + std::to_string(o.bitmap) + ", groups " + std::to_string(o.group_topk) + "/" +
         std::to_string(o.num_groups) + " of " + std::to_string(o.group_values) +
         " values, scale " + std::to_string(o.scaling_factor);
}

// Garbage at first, then what other rows left: neither may reach a row.
TopkRouterScratch* Scratch() {
  static const auto scratch = [] {
    auto garbage = std::make_unique<TopkRouterScratch>();
    std::memset(static_cast<void*>(garbage.get()), 0xa5, sizeof(TopkRouterScratch));
    return garbage;
  }();
  return scratch.get();
}

// Results in memory of exactly their size, garbage before.
template <class Out>
struct Forward {
  std::vector<Out> out;
  std::vector<uint8_t> map;
};

template <class Out, class Logit>
Forward<Out> RunForward(const std::vector<Logit>& logits, const Floats& bias, bool valid,
                        const TopkRouterOptions& options) {
  const int n = static_cast<int>(logits.size());
  Forward<Out> result = {std::vector<Out>(n),
                         std::vector<uint8_t>(MapBytes(n, options.bitmap), 0xa5)};
  std::memset(static_cast<void*>(result.out.data()), 0xa5, n * sizeof(Out));
  TopkRouterFwdRow(logits.data(), bias.empty() ? nullptr : bias.data(), valid, n, options,
                   Scratch(), result.out.data(), result.map.data());
  return result;
}

// `map` empty: aux scores.
template <class DOut, class Logit>
std::vector<Logit> RunBackward(const std::vector<Logit>& logits, const std::vector<DOut>& d_out,
                               const std::vector<uint8_t>& map, bool valid,
                               const TopkRouterOptions& options) {
  std::vector<Logit> d_logits(logits.size());
  std::memset(static_cast<void*>(d_logits.data()), 0xa5, d_logits.size() * sizeof(Logit));
  TopkRouterBwdRow(logits.data(), static_cast<const void*>(d_out.data()),
                   map.empty() ? nullptr : map.data(), valid, static_cast<int>(logits.size()),
                   options, Scratch(), d_logits.data());
  return d_logits;
}

// The map's bytes, by their definition.
std::vector<uint8_t> ExpectedMap(int n, const std::vector<int>& chosen, bool bitmap) {
  std::vector<uint8_t> map(bitmap ? (n + 7) / 8 : n, 0);
  for (const int e : chosen) {
    if (bitmap) {
      map[e / 8] += static_cast<uint8_t>(1 << (e % 8));
    } else {
      map[e] += 1;
    }
  }
  return map;
}

// ---- Sums.

// Sizes around every change: vectors of 16, lists of 64, lanes of 128, powers of two.
constexpr int kSizes[] = {1,   2,   3,   4,   5,   7,   8,   9,   15,  16,  17,   31,
                          32,  33,  60,  63,  64,  65,  100, 127, 128, 129, 130,  160,
                          191, 255, 256, 257, 383, 384, 385, 512, 513, 640, 1000, kMaxExperts};

// Values whose sum is nearly nothing but rounding errors, so that any other order shows.
Floats Cancelling(int n, std::mt19937& random) {
  Floats values(n);
  std::uniform_real_distribution<float> unit(0.5f, 1.0f);
  for (int i = 0; i + 1 < n; i += 2) {
    values[i] = std::ldexp(unit(random), static_cast<int>(random() % 24));
    values[i + 1] = -values[i];
  }
  std::shuffle(values.begin(), values.end(), random);
  return values;
}

std::vector<Floats> SumInputs(int n, std::mt19937& random) {
  std::vector<Floats> inputs = {Cancelling(n, random), Floats(n, -0.0f), Floats(n, kLargest)};
  for (const Values values : kValues) inputs.push_back(RandomValues(values, n, random));
  return inputs;
}

TEST(SumTest, RowSumHasTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(1);
  for (const int n : kSizes) {
    for (const Floats& values : SumInputs(n, random)) {
      EXPECT_PRED2(SameBits, CanonicalNan(internal::RowSum(values.data(), n)),
                   testing::ExpectedRowSum(values))
          << n;
    }
  }
}

// With garbage in the room for a power of two of them.
float ListSum(Floats values) {
  const int n = static_cast<int>(values.size());
  values.resize(internal::NextPowerOfTwo(n), kNan);
  return CanonicalNan(internal::ListSum(values.data(), n));
}

TEST(SumTest, ListSumHasTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(2);
  for (const int n : kSizes) {
    for (const Floats& values : SumInputs(n, random)) {
      EXPECT_PRED2(SameBits, ListSum(values), testing::ExpectedListSum(values)) << n;
    }
  }
}

TEST(SumTest, OrdersShow) {
  const Floats values = {0x1p24f, 1.0f, 1.0f, -0x1p24f};
  EXPECT_EQ(internal::RowSum(values.data(), 4), 1.0f);  // (2^24 + 1) + (1 - 2^24)
  EXPECT_EQ(ListSum(values), 1.0f);
  Floats row(256, 0.0f);
  row[0] = 0x1p24f;
  row[1] = 1.0f;        // the neighbouring lane: lost beside 2^24
  row[128] = -0x1p24f;  // the same lane
  EXPECT_EQ(internal::RowSum(row.data(), 256), 1.0f);
}

TEST(SumTest, SumsOfMinusZero) {
  // Lanes start from +0; a list of one is its value.
  const Floats minus_zero = {-0.0f, -0.0f};
  EXPECT_PRED2(SameBits, internal::RowSum(minus_zero.data(), 1), 0.0f);
  EXPECT_PRED2(SameBits, ListSum({-0.0f}), -0.0f);
  EXPECT_PRED2(SameBits, ListSum({-0.0f, -0.0f}), -0.0f);
  EXPECT_PRED2(SameBits, ListSum({-0.0f, -0.0f, -0.0f}), 0.0f);
}

TEST(RowMaxTest, IsTheLargestOrNan) {
  std::mt19937 random(3);
  for (const int n : kSizes) {
    for (const Values values : kValues) {
      const Floats row = RandomValues(values, n, random);
      const float want = testing::ExpectedMax(row);
      const float got = internal::RowMax(row.data(), n);
      EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << n << ": " << got;
    }
    for (int place = 0; place < n; place += 1 + n / 40) {  // NaN and maximum anywhere
      Floats row(n, -3.0f);
      row[place] = 2.0f;
      EXPECT_EQ(internal::RowMax(row.data(), n), 2.0f);
      row[place] = kNan;
      EXPECT_TRUE(std::isnan(internal::RowMax(row.data(), n)));
      row[n - 1 - place] = kInfinity;
      EXPECT_EQ(std::isnan(internal::RowMax(row.data(), n)), n - 1 - place != place);
    }
  }
}

TEST(RowSoftmaxTest, HasTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(4);
  for (const int n : kSizes) {
    for (const Values values : kValues) {
      const Floats row = RandomValues(values, n, random);
      Floats got(n);
      internal::RowSoftmax(row.data(), n, got.data());
      const Floats e = testing::ExpectedExp(row);
      const Floats want = testing::Times(e, 1.0f / testing::ExpectedRowSum(e));
      for (int i = 0; i < n; ++i) ASSERT_PRED2(SameBits, got[i], want[i]) << n << " at " << i;
    }
  }
}

// ---- Selection.

std::vector<int> Select(const std::vector<uint32_t>& keys, int k) {
  std::vector<uint64_t> ranked(keys.size());
  std::vector<int32_t> chosen(k);
  internal::SelectTopk(keys.data(), static_cast<int>(keys.size()), k, ranked.data(), chosen.data());
  return {chosen.begin(), chosen.end()};
}

std::vector<uint32_t> Keys(const Floats& values) {
  std::vector<uint32_t> keys;
  for (const float value : values) keys.push_back(SelectionKey(value));
  return keys;
}

std::vector<int> TopkSizes(int n) {
  std::vector<int> sizes;
  for (const int k : {1, 2, 3, 8, 15, 16, 17, 63, 64, 65, 66, 128, n - 1, n}) {
    if (k >= 1 && k <= n) sizes.push_back(k);
  }
  return sizes;
}

TEST(SelectTopkTest, IsTheHeadOfAStableSort) {
  std::mt19937 random(5);
  for (const int n : kSizes) {
    std::vector<Floats> inputs;
    for (const Values values : kValues) inputs.push_back(RandomValues(values, n, random));
    inputs.push_back(RandomValues(Values::kRandom, n, random));
    std::sort(inputs.back().begin(), inputs.back().end());  // each one enters the list
    inputs.push_back(inputs.back());
    std::reverse(inputs.back().begin(), inputs.back().end());  // none does, after the first k
    for (const Floats& values : inputs) {
      const std::vector<int> order =
          testing::ExpectedHighest(values, std::vector<bool>(n, true), n);
      for (const int k : TopkSizes(n)) {
        ASSERT_EQ(Select(Keys(values), k), std::vector<int>(order.begin(), order.begin() + k))
            << k << " of " << n;
      }
    }
  }
}

TEST(SelectTopkTest, ExcludedKeysComeLastByIndex) {
  std::mt19937 random(6);
  for (const int n : {4, 16, 17, 64, 65, 130, 300}) {
    const Floats values = RandomValues(Values::kSpecial, n, random);
    std::vector<uint32_t> keys = Keys(values);
    std::vector<bool> allowed(n, true);
    for (int e = 0; e < n; ++e) {
      allowed[e] = random() % 2 == 0;
      if (!allowed[e]) keys[e] = kExcludedKey;
    }
    for (const int k : TopkSizes(n)) {
      ASSERT_EQ(Select(keys, k), testing::ExpectedHighest(values, allowed, k)) << k << " of " << n;
    }
  }
}

TEST(SelectTopkTest, TiesBetweenRunsGoToTheLowerIndex) {
  // Equal highest values on both sides of a run's end, and a better one late.
  std::vector<float> values(40, 0.0f);
  values[15] = values[16] = values[31] = values[32] = 1.0f;
  values[39] = 2.0f;
  EXPECT_EQ(Select(Keys(values), 1), std::vector<int>({39}));
  EXPECT_EQ(Select(Keys(values), 3), std::vector<int>({39, 15, 16}));
  EXPECT_EQ(Select(Keys(values), 7), std::vector<int>({39, 15, 16, 31, 32, 0, 1}));
}

TEST(KeepGroupsTest, ExcludesTheExpertsOfTheLosingGroups) {
  std::mt19937 random(7);
  for (const int n : {2, 4, 12, 64, 96, 128, 160, 256, 260, 1024, kMaxExperts}) {
    for (const int groups : {2, 3, 4, 8, 13, 64, 65, 128, 256, n}) {
      if (groups < 2 || n % groups != 0) continue;
      const int size = n / groups;
      for (const Values values : kValues) {
        const Floats row = RandomValues(values, n, random);
        for (int repeat = 0; repeat < 4; ++repeat) {
          TopkRouterOptions options = Options(ScoreKind::kSigmoid, 1);
          options.num_groups = groups;
          options.group_topk = repeat == 0 ? 1 : 1 + random() % groups;
          options.group_values = repeat == 0 ? size : 1 + random() % std::min(size, 70);
          TopkRouterScratch* scratch = Scratch();
          const std::vector<uint32_t> keys = Keys(row);
          std::copy(keys.begin(), keys.end(), scratch->key);
          internal::KeepGroups(options, n, scratch);
          const std::vector<bool> allowed = testing::ExpectedAllowed(row, options);
          for (int e = 0; e < n; ++e) {
            ASSERT_EQ(scratch->key[e], allowed[e] ? keys[e] : kExcludedKey)
                << Describe(n, options) << " at " << e;
          }
        }
      }
    }
  }
}

// ---- Whole rows, over all types.

template <class T>
class RowTest : public ::testing::Test {};

using Logits = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(RowTest, Logits);

template <class Out, class Logit>
void CheckForward(const Row<Logit>& row, const Floats& bias, bool valid,
                  const TopkRouterOptions& options, const testing::ExpectedRow& want) {
  const int n = static_cast<int>(row.floats.size());
  const Forward<Out> got = RunForward<Out>(row.storage, bias, valid, options);
  ASSERT_EQ(got.map, ExpectedMap(n, want.chosen, options.bitmap)) << Describe(n, options);
  for (int e = 0; e < n; ++e) {
    ASSERT_TRUE(IsRounded(got.out[e], want.out[e]))
        << Describe(n, options) << ": " << DecodeLogit(got.out[e]) << " at " << e << ", wanted "
        << want.out[e];
  }
}

template <class DOut, class Logit>
void CheckBackward(const Row<Logit>& row, const Row<DOut>& d_out, const std::vector<uint8_t>& map,
                   bool valid, const TopkRouterOptions& options, const Floats& want) {
  const int n = static_cast<int>(row.floats.size());
  const std::vector<Logit> got = RunBackward<DOut>(row.storage, d_out.storage, map, valid, options);
  for (int e = 0; e < n; ++e) {
    ASSERT_TRUE(IsRounded(got[e], want[e]))
        << Describe(n, options) << ": d_logits " << DecodeLogit(got[e]) << " at " << e
        << ", wanted " << want[e];
  }
}

// Forward and backward of one row.
template <class Logit>
void CheckRow(Values values, int n, const TopkRouterOptions& options, bool with_bias, bool valid,
              std::mt19937& random) {
  const Row<Logit> row(RandomValues(values, n, random));
  Floats bias;
  if (with_bias) bias = RandomValues(random() % 4 == 0 ? values : Values::kRandom, n, random);
  const testing::ExpectedRow want = testing::ExpectedForward(row.floats, bias, valid, options);
  const Floats cotangent =
      RandomValues(random() % 4 == 0 ? Values::kSpecial : Values::kRandom, n, random);
  std::vector<int> ascending = want.chosen;
  std::sort(ascending.begin(), ascending.end());
  if (options.aux_scores) {
    CheckForward<float>(row, bias, valid, options, want);
    const Row<float> d_out(cotangent);
    CheckBackward(
        row, d_out, {}, valid, options,
        valid ? testing::ExpectedBackward(row.floats, d_out.floats, {}, options) : Floats(n, 0.0f));
  } else {
    CheckForward<Logit>(row, bias, valid, options, want);
    const Row<Logit> d_out(cotangent);
    CheckBackward(row, d_out, ExpectedMap(n, want.chosen, options.bitmap), true, options,
                  valid ? testing::ExpectedBackward(row.floats, d_out.floats, ascending, options)
                        : Floats(n, 0.0f));
  }
}

TYPED_TEST(RowTest, HasTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(8);
  constexpr float kScales[] = {1.0f, 2.5f, -0.7f, 0.0f, 1e30f};
  constexpr float kEps[] = {1e-20f, 0.0f, kSubnormal, 1e-3f};
  for (const int n : kSizes) {
    for (const int topk : TopkSizes(n)) {
      for (const ScoreKind kind : kKinds) {
        for (const Values values : kValues) {
          if (random() % n > 200) continue;  // some of the larger ones
          TopkRouterOptions options = Options(kind, topk, kScales[random() % std::size(kScales)],
                                              kEps[random() % std::size(kEps)]);
          options.bitmap = random() % 2 == 0;
          CheckRow<TypeParam>(values, n, options, random() % 2 == 0, random() % 8 != 0, random);
          if (this->HasFatalFailure()) return;
          if (kind == ScoreKind::kSoftmaxAfterTopk) continue;
          options.aux_scores = true;
          CheckRow<TypeParam>(values, n, options, false, random() % 8 != 0, random);
          if (this->HasFatalFailure()) return;
        }
      }
    }
  }
}

TYPED_TEST(RowTest, HasTheBitsOfTheDocumentedOrderWithGroups) {
  std::mt19937 random(9);
  for (const int n : {4, 60, 64, 128, 130, 256, 512}) {
    for (const int groups : {2, 4, 5, 8, 16, 64}) {
      if (n % groups != 0) continue;
      const int size = n / groups;
      for (const ScoreKind kind : kKinds) {
        for (const Values values : kValues) {
          for (int repeat = 0; repeat < 4; ++repeat) {
            TopkRouterOptions options = Options(kind, 1 + random() % std::min(n, 80), 2.5f);
            options.bitmap = random() % 2 == 0;
            options.num_groups = groups;
            const int fewest = (options.topk + size - 1) / size;
            options.group_topk = fewest + random() % (groups - fewest + 1);
            options.group_values = repeat == 0 ? 1 : 1 + random() % size;
            CheckRow<TypeParam>(values, n, options, random() % 2 == 0, random() % 8 != 0, random);
            if (this->HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// ---- The map of the gradient.

TYPED_TEST(RowTest, GradientTakesTheMapAsItIs) {
  std::mt19937 random(10);
  for (const int n : {5, 16, 70, 130, 300}) {
    for (const ScoreKind kind : kKinds) {
      for (const bool bitmap : {false, true}) {
        for (const int chosen_experts : {0, 1, 3, 5}) {  // fewer and more than topk
          TopkRouterOptions options = Options(kind, 3, 2.5f);
          options.bitmap = bitmap;
          const Row<TypeParam> row(RandomValues(Values::kRandom, n, random));
          const Row<TypeParam> d_out(RandomValues(Values::kRandom, n, random));
          std::vector<int> order(n);
          std::iota(order.begin(), order.end(), 0);
          std::shuffle(order.begin(), order.end(), random);
          order.resize(chosen_experts);
          const std::vector<uint8_t> map = ExpectedMap(n, order, bitmap);
          std::sort(order.begin(), order.end());
          order.resize(std::min(chosen_experts, options.topk));  // the first ones count
          CheckBackward(row, d_out, map, true, options,
                        order.empty()
                            ? Floats(n, 0.0f)
                            : testing::ExpectedBackward(row.floats, d_out.floats, order, options));
          if (this->HasFatalFailure()) return;
        }
      }
    }
  }
}

// Nor their logits, for the kinds whose weights are of the chosen experts alone.
TYPED_TEST(RowTest, GradientReadsNothingOfUnchosenExperts) {
  std::mt19937 random(11);
  for (const int n : {8, 64, 130}) {
    for (const int topk : {1, 2, 5}) {
      for (const ScoreKind kind : kKinds) {
        const TopkRouterOptions options = Options(kind, topk, 2.5f);
        const Row<TypeParam> row(RandomValues(Values::kRandom, n, random));
        const Floats cotangent = RandomValues(Values::kRandom, n, random);
        const testing::ExpectedRow forward =
            testing::ExpectedForward(row.floats, {}, true, options);
        const std::vector<uint8_t> map = ExpectedMap(n, forward.chosen, false);
        Floats poisoned_logits = row.floats, poisoned_cotangent = cotangent;
        for (int e = 0; e < n; ++e) {
          if (map[e] != 0) continue;
          poisoned_cotangent[e] = e % 2 == 0 ? kNan : kInfinity;
          if (kind != ScoreKind::kSoftmax) poisoned_logits[e] = e % 2 == 0 ? kNan : -kInfinity;
        }
        const auto want =
            RunBackward(row.storage, Row<TypeParam>(cotangent).storage, map, true, options);
        const auto got =
            RunBackward(Row<TypeParam>(poisoned_logits).storage,
                        Row<TypeParam>(poisoned_cotangent).storage, map, true, options);
        EXPECT_EQ(std::memcmp(got.data(), want.data(), n * sizeof(TypeParam)), 0)
            << Describe(n, options);
      }
    }
  }
}

TYPED_TEST(RowTest, MaskedRowIsZeroWhateverItHolds) {
  for (const ScoreKind kind : kKinds) {
    for (const bool aux : {false, true}) {
      if (aux && kind == ScoreKind::kSoftmaxAfterTopk) continue;
      for (const float poison : {kNan, kInfinity, -kInfinity}) {
        TopkRouterOptions options = Options(kind, 3);
        options.aux_scores = aux;
        const Row<TypeParam> row(Floats(20, poison));
        const testing::ExpectedRow nothing = {Floats(20, 0.0f), {}};
        if (aux) {
          CheckForward<float>(row, {}, false, options, nothing);
          CheckBackward(row, Row<float>(Floats(20, poison)), {}, false, options, nothing.out);
        } else {
          CheckForward<TypeParam>(row, {}, false, options, nothing);
          CheckBackward(row, row, ExpectedMap(20, {}, false), true, options, nothing.out);
        }
      }
    }
  }
}

// ---- NaN.

// A NaN among the weights makes all k NaN; the gradient is NaN at the chosen experts, at every one
// for softmax before top-k, and +0 elsewhere.
TYPED_TEST(RowTest, NanOfAChosenExpertIsEverywhereInItsRow) {
  for (const ScoreKind kind : kKinds) {
    for (const int topk : {1, 2, 4}) {
      const TopkRouterOptions options = Options(kind, topk);
      const Row<TypeParam> row({1.0f, kNan, 3.0f, 2.0f, -5.0f, 0.5f});
      const Row<TypeParam> ones(Floats(6, 1.0f));
      const auto forward = RunForward<TypeParam>(row.storage, {}, true, options);
      const auto gradient = RunBackward(row.storage, ones.storage, forward.map, true, options);
      int chosen = 0;
      for (int e = 0; e < 6; ++e) {
        chosen += forward.map[e];
        EXPECT_TRUE(IsRounded(forward.out[e], forward.map[e] != 0 ? kNan : 0.0f))
            << Describe(6, options) << " at " << e;
        const bool nan = forward.map[e] != 0 || kind == ScoreKind::kSoftmax;
        EXPECT_TRUE(IsRounded(gradient[e], nan ? kNan : 0.0f))
            << Describe(6, options) << " gradient at " << e;
      }
      EXPECT_EQ(chosen, topk);
      // NaN ranks first; among the NaN of a whole softmax, the lower index does.
      EXPECT_EQ(forward.map[1], kind != ScoreKind::kSoftmax || topk > 1);
    }
  }
}

// A group with a NaN has the score NaN, which ranks first; of two such groups the lower one.
TYPED_TEST(RowTest, GroupsOfNan) {
  TopkRouterOptions options = Options(ScoreKind::kSigmoid, 1);
  options.num_groups = 3;
  options.group_topk = 1;
  options.group_values = 2;
  const Row<TypeParam> row({9.0f, 8.0f, 1.0f, kNan, kNan, 2.0f});
  const auto forward = RunForward<TypeParam>(row.storage, {}, true, options);
  EXPECT_EQ(forward.map, std::vector<uint8_t>({0, 0, 0, 1, 0, 0}));
  for (int e = 0; e < 6; ++e) EXPECT_TRUE(IsRounded(forward.out[e], e == 3 ? kNan : 0.0f)) << e;
}

TYPED_TEST(RowTest, NanCotangentOfAChosenExpert) {
  const Row<TypeParam> row({0.0f, 1.0f, 0.5f, 2.0f});
  const Row<TypeParam> d_out({1.0f, kNan, 1.0f, 1.0f});
  for (const ScoreKind kind : kKinds) {
    const TopkRouterOptions options = Options(kind, 2);
    const auto forward = RunForward<TypeParam>(row.storage, {}, true, options);
    ASSERT_EQ(forward.map, std::vector<uint8_t>({0, 1, 0, 1}));
    const auto gradient = RunBackward(row.storage, d_out.storage, forward.map, true, options);
    for (int e = 0; e < 4; ++e) {
      const bool nan = forward.map[e] != 0 || kind == ScoreKind::kSoftmax;
      EXPECT_TRUE(IsRounded(gradient[e], nan ? kNan : 0.0f)) << Describe(4, options) << " at " << e;
    }
  }
}

// The score enters every sum, so every aux score is NaN, and the map is that of equal scores.
TEST(NanTest, AuxScores) {
  for (const ScoreKind kind :
       {ScoreKind::kSoftmax, ScoreKind::kSigmoid, ScoreKind::kSqrtSoftplus}) {
    TopkRouterOptions options = Options(kind, 2);
    options.aux_scores = true;
    const Floats row = {1.0f, 2.0f, kNan, 3.0f};
    const Forward<float> forward = RunForward<float>(row, {}, true, options);
    EXPECT_EQ(forward.map, std::vector<uint8_t>({1, 1, 0, 0}));
    for (const float score : forward.out) EXPECT_PRED2(SameBits, score, kNan);
    for (const float x : RunBackward(row, Floats(4, 1.0f), {}, true, options)) {
      EXPECT_PRED2(SameBits, x, kNan);
    }
  }
}

// ---- 1 / (sum + eps).

TEST(NormalizingFactorTest, Edges) {
  EXPECT_EQ(NormalizingFactor(4.0f, 0.0f), 0.25f);
  EXPECT_EQ(NormalizingFactor(1.0f, 1.0f), 0.5f);
  EXPECT_EQ(NormalizingFactor(1.0f, 1e-20f), 1.0f);
  // Nothing to divide by: infinity, so that 0 times it is NaN.
  EXPECT_EQ(NormalizingFactor(0.0f, 0.0f), kInfinity);
  // Smaller than 1 / the largest: cut, so that 0 times it is 0.
  EXPECT_EQ(NormalizingFactor(0.0f, kSubnormal), kLargest);
  EXPECT_EQ(NormalizingFactor(kSubnormal, 0.0f), kLargest);
  EXPECT_EQ(NormalizingFactor(0.0f, 0x1p-128f), kLargest);
  // 2^128 is above the largest, 1 / (2^-128 + 2^-149) is below and comes out exactly rounded.
  EXPECT_EQ(NormalizingFactor(0x1p-128f, 0x1p-149f), 1.0f / (0x1p-128f + 0x1p-149f));
  EXPECT_EQ(NormalizingFactor(0.0f, 0x1p-127f), 0x1p127f);
  EXPECT_EQ(NormalizingFactor(0.0f, 1e-20f), 1.0f / 1e-20f);
  EXPECT_EQ(NormalizingFactor(0.0f, kLargest), 1.0f / kLargest);  // subnormal
  EXPECT_GT(NormalizingFactor(0.0f, kLargest), 0.0f);
  EXPECT_EQ(NormalizingFactor(kInfinity, 1e-20f), 0.0f);
  EXPECT_EQ(NormalizingFactor(kLargest, kLargest), 0.0f);  // the sum overflows
  EXPECT_TRUE(std::isnan(NormalizingFactor(kNan, 1e-20f)));
  for (float sum = kSubnormal; sum < 1.0f; sum *= 1.7f) {
    EXPECT_PRED2(SameBits, NormalizingFactor(sum, 0.0f), testing::ExpectedFactor(sum, 0.0f));
    EXPECT_PRED2(SameBits, 0.0f * NormalizingFactor(sum, kSubnormal), 0.0f);
  }
}

// Scores that all underflowed: weights and gradient are 0 for every eps but 0.
TEST(NormalizingFactorTest, UnderflownScoresHaveWeightZero) {
  const Floats row(8, -1000.0f);
  for (const ScoreKind kind : {ScoreKind::kSigmoid, ScoreKind::kSqrtSoftplus}) {
    for (const float eps : {kSubnormal, 0x1p-140f, 1e-38f, 1e-20f, 1.0f, kLargest}) {
      for (const bool aux : {false, true}) {
        TopkRouterOptions options = Options(kind, 3, 2.5f, eps);
        options.aux_scores = aux;
        const Forward<float> forward = RunForward<float>(row, {}, true, options);
        EXPECT_EQ(forward.map, std::vector<uint8_t>({1, 1, 1, 0, 0, 0, 0, 0}));
        EXPECT_EQ(forward.out, Floats(8, 0.0f)) << eps;
        const Floats gradient = RunBackward(
            row, Floats(8, 3.0f), aux ? std::vector<uint8_t>() : forward.map, true, options);
        EXPECT_EQ(gradient, Floats(8, 0.0f)) << eps;
      }
    }
    const Forward<float> forward = RunForward<float>(row, {}, true, Options(kind, 3, 1.0f, 0.0f));
    EXPECT_TRUE(std::isnan(forward.out[0]) && std::isnan(forward.out[2]));  // 0 / 0
    EXPECT_EQ(forward.out[3], 0.0f);
    const Forward<float> one = RunForward<float>(row, {}, true, Options(kind, 1, 1.0f, 0.0f));
    EXPECT_EQ(one.out, Floats(8, 0.0f));  // not normalized
  }
}

// ---- Hand cases.

// Weights within a few roundings of what float64 gives.
void ExpectNear(const Floats& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t e = 0; e < got.size(); ++e) {
    EXPECT_NEAR(got[e], want[e], 1e-6 * std::max(1.0, std::fabs(want[e]))) << e;
  }
}

const Floats& L4() {
  static const Floats row = {0.3f, -0.2f, 1.1f, 0.9f};
  return row;
}

TEST(HandTest, WeightsOfEveryKind) {
  const auto weights = [](ScoreKind kind, float scale) {
    const Forward<float> forward = RunForward<float>(L4(), {}, true, Options(kind, 2, scale));
    EXPECT_EQ(forward.map, std::vector<uint8_t>({0, 0, 1, 1}));
    return forward.out;
  };
  ExpectNear(weights(ScoreKind::kSoftmaxAfterTopk, 1.0f), {0, 0, .549833997, .450166003});
  ExpectNear(weights(ScoreKind::kSoftmax, 1.0f), {0, 0, .393609124, .322259895});
  ExpectNear(weights(ScoreKind::kSigmoid, 2.5f), {0, 0, 1.283628477, 1.216371523});
  ExpectNear(weights(ScoreKind::kSqrtSoftplus, 1.0f), {0, 0, .513914329, .486085671});
}

TEST(HandTest, RowOfMinusInfinity) {
  const Floats row(16, -kInfinity);
  for (const ScoreKind kind : kKinds) {
    const Forward<float> forward = RunForward<float>(row, {}, true, Options(kind, 3));
    for (int e = 0; e < 16; ++e) {
      EXPECT_EQ(forward.map[e], e < 3);
      EXPECT_PRED2(SameBits, forward.out[e], e < 3 && IsSoftmax(kind) ? kNan : 0.0f);
    }
  }
}

TEST(HandTest, NanRanksFirst) {
  for (const ScoreKind kind : {ScoreKind::kSoftmaxAfterTopk, ScoreKind::kSigmoid}) {
    const Forward<float> one =
        RunForward<float>(Floats{1.0f, kNan, 3.0f, 2.0f}, {}, true, Options(kind, 2));
    EXPECT_EQ(one.map, std::vector<uint8_t>({0, 1, 1, 0}));
    const Forward<float> all = RunForward<float>(Floats(8, kNan), {}, true, Options(kind, 2));
    EXPECT_EQ(all.map, std::vector<uint8_t>({1, 1, 0, 0, 0, 0, 0, 0}));
    for (const Forward<float>& forward : {one, all}) {
      for (size_t e = 0; e < forward.out.size(); ++e) {
        EXPECT_PRED2(SameBits, forward.out[e], forward.map[e] != 0 ? kNan : 0.0f);
      }
    }
  }
}

TEST(HandTest, SignedZero) {
  const auto map = [](const Floats& row, int topk) {
    return RunForward<float>(row, {}, true, Options(ScoreKind::kSoftmaxAfterTopk, topk)).map;
  };
  EXPECT_EQ(map({-0.0f, 0.0f}, 1), std::vector<uint8_t>({0, 1}));
  EXPECT_EQ(map({0.0f, -0.0f}, 1), std::vector<uint8_t>({1, 0}));
  EXPECT_EQ(map({-0.0f, 0.0f, -1.0f}, 2), std::vector<uint8_t>({1, 1, 0}));
  EXPECT_EQ(Select(Keys({-0.0f, 0.0f, -1.0f}), 2), std::vector<int>({1, 0}));
}

TEST(HandTest, LosingGroupsAreExcludedNotZero) {
  TopkRouterOptions options = Options(ScoreKind::kSigmoid, 2);
  options.num_groups = 4;
  options.group_topk = 1;
  options.group_values = 2;
  const Floats row = {2.0f, 1.0f, 0.0f, -1.0f, 1.5f, 1.4f, -2.0f, -3.0f};
  const Forward<float> forward = RunForward<float>(row, Floats(8, -2.0f), true, options);
  EXPECT_EQ(forward.map, std::vector<uint8_t>({0, 0, 0, 0, 1, 1, 0, 0}));
}

// What is excluded ranks below -infinity.
TEST(HandTest, ExpertAtMinusInfinityOfAKeptGroupIsChosen) {
  TopkRouterOptions options = Options(ScoreKind::kSoftmaxAfterTopk, 2);
  options.num_groups = 2;
  options.group_topk = 1;
  options.group_values = 1;
  const Floats row = {5.0f, -kInfinity, 4.0f, 3.0f};
  EXPECT_EQ(RunForward<float>(row, {}, true, options).map, std::vector<uint8_t>({1, 1, 0, 0}));
}

TEST(HandTest, WeightsComeFromTheUnbiasedScore) {
  const Floats row = {-18.0f, -18.5f, -17.0f, -19.0f};
  const Floats bias = {12.0f, 12.0f, 11.0f, 12.0f};
  const Forward<float> forward =
      RunForward<float>(row, bias, true, Options(ScoreKind::kSigmoid, 2));
  EXPECT_EQ(forward.map, std::vector<uint8_t>({1, 1, 0, 0}));
  ExpectNear(forward.out, {.622459331, .377540669, 0, 0});
}

Floats HandGradient(ScoreKind kind, int topk, float scale) {
  const TopkRouterOptions options = Options(kind, topk, scale);
  const Forward<float> forward = RunForward<float>(L4(), {}, true, options);
  return RunBackward(L4(), Floats{1.0f, 2.0f, 3.0f, 4.0f}, forward.map, true, options);
}

TEST(HandTest, Gradients) {
  ExpectNear(HandGradient(ScoreKind::kSqrtSoftplus, 2, 1.0f), {0, 0, -.067546673, .071546218});
  ExpectNear(HandGradient(ScoreKind::kSigmoid, 2, 2.5f), {0, 0, -.155974464, .180525809});
  ExpectNear(HandGradient(ScoreKind::kSoftmaxAfterTopk, 2, 1.0f), {0, 0, -.247516573, .247516573});
  ExpectNear(HandGradient(ScoreKind::kSoftmax, 2, 1.0f),
             {-.436820620, -.264945099, .208665205, .493100515});
}

TEST(HandTest, GradientsOfOneExpert) {
  ExpectNear(HandGradient(ScoreKind::kSigmoid, 1, 2.0f), {0, 0, 1.124219277, 0});
  ExpectNear(HandGradient(ScoreKind::kSoftmax, 1, 1.0f),
             {-.208841106, -.126668534, .716042945, -.380533305});
  EXPECT_EQ(HandGradient(ScoreKind::kSoftmaxAfterTopk, 1, 1.0f), Floats(4, 0.0f));
}

// A subnormal difference decides.
TEST(HandTest, SubnormalLogitsAreRanked) {
  const Floats row = {kSubnormal, 2 * kSubnormal, 0.0f, -kSubnormal};
  const TopkRouterOptions options = Options(ScoreKind::kSoftmaxAfterTopk, 1);
  EXPECT_EQ(RunForward<float>(row, {}, true, options).map, std::vector<uint8_t>({0, 1, 0, 0}));
}

TEST(MapTest, SizeAndBits) {
  EXPECT_EQ(MapBytes(1, true), 1);
  EXPECT_EQ(MapBytes(8, true), 1);
  EXPECT_EQ(MapBytes(9, true), 2);
  EXPECT_EQ(MapBytes(9, false), 9);
  Floats row(19, 0.0f);
  row[0] = row[7] = row[8] = row[18] = 1.0f;
  TopkRouterOptions options = Options(ScoreKind::kSoftmaxAfterTopk, 4);
  options.bitmap = true;
  EXPECT_EQ(RunForward<float>(row, {}, true, options).map,
            std::vector<uint8_t>({0x81, 0x01, 0x04}));
}

// ---- Closeness to float64, apart from the bits.
//
// Weights: a score is right to 2.1e-7 (core/exact_math.h), the sum of positive scores to as much
// and a few roundings, the reciprocal, the product and the scaling to one each: 1e-6 relative in
// all. In a softmax also the rounding of x - max, which is 2^-24 of |x - max|. Gradient: a product
// of a slope (3.4e-7), such a factor and a difference whose terms have the size of the largest
// cotangent: 3e-6 of the largest weight times that.
constexpr double kWeightError = 1e-6;
constexpr double kGradientError = 3e-6;

TEST(ErrorTest, WeightsAndGradientAreThoseOfFloat64) {
  std::mt19937 random(12);
  for (const int n : {2, 8, 48, 64, 128, 200}) {
    for (const int topk : {1, 2, 8, 48, n}) {
      if (topk > n) continue;
      for (const ScoreKind kind : kKinds) {
        for (const bool aux : {false, true}) {
          if (aux && kind == ScoreKind::kSoftmaxAfterTopk) continue;
          for (const float spread : {0.1f, 1.0f, 5.0f}) {
            TopkRouterOptions options = Options(kind, topk, aux ? 1.0f : 2.5f);
            options.aux_scores = aux;
            Floats row = RandomValues(Values::kRandom, n, random);
            for (float& x : row) x *= spread;
            const Floats d_out = RandomValues(Values::kRandom, n, random);
            const Forward<float> forward = RunForward<float>(row, {}, true, options);
            const Floats gradient =
                RunBackward(row, d_out, aux ? std::vector<uint8_t>() : forward.map, true, options);

            std::vector<int> chosen;
            for (int e = 0; e < n; ++e) {
              if (forward.map[e] != 0) chosen.push_back(e);
            }
            const std::vector<double> x(row.begin(), row.end());
            const std::vector<double> want = testing::ForwardInFloat64(x, chosen, options);
            const std::vector<double> want_gradient =
                testing::GradientInFloat64(x, {d_out.begin(), d_out.end()}, chosen, options);
            double largest = 0.0, steepest = 0.0;
            for (int e = 0; e < n; ++e) {
              if (aux || forward.map[e] != 0) {
                largest = std::max(largest, std::fabs(static_cast<double>(d_out[e])));
              }
              steepest = std::max(steepest, want[e]);  // a score's slope is at most the score
            }
            const double scale = steepest * largest;
            const double highest = *std::max_element(x.begin(), x.end());
            for (int e = 0; e < n; ++e) {
              const double reduction = IsSoftmax(kind) ? 0x1p-24 * (highest - x[e]) : 0.0;
              const double error = std::fabs(forward.out[e] - want[e]);
              EXPECT_LE(error, (kWeightError + reduction) * want[e]) << Describe(n, options);
              EXPECT_NEAR(gradient[e], want_gradient[e], kGradientError * scale)
                  << Describe(n, options);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace jax_moe_det
