// The numerics of aux_loss/aux_loss.h against an oracle of the documented order, bit for bit, and
// against float64.
#include "aux_loss/aux_loss.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/numerics.h"
#include "core/slots.h"
#include "tests/cpp/aux_loss_oracle.h"
#include "tests/cpp/float_format.h"

namespace jax_moe_det {
namespace {

using testing::ExpectedGradient;
using testing::ExpectedLoss;
using testing::ExpectedPartial;
using testing::ExpectedPartials;
using testing::Matrix;
using testing::SameBits;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

const testing::FloatFormat& FormatOf(float) { return testing::kFloat32Format; }
const testing::FloatFormat& FormatOf(BFloat16) { return testing::kBFloat16Format; }
const testing::FloatFormat& FormatOf(Float16) { return testing::kFloat16Format; }

double DecodeScore(float x) { return x; }
double DecodeScore(BFloat16 x) { return testing::Decode(x.bits, testing::kBFloat16Format); }
double DecodeScore(Float16 x) { return testing::Decode(x.bits, testing::kFloat16Format); }

enum class Kind { kPositive, kCancelling, kWide, kSubnormal, kNegativeZero, kHuge, kSpecial };
constexpr Kind kKinds[] = {Kind::kPositive,     Kind::kCancelling, Kind::kWide,   Kind::kSubnormal,
                           Kind::kNegativeZero, Kind::kHuge,       Kind::kSpecial};

// A score of the given kind, as a double that every format then rounds for itself.
double RandomScore(Kind kind, const testing::FloatFormat& format, std::mt19937& random) {
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  const double sign = random() % 2 == 0 ? 1.0 : -1.0;
  switch (kind) {
    case Kind::kPositive:
      return unit(random);
    case Kind::kCancelling:  // neighbours of opposite sign, far from the size of their sum
      return sign * (1000.0 + unit(random));
    case Kind::kWide:
      return sign * std::ldexp(unit(random), static_cast<int>(random() % 40) - 20);
    case Kind::kSubnormal:
      return sign * std::ldexp(unit(random), format.min_exponent + 1);
    case Kind::kNegativeZero:
      return -0.0;
    case Kind::kHuge:  // sums overflow, in both directions
      return sign * std::ldexp(1.0 + unit(random) / 4, format.max_exponent);
    default: {
      const uint32_t pick = random() % 200;
      return pick == 0 ? kNan : pick == 1 ? kInfinity : pick == 2 ? -kInfinity : unit(random);
    }
  }
}

// One slot's input in the operand's type, and the same values as the oracle reads them.
template <class Score>
struct Slot {
  Slot(Kind kind, int64_t rows, int64_t columns, std::mt19937& random)
      : scores{rows, columns, std::vector<float>(rows * columns)}, storage(rows * columns) {
    for (int64_t i = 0; i < rows * columns; ++i) {
      RoundTo(RandomScore(kind, FormatOf(Score{}), random), &storage[i]);
      scores.values[i] = static_cast<float>(DecodeScore(storage[i]));
    }
  }
  Matrix scores;
  std::vector<Score> storage;
};

std::vector<double> RandomCounts(int64_t columns, std::mt19937& random) {
  std::vector<double> counts;
  for (int64_t e = 0; e < columns; ++e) counts.push_back(random() % 10000);
  return counts;
}

template <class Count>
std::vector<Count> As(const std::vector<double>& counts) {
  return {counts.begin(), counts.end()};
}

AuxLossCounts Counts(const std::vector<int32_t>& counts) {
  return {CountType::kInt32, counts.data(), false};
}
AuxLossCounts Counts(const std::vector<int64_t>& counts) {
  return {CountType::kInt64, counts.data(), false};
}
AuxLossCounts Counts(const std::vector<float>& counts) {
  return {CountType::kFloat32, counts.data(), false};
}

// A plain array: std::vector<bool> has no data().
std::unique_ptr<bool[]> MaskArray(const std::vector<bool>& mask) {
  auto array = std::make_unique<bool[]>(mask.size());
  std::copy(mask.begin(), mask.end(), array.get());
  return array;
}

template <class Score, class Count>
float Partial(const std::vector<Score>& scores, int64_t columns, const std::vector<Count>& counts,
              const std::vector<bool>& mask = {}) {
  const auto mask_array = MaskArray(mask);
  return SlotPartial(scores.data(), mask.empty() ? nullptr : mask_array.get(),
                     static_cast<int64_t>(scores.size()) / columns, columns, Counts(counts), 0);
}

template <class T>
class SlotPartialTest : public ::testing::Test {};

using Scores = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(SlotPartialTest, Scores);

// Column counts on both sides of every change of the lane count, the dot's 256 lanes and the
// blocks of columns that the loop takes; row counts around whole lanes and whole chunks.
TYPED_TEST(SlotPartialTest, HasTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(3);
  for (const int64_t columns : {1, 2, 7, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 600, 1000}) {
    const int64_t lanes = NumLanes(columns);
    for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{5}, lanes - 1, lanes, lanes + 1,
                               4 * lanes - 1, 4 * lanes, 9 * lanes + 3}) {
      if (rows * columns > 40000) continue;
      for (const Kind kind : kKinds) {
        const Slot<TypeParam> slot(kind, rows, columns, random);
        const std::vector<double> counts = RandomCounts(columns, random);
        for (const uint32_t masked : {0u, 1u, 2u}) {  // none; a third of the rows; all
          std::vector<bool> mask;
          for (int64_t r = 0; masked > 0 && r < rows; ++r) {
            mask.push_back(masked == 1 && random() % 3 != 0);
          }
          const float want = ExpectedPartial(slot.scores, mask, counts, 0, rows);
          const std::string what = std::to_string(rows) + " x " + std::to_string(columns) +
                                   ", kind " + std::to_string(static_cast<int>(kind)) +
                                   ", masked " + std::to_string(masked);
          const auto& storage = slot.storage;
          EXPECT_PRED2(SameBits, Partial(storage, columns, As<int32_t>(counts), mask), want)
              << what;
          EXPECT_PRED2(SameBits, Partial(storage, columns, As<int64_t>(counts), mask), want)
              << what;
          EXPECT_PRED2(SameBits, Partial(storage, columns, As<float>(counts), mask), want) << what;
        }
      }
    }
  }
}

// Columns cancel in pairs, so that nothing is left but the dot's rounding errors: any other order
// of its additions gives other bits.
TEST(SlotPartialDotTest, OrderShowsWhereColumnsCancel) {
  std::mt19937 random(8);
  std::uniform_real_distribution<float> unit(0.5f, 1.0f);
  for (const int64_t columns : {4, 64, 256, 600, 3000}) {
    std::vector<int64_t> order(columns);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    Matrix scores = {1, columns, std::vector<float>(columns)};
    std::vector<double> counts(columns);
    for (int64_t i = 0; i < columns; i += 2) {
      scores.values[order[i]] = unit(random);
      scores.values[order[i + 1]] = -scores.values[order[i]];
      counts[order[i]] = counts[order[i + 1]] = std::ldexp(random(), random() % 30);
    }
    EXPECT_PRED2(SameBits, Partial(scores.values, columns, As<int64_t>(counts)),
                 ExpectedPartial(scores, {}, counts, 0, 1))
        << columns;
  }
}

// What a masked row holds cannot matter, and it keeps its place: the same as a row of zeros.
TYPED_TEST(SlotPartialTest, MaskedRowIsARowOfZeros) {
  std::mt19937 random(4);
  constexpr int64_t kRows = 300, kColumns = 24;
  Slot<TypeParam> slot(Kind::kPositive, kRows, kColumns, random);
  const std::vector<int32_t> counts = As<int32_t>(RandomCounts(kColumns, random));
  std::vector<TypeParam> zeros = slot.storage;
  std::vector<bool> mask(kRows);
  for (int64_t r = 0; r < kRows; ++r) {
    mask[r] = random() % 2 == 0;
    for (int64_t e = 0; !mask[r] && e < kColumns; ++e) {
      RoundTo(0.0, &zeros[r * kColumns + e]);
      RoundTo(e % 2 == 0 ? kNan : kInfinity, &slot.storage[r * kColumns + e]);
    }
  }
  EXPECT_PRED2(SameBits, Partial(slot.storage, kColumns, counts, mask),
               Partial(zeros, kColumns, counts));
}

// Takes braced lists.
template <class Count>
float HandPartial(const std::vector<float>& scores, int64_t columns,
                  const std::vector<Count>& counts) {
  return Partial(scores, columns, counts);
}

TEST(SlotPartialHandTest, Sums) {
  EXPECT_PRED2(SameBits, HandPartial<int32_t>({0.5f}, 1, {3}), 1.5f);
  // [[1, 2], [3, 4]] with counts [10, 100]: 10 * (1 + 3) + 100 * (2 + 4).
  EXPECT_PRED2(SameBits, HandPartial<int32_t>({1, 2, 3, 4}, 2, {10, 100}), 640.0f);
  // A sum that starts at +0 is never -0.
  EXPECT_PRED2(SameBits, HandPartial<int32_t>({-0.0f, -0.0f}, 1, {1}), 0.0f);
}

// Rows 0, 128, 256 and 384 are lane 0's first chunk, 512 starts its second, 1024 its third.
TEST(SlotPartialHandTest, ChunksAreFloat32AndLanesFloat64) {
  std::vector<float> rows(1025, 0.0f);
  rows[0] = 0x1p24f;
  rows[1024] = -0x1p24f;
  rows[128] = 1.0f;
  EXPECT_PRED2(SameBits, HandPartial<int32_t>(rows, 1, {1}), 0.0f);  // 1 is lost beside 2^24
  rows[128] = 0.0f;
  rows[512] = 1.0f;
  EXPECT_PRED2(SameBits, HandPartial<int32_t>(rows, 1, {1}), 1.0f);
  rows[512] = 0.0f;
  rows[1] = 1.0f;  // another lane: lanes fold in float32, but lane 0 is 0 by then
  EXPECT_PRED2(SameBits, HandPartial<int32_t>(rows, 1, {1}), 1.0f);
}

TEST(SlotPartialHandTest, CountsAreExact) {
  const std::vector<float> opposite = {1.0f, -1.0f};
  EXPECT_PRED2(SameBits, HandPartial<int32_t>(opposite, 2, {(1 << 24) + 1, 1 << 24}), 1.0f);
  const int64_t large = int64_t{1} << 53;
  EXPECT_PRED2(SameBits, HandPartial<int64_t>(opposite, 2, {large, large - 1}), 1.0f);
  EXPECT_PRED2(SameBits, HandPartial<int64_t>(opposite, 2, {large + 2, large}), 2.0f);
  EXPECT_PRED2(SameBits, HandPartial<float>(opposite, 2, {0.75f, 0.5f}), 0.25f);
}

TEST(SlotPartialHandTest, NanAndInfinityFollowIeee) {
  EXPECT_PRED2(SameBits, HandPartial<int32_t>({kNan, 1.0f}, 2, {0, 1}), kNan);
  EXPECT_PRED2(SameBits, HandPartial<int32_t>({kInfinity, 1.0f}, 2, {0, 1}), kNan);
  EXPECT_PRED2(SameBits, HandPartial<int32_t>({kInfinity, 1.0f}, 2, {1, 1}), kInfinity);
  EXPECT_PRED2(SameBits, HandPartial<int32_t>({kInfinity, -kInfinity}, 1, {1}), kNan);
  EXPECT_PRED2(SameBits, HandPartial<float>({1.0f, 1.0f}, 2, {kNan, 1.0f}), kNan);
  EXPECT_PRED2(SameBits, HandPartial<float>({1.0f, 1.0f}, 2, {1.0f, kInfinity}), kInfinity);
  EXPECT_PRED2(SameBits, HandPartial<float>({0.0f, 1.0f}, 2, {kInfinity, 1.0f}), kNan);
}

TEST(SlotPartialHandTest, CountsOffsetSelectsTheBatchItem) {
  const std::vector<float> scores = {1.0f, 2.0f};
  const std::vector<int32_t> counts = {7, 7, 3, 5};
  EXPECT_EQ(SlotPartial(scores.data(), nullptr, 1, 2, Counts(counts), 2), 13.0f);
}

AuxLossScale Scale(int64_t num_experts, int64_t topk, double coeff) {
  return {num_experts, topk, coeff, {TotalType::kStatic, 0.0, nullptr, false}};
}

TEST(LossFromPartialsTest, HasTheBitsOfTheDocumentedOrder) {
  std::mt19937 random(5);
  for (const int64_t num_slots : {0, 1, 2, 3, 100, 255, 256}) {
    for (const Kind kind : kKinds) {
      std::vector<float> partials;
      for (int64_t s = 0; s < num_slots; ++s) {
        partials.push_back(static_cast<float>(RandomScore(kind, testing::kFloat32Format, random)));
      }
      for (const double total : {0.0, 1.0, 4096.0, 1e18, -3.0, 0x1p600}) {
        for (const double coeff : {0.0, 0.01, -1.5, 1e-300, std::nan("")}) {
          EXPECT_PRED2(SameBits,
                       LossFromPartials(partials.data(), num_slots, Scale(60, 6, coeff), total),
                       ExpectedLoss(partials, 60, 6, coeff, total))
              << num_slots << " slots, N " << total << ", coeff " << coeff;
        }
      }
    }
  }
}

TEST(LossFromPartialsTest, HandCases) {
  // C = 8 * 0.5 / (2 * 4 * 4) = 1 / 8.
  const std::vector<float> partials = {8.0f, 16.0f, 24.0f};
  EXPECT_EQ(LossFromPartials(partials.data(), 3, Scale(8, 2, 0.5), 4.0), 6.0f);
  const std::vector<float> bad = {kNan, kInfinity};
  EXPECT_PRED2(SameBits, LossFromPartials(bad.data(), 2, Scale(8, 2, 0.5), 4.0), kNan);
  // Switched off, or of no tokens: +0 whatever the operands hold.
  EXPECT_PRED2(SameBits, LossFromPartials(bad.data(), 2, Scale(8, 2, 0.0), 4.0), 0.0f);
  EXPECT_PRED2(SameBits, LossFromPartials(bad.data(), 2, Scale(8, 2, -0.0), 4.0), 0.0f);
  EXPECT_PRED2(SameBits, LossFromPartials(bad.data(), 2, Scale(8, 2, 0.5), 0.0), 0.0f);
}

template <class Score>
void ExpectGradient(double coeff, double total, double count, float d_loss) {
  const Score got = GradientElement<Score>(Scale(60, 6, coeff), total, count, d_loss);
  const double want = ExpectedGradient(60, 6, coeff, total, count, d_loss, FormatOf(Score{}));
  if (std::isnan(want)) {
    Score canonical;
    RoundTo(std::nan(""), &canonical);
    EXPECT_EQ(memcmp(&got, &canonical, sizeof(got)), 0);
  } else {
    EXPECT_TRUE(DecodeScore(got) == want && std::signbit(DecodeScore(got)) == std::signbit(want))
        << "coeff " << coeff << ", N " << total << ", count " << count << ", d_loss " << d_loss
        << ": got " << DecodeScore(got) << ", wanted " << want;
  }
}

TEST(GradientElementTest, IsTheProductInFloat64RoundedOnce) {
  std::mt19937 random(6);
  std::uniform_real_distribution<float> unit(-2.0f, 2.0f);
  std::vector<float> cotangents = {0.0f, -0.0f, 1.0f, kInfinity, kNan, 0x1p-149f, 3e38f};
  for (int i = 0; i < 50; ++i) cotangents.push_back(std::ldexp(unit(random), random() % 60 - 30));
  // 2e306 times a count overflows, which shows that the cotangent comes last.
  for (const double coeff : {0.0, 0.01, -1.0, 1e30, 2e306, std::nan("")}) {
    for (const double total : {0.0, 1.0, 3.0, 8192.0, 1e15}) {
      for (const double count : {0.0, 1.0, 777.0, 16777217.0, 0x1p62}) {
        for (const float d_loss : cotangents) {
          ExpectGradient<float>(coeff, total, count, d_loss);
          ExpectGradient<BFloat16>(coeff, total, count, d_loss);
          ExpectGradient<Float16>(coeff, total, count, d_loss);
        }
      }
    }
  }
}

TEST(TotalTest, EveryTypeAndBatchIndex) {
  const std::vector<int32_t> s32 = {-1, 5};
  const std::vector<int64_t> s64 = {int64_t{1} << 40, -2};
  const std::vector<uint32_t> u32 = {0xffffffffu, 1};
  const std::vector<uint64_t> u64 = {~uint64_t{0}, 9};
  EXPECT_EQ(Total({TotalType::kStatic, 2.5, nullptr, false}, 7), 2.5);
  EXPECT_EQ(Total({TotalType::kInt32, 0, s32.data(), true}, 1), 5.0);
  EXPECT_EQ(Total({TotalType::kInt32, 0, s32.data(), false}, 1), -1.0);
  EXPECT_EQ(Total({TotalType::kInt64, 0, s64.data(), true}, 0), 0x1p40);
  EXPECT_EQ(Total({TotalType::kUint32, 0, u32.data(), true}, 0), 4294967295.0);
  EXPECT_EQ(Total({TotalType::kUint64, 0, u64.data(), true}, 0), 0x1p64);
  EXPECT_EQ(Total({TotalType::kUint64, 0, u64.data(), true}, 1), 9.0);
}

TEST(SlotsTest, RowsPerSlotCoversAllRows) {
  for (int64_t tokens = 0; tokens < 3000; ++tokens) {
    EXPECT_GE(RowsPerSlot(tokens) * kSlots, tokens);
    EXPECT_LT((RowsPerSlot(tokens) - 1) * kSlots, tokens);
  }
  EXPECT_EQ(RowsPerSlot(int64_t{1} << 40), int64_t{1} << 32);
}

TEST(WorkspaceTest, QueryFillsTheSizeAndLeavesData) {
  AuxLossWorkspace workspace = {nullptr, 0};
  AuxLossWorkspaceQuery(&workspace);
  EXPECT_EQ(workspace.num_elements, 256);
  EXPECT_EQ(workspace.data, nullptr);
}

// ---- Closeness to float64, apart from the bits.

// Relative error of the loss against the formula in long double.
double LossError(const Matrix& scores, const std::vector<int32_t>& counts) {
  const int64_t per_slot = RowsPerSlot(scores.num_rows);
  std::vector<float> partials(kSlots, 0.0f);
  for (int64_t slot = 0; slot * per_slot < scores.num_rows; ++slot) {
    const int64_t begin = slot * per_slot;
    partials[slot] = SlotPartial(scores.values.data() + begin * scores.num_columns, nullptr,
                                 std::min(per_slot, scores.num_rows - begin), scores.num_columns,
                                 Counts(counts), 0);
  }
  long double sum = 0.0L;
  for (size_t i = 0; i < scores.values.size(); ++i) {
    sum += static_cast<long double>(scores.values[i]) * counts[i % scores.num_columns];
  }
  const AuxLossScale scale = Scale(scores.num_columns, 1, 0.01);
  const double total = static_cast<double>(scores.num_rows);
  const long double want = sum * 0.01L * scores.num_columns / (total * total);
  const float got = LossFromPartials(partials.data(), kSlots, scale, total);
  return static_cast<double>(std::fabs(got / want - 1.0L));
}

// The stated bound on tested inputs; a naive float32 sum of 2^22 times 0.1 is off by 1 %.
constexpr double kStatedError = 2e-7;

TEST(ErrorTest, ConstantScores) {
  for (const float constant : {0.1f, 0.3f, 1.0f / 7, 0.9999999f, 1e-3f}) {
    for (const int64_t tokens : {1, 1000, 1 << 16, 1 << 22}) {
      const Matrix scores = {tokens, 1, std::vector<float>(tokens, constant)};
      EXPECT_LE(LossError(scores, {12345}), kStatedError) << constant << " x " << tokens;
    }
  }
}

TEST(ErrorTest, RandomPositiveScores) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> unit(0.0f, 1.0f);
  for (const int64_t columns : {1, 8, 33, 64, 256, 512}) {
    for (const int64_t tokens : {1, 300, 4096}) {
      Matrix scores = {tokens, columns, std::vector<float>(tokens * columns)};
      for (float& score : scores.values) score = unit(random);
      const std::vector<int32_t> counts = As<int32_t>(RandomCounts(columns, random));
      EXPECT_LE(LossError(scores, counts), kStatedError) << tokens << " x " << columns;
    }
  }
}

}  // namespace
}  // namespace jax_moe_det
