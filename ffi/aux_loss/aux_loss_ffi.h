// From FFI operands to the checked structs of aux_loss.h, for both platforms.
//
// Operands carry leading batch dimensions, all 1 where an operand is shared by the batch. The
// optional operands follow the fixed ones in any order: a boolean one is the mask, an integer one
// is N.
#ifndef JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_FFI_H_
#define JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_FFI_H_

#include <cstdint>
#include <string>

#include "aux_loss/aux_loss.h"
#include "core/ffi_checks.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

// As the attribute total_num_tokens: N is an operand.
constexpr double kTotalIsOperand = -1.0;

inline ffi::Error ParseCounts(const char* op, const ffi::AnyBuffer& counts, int64_t batch,
                              int64_t num_columns, AuxLossCounts* out) {
  switch (counts.element_type()) {
    case ffi::DataType::S32:
      out->type = CountType::kInt32;
      break;
    case ffi::DataType::S64:
      out->type = CountType::kInt64;
      break;
    case ffi::DataType::F32:
      out->type = CountType::kFloat32;
      break;
    default:
      return InvalidArgument(op, "dtype of tokens_per_expert", counts.element_type(),
                             "S32, S64 or F32");
  }
  const auto dims = counts.dimensions();
  if (!ParseBatched(dims, 1, batch, &out->batched) || dims.back() != num_columns) {
    return InvalidArgument(
        op, "shape of tokens_per_expert", ShapeString(dims),
        "[..., " + std::to_string(num_columns) + "] of 1 or " + std::to_string(batch) + " items");
  }
  out->data = counts.untyped_data();
  return ffi::Error::Success();
}

inline ffi::Error ParseScale(const char* op, int64_t num_columns, int64_t num_experts, int64_t topk,
                             double coeff, double total_num_tokens, AuxLossScale* out) {
  if (num_experts < 1 || (num_columns > 0 && num_columns % num_experts != 0)) {
    return InvalidArgument(op, "num_experts", num_experts,
                           "a divisor of the " + std::to_string(num_columns) + " columns");
  }
  if (topk < 1 || topk > num_experts) {
    return InvalidArgument(op, "topk", topk, "1 to " + std::to_string(num_experts));
  }
  if (total_num_tokens < 0 && total_num_tokens != kTotalIsOperand) {
    return InvalidArgument(op, "total_num_tokens", total_num_tokens, "at least 0");
  }
  out->num_experts = num_experts;
  out->topk = topk;
  out->coeff = coeff;
  out->total_num_tokens = {TotalType::kStatic, total_num_tokens, nullptr, false};
  return ffi::Error::Success();
}

// Sets *out from an integer operand of 1 or `batch` items; false where it is none.
inline bool ParseTotal(const ffi::AnyBuffer& operand, int64_t batch, TotalNumTokens* out) {
  switch (operand.element_type()) {
    case ffi::DataType::S32:
      out->type = TotalType::kInt32;
      break;
    case ffi::DataType::S64:
      out->type = TotalType::kInt64;
      break;
    case ffi::DataType::U32:
      out->type = TotalType::kUint32;
      break;
    case ffi::DataType::U64:
      out->type = TotalType::kUint64;
      break;
    default:
      return false;
  }
  out->data = operand.untyped_data();
  return ParseBatched(operand.dimensions(), 0, batch, &out->batched);
}

// N is `total`, where that is an operand, or else the attribute that `scale` has.
inline ffi::Error SetTotal(const char* op, const TotalNumTokens& total, AuxLossScale* scale) {
  if (total.type != TotalType::kStatic) {
    scale->total_num_tokens = total;
  } else if (scale->total_num_tokens.value == kTotalIsOperand) {
    return InvalidArgument(op, "total_num_tokens", "neither attribute nor operand", "one of them");
  }
  return ffi::Error::Success();
}

// Takes the optional operands from `rest`. `valid_mask` null: a mask is not allowed here; `scale`
// null: N is not.
inline ffi::Error ParseOptional(const char* op, const ffi::RemainingArgs& rest, int64_t batch,
                                int64_t num_tokens, const bool** valid_mask,
                                bool* valid_mask_batched, AuxLossScale* scale) {
  TotalNumTokens total = {TotalType::kStatic, kTotalIsOperand, nullptr, false};
  for (size_t i = 0; i < rest.size(); ++i) {
    const auto operand = rest.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) return operand.error();
    const auto dims = operand->dimensions();
    if (operand->element_type() == ffi::DataType::PRED && valid_mask != nullptr) {
      if (!ParseBatched(dims, 1, batch, valid_mask_batched) || dims.back() != num_tokens) {
        return InvalidArgument(op, "shape of valid_mask", ShapeString(dims),
                               "[..., " + std::to_string(num_tokens) + "] of 1 or " +
                                   std::to_string(batch) + " items");
      }
      *valid_mask = static_cast<const bool*>(operand->untyped_data());
      continue;
    }
    const bool is_total = scale != nullptr && ParseTotal(*operand, batch, &total);
    if (total.type == TotalType::kStatic) {
      return InvalidArgument(op, "dtype of an optional operand", operand->element_type(),
                             "PRED (valid_mask), or S32, S64, U32 or U64 (total_num_tokens), "
                             "where the target takes them");
    }
    if (!is_total) {
      return InvalidArgument(op, "shape of total_num_tokens", ShapeString(dims),
                             "1 or " + std::to_string(batch) + " items");
    }
  }
  return scale == nullptr ? ffi::Error::Success() : SetTotal(op, total, scale);
}

// Everything but `partials` and the slots.
inline ffi::Error ParseProbs(const char* op, const ffi::AnyBuffer& probs,
                             const ffi::AnyBuffer& counts, int64_t batch, AuxLossPartials* out) {
  if (!ParseScoreType(probs.element_type(), &out->score_type)) {
    return InvalidArgument(op, "dtype of probs", probs.element_type(), "F32, BF16 or F16");
  }
  const auto dims = probs.dimensions();
  if (!ParseBatched(dims, 2, batch, &out->probs_batched)) {
    return InvalidArgument(
        op, "shape of probs", ShapeString(dims),
        "[..., num_tokens, num_columns] of 1 or " + std::to_string(batch) + " items");
  }
  out->probs = probs.untyped_data();
  out->batch = batch;
  out->num_tokens = dims[dims.size() - 2];
  out->num_columns = dims.back();
  // Kernels hold the bytes of a row in 32 bits.
  if (out->num_columns > kMaxColumns) {
    return InvalidArgument(op, "columns of probs", out->num_columns,
                           "at most " + std::to_string(kMaxColumns));
  }
  out->valid_mask = nullptr;
  out->valid_mask_batched = false;
  return ParseCounts(op, counts, batch, out->num_columns, &out->counts);
}

// Float32 [..., num_slots] of `batch` items.
inline ffi::Error CheckPartials(const char* op, const char* what, const ffi::AnyBuffer& buffer,
                                int64_t batch, int64_t num_slots) {
  const auto dims = buffer.dimensions();
  if (buffer.element_type() != ffi::DataType::F32 || dims.size() == 0 || dims.back() != num_slots ||
      static_cast<int64_t>(buffer.element_count()) != batch * num_slots) {
    return InvalidArgument(
        op, what,
        TypeString(buffer.element_type()) + ShapeString(dims) + " (" +
            std::to_string(buffer.size_bytes()) + " bytes)",
        "F32[..., " + std::to_string(num_slots) + "] of " + std::to_string(batch) + " items (" +
            std::to_string(batch * num_slots * static_cast<int64_t>(sizeof(float))) + " bytes)");
  }
  return ffi::Error::Success();
}

// probs, tokens_per_expert, [valid_mask], [total_num_tokens] -> loss [batch], workspace.
inline ffi::Error ParseAuxLossFwd(ffi::AnyBuffer probs, ffi::AnyBuffer counts,
                                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer>& loss,
                                  ffi::Result<ffi::AnyBuffer>& workspace, int64_t num_experts,
                                  int64_t topk, double coeff, double total_num_tokens,
                                  AuxLossPartials* partials, AuxLossFinal* final_sum) {
  constexpr char kOp[] = "aux_loss_fwd";
  if (loss->element_type() != ffi::DataType::F32) {
    return InvalidArgument(kOp, "dtype of the loss", loss->element_type(), "F32");
  }
  const int64_t batch = static_cast<int64_t>(loss->element_count());
  JAX_MOE_DET_RETURN_IF_ERROR(ParseProbs(kOp, probs, counts, batch, partials));
  AuxLossScale scale;
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseScale(kOp, partials->num_columns, num_experts, topk, coeff, total_num_tokens, &scale));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseOptional(kOp, rest, batch, partials->num_tokens,
                                            &partials->valid_mask, &partials->valid_mask_batched,
                                            &scale));
  AuxLossWorkspace needed = {nullptr, 0};
  AuxLossWorkspaceQuery(&needed);
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckPartials(kOp, "workspace", *workspace, batch, needed.num_elements));
  partials->rows_per_slot = RowsPerSlot(partials->num_tokens);
  partials->num_slots = needed.num_elements;
  partials->partials = static_cast<float*>(workspace->untyped_data());
  *final_sum = {partials->partials, batch, partials->num_slots, scale,
                static_cast<float*>(loss->untyped_data())};
  return ffi::Error::Success();
}

// One shard: probs, tokens_per_expert, [valid_mask] -> partials [batch, num_slots].
inline ffi::Error ParseAuxLossPartials(ffi::AnyBuffer probs, ffi::AnyBuffer counts,
                                       ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer>& out,
                                       int64_t rows_per_slot, AuxLossPartials* partials) {
  constexpr char kOp[] = "aux_loss_partials";
  const auto dims = out->dimensions();
  if (dims.size() == 0) {
    return InvalidArgument(kOp, "shape of partials", ShapeString(dims), "[..., num_slots]");
  }
  int64_t batch = 1;
  for (size_t i = 0; i + 1 < dims.size(); ++i) batch *= dims[i];
  JAX_MOE_DET_RETURN_IF_ERROR(ParseProbs(kOp, probs, counts, batch, partials));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseOptional(kOp, rest, batch, partials->num_tokens,
                                            &partials->valid_mask, &partials->valid_mask_batched,
                                            nullptr));
  if (rows_per_slot < 1) return InvalidArgument(kOp, "rows_per_slot", rows_per_slot, "at least 1");
  // Rounded up without a sum, which an attribute of any size would overflow.
  const int64_t num_slots =
      partials->num_tokens / rows_per_slot + (partials->num_tokens % rows_per_slot != 0 ? 1 : 0);
  if (num_slots > kSlots) {
    return InvalidArgument(kOp, "slots of one shard", num_slots, "at most 256");
  }
  JAX_MOE_DET_RETURN_IF_ERROR(CheckPartials(kOp, "partials", *out, batch, num_slots));
  partials->rows_per_slot = rows_per_slot;
  partials->num_slots = num_slots;
  partials->partials = static_cast<float*>(out->untyped_data());
  return ffi::Error::Success();
}

// All shards: partials [batch, num_slots], [total_num_tokens] -> loss [batch].
inline ffi::Error ParseAuxLossFinal(ffi::AnyBuffer partials, ffi::RemainingArgs rest,
                                    ffi::Result<ffi::AnyBuffer>& loss, int64_t num_experts,
                                    int64_t topk, double coeff, double total_num_tokens,
                                    AuxLossFinal* out) {
  constexpr char kOp[] = "aux_loss_final";
  const auto dims = partials.dimensions();
  if (dims.size() == 0 || dims.back() > kSlots) {
    return InvalidArgument(kOp, "shape of partials", ShapeString(dims), "[..., at most 256 slots]");
  }
  if (loss->element_type() != ffi::DataType::F32) {
    return InvalidArgument(kOp, "dtype of the loss", loss->element_type(), "F32");
  }
  const int64_t batch = static_cast<int64_t>(loss->element_count());
  JAX_MOE_DET_RETURN_IF_ERROR(CheckPartials(kOp, "partials", partials, batch, dims.back()));
  AuxLossScale scale;
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseScale(kOp, 0, num_experts, topk, coeff, total_num_tokens, &scale));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseOptional(kOp, rest, batch, 0, nullptr, nullptr, &scale));
  *out = {static_cast<const float*>(partials.untyped_data()), batch, dims.back(), scale,
          static_cast<float*>(loss->untyped_data())};
  return ffi::Error::Success();
}

// tokens_per_expert, d_loss [1 or batch], [total_num_tokens] -> d_probs_row [batch, num_columns].
inline ffi::Error ParseAuxLossBwd(ffi::AnyBuffer counts, ffi::AnyBuffer d_loss,
                                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer>& row,
                                  int64_t num_experts, int64_t topk, double coeff,
                                  double total_num_tokens, AuxLossRow* out) {
  constexpr char kOp[] = "aux_loss_bwd";
  const auto dims = row->dimensions();
  if (!ParseScoreType(row->element_type(), &out->score_type) || dims.size() == 0) {
    return InvalidArgument(kOp, "type of the row",
                           TypeString(row->element_type()) + ShapeString(dims),
                           "F32, BF16 or F16 [..., num_columns]");
  }
  out->batch = 1;
  for (size_t i = 0; i + 1 < dims.size(); ++i) out->batch *= dims[i];
  out->num_columns = dims.back();
  out->d_probs_row = row->untyped_data();
  JAX_MOE_DET_RETURN_IF_ERROR(ParseCounts(kOp, counts, out->batch, dims.back(), &out->counts));
  if (d_loss.element_type() != ffi::DataType::F32 ||
      !ParseBatched(d_loss.dimensions(), 0, out->batch, &out->d_loss_batched)) {
    return InvalidArgument(kOp, "type of d_loss",
                           TypeString(d_loss.element_type()) + ShapeString(d_loss.dimensions()),
                           "F32 of 1 or " + std::to_string(out->batch) + " items");
  }
  out->d_loss = static_cast<const float*>(d_loss.untyped_data());
  // A shard of the columns has its own number of them: only the whole op checks num_experts.
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseScale(kOp, 0, num_experts, topk, coeff, total_num_tokens, &out->scale));
  return ParseOptional(kOp, rest, out->batch, 0, nullptr, nullptr, &out->scale);
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_AUX_LOSS_AUX_LOSS_FFI_H_
