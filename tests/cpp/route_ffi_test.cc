// The CPU handlers of the router step, called as XLA calls them: the bits of route.h over all
// dtypes, batches, pools and float modes, and operands and attributes that nobody checked before.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aux_loss/aux_loss.h"
#include "core/numerics.h"
#include "core/slots.h"
#include "route/route.h"
#include "route/route_cpu.h"
#include "tests/cpp/ffi_mock.h"
#include "tests/cpp/handler_call.h"
#include "tests/cpp/router_rows.h"
#include "tests/cpp/runtime_float_mode.h"
#include "topk_router/topk_router.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

using testing::Array;
using testing::Attributes;
using testing::BusyPool;
using testing::ExpectFailed;
using testing::ExpectRefused;
using testing::ExpectUntouched;
using testing::Floats;
using testing::HandlerCall;
using testing::kInfinity;
using testing::kKinds;
using testing::kNan;
using testing::Options;
using testing::Outcome;
using testing::RandomValues;
using testing::RefusingPool;
using testing::Row;
using testing::RunningPool;
using testing::RuntimeFloatMode;
using testing::TaskPool;
using testing::Values;
using ::xla::ffi::DataType;

constexpr double kTotalIsOperand = -1.0;
constexpr double kAuxCoeff = 0.01;
constexpr double kZCoeff = 0.003;
constexpr int64_t kMinInt64 = std::numeric_limits<int64_t>::min();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

DataType TypeOf(float) { return DataType::F32; }
DataType TypeOf(BFloat16) { return DataType::BF16; }
DataType TypeOf(Float16) { return DataType::F16; }

// One operand: an item for each of the batch, or one for all; or none.
template <class T>
struct Operand {
  bool present = false;
  bool batched = false;
  std::vector<int64_t> core;
  std::vector<T> values;

  int64_t ItemSize() const {
    int64_t size = 1;
    for (const int64_t dim : core) size *= dim;
    return size;
  }
  const T* Item(int64_t item) const {
    return present ? values.data() + (batched ? item * ItemSize() : 0) : nullptr;
  }
  Array ToArray(DataType type, int64_t batch) const {
    std::vector<int64_t> dims = core;
    dims.insert(dims.begin(), batched ? batch : 1);
    return {type, dims, values};
  }
};

// What the calls of a routing have in common.
struct Settings {
  int64_t batch, tokens;
  int experts;
  TopkRouterOptions options;
  bool plain = false;
  double aux_coeff = kAuxCoeff;
  double z_coeff = kZCoeff;
};

// Bits of which operands there are, and of which are batched.
enum : unsigned {
  kBias = 1,
  kMask = 2,
  kReplay = 4,
  kTotal = 8,
  kDWeights = 16,
  kDAuxLoss = 32,
  kDZLoss = 64,
  kLogits = 128,
  kAll = 255,
};

template <class Logit>
struct Operands {
  Operand<Logit> logits, d_weights;
  Operand<float> bias, d_aux_loss, d_z_loss;
  Operand<unsigned char> mask;
  Operand<int32_t> replay, total;
};

template <class Logit>
Operands<Logit> RandomOperands(const Settings& settings, unsigned present, unsigned batched,
                               uint32_t seed, Values values = Values::kRandom) {
  std::mt19937 random(seed);
  const int64_t n = settings.experts, topk = settings.options.topk;
  const auto operand = [&](auto* out, unsigned bit, std::vector<int64_t> core, auto value) {
    out->present = present & bit;
    out->batched = batched & bit;
    out->core = std::move(core);
    if (!out->present) return;
    const int64_t size = out->ItemSize() * (out->batched ? settings.batch : 1);
    for (int64_t i = 0; i < size; ++i) out->values.push_back(value());
  };
  const auto number = [&] { return RandomValues(values, 1, random)[0]; };
  const auto logit = [&] {
    Logit x;
    RoundTo(number(), &x);
    return x;
  };
  Operands<Logit> out;
  operand(&out.logits, kLogits, {settings.tokens, n}, logit);
  operand(&out.bias, kBias, {n}, number);
  operand(&out.mask, kMask, {settings.tokens},
          [&] { return static_cast<unsigned char>(random() % 4 != 0); });
  operand(&out.replay, kReplay, {settings.tokens, topk},
          [&] { return static_cast<int32_t>(random() % (n + 2)) - 1; });
  operand(&out.total, kTotal, {}, [&] { return static_cast<int32_t>(random() % 100); });
  operand(&out.d_weights, kDWeights, {settings.tokens, topk}, logit);
  operand(&out.d_aux_loss, kDAuxLoss, {}, number);
  operand(&out.d_z_loss, kDZLoss, {}, number);
  return out;
}

// ---- Direct calls of route.h, one item after the other.

template <class Logit>
struct Results {
  std::vector<Logit> weights;
  std::vector<int32_t> indices, counts, plain;
  Floats column_sums, z_partials, partials, aux_loss, z_loss;
  std::vector<Logit> d_logits;
};

template <class T>
void Append(std::vector<T>* to, const std::vector<T>& from) {
  to->insert(to->end(), from.begin(), from.end());
}

template <class Logit>
Results<Logit> Direct(const Settings& settings, const Operands<Logit>& operands, double total) {
  const auto scratch = std::make_unique<internal::RouteScratch>();
  const int n = settings.experts;
  const int topk = settings.options.topk;
  Results<Logit> all;
  for (int64_t item = 0; item < settings.batch; ++item) {
    const bool has_aux = settings.aux_coeff != 0.0, has_z = settings.z_coeff != 0.0;
    Results<Logit> one;
    one.weights.resize(settings.tokens * topk);
    one.indices.resize(settings.tokens * topk);
    one.counts.resize(n);
    one.plain.resize(settings.plain ? n : 0);
    one.column_sums.resize(kSlots * n);
    one.z_partials.resize(kSlots);
    one.aux_loss.resize(1);
    one.z_loss.resize(1);
    one.d_logits.resize(settings.tokens * n);

    const bool* mask = reinterpret_cast<const bool*>(operands.mask.Item(item));
    RoutePass pass = {};
    pass.logits = operands.logits.Item(item);
    pass.expert_bias = operands.bias.Item(item);
    pass.valid_mask = mask;
    pass.replay = operands.replay.Item(item);
    pass.batch = 1;
    pass.num_tokens = settings.tokens;
    pass.num_experts = n;
    pass.rows_per_slot = RowsPerSlot(settings.tokens);
    pass.num_slots = kSlots;
    pass.options = settings.options;
    pass.weights = one.weights.data();
    pass.indices = one.indices.data();
    pass.counts = one.counts.data();
    pass.plain = settings.plain ? one.plain.data() : nullptr;
    pass.column_sums = has_aux ? one.column_sums.data() : nullptr;
    pass.z_partials = has_z ? one.z_partials.data() : nullptr;
    for (int64_t slot = 0; slot < kSlots; ++slot) RouteSlot<Logit>(pass, 0, slot, scratch.get());

    const AuxLossCounts counts = {CountType::kInt32,
                                  settings.plain ? one.plain.data() : one.counts.data(), false};
    for (int slot = 0; slot < kSlots; ++slot) {
      one.partials.push_back(
          PartialFromColumnSums(one.column_sums.data() + slot * n, n, counts, 0));
    }
    TotalNumTokens tokens = {TotalType::kStatic, total, nullptr, false};
    if (operands.total.present) tokens = {TotalType::kInt32, 0.0, operands.total.Item(item), false};
    const AuxLossScale scale = {n, topk, settings.aux_coeff, tokens};
    RouteLosses({has_aux ? one.partials.data() : nullptr, has_z ? one.z_partials.data() : nullptr,
                 1, kSlots, scale, settings.z_coeff, one.aux_loss.data(), one.z_loss.data()},
                0);

    RouteBwd bwd = {};
    bwd.counts = counts;
    bwd.d_aux_loss = operands.d_aux_loss.Item(item);
    bwd.d_z_loss = operands.d_z_loss.Item(item);
    bwd.num_experts = n;
    bwd.scale = scale;
    bwd.z_loss_coeff = settings.z_coeff;
    const RouteCotangent cotangent = RouteCotangents(bwd, 0, scratch->aux);
    const Logit* d_weights = operands.d_weights.Item(item);
    for (int64_t t = 0; t < settings.tokens; ++t) {
      RouteBwdRow(operands.logits.Item(item) + t * n, one.indices.data() + t * topk,
                  d_weights == nullptr ? nullptr : d_weights + t * topk, mask == nullptr || mask[t],
                  cotangent, n, settings.options, &scratch->row, one.d_logits.data() + t * n);
    }
    Append(&all.weights, one.weights);
    Append(&all.indices, one.indices);
    Append(&all.counts, one.counts);
    Append(&all.plain, one.plain);
    Append(&all.column_sums, one.column_sums);
    Append(&all.z_partials, one.z_partials);
    Append(&all.partials, one.partials);
    Append(&all.aux_loss, one.aux_loss);
    Append(&all.z_loss, one.z_loss);
    Append(&all.d_logits, one.d_logits);
  }
  return all;
}

// ---- The same by the handlers.

Attributes ScoreAttributes(const TopkRouterOptions& options) {
  return {{"score_kind", static_cast<int64_t>(options.kind)},
          {"topk", int64_t{options.topk}},
          {"scaling_factor", options.scaling_factor},
          {"eps", options.eps}};
}

Attributes SelectionAttributes(const TopkRouterOptions& options) {
  Attributes attributes = ScoreAttributes(options);
  attributes["num_groups"] = int64_t{options.num_groups};
  attributes["group_topk"] = int64_t{options.group_topk};
  attributes["group_values"] = int64_t{options.group_values};
  return attributes;
}

void AddLossAttributes(const Settings& settings, double total, Attributes* attributes) {
  (*attributes)["aux_loss_coeff"] = settings.aux_coeff;
  (*attributes)["z_loss_coeff"] = settings.z_coeff;
  (*attributes)["total_num_tokens"] = total;
}

int64_t WorkspaceSize(const Settings& settings) {
  RouteWorkspace workspace = {nullptr, 0};
  RouteWorkspaceQuery(settings.tokens, settings.experts, settings.options, &workspace);
  return workspace.num_elements;
}

// Logits and the optional operands of the forward.
template <class Logit>
std::vector<Array> FwdOperands(const Settings& settings, const Operands<Logit>& operands) {
  std::vector<Array> out = {operands.logits.ToArray(TypeOf(Logit{}), settings.batch)};
  if (operands.bias.present) out.push_back(operands.bias.ToArray(DataType::F32, settings.batch));
  if (operands.mask.present) out.push_back(operands.mask.ToArray(DataType::PRED, settings.batch));
  if (operands.replay.present)
    out.push_back(operands.replay.ToArray(DataType::S32, settings.batch));
  return out;
}

template <class Logit>
std::vector<Array> RoutingResults(const Settings& settings) {
  const int64_t b = settings.batch, t = settings.tokens, n = settings.experts,
                k = settings.options.topk;
  return {Array(TypeOf(Logit{}), {b, t, k}), Array(DataType::S32, {b, t, k}),
          Array(DataType::S32, {b, n}), Array(DataType::S32, {b, settings.plain ? n : 0})};
}

template <class Logit>
HandlerCall Fwd(const Settings& settings, const Operands<Logit>& operands, double total) {
  HandlerCall call = {RouteFwdCpu, FwdOperands(settings, operands), RoutingResults<Logit>(settings),
                      SelectionAttributes(settings.options)};
  if (operands.total.present) {
    call.operands.push_back(operands.total.ToArray(DataType::S32, settings.batch));
  }
  call.results.push_back(Array(DataType::F32, {settings.batch}));
  call.results.push_back(Array(DataType::F32, {settings.batch}));
  call.results.push_back(Array(DataType::F32, {settings.batch, WorkspaceSize(settings)}));
  AddLossAttributes(settings, operands.total.present ? kTotalIsOperand : total, &call.attributes);
  return call;
}

// With the indices and counts of `results`.
template <class Logit>
HandlerCall Bwd(const Settings& settings, const Operands<Logit>& operands,
                const Results<Logit>& results, double total) {
  const int64_t b = settings.batch, t = settings.tokens, n = settings.experts,
                k = settings.options.topk;
  const auto or_none = [&](const auto& operand, DataType type) {
    return operand.present ? operand.ToArray(type, b) : Array(type, {b, 0});
  };
  HandlerCall call = {
      RouteBwdCpu,
      {operands.logits.ToArray(TypeOf(Logit{}), b),
       Array(DataType::S32, {b, t, k}, results.indices),
       Array(DataType::S32, {b, n}, settings.plain ? results.plain : results.counts),
       or_none(operands.d_weights, TypeOf(Logit{})), or_none(operands.d_aux_loss, DataType::F32),
       or_none(operands.d_z_loss, DataType::F32)},
      {Array(TypeOf(Logit{}), {b, t, n})},
      ScoreAttributes(settings.options)};
  if (operands.mask.present) call.operands.push_back(operands.mask.ToArray(DataType::PRED, b));
  if (operands.total.present) call.operands.push_back(operands.total.ToArray(DataType::S32, b));
  call.attributes["distinct"] = !operands.replay.present;
  AddLossAttributes(settings, operands.total.present ? kTotalIsOperand : total, &call.attributes);
  return call;
}

std::string Describe(const Settings& settings) {
  return std::to_string(settings.batch) + " x " + std::to_string(settings.tokens) + " x " +
         std::to_string(settings.experts) + ", kind " +
         std::to_string(static_cast<int>(settings.options.kind)) + ", plain " +
         std::to_string(settings.plain) + ", coefficients " + std::to_string(settings.aux_coeff) +
         ", " + std::to_string(settings.z_coeff);
}

// Both handlers against the direct calls.
template <class Logit>
void ExpectDirect(const Settings& settings, const Operands<Logit>& operands) {
  SCOPED_TRACE(Describe(settings));
  const double total = 77.0;  // not the number of tokens
  const Results<Logit> want = Direct(settings, operands, total);
  const int64_t b = settings.batch, t = settings.tokens, n = settings.experts,
                k = settings.options.topk;
  RunningPool pool(2);
  HandlerCall fwd = Fwd(settings, operands, total);
  const Outcome outcome = fwd.Run(pool);
  ASSERT_TRUE(outcome.ok()) << outcome.message;
  ASSERT_TRUE(fwd.results[0] == Array(TypeOf(Logit{}), {b, t, k}, want.weights));
  ASSERT_TRUE(fwd.results[1] == Array(DataType::S32, {b, t, k}, want.indices));
  ASSERT_TRUE(fwd.results[2] == Array(DataType::S32, {b, n}, want.counts));
  ASSERT_TRUE(fwd.results[3] == Array(DataType::S32, {b, settings.plain ? n : 0}, want.plain));
  ASSERT_TRUE(fwd.results[4] == Array(DataType::F32, {b}, want.aux_loss));
  ASSERT_TRUE(fwd.results[5] == Array(DataType::F32, {b}, want.z_loss));
  HandlerCall bwd = Bwd(settings, operands, want, total);
  const Outcome bwd_outcome = bwd.Run(pool);
  ASSERT_TRUE(bwd_outcome.ok()) << bwd_outcome.message;
  ASSERT_TRUE(bwd.results[0] == Array(TypeOf(Logit{}), {b, t, n}, want.d_logits));
}

template <class T>
class RouteFfiTest : public ::testing::Test {};

using Logits = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(RouteFfiTest, Logits);

TYPED_TEST(RouteFfiTest, HasTheBitsOfRouteH) {
  std::mt19937 random(1);
  struct Sizes {
    int64_t batch, tokens;
    int experts;
  };
  for (const Sizes& sizes : {Sizes{1, 0, 8}, Sizes{0, 5, 8}, Sizes{1, 1, 1}, Sizes{1, 5, 8},
                             Sizes{2, 300, 20}, Sizes{3, 70, 64}, Sizes{1, 600, 130}}) {
    for (const ScoreKind kind : kKinds) {
      for (int repeat = 0; repeat < 6; ++repeat) {
        Settings settings = {sizes.batch, sizes.tokens, sizes.experts,
                             Options(kind, std::min(sizes.experts, 1 + repeat), 2.5f)};
        settings.plain = random() % 2 == 0;
        if (!settings.plain && random() % 3 == 0) settings.aux_coeff = 0.0;
        if (random() % 3 == 0) settings.z_coeff = 0.0;
        if (sizes.experts % 4 == 0 && random() % 2 == 0) {
          settings.options.num_groups = settings.options.group_topk = 4;
          settings.options.group_values = 2;
          if (settings.options.topk <= 3 * sizes.experts / 4) settings.options.group_topk = 3;
        }
        const unsigned present = (random() & kAll) | kLogits;
        const Values values = repeat == 0 ? Values::kSpecial : Values::kRandom;
        ExpectDirect(settings,
                     RandomOperands<TypeParam>(settings, present, kAll, random(), values));
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

// Every operand is batched or shared, whatever the others are.
TYPED_TEST(RouteFfiTest, BatchedAndSharedOperands) {
  Settings settings = {3, 40, 12, Options(ScoreKind::kSigmoid, 3)};
  settings.plain = true;
  const unsigned replayed = kAll, chosen = kAll & ~kReplay;
  for (unsigned batched = 0; batched <= kAll; batched += 1 + batched % 3) {
    for (const unsigned present : {replayed, chosen}) {
      ExpectDirect(settings, RandomOperands<TypeParam>(settings, present, batched, batched));
      if (this->HasFatalFailure()) {
        ADD_FAILURE() << "batched operands: " << batched;
        return;
      }
    }
  }
}

TEST(RouteTest, SharedIndicesAndCounts) {
  const Settings one = {1, 40, 12, Options(ScoreKind::kSoftmaxAfterTopk, 3)};
  Settings three = one;
  three.batch = 3;
  const auto operands = RandomOperands<float>(one, kAll & ~kReplay & ~kTotal, 0, 3);
  const Results<float> want = Direct(three, operands, 40.0);
  const Results<float> single = Direct(one, operands, 40.0);
  HandlerCall call = Bwd(three, operands, want, 40.0);
  call.operands[1] = Array(DataType::S32, {1, 40, 3}, single.indices);
  call.operands[2] = Array(DataType::S32, {1, 12}, single.counts);
  ASSERT_TRUE(call.Run().ok());
  EXPECT_EQ(call.results[0].Values<float>(), want.d_logits);
  call.operands[2] = Array(DataType::S32, {12}, single.counts);  // no batch dimension
  ASSERT_TRUE(call.Run().ok());
  EXPECT_EQ(call.results[0].Values<float>(), want.d_logits);
}

TEST(RouteTest, LargestRows) {
  for (const int topk : {1, 65, kMaxExperts}) {
    const Settings settings = {1, 3, kMaxExperts, Options(ScoreKind::kSqrtSoftplus, topk)};
    ExpectDirect(settings, RandomOperands<float>(settings, kAll & ~kReplay & ~kTotal, 0, 4));
    ExpectDirect(settings, RandomOperands<float>(settings, kAll & ~kTotal, 0, 5));
  }
}

TEST(RouteTest, OptionalOperandsComeInAnyOrder) {
  const Settings settings = {2, 30, 8, Options(ScoreKind::kSigmoid, 2)};
  HandlerCall call = Fwd(settings, RandomOperands<float>(settings, kAll, kAll, 6), 0.0);
  ASSERT_EQ(call.operands.size(), 5u);
  ASSERT_TRUE(call.Run().ok());
  const std::vector<Array> want(call.results.begin(), call.results.begin() + 6);
  const std::vector<Array> operands = call.operands;
  std::vector<int> order = {1, 2, 3, 4};
  do {
    call.operands = {operands[0]};
    for (const int i : order) call.operands.push_back(operands[i]);
    ASSERT_TRUE(call.Run().ok());
    EXPECT_TRUE(std::equal(want.begin(), want.end(), call.results.begin()));
  } while (std::next_permutation(order.begin(), order.end()));
}

// N of every integer type, as an operand, is N as an attribute.
TEST(RouteTest, TypesOfN) {
  const Settings settings = {1, 30, 8, Options(ScoreKind::kSigmoid, 2)};
  const auto operands = RandomOperands<float>(settings, kAll & ~kTotal, 0, 7);
  const Results<float> want = Direct(settings, operands, 7.0);
  for (const Array& total : {Array(DataType::S32, {1}, std::vector<int32_t>{7}),
                             Array(DataType::S64, {1}, std::vector<int64_t>{7}),
                             Array(DataType::U32, {1}, std::vector<uint32_t>{7}),
                             Array(DataType::U64, {1}, std::vector<uint64_t>{7})}) {
    HandlerCall fwd = Fwd(settings, operands, kTotalIsOperand);
    HandlerCall bwd = Bwd(settings, operands, want, kTotalIsOperand);
    for (HandlerCall* call : {&fwd, &bwd}) {
      call->operands.push_back(total);
      const Outcome outcome = call->Run();
      ASSERT_TRUE(outcome.ok()) << outcome.message;
    }
    EXPECT_EQ(fwd.results[4].Values<float>(), want.aux_loss);
    EXPECT_EQ(fwd.results[5].Values<float>(), want.z_loss);
    EXPECT_EQ(bwd.results[0].Values<float>(), want.d_logits);
  }
}

// Losses of coefficient 0 or of no tokens: +0, and no part in the gradient.
TEST(RouteTest, LossesThatAreSwitchedOff) {
  const Settings on = {2, 30, 8, Options(ScoreKind::kSigmoid, 2)};
  auto operands = RandomOperands<float>(on, kAll & ~kReplay & ~kTotal, kAll, 8, Values::kSpecial);
  Operands<float> no_losses = operands;
  no_losses.d_aux_loss.present = no_losses.d_z_loss.present = false;
  const Results<float> want = Direct(on, no_losses, 30.0);
  Settings off = on;
  off.aux_coeff = off.z_coeff = 0.0;
  const std::pair<Settings, double> calls[] = {{off, 30.0}, {on, 0.0}};
  for (const auto& [settings, total] : calls) {
    HandlerCall fwd = Fwd(settings, operands, total);
    HandlerCall bwd = Bwd(settings, operands, want, total);
    ASSERT_TRUE(fwd.Run().ok());
    ASSERT_TRUE(bwd.Run().ok());
    EXPECT_TRUE(fwd.results[4] == Array(DataType::F32, {2}, Floats(2, 0.0f)));
    EXPECT_TRUE(fwd.results[5] == Array(DataType::F32, {2}, Floats(2, 0.0f)));
    EXPECT_TRUE(bwd.results[0] == Array(DataType::F32, {2, 30, 8}, want.d_logits));
  }
}

// ---- The pieces that a shard runs.

template <class Logit>
HandlerCall PassCall(const Settings& settings, const Operands<Logit>& operands,
                     int64_t rows_per_slot) {
  HandlerCall call = {RoutePassCpu, FwdOperands(settings, operands),
                      RoutingResults<Logit>(settings), SelectionAttributes(settings.options)};
  const int64_t slots = (settings.tokens + rows_per_slot - 1) / rows_per_slot;
  call.results.push_back(settings.aux_coeff != 0.0
                             ? Array(DataType::F32, {settings.batch, slots, settings.experts})
                             : Array(DataType::F32, {settings.batch, 0}));
  call.results.push_back(
      Array(DataType::F32, {settings.batch, settings.z_coeff != 0.0 ? slots : 0}));
  call.results.push_back(
      Array(DataType::F32,
            {settings.batch, RouteRowStats(settings.tokens, settings.experts, settings.options)}));
  call.attributes["rows_per_slot"] = rows_per_slot;
  return call;
}

HandlerCall PartialsCall(const Array& column_sums, const Array& counts, int64_t batch,
                         int64_t slots) {
  return {RoutePartialsCpu, {column_sums, counts}, {Array(DataType::F32, {batch, slots})}, {}};
}

// `slots` of each of the partials; 0: none.
HandlerCall FinalCall(const Settings& settings, const Floats& aux_partials,
                      const Floats& z_partials, double total) {
  const int64_t b = settings.batch;
  const auto array = [b](const Floats& values) {
    return Array(DataType::F32, {b, static_cast<int64_t>(values.size()) / b}, values);
  };
  HandlerCall call = {
      RouteFinalCpu,
      {array(aux_partials), array(z_partials)},
      {Array(DataType::F32, {b}), Array(DataType::F32, {b})},
      {{"num_experts", int64_t{settings.experts}}, {"topk", int64_t{settings.options.topk}}}};
  AddLossAttributes(settings, total, &call.attributes);
  return call;
}

// Four shards of 64 slots each, whose partials lie one after the other: the bits of one device.
TYPED_TEST(RouteFfiTest, ShardsHaveTheBitsOfTheWhole) {
  constexpr int64_t kTokens = 512, kShards = 4, kRows = 2;
  for (const bool plain : {false, true}) {
    for (const ScoreKind kind : kKinds) {
      Settings whole = {2, kTokens, 12, Options(kind, 3)};
      whole.plain = plain;
      const auto operands =
          RandomOperands<TypeParam>(whole, kAll & ~kTotal, kAll & ~kMask & ~kBias, 9);
      const Results<TypeParam> want = Direct(whole, operands, 99.0);
      Settings shard = whole;
      shard.tokens = kTokens / kShards;
      const int64_t slots = shard.tokens / kRows;
      std::vector<std::vector<Array>> parts;
      std::vector<int32_t> counts(2 * 12);
      for (int64_t s = 0; s < kShards; ++s) {
        Operands<TypeParam> part = operands;
        const auto cut = [&](auto* operand) {
          const int64_t size = operand->ItemSize() / kShards;
          auto values = operand->values;
          values.clear();
          for (int64_t item = 0; item < (operand->batched ? 2 : 1); ++item) {
            const auto begin = operand->values.begin() + item * operand->ItemSize() + s * size;
            values.insert(values.end(), begin, begin + size);
          }
          operand->values = values;
          operand->core[0] = shard.tokens;
        };
        cut(&part.logits);
        cut(&part.mask);
        cut(&part.replay);
        HandlerCall call = PassCall(shard, part, kRows);
        RunningPool pool(2);
        const Outcome outcome = call.Run(pool);
        ASSERT_TRUE(outcome.ok()) << outcome.message;
        parts.push_back(call.results);
        const std::vector<int32_t> part_counts = call.results[plain ? 3 : 2].Values<int32_t>();
        for (int i = 0; i < 2 * 12; ++i) counts[i] += part_counts[i];
        for (int64_t item = 0; item < 2; ++item) {
          const auto begin = want.indices.begin() + (item * kTokens + s * shard.tokens) * 3;
          const std::vector<int32_t> indices = call.results[1].Values<int32_t>();
          EXPECT_TRUE(std::equal(begin, begin + shard.tokens * 3,
                                 indices.begin() + item * shard.tokens * 3));
        }
      }
      EXPECT_EQ(counts, plain ? want.plain : want.counts);
      Floats aux_partials, z_partials;
      std::vector<Floats> shard_partials;
      for (const std::vector<Array>& part : parts) {
        HandlerCall call = PartialsCall(part[4], Array(DataType::S32, {2, 12}, counts), 2, slots);
        const Outcome outcome = call.Run();
        ASSERT_TRUE(outcome.ok()) << outcome.message;
        shard_partials.push_back(call.results[0].Values<float>());
      }
      for (int64_t item = 0; item < 2; ++item) {
        for (int64_t s = 0; s < kShards; ++s) {
          const auto begin = shard_partials[s].begin() + item * slots;
          aux_partials.insert(aux_partials.end(), begin, begin + slots);
          const Floats z = parts[s][5].template Values<float>();
          z_partials.insert(z_partials.end(), z.begin() + item * slots,
                            z.begin() + (item + 1) * slots);
        }
      }
      EXPECT_EQ(aux_partials, want.partials);
      EXPECT_EQ(z_partials, want.z_partials);
      HandlerCall call = FinalCall(whole, aux_partials, z_partials, 99.0);
      const Outcome outcome = call.Run();
      ASSERT_TRUE(outcome.ok()) << outcome.message;
      EXPECT_EQ(call.results[0].Values<float>(), want.aux_loss);
      EXPECT_EQ(call.results[1].Values<float>(), want.z_loss);
    }
  }
}

// Counts of every type, one item for all or each its own.
TEST(RoutePartialsTest, HasTheBitsOfRouteH) {
  for (const int64_t experts : {1, 20, 300}) {
    const int64_t slots = 7;
    std::mt19937 random(10);
    const Floats sums =
        RandomValues(Values::kRandom, static_cast<int>(3 * slots * experts), random);
    std::vector<int32_t> counts;
    for (int64_t i = 0; i < 3 * experts; ++i) counts.push_back(random() % 1000);
    for (const int64_t items : {1, 3}) {
      Floats want;
      for (int64_t i = 0; i < 3 * slots; ++i) {
        want.push_back(PartialFromColumnSums(sums.data() + i * experts, experts,
                                             {CountType::kInt32, counts.data(), false},
                                             items == 3 ? i / slots * experts : 0));
      }
      const std::vector<int32_t> given(counts.begin(), counts.begin() + items * experts);
      const std::vector<int64_t> dims = {items, experts};
      for (const Array& array :
           {Array(DataType::S32, dims, given),
            Array(DataType::S64, dims, std::vector<int64_t>(given.begin(), given.end())),
            Array(DataType::F32, dims, Floats(given.begin(), given.end()))}) {
        HandlerCall call =
            PartialsCall(Array(DataType::F32, {3, slots, experts}, sums), array, 3, slots);
        const Outcome outcome = call.Run();
        ASSERT_TRUE(outcome.ok()) << outcome.message;
        EXPECT_EQ(call.results[0].Values<float>(), want);
      }
    }
  }
}

// Either loss may have no partials.
TEST(RouteFinalTest, HasTheBitsOfRouteH) {
  const Settings settings = {3, 0, 8, Options(ScoreKind::kSigmoid, 2)};
  std::mt19937 random(11);
  for (const int slots : {1, 100, 256}) {
    const Floats aux = RandomValues(Values::kRandom, 3 * slots, random);
    const Floats z = RandomValues(Values::kRandom, 3 * slots, random);
    const int32_t totals[] = {5, 0, 12};
    for (const int which : {0, 1, 2, 3}) {
      for (const bool total_is_operand : {false, true}) {
        HandlerCall call = FinalCall(settings, which & 1 ? aux : Floats(), which & 2 ? z : Floats(),
                                     total_is_operand ? kTotalIsOperand : 9.0);
        TotalNumTokens total = {TotalType::kStatic, 9.0, nullptr, false};
        if (total_is_operand) {
          total = {TotalType::kInt32, 0.0, totals, true};
          call.operands.push_back(
              Array(DataType::S32, {3}, std::vector<int32_t>(totals, totals + 3)));
        }
        Floats aux_loss(3), z_loss(3);
        for (int item = 0; item < 3; ++item) {
          RouteLosses(
              {which & 1 ? aux.data() : nullptr, which & 2 ? z.data() : nullptr, 3, slots,
               AuxLossScale{8, 2, kAuxCoeff, total}, kZCoeff, aux_loss.data(), z_loss.data()},
              item);
        }
        const Outcome outcome = call.Run();
        ASSERT_TRUE(outcome.ok()) << outcome.message;
        EXPECT_TRUE(call.results[0] == Array(DataType::F32, {3}, aux_loss));
        EXPECT_TRUE(call.results[1] == Array(DataType::F32, {3}, z_loss));
      }
    }
  }
}

// ---- Threads. Enough slots and rows for several tasks and enough bytes for eight threads.

std::vector<HandlerCall> LargeCalls() {
  std::vector<HandlerCall> calls;
  for (const ScoreKind kind : {ScoreKind::kSoftmax, ScoreKind::kSigmoid}) {
    Settings settings = {2, 347, 60, Options(kind, 6)};
    settings.plain = kind == ScoreKind::kSigmoid;
    const auto operands =
        RandomOperands<float>(settings, kAll & ~kTotal & ~kReplay, kAll & ~kBias, 12);
    calls.push_back(Fwd(settings, operands, 347.0));
    calls.push_back(Bwd(settings, operands, Direct(settings, operands, 347.0), 347.0));
  }
  std::mt19937 random(13);
  const Floats sums = RandomValues(Values::kRandom, 2 * 256 * 130, random);
  calls.push_back(PartialsCall(Array(DataType::F32, {2, 256, 130}, sums),
                               Array(DataType::S32, {2, 130}, std::vector<int32_t>(260, 3)), 2,
                               256));
  return calls;
}

// All but a scratch result, which holds what it held where nobody needed it.
std::vector<Array> Outputs(const HandlerCall& call) {
  std::vector<Array> outputs = call.results;
  if (call.handler == RouteFwdCpu) outputs.pop_back();
  return outputs;
}

TEST(ThreadsTest, SameBitsOnEveryPool) {
  std::vector<std::unique_ptr<TaskPool>> pools;
  for (const int threads : {1, 2, 8}) pools.push_back(std::make_unique<RunningPool>(threads));
  pools.push_back(std::make_unique<BusyPool>(8));  // the caller does it all, tasks come late
  pools.push_back(std::make_unique<RefusingPool>(8));
  for (HandlerCall& call : LargeCalls()) {
    RunningPool none(0);
    ASSERT_TRUE(call.Run(none).ok());
    const std::vector<Array> want = Outputs(call);
    for (size_t i = 0; i < pools.size(); ++i) {
      for (int repeat = 0; repeat < 3; ++repeat) {
        ASSERT_TRUE(call.Run(*pools[i]).ok());
        EXPECT_TRUE(Outputs(call) == want) << "pool " << i;
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
    want.push_back(Outputs(call));
  }
  RunningPool pool(2);
  std::vector<std::thread> callers;
  for (HandlerCall& call : calls) {
    callers.emplace_back([&call, &pool] {
      for (int repeat = 0; repeat < 3; ++repeat) call.Run(pool);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (size_t i = 0; i < calls.size(); ++i) EXPECT_TRUE(Outputs(calls[i]) == want[i]) << i;
}

// ---- Float mode.

bool HasSubnormal(const Array& array) {
  for (const float value : array.Values<float>()) {
    if (std::fpclassify(value) == FP_SUBNORMAL) return true;
  }
  return false;
}

// Subnormal results of every handler, which the runtime's mode would flush; `at` is the result.
struct SubnormalCall {
  HandlerCall call;
  size_t at;
};

std::vector<SubnormalCall> SubnormalCalls() {
  std::vector<SubnormalCall> calls;
  for (const ScoreKind kind : kKinds) {
    Settings settings = {1, 600, 24, Options(kind, 3, 0x1p-130f)};
    settings.aux_coeff = 1e-45;
    settings.z_coeff = 1e-45;
    const auto operands = RandomOperands<float>(settings, kAll & ~kTotal & ~kReplay, kAll, 14);
    calls.push_back({Fwd(settings, operands, 10.0), 0});
    calls.push_back({calls.back().call, 4});
    calls.push_back({calls.back().call, 5});
    calls.push_back({Bwd(settings, operands, Direct(settings, operands, 10.0), 10.0), 0});
  }
  std::mt19937 random(15);
  Floats small = RandomValues(Values::kRandom, 256 * 24, random);
  for (float& x : small) x *= 0x1p-135f;
  calls.push_back({PartialsCall(Array(DataType::F32, {1, 256, 24}, small),
                                Array(DataType::S32, {1, 24}, std::vector<int32_t>(24, 1)), 1, 256),
                   0});
  const Settings settings = {1, 0, 8, Options(ScoreKind::kSigmoid, 2)};
  const Floats partials(small.begin(), small.begin() + 256);
  calls.push_back({FinalCall(settings, partials, partials, 1.0), 0});
  calls.push_back({FinalCall(settings, partials, partials, 1.0), 1});
  return calls;
}

TEST(FloatModeTest, RuntimeModeDoesNotReachABit) {
  for (auto& [call, at] : SubnormalCalls()) {
    RunningPool pool(4);
    ASSERT_TRUE(call.Run(pool).ok());
    const std::vector<Array> ieee = Outputs(call);
    EXPECT_TRUE(HasSubnormal(ieee[at])) << "result " << at;
    {
      const RuntimeFloatMode mode;
      ASSERT_TRUE(call.Run(pool).ok());
      EXPECT_TRUE(RuntimeFloatMode::IsSet()) << "the handler changed its caller's float mode";
      RunningPool none(0);
      HandlerCall alone = call;
      ASSERT_TRUE(alone.Run(none).ok());
      EXPECT_TRUE(RuntimeFloatMode::IsSet()) << "the handler changed its caller's float mode";
      EXPECT_TRUE(Outputs(alone) == ieee);
    }
    EXPECT_TRUE(Outputs(call) == ieee);
    EXPECT_TRUE(pool.JoinAndCheckFloatMode()) << "a task changed its thread's float mode";
  }
}

// ---- Operands that do not fit.

Settings SmallSettings() {
  Settings settings = {3, 30, 8, Options(ScoreKind::kSigmoid, 2)};
  settings.plain = true;
  return settings;
}

// All but N as an operand.
Operands<float> SmallOperands() {
  return RandomOperands<float>(SmallSettings(), kAll & ~kTotal, kAll, 16);
}

HandlerCall SmallFwd() { return Fwd(SmallSettings(), SmallOperands(), 30.0); }
HandlerCall SmallPass() { return PassCall(SmallSettings(), SmallOperands(), 4); }
HandlerCall SmallPartials() {
  return PartialsCall(Array(DataType::F32, {3, 5, 8}), Array(DataType::S32, {3, 8}), 3, 5);
}
HandlerCall SmallFinal() {
  return FinalCall(SmallSettings(), Floats(15, 1.0f), Floats(15, 1.0f), 30.0);
}
HandlerCall SmallBwd() {
  return Bwd(SmallSettings(), SmallOperands(), Direct(SmallSettings(), SmallOperands(), 30.0),
             30.0);
}

struct NamedCall {
  std::string op;
  HandlerCall call;
};

std::vector<NamedCall> SmallCalls() {
  return {{"route_fwd: ", SmallFwd()},
          {"route_pass: ", SmallPass()},
          {"route_partials: ", SmallPartials()},
          {"route_final: ", SmallFinal()},
          {"route_bwd: ", SmallBwd()}};
}

using Shapes = std::vector<std::vector<int64_t>>;

// `call` with the operand or result `at` in each of the shapes.
void ExpectShapesRefused(const HandlerCall& valid, std::vector<Array> HandlerCall::* arrays,
                         size_t at, const Shapes& shapes, const std::vector<std::string>& parts) {
  const DataType type = (valid.*arrays)[at].type();
  for (const std::vector<int64_t>& dims : shapes) {
    HandlerCall call = valid;
    (call.*arrays)[at] = Array(type, dims);
    ExpectRefused(call, parts);
  }
}

void ExpectTypesRefused(const HandlerCall& valid, std::vector<Array> HandlerCall::* arrays,
                        size_t at, std::vector<int64_t> dims, const std::vector<DataType>& types,
                        const std::vector<std::string>& parts) {
  for (const DataType type : types) {
    HandlerCall call = valid;
    (call.*arrays)[at] = Array(type, dims);
    ExpectRefused(call, parts);
  }
}

TEST(RefusalTest, ValidCallsAreTaken) {
  for (NamedCall& named : SmallCalls()) {
    const Outcome outcome = named.call.Run();
    EXPECT_TRUE(outcome.ok()) << outcome.message;
  }
}

TEST(RefusalTest, Logits) {
  for (const NamedCall& named : SmallCalls()) {
    if (named.op == "route_partials: " || named.op == "route_final: ") continue;
    const auto& [op, call] = named;
    ExpectTypesRefused(call, &HandlerCall::operands, 0, {3, 30, 8},
                       {DataType::F64, DataType::S32, DataType::PRED},
                       {op + "dtype of logits: got ", "wanted F32, BF16 or F16"});
    ExpectShapesRefused(call, &HandlerCall::operands, 0,
                        {{}, {30, 8}, {3, 30, 0}, {3, 30, 8193}, {3, 30, 8, 1}},
                        {op + "shape of logits: got [",
                         "wanted [batch or 1, num_tokens, num_experts] of 1 to 8192 experts"});
    ExpectShapesRefused(call, &HandlerCall::operands, 0, {{2, 30, 8}, {0, 30, 8}},
                        {op + "shape of logits: got [", "wanted [3 or 1, 30, 8]"});
    // Of other sizes than the results.
    HandlerCall other = call;
    other.operands[0] = Array(DataType::F32, {3, 31, 8});
    ExpectRefused(other, {op, "got [3, 30, ", "wanted [3 or 1, 31, "});
    // The result that holds the batch, weights or d_logits.
    ExpectShapesRefused(call, &HandlerCall::results, 0, {{}, {30, 2}, {3, 30, 2, 1}},
                        {op + "shape of logits: got [3, 30, 8]", "and a result of 3 dims"});
    ExpectShapesRefused(call, &HandlerCall::results, 0, {{2, 30, 8}, {5, 30, 8}},
                        {op + "shape of logits: got [3, 30, 8], wanted ["});
  }
}

TEST(RefusalTest, ResultsOfFwdAndPass) {
  for (const NamedCall& named :
       {NamedCall{"route_fwd: ", SmallFwd()}, NamedCall{"route_pass: ", SmallPass()}}) {
    const auto& [op, call] = named;
    const auto results = &HandlerCall::results;
    ExpectTypesRefused(call, results, 0, {3, 30, 2}, {DataType::BF16, DataType::F64},
                       {op + "weights: got ", "wanted F32"});
    ExpectShapesRefused(call, results, 0, {{3, 30, 3}, {3, 29, 2}},
                        {op + "weights: got [3, ", "wanted [3 or 1, 30, 2]"});
    ExpectTypesRefused(call, results, 1, {3, 30, 2}, {DataType::S64, DataType::U32, DataType::F32},
                       {op + "indices: got ", "wanted S32"});
    ExpectShapesRefused(call, results, 1,
                        {{}, {30, 2}, {2, 30, 2}, {3, 29, 2}, {3, 30, 8}, {3, 30, 2, 1}},
                        {op + "indices: got [", "wanted [3 or 1, 30, 2]"});
    // An operand may be shared by the batch; a result is of all items.
    ExpectShapesRefused(call, results, 1, {{1, 30, 2}},
                        {op + "indices: got [1, 30, 2], wanted 3 items"});
    ExpectTypesRefused(call, results, 2, {3, 8}, {DataType::S64, DataType::F32},
                       {op + "counts: got ", "wanted S32"});
    ExpectShapesRefused(call, results, 2, {{}, {8}, {2, 8}, {3, 7}, {3, 0}, {3, 8, 1}},
                        {op + "counts: got [", "wanted [3 or 1, 8]"});
    ExpectTypesRefused(call, results, 3, {3, 8}, {DataType::S64, DataType::F32},
                       {op + "plain counts: got ", "wanted S32"});
    ExpectShapesRefused(call, results, 3, {{}, {8}, {2, 8}, {3, 7}, {3, 8, 1}},
                        {op + "plain counts: got [", "wanted [3 or 1, 8]"});
  }
}

TEST(RefusalTest, LossesAndWorkspaceOfFwd) {
  const HandlerCall call = SmallFwd();
  const auto results = &HandlerCall::results;
  const std::string names[] = {"aux_loss", "z_loss"};
  for (const size_t i : {0, 1}) {
    ExpectTypesRefused(call, results, 4 + i, {3}, {DataType::BF16, DataType::F64},
                       {"route_fwd: " + names[i] + ": got ", "wanted F32"});
    ExpectShapesRefused(call, results, 4 + i, {{}, {2}, {0}, {3, 1}},
                        {"route_fwd: " + names[i] + ": got [", "wanted [3 or 1]"});
    ExpectShapesRefused(call, results, 4 + i, {{1}},
                        {"route_fwd: " + names[i] + ": got [1], wanted 3 items"});
  }
  // 256 slots of 8 column sums and 2 partials each.
  ExpectShapesRefused(call, results, 6,
                      {{}, {3}, {3, 0}, {3, 2559}, {3, 2561}, {2, 2560}, {1, 2560}, {6, 2560}},
                      {"route_fwd: workspace: got F32[", " bytes)",
                       "wanted F32[..., 2560] of 3 items (30720 bytes)"});
  ExpectTypesRefused(call, results, 6, {3, 2560}, {DataType::F64, DataType::S32},
                     {"route_fwd: workspace: got ", "wanted F32[..., 2560]"});
  // Rows that do not fit registers want three numbers for each token.
  Settings large = SmallSettings();
  large.experts = 520;
  HandlerCall large_call = Fwd(large, RandomOperands<float>(large, kLogits, kAll, 17), 30.0);
  EXPECT_TRUE(large_call.Run().ok());
  ExpectShapesRefused(large_call, results, 6, {{3, 256 * 522}, {3, 256 * 522 + 89}},
                      {"route_fwd: workspace: got F32[3, 133", "wanted F32[..., 133722]"});
}

TEST(RefusalTest, SumsAndScratchOfPass) {
  const HandlerCall call = SmallPass();  // 8 slots
  const auto results = &HandlerCall::results;
  ExpectTypesRefused(call, results, 4, {3, 8, 8}, {DataType::F64, DataType::S32},
                     {"route_pass: column_sums: got ", "wanted F32"});
  ExpectShapesRefused(call, results, 4, {{}, {8, 8}, {3, 7, 8}, {3, 9, 8}, {2, 8, 8}, {3, 8, 7}},
                      {"route_pass: column_sums: got [", "wanted [3 or 1, 8, 8]"});
  ExpectShapesRefused(call, results, 4, {{1, 8, 8}},
                      {"route_pass: column_sums: got [1, 8, 8], wanted 3 items"});
  ExpectTypesRefused(call, results, 5, {3, 8}, {DataType::F64, DataType::S32},
                     {"route_pass: z_partials: got ", "wanted F32"});
  ExpectShapesRefused(call, results, 5, {{}, {8}, {3, 7}, {3, 256}, {2, 8}},
                      {"route_pass: z_partials: got [", "wanted [3 or 1, 8]"});
  ExpectTypesRefused(call, results, 6, {3, 0}, {DataType::F64, DataType::S32},
                     {"route_pass: row_stats: got ", "wanted F32"});
  ExpectShapesRefused(call, results, 6, {{}, {0}, {3, 1}, {2, 0}, {3, 90}},
                      {"route_pass: row_stats: got [", "wanted [3 or 1, 0]"});
  // Sums that are not wanted are empty.
  HandlerCall none = call;
  none.results[3] = Array(DataType::S32, {3, 0});
  none.results[4] = Array(DataType::F32, {3, 0});
  none.results[5] = Array(DataType::F32, {3, 0});
  EXPECT_TRUE(none.Run().ok());
}

TEST(RefusalTest, RowsPerSlot) {
  HandlerCall call = SmallPass();
  for (const int64_t rows :
       {kMinInt64, int64_t{-1}, int64_t{0}, (int64_t{1} << 62) + 1, kMaxInt64}) {
    call.attributes["rows_per_slot"] = rows;
    ExpectRefused(call, {"route_pass: rows_per_slot: got " + std::to_string(rows),
                         "wanted 1 to 4611686018427387904"});
  }
  // All rows in one slot, however long it may be: the sums of the whole in every size.
  for (const int64_t rows : {int64_t{30}, int64_t{31}, int64_t{1} << 31, int64_t{1} << 62}) {
    call.attributes["rows_per_slot"] = rows;
    ExpectRefused(call, {"route_pass: column_sums: got [3, 8, 8], wanted [3 or 1, 1, 8]"});
    HandlerCall fits = call;
    fits.results[4] = Array(DataType::F32, {3, 1, 8});
    fits.results[5] = Array(DataType::F32, {3, 1});
    const Outcome outcome = fits.Run();
    EXPECT_TRUE(outcome.ok()) << outcome.message;
    HandlerCall thirty = fits;
    thirty.attributes["rows_per_slot"] = int64_t{30};
    ASSERT_TRUE(thirty.Run().ok());
    EXPECT_TRUE(fits.results == thirty.results) << rows;
  }
  Settings settings = SmallSettings();
  settings.tokens = 257;
  HandlerCall many = PassCall(settings, RandomOperands<float>(settings, kLogits, 0, 18), 1);
  ExpectRefused(many, {"route_pass: slots of one shard: got 257, wanted at most 256"});
  many.attributes["rows_per_slot"] = int64_t{2};
  ExpectRefused(many, {"route_pass: column_sums: got [3, 257, 8], wanted [3 or 1, 129, 8]"});
}

TEST(RefusalTest, OptionalOperandsOfFwdAndPass) {
  const Settings settings = SmallSettings();
  const auto logits = RandomOperands<float>(settings, kLogits, kAll, 19);
  for (const NamedCall& named : {NamedCall{"route_fwd: ", Fwd(settings, logits, 30.0)},
                                 NamedCall{"route_pass: ", PassCall(settings, logits, 4)}}) {
    const auto refused = [&named = named](const Array& operand,
                                          const std::vector<std::string>& parts) {
      HandlerCall call = named.call;
      call.operands.push_back(operand);
      ExpectRefused(call, parts);
    };
    const std::string& op = named.op;
    for (const std::vector<int64_t>& dims :
         Shapes{{}, {8}, {1, 7}, {2, 8}, {0, 8}, {1, 1, 8}, {3, 30}}) {
      refused(Array(DataType::F32, dims),
              {op + "shape of expert_bias: got [", "wanted [3 or 1, 8]"});
    }
    for (const std::vector<int64_t>& dims :
         Shapes{{}, {30}, {1, 29}, {2, 30}, {0, 30}, {1, 1, 30}, {3, 8}}) {
      refused(Array(DataType::PRED, dims),
              {op + "shape of valid_mask: got [", "wanted [3 or 1, 30]"});
    }
    for (const std::vector<int64_t>& dims :
         Shapes{{1, 30, 3}, {2, 30, 2}, {0, 30, 2}, {3, 29, 2}, {3, 2, 30}, {1, 1, 1}}) {
      refused(Array(DataType::S32, dims),
              {op + "shape of indices: got [", "wanted [3 or 1, 30, 2]"});
    }
    const std::string wanted =
        "wanted F32 (expert_bias), PRED (valid_mask), S32 of rank 3 (indices), or an integer per "
        "item (total_num_tokens) where the target takes it";
    for (const DataType type : {DataType::BF16, DataType::F64, DataType::U8, DataType::S16}) {
      refused(Array(type, {1}), {op + "an optional operand: got ", "[1]", wanted});
    }
    refused(Array(DataType::S64, {3, 30, 2}), {op + "an optional operand: got S64[3, 30, 2]"});
    for (const DataType type : {DataType::S32, DataType::S64, DataType::U32, DataType::U64}) {
      for (const std::vector<int64_t>& dims : Shapes{{}, {2}, {0}, {1, 1}, {3, 1}}) {
        refused(Array(type, dims), {op + "an optional operand: got ", wanted});
      }
    }
  }
  // A shard does not know N.
  HandlerCall pass = PassCall(settings, logits, 4);
  pass.operands.push_back(Array(DataType::S32, {1}));
  ExpectRefused(pass, {"route_pass: an optional operand: got S32[1]"});
}

TEST(RefusalTest, Partials) {
  const HandlerCall call = SmallPartials();
  ExpectShapesRefused(call, &HandlerCall::operands, 0,
                      {{}, {5, 8}, {3, 257, 8}, {3, 5, 0}, {3, 5, 8193}, {3, 5, 8, 1}},
                      {"route_partials: shape of column_sums: got [",
                       "wanted [batch, at most 256 slots, num_experts]"});
  ExpectTypesRefused(call, &HandlerCall::operands, 0, {3, 5, 8}, {DataType::F64, DataType::S32},
                     {"route_partials: dtype of column_sums: got ", "wanted F32"});
  ExpectTypesRefused(
      call, &HandlerCall::operands, 1, {3, 8}, {DataType::U32, DataType::F64, DataType::PRED},
      {"route_partials: dtype of tokens_per_expert: got ", "wanted S32, S64 or F32"});
  ExpectShapesRefused(call, &HandlerCall::operands, 1, {{}, {7}, {2, 8}, {3, 7}, {0, 8}},
                      {"route_partials: shape of tokens_per_expert: got [", "[..., 8]"});
  ExpectTypesRefused(call, &HandlerCall::results, 0, {3, 5}, {DataType::F64, DataType::S32},
                     {"route_partials: partials: got ", "wanted F32"});
  ExpectShapesRefused(call, &HandlerCall::results, 0, {{}, {5}, {3, 4}, {3, 256}, {2, 5}},
                      {"route_partials: partials: got [", "wanted [3 or 1, 5]"});
  ExpectShapesRefused(call, &HandlerCall::results, 0, {{1, 5}},
                      {"route_partials: partials: got [1, 5], wanted 3 items"});
}

TEST(RefusalTest, Final) {
  const HandlerCall call = SmallFinal();
  for (const size_t i : {0, 1}) {
    ExpectTypesRefused(call, &HandlerCall::operands, i, {3, 5}, {DataType::F64, DataType::S32},
                       {"route_final: partials: got ", "wanted F32"});
    ExpectShapesRefused(
        call, &HandlerCall::operands, i, {{}, {15}, {3, 257}, {3, 5, 1}},
        {"route_final: shape of partials: got [", "wanted [batch, at most 256 slots]"});
    ExpectShapesRefused(call, &HandlerCall::operands, i, {{2, 5}, {15, 1}},
                        {"route_final: partials: got [", "wanted [3 or 1, "});
    ExpectShapesRefused(call, &HandlerCall::operands, i, {{1, 5}},
                        {"route_final: partials: got [1, 5], wanted 3 items"});
    ExpectShapesRefused(call, &HandlerCall::operands, i, {{3, 4}},
                        {"route_final: slots of z_partials: got ", "wanted "});
    ExpectTypesRefused(
        call, &HandlerCall::results, i, {3}, {DataType::F64, DataType::S32},
        {i == 0 ? "route_final: aux_loss: got " : "route_final: z_loss: got ", "wanted F32"});
  }
  ExpectShapesRefused(call, &HandlerCall::results, 0, {{}, {3, 1}},
                      {"route_final: aux_loss: got ["});
  ExpectShapesRefused(call, &HandlerCall::results, 0, {{2}, {4}}, {"route_final: z_loss: got [3]"});
  ExpectShapesRefused(call, &HandlerCall::results, 1, {{}, {2}, {3, 1}},
                      {"route_final: z_loss: got [", "wanted [3 or 1]"});
  HandlerCall other = call;
  other.operands.push_back(Array(DataType::PRED, {3}));
  ExpectRefused(other, {"route_final: dtype of an optional operand: got PRED"});
  other.operands.back() = Array(DataType::S32, {2});
  ExpectRefused(other, {"route_final: shape of total_num_tokens: got [2], wanted 1 or 3 items"});
  for (const int64_t experts : {kMinInt64, int64_t{0}, int64_t{8193}, kMaxInt64}) {
    other = call;
    other.attributes["num_experts"] = experts;
    ExpectRefused(other,
                  {"route_final: num_experts: got " + std::to_string(experts), "wanted 1 to 8192"});
  }
}

TEST(RefusalTest, Bwd) {
  const HandlerCall call = SmallBwd();
  const auto operands = &HandlerCall::operands;
  ExpectTypesRefused(call, operands, 1, {3, 30, 2}, {DataType::S64, DataType::F32},
                     {"route_bwd: dtype of indices: got ", "wanted S32"});
  ExpectShapesRefused(call, operands, 1, {{}, {30, 2}, {2, 30, 2}, {3, 29, 2}, {3, 30, 8}},
                      {"route_bwd: shape of indices: got [", "wanted [3 or 1, 30, 2]"});
  ExpectTypesRefused(call, operands, 2, {3, 8}, {DataType::U32, DataType::F64},
                     {"route_bwd: dtype of tokens_per_expert: got "});
  ExpectShapesRefused(call, operands, 2, {{}, {2, 8}, {3, 9}},
                      {"route_bwd: shape of tokens_per_expert: got [", "[..., 8]"});
  ExpectTypesRefused(call, operands, 3, {3, 30, 2}, {DataType::BF16, DataType::F64},
                     {"route_bwd: dtype of d_weights: got ", "wanted F32"});
  ExpectShapesRefused(call, operands, 3, {{}, {30, 2}, {2, 30, 2}, {3, 30, 8}, {3, 31, 2}},
                      {"route_bwd: shape of d_weights: got [", "wanted [3 or 1, 30, 2]"});
  const std::string names[] = {"d_aux_loss", "d_z_loss"};
  for (const size_t i : {0, 1}) {
    ExpectTypesRefused(call, operands, 4 + i, {3}, {DataType::BF16, DataType::F64},
                       {"route_bwd: dtype of " + names[i] + ": got ", "wanted F32"});
    ExpectShapesRefused(call, operands, 4 + i, {{}, {2}, {3, 1}},
                        {"route_bwd: shape of " + names[i] + ": got [", "wanted [3 or 1]"});
  }
  ExpectShapesRefused(call, operands, 6, {{}, {30, 3}, {2, 30}, {3, 29}},
                      {"route_bwd: shape of valid_mask: got [", "[..., 30] of 1 or 3 items"});
  ExpectTypesRefused(call, operands, 6, {3, 30}, {DataType::U8, DataType::F32},
                     {"route_bwd: dtype of an optional operand: got "});
  ExpectShapesRefused(call, &HandlerCall::results, 0, {{3, 30, 7}, {3, 29, 8}},
                      {"route_bwd: d_logits: got [", "wanted [3 or 1, 30, 8]"});
  ExpectTypesRefused(call, &HandlerCall::results, 0, {3, 30, 8}, {DataType::F64, DataType::BF16},
                     {"route_bwd: d_logits: got ", "wanted F32"});
}

// ---- Attributes.

TEST(RefusalTest, ScoreAttributes) {
  for (const NamedCall& named : SmallCalls()) {
    const std::string& op = named.op;
    HandlerCall call = named.call;
    if (call.attributes.count("topk") != 0) {
      for (const int64_t topk :
           {kMinInt64, int64_t{-1}, int64_t{0}, int64_t{9}, (int64_t{1} << 32) + 2, kMaxInt64}) {
        call.attributes["topk"] = topk;
        ExpectRefused(call, {op + "topk: got " + std::to_string(topk) + ", wanted 1 to 8"});
      }
    }
    if (call.attributes.count("score_kind") == 0) continue;
    call = named.call;
    for (const int64_t kind :
         {kMinInt64, int64_t{-1}, int64_t{4}, (int64_t{1} << 32) + 1, kMaxInt64}) {
      call.attributes["score_kind"] = kind;
      ExpectRefused(call, {op + "score_kind: got " + std::to_string(kind) + ", wanted 0 to 3"});
    }
    call = named.call;
    for (const float scale : {kInfinity, -kInfinity, kNan}) {
      call.attributes["scaling_factor"] = scale;
      ExpectRefused(call, {op + "scaling_factor: got ", "wanted a finite number"});
    }
    call = named.call;
    for (const float eps : {-1.0f, -0x1p-149f, kInfinity, kNan}) {
      call.attributes["eps"] = eps;
      ExpectRefused(call, {op + "eps: got ", "wanted a finite number, at least 0"});
    }
  }
}

TEST(RefusalTest, Groups) {
  for (const NamedCall& named :
       {NamedCall{"route_fwd: ", SmallFwd()}, NamedCall{"route_pass: ", SmallPass()}}) {
    const std::string& op = named.op;
    HandlerCall call = named.call;
    for (const int64_t groups :
         {kMinInt64, int64_t{0}, int64_t{9}, (int64_t{1} << 32) + 2, kMaxInt64}) {
      call.attributes["num_groups"] = groups;
      ExpectRefused(call, {op + "num_groups: got " + std::to_string(groups) + ", wanted 1 to 8"});
    }
    call.attributes["num_groups"] = int64_t{3};
    ExpectRefused(call, {op + "num_groups: got 3, wanted a divisor of 8"});
    call.attributes["num_groups"] = int64_t{8};  // of one expert: two of them are needed
    call.attributes["group_topk"] = int64_t{1};
    ExpectRefused(call, {op + "group_topk: got 1, wanted 2 to 8"});
    call.attributes["num_groups"] = int64_t{4};
    for (const int64_t kept : {kMinInt64, int64_t{0}, int64_t{5}, kMaxInt64}) {
      call.attributes["group_topk"] = kept;
      ExpectRefused(call, {op + "group_topk: got " + std::to_string(kept) + ", wanted 1 to 4"});
    }
    call.attributes["group_topk"] = int64_t{2};
    for (const int64_t values : {kMinInt64, int64_t{0}, int64_t{3}, kMaxInt64}) {
      call.attributes["group_values"] = values;
      ExpectRefused(call, {op + "group_values: got " + std::to_string(values), "wanted 1 to 2"});
    }
    call.attributes["group_values"] = int64_t{2};
    const Outcome outcome = call.Run();
    EXPECT_TRUE(outcome.ok()) << outcome.message;
  }
}

TEST(RefusalTest, LossAttributes) {
  for (const NamedCall& named : SmallCalls()) {
    const std::string& op = named.op;
    if (named.call.attributes.count("z_loss_coeff") == 0) continue;
    for (const char* name : {"aux_loss_coeff", "z_loss_coeff"}) {
      HandlerCall call = named.call;
      for (const double coeff : {double{kInfinity}, -double{kInfinity}, double{kNan}}) {
        call.attributes[name] = coeff;
        ExpectRefused(call, {op + name + ": got ", "wanted a finite number"});
      }
      for (const double coeff : {1e308, -1e308, 5e-324, -0.0}) {
        call.attributes[name] = coeff;
        EXPECT_TRUE(call.Run().ok()) << coeff;
      }
    }
    HandlerCall call = named.call;
    for (const double total : {-2.0, -0.5, -double{kInfinity}}) {
      call.attributes["total_num_tokens"] = total;
      ExpectRefused(call, {op + "total_num_tokens: got -", "wanted at least 0"});
    }
    call.attributes["total_num_tokens"] = kTotalIsOperand;
    ExpectRefused(call, {op + "total_num_tokens: got neither attribute nor operand"});
    for (const double total : {0.0, 1e308, double{kInfinity}}) {
      call.attributes["total_num_tokens"] = total;
      EXPECT_TRUE(call.Run().ok()) << total;
    }
  }
}

// A missing attribute, also with another one in its place, one too many, and each one with another
// type.
TEST(RefusalTest, NamesAndTypesOfAttributes) {
  for (const NamedCall& named : SmallCalls()) {
    if (named.call.attributes.empty()) continue;  // it takes none and looks at none
    HandlerCall extra = named.call;
    extra.attributes["extra"] = int64_t{1};
    ExpectRefused(extra, {named.op + "number of attributes: got ", "wanted "});
    for (const auto& [name, value] : named.call.attributes) {
      HandlerCall call = named.call;
      call.attributes.erase(name);
      ExpectRefused(call, {named.op + "number of attributes: got "});
      call.attributes["extra"] = value;
      ExpectFailed(call, name);
      const Attributes others = {{"1", int64_t{1}}, {"2", 1.0}, {"3", 1.0f}, {"4", true}};
      for (const auto& [unused, other] : others) {
        if (other.index() == value.index()) continue;
        call = named.call;
        call.attributes[name] = other;
        ExpectFailed(call, "type");
      }
    }
  }
}

// ---- Attributes and operands as untrusted input: an answer, never a crash.

Attributes::mapped_type RandomAttribute(const Attributes::mapped_type& like, std::mt19937& random) {
  constexpr int64_t kIntegers[] = {kMinInt64, -1, 0, 1, 2, 3, 4, 7, 8, 9, 1 << 30, kMaxInt64};
  constexpr double kDoubles[] = {-1.0, -0.0, 0.0, 5e-324, 0.01, 30.0, 1e308, kInfinity, kNan};
  constexpr float kFloats[] = {-kInfinity, -1.0f, -0.0f, 0.0f, 0x1p-149f, 2.5f, 3e38f, kNan};
  switch (random() % 20 == 0 ? random() % 4 : like.index()) {
    case 0:
      return kIntegers[random() % std::size(kIntegers)];
    case 1:
      return kDoubles[random() % std::size(kDoubles)];
    case 2:
      return kFloats[random() % std::size(kFloats)];
    default:
      return random() % 2 == 0;
  }
}

Array RandomArray(std::mt19937& random) {
  constexpr DataType kTypes[] = {DataType::F32,  DataType::F32, DataType::BF16,
                                 DataType::F16,  DataType::S32, DataType::S32,
                                 DataType::PRED, DataType::S64, DataType::F64};
  constexpr int64_t kDims[] = {0, 1, 1, 2, 2, 3, 3, 5, 8, 8, 30, 30};
  std::vector<int64_t> dims;
  for (uint32_t rank = random() % 5; rank > 0; --rank) {
    dims.push_back(kDims[random() % std::size(kDims)]);
  }
  Array array(kTypes[random() % std::size(kTypes)], dims);
  // 1 is a valid bool too; 0xff bytes are NaN, and -1.
  const unsigned char bytes[] = {0x00, 0x01, 0xff};
  array.Fill(bytes[random() % (array.type() == DataType::PRED ? 2 : 3)]);
  return array;
}

// The same dtype and rank, with bytes of any kind: indices and counts that no forward made.
void FillStrangely(Array* array, std::mt19937& random) {
  if (array->type() == DataType::PRED) return;
  constexpr unsigned char kBytes[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
  array->Fill(kBytes[random() % std::size(kBytes)]);
}

// Valid calls with a few things changed. Arrays own exactly their bytes, so that a sanitizer sees
// a check that let too much through.
TEST(UntrustedInputTest, RandomChangesHaveAnAnswer) {
  std::mt19937 random(20);
  const std::vector<NamedCall> valid = SmallCalls();
  int accepted = 0;
  for (int i = 0; i < 10000; ++i) {
    HandlerCall call = valid[random() % valid.size()].call;
    for (uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
      switch (random() % 6) {
        case 0:
          call.operands[random() % call.operands.size()] = RandomArray(random);
          break;
        case 1:
          call.results[random() % call.results.size()] = RandomArray(random);
          break;
        case 2:
          call.operands.push_back(RandomArray(random));
          break;
        case 3:
          FillStrangely(&call.operands[random() % call.operands.size()], random);
          break;
        default: {
          if (call.attributes.empty()) break;
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
  EXPECT_GT(accepted, 500);  // or the changes are too wild to reach the arithmetic
}

}  // namespace
}  // namespace jax_moe_det
