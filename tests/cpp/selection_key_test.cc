// core/selection_key.h: the total order of values, NaN and zeros included, and of (key, index).
#include "core/selection_key.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/numerics.h"

namespace jax_moe_det {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint32_t kNans[] = {0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu,
                              0x7f800001u, 0xff800001u, 0x7fa00000u};

uint32_t KeyOfBits(uint32_t bits) { return SelectionKey(BitCast<float>(bits)); }

// Ascending without gaps: from -infinity by falling integer to -0, from +0 by rising integer.
TEST(SelectionKeyTest, RisesByOneFromEachValueToTheNext) {
  constexpr uint32_t kInfinityBits = 0x7f800000u;
  EXPECT_EQ(SelectionKey(-kInfinity), 0x7fffffffu - kInfinityBits);
  EXPECT_EQ(SelectionKey(kInfinity), 0x80000000u + kInfinityBits);
  const auto expect_keys = [](uint32_t magnitude) {
    ASSERT_EQ(KeyOfBits(magnitude | 0x80000000u), 0x7fffffffu - magnitude) << magnitude;
    ASSERT_EQ(KeyOfBits(magnitude), 0x80000000u + magnitude) << magnitude;
  };
  for (uint32_t magnitude = 0; magnitude < kInfinityBits; magnitude += 1021) expect_keys(magnitude);
  for (uint32_t i = 0; i < 1000; ++i) {
    expect_keys(i);
    expect_keys(kInfinityBits - i);
  }
}

TEST(SelectionKeyTest, OrdersAsValuesDo) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const float a = BitCast<float>(static_cast<uint32_t>(random()));
    const float b = i % 2 == 0 ? BitCast<float>(static_cast<uint32_t>(random()))
                               : std::nextafter(a, i % 4 == 1 ? kInfinity : -kInfinity);
    if (std::isnan(a) || std::isnan(b) || a == b) continue;
    ASSERT_EQ(SelectionKey(a) > SelectionKey(b), a > b) << a << " " << b;
  }
}

TEST(SelectionKeyTest, ZerosAndSubnormals) {
  EXPECT_LT(SelectionKey(-0.0f), SelectionKey(0.0f));
  EXPECT_LT(SelectionKey(0.0f), SelectionKey(0x1p-149f));
  EXPECT_LT(SelectionKey(0x1p-149f), SelectionKey(0x1p-148f));
  EXPECT_LT(SelectionKey(-0x1p-149f), SelectionKey(-0.0f));
  EXPECT_LT(SelectionKey(-0x1p-148f), SelectionKey(-0x1p-149f));
}

TEST(SelectionKeyTest, EveryNanIsEqualAndAboveInfinity) {
  for (const uint32_t bits : kNans) {
    EXPECT_EQ(KeyOfBits(bits), KeyOfBits(kNans[0])) << std::hex << bits;
    EXPECT_GT(KeyOfBits(bits), SelectionKey(kInfinity)) << std::hex << bits;
  }
}

// The lowest value's key, -infinity's, is above that of what may not be chosen.
TEST(SelectionKeyTest, NoValueIsExcluded) {
  EXPECT_LT(kExcludedKey, SelectionKey(-kInfinity));
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 1021) {
    ASSERT_GE(KeyOfBits(static_cast<uint32_t>(bits)), SelectionKey(-kInfinity)) << bits;
  }
}

TEST(SelectionKeyTest, ValueComesBack) {
  for (uint64_t i = 0; i < uint64_t{1} << 32; i += 1021) {
    const uint32_t bits = static_cast<uint32_t>(i);
    const float value = SelectionValue(KeyOfBits(bits));
    const uint32_t want = std::isnan(BitCast<float>(bits)) ? 0x7fc00000u : bits;
    ASSERT_EQ(BitCast<uint32_t>(value), want) << std::hex << bits;
  }
}

TEST(SelectionKeyTest, HigherKeyThenLowerIndex) {
  constexpr int32_t kLast = std::numeric_limits<int32_t>::max();
  struct Entry {
    uint32_t key;
    int32_t index;
  };
  // In the order of choice.
  const std::vector<Entry> entries = {{SelectionKey(BitCast<float>(0xffc00001u)), 1},
                                      {SelectionKey(BitCast<float>(0x7fc00000u)), 5},
                                      {SelectionKey(kInfinity), 0},
                                      {SelectionKey(2.0f), 0},
                                      {SelectionKey(2.0f), 1},
                                      {SelectionKey(2.0f), kLast - 1},
                                      {SelectionKey(2.0f), kLast},
                                      {SelectionKey(0.0f), 7},
                                      {SelectionKey(-0.0f), 2},
                                      {SelectionKey(-kInfinity), 0},
                                      {SelectionKey(-kInfinity), 9},
                                      {kExcludedKey, 0},
                                      {kExcludedKey, 3}};
  for (size_t i = 0; i < entries.size(); ++i) {
    for (size_t j = 0; j < entries.size(); ++j) {
      const Entry& a = entries[i];
      const Entry& b = entries[j];
      EXPECT_EQ(RanksBefore(a.key, a.index, b.key, b.index), i < j) << i << " " << j;
      EXPECT_EQ(RankedKey(a.key, a.index) > RankedKey(b.key, b.index), i < j) << i << " " << j;
    }
  }
}

}  // namespace
}  // namespace jax_moe_det
