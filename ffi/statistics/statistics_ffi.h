// From FFI operands to the checked structs of statistics.h, for both platforms. Operands have one
// leading batch dimension, 1 where an operand is shared by the batch.
#ifndef JAX_MOE_DET_FFI_STATISTICS_STATISTICS_FFI_H_
#define JAX_MOE_DET_FFI_STATISTICS_STATISTICS_FFI_H_

#include <cstdint>
#include <utility>

#include "aux_loss/aux_loss_ffi.h"
#include "core/ffi_checks.h"
#include "statistics/statistics.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

// counts -> load, summary, dead.
template <class Binding>
auto BindRoutingStats(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
}

// expert_bias, counts, rate -> expert_bias.
template <class Binding>
auto BindExpertBiasUpdate(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
}

namespace internal {

// batch and num_experts of a result [batch, num_experts].
inline ffi::Error ParseExperts(const char* op, const char* what, const ffi::AnyBuffer& result,
                               int64_t* batch, int64_t* num_experts) {
  const auto dims = result.dimensions();
  if (dims.size() != 2 || dims[1] < 1) {
    return InvalidArgument(op, what, ShapeString(dims),
                           "[batch, num_experts] of at least 1 expert");
  }
  *batch = dims[0];
  *num_experts = dims[1];
  return CheckType(op, what, result, ffi::DataType::F32);
}

}  // namespace internal

inline ffi::Error ParseRoutingStats(const ffi::AnyBuffer& counts, ffi::AnyBuffer& load,
                                    ffi::AnyBuffer& summary, ffi::AnyBuffer& dead,
                                    RoutingStatsOp* op) {
  constexpr char kOp[] = "routing_stats";
  JAX_MOE_DET_RETURN_IF_ERROR(
      internal::ParseExperts(kOp, "load", load, &op->batch, &op->num_experts));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseCounts(kOp, counts, op->batch, op->num_experts, &op->counts));
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckResult(kOp, "summary", summary, ffi::DataType::F32, op->batch, {4}));
  JAX_MOE_DET_RETURN_IF_ERROR(CheckResult(kOp, "dead", dead, ffi::DataType::S32, op->batch, {}));
  op->load = static_cast<float*>(load.untyped_data());
  op->summary = static_cast<float*>(summary.untyped_data());
  op->dead = static_cast<int32_t*>(dead.untyped_data());
  return ffi::Error::Success();
}

inline ffi::Error ParseExpertBiasUpdate(const ffi::AnyBuffer& bias, const ffi::AnyBuffer& counts,
                                        const ffi::AnyBuffer& rate, ffi::AnyBuffer& out,
                                        ExpertBiasUpdate* op) {
  constexpr char kOp[] = "expert_bias_update";
  JAX_MOE_DET_RETURN_IF_ERROR(
      internal::ParseExperts(kOp, "result", out, &op->batch, &op->num_experts));
  JAX_MOE_DET_RETURN_IF_ERROR(CheckType(kOp, "dtype of expert_bias", bias, ffi::DataType::F32));
  JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(kOp, "shape of expert_bias", bias, op->batch,
                                         {op->num_experts}, &op->bias_batched));
  JAX_MOE_DET_RETURN_IF_ERROR(ParseCounts(kOp, counts, op->batch, op->num_experts, &op->counts));
  JAX_MOE_DET_RETURN_IF_ERROR(CheckType(kOp, "dtype of rate", rate, ffi::DataType::F32));
  JAX_MOE_DET_RETURN_IF_ERROR(
      CheckShape(kOp, "shape of rate", rate, op->batch, {}, &op->rate_batched));
  op->bias = static_cast<const float*>(bias.untyped_data());
  op->rate = static_cast<const float*>(rate.untyped_data());
  op->out = static_cast<float*>(out.untyped_data());
  return ffi::Error::Success();
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_STATISTICS_STATISTICS_FFI_H_
