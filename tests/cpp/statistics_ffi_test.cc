// The CPU handlers of the statistics, called as XLA calls them: the bits of statistics.h over count
// types, batches and float modes, and operands that nobody checked before.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "aux_loss/aux_loss.h"
#include "core/numerics.h"
#include "statistics/statistics.h"
#include "statistics/statistics_cpu.h"
#include "tests/cpp/ffi_mock.h"
#include "tests/cpp/handler_call.h"
#include "tests/cpp/runtime_float_mode.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

using testing::Array;
using testing::ExpectRefused;
using testing::ExpectUntouched;
using testing::HandlerCall;
using testing::Outcome;
using testing::RunningPool;
using testing::RuntimeFloatMode;
using ::xla::ffi::DataType;
using Floats = std::vector<float>;

template <class T>
std::vector<T> RandomCounts(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<T> counts;
  for (int64_t i = 0; i < size; ++i) counts.push_back(static_cast<T>(random() % 5000));
  return counts;
}

Floats RandomFloats(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values;
  for (int64_t i = 0; i < size; ++i) values.push_back(normal(random));
  return values;
}

DataType TypeOf(int32_t) { return DataType::S32; }
DataType TypeOf(int64_t) { return DataType::S64; }
DataType TypeOf(float) { return DataType::F32; }

HandlerCall StatsCall(const Array& counts, int64_t batch, int64_t experts) {
  return {RoutingStatsCpu,
          {counts},
          {Array(DataType::F32, {batch, experts}), Array(DataType::F32, {batch, 4}),
           Array(DataType::S32, {batch})},
          {}};
}

HandlerCall UpdateCall(const Array& bias, const Array& counts, const Array& rate, int64_t batch,
                       int64_t experts) {
  return {ExpertBiasUpdateCpu, {bias, counts, rate}, {Array(DataType::F32, {batch, experts})}, {}};
}

template <class T>
class StatisticsFfiTest : public ::testing::Test {};

using CountTypes = ::testing::Types<int32_t, int64_t, float>;
TYPED_TEST_SUITE(StatisticsFfiTest, CountTypes);

// Each operand is batched or shared.
TYPED_TEST(StatisticsFfiTest, HasTheBitsOfStatisticsH) {
  for (const int64_t batch : {0, 1, 3}) {
    for (const int64_t experts : {1, 8, 130}) {
      for (int batched = 0; batched < 8; ++batched) {
        const int64_t bias_items = batched & 1 ? batch : 1;
        const int64_t count_items = batched & 2 ? batch : 1;
        const int64_t rate_items = batched & 4 ? batch : 1;
        const auto counts = RandomCounts<TypeParam>(count_items * experts, 1);
        const Floats bias = RandomFloats(bias_items * experts, 2);
        const Floats rate = RandomFloats(rate_items, 3);
        Floats load(batch * experts), summary(batch * 4), updated(batch * experts);
        std::vector<int32_t> dead(batch);
        for (int64_t item = 0; item < batch; ++item) {
          const AuxLossCounts item_counts = {
              CountType::kInt32, counts.data() + (batched & 2 ? item * experts : 0), false};
          ComputeStats<TypeParam>({item_counts, 1, experts, load.data() + item * experts,
                                   summary.data() + item * 4, dead.data() + item},
                                  0);
          ComputeUpdate<TypeParam>({bias.data() + (batched & 1 ? item * experts : 0), false,
                                    item_counts, rate.data() + (batched & 4 ? item : 0), false, 1,
                                    experts, updated.data() + item * experts},
                                   0);
        }
        const Array count_array(TypeOf(TypeParam{}), {count_items, experts}, counts);
        HandlerCall stats = StatsCall(count_array, batch, experts);
        const Outcome outcome = stats.Run();
        ASSERT_TRUE(outcome.ok()) << outcome.message;
        EXPECT_TRUE(stats.results[0] == Array(DataType::F32, {batch, experts}, load));
        EXPECT_TRUE(stats.results[1] == Array(DataType::F32, {batch, 4}, summary));
        EXPECT_TRUE(stats.results[2] == Array(DataType::S32, {batch}, dead));
        HandlerCall update =
            UpdateCall(Array(DataType::F32, {bias_items, experts}, bias), count_array,
                       Array(DataType::F32, {rate_items}, rate), batch, experts);
        const Outcome update_outcome = update.Run();
        ASSERT_TRUE(update_outcome.ok()) << update_outcome.message;
        EXPECT_TRUE(update.results[0] == Array(DataType::F32, {batch, experts}, updated));
      }
    }
  }
}

// Subnormal results, which the runtime's mode would flush.
TEST(FloatModeTest, RuntimeModeDoesNotReachABit) {
  const Floats counts = {0x1p-149f, 3 * 0x1p-149f, 1.0f, 0.0f};
  HandlerCall stats = StatsCall(Array(DataType::F32, {1, 4}, counts), 1, 4);
  HandlerCall update = UpdateCall(
      Array(DataType::F32, {1, 4}, Floats{0x1p-149f, -0x1p-149f, 0x1p-140f, 0.0f}),
      Array(DataType::F32, {1, 4}, counts), Array(DataType::F32, {1}, Floats{0x1p-145f}), 1, 4);
  for (HandlerCall* call : {&stats, &update}) {
    ASSERT_TRUE(call->Run().ok());
    const std::vector<Array> ieee = call->results;
    EXPECT_EQ(std::fpclassify(ieee[0].Values<float>()[0]), FP_SUBNORMAL);
    const RuntimeFloatMode mode;
    ASSERT_TRUE(call->Run().ok());
    EXPECT_TRUE(RuntimeFloatMode::IsSet()) << "the handler changed its caller's float mode";
    EXPECT_TRUE(call->results == ieee);
  }
}

// ---- Operands that do not fit.

HandlerCall SmallStats() { return StatsCall(Array(DataType::S32, {3, 8}), 3, 8); }
HandlerCall SmallUpdate() {
  return UpdateCall(Array(DataType::F32, {3, 8}), Array(DataType::S32, {3, 8}),
                    Array(DataType::F32, {3}), 3, 8);
}

// `call` with the operand or result `at` in each of the types.
void ExpectEachRefused(const HandlerCall& valid, std::vector<Array> HandlerCall::* arrays,
                       size_t at, const std::vector<Array>& others,
                       const std::vector<std::string>& parts) {
  for (const Array& other : others) {
    HandlerCall call = valid;
    (call.*arrays)[at] = other;
    ExpectRefused(call, parts);
  }
}

std::vector<Array> Shapes(DataType type, const std::vector<std::vector<int64_t>>& shapes) {
  std::vector<Array> arrays;
  for (const std::vector<int64_t>& dims : shapes) arrays.push_back(Array(type, dims));
  return arrays;
}

TEST(RefusalTest, Stats) {
  const HandlerCall call = SmallStats();
  const auto operands = &HandlerCall::operands, results = &HandlerCall::results;
  EXPECT_TRUE(HandlerCall(call).Run().ok());
  ExpectEachRefused(
      call, operands, 0,
      {Array(DataType::U32, {3, 8}), Array(DataType::F64, {3, 8}), Array(DataType::BF16, {3, 8})},
      {"routing_stats: dtype of tokens_per_expert: got ", "wanted S32, S64 or F32"});
  ExpectEachRefused(
      call, operands, 0, Shapes(DataType::S32, {{}, {7}, {2, 8}, {3, 7}, {0, 8}}),
      {"routing_stats: shape of tokens_per_expert: got [", "wanted [..., 8] of 1 or 3 items"});
  ExpectEachRefused(call, results, 0, {Array(DataType::F64, {3, 8}), Array(DataType::S32, {3, 8})},
                    {"routing_stats: load: got ", "wanted F32"});
  ExpectEachRefused(
      call, results, 0, Shapes(DataType::F32, {{}, {8}, {3, 0}, {3, 8, 1}}),
      {"routing_stats: load: got [", "wanted [batch, num_experts] of at least 1 expert"});
  ExpectEachRefused(call, results, 0, Shapes(DataType::F32, {{2, 8}, {3, 9}}),
                    {"routing_stats: shape of tokens_per_expert: got [3, 8]"});
  ExpectEachRefused(call, results, 1, {Array(DataType::F64, {3, 4}), Array(DataType::S32, {3, 4})},
                    {"routing_stats: summary: got ", "wanted F32"});
  ExpectEachRefused(call, results, 1, Shapes(DataType::F32, {{}, {4}, {3, 3}, {3, 5}, {2, 4}}),
                    {"routing_stats: summary: got [", "wanted [3 or 1, 4]"});
  ExpectEachRefused(call, results, 1, Shapes(DataType::F32, {{1, 4}}),
                    {"routing_stats: summary: got [1, 4], wanted 3 items"});
  ExpectEachRefused(call, results, 2, {Array(DataType::S64, {3}), Array(DataType::F32, {3})},
                    {"routing_stats: dead: got ", "wanted S32"});
  ExpectEachRefused(call, results, 2, Shapes(DataType::S32, {{}, {2}, {0}, {3, 1}}),
                    {"routing_stats: dead: got [", "wanted [3 or 1]"});
}

TEST(RefusalTest, Update) {
  const HandlerCall call = SmallUpdate();
  const auto operands = &HandlerCall::operands, results = &HandlerCall::results;
  EXPECT_TRUE(HandlerCall(call).Run().ok());
  ExpectEachRefused(call, operands, 0,
                    {Array(DataType::F64, {3, 8}), Array(DataType::BF16, {3, 8})},
                    {"expert_bias_update: dtype of expert_bias: got ", "wanted F32"});
  ExpectEachRefused(call, operands, 0, Shapes(DataType::F32, {{}, {8}, {2, 8}, {3, 7}, {0, 8}}),
                    {"expert_bias_update: shape of expert_bias: got [", "wanted [3 or 1, 8]"});
  ExpectEachRefused(call, operands, 1, {Array(DataType::U32, {3, 8}), Array(DataType::F16, {3, 8})},
                    {"expert_bias_update: dtype of tokens_per_expert: got "});
  ExpectEachRefused(call, operands, 1, Shapes(DataType::S32, {{}, {7}, {2, 8}}),
                    {"expert_bias_update: shape of tokens_per_expert: got ["});
  ExpectEachRefused(call, operands, 2, {Array(DataType::F64, {3}), Array(DataType::S32, {3})},
                    {"expert_bias_update: dtype of rate: got ", "wanted F32"});
  ExpectEachRefused(call, operands, 2, Shapes(DataType::F32, {{}, {2}, {0}, {3, 1}}),
                    {"expert_bias_update: shape of rate: got [", "wanted [3 or 1]"});
  ExpectEachRefused(call, results, 0, {Array(DataType::F64, {3, 8}), Array(DataType::S32, {3, 8})},
                    {"expert_bias_update: result: got ", "wanted F32"});
  ExpectEachRefused(call, results, 0, Shapes(DataType::F32, {{}, {8}, {3, 0}, {3, 8, 1}}),
                    {"expert_bias_update: result: got [", "of at least 1 expert"});
}

// Operands as untrusted input: an answer, never a crash.
TEST(UntrustedInputTest, RandomChangesHaveAnAnswer) {
  constexpr DataType kTypes[] = {DataType::F32, DataType::S32, DataType::S64, DataType::F64};
  constexpr int64_t kDims[] = {0, 1, 3, 4, 8};
  constexpr unsigned char kBytes[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
  std::mt19937 random(4);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    HandlerCall call = random() % 2 == 0 ? SmallStats() : SmallUpdate();
    for (uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
      auto& arrays = random() % 3 == 0 ? call.results : call.operands;
      Array& array = arrays[random() % arrays.size()];
      if (random() % 2 == 0) {
        std::vector<int64_t> dims;
        for (uint32_t rank = random() % 4; rank > 0; --rank) {
          dims.push_back(kDims[random() % std::size(kDims)]);
        }
        array = Array(kTypes[random() % std::size(kTypes)], dims);
      }
      array.Fill(kBytes[random() % std::size(kBytes)]);
    }
    RunningPool none(0);
    const Outcome outcome = call.Run(none);
    if (!outcome.ok()) ExpectUntouched(call, outcome);
    accepted += outcome.ok() ? 1 : 0;
  }
  EXPECT_GT(accepted, 1000);  // or the changes are too wild to reach the arithmetic
}

}  // namespace
}  // namespace jax_moe_det
