// The CPU handlers of the router, called as XLA calls them: bits over all pools and float modes,
// and operands and attributes that nobody checked before.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/numerics.h"
#include "tests/cpp/ffi_mock.h"
#include "tests/cpp/handler_call.h"
#include "tests/cpp/runtime_float_mode.h"
#include "tests/cpp/topk_router_oracle.h"
#include "topk_router/topk_router.h"
#include "topk_router/topk_router_cpu.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

using testing::Array;
using testing::Attributes;
using testing::BusyPool;
using testing::ExpectedRow;
using testing::ExpectFailed;
using testing::ExpectRefused;
using testing::ExpectUntouched;
using testing::Floats;
using testing::HandlerCall;
using testing::Outcome;
using testing::RefusingPool;
using testing::RunningPool;
using testing::RuntimeFloatMode;
using testing::SameBits;
using testing::TaskPool;
using ::xla::ffi::DataType;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kMinInt64 = std::numeric_limits<int64_t>::min();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr ScoreKind kKinds[] = {ScoreKind::kSoftmaxAfterTopk, ScoreKind::kSoftmax,
                                ScoreKind::kSigmoid, ScoreKind::kSqrtSoftplus};

struct Shape {
  int64_t batch, tokens, experts;
  int64_t rows() const { return batch * tokens; }
};

TopkRouterOptions Options(ScoreKind kind, int topk) {
  TopkRouterOptions options = {};
  options.kind = kind;
  options.topk = topk;
  options.num_groups = options.group_topk = options.group_values = 1;
  options.scaling_factor = 2.5f;
  options.eps = 1e-20f;
  return options;
}

TopkRouterOptions AuxOptions(ScoreKind kind, int topk) {
  TopkRouterOptions options = Options(kind, topk);
  options.aux_scores = true;
  options.scaling_factor = 1.0f;
  return options;
}

Floats RandomFloats(int64_t n, uint32_t seed, float scale = 3.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values;
  for (int64_t i = 0; i < n; ++i) values.push_back(normal(random) * scale);
  return values;
}

std::vector<unsigned char> RandomMask(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> mask;
  for (int64_t i = 0; i < n; ++i) mask.push_back(random() % 4 != 0);
  return mask;
}

Array Logits(const Shape& shape, const Floats& values) {
  return {DataType::F32, {shape.batch, shape.tokens, shape.experts}, values};
}

Array Map(const Shape& shape, bool bitmap) {
  return {bitmap ? DataType::U8 : DataType::PRED,
          {shape.batch, shape.tokens, bitmap ? (shape.experts + 7) / 8 : shape.experts}};
}

Attributes CommonAttributes(const TopkRouterOptions& options) {
  return {{"score_kind", static_cast<int64_t>(options.kind)},
          {"aux_scores", options.aux_scores},
          {"topk", int64_t{options.topk}},
          {"scaling_factor", options.scaling_factor},
          {"eps", options.eps}};
}

// Without bias and mask.
HandlerCall Fwd(const Shape& shape, const Floats& logits, const TopkRouterOptions& options) {
  Attributes attributes = CommonAttributes(options);
  attributes["num_groups"] = int64_t{options.num_groups};
  attributes["group_topk"] = int64_t{options.group_topk};
  attributes["group_values"] = int64_t{options.group_values};
  return {TopkRouterFwdCpu,
          {Logits(shape, logits)},
          {Logits(shape, Floats(logits.size())), Map(shape, options.bitmap)},
          attributes};
}

HandlerCall RandomFwd(const Shape& shape, const TopkRouterOptions& options) {
  return Fwd(shape, RandomFloats(shape.rows() * shape.experts, 1), options);
}

// Of the map of `fwd`, whose results are those of a call; aux scores have no map.
HandlerCall BwdOf(const HandlerCall& fwd, const Shape& shape, const Floats& d_out,
                  const TopkRouterOptions& options) {
  HandlerCall call = {TopkRouterBwdCpu,
                      {fwd.operands[0], Logits(shape, d_out)},
                      {Logits(shape, Floats(d_out.size()))},
                      CommonAttributes(options)};
  if (!options.aux_scores) call.operands.push_back(fwd.results[1]);
  return call;
}

HandlerCall RandomBwd(const Shape& shape, const TopkRouterOptions& options) {
  HandlerCall fwd = RandomFwd(shape, options);
  const Outcome outcome = fwd.Run();
  EXPECT_TRUE(outcome.ok()) << outcome.message;
  return BwdOf(fwd, shape, RandomFloats(shape.rows() * shape.experts, 2), options);
}

// ---- Bits.

Floats RowOf(const Floats& values, int64_t row, int64_t experts) {
  return {values.begin() + row * experts, values.begin() + (row + 1) * experts};
}

// Forward and backward against the oracle, row by row. Empty bias and mask: none; `bias` is
// [batch, experts].
void ExpectOracle(const Shape& shape, const TopkRouterOptions& options, const Floats& bias,
                  const std::vector<unsigned char>& mask) {
  const Floats logits = RandomFloats(shape.rows() * shape.experts, 3);
  const Floats d_out = RandomFloats(shape.rows() * shape.experts, 4);
  HandlerCall fwd = Fwd(shape, logits, options);
  if (!bias.empty()) {
    fwd.operands.push_back(Array(DataType::F32, {shape.batch, shape.experts}, bias));
  }
  const Array mask_array(DataType::PRED, {shape.batch, shape.tokens},
                         mask.empty() ? std::vector<unsigned char>(shape.rows(), 1) : mask);
  if (!mask.empty()) fwd.operands.push_back(mask_array);
  RunningPool pool(2);
  const Outcome outcome = fwd.Run(pool);
  ASSERT_TRUE(outcome.ok()) << outcome.message;
  HandlerCall bwd = BwdOf(fwd, shape, d_out, options);
  if (!mask.empty() && options.aux_scores) bwd.operands.push_back(mask_array);
  const Outcome bwd_outcome = bwd.Run(pool);
  ASSERT_TRUE(bwd_outcome.ok()) << bwd_outcome.message;

  const Floats out = fwd.results[0].Values<float>();
  const std::vector<uint8_t> map = fwd.results[1].Values<uint8_t>();
  const Floats d_logits = bwd.results[0].Values<float>();
  const int64_t map_bytes = MapBytes(static_cast<int>(shape.experts), options.bitmap);
  for (int64_t row = 0; row < shape.rows(); ++row) {
    const bool valid = mask.empty() || mask[row] != 0;
    const Floats x = RowOf(logits, row, shape.experts);
    const Floats row_bias =
        bias.empty() ? Floats() : RowOf(bias, row / shape.tokens, shape.experts);
    ExpectedRow want = testing::ExpectedForward(x, row_bias, valid, options);
    std::vector<uint8_t> want_map(map_bytes);
    for (const int e : want.chosen) {
      want_map[options.bitmap ? e / 8 : e] += options.bitmap ? 1 << (e % 8) : 1;
    }
    ASSERT_TRUE(std::equal(want_map.begin(), want_map.end(), map.begin() + row * map_bytes))
        << "map of row " << row;
    std::sort(want.chosen.begin(), want.chosen.end());
    const Floats want_d_logits =
        valid ? testing::ExpectedBackward(x, RowOf(d_out, row, shape.experts), want.chosen, options)
              : Floats(shape.experts, 0.0f);
    for (int64_t e = 0; e < shape.experts; ++e) {
      ASSERT_PRED2(SameBits, out[row * shape.experts + e], want.out[e]) << row << ", " << e;
      ASSERT_PRED2(SameBits, d_logits[row * shape.experts + e], want_d_logits[e])
          << row << ", " << e;
    }
  }
}

// Tasks are runs of 64 rows, and items end inside of them.
TEST(TopkRouterTest, HasTheBitsOfTheDocumentedOrder) {
  for (const Shape& shape :
       {Shape{1, 0, 8}, Shape{0, 5, 8}, Shape{1, 1, 1}, Shape{1, 5, 8}, Shape{1, 64, 20},
        Shape{1, 65, 64}, Shape{3, 50, 60}, Shape{3, 0, 8}, Shape{3, 7, 130}}) {
    for (const ScoreKind kind : kKinds) {
      for (const bool aux : {false, true}) {
        if (aux && kind == ScoreKind::kSoftmaxAfterTopk) continue;
        for (const bool bitmap : {false, true}) {
          const int topk = static_cast<int>(std::min<int64_t>(shape.experts, 3));
          TopkRouterOptions options = aux ? AuxOptions(kind, topk) : Options(kind, topk);
          options.bitmap = bitmap;
          const Floats bias = aux ? Floats() : RandomFloats(shape.batch * shape.experts, 5, 0.1f);
          const std::vector<unsigned char> mask = RandomMask(shape.rows(), 6);
          ExpectOracle(shape, options, {}, {});
          ExpectOracle(shape, options, bias, {});
          ExpectOracle(shape, options, {}, mask);
          ExpectOracle(shape, options, bias, mask);
          if (::testing::Test::HasFatalFailure()) return;
          if (aux || shape.experts % 4 != 0) continue;
          options.num_groups = 4;
          options.group_topk = 3;
          options.group_values = 2;
          ExpectOracle(shape, options, bias, mask);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

// The whole range of experts; scratch memory is of the largest size.
TEST(TopkRouterTest, LargestRows) {
  for (const int topk : {1, 64, 65, kMaxExperts}) {
    ExpectOracle({1, 3, kMaxExperts}, Options(ScoreKind::kSigmoid, topk), {}, {});
    ExpectOracle({1, 3, kMaxExperts}, Options(ScoreKind::kSoftmax, topk), {}, {});
  }
}

// 16-bit logits: the results of float32 logits of the same values, rounded once.
template <class Logit>
void ExpectRounded(DataType type, const TopkRouterOptions& options) {
  const Shape shape = {2, 40, 24};
  const Floats logits = RandomFloats(shape.rows() * shape.experts, 7);
  const Floats d_out = RandomFloats(shape.rows() * shape.experts, 8);
  std::vector<Logit> narrow_logits, narrow_d_out;
  Floats wide_logits, wide_d_out;
  for (size_t i = 0; i < logits.size(); ++i) {
    RoundTo(logits[i], &narrow_logits.emplace_back());
    wide_logits.push_back(ToFloat(narrow_logits[i]));
    RoundTo(d_out[i], &narrow_d_out.emplace_back());
    wide_d_out.push_back(ToFloat(narrow_d_out[i]));
  }
  const std::vector<int64_t> dims = {shape.batch, shape.tokens, shape.experts};
  const auto round = [&](const Array& wide) {
    std::vector<Logit> narrow;
    for (const float value : wide.Values<float>()) RoundTo(value, &narrow.emplace_back());
    return Array(type, dims, narrow);
  };

  HandlerCall wide = Fwd(shape, wide_logits, options);
  HandlerCall narrow = wide;
  narrow.operands[0] = Array(type, dims, narrow_logits);
  if (!options.aux_scores) narrow.results[0] = Array(type, dims);
  ASSERT_TRUE(wide.Run().ok());
  const Outcome outcome = narrow.Run();
  ASSERT_TRUE(outcome.ok()) << outcome.message;
  EXPECT_TRUE(narrow.results[1] == wide.results[1]);
  EXPECT_TRUE(narrow.results[0] == (options.aux_scores ? wide.results[0] : round(wide.results[0])));

  HandlerCall wide_bwd = BwdOf(wide, shape, options.aux_scores ? d_out : wide_d_out, options);
  HandlerCall narrow_bwd = wide_bwd;
  narrow_bwd.operands[0] = narrow.operands[0];
  if (!options.aux_scores) narrow_bwd.operands[1] = Array(type, dims, narrow_d_out);
  narrow_bwd.results[0] = Array(type, dims);
  ASSERT_TRUE(wide_bwd.Run().ok());
  const Outcome bwd_outcome = narrow_bwd.Run();
  ASSERT_TRUE(bwd_outcome.ok()) << bwd_outcome.message;
  EXPECT_TRUE(narrow_bwd.results[0] == round(wide_bwd.results[0]));
}

TEST(TopkRouterTest, NarrowLogitsRoundOnce) {
  for (const ScoreKind kind : kKinds) {
    ExpectRounded<BFloat16>(DataType::BF16, Options(kind, 3));
    ExpectRounded<Float16>(DataType::F16, Options(kind, 3));
    if (kind == ScoreKind::kSoftmaxAfterTopk) continue;
    ExpectRounded<BFloat16>(DataType::BF16, AuxOptions(kind, 3));
    ExpectRounded<Float16>(DataType::F16, AuxOptions(kind, 3));
  }
}

// `single` or, if batched, the three items' values one after the other.
template <class T>
Array Operand(DataType type, bool batched, std::vector<int64_t> core,
              const std::vector<std::vector<T>>& items) {
  std::vector<T> values = items[0];
  for (size_t b = 1; batched && b < items.size(); ++b) {
    values.insert(values.end(), items[b].begin(), items[b].end());
  }
  core.insert(core.begin(), batched ? static_cast<int64_t>(items.size()) : 1);
  return {type, core, values};
}

// Which operands are batched; the others are shared.
TEST(TopkRouterTest, BatchHasTheBitsOfSingleCalls) {
  constexpr int64_t kBatch = 3, kTokens = 50, kExperts = 20;
  const Shape one = {1, kTokens, kExperts};
  const Shape all = {kBatch, kTokens, kExperts};
  for (const TopkRouterOptions& options :
       {Options(ScoreKind::kSoftmaxAfterTopk, 3), Options(ScoreKind::kSigmoid, 3),
        AuxOptions(ScoreKind::kSigmoid, 3)}) {
    for (int batched = 0; batched < 16; ++batched) {
      const bool logits_batched = batched & 1, bias_batched = batched & 2;
      const bool mask_batched = batched & 4, d_out_batched = batched & 8;
      std::vector<Floats> logits, bias, d_out;
      std::vector<std::vector<unsigned char>> mask;
      std::vector<HandlerCall> singles, single_bwds;
      for (uint32_t b = 0; b < kBatch; ++b) {
        logits.push_back(RandomFloats(kTokens * kExperts, logits_batched ? b : 0));
        bias.push_back(RandomFloats(kExperts, bias_batched ? 10 + b : 10));
        mask.push_back(RandomMask(kTokens, mask_batched ? 20 + b : 20));
        d_out.push_back(RandomFloats(kTokens * kExperts, d_out_batched ? 30 + b : 30));
        HandlerCall single = Fwd(one, logits[b], options);
        if (!options.aux_scores) {
          single.operands.push_back(Array(DataType::F32, {1, kExperts}, bias[b]));
        }
        single.operands.push_back(Array(DataType::PRED, {1, kTokens}, mask[b]));
        ASSERT_TRUE(single.Run().ok());
        HandlerCall single_bwd = BwdOf(single, one, d_out[b], options);
        if (options.aux_scores) single_bwd.operands.push_back(single.operands.back());
        ASSERT_TRUE(single_bwd.Run().ok());
        singles.push_back(single);
        single_bwds.push_back(single_bwd);
      }
      HandlerCall call = Fwd(all, Floats(all.rows() * kExperts), options);
      call.operands = {Operand(DataType::F32, logits_batched, {kTokens, kExperts}, logits)};
      if (!options.aux_scores) {
        call.operands.push_back(Operand(DataType::F32, bias_batched, {kExperts}, bias));
      }
      call.operands.push_back(Operand(DataType::PRED, mask_batched, {kTokens}, mask));
      RunningPool pool(2);
      const Outcome outcome = call.Run(pool);
      ASSERT_TRUE(outcome.ok()) << outcome.message;

      HandlerCall bwd = BwdOf(call, all, Floats(all.rows() * kExperts), options);
      bwd.operands[1] = Operand(DataType::F32, d_out_batched, {kTokens, kExperts}, d_out);
      if (options.aux_scores) bwd.operands.push_back(call.operands.back());
      // The map is the forward's, and so shared where all that it depends on is.
      if (!options.aux_scores && batched % 8 == 0) bwd.operands[2] = singles[0].results[1];
      const Outcome bwd_outcome = bwd.Run(pool);
      ASSERT_TRUE(bwd_outcome.ok()) << bwd_outcome.message;

      Floats out, d_logits;
      std::vector<uint8_t> map;
      for (int64_t b = 0; b < kBatch; ++b) {
        const Floats item = singles[b].results[0].Values<float>();
        out.insert(out.end(), item.begin(), item.end());
        const std::vector<uint8_t> map_item = singles[b].results[1].Values<uint8_t>();
        map.insert(map.end(), map_item.begin(), map_item.end());
        const Floats bwd_item = single_bwds[b].results[0].Values<float>();
        d_logits.insert(d_logits.end(), bwd_item.begin(), bwd_item.end());
      }
      EXPECT_TRUE(call.results[0] == Logits(all, out)) << batched;
      EXPECT_EQ(call.results[1].Values<uint8_t>(), map) << batched;
      EXPECT_TRUE(bwd.results[0] == Logits(all, d_logits)) << batched;
    }
  }
}

TEST(TopkRouterTest, OptionalOperandsComeInAnyOrder) {
  const Shape shape = {1, 30, 8};
  HandlerCall call = RandomFwd(shape, Options(ScoreKind::kSigmoid, 2));
  const Array bias(DataType::F32, {1, 8}, RandomFloats(8, 9));
  const Array mask(DataType::PRED, {1, 30}, RandomMask(30, 10));
  call.operands = {call.operands[0], bias, mask};
  ASSERT_TRUE(call.Run().ok());
  const std::vector<Array> want = call.results;
  call.operands = {call.operands[0], mask, bias};
  ASSERT_TRUE(call.Run().ok());
  EXPECT_TRUE(call.results == want);
}

// A row's neighbours do not reach it, whatever they hold.
TEST(TopkRouterTest, RowsDoNotMeet) {
  const Shape shape = {1, 9, 16};
  for (const ScoreKind kind : kKinds) {
    const Floats logits = RandomFloats(9 * 16, 11);
    HandlerCall clean = Fwd(shape, logits, Options(kind, 3));
    Floats poisoned_logits = logits;
    for (int e = 0; e < 16; ++e) {
      poisoned_logits[1 * 16 + e] = -kInfinity;
      poisoned_logits[4 * 16 + e] = kNan;
      poisoned_logits[7 * 16 + e] = e == 3 ? kInfinity : 0.0f;
    }
    HandlerCall poisoned = Fwd(shape, poisoned_logits, Options(kind, 3));
    ASSERT_TRUE(clean.Run().ok());
    ASSERT_TRUE(poisoned.Run().ok());
    HandlerCall clean_bwd = BwdOf(clean, shape, Floats(9 * 16, 2.0f), Options(kind, 3));
    HandlerCall poisoned_bwd = BwdOf(poisoned, shape, Floats(9 * 16, 2.0f), Options(kind, 3));
    ASSERT_TRUE(clean_bwd.Run().ok());
    ASSERT_TRUE(poisoned_bwd.Run().ok());
    for (const int row : {0, 2, 3, 5, 6, 8}) {
      EXPECT_EQ(RowOf(poisoned.results[0].Values<float>(), row, 16),
                RowOf(clean.results[0].Values<float>(), row, 16));
      EXPECT_EQ(RowOf(poisoned_bwd.results[0].Values<float>(), row, 16),
                RowOf(clean_bwd.results[0].Values<float>(), row, 16));
    }
  }
}

// ---- Threads. Enough rows for several tasks and enough bytes for eight threads.

std::vector<HandlerCall> LargeCalls() {
  const Shape shape = {3, 347, 60};
  TopkRouterOptions bitmap = Options(ScoreKind::kSqrtSoftplus, 6);
  bitmap.bitmap = true;
  return {RandomFwd(shape, Options(ScoreKind::kSoftmax, 6)), RandomFwd(shape, bitmap),
          RandomFwd(shape, AuxOptions(ScoreKind::kSigmoid, 6)), RandomBwd(shape, bitmap),
          RandomBwd(shape, AuxOptions(ScoreKind::kSoftmax, 6))};
}

TEST(ThreadsTest, SameBitsOnEveryPool) {
  std::vector<std::unique_ptr<TaskPool>> pools;
  for (const int threads : {1, 2, 8}) pools.push_back(std::make_unique<RunningPool>(threads));
  pools.push_back(std::make_unique<BusyPool>(8));  // the caller does it all, tasks come late
  pools.push_back(std::make_unique<RefusingPool>(8));
  for (HandlerCall& call : LargeCalls()) {
    RunningPool none(0);
    ASSERT_TRUE(call.Run(none).ok());
    const std::vector<Array> want = call.results;
    for (size_t i = 0; i < pools.size(); ++i) {
      for (int repeat = 0; repeat < 5; ++repeat) {
        ASSERT_TRUE(call.Run(*pools[i]).ok());
        EXPECT_TRUE(call.results == want) << "pool " << i;
      }
    }
  }
}

// Handlers run beside each other on one pool, as with several host devices.
TEST(ThreadsTest, SameBitsBesideOtherCalls) {
  std::vector<HandlerCall> calls = LargeCalls();
  std::vector<std::vector<Array>> want;
  for (HandlerCall& call : calls) {
    ASSERT_TRUE(call.Run().ok());
    want.push_back(call.results);
  }
  RunningPool pool(2);
  std::vector<std::thread> callers;
  for (HandlerCall& call : calls) {
    callers.emplace_back([&call, &pool] {
      for (int repeat = 0; repeat < 5; ++repeat) call.Run(pool);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (size_t i = 0; i < calls.size(); ++i) EXPECT_TRUE(calls[i].results == want[i]) << i;
}

// ---- Float mode.

// Subnormal logits, bias, scores, weights and gradients, which the runtime's mode would flush.
std::vector<HandlerCall> SubnormalCalls() {
  const Shape shape = {1, 600, 24};
  const int64_t n = shape.rows() * shape.experts;
  std::vector<HandlerCall> calls;
  for (const ScoreKind kind : kKinds) {
    TopkRouterOptions options = Options(kind, 3);
    options.scaling_factor = 0x1p-130f;
    HandlerCall fwd = Fwd(shape, RandomFloats(n, 12, 0x1p-140f), options);
    EXPECT_TRUE(fwd.Run().ok());
    calls.push_back(BwdOf(fwd, shape, RandomFloats(n, 13), options));
    fwd.operands.push_back(Array(DataType::F32, {1, 24}, RandomFloats(24, 14, 0x1p-140f)));
    calls.push_back(fwd);
  }
  return calls;
}

TEST(FloatModeTest, RuntimeModeDoesNotReachABit) {
  for (HandlerCall& call : SubnormalCalls()) {
    RunningPool pool(4);
    ASSERT_TRUE(call.Run(pool).ok());
    const std::vector<Array> ieee = call.results;
    bool has_subnormal = false;
    for (const float value : ieee[0].Values<float>()) {
      has_subnormal |= std::fpclassify(value) == FP_SUBNORMAL;
    }
    EXPECT_TRUE(has_subnormal);
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

// Attributes are checked and used before a row's float mode is set: eps is subnormal here.
TEST(FloatModeTest, SubnormalsAreKept) {
  const RuntimeFloatMode mode;
  TopkRouterOptions options = Options(ScoreKind::kSigmoid, 2);
  options.eps = 0x1p-149f;
  HandlerCall fwd =
      Fwd({1, 2, 4}, {-1000, -1000, -1000, -1000, 0, 0x1p-149f, -0x1p-149f, 0}, options);
  ASSERT_TRUE(fwd.Run().ok());
  const Floats out = fwd.results[0].Values<float>();
  EXPECT_EQ(RowOf(out, 0, 4), Floats(4, 0.0f));  // not 0 / 0
  options = Options(ScoreKind::kSoftmaxAfterTopk, 1);
  fwd = Fwd({1, 1, 4}, {0, 0x1p-149f, 0x1p-148f, -0x1p-149f}, options);
  ASSERT_TRUE(fwd.Run().ok());
  EXPECT_EQ(fwd.results[1].Values<uint8_t>(), std::vector<uint8_t>({0, 0, 1, 0}));
}

// ---- Operands that do not fit.

HandlerCall SmallFwd() { return RandomFwd({3, 30, 8}, Options(ScoreKind::kSigmoid, 2)); }
HandlerCall SmallBwd() { return RandomBwd({3, 30, 8}, Options(ScoreKind::kSigmoid, 2)); }
HandlerCall SmallAuxFwd() { return RandomFwd({3, 30, 8}, AuxOptions(ScoreKind::kSigmoid, 2)); }
HandlerCall SmallAuxBwd() { return RandomBwd({3, 30, 8}, AuxOptions(ScoreKind::kSigmoid, 2)); }

void Replace(HandlerCall* call, size_t operand, Array array) {
  call->operands[operand] = std::move(array);
}

// What forward and backward check alike. `result`: the float result, with the logits' shape.
TEST(RefusalTest, LogitsAndResult) {
  const std::pair<HandlerCall, std::string> valid[] = {{SmallFwd(), "topk_router_fwd: "},
                                                       {SmallBwd(), "topk_router_bwd: "}};
  for (const auto& [valid_call, op] : valid) {
    HandlerCall call = valid_call;
    Replace(&call, 0, Array(DataType::F64, {3, 30, 8}));
    ExpectRefused(call, {op + "dtype of logits: got F64, wanted F32, BF16 or F16"});
    Replace(&call, 0, Array(DataType::S32, {3, 30, 8}));
    ExpectRefused(call, {op + "dtype of logits: got S32"});
    for (const std::vector<int64_t>& dims : std::vector<std::vector<int64_t>>{
             {}, {30, 8}, {2, 30, 8}, {0, 30, 8}, {3, 29, 8}, {3, 30, 7}, {3, 30, 8, 1}}) {
      Replace(&call, 0, Array(DataType::F32, dims));
      ExpectRefused(call, {op + "shape of logits: got [", "wanted [3 or 1, 30, 8]"});
    }
    call = valid_call;
    for (const std::vector<int64_t>& dims : std::vector<std::vector<int64_t>>{
             {}, {30, 8}, {1, 3, 30, 8}, {3, 30, 0}, {1, 1, kMaxExperts + 1}}) {
      call.results[0] = Array(DataType::F32, dims);
      ExpectRefused(call, {op + "shape of the result: got [",
                           "wanted [batch, num_tokens, num_experts] of 1 to 8192 experts"});
    }
    call.results[0] = Array(DataType::F32, {2, 30, 8});
    ExpectRefused(call, {op + "shape of logits: got [3, 30, 8], wanted [2 or 1, 30, 8]"});
  }
}

TEST(RefusalTest, FwdResults) {
  HandlerCall call = SmallFwd();
  call.results[0] = Array(DataType::F64, {3, 30, 8});
  ExpectRefused(call, {"topk_router_fwd: dtype of out: got F64, wanted F32"});
  call.results[0] = Array(DataType::BF16, {3, 30, 8});
  ExpectRefused(call, {"topk_router_fwd: dtype of out: got BF16, wanted F32"});
  call = SmallFwd();
  call.results[1] = Array(DataType::S32, {3, 30, 8});
  ExpectRefused(call, {"topk_router_fwd: dtype of routing_map: got S32, wanted PRED", "U8"});
  for (const std::vector<int64_t>& dims : std::vector<std::vector<int64_t>>{
           {}, {30, 8}, {3, 30, 1}, {3, 31, 8}, {2, 30, 8}, {3, 30, 8, 1}}) {
    call.results[1] = Array(DataType::PRED, dims);
    ExpectRefused(call, {"topk_router_fwd: shape of routing_map: got [", "[3 or 1, 30, 8]"});
  }
  call.results[1] = Array(DataType::U8, {3, 30, 8});  // a byte per expert where there are bits
  ExpectRefused(call, {"topk_router_fwd: shape of routing_map: got [3, 30, 8]", "30, 1]"});
  // An operand may be shared by the batch; a result is of all items.
  call.results[1] = Array(DataType::PRED, {1, 30, 8});
  ExpectRefused(call, {"topk_router_fwd: shape of routing_map: got [1, 30, 8], wanted 3 items"});
  // Aux scores are float32, whatever the logits are.
  call = SmallAuxFwd();
  call.operands[0] = Array(DataType::BF16, {3, 30, 8});
  EXPECT_TRUE(call.Run().ok());
  call.results[0] = Array(DataType::BF16, {3, 30, 8});
  ExpectRefused(call, {"topk_router_fwd: dtype of out: got BF16, wanted F32"});
}

TEST(RefusalTest, FwdOptionalOperands) {
  const HandlerCall valid = SmallFwd();
  for (const std::vector<int64_t>& dims :
       std::vector<std::vector<int64_t>>{{}, {8}, {1, 7}, {2, 8}, {0, 8}, {1, 1, 8}, {3, 30}}) {
    HandlerCall call = valid;
    call.operands.push_back(Array(DataType::F32, dims));
    ExpectRefused(call, {"topk_router_fwd: shape of expert_bias: got [", "wanted [3 or 1, 8]"});
  }
  for (const std::vector<int64_t>& dims :
       std::vector<std::vector<int64_t>>{{}, {30}, {1, 29}, {2, 30}, {0, 30}, {1, 1, 30}, {3, 8}}) {
    HandlerCall call = valid;
    call.operands.push_back(Array(DataType::PRED, dims));
    ExpectRefused(call, {"topk_router_fwd: shape of valid_mask: got [", "wanted [3 or 1, 30]"});
  }
  for (const DataType type : {DataType::BF16, DataType::F64, DataType::U8, DataType::S32}) {
    HandlerCall call = valid;
    call.operands.push_back(Array(type, {1, 8}));
    ExpectRefused(call, {"topk_router_fwd: dtype of an optional operand: got ",
                         "wanted F32 (expert_bias) or PRED (valid_mask)"});
  }
}

TEST(RefusalTest, BwdOperands) {
  const HandlerCall valid = SmallBwd();
  HandlerCall call = valid;
  Replace(&call, 1, Array(DataType::BF16, {3, 30, 8}));
  ExpectRefused(call, {"topk_router_bwd: dtype of d_out: got BF16, wanted F32"});
  for (const std::vector<int64_t>& dims :
       std::vector<std::vector<int64_t>>{{}, {30, 8}, {2, 30, 8}, {3, 30, 9}, {3, 1, 8}}) {
    Replace(&call, 1, Array(DataType::F32, dims));
    ExpectRefused(call, {"topk_router_bwd: shape of d_out: got [", "wanted [3 or 1, 30, 8]"});
  }
  call = valid;
  Replace(&call, 2, Array(DataType::S32, {3, 30, 8}));
  ExpectRefused(call, {"topk_router_bwd: dtype of routing_map: got S32"});
  Replace(&call, 2, Array(DataType::PRED, {3, 30, 1}));
  ExpectRefused(call, {"topk_router_bwd: shape of routing_map: got [3, 30, 1]"});
  Replace(&call, 2, Array(DataType::U8, {3, 30, 2}));
  ExpectRefused(call, {"topk_router_bwd: shape of routing_map: got [3, 30, 2]", "30, 1]"});
  Replace(&call, 2, Array(DataType::PRED, {3, 30}));  // a mask where the map is wanted
  ExpectRefused(call, {"topk_router_bwd: shape of routing_map: got [3, 30]"});
  call = valid;
  call.results[0] = Array(DataType::F64, {3, 30, 8});
  ExpectRefused(call, {"topk_router_bwd: dtype of d_logits: got F64, wanted F32"});
  call = valid;
  call.operands.pop_back();
  ExpectRefused(call, {"topk_router_bwd: optional operands: got 0, wanted a routing_map"});
  call = valid;
  call.operands.push_back(Array(DataType::PRED, {3, 30}));
  ExpectRefused(call, {"topk_router_bwd: optional operands: got 2, wanted a routing_map"});
  call = valid;
  call.operands = {call.operands[0]};
  ExpectFailed(call, "");
}

TEST(RefusalTest, BwdOperandsOfAuxScores) {
  const HandlerCall valid = SmallAuxBwd();
  HandlerCall call = valid;
  call.operands[0] = Array(DataType::F16, {3, 30, 8});
  call.results[0] = Array(DataType::F16, {3, 30, 8});
  EXPECT_TRUE(call.Run().ok());  // the cotangent stays float32
  Replace(&call, 1, Array(DataType::F16, {3, 30, 8}));
  ExpectRefused(call, {"topk_router_bwd: dtype of d_out: got F16, wanted F32"});
  call = valid;
  call.operands.push_back(Array(DataType::U8, {3, 30}));
  ExpectRefused(call, {"topk_router_bwd: dtype of valid_mask: got U8, wanted PRED"});
  Replace(&call, 2, Array(DataType::PRED, {3, 30, 8}));
  ExpectRefused(call, {"topk_router_bwd: shape of valid_mask: got [3, 30, 8]", "[3 or 1, 30]"});
  Replace(&call, 2, Array(DataType::PRED, {3, 29}));
  ExpectRefused(call, {"topk_router_bwd: shape of valid_mask: got [3, 29]", "[3 or 1, 30]"});
  Replace(&call, 2, Array(DataType::PRED, {3, 30}));
  call.operands.push_back(Array(DataType::PRED, {3, 30}));
  ExpectRefused(call, {"topk_router_bwd: optional operands: got 2, wanted at most a valid_mask"});
}

TEST(RefusalTest, CommonAttributes) {
  const std::pair<HandlerCall, std::string> valid[] = {{SmallFwd(), "topk_router_fwd: "},
                                                       {SmallBwd(), "topk_router_bwd: "}};
  for (const auto& [valid_call, op] : valid) {
    HandlerCall call = valid_call;
    for (const int64_t topk :
         {kMinInt64, int64_t{-1}, int64_t{0}, int64_t{9}, int64_t{1} << 32, kMaxInt64}) {
      call.attributes["topk"] = topk;
      ExpectRefused(call, {op + "topk: got " + std::to_string(topk) + ", wanted 1 to 8"});
    }
    call = valid_call;
    for (const int64_t kind : {kMinInt64, int64_t{-1}, int64_t{4}, int64_t{1} << 32, kMaxInt64}) {
      call.attributes["score_kind"] = kind;
      ExpectRefused(call, {op + "score_kind: got " + std::to_string(kind) + ", wanted 0 to 3"});
    }
    call = valid_call;
    for (const float scale : {kInfinity, -kInfinity, kNan}) {
      call.attributes["scaling_factor"] = scale;
      ExpectRefused(call, {op + "scaling_factor: got ", "wanted a finite number"});
    }
    call = valid_call;
    for (const float eps : {-1.0f, -0x1p-149f, kInfinity, -kInfinity, kNan}) {
      call.attributes["eps"] = eps;
      ExpectRefused(call, {op + "eps: got ", "wanted a finite number, at least 0"});
    }
    call = valid_call;
    call.attributes["extra"] = int64_t{1};
    ExpectRefused(call, {op + "number of attributes: got ", "wanted "});
  }
  HandlerCall call = SmallAuxFwd();
  call.attributes["score_kind"] = int64_t{0};
  ExpectRefused(call, {"topk_router_fwd: score_kind of aux scores: got 0, wanted 1 to 3"});
  call = SmallAuxBwd();
  call.attributes["score_kind"] = int64_t{0};
  ExpectRefused(call, {"topk_router_bwd: score_kind of aux scores: got 0, wanted 1 to 3"});
}

// The largest and smallest values that are taken.
TEST(RefusalTest, EdgesAreAccepted) {
  for (HandlerCall call : {SmallFwd(), SmallBwd()}) {
    for (const float scale : {std::numeric_limits<float>::max(),
                              std::numeric_limits<float>::lowest(), 0.0f, -0.0f, 0x1p-149f}) {
      call.attributes["scaling_factor"] = scale;
      EXPECT_TRUE(call.Run().ok()) << scale;
    }
    for (const float eps : {0.0f, -0.0f, 0x1p-149f, std::numeric_limits<float>::max()}) {
      call.attributes["eps"] = eps;
      EXPECT_TRUE(call.Run().ok()) << eps;
    }
    for (const int64_t topk : {1, 8}) {
      call.attributes["topk"] = topk;
      EXPECT_TRUE(call.Run().ok()) << topk;
    }
  }
}

TEST(RefusalTest, Groups) {
  HandlerCall call = SmallFwd();
  for (const int64_t groups : {kMinInt64, int64_t{-2}, int64_t{0}, int64_t{9}, kMaxInt64}) {
    call.attributes["num_groups"] = groups;
    ExpectRefused(
        call, {"topk_router_fwd: num_groups: got " + std::to_string(groups) + ", wanted 1 to 8"});
  }
  for (const int64_t groups : {3, 5, 6, 7}) {
    call.attributes["num_groups"] = groups;
    ExpectRefused(call, {"topk_router_fwd: num_groups: got " + std::to_string(groups),
                         "wanted a divisor of 8"});
  }
  call.attributes["num_groups"] = int64_t{4};
  call.attributes["topk"] = int64_t{5};  // three groups of two
  for (const int64_t kept : {kMinInt64, int64_t{0}, int64_t{2}, int64_t{5}, kMaxInt64}) {
    call.attributes["group_topk"] = kept;
    ExpectRefused(call,
                  {"topk_router_fwd: group_topk: got " + std::to_string(kept) + ", wanted 3 to 4"});
  }
  call.attributes["group_topk"] = int64_t{3};
  for (const int64_t values : {kMinInt64, int64_t{-1}, int64_t{0}, int64_t{3}, kMaxInt64}) {
    call.attributes["group_values"] = values;
    ExpectRefused(
        call, {"topk_router_fwd: group_values: got " + std::to_string(values) + ", wanted 1 to 2"});
  }
  call.attributes["group_values"] = int64_t{2};
  EXPECT_TRUE(call.Run().ok());
}

// A missing attribute, also with another one in its place, and each one with another type.
TEST(RefusalTest, NamesAndTypesOfAttributes) {
  for (const HandlerCall& valid : {SmallFwd(), SmallBwd(), SmallAuxFwd(), SmallAuxBwd()}) {
    for (const auto& [name, value] : valid.attributes) {
      HandlerCall call = valid;
      call.attributes.erase(name);
      ExpectRefused(call, {"number of attributes: got "});
      call.attributes["extra"] = value;
      ExpectFailed(call, name);
      const Attributes others = {{"1", int64_t{1}}, {"2", 1.0}, {"3", 1.0f}, {"4", true}};
      for (const auto& [unused, other] : others) {
        if (other.index() == value.index()) continue;
        call = valid;
        call.attributes[name] = other;
        ExpectFailed(call, "type");
      }
    }
  }
}

// ---- Attributes and operands as untrusted input: an answer, never a crash.

std::vector<HandlerCall> ValidCalls() {
  const Shape shape = {3, 30, 8};
  TopkRouterOptions grouped = Options(ScoreKind::kSoftmax, 2);
  grouped.num_groups = 4;
  grouped.group_topk = 2;
  grouped.bitmap = true;
  HandlerCall fwd = RandomFwd(shape, grouped);
  fwd.operands.push_back(Array(DataType::F32, {1, 8}));
  fwd.operands.push_back(Array(DataType::PRED, {3, 30}));
  HandlerCall aux_bwd = SmallAuxBwd();
  aux_bwd.operands.push_back(Array(DataType::PRED, {1, 30}));
  return {SmallFwd(), fwd, SmallAuxFwd(), SmallBwd(), RandomBwd(shape, grouped), aux_bwd};
}

testing::Attributes::mapped_type RandomAttribute(const testing::Attributes::mapped_type& like,
                                                 std::mt19937& random) {
  constexpr int64_t kIntegers[] = {kMinInt64, -1, 0, 1, 2, 3, 4, 7, 8, 9, 1 << 30, kMaxInt64};
  constexpr float kFloats[] = {
      -kInfinity, -1.0f, -0.0f, 0.0f, 0x1p-149f, 2.5f, std::numeric_limits<float>::max(),
      kInfinity,  kNan};
  switch (random() % 20 == 0 ? random() % 4 : like.index()) {
    case 0:
      return kIntegers[random() % std::size(kIntegers)];
    case 1:
      return 1.0;
    case 2:
      return kFloats[random() % std::size(kFloats)];
    default:
      return random() % 2 == 0;
  }
}

Array RandomArray(std::mt19937& random) {
  constexpr DataType kTypes[] = {DataType::F32,  DataType::BF16, DataType::F16, DataType::S32,
                                 DataType::PRED, DataType::U8,   DataType::F64};
  constexpr int64_t kDims[] = {0, 1, 1, 2, 3, 3, 8, 8, 8, 30, 30};
  std::vector<int64_t> dims;
  for (uint32_t rank = random() % 5; rank > 0; --rank) dims.push_back(kDims[random() % 11]);
  if (random() % 2 == 0) dims = {random() % 2 == 0 ? 1 : 3, 30, random() % 2 == 0 ? 1 : 8};
  Array array(kTypes[random() % std::size(kTypes)], dims);
  // 1 is a valid bool too; 0xff bytes are NaN, and a map with every bit.
  const unsigned char bytes[] = {0x00, 0x01, 0xff};
  array.Fill(bytes[random() % (array.type() == DataType::PRED ? 2 : 3)]);
  return array;
}

// Valid calls with a few things changed. Arrays own exactly their bytes, so that a sanitizer sees
// a check that let too much through.
TEST(UntrustedInputTest, RandomChangesHaveAnAnswer) {
  std::mt19937 random(15);
  const std::vector<HandlerCall> valid = ValidCalls();
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    HandlerCall call = valid[random() % valid.size()];
    for (uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
      switch (random() % 5) {
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
          attribute->second = RandomAttribute(attribute->second, random);
        }
      }
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
