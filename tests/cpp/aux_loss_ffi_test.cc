// The CPU handlers of the auxiliary loss, called as XLA calls them: bits over all pools and float
// modes, and operands and attributes that nobody checked before.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "aux_loss/aux_loss_cpu.h"
#include "core/numerics.h"
#include "tests/cpp/aux_loss_oracle.h"
#include "tests/cpp/ffi_mock.h"
#include "tests/cpp/float_format.h"
#include "tests/cpp/runtime_float_mode.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

using testing::Array;
using testing::Attributes;
using testing::BusyPool;
using testing::Matrix;
using testing::Outcome;
using testing::RefusingPool;
using testing::RunningPool;
using testing::RuntimeFloatMode;
using testing::SameBits;
using testing::TaskPool;
using ::xla::ffi::DataType;

constexpr int64_t kTopk = 2;
constexpr double kCoeff = 0.01;
constexpr double kTotalIsOperand = -1.0;
constexpr int64_t kMinInt64 = std::numeric_limits<int64_t>::min();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

// One call of a handler; tests change a valid one.
struct HandlerCall {
  XLA_FFI_Handler* handler;
  std::vector<Array> operands;
  std::vector<Array> results;
  Attributes attributes;

  Outcome Run(TaskPool& pool) {
    for (Array& result : results) result.Fill(0xa5);
    return testing::Call(handler, pool, operands, results, attributes);
  }

  Outcome Run() {
    RunningPool pool(1);
    return Run(pool);
  }

  float Loss(int64_t item = 0) const { return results[0].Values<float>()[item]; }
};

Attributes LossAttributes(int64_t num_experts, double total) {
  return {{"num_experts", num_experts},
          {"topk", kTopk},
          {"coeff", kCoeff},
          {"total_num_tokens", total}};
}

Matrix RandomScores(int64_t rows, int64_t columns, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> unit(0.0f, 1.0f);
  Matrix scores = {rows, columns, std::vector<float>(rows * columns)};
  for (float& score : scores.values) score = unit(random) * scale;
  return scores;
}

std::vector<int32_t> RandomCounts(int64_t columns, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> counts;
  for (int64_t e = 0; e < columns; ++e) counts.push_back(random() % 10000);
  return counts;
}

std::vector<unsigned char> RandomMask(int64_t rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> mask;
  for (int64_t r = 0; r < rows; ++r) mask.push_back(random() % 4 != 0);
  return mask;
}

Array Scores(const Matrix& scores) {
  return {DataType::F32, {scores.num_rows, scores.num_columns}, scores.values};
}

Array Counts(const std::vector<int32_t>& counts) {
  return {DataType::S32, {static_cast<int64_t>(counts.size())}, counts};
}

Array Mask(const std::vector<unsigned char>& mask) {
  return {DataType::PRED, {static_cast<int64_t>(mask.size())}, mask};
}

HandlerCall Fwd(const Matrix& scores, const std::vector<int32_t>& counts) {
  return {AuxLossFwdCpu,
          {Scores(scores), Counts(counts)},
          {Array(DataType::F32, {}), Array(DataType::F32, {256})},
          LossAttributes(scores.num_columns, static_cast<double>(scores.num_rows))};
}

HandlerCall RandomFwd(int64_t rows, int64_t columns, float scale = 1.0f) {
  return Fwd(RandomScores(rows, columns, 1, scale), RandomCounts(columns, 2));
}

// A shard of `slots` whole slots.
HandlerCall RandomPartials(int64_t rows_per_slot, int64_t slots, int64_t columns,
                           float scale = 1.0f) {
  return {AuxLossPartialsCpu,
          {Scores(RandomScores(rows_per_slot * slots, columns, 3, scale)),
           Counts(RandomCounts(columns, 4))},
          {Array(DataType::F32, {slots})},
          {{"rows_per_slot", rows_per_slot}}};
}

HandlerCall Final(const std::vector<float>& partials, int64_t num_experts, double total) {
  return {AuxLossFinalCpu,
          {Array(DataType::F32, {static_cast<int64_t>(partials.size())}, partials)},
          {Array(DataType::F32, {})},
          LossAttributes(num_experts, total)};
}

HandlerCall Bwd(const std::vector<int32_t>& counts, float d_loss, double total,
                DataType type = DataType::F32) {
  const int64_t columns = static_cast<int64_t>(counts.size());
  return {AuxLossBwdCpu,
          {Counts(counts), Array(DataType::F32, {}, std::vector<float>{d_loss})},
          {Array(type, {columns})},
          LossAttributes(columns, total)};
}

// ---- Bits.

void ExpectOracle(const HandlerCall& call, const Matrix& scores, const std::vector<bool>& mask,
                  const std::vector<int32_t>& counts, int64_t num_experts, double total) {
  const std::vector<float> want =
      testing::ExpectedPartials(scores, mask, std::vector<double>(counts.begin(), counts.end()));
  const std::vector<float> got = call.results[1].Values<float>();
  for (size_t slot = 0; slot < want.size(); ++slot) {
    EXPECT_PRED2(SameBits, got[slot], want[slot]) << "slot " << slot;
  }
  EXPECT_PRED2(SameBits, call.Loss(),
               testing::ExpectedLoss(want, num_experts, kTopk, kCoeff, total));
}

TEST(AuxLossFwdTest, HasTheBitsOfTheDocumentedOrder) {
  for (const int64_t rows : {0, 1, 255, 256, 257, 1000, 3000}) {
    for (const int64_t columns : {2, 20, 60, 300}) {
      const Matrix scores = RandomScores(rows, columns, 5);
      const std::vector<int32_t> counts = RandomCounts(columns, 6);
      HandlerCall call = Fwd(scores, counts);
      ASSERT_TRUE(call.Run().ok());
      ExpectOracle(call, scores, {}, counts, columns, static_cast<double>(rows));

      const std::vector<unsigned char> mask = RandomMask(rows, 7);
      call.operands.push_back(Mask(mask));
      ASSERT_TRUE(call.Run().ok());
      ExpectOracle(call, scores, {mask.begin(), mask.end()}, counts, columns,
                   static_cast<double>(rows));
    }
  }
}

TEST(AuxLossFwdTest, FoldedLayoutCountsExpertsNotColumns) {
  const Matrix scores = RandomScores(500, 24, 8);
  const std::vector<int32_t> counts = RandomCounts(24, 9);
  HandlerCall call = Fwd(scores, counts);
  call.attributes["num_experts"] = int64_t{8};
  ASSERT_TRUE(call.Run().ok());
  ExpectOracle(call, scores, {}, counts, 8, 500.0);
}

// Enough bytes for eight tasks, or the pool would not be asked.
TEST(AuxLossFwdTest, SameBitsOnEveryPool) {
  HandlerCall call = RandomFwd(4099, 40);
  call.operands.push_back(Mask(RandomMask(4099, 10)));
  RunningPool none(0);
  ASSERT_TRUE(call.Run(none).ok());
  const std::vector<Array> want = call.results;

  std::vector<std::unique_ptr<TaskPool>> pools;
  for (const int threads : {1, 2, 8}) pools.push_back(std::make_unique<RunningPool>(threads));
  pools.push_back(std::make_unique<BusyPool>(8));  // the caller does it all, tasks come late
  pools.push_back(std::make_unique<RefusingPool>(8));
  for (size_t i = 0; i < pools.size(); ++i) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      ASSERT_TRUE(call.Run(*pools[i]).ok());
      EXPECT_TRUE(call.results == want) << "pool " << i;
    }
  }
}

// Handlers run beside each other on one pool, as with several host devices.
TEST(AuxLossFwdTest, SameBitsBesideOtherCalls) {
  HandlerCall first = RandomFwd(4099, 40);
  ASSERT_TRUE(first.Run().ok());
  const std::vector<Array> want = first.results;
  RunningPool pool(2);
  std::vector<std::thread> callers;
  std::vector<HandlerCall> calls(4, first);
  for (HandlerCall& call : calls) {
    callers.emplace_back([&call, &pool] {
      for (int repeat = 0; repeat < 5; ++repeat) call.Run(pool);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const HandlerCall& call : calls) EXPECT_TRUE(call.results == want);
}

TEST(AuxLossFwdTest, TotalAsOperandHasTheBitsOfTheAttribute) {
  HandlerCall fixed = RandomFwd(300, 8);
  fixed.attributes["total_num_tokens"] = 4096.0;
  ASSERT_TRUE(fixed.Run().ok());
  HandlerCall traced = fixed;
  traced.attributes["total_num_tokens"] = kTotalIsOperand;
  const Array totals[] = {
      Array(DataType::S32, {}, std::vector<int32_t>{4096}),
      Array(DataType::S64, {}, std::vector<int64_t>{4096}),
      Array(DataType::U32, {1}, std::vector<uint32_t>{4096}),
      Array(DataType::U64, {1, 1}, std::vector<uint64_t>{4096}),
  };
  for (const Array& total : totals) {
    traced.operands.resize(2, total);
    traced.operands.push_back(total);
    ASSERT_TRUE(traced.Run().ok());
    EXPECT_TRUE(traced.results == fixed.results);
    // The optional operands come in any order.
    HandlerCall masked = traced;
    masked.operands.push_back(Mask(std::vector<unsigned char>(300, 1)));
    ASSERT_TRUE(masked.Run().ok());
    EXPECT_TRUE(masked.results == fixed.results);
  }
}

TEST(AuxLossFwdTest, BatchHasTheBitsOfSingleCalls) {
  constexpr int64_t kBatch = 3, kRows = 700, kColumns = 10;
  // Which of scores, counts and mask are batched; the others are shared.
  for (int batched = 0; batched < 8; ++batched) {
    std::vector<float> all_scores;
    std::vector<int32_t> all_counts;
    std::vector<unsigned char> all_masks;
    std::vector<HandlerCall> singles;
    for (uint32_t b = 0; b < kBatch; ++b) {
      const Matrix scores = RandomScores(kRows, kColumns, batched & 1 ? b : 0);
      const std::vector<int32_t> counts = RandomCounts(kColumns, batched & 2 ? b : 0);
      const std::vector<unsigned char> mask = RandomMask(kRows, batched & 4 ? b : 0);
      singles.push_back(Fwd(scores, counts));
      singles.back().operands.push_back(Mask(mask));
      if (b == 0 || batched & 1) {
        all_scores.insert(all_scores.end(), scores.values.begin(), scores.values.end());
      }
      if (b == 0 || batched & 2) all_counts.insert(all_counts.end(), counts.begin(), counts.end());
      if (b == 0 || batched & 4) all_masks.insert(all_masks.end(), mask.begin(), mask.end());
    }
    HandlerCall call = singles[0];
    call.operands = {
        Array(DataType::F32, {batched & 1 ? kBatch : 1, 1, kRows, kColumns}, all_scores),
        Array(DataType::S32, {batched & 2 ? kBatch : 1, kColumns}, all_counts),
        Array(DataType::PRED, {batched & 4 ? kBatch : 1, kRows}, all_masks)};
    call.results = {Array(DataType::F32, {kBatch}), Array(DataType::F32, {kBatch, 256})};
    RunningPool pool(2);
    const Outcome outcome = call.Run(pool);
    ASSERT_TRUE(outcome.ok()) << outcome.message;
    for (int64_t b = 0; b < kBatch; ++b) {
      ASSERT_TRUE(singles[b].Run().ok());
      EXPECT_PRED2(SameBits, call.Loss(b), singles[b].Loss()) << batched;
    }
  }
}

TEST(AuxLossFwdTest, SwitchedOffIsZeroWhateverTheOperandsHold) {
  HandlerCall call = RandomFwd(300, 8, std::numeric_limits<float>::quiet_NaN());
  ASSERT_TRUE(call.Run().ok());
  EXPECT_PRED2(SameBits, call.Loss(), std::nanf(""));
  call.attributes["coeff"] = 0.0;
  ASSERT_TRUE(call.Run().ok());
  EXPECT_PRED2(SameBits, call.Loss(), 0.0f);
  call.attributes["coeff"] = kCoeff;
  call.attributes["total_num_tokens"] = 0.0;
  ASSERT_TRUE(call.Run().ok());
  EXPECT_PRED2(SameBits, call.Loss(), 0.0f);
}

// Shards of whole slots, then the fold: the bits of one device.
TEST(AuxLossPartialsTest, ShardsThenFinalHaveTheBitsOfOneCall) {
  constexpr int64_t kRowsPerSlot = 5, kColumns = 12, kShards = 4;
  const Matrix scores = RandomScores(kRowsPerSlot * 256, kColumns, 11);
  const std::vector<int32_t> counts = RandomCounts(kColumns, 12);
  HandlerCall whole = Fwd(scores, counts);
  ASSERT_TRUE(whole.Run().ok());

  std::vector<float> partials;
  for (int64_t shard = 0; shard < kShards; ++shard) {
    const auto begin = scores.values.begin() + shard * kRowsPerSlot * 64 * kColumns;
    const Matrix rows = {
        kRowsPerSlot * 64, kColumns, {begin, begin + kRowsPerSlot * 64 * kColumns}};
    HandlerCall call = {AuxLossPartialsCpu,
                        {Scores(rows), Counts(counts)},
                        {Array(DataType::F32, {64})},
                        {{"rows_per_slot", kRowsPerSlot}}};
    ASSERT_TRUE(call.Run().ok());
    const std::vector<float> part = call.results[0].Values<float>();
    partials.insert(partials.end(), part.begin(), part.end());
  }
  EXPECT_EQ(partials, whole.results[1].Values<float>());
  HandlerCall fold = Final(partials, kColumns, kRowsPerSlot * 256);
  ASSERT_TRUE(fold.Run().ok());
  EXPECT_PRED2(SameBits, fold.Loss(), whole.Loss());
}

TEST(AuxLossFinalTest, MissingSlotsAreZero) {
  std::vector<float> partials = {1.0f, 2.0f, 3.0f};
  HandlerCall few = Final(partials, 8, 100.0);
  partials.resize(256, 0.0f);
  HandlerCall all = Final(partials, 8, 100.0);
  ASSERT_TRUE(few.Run().ok());
  ASSERT_TRUE(all.Run().ok());
  EXPECT_PRED2(SameBits, few.Loss(), all.Loss());
}

TEST(AuxLossBwdTest, RowIsTheProductRoundedOnce) {
  const std::vector<int32_t> counts = {0, 1, 777, 1 << 24, (1 << 24) + 1};
  const auto expected = [&](size_t e, const testing::FloatFormat& format) {
    return testing::ExpectedGradient(5, kTopk, kCoeff, 900.0, counts[e], -0.3f, format);
  };
  HandlerCall call = Bwd(counts, -0.3f, 900.0);
  ASSERT_TRUE(call.Run().ok());
  for (size_t e = 0; e < counts.size(); ++e) {
    EXPECT_EQ(call.results[0].Values<float>()[e], expected(e, testing::kFloat32Format));
  }
  call = Bwd(counts, -0.3f, 900.0, DataType::BF16);
  ASSERT_TRUE(call.Run().ok());
  for (size_t e = 0; e < counts.size(); ++e) {
    EXPECT_EQ(testing::Decode(call.results[0].Values<uint16_t>()[e], testing::kBFloat16Format),
              expected(e, testing::kBFloat16Format));
  }
  call = Bwd(counts, -0.3f, 900.0, DataType::F16);
  ASSERT_TRUE(call.Run().ok());
  for (size_t e = 0; e < counts.size(); ++e) {
    EXPECT_EQ(testing::Decode(call.results[0].Values<uint16_t>()[e], testing::kFloat16Format),
              expected(e, testing::kFloat16Format));
  }
}

TEST(AuxLossBwdTest, BatchHasTheBitsOfSingleCalls) {
  const std::vector<std::vector<int32_t>> counts = {{1, 2, 3}, {40, 50, 60}};
  const std::vector<float> d_loss = {0.5f, -7.0f};
  const std::vector<int64_t> totals = {100, 200};
  HandlerCall batch = {AuxLossBwdCpu,
                       {Array(DataType::S32, {2, 3}, std::vector<int32_t>{1, 2, 3, 40, 50, 60}),
                        Array(DataType::F32, {2}, d_loss), Array(DataType::S64, {2}, totals)},
                       {Array(DataType::F32, {2, 3})},
                       LossAttributes(3, kTotalIsOperand)};
  ASSERT_TRUE(batch.Run().ok());
  std::vector<float> want;
  for (size_t b = 0; b < 2; ++b) {
    HandlerCall single = Bwd(counts[b], d_loss[b], static_cast<double>(totals[b]));
    ASSERT_TRUE(single.Run().ok());
    const std::vector<float> row = single.results[0].Values<float>();
    want.insert(want.end(), row.begin(), row.end());
  }
  EXPECT_EQ(batch.results[0].Values<float>(), want);
}

// ---- Float mode.

// Subnormal inputs, sums and results, which the runtime's mode would flush.
std::vector<HandlerCall> SubnormalCalls() {
  constexpr float kSubnormal = 0x1p-140f;
  HandlerCall fwd = RandomFwd(4099, 40, kSubnormal);
  fwd.attributes["coeff"] = 0x1p-4;
  HandlerCall partials = RandomPartials(17, 256, 40, kSubnormal);
  partials.operands[1] = Counts(std::vector<int32_t>(40, 3));
  HandlerCall final_sum = Final(std::vector<float>(256, kSubnormal), 8, 16.0);
  HandlerCall bwd = Bwd({1, 2, 3, 4}, kSubnormal, 1.0);
  HandlerCall bwd_bfloat16 = Bwd({1, 2, 3, 4}, 0x1p-126f, 1.0, DataType::BF16);
  return {fwd, partials, final_sum, bwd, bwd_bfloat16};
}

TEST(FloatModeTest, RuntimeModeDoesNotReachABit) {
  for (HandlerCall& call : SubnormalCalls()) {
    RunningPool pool(4);
    ASSERT_TRUE(call.Run(pool).ok());
    const std::vector<Array> ieee = call.results;
    const std::vector<Array> zeros(1, Array(DataType::F32, {}));
    EXPECT_FALSE(ieee[0] == zeros[0]);
    {
      const RuntimeFloatMode mode;
      ASSERT_TRUE(call.Run(pool).ok());
      EXPECT_TRUE(RuntimeFloatMode::IsSet()) << "the handler changed its caller's float mode";
      RunningPool none(0);
      HandlerCall alone = call;
      ASSERT_TRUE(alone.Run(none).ok());
      EXPECT_TRUE(RuntimeFloatMode::IsSet()) << "the handler changed its caller's float mode";
      EXPECT_TRUE(alone.results == ieee);
    }
    EXPECT_TRUE(call.results == ieee);
    EXPECT_TRUE(pool.JoinAndCheckFloatMode()) << "a task changed its thread's float mode";
  }
}

TEST(FloatModeTest, SubnormalsAreKept) {
  const RuntimeFloatMode mode;
  HandlerCall bwd = Bwd({1, 2, 3, 4}, 0x1p-140f, 1.0);
  bwd.attributes["coeff"] = 0.5;  // C = 4 * 0.5 / 2
  ASSERT_TRUE(bwd.Run().ok());
  const std::vector<uint32_t> want = {0x200, 0x400, 0x600, 0x800};  // units of 2^-149
  EXPECT_EQ(bwd.results[0].Values<uint32_t>(), want);
}

// ---- Operands that do not fit.

// Every message names the op and the operand, says what was given and what is needed.
void ExpectRefused(HandlerCall call, const std::vector<std::string>& parts) {
  const Outcome outcome = call.Run();
  EXPECT_EQ(outcome.code, XLA_FFI_Error_Code_INVALID_ARGUMENT) << outcome.message;
  for (const std::string& part : parts) {
    EXPECT_NE(outcome.message.find(part), std::string::npos) << part << " in " << outcome.message;
  }
  for (const Array& result : call.results) {
    Array untouched = result;
    untouched.Fill(0xa5);
    EXPECT_TRUE(result == untouched) << "a refused call wrote a result: " << outcome.message;
  }
}

TEST(RefusalTest, Workspace) {
  HandlerCall call = RandomFwd(300, 8);
  call.results[1] = Array(DataType::F32, {255});
  ExpectRefused(call, {"aux_loss_fwd", "workspace", "F32[255]", "1020 bytes", "1024 bytes"});
  call.results[1] = Array(DataType::F32, {257});
  ExpectRefused(call, {"workspace", "F32[257]", "1028 bytes", "1024 bytes"});
  call.results[1] = Array(DataType::F64, {256});
  ExpectRefused(call, {"workspace", "F64[256]", "2048 bytes", "F32", "1024 bytes"});
  call.results[1] = Array(DataType::F32, {});
  ExpectRefused(call, {"workspace", "F32[]"});
  call.results[1] = Array(DataType::F32, {2, 256});
  ExpectRefused(call, {"workspace", "F32[2, 256]", "of 1 items"});
}

TEST(RefusalTest, FwdOperands) {
  const HandlerCall valid = RandomFwd(300, 8);
  HandlerCall call = valid;
  call.operands[0] = Array(DataType::F64, {300, 8});
  ExpectRefused(call, {"aux_loss_fwd: dtype of probs: got F64", "F32, BF16 or F16"});
  call.operands[0] = Array(DataType::F32, {300});
  ExpectRefused(call, {"shape of probs: got [300]"});
  call.operands[0] = Array(DataType::F32, {2, 300, 8});
  ExpectRefused(call, {"shape of probs: got [2, 300, 8]", "1 items"});
  call = valid;
  call.operands[1] = Array(DataType::S32, {7});
  ExpectRefused(call, {"shape of tokens_per_expert: got [7]", "[..., 8]"});
  call.operands[1] = Array(DataType::S32, {});
  ExpectRefused(call, {"shape of tokens_per_expert: got []"});
  call.operands[1] = Array(DataType::U32, {8});
  ExpectRefused(call, {"dtype of tokens_per_expert: got U32", "S32, S64 or F32"});
  call = valid;
  call.operands.push_back(Array(DataType::PRED, {299}));
  ExpectRefused(call, {"shape of valid_mask: got [299]", "[..., 300]"});
  call.operands[2] = Array(DataType::F32, {});
  ExpectRefused(call, {"dtype of an optional operand: got F32"});
  call.operands[2] = Array(DataType::S32, {2});
  ExpectRefused(call, {"shape of total_num_tokens: got [2]"});
  call = valid;
  call.results[0] = Array(DataType::F64, {});
  ExpectRefused(call, {"dtype of the loss: got F64"});
  call = valid;
  call.attributes["total_num_tokens"] = kTotalIsOperand;
  ExpectRefused(call, {"total_num_tokens", "neither"});
  call = valid;
  call.operands.pop_back();
  EXPECT_FALSE(call.Run().ok());
  call = valid;
  call.attributes.erase("topk");
  EXPECT_FALSE(call.Run().ok());
  call = valid;
  call.attributes["topk"] = 2.0;  // a double where an integer is bound
  EXPECT_FALSE(call.Run().ok());
}

TEST(RefusalTest, FwdAttributes) {
  HandlerCall call = RandomFwd(300, 8);
  for (const int64_t topk : {kMinInt64, int64_t{-1}, int64_t{0}, int64_t{9}, kMaxInt64}) {
    call.attributes["topk"] = topk;
    ExpectRefused(call, {"aux_loss_fwd: topk: got " + std::to_string(topk), "1 to 8"});
  }
  call.attributes["topk"] = kTopk;
  for (const int64_t experts :
       {kMinInt64, int64_t{-8}, int64_t{-1}, int64_t{0}, int64_t{3}, int64_t{16}, kMaxInt64}) {
    call.attributes["num_experts"] = experts;
    ExpectRefused(call, {"num_experts: got " + std::to_string(experts), "divisor of the 8"});
  }
  call.attributes["num_experts"] = int64_t{8};
  for (const double total : {-2.0, -0.5, -1e300, -std::numeric_limits<double>::infinity()}) {
    call.attributes["total_num_tokens"] = total;
    ExpectRefused(call, {"total_num_tokens: got -", "at least 0"});
  }
}

TEST(RefusalTest, Partials) {
  HandlerCall call = RandomPartials(5, 6, 8);
  for (const int64_t rows : {kMinInt64, int64_t{-1}, int64_t{0}}) {
    call.attributes["rows_per_slot"] = rows;
    ExpectRefused(call, {"aux_loss_partials: rows_per_slot: got " + std::to_string(rows)});
  }
  for (const int64_t rows : {int64_t{1}, int64_t{4}, int64_t{6}, kMaxInt64}) {
    call.attributes["rows_per_slot"] = rows;
    ExpectRefused(call, {"partials: got F32[6]"});
  }
  call = RandomPartials(1, 257, 8);
  ExpectRefused(call, {"slots of one shard: got 257", "at most 256"});
  call = RandomPartials(5, 6, 8);
  call.results[0] = Array(DataType::F32, {});
  ExpectRefused(call, {"shape of partials: got []"});
  call = RandomPartials(5, 6, 8);
  call.operands.push_back(Array(DataType::S32, {}));  // no N here
  ExpectRefused(call, {"dtype of an optional operand: got S32"});
}

TEST(RefusalTest, Final) {
  HandlerCall call = Final(std::vector<float>(257), 8, 1.0);
  ExpectRefused(call, {"aux_loss_final: shape of partials: got [257]"});
  call = Final(std::vector<float>(256), 8, 1.0);
  call.operands.push_back(Array(DataType::PRED, {256}));  // no mask here
  ExpectRefused(call, {"dtype of an optional operand: got PRED"});
  call = Final(std::vector<float>(256), 8, 1.0);
  call.operands[0] = Array(DataType::F64, {256});
  ExpectRefused(call, {"partials: got F64[256]"});
  call.operands[0] = Array(DataType::F32, {});
  ExpectRefused(call, {"shape of partials: got []"});
}

TEST(RefusalTest, Bwd) {
  const HandlerCall valid = Bwd({1, 2, 3, 4}, 1.0f, 100.0);
  HandlerCall call = valid;
  call.operands[1] = Array(DataType::F64, {});
  ExpectRefused(call, {"aux_loss_bwd: type of d_loss: got F64[]"});
  call.operands[1] = Array(DataType::F32, {2});
  ExpectRefused(call, {"type of d_loss: got F32[2]", "1 items"});
  call = valid;
  call.operands[0] = Array(DataType::S32, {5});
  ExpectRefused(call, {"shape of tokens_per_expert: got [5]", "[..., 4]"});
  call = valid;
  call.results[0] = Array(DataType::F64, {4});
  ExpectRefused(call, {"type of the row: got F64[4]"});
  call.results[0] = Array(DataType::F32, {});
  ExpectRefused(call, {"type of the row: got F32[]"});
}

// ---- Attributes and operands as untrusted input: an answer, never a crash.

void ExpectAnswer(HandlerCall call) {
  const Outcome outcome = call.Run();
  EXPECT_TRUE(outcome.ok() || outcome.code == XLA_FFI_Error_Code_INVALID_ARGUMENT)
      << outcome.message;
}

std::vector<HandlerCall> ValidCalls() {
  HandlerCall masked = RandomFwd(30, 8);
  masked.operands.push_back(Mask(RandomMask(30, 13)));
  HandlerCall traced = RandomFwd(30, 8);
  traced.operands.push_back(Array(DataType::S64, {}, std::vector<int64_t>{30}));
  return {RandomFwd(30, 8),
          masked,
          traced,
          RandomPartials(5, 6, 8),
          Final(std::vector<float>(256, 1.0f), 8, 100.0),
          Bwd({1, 2, 3, 4, 5, 6, 7, 8}, 1.0f, 100.0)};
}

constexpr int64_t kIntegers[] = {kMinInt64, kMinInt64 + 1, -257,     -1, 0, 1, 2, 3, 8, 30, 257,
                                 1 << 30,   kMaxInt64 - 1, kMaxInt64};
constexpr double kDoubles[] = {-std::numeric_limits<double>::infinity(),
                               -std::numeric_limits<double>::max(),
                               -1.0,
                               -0.0,
                               0.0,
                               std::numeric_limits<double>::denorm_min(),
                               0.5,
                               30.0,
                               std::numeric_limits<double>::max(),
                               std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()};

// The attributes of each name, over every value of its type.
TEST(UntrustedInputTest, EveryAttributeValueHasAnAnswer) {
  for (const HandlerCall& valid : ValidCalls()) {
    for (const auto& [name, value] : valid.attributes) {
      HandlerCall call = valid;
      if (std::holds_alternative<int64_t>(value)) {
        for (const int64_t integer : kIntegers) {
          call.attributes[name] = integer;
          ExpectAnswer(call);
        }
      } else {
        for (const double number : kDoubles) {
          call.attributes[name] = number;
          ExpectAnswer(call);
        }
      }
    }
  }
}

Array RandomArray(std::mt19937& random) {
  constexpr DataType kTypes[] = {DataType::F32, DataType::BF16, DataType::F16, DataType::S32,
                                 DataType::S64, DataType::PRED, DataType::U32, DataType::U64,
                                 DataType::F64, DataType::U8};
  constexpr int64_t kDims[] = {0, 1, 1, 2, 3, 6, 8, 8, 30, 30, 256};
  std::vector<int64_t> dims;
  for (uint32_t rank = random() % 4; rank > 0; --rank) dims.push_back(kDims[random() % 11]);
  Array array(kTypes[random() % 10], dims);
  // 1 is a valid bool too; 0xff bytes are NaN, -1 and the largest unsigned.
  const unsigned char bytes[] = {0x00, 0x01, 0xff};
  array.Fill(bytes[random() % (array.type() == DataType::PRED ? 2 : 3)]);
  return array;
}

// Valid calls with a few things changed. Arrays own exactly their bytes, so that a sanitizer sees
// a check that let too much through.
TEST(UntrustedInputTest, RandomChangesHaveAnAnswer) {
  std::mt19937 random(14);
  const std::vector<HandlerCall> valid = ValidCalls();
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    HandlerCall call = valid[random() % valid.size()];
    for (uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
      switch (random() % 4) {
        case 0:
          call.operands[random() % call.operands.size()] = RandomArray(random);
          break;
        case 1:
          call.results[random() % call.results.size()] = RandomArray(random);
          break;
        case 2:
          call.operands.push_back(RandomArray(random));
          break;
        default: {
          auto attribute = call.attributes.begin();
          std::advance(attribute, random() % call.attributes.size());
          if (std::holds_alternative<int64_t>(attribute->second)) {
            attribute->second = kIntegers[random() % std::size(kIntegers)];
          } else {
            attribute->second = kDoubles[random() % std::size(kDoubles)];
          }
        }
      }
    }
    RunningPool none(0);
    const Outcome outcome = call.Run(none);
    EXPECT_TRUE(outcome.ok() || outcome.code == XLA_FFI_Error_Code_INVALID_ARGUMENT)
        << outcome.message;
    accepted += outcome.ok() ? 1 : 0;
  }
  EXPECT_GT(accepted, 1000);  // or the changes are too wild to reach the arithmetic
}

}  // namespace
}  // namespace jax_moe_det
