// The numerics of route/route.h against an oracle of the documented orders, bit for bit, against
// aux_loss.h and topk_router.h, against hand cases, and against float64.
#include "route/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "aux_loss/aux_loss.h"
#include "core/numerics.h"
#include "core/slots.h"
#include "tests/cpp/aux_loss_oracle.h"
#include "tests/cpp/float_format.h"
#include "tests/cpp/route_oracle.h"
#include "tests/cpp/router_rows.h"
#include "tests/cpp/topk_router_oracle.h"
#include "topk_router/topk_router.h"

namespace jax_moe_det {
namespace {

using testing::ExpectedCotangents;
using testing::ExpectedRoutedRow;
using testing::Floats;
using testing::IsRounded;
using testing::kInfinity;
using testing::kKinds;
using testing::kNan;
using testing::kValues;
using testing::Matrix;
using testing::Options;
using testing::RandomValues;
using testing::Row;
using testing::SameBits;
using testing::Values;

constexpr int32_t kMinInt32 = std::numeric_limits<int32_t>::min();
constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Tokens, and all that a pass over them takes. Empty bias, mask and replay: none.
template <class Logit>
struct Problem {
  Problem(int tokens, int experts, const TopkRouterOptions& router_options, const Floats& values)
      : num_tokens(tokens), num_experts(experts), options(router_options), logits(values) {}

  Floats RowOf(int64_t token) const {
    const auto begin = logits.floats.begin() + token * num_experts;
    return {begin, begin + num_experts};
  }
  std::vector<int32_t> ReplayOf(int64_t token) const {
    if (replay.empty()) return {};
    const auto begin = replay.begin() + token * options.topk;
    return {begin, begin + options.topk};
  }
  bool IsValid(int64_t token) const { return mask.empty() || mask[token]; }
  int64_t NumValid() const {
    return mask.empty() ? num_tokens : std::count(mask.begin(), mask.end(), true);
  }

  int num_tokens;
  int num_experts;
  TopkRouterOptions options;
  Row<Logit> logits;
  Floats bias;
  std::vector<bool> mask;
  std::vector<int32_t> replay;
};

// A plain array: std::vector<bool> has no data().
std::unique_ptr<bool[]> MaskArray(const std::vector<bool>& mask) {
  auto array = std::make_unique<bool[]>(mask.size());
  std::copy(mask.begin(), mask.end(), array.get());
  return array;
}

template <class T>
std::vector<T> Garbage(int64_t size) {
  std::vector<T> values(size);
  if (size > 0) std::memset(static_cast<void*>(values.data()), 0xa5, size * sizeof(T));
  return values;
}

// Garbage at first, then what other slots left: neither may reach a slot.
internal::RouteScratch* Scratch() {
  static const auto scratch = [] {
    auto garbage = std::make_unique<internal::RouteScratch>();
    std::memset(static_cast<void*>(garbage.get()), 0xa5, sizeof(internal::RouteScratch));
    return garbage;
  }();
  return scratch.get();
}

// Results in memory of exactly their size, garbage before; a slot adds to the counts.
template <class Logit>
struct Pass {
  std::vector<Logit> weights;
  std::vector<int32_t> indices, counts, plain;
  Floats column_sums, z_partials;
};

template <class Logit>
Pass<Logit> RunPass(const Problem<Logit>& problem, int64_t rows_per_slot, int64_t num_slots,
                    bool wants_aux = true, bool wants_z = true) {
  const int64_t n = problem.num_experts;
  const int64_t choices = int64_t{problem.num_tokens} * problem.options.topk;
  Pass<Logit> out = {Garbage<Logit>(choices),       Garbage<int32_t>(choices),
                     std::vector<int32_t>(n),       std::vector<int32_t>(n),
                     Garbage<float>(num_slots * n), Garbage<float>(num_slots)};
  const auto mask = MaskArray(problem.mask);
  RoutePass pass = {};
  pass.logits = problem.logits.storage.data();
  pass.expert_bias = problem.bias.empty() ? nullptr : problem.bias.data();
  pass.valid_mask = problem.mask.empty() ? nullptr : mask.get();
  pass.replay = problem.replay.empty() ? nullptr : problem.replay.data();
  pass.batch = 1;
  pass.num_tokens = problem.num_tokens;
  pass.num_experts = problem.num_experts;
  pass.rows_per_slot = rows_per_slot;
  pass.num_slots = num_slots;
  pass.options = problem.options;
  pass.weights = out.weights.data();
  pass.indices = out.indices.data();
  pass.counts = out.counts.data();
  pass.plain = wants_aux ? out.plain.data() : nullptr;
  pass.column_sums = wants_aux ? out.column_sums.data() : nullptr;
  pass.z_partials = wants_z ? out.z_partials.data() : nullptr;
  for (int64_t slot = 0; slot < num_slots; ++slot) RouteSlot<Logit>(pass, 0, slot, Scratch());
  return out;
}

// Of all the tokens, as the whole op does it.
template <class Logit>
Pass<Logit> RunPass(const Problem<Logit>& problem) {
  return RunPass(problem, RowsPerSlot(problem.num_tokens), kSlots);
}

struct Losses {
  float aux, z;
};

AuxLossScale Scale(int num_experts, int topk, double coeff, double total) {
  return {num_experts, topk, coeff, {TotalType::kStatic, total, nullptr, false}};
}

// From partials of all slots; null: no loss.
Losses FoldLosses(const Floats* aux_partials, const Floats* z_partials, const AuxLossScale& scale,
                  double z_loss_coeff) {
  Losses out = {kNan, kNan};
  const int64_t num_slots = aux_partials != nullptr ? aux_partials->size()
                            : z_partials != nullptr ? z_partials->size()
                                                    : 0;
  RouteLosses({aux_partials != nullptr ? aux_partials->data() : nullptr,
               z_partials != nullptr ? z_partials->data() : nullptr, 1, num_slots, scale,
               z_loss_coeff, &out.aux, &out.z},
              0);
  return out;
}

template <class Logit>
Floats AuxPartials(const Problem<Logit>& problem, const Pass<Logit>& pass,
                   const std::vector<int32_t>& counts) {
  const int n = problem.num_experts;
  Floats partials;
  for (size_t slot = 0; slot < pass.z_partials.size(); ++slot) {
    partials.push_back(PartialFromColumnSums(pass.column_sums.data() + slot * n, n,
                                             {CountType::kInt32, counts.data(), false}, 0));
  }
  return partials;
}

template <class Logit>
std::string Describe(const Problem<Logit>& problem) {
  const TopkRouterOptions& o = problem.options;
  return std::to_string(problem.num_tokens) + " x " + std::to_string(problem.num_experts) +
         ", topk " + std::to_string(o.topk) + ", kind " + std::to_string(static_cast<int>(o.kind)) +
         ", groups " + std::to_string(o.num_groups) + ", bias " +
         std::to_string(!problem.bias.empty()) + ", masked " +
         std::to_string(!problem.mask.empty()) + ", replay " +
         std::to_string(!problem.replay.empty());
}

// Mostly experts, some repeated, some out of range by little or by much.
int32_t RandomChoice(int num_experts, std::mt19937& random) {
  const int32_t strange[] = {-1, num_experts, num_experts + 1, kMinInt32, kMaxInt32, -num_experts};
  if (random() % 6 == 0) return strange[random() % std::size(strange)];
  return static_cast<int32_t>(random() % num_experts);
}

template <class Logit>
Problem<Logit> RandomProblem(int num_tokens, int num_experts, ScoreKind kind,
                             std::mt19937& random) {
  const int n = num_experts;
  constexpr float kScales[] = {1.0f, 2.5f, -0.7f};
  constexpr float kEps[] = {1e-20f, 0.0f, 1e-3f};
  TopkRouterOptions options =
      Options(kind, 1 + random() % std::min(n, 9), kScales[random() % std::size(kScales)],
              kEps[random() % std::size(kEps)]);
  if (n % 4 == 0 && random() % 2 == 0) {
    const int fewest = (options.topk + n / 4 - 1) / (n / 4);
    options.num_groups = 4;
    options.group_topk = fewest + random() % (5 - fewest);
    options.group_values = 1 + random() % std::min(n / 4, 3);
  }
  // One row that is not finite makes a sum NaN, and every order of it the same.
  const bool wild = random() % 4 == 0;
  Floats logits;
  for (int t = 0; t < num_tokens; ++t) {
    const Values values = random() % 2 == 0 ? Values::kRandom : kValues[random() % (wild ? 8 : 5)];
    const Floats row = RandomValues(values, n, random);
    logits.insert(logits.end(), row.begin(), row.end());
  }
  Problem<Logit> problem(num_tokens, n, options, logits);
  if (random() % 2 == 0) problem.bias = RandomValues(Values::kRandom, n, random);
  if (random() % 2 == 0) {
    for (int t = 0; t < num_tokens; ++t) problem.mask.push_back(random() % 4 != 0);
  }
  if (random() % 3 == 0) {
    for (int i = 0; i < num_tokens * options.topk; ++i) {
      problem.replay.push_back(RandomChoice(n, random));
    }
  }
  return problem;
}

// ---- The pass.

// A NaN inside of a column sum has any bits.
bool SameSum(float got, float want) {
  return SameBits(got, want) || (std::isnan(got) && std::isnan(want));
}

template <class Logit>
void CheckPass(const Problem<Logit>& problem, int64_t rows_per_slot, int64_t num_slots) {
  const int n = problem.num_experts;
  const int topk = problem.options.topk;
  const Pass<Logit> got = RunPass(problem, rows_per_slot, num_slots);
  std::vector<int32_t> counts(n), plain(n);
  Matrix scores = {problem.num_tokens, n, {}};
  Matrix squares = {problem.num_tokens, 1, {}};
  for (int t = 0; t < problem.num_tokens; ++t) {
    ExpectedRoutedRow row = {
        std::vector<int32_t>(topk, -1), Floats(topk, 0.0f), Floats(n, kNan), {}, kNan};
    if (problem.IsValid(t)) {
      row = testing::ExpectedRoute(problem.RowOf(t), problem.bias, problem.ReplayOf(t),
                                   problem.options);
    }
    for (int i = 0; i < topk; ++i) {
      const bool exists = row.chosen[i] >= 0 && row.chosen[i] < n;
      ASSERT_EQ(got.indices[t * topk + i], exists ? row.chosen[i] : n) << t << ", choice " << i;
      ASSERT_TRUE(IsRounded(got.weights[t * topk + i], row.weights[i])) << t << ", choice " << i;
      if (exists) ++counts[row.chosen[i]];
    }
    for (const int e : row.plain) ++plain[e];
    scores.values.insert(scores.values.end(), row.aux_scores.begin(), row.aux_scores.end());
    squares.values.push_back(row.square);
  }
  ASSERT_EQ(got.counts, counts);
  ASSERT_EQ(got.plain, plain);
  const int64_t lanes = testing::ExpectedLanes(n);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int64_t begin = std::min<int64_t>(slot * rows_per_slot, problem.num_tokens);
    const int64_t end = std::min<int64_t>(begin + rows_per_slot, problem.num_tokens);
    for (int e = 0; e < n; ++e) {
      ASSERT_PRED2(SameSum, got.column_sums[slot * n + e],
                   testing::ExpectedColumnSum(scores, problem.mask, e, lanes, begin, end))
          << "slot " << slot << ", column " << e;
    }
    ASSERT_PRED2(SameBits, got.z_partials[slot],
                 testing::ExpectedColumnSum(squares, problem.mask, 0, lanes, begin, end))
        << "slot " << slot;
  }
}

template <class T>
class RouteTest : public ::testing::Test {};

using Logits = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(RouteTest, Logits);

// Experts on both sides of every change of the lane count and of RowSum's 128 lanes; rows around
// whole lanes and whole chunks, in a full slot, one in part and an empty one.
TYPED_TEST(RouteTest, PassHasTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(1);
  for (const int n : {1, 2, 5, 16, 17, 32, 33, 60, 64, 65, 128, 129, 260}) {
    const int lanes = NumLanes(n);
    for (const int rows :
         {1, 3, lanes / 2, lanes / 2 + 1, lanes, lanes + 1, 4 * lanes + 1, 9 * lanes + 3}) {
      for (const ScoreKind kind : kKinds) {
        if (rows * n > 1000 && kind != kKinds[random() % 4]) continue;  // some of the larger ones
        const auto problem = RandomProblem<TypeParam>(rows + rows / 2, n, kind, random);
        SCOPED_TRACE(Describe(problem) + ", rows of a slot " + std::to_string(rows));
        CheckPass(problem, rows, 3);
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

TEST(RoutePassTest, LargestRows) {
  std::mt19937 random(2);
  for (const ScoreKind kind : kKinds) {
    for (const int topk : {64, 65, kMaxExperts}) {
      Problem<float> problem(2, kMaxExperts, Options(kind, topk),
                             RandomValues(Values::kRandom, 2 * kMaxExperts, random));
      CheckPass(problem, 2, 1);
      // Every expert by replay, the last one and one past it too.
      for (int i = 0; i < 2 * topk; ++i) problem.replay.push_back(kMaxExperts - i % topk);
      CheckPass(problem, 2, 1);
      if (HasFatalFailure()) return;
    }
  }
}

// What is not wanted is not written, and nothing else depends on it.
TEST(RoutePassTest, LossesThatAreNotWanted) {
  std::mt19937 random(3);
  for (const ScoreKind kind : kKinds) {
    Problem<float> problem(70, 20, Options(kind, 3),
                           RandomValues(Values::kRandom, 70 * 20, random));
    const Pass<float> both = RunPass(problem, 35, 2);
    for (const bool aux : {false, true}) {
      for (const bool z : {false, true}) {
        const Pass<float> some = RunPass(problem, 35, 2, aux, z);
        EXPECT_EQ(some.weights, both.weights);
        EXPECT_EQ(some.indices, both.indices);
        EXPECT_EQ(some.counts, both.counts);
        EXPECT_EQ(some.plain, aux ? both.plain : std::vector<int32_t>(20));
        EXPECT_EQ(some.column_sums, aux ? both.column_sums : Garbage<float>(2 * 20));
        EXPECT_EQ(some.z_partials, z ? both.z_partials : Garbage<float>(2));
      }
    }
  }
}

// Each slot and lane writes its sums, also where there is no row.
TEST(RoutePassTest, NoTokens) {
  for (const ScoreKind kind : kKinds) {
    const Problem<float> problem(0, 8, Options(kind, 2), {});
    const Pass<float> pass = RunPass(problem);
    EXPECT_EQ(pass.counts, std::vector<int32_t>(8));
    EXPECT_EQ(pass.plain, std::vector<int32_t>(8));
    for (const float sum : pass.column_sums) ASSERT_PRED2(SameBits, sum, 0.0f);
    for (const float sum : pass.z_partials) ASSERT_PRED2(SameBits, sum, 0.0f);
    const Floats partials = AuxPartials(problem, pass, pass.counts);
    const Losses losses = FoldLosses(&partials, &pass.z_partials, Scale(8, 2, 0.01, 5.0), 0.01);
    EXPECT_PRED2(SameBits, losses.aux, 0.0f);
    EXPECT_PRED2(SameBits, losses.z, 0.0f);
  }
}

// Shards of whole slots, one after the other, have the sums of one device.
TEST(RoutePassTest, ShardsHaveTheSumsOfTheWhole) {
  std::mt19937 random(4);
  for (const int tokens : {1024, 900}) {  // the last shard is whole, or not
    auto whole = RandomProblem<float>(tokens, 12, ScoreKind::kSigmoid, random);
    const int64_t rows = RowsPerSlot(tokens);
    const Pass<float> want = RunPass(whole);
    Pass<float> got = {{}, {}, std::vector<int32_t>(12), std::vector<int32_t>(12), {}, {}};
    for (int begin = 0; begin < 1024; begin += 256) {
      const int size = std::min(256, tokens - begin);
      Problem<float> shard(size, 12, whole.options,
                           {whole.logits.floats.begin() + begin * 12,
                            whole.logits.floats.begin() + (begin + size) * 12});
      shard.bias = whole.bias;
      if (!whole.mask.empty()) {
        shard.mask.assign(whole.mask.begin() + begin, whole.mask.begin() + begin + size);
      }
      if (!whole.replay.empty()) {
        const int k = whole.options.topk;
        shard.replay.assign(whole.replay.begin() + begin * k,
                            whole.replay.begin() + (begin + size) * k);
      }
      const Pass<float> part = RunPass(shard, rows, 256 / rows);
      got.weights.insert(got.weights.end(), part.weights.begin(), part.weights.end());
      got.indices.insert(got.indices.end(), part.indices.begin(), part.indices.end());
      got.column_sums.insert(got.column_sums.end(), part.column_sums.begin(),
                             part.column_sums.end());
      got.z_partials.insert(got.z_partials.end(), part.z_partials.begin(), part.z_partials.end());
      for (int e = 0; e < 12; ++e) {
        got.counts[e] += part.counts[e];
        got.plain[e] += part.plain[e];
      }
    }
    ASSERT_EQ(std::memcmp(got.weights.data(), want.weights.data(), got.weights.size() * 4), 0);
    EXPECT_EQ(got.indices, want.indices);
    EXPECT_EQ(got.counts, want.counts);
    EXPECT_EQ(got.plain, want.plain);
    ASSERT_EQ(got.z_partials.size(), want.z_partials.size());
    for (size_t i = 0; i < got.z_partials.size(); ++i) {
      EXPECT_PRED2(SameBits, got.z_partials[i], want.z_partials[i]);
    }
    for (size_t i = 0; i < got.column_sums.size(); ++i) {
      EXPECT_PRED2(SameSum, got.column_sums[i], want.column_sums[i]);
    }
  }
}

// ---- The losses.

// The aux loss of aux_loss.h on the aux scores of topk_router.h, in both maps' counts.
TYPED_TEST(RouteTest, AuxLossHasTheBitsOfAuxLossH) {
  std::mt19937 random(5);
  auto router = std::make_unique<internal::TopkRouterScratch>();
  for (const int n : {1, 8, 40, 130, 300}) {
    for (const int tokens : {1, 255, 256, 257, 1500}) {
      if (tokens * n > 60000) continue;
      const ScoreKind kind = kKinds[random() % 4];
      const auto problem = RandomProblem<TypeParam>(tokens, n, kind, random);
      SCOPED_TRACE(Describe(problem));
      const Pass<TypeParam> pass = RunPass(problem);
      TopkRouterOptions aux = Options(kind, problem.options.topk, 1.0f, problem.options.eps);
      aux.aux_scores = true;
      if (kind == ScoreKind::kSoftmaxAfterTopk) aux.kind = ScoreKind::kSoftmax;
      Floats scores(tokens * n);
      std::vector<uint8_t> map(n);
      std::vector<int32_t> plain(n);
      for (int t = 0; t < tokens; ++t) {
        TopkRouterFwdRow(problem.logits.storage.data() + t * n, nullptr, problem.IsValid(t), n, aux,
                         router.get(), scores.data() + t * n, map.data());
        for (int e = 0; e < n; ++e) plain[e] += map[e];
        // Selected away, not multiplied.
        if (!problem.IsValid(t)) std::fill_n(scores.begin() + t * n, n, kNan);
      }
      EXPECT_EQ(pass.plain, plain);
      const auto mask = MaskArray(problem.mask);
      const int64_t rows = RowsPerSlot(tokens);
      for (const std::vector<int32_t>& counts : {pass.counts, pass.plain}) {
        const Floats partials = AuxPartials(problem, pass, counts);
        const AuxLossCounts loss_counts = {CountType::kInt32, counts.data(), false};
        Floats want;
        for (int64_t begin = 0; begin < kSlots * rows; begin += rows) {
          const int64_t size = std::max<int64_t>(0, std::min<int64_t>(rows, tokens - begin));
          want.push_back(
              SlotPartial(size > 0 ? scores.data() + begin * n : nullptr,
                          problem.mask.empty() || size == 0 ? nullptr : mask.get() + begin, size, n,
                          loss_counts, 0));
        }
        for (int slot = 0; slot < kSlots; ++slot) {
          ASSERT_PRED2(SameBits, partials[slot], want[slot]) << slot;
        }
        const double total = static_cast<double>(problem.NumValid());
        const AuxLossScale scale = Scale(n, problem.options.topk, 0.01, total);
        EXPECT_PRED2(SameBits, FoldLosses(&partials, nullptr, scale, 0.0).aux,
                     LossFromPartials(want.data(), kSlots, scale, total));
        EXPECT_PRED2(SameBits, FoldLosses(&partials, nullptr, scale, 0.0).aux,
                     testing::ExpectedLoss(want, n, problem.options.topk, 0.01, total));
      }
    }
  }
}

TEST(RouteLossesTest, ZLossHasTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(6);
  for (const int num_slots : {1, 3, 128, 255, 256}) {
    for (const Values values : {Values::kRandom, Values::kFar, Values::kZeros, Values::kSpecial}) {
      for (const double coeff : {0.001, -3.0, 0.0, 1e300}) {
        for (const double total : {0.0, 1.0, 7.0, 1e9, 0x1p80}) {
          const Floats partials = RandomValues(values, num_slots, random);
          // Of the aux loss, which the z loss must not see.
          const Floats other = RandomValues(Values::kSpecial, num_slots, random);
          const Losses losses = FoldLosses(&other, &partials, Scale(8, 2, 0.01, total), coeff);
          EXPECT_PRED2(SameBits, losses.z, testing::ExpectedZLoss(partials, coeff, total))
              << num_slots << " slots, coefficient " << coeff << ", N " << total;
          EXPECT_PRED2(SameBits, losses.aux, testing::ExpectedLoss(other, 8, 2, 0.01, total));
        }
      }
    }
  }
}

TEST(RouteLossesTest, SwitchedOffIsZeroWhateverThePartialsHold) {
  const Floats nan(256, kNan);
  for (const double total : {0.0, 10.0}) {
    for (const bool off : {false, true}) {
      const Losses losses =
          FoldLosses(&nan, &nan, Scale(8, 2, off ? 0.0 : 0.01, total), off ? -0.0 : 0.01);
      const float want = off || total == 0.0 ? 0.0f : kNan;
      EXPECT_PRED2(SameBits, losses.aux, want);
      EXPECT_PRED2(SameBits, losses.z, want);
    }
  }
  const Losses none = FoldLosses(nullptr, nullptr, Scale(8, 2, 0.01, 10.0), 0.01);
  EXPECT_PRED2(SameBits, none.aux, 0.0f);
  EXPECT_PRED2(SameBits, none.z, 0.0f);
  const Losses aux = FoldLosses(&nan, nullptr, Scale(8, 2, 0.01, 10.0), 0.01);
  EXPECT_PRED2(SameBits, aux.aux, kNan);
  EXPECT_PRED2(SameBits, aux.z, 0.0f);
  const Losses z = FoldLosses(nullptr, &nan, Scale(8, 2, 0.01, 10.0), 0.01);
  EXPECT_PRED2(SameBits, z.aux, 0.0f);
  EXPECT_PRED2(SameBits, z.z, kNan);
}

// The coefficient is divided by N before anything is multiplied by it. Of float32 results one in
// 2^29 shows that; these were searched for.
TEST(ZLossTest, OrderOfTheFactors) {
  constexpr double kCoeff = 0.1234567891234567;
  EXPECT_EQ(ZLossFromSum(kCoeff, 1311.0, 0x1.99f16p+0), 0x1.3c3f14p-13f);
  EXPECT_EQ(ZLossSlope(kCoeff, 477.0, 0x1.2be8aap+0f), 0x1.3df0c2p-11f);
}

// An item's partials, and its N.
TEST(RouteLossesTest, ItemsOfABatch) {
  const Floats aux = {1.0f, 2.0f, 3.0f, 4.0f};
  const Floats z = {10.0f, 20.0f, 30.0f, 40.0f};
  const int32_t totals[] = {2, 4};
  Floats aux_loss(2, kNan), z_loss(2, kNan);
  const RouteFinal op = {
      aux.data(),      z.data(),     2, 2, {4, 1, 1.0, {TotalType::kInt32, 0.0, totals, true}}, 0.5,
      aux_loss.data(), z_loss.data()};
  for (int item = 0; item < 2; ++item) RouteLosses(op, item);
  EXPECT_EQ(aux_loss, Floats({3.0f, 1.75f}));  // 4 / N^2 * sum
  EXPECT_EQ(z_loss, Floats({7.5f, 8.75f}));    // 0.5 / N * sum
}

TEST(LogSumExpTest, Edges) {
  EXPECT_EQ(LogSumExp(3.0f, 1.0f), 3.0f);  // one expert, or others that are far below
  EXPECT_PRED2(SameBits, LogSumExp(-0.0f, 1.0f), 0.0f);
  EXPECT_NEAR(LogSumExp(0.0f, 8.0f), std::log(8.0), 2e-7);
  EXPECT_NEAR(LogSumExp(-5.0f, 256.0f), std::log(256.0) - 5.0, 5e-7);
  EXPECT_EQ(LogSumExp(-kInfinity, 1.0f), -kInfinity);
  EXPECT_TRUE(std::isnan(LogSumExp(0.0f, kNan)));
}

TEST(ZLossTest, HandCases) {
  const auto z_loss = [](int experts, const Floats& logits, double coeff, double total) {
    const Problem<float> problem(static_cast<int>(logits.size()) / experts, experts,
                                 Options(ScoreKind::kSigmoid, 1), logits);
    const Pass<float> pass = RunPass(problem);
    return FoldLosses(nullptr, &pass.z_partials, Scale(experts, 1, 0.0, total), coeff).z;
  };
  EXPECT_EQ(z_loss(1, {3.0f, 3.0f, -3.0f, 1.0f}, 1.0, 4.0), 7.0f);
  EXPECT_EQ(z_loss(1, {3.0f, 3.0f, -3.0f, 1.0f}, 0.5, 8.0), 1.75f);
  EXPECT_NEAR(z_loss(4, {0.3f, -0.2f, 1.1f, 0.9f}, 1.0, 1.0), 4.130637289, 4e-6);
  EXPECT_EQ(z_loss(1, {1e20f, 0.0f}, 1.0, 2.0), kInfinity);
  EXPECT_PRED2(SameBits, z_loss(1, {kInfinity}, 1.0, 1.0), kNan);
  EXPECT_PRED2(SameBits, z_loss(2, {-kInfinity, -kInfinity}, 1.0, 1.0), kNan);
  EXPECT_EQ(z_loss(2, {-kInfinity, 2.0f}, 1.0, 1.0), 4.0f);
}

// ---- Masks.

// Index n, weight +0, and in every sum as if its row were none; its place stays.
TYPED_TEST(RouteTest, MaskedRowIsNobodyWhateverItHolds) {
  std::mt19937 random(7);
  constexpr int kTokens = 90, kExperts = 20, kTopk = 3;
  for (const ScoreKind kind : kKinds) {
    Floats logits = RandomValues(Values::kRandom, kTokens * kExperts, random);
    Problem<TypeParam> clean(kTokens, kExperts, Options(kind, kTopk), logits);
    for (int t = 0; t < kTokens; ++t) clean.mask.push_back(random() % 3 != 0);
    for (int t = 0; t < kTokens; ++t) {
      if (clean.mask[t]) continue;
      std::fill_n(logits.begin() + t * kExperts, kExperts, t % 2 == 0 ? kNan : kInfinity);
    }
    Problem<TypeParam> poisoned(kTokens, kExperts, Options(kind, kTopk), logits);
    poisoned.mask = clean.mask;
    const Pass<TypeParam> want = RunPass(clean, 45, 2);
    const Pass<TypeParam> got = RunPass(poisoned, 45, 2);
    EXPECT_EQ(got.indices, want.indices);
    EXPECT_EQ(std::memcmp(got.weights.data(), want.weights.data(),
                          got.weights.size() * sizeof(TypeParam)),
              0);
    EXPECT_EQ(got.counts, want.counts);
    EXPECT_EQ(got.plain, want.plain);
    EXPECT_EQ(got.column_sums, want.column_sums);
    EXPECT_EQ(got.z_partials, want.z_partials);
    int64_t chosen = 0;
    for (const int32_t count : got.counts) chosen += count;
    EXPECT_EQ(chosen, kTopk * clean.NumValid());
    for (int i = 0; i < kTokens * kTopk; ++i) {
      if (clean.mask[i / kTopk]) continue;
      EXPECT_EQ(got.indices[i], kExperts);
      EXPECT_TRUE(IsRounded(got.weights[i], 0.0f));
    }
    // Replayed: the entries are ignored.
    poisoned.replay = want.indices;
    for (int i = 0; i < kTokens * kTopk; ++i) {
      if (!clean.mask[i / kTopk]) poisoned.replay[i] = i % 2 == 0 ? 1 : kMinInt32;
    }
    const Pass<TypeParam> replayed = RunPass(poisoned, 45, 2);
    EXPECT_EQ(replayed.indices, want.indices);
    EXPECT_EQ(replayed.counts, want.counts);
  }
}

TEST(MaskTest, AllMasked) {
  for (const ScoreKind kind : kKinds) {
    Problem<float> problem(300, 8, Options(kind, 2), Floats(300 * 8, kNan));
    problem.mask.assign(300, false);
    const Pass<float> pass = RunPass(problem);
    EXPECT_EQ(pass.indices, std::vector<int32_t>(600, 8));
    for (const float weight : pass.weights) EXPECT_PRED2(SameBits, weight, 0.0f);
    EXPECT_EQ(pass.counts, std::vector<int32_t>(8));
    EXPECT_EQ(pass.plain, std::vector<int32_t>(8));
    for (const float sum : pass.column_sums) EXPECT_PRED2(SameBits, sum, 0.0f);
    for (const float sum : pass.z_partials) EXPECT_PRED2(SameBits, sum, 0.0f);
  }
}

// ---- Replay.

// The router's own choice, fed back, changes nothing: bias and groups do not enter.
TYPED_TEST(RouteTest, OwnChoiceFedBack) {
  std::mt19937 random(8);
  for (const ScoreKind kind : kKinds) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      auto problem = RandomProblem<TypeParam>(60, 8 + 4 * repeat, kind, random);
      problem.replay.clear();
      SCOPED_TRACE(Describe(problem));
      const Pass<TypeParam> want = RunPass(problem, 30, 2);
      problem.replay = want.indices;  // of masked rows: no expert
      problem.bias = Floats(problem.num_experts, kNan);
      problem.options.num_groups = 1;
      const Pass<TypeParam> got = RunPass(problem, 30, 2);
      EXPECT_EQ(got.indices, want.indices);
      EXPECT_EQ(std::memcmp(got.weights.data(), want.weights.data(),
                            got.weights.size() * sizeof(TypeParam)),
                0);
      EXPECT_EQ(got.counts, want.counts);
      EXPECT_EQ(got.plain, want.plain);
      for (size_t i = 0; i < got.column_sums.size(); ++i) {
        ASSERT_PRED2(SameSum, got.column_sums[i], want.column_sums[i]);
      }
      for (size_t i = 0; i < got.z_partials.size(); ++i) {
        ASSERT_PRED2(SameBits, got.z_partials[i], want.z_partials[i]);
      }
    }
  }
}

struct Replayed {
  std::vector<int32_t> indices, counts;
  Floats weights;
};

Replayed Replay(ScoreKind kind, const Floats& row, const std::vector<int32_t>& choice) {
  Problem<float> problem(1, static_cast<int>(row.size()),
                         Options(kind, static_cast<int>(choice.size())), row);
  problem.replay = choice;
  const Pass<float> pass = RunPass(problem, 1, 1);
  return {pass.indices, pass.counts, pass.weights};
}

TEST(ReplayTest, AnIndexOutsideIsNoExpert) {
  const Floats row = {0.0f, 1.0f, 2.0f, 3.0f};
  for (const int32_t outside : {-1, 4, 5, kMinInt32, kMaxInt32, -4, 1 << 30}) {
    for (const ScoreKind kind : kKinds) {
      const Replayed some = Replay(kind, row, {outside, 0, outside, 3});
      EXPECT_EQ(some.indices, std::vector<int32_t>({4, 0, 4, 3}));
      EXPECT_EQ(some.counts, std::vector<int32_t>({1, 0, 0, 1}));
      EXPECT_PRED2(SameBits, some.weights[0], 0.0f);
      EXPECT_PRED2(SameBits, some.weights[2], 0.0f);
      // The weights of the experts are those of a choice of two.
      const Replayed two = Replay(kind, row, {0, 3});
      EXPECT_PRED2(SameBits, some.weights[1], two.weights[0]);
      EXPECT_PRED2(SameBits, some.weights[3], two.weights[1]);
      const Replayed none = Replay(kind, row, {outside, outside, outside});
      EXPECT_EQ(none.indices, std::vector<int32_t>({4, 4, 4}));
      EXPECT_EQ(none.counts, std::vector<int32_t>(4));
      for (const float weight : none.weights) EXPECT_PRED2(SameBits, weight, 0.0f);
      EXPECT_PRED2(SameBits, Replay(kind, row, {outside}).weights[0], 0.0f);
    }
  }
}

TEST(ReplayTest, OrderIsKeptAndARepeatedExpertCountsEachTime) {
  const Floats row = {0.0f, 1.0f, 2.0f, 3.0f};
  const Replayed repeated = Replay(ScoreKind::kSigmoid, row, {1, 3, 1, 1});
  EXPECT_EQ(repeated.indices, std::vector<int32_t>({1, 3, 1, 1}));
  EXPECT_EQ(repeated.counts, std::vector<int32_t>({0, 3, 0, 1}));
  const double s1 = 1.0 / (1.0 + std::exp(-1.0)), s3 = 1.0 / (1.0 + std::exp(-3.0));
  for (const int i : {0, 2, 3}) EXPECT_NEAR(repeated.weights[i], s1 / (3 * s1 + s3), 1e-7);
  EXPECT_NEAR(repeated.weights[1], s3 / (3 * s1 + s3), 1e-7);
  const Replayed softmax = Replay(ScoreKind::kSoftmaxAfterTopk, row, {2, 2});
  EXPECT_EQ(softmax.weights, Floats({0.5f, 0.5f}));
}

// A NaN that is not chosen has no part in the weights of the kinds that do not sum over all.
TEST(ReplayTest, NanOfAnExpertThatIsNotChosen) {
  const Floats row = {1.0f, kNan, 2.0f};
  for (const ScoreKind kind : kKinds) {
    const Replayed clean = Replay(kind, {1.0f, 0.0f, 2.0f}, {2, 0});
    const Replayed got = Replay(kind, row, {2, 0});
    for (int i = 0; i < 2; ++i) {
      EXPECT_PRED2(SameBits, got.weights[i], kind == ScoreKind::kSoftmax ? kNan : clean.weights[i]);
    }
    // Beside one that is: all are NaN, but for a place without an expert.
    const Replayed nan = Replay(kind, row, {2, -1, 1});
    EXPECT_PRED2(SameBits, nan.weights[0], kNan);
    EXPECT_PRED2(SameBits, nan.weights[1], 0.0f);
    EXPECT_PRED2(SameBits, nan.weights[2], kNan);
  }
}

// ---- NaN.

// k experts count, both losses are NaN, and no other row's weights or indices change.
TEST(NanTest, RowOfNan) {
  std::mt19937 random(9);
  for (const ScoreKind kind : kKinds) {
    for (const float poison : {kNan, kInfinity, -kInfinity}) {
      Floats logits = RandomValues(Values::kRandom, 20 * 8, random);
      const Problem<float> clean(20, 8, Options(kind, 2), logits);
      std::fill_n(logits.begin() + 7 * 8, 8, poison);
      const Problem<float> poisoned(20, 8, Options(kind, 2), logits);
      const Pass<float> want = RunPass(clean);
      const Pass<float> got = RunPass(poisoned);
      for (int i = 0; i < 20 * 2; ++i) {
        if (i / 2 == 7) continue;
        EXPECT_EQ(got.indices[i], want.indices[i]);
        EXPECT_PRED2(SameBits, got.weights[i], want.weights[i]);
      }
      EXPECT_EQ(got.indices[14], 0);
      EXPECT_EQ(got.indices[15], 1);
      int64_t chosen = 0;
      for (const int32_t count : got.counts) chosen += count;
      EXPECT_EQ(chosen, 40);
      const Floats partials = AuxPartials(poisoned, got, got.counts);
      const Losses losses = FoldLosses(&partials, &got.z_partials, Scale(8, 2, 0.01, 20.0), 0.01);
      EXPECT_PRED2(SameBits, losses.z, kNan);
      // Sigmoid kinds have scores of infinite logits.
      if (!IsSoftmax(kind) && !std::isnan(poison)) continue;
      EXPECT_PRED2(SameBits, losses.aux, kNan);
    }
  }
}

// ---- The gradient.

// Of one row; `d_weights` empty: no cotangent.
template <class Logit>
std::vector<Logit> RunBackward(const std::vector<Logit>& logits,
                               const std::vector<int32_t>& indices,
                               const std::vector<Logit>& d_weights, bool valid,
                               const ExpectedCotangents& cotangents,
                               const TopkRouterOptions& options) {
  std::vector<Logit> d_logits = Garbage<Logit>(logits.size());
  const RouteCotangent cotangent = {!cotangents.aux.empty(), cotangents.has_z,
                                    cotangents.aux.data(), cotangents.h};
  RouteBwdRow(logits.data(), indices.data(), d_weights.empty() ? nullptr : d_weights.data(), valid,
              cotangent, static_cast<int>(logits.size()), options, &Scratch()->row,
              d_logits.data());
  return d_logits;
}

TYPED_TEST(RouteTest, GradientHasTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(10);
  for (const int n : {1, 2, 5, 8, 31, 33, 64, 100, 127, 128, 129, 200, 256, 300}) {
    for (const ScoreKind kind : kKinds) {
      for (int parts = 0; parts < 8; ++parts) {
        for (int repeat = 0; repeat < 6; ++repeat) {
          auto problem = RandomProblem<TypeParam>(1, n, kind, random);
          problem.mask.clear();
          const int topk = problem.options.topk;
          const Floats row = problem.RowOf(0);
          std::vector<int32_t> chosen =
              testing::ExpectedRoute(row, problem.bias, problem.replay, problem.options).chosen;
          const auto some = [&] { return random() % 6 == 0 ? Values::kSpecial : Values::kRandom; };
          Row<TypeParam> d_weights({});
          ExpectedCotangents cotangents = {{}, false, kNan};
          if (parts & 1) d_weights = Row<TypeParam>(RandomValues(some(), topk, random));
          if (parts & 2) cotangents.aux = RandomValues(some(), n, random);
          if (parts & 4) cotangents = {cotangents.aux, true, RandomValues(some(), 1, random)[0]};
          const Floats want = testing::ExpectedRouteGradient(row, chosen, d_weights.floats,
                                                             cotangents, problem.options);
          const std::vector<TypeParam> got = RunBackward(
              problem.logits.storage, chosen, d_weights.storage, true, cotangents, problem.options);
          for (int e = 0; e < n; ++e) {
            ASSERT_TRUE(IsRounded(got[e], want[e]))
                << Describe(problem) << ", parts " << parts << ": " << testing::DecodeLogit(got[e])
                << " at " << e << ", wanted " << want[e];
          }
        }
      }
    }
  }
}

TYPED_TEST(RouteTest, GradientOfAMaskedRowIsZeroWhateverItHolds) {
  const Row<TypeParam> nan(Floats(6, kNan));
  const Row<TypeParam> d_weights(Floats(2, kNan));
  for (const ScoreKind kind : kKinds) {
    const ExpectedCotangents cotangents = {Floats(6, kNan), true, kNan};
    for (const TypeParam x :
         RunBackward(nan.storage, {0, 6}, d_weights.storage, false, cotangents, Options(kind, 2))) {
      EXPECT_TRUE(IsRounded(x, 0.0f));
    }
  }
}

// Without cotangents of losses the bits are those of topk_router.h, whose lists are in another
// order: up to two experts, whose sum has none.
TYPED_TEST(RouteTest, GradientOfTheWeightsAloneIsTheRouters) {
  std::mt19937 random(11);
  for (const ScoreKind kind : kKinds) {
    for (const int topk : {1, 2}) {
      for (const int n : {2, 8, 130}) {
        const TopkRouterOptions options = Options(kind, topk, 2.5f);
        const Row<TypeParam> row(RandomValues(Values::kRandom, n, random));
        const Row<TypeParam> d_weights(RandomValues(Values::kRandom, topk, random));
        const auto chosen = testing::ExpectedRoute(row.floats, {}, {}, options).chosen;
        std::vector<uint8_t> map(n);
        std::vector<TypeParam> d_out(n);
        for (int i = 0; i < topk; ++i) {
          map[chosen[i]] = 1;
          d_out[chosen[i]] = d_weights.storage[i];
        }
        std::vector<TypeParam> want(n);
        TopkRouterBwdRow(row.storage.data(), static_cast<const void*>(d_out.data()), map.data(),
                         true, n, options, &Scratch()->row, want.data());
        const std::vector<TypeParam> got =
            RunBackward(row.storage, chosen, d_weights.storage, true, {{}, false, 0.0f}, options);
        for (int e = 0; e < n; ++e) {
          EXPECT_EQ(testing::DecodeLogit(got[e]), testing::DecodeLogit(want[e])) << e;
        }
      }
    }
  }
}

// The chosen experts' gradient is NaN where a weight is; every expert's for softmax before top-k.
TYPED_TEST(RouteTest, GradientOfANanStaysWhereItBelongs) {
  const Row<TypeParam> row({1.0f, kNan, 3.0f, 2.0f, -5.0f, 0.5f});
  for (const ScoreKind kind : kKinds) {
    const Row<TypeParam> ones(Floats(3, 1.0f));
    const std::vector<TypeParam> got = RunBackward(row.storage, {1, 2, 6}, ones.storage, true,
                                                   {{}, false, 0.0f}, Options(kind, 3));
    for (int e = 0; e < 6; ++e) {
      const bool nan = e == 1 || e == 2 || kind == ScoreKind::kSoftmax;
      EXPECT_TRUE(IsRounded(got[e], nan ? kNan : 0.0f)) << e;
    }
    // Not chosen: no part, but in the softmax over all.
    const std::vector<TypeParam> others = RunBackward(row.storage, {2, 3, 6}, ones.storage, true,
                                                      {{}, false, 0.0f}, Options(kind, 3));
    EXPECT_EQ(std::isnan(testing::DecodeLogit(others[2])), kind == ScoreKind::kSoftmax);
    EXPECT_TRUE(IsRounded(others[1], kind == ScoreKind::kSoftmax ? kNan : 0.0f));
    // The losses are of all experts.
    const std::vector<TypeParam> z =
        RunBackward(row.storage, {1, 2, 6}, {}, true, {{}, true, 1.0f}, Options(kind, 3));
    const std::vector<TypeParam> aux = RunBackward(
        row.storage, {1, 2, 6}, {}, true, {Floats(6, 1.0f), false, 0.0f}, Options(kind, 3));
    for (int e = 0; e < 6; ++e) {
      EXPECT_TRUE(IsRounded(z[e], kNan)) << e;
      EXPECT_TRUE(IsRounded(aux[e], kNan)) << e;
    }
  }
}

// No part at all: +0, also at a row of NaN.
TEST(GradientTest, NoCotangents) {
  for (const ScoreKind kind : kKinds) {
    for (const float x : {1.0f, kNan, kInfinity}) {
      for (const float d : RunBackward<float>(Floats(9, x), {0, 8, 9}, {}, true, {{}, false, kNan},
                                              Options(kind, 3))) {
        EXPECT_PRED2(SameBits, d, 0.0f);
      }
    }
  }
}

TEST(GradientTest, ARepeatedExpertAddsUp) {
  const Floats row = {0.5f, -1.0f, 2.0f};
  for (const ScoreKind kind : kKinds) {
    const TopkRouterOptions options = Options(kind, 2);
    const auto gradient = [&](const std::vector<int32_t>& chosen, const Floats& d_weights) {
      return RunBackward<float>(row, chosen, d_weights, true, {{}, false, 0.0f}, options);
    };
    // Both weights of a repeated expert are the same, and only their sum's slope is left.
    const Floats got = gradient({1, 1}, {2.0f, 3.0f});
    const double p = std::exp(-1.0) / (std::exp(0.5) + std::exp(-1.0) + std::exp(2.0));
    EXPECT_NEAR(got[1], kind == ScoreKind::kSoftmax ? 5.0 * p * (1.0 - p) : 0.0, 1e-6);
    const Floats swapped = gradient({1, 1}, {3.0f, 2.0f});
    EXPECT_NEAR(swapped[1], got[1], 1e-6);
  }
}

// ---- The cotangents of the losses.

struct Cotangents {
  RouteCotangent cotangent;
  Floats aux;
};

Cotangents RunCotangents(const std::vector<int32_t>& counts, const AuxLossScale& scale,
                         double z_loss_coeff, const float* d_aux_loss, const float* d_z_loss) {
  RouteBwd bwd = {};
  bwd.counts = {CountType::kInt32, counts.data(), false};
  bwd.d_aux_loss = d_aux_loss;
  bwd.d_z_loss = d_z_loss;
  bwd.batch = 1;
  bwd.num_experts = static_cast<int>(counts.size());
  bwd.scale = scale;
  bwd.z_loss_coeff = z_loss_coeff;
  Cotangents out = {{}, Garbage<float>(counts.size())};
  out.cotangent = RouteCotangents(bwd, 0, out.aux.data());
  return out;
}

TEST(CotangentsTest, HaveTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(12);
  for (const int n : {1, 8, 100}) {
    for (const double total : {1.0, 3.0, 1e9}) {
      for (const Values values : {Values::kRandom, Values::kFar, Values::kZeros, Values::kNan}) {
        std::vector<int32_t> counts;
        for (int e = 0; e < n; ++e) counts.push_back(random() % 3 == 0 ? 0 : random() % 100000);
        const float d_aux = RandomValues(values, 1, random)[0];
        const float d_z = RandomValues(values, 1, random)[0];
        const AuxLossScale scale = Scale(n, 1, 0.01, total);
        const Cotangents got = RunCotangents(counts, scale, 0.003, &d_aux, &d_z);
        ASSERT_TRUE(got.cotangent.has_aux && got.cotangent.has_z);
        EXPECT_EQ(got.cotangent.aux, got.aux.data());
        const float h = testing::ExpectedZSlope(0.003, total, d_z);
        EXPECT_TRUE(SameSum(got.cotangent.z, h)) << got.cotangent.z << ", wanted " << h;
        for (int e = 0; e < n; ++e) {
          const double want = testing::ExpectedGradient(n, 1, 0.01, total, counts[e], d_aux,
                                                        testing::kFloat32Format);
          EXPECT_PRED2(SameBits, got.aux[e], static_cast<float>(want));
        }
      }
    }
  }
}

// A loss that is switched off has no part, whatever its cotangent is.
TEST(CotangentsTest, SwitchedOff) {
  const std::vector<int32_t> counts = {1, 2, 3};
  const float nan = kNan;
  const auto parts = [&](double aux_coeff, double z_coeff, double total, const float* d_aux,
                         const float* d_z) {
    const Cotangents out =
        RunCotangents(counts, Scale(3, 1, aux_coeff, total), z_coeff, d_aux, d_z);
    return (out.cotangent.has_aux ? 1 : 0) + (out.cotangent.has_z ? 2 : 0);
  };
  EXPECT_EQ(parts(0.01, 0.01, 4.0, &nan, &nan), 3);
  EXPECT_EQ(parts(0.0, 0.01, 4.0, &nan, &nan), 2);
  EXPECT_EQ(parts(0.01, -0.0, 4.0, &nan, &nan), 1);
  EXPECT_EQ(parts(0.01, 0.01, 0.0, &nan, &nan), 0);
  EXPECT_EQ(parts(0.01, 0.01, 4.0, nullptr, &nan), 2);
  EXPECT_EQ(parts(0.01, 0.01, 4.0, &nan, nullptr), 1);
}

TEST(CotangentsTest, ItemsOfABatch) {
  const std::vector<int32_t> counts = {1, 2, 3, 4};
  const float d_losses[] = {1.0f, 8.0f};
  const int64_t totals[] = {1, 2};
  RouteBwd bwd = {};
  bwd.counts = {CountType::kInt32, counts.data(), true};
  bwd.d_aux_loss = bwd.d_z_loss = d_losses;
  bwd.d_aux_loss_batched = bwd.d_z_loss_batched = true;
  bwd.batch = 2;
  bwd.num_experts = 2;
  bwd.scale = {2, 1, 1.0, {TotalType::kInt64, 0.0, totals, true}};
  bwd.z_loss_coeff = 0.5;
  float aux[2];
  EXPECT_EQ(RouteCotangents(bwd, 0, aux).z, 1.0f);  // 0.5 / 1 * 2 * 1
  EXPECT_EQ(aux[0], 2.0f);                          // 2 / (1 * 1) * 1 * 1
  EXPECT_EQ(aux[1], 4.0f);
  EXPECT_EQ(RouteCotangents(bwd, 1, aux).z, 4.0f);  // 0.5 / 2 * 2 * 8
  EXPECT_EQ(aux[0], 12.0f);                         // 2 / (2 * 2) * 3 * 8
  EXPECT_EQ(aux[1], 16.0f);
  bwd.counts.batched = bwd.d_aux_loss_batched = bwd.d_z_loss_batched = false;
  EXPECT_EQ(RouteCotangents(bwd, 1, aux).z, 0.5f);
  EXPECT_EQ(aux[0], 0.5f);
}

// ---- The workspace.

TEST(RouteWorkspaceTest, Query) {
  const auto query = [](int64_t tokens, int experts, const TopkRouterOptions& options) {
    RouteWorkspace workspace = {nullptr, -1};
    RouteWorkspaceQuery(tokens, experts, options, &workspace);
    return workspace.num_elements;
  };
  const TopkRouterOptions small = Options(ScoreKind::kSoftmax, 8);
  EXPECT_EQ(query(0, 64, small), 256 * 66);
  EXPECT_EQ(query(1000, 64, small), 256 * 66);
  EXPECT_EQ(query(1000, 512, small), 256 * 514);
  // Three numbers for each token of rows that do not fit registers.
  EXPECT_EQ(query(1000, 513, small), 256 * 515 + 3000);
  EXPECT_EQ(query(0, 513, small), 256 * 515);
  EXPECT_EQ(query(1000, 64, Options(ScoreKind::kSoftmax, 31)), 256 * 66);
  EXPECT_EQ(query(1000, 64, Options(ScoreKind::kSoftmax, 32)), 256 * 66 + 3000);
  TopkRouterOptions groups = small;
  groups.num_groups = 3;
  EXPECT_EQ(query(10, 60, groups), 256 * 62 + 30);  // 20 columns of a group are 10 threads
  // 64 bits.
  EXPECT_EQ(query(int64_t{1} << 40, 8192, small), 256 * 8194 + 3 * (int64_t{1} << 40));
}

// ---- Closeness to float64, apart from the bits.
//
// A weight is right to 1e-6, its gradient to 3e-6 of the largest weight times the largest cotangent
// (see topk_router_test.cc). An aux score is right to 1e-6, and the sums of positive terms add 13
// roundings of 2^-24 (aux_loss.h). logsumexp is a sum of numbers of its parts' size: 2e-7 of
// |max| + log(n), and its square twice that.
TEST(ErrorTest, LossesAndGradientAreThoseOfFloat64) {
  std::mt19937 random(13);
  for (const int n : {2, 8, 48, 130}) {
    for (const ScoreKind kind : kKinds) {
      constexpr int kTokens = 6;
      const int topk = std::min(n, 4);
      const TopkRouterOptions options = Options(kind, topk, 2.5f);
      const Floats logits = RandomValues(Values::kRandom, kTokens * n, random);
      const Problem<float> problem(kTokens, n, options, logits);
      const Pass<float> pass = RunPass(problem);
      const Floats partials = AuxPartials(problem, pass, pass.counts);
      const AuxLossScale scale = Scale(n, topk, 0.2, kTokens);
      const Losses losses = FoldLosses(&partials, &pass.z_partials, scale, 0.3);
      std::vector<std::vector<double>> rows;
      for (int t = 0; t < kTokens; ++t) {
        const Floats row = problem.RowOf(t);
        rows.emplace_back(row.begin(), row.end());
      }
      const std::vector<double> counts(pass.counts.begin(), pass.counts.end());
      const double aux_factor = n * 0.2 / (topk * kTokens * kTokens);
      const double z_factor = 0.3 / kTokens;
      const auto want = testing::RouteLossesInFloat64(rows, counts, options);
      EXPECT_NEAR(losses.aux, aux_factor * want.aux, 2e-6 * losses.aux);
      double size = 0.0;  // of |max| + log(n), squared
      for (const auto& row : rows) {
        const double max = *std::max_element(row.begin(), row.end());
        size += (std::fabs(max) + std::log(n)) * (std::fabs(max) + std::log(n));
      }
      EXPECT_NEAR(losses.z, z_factor * want.z, 6e-7 * z_factor * size);

      // The gradient of sum(d * weights) + d_aux * aux_loss + d_z * z_loss at one token: choice and
      // counts are constants.
      const float d_aux = 1.5f, d_z = -0.75f;
      const Floats d_weights = RandomValues(Values::kRandom, topk, random);
      const std::vector<int32_t> indices(pass.indices.begin(), pass.indices.begin() + topk);
      const std::vector<int> chosen(indices.begin(), indices.end());
      const Cotangents cotangents = RunCotangents(pass.counts, scale, 0.3, &d_aux, &d_z);
      const Floats got =
          RunBackward<float>(problem.RowOf(0), indices, d_weights, true,
                             {cotangents.aux, true, cotangents.cotangent.z}, options);
      const auto objective = [&](const std::vector<double>& x) {
        const std::vector<double> weights = testing::ForwardInFloat64(x, chosen, options);
        const auto of_row = testing::RouteLossesInFloat64({x}, counts, options);
        double sum = d_aux * aux_factor * of_row.aux + d_z * z_factor * of_row.z;
        for (int i = 0; i < topk; ++i) sum += d_weights[i] * weights[chosen[i]];
        return sum;
      };
      double largest = 0.0, steepest = 0.0;
      for (const float d : d_weights) largest = std::max(largest, std::fabs(double{d}));
      for (const float a : cotangents.aux) steepest = std::max(steepest, std::fabs(double{a}));
      const double bound = 3e-6 * (2.5 * largest + steepest + std::fabs(d_z) * z_factor * size);
      for (int e = 0; e < n; ++e) {
        constexpr double kStep = 1e-5;
        std::vector<double> up = rows[0], down = rows[0];
        up[e] += kStep;
        down[e] -= kStep;
        EXPECT_NEAR(got[e], (objective(up) - objective(down)) / (2.0 * kStep), bound)
            << Describe(problem) << " at " << e;
      }
    }
  }
}

}  // namespace
}  // namespace jax_moe_det
