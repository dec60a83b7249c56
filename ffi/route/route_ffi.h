// From FFI operands to the checked structs of route.h, for both platforms.
//
// Operands have one leading batch dimension, 1 where an operand is shared by the batch. An empty
// array stands for an operand or result that is not wanted. Optional operands follow the fixed ones
// in any order, and are known by dtype and rank: expert_bias is floating-point, valid_mask boolean,
// replayed indices are integers of rank 3 and N of rank 1.
#ifndef JAX_MOE_DET_FFI_ROUTE_ROUTE_FFI_H_
#define JAX_MOE_DET_FFI_ROUTE_ROUTE_FFI_H_

#include <cstdint>
#include <string>
#include <utility>

#include "aux_loss/aux_loss_ffi.h"
#include "core/ffi_checks.h"
#include "route/route.h"
#include "topk_router/topk_router_ffi.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

// logits, [expert_bias], [valid_mask], [replay], [N] ->
// weights, indices, counts, plain counts, aux_loss, z_loss, workspace.
template <class Binding>
auto BindRouteFwd(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .Attrs();
}

// One shard: logits, [expert_bias], [valid_mask], [replay] ->
// weights, indices, counts, plain counts, column_sums, z_partials, row_stats.
template <class Binding>
auto BindRoutePass(Binding&& binding) {
  return BindRouteFwd(std::move(binding));
}

// column_sums, counts -> partials.
template <class Binding>
auto BindRoutePartials(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
}

// All shards: aux_partials, z_partials, [N] -> aux_loss, z_loss.
template <class Binding>
auto BindRouteFinal(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .Attrs();
}

// logits, indices, counts, d_weights, d_aux_loss, d_z_loss, [valid_mask], [N] -> d_logits.
template <class Binding>
auto BindRouteBwd(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .Attrs();
}

// The results of BindRouteFwd, or of BindRoutePass.
struct RouteResults {
  ffi::AnyBuffer weights, indices, counts, plain;
  ffi::AnyBuffer aux_loss;  // or column_sums
  ffi::AnyBuffer z_loss;    // or z_partials
  ffi::AnyBuffer scratch;   // workspace, or row_stats
};

namespace internal {

inline ffi::Error ParseDouble(const char* op, const ffi::Dictionary& attributes, const char* name,
                              double* out) {
  const auto value = attributes.get<double>(name);
  if (value.has_error()) return value.error();
  if (!std::isfinite(*value) && std::string(name) != "total_num_tokens") {
    return InvalidArgument(op, name, *value, "a finite number");
  }
  *out = *value;
  return ffi::Error::Success();
}

inline bool IsEmpty(const ffi::AnyBuffer& buffer) { return buffer.element_count() == 0; }

// The loss's attributes, and N where that is an attribute.
inline ffi::Error ParseLosses(const char* op, const ffi::Dictionary& attributes,
                              int64_t num_experts, int64_t topk, AuxLossScale* scale,
                              double* z_loss_coeff) {
  double coeff = 0, total = 0;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseDouble(op, attributes, "aux_loss_coeff", &coeff));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseDouble(op, attributes, "z_loss_coeff", z_loss_coeff));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseDouble(op, attributes, "total_num_tokens", &total));
  return ParseScale(op, num_experts, num_experts, topk, coeff, total, scale);
}

// Attributes of score and groups, into `options`.
inline ffi::Error ParseRouteOptions(const char* op, const ffi::Dictionary& attributes,
                                    int64_t num_experts, TopkRouterOptions* options) {
  *options = {};
  JAX_MOE_DET_RETURN_IF_ERROR(ParseInt(op, attributes, "score_kind", 0, 3, &options->kind));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseInt(op, attributes, "topk", 1, num_experts, &options->topk));
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseFloat(op, attributes, "scaling_factor", -0x1.fffffep+127f, &options->scaling_factor));
  return ParseFloat(op, attributes, "eps", 0.0f, &options->eps);
}

// Sizes from logits and weights.
template <class Op>
ffi::Error ParseRouteSizes(const char* op, const ffi::AnyBuffer& logits,
                           const ffi::AnyBuffer& result, Op* out) {
  const auto dims = logits.dimensions();
  const auto result_dims = result.dimensions();
  if (dims.size() != 3 || dims[2] < 1 || dims[2] > kMaxExperts || result_dims.size() != 3) {
    return InvalidArgument(op, "shape of logits", ShapeString(dims),
                           "[batch or 1, num_tokens, num_experts] of 1 to " +
                               std::to_string(kMaxExperts) + " experts, and a result of 3 dims");
  }
  out->batch = result_dims[0];
  out->num_tokens = dims[1];
  out->num_experts = static_cast<int>(dims[2]);
  if (!ParseScoreType(logits.element_type(), &out->logits_type)) {
    return InvalidArgument(op, "dtype of logits", logits.element_type(), "F32, BF16 or F16");
  }
  out->logits = logits.untyped_data();
  return CheckShape(op, "shape of logits", logits, out->batch, {dims[1], dims[2]},
                    &out->logits_batched);
}

// All of the pass but slots, sums and scratch. `total` null: N is not an operand here.
inline ffi::Error ParseRoutePassCommon(const char* op, const ffi::AnyBuffer& logits,
                                       const ffi::RemainingArgs& rest, const RouteResults& results,
                                       const ffi::Dictionary& attributes, TotalNumTokens* total,
                                       RoutePass* out) {
  *out = {};
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRouteSizes(op, logits, results.weights, out));
  const int64_t batch = out->batch, num_tokens = out->num_tokens, num_experts = out->num_experts;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRouteOptions(op, attributes, num_experts, &out->options));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseGroups(op, attributes, num_experts, &out->options));
  const int64_t topk = out->options.topk;
  JAX_MOE_DET_RETURN_IF_ERROR(CheckResult(op, "weights", results.weights, logits.element_type(),
                                          batch, {num_tokens, topk}));
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckResult(op, "indices", results.indices, ffi::DataType::S32, batch, {num_tokens, topk}));
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckResult(op, "counts", results.counts, ffi::DataType::S32, batch, {num_experts}));
  out->weights = results.weights.untyped_data();
  out->indices = static_cast<int32_t*>(results.indices.untyped_data());
  out->counts = static_cast<int32_t*>(results.counts.untyped_data());
  if (!IsEmpty(results.plain)) {
    JAX_MOE_DET_RETURN_IF_ERROR(
        CheckResult(op, "plain counts", results.plain, ffi::DataType::S32, batch, {num_experts}));
    out->plain = static_cast<int32_t*>(results.plain.untyped_data());
  }
  for (size_t i = 0; i < rest.size(); ++i) {
    const auto operand = rest.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) return operand.error();
    const size_t rank = operand->dimensions().size();
    if (operand->element_type() == ffi::DataType::F32) {
      JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(op, "shape of expert_bias", *operand, batch,
                                             {num_experts}, &out->expert_bias_batched));
      out->expert_bias = static_cast<const float*>(operand->untyped_data());
    } else if (operand->element_type() == ffi::DataType::PRED) {
      JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(op, "shape of valid_mask", *operand, batch,
                                             {num_tokens}, &out->valid_mask_batched));
      out->valid_mask = static_cast<const bool*>(operand->untyped_data());
    } else if (operand->element_type() == ffi::DataType::S32 && rank == 3) {
      JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(op, "shape of indices", *operand, batch,
                                             {num_tokens, topk}, &out->replay_batched));
      out->replay = static_cast<const int32_t*>(operand->untyped_data());
    } else if (total == nullptr || rank != 1 || !ParseTotal(*operand, batch, total)) {
      return InvalidArgument(
          op, "an optional operand",
          TypeString(operand->element_type()) + ShapeString(operand->dimensions()),
          "F32 (expert_bias), PRED (valid_mask), S32 of rank 3 (indices), or "
          "an integer per item (total_num_tokens) where the target takes it");
    }
  }
  return ffi::Error::Success();
}

}  // namespace internal

inline ffi::Error ParseRouteFwd(const ffi::AnyBuffer& logits, const ffi::RemainingArgs& rest,
                                const RouteResults& results, const ffi::Dictionary& attributes,
                                RoutePass* pass, RoutePartials* partials, RouteFinal* final_sum) {
  constexpr char kOp[] = "route_fwd";
  if (attributes.size() != 10) {
    return InvalidArgument(kOp, "number of attributes", static_cast<int64_t>(attributes.size()),
                           "10");
  }
  TotalNumTokens total = {TotalType::kStatic, kTotalIsOperand, nullptr, false};
  JAX_MOE_DET_RETURN_IF_ERROR(
      internal::ParseRoutePassCommon(kOp, logits, rest, results, attributes, &total, pass));
  const int64_t num_experts = pass->num_experts;
  AuxLossScale scale;
  double z_loss_coeff = 0;
  JAX_MOE_DET_RETURN_IF_ERROR(internal::ParseLosses(kOp, attributes, num_experts,
                                                    pass->options.topk, &scale, &z_loss_coeff));
  JAX_MOE_DET_RETURN_IF_ERROR(SetTotal(kOp, total, &scale));
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckResult(kOp, "aux_loss", results.aux_loss, ffi::DataType::F32, pass->batch, {}));
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckResult(kOp, "z_loss", results.z_loss, ffi::DataType::F32, pass->batch, {}));
  RouteWorkspace needed = {nullptr, 0};
  RouteWorkspaceQuery(pass->num_tokens, pass->num_experts, pass->options, &needed);
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckPartials(kOp, "workspace", results.scratch, pass->batch, needed.num_elements));
  // The parts of all items lie together.
  float* workspace = static_cast<float*>(results.scratch.untyped_data());
  const int64_t slots = pass->batch * kSlots;
  float* column_sums = workspace;
  float* aux_partials = column_sums + slots * num_experts;
  float* z_partials = aux_partials + slots;
  pass->rows_per_slot = RowsPerSlot(pass->num_tokens);
  pass->num_slots = kSlots;
  pass->column_sums = scale.coeff != 0.0 ? column_sums : nullptr;
  pass->z_partials = z_loss_coeff != 0.0 ? z_partials : nullptr;
  pass->row_stats = z_partials + slots;
  partials->column_sums = column_sums;
  partials->counts = {CountType::kInt32, pass->plain != nullptr ? pass->plain : pass->counts, true};
  partials->batch = pass->batch;
  partials->num_slots = kSlots;
  partials->num_experts = pass->num_experts;
  partials->partials = aux_partials;
  *final_sum = {scale.coeff != 0.0 ? aux_partials : nullptr,
                pass->z_partials,
                pass->batch,
                kSlots,
                scale,
                z_loss_coeff,
                static_cast<float*>(results.aux_loss.untyped_data()),
                static_cast<float*>(results.z_loss.untyped_data())};
  return ffi::Error::Success();
}

inline ffi::Error ParseRoutePass(const ffi::AnyBuffer& logits, const ffi::RemainingArgs& rest,
                                 const RouteResults& results, const ffi::Dictionary& attributes,
                                 RoutePass* pass) {
  constexpr char kOp[] = "route_pass";
  if (attributes.size() != 8) {
    return InvalidArgument(kOp, "number of attributes", static_cast<int64_t>(attributes.size()),
                           "8");
  }
  JAX_MOE_DET_RETURN_IF_ERROR(
      internal::ParseRoutePassCommon(kOp, logits, rest, results, attributes, nullptr, pass));
  JAX_MOE_DET_RETURN_IF_ERROR(internal::ParseInt(kOp, attributes, "rows_per_slot", 1,
                                                 int64_t{1} << 62, &pass->rows_per_slot));
  const int64_t num_slots = pass->num_tokens / pass->rows_per_slot +
                            (pass->num_tokens % pass->rows_per_slot != 0 ? 1 : 0);
  if (num_slots > kSlots) {
    return InvalidArgument(kOp, "slots of one shard", num_slots, "at most 256");
  }
  pass->num_slots = num_slots;
  if (!internal::IsEmpty(results.aux_loss)) {
    JAX_MOE_DET_RETURN_IF_ERROR(CheckResult(kOp, "column_sums", results.aux_loss,
                                            ffi::DataType::F32, pass->batch,
                                            {num_slots, pass->num_experts}));
    pass->column_sums = static_cast<float*>(results.aux_loss.untyped_data());
  }
  if (!internal::IsEmpty(results.z_loss)) {
    JAX_MOE_DET_RETURN_IF_ERROR(CheckResult(kOp, "z_partials", results.z_loss, ffi::DataType::F32,
                                            pass->batch, {num_slots}));
    pass->z_partials = static_cast<float*>(results.z_loss.untyped_data());
  }
  pass->row_stats = static_cast<float*>(results.scratch.untyped_data());
  return CheckResult(kOp, "row_stats", results.scratch, ffi::DataType::F32, pass->batch,
                     {RouteRowStats(pass->num_tokens, pass->num_experts, pass->options)});
}

inline ffi::Error ParseRoutePartials(const ffi::AnyBuffer& column_sums,
                                     const ffi::AnyBuffer& counts, const ffi::AnyBuffer& partials,
                                     RoutePartials* out) {
  constexpr char kOp[] = "route_partials";
  const auto dims = column_sums.dimensions();
  if (dims.size() != 3 || dims[1] > kSlots || dims[2] < 1 || dims[2] > kMaxExperts) {
    return InvalidArgument(kOp, "shape of column_sums", ShapeString(dims),
                           "[batch, at most 256 slots, num_experts]");
  }
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckType(kOp, "dtype of column_sums", column_sums, ffi::DataType::F32));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseCounts(kOp, counts, dims[0], dims[2], &out->counts));
  out->column_sums = static_cast<const float*>(column_sums.untyped_data());
  out->batch = dims[0];
  out->num_slots = dims[1];
  out->num_experts = static_cast<int>(dims[2]);
  out->partials = static_cast<float*>(partials.untyped_data());
  return CheckResult(kOp, "partials", partials, ffi::DataType::F32, dims[0], {dims[1]});
}

inline ffi::Error ParseRouteFinal(const ffi::AnyBuffer& aux_partials,
                                  const ffi::AnyBuffer& z_partials, const ffi::RemainingArgs& rest,
                                  const ffi::AnyBuffer& aux_loss, const ffi::AnyBuffer& z_loss,
                                  const ffi::Dictionary& attributes, RouteFinal* out) {
  constexpr char kOp[] = "route_final";
  if (attributes.size() != 5) {
    return InvalidArgument(kOp, "number of attributes", static_cast<int64_t>(attributes.size()),
                           "5");
  }
  *out = {};
  out->batch = static_cast<int64_t>(aux_loss.element_count());
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckResult(kOp, "aux_loss", aux_loss, ffi::DataType::F32, out->batch, {}));
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckResult(kOp, "z_loss", z_loss, ffi::DataType::F32, out->batch, {}));
  int64_t num_experts = 0, topk = 0;
  JAX_MOE_DET_RETURN_IF_ERROR(
      internal::ParseInt(kOp, attributes, "num_experts", 1, kMaxExperts, &num_experts));
  JAX_MOE_DET_RETURN_IF_ERROR(internal::ParseInt(kOp, attributes, "topk", 1, num_experts, &topk));
  JAX_MOE_DET_RETURN_IF_ERROR(
      internal::ParseLosses(kOp, attributes, num_experts, topk, &out->scale, &out->z_loss_coeff));
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseOptional(kOp, rest, out->batch, 0, nullptr, nullptr, &out->scale));
  for (const auto* partials : {&aux_partials, &z_partials}) {
    if (internal::IsEmpty(*partials)) continue;
    const auto dims = partials->dimensions();
    if (dims.size() != 2 || dims[1] > kSlots) {
      return InvalidArgument(kOp, "shape of partials", ShapeString(dims),
                             "[batch, at most 256 slots]");
    }
    JAX_MOE_DET_RETURN_IF_ERROR(
        CheckResult(kOp, "partials", *partials, ffi::DataType::F32, out->batch, {dims[1]}));
    if (out->num_slots != 0 && out->num_slots != dims[1]) {
      return InvalidArgument(kOp, "slots of z_partials", dims[1], std::to_string(out->num_slots));
    }
    out->num_slots = dims[1];
    const float* data = static_cast<const float*>(partials->untyped_data());
    (partials == &aux_partials ? out->aux_partials : out->z_partials) = data;
  }
  out->aux_loss = static_cast<float*>(aux_loss.untyped_data());
  out->z_loss = static_cast<float*>(z_loss.untyped_data());
  return ffi::Error::Success();
}

inline ffi::Error ParseRouteBwd(const ffi::AnyBuffer& logits, const ffi::AnyBuffer& indices,
                                const ffi::AnyBuffer& counts, const ffi::AnyBuffer& d_weights,
                                const ffi::AnyBuffer& d_aux_loss, const ffi::AnyBuffer& d_z_loss,
                                const ffi::RemainingArgs& rest, const ffi::AnyBuffer& d_logits,
                                const ffi::Dictionary& attributes, RouteBwd* out) {
  constexpr char kOp[] = "route_bwd";
  if (attributes.size() != 8) {
    return InvalidArgument(kOp, "number of attributes", static_cast<int64_t>(attributes.size()),
                           "8");
  }
  *out = {};
  JAX_MOE_DET_RETURN_IF_ERROR(internal::ParseRouteSizes(kOp, logits, d_logits, out));
  const int64_t batch = out->batch, num_tokens = out->num_tokens, num_experts = out->num_experts;
  JAX_MOE_DET_RETURN_IF_ERROR(
      internal::ParseRouteOptions(kOp, attributes, num_experts, &out->options));
  const int64_t topk = out->options.topk;
  const auto distinct = attributes.get<bool>("distinct");
  if (distinct.has_error()) return distinct.error();
  out->distinct = *distinct;
  JAX_MOE_DET_RETURN_IF_ERROR(CheckResult(kOp, "d_logits", d_logits, logits.element_type(), batch,
                                          {num_tokens, num_experts}));
  out->d_logits = d_logits.untyped_data();
  JAX_MOE_DET_RETURN_IF_ERROR(CheckType(kOp, "dtype of indices", indices, ffi::DataType::S32));
  JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(kOp, "shape of indices", indices, batch,
                                         {num_tokens, topk}, &out->indices_batched));
  out->indices = static_cast<const int32_t*>(indices.untyped_data());
  JAX_MOE_DET_RETURN_IF_ERROR(ParseCounts(kOp, counts, batch, num_experts, &out->counts));
  if (!internal::IsEmpty(d_weights)) {
    JAX_MOE_DET_RETURN_IF_ERROR(
        CheckType(kOp, "dtype of d_weights", d_weights, logits.element_type()));
    JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(kOp, "shape of d_weights", d_weights, batch,
                                           {num_tokens, topk}, &out->d_weights_batched));
    out->d_weights = d_weights.untyped_data();
  }
  if (!internal::IsEmpty(d_aux_loss)) {
    JAX_MOE_DET_RETURN_IF_ERROR(
        CheckType(kOp, "dtype of d_aux_loss", d_aux_loss, ffi::DataType::F32));
    JAX_MOE_DET_RETURN_IF_ERROR(
        CheckShape(kOp, "shape of d_aux_loss", d_aux_loss, batch, {}, &out->d_aux_loss_batched));
    out->d_aux_loss = static_cast<const float*>(d_aux_loss.untyped_data());
  }
  if (!internal::IsEmpty(d_z_loss)) {
    JAX_MOE_DET_RETURN_IF_ERROR(CheckType(kOp, "dtype of d_z_loss", d_z_loss, ffi::DataType::F32));
    JAX_MOE_DET_RETURN_IF_ERROR(
        CheckShape(kOp, "shape of d_z_loss", d_z_loss, batch, {}, &out->d_z_loss_batched));
    out->d_z_loss = static_cast<const float*>(d_z_loss.untyped_data());
  }
  JAX_MOE_DET_RETURN_IF_ERROR(
      internal::ParseLosses(kOp, attributes, num_experts, topk, &out->scale, &out->z_loss_coeff));
  return ParseOptional(kOp, rest, batch, num_tokens, &out->valid_mask, &out->valid_mask_batched,
                       &out->scale);
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_ROUTE_ROUTE_FFI_H_
