// From FFI operands to the checked structs of topk_router.h, for both platforms.
//
// Operands have one leading batch dimension, 1 where an operand is shared by the batch.
#ifndef JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_FFI_H_
#define JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_FFI_H_

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "core/ffi_checks.h"
#include "topk_router/topk_router.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

// `binding` holds the platform's own context.

// logits, [expert_bias], [valid_mask] -> out, routing_map.
template <class Binding>
auto BindTopkRouterFwd(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .Attrs();
}

// logits, d_out, [routing_map, or valid_mask for aux scores] -> d_logits.
template <class Binding>
auto BindTopkRouterBwd(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .Attrs();
}

namespace internal {

// Sets *out to an integer attribute from `low` to `high`.
template <class Int>
ffi::Error ParseInt(const char* op, const ffi::Dictionary& attributes, const char* name,
                    int64_t low, int64_t high, Int* out) {
  const auto value = attributes.get<int64_t>(name);
  if (value.has_error()) return value.error();
  if (*value < low || *value > high) {
    return InvalidArgument(op, name, *value, std::to_string(low) + " to " + std::to_string(high));
  }
  *out = static_cast<Int>(*value);
  return ffi::Error::Success();
}

inline ffi::Error ParseFloat(const char* op, const ffi::Dictionary& attributes, const char* name,
                             float low, float* out) {
  const auto value = attributes.get<float>(name);
  if (value.has_error()) return value.error();
  if (!std::isfinite(*value) || *value < low) {
    return InvalidArgument(op, name, static_cast<double>(*value),
                           "a finite number, at least " + std::to_string(low));
  }
  *out = *value;
  return ffi::Error::Success();
}

// What forward and backward share: sizes from the result [batch, num_tokens, num_experts], logits,
// score kind, topk, scaling and eps. `num_attributes`: no attribute is without a reader.
template <class Op>
ffi::Error ParseCommon(const char* op, const ffi::AnyBuffer& logits, const ffi::AnyBuffer& result,
                       const ffi::Dictionary& attributes, size_t num_attributes, Op* out) {
  const auto dims = result.dimensions();
  if (dims.size() != 3 || dims[2] < 1 || dims[2] > kMaxExperts) {
    return InvalidArgument(
        op, "shape of the result", ShapeString(dims),
        "[batch, num_tokens, num_experts] of 1 to " + std::to_string(kMaxExperts) + " experts");
  }
  out->batch = dims[0];
  out->num_tokens = dims[1];
  out->num_experts = static_cast<int>(dims[2]);
  if (!ParseScoreType(logits.element_type(), &out->logits_type)) {
    return InvalidArgument(op, "dtype of logits", logits.element_type(), "F32, BF16 or F16");
  }
  JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(op, "shape of logits", logits, out->batch,
                                         {out->num_tokens, out->num_experts},
                                         &out->logits_batched));
  out->logits = logits.untyped_data();

  if (attributes.size() != num_attributes) {
    return InvalidArgument(op, "number of attributes", static_cast<int64_t>(attributes.size()),
                           std::to_string(num_attributes));
  }
  TopkRouterOptions& options = out->options;
  options = {};
  JAX_MOE_DET_RETURN_IF_ERROR(ParseInt(op, attributes, "score_kind", 0, 3, &options.kind));
  const auto aux_scores = attributes.get<bool>("aux_scores");
  if (aux_scores.has_error()) return aux_scores.error();
  options.aux_scores = *aux_scores;
  if (options.aux_scores && options.kind == ScoreKind::kSoftmaxAfterTopk) {
    return InvalidArgument(op, "score_kind of aux scores", int64_t{0}, "1 to 3");
  }
  JAX_MOE_DET_RETURN_IF_ERROR(ParseInt(op, attributes, "topk", 1, out->num_experts, &options.topk));
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseFloat(op, attributes, "scaling_factor", -0x1.fffffep+127f, &options.scaling_factor));
  return ParseFloat(op, attributes, "eps", 0.0f, &options.eps);
}

// Groups of which the kept ones hold at least options->topk experts.
inline ffi::Error ParseGroups(const char* op, const ffi::Dictionary& attributes,
                              int64_t num_experts, TopkRouterOptions* options) {
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseInt(op, attributes, "num_groups", 1, num_experts, &options->num_groups));
  if (num_experts % options->num_groups != 0) {
    return InvalidArgument(op, "num_groups", int64_t{options->num_groups},
                           "a divisor of " + std::to_string(num_experts));
  }
  const int64_t group_size = num_experts / options->num_groups;
  const int64_t fewest = (options->topk + group_size - 1) / group_size;
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseInt(op, attributes, "group_topk", fewest, options->num_groups, &options->group_topk));
  return ParseInt(op, attributes, "group_values", 1, group_size, &options->group_values);
}

inline ffi::DataType OutType(const TopkRouterOptions& options, const ffi::AnyBuffer& logits) {
  return options.aux_scores ? ffi::DataType::F32 : logits.element_type();
}

// Sets options.bitmap from the map's dtype.
template <class Op>
ffi::Error CheckMap(const char* op, const ffi::AnyBuffer& map, bool* batched, Op* out) {
  if (map.element_type() != ffi::DataType::PRED && map.element_type() != ffi::DataType::U8) {
    return InvalidArgument(op, "dtype of routing_map", map.element_type(),
                           "PRED (a byte per expert) or U8 (a bit)");
  }
  out->options.bitmap = map.element_type() == ffi::DataType::U8;
  return CheckShape(op, "shape of routing_map", map, out->batch,
                    {out->num_tokens, MapBytes(out->num_experts, out->options.bitmap)}, batched);
}

}  // namespace internal

inline ffi::Error ParseTopkRouterFwd(const ffi::AnyBuffer& logits, const ffi::RemainingArgs& rest,
                                     ffi::AnyBuffer& out, ffi::AnyBuffer& routing_map,
                                     const ffi::Dictionary& attributes, TopkRouterFwd* op) {
  constexpr char kOp[] = "topk_router_fwd";
  JAX_MOE_DET_RETURN_IF_ERROR(internal::ParseCommon(kOp, logits, out, attributes, 8, op));
  TopkRouterOptions& options = op->options;
  const int64_t num_experts = op->num_experts;
  JAX_MOE_DET_RETURN_IF_ERROR(internal::ParseGroups(kOp, attributes, num_experts, &options));
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckType(kOp, "dtype of out", out, internal::OutType(options, logits)));
  op->out = out.untyped_data();
  bool map_batched = false;
  JAX_MOE_DET_RETURN_IF_ERROR(internal::CheckMap(kOp, routing_map, &map_batched, op));
  if (!map_batched) {
    return InvalidArgument(kOp, "shape of routing_map", ShapeString(routing_map.dimensions()),
                           std::to_string(op->batch) + " items");
  }
  op->routing_map = static_cast<uint8_t*>(routing_map.untyped_data());
  op->expert_bias = nullptr;
  op->expert_bias_batched = false;
  op->valid_mask = nullptr;
  op->valid_mask_batched = false;
  for (size_t i = 0; i < rest.size(); ++i) {
    const auto operand = rest.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) return operand.error();
    if (operand->element_type() == ffi::DataType::F32) {
      JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(kOp, "shape of expert_bias", *operand, op->batch,
                                             {num_experts}, &op->expert_bias_batched));
      op->expert_bias = static_cast<const float*>(operand->untyped_data());
    } else if (operand->element_type() == ffi::DataType::PRED) {
      JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(kOp, "shape of valid_mask", *operand, op->batch,
                                             {op->num_tokens}, &op->valid_mask_batched));
      op->valid_mask = static_cast<const bool*>(operand->untyped_data());
    } else {
      return InvalidArgument(kOp, "dtype of an optional operand", operand->element_type(),
                             "F32 (expert_bias) or PRED (valid_mask)");
    }
  }
  return ffi::Error::Success();
}

inline ffi::Error ParseTopkRouterBwd(const ffi::AnyBuffer& logits, const ffi::AnyBuffer& d_out,
                                     const ffi::RemainingArgs& rest, ffi::AnyBuffer& d_logits,
                                     const ffi::Dictionary& attributes, TopkRouterBwd* op) {
  constexpr char kOp[] = "topk_router_bwd";
  JAX_MOE_DET_RETURN_IF_ERROR(internal::ParseCommon(kOp, logits, d_logits, attributes, 5, op));
  const TopkRouterOptions& options = op->options;
  JAX_MOE_DET_RETURN_IF_ERROR(CheckType(kOp, "dtype of d_logits", d_logits, logits.element_type()));
  op->d_logits = d_logits.untyped_data();
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckType(kOp, "dtype of d_out", d_out, internal::OutType(options, logits)));
  JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(kOp, "shape of d_out", d_out, op->batch,
                                         {op->num_tokens, op->num_experts}, &op->d_out_batched));
  op->d_out = d_out.untyped_data();
  op->routing_map = nullptr;
  op->routing_map_batched = false;
  op->valid_mask = nullptr;
  op->valid_mask_batched = false;
  if (rest.size() > 1 || (rest.size() == 0 && !options.aux_scores)) {
    return InvalidArgument(kOp, "optional operands", static_cast<int64_t>(rest.size()),
                           options.aux_scores ? "at most a valid_mask" : "a routing_map");
  }
  if (rest.size() == 0) return ffi::Error::Success();
  const auto operand = rest.get<ffi::AnyBuffer>(0);
  if (operand.has_error()) return operand.error();
  if (!options.aux_scores) {
    op->routing_map = static_cast<const uint8_t*>(operand->untyped_data());
    return internal::CheckMap(kOp, *operand, &op->routing_map_batched, op);
  }
  JAX_MOE_DET_RETURN_IF_ERROR(CheckType(kOp, "dtype of valid_mask", *operand, ffi::DataType::PRED));
  op->valid_mask = static_cast<const bool*>(operand->untyped_data());
  return CheckShape(kOp, "shape of valid_mask", *operand, op->batch, {op->num_tokens},
                    &op->valid_mask_batched);
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_TOPK_ROUTER_TOPK_ROUTER_FFI_H_
