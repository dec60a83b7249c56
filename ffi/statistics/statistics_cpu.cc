// CPU handlers of the statistics: rows of experts, on the calling thread.
#include "statistics/statistics_cpu.h"

#include <cstdint>

#include "core/float_mode.h"
#include "statistics/statistics.h"
#include "statistics/statistics_ffi.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

ffi::Error RoutingStatsImpl(ffi::AnyBuffer counts, ffi::Result<ffi::AnyBuffer> load,
                            ffi::Result<ffi::AnyBuffer> summary, ffi::Result<ffi::AnyBuffer> dead) {
  RoutingStatsOp op;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRoutingStats(counts, *load, *summary, *dead, &op));
  IeeeFloatMode ieee;
  for (int64_t item = 0; item < op.batch; ++item) {
    switch (op.counts.type) {
      case CountType::kInt32:
        ComputeStats<int32_t>(op, item);
        break;
      case CountType::kInt64:
        ComputeStats<int64_t>(op, item);
        break;
      case CountType::kFloat32:
        ComputeStats<float>(op, item);
        break;
    }
  }
  return ffi::Error::Success();
}

ffi::Error ExpertBiasUpdateImpl(ffi::AnyBuffer bias, ffi::AnyBuffer counts, ffi::AnyBuffer rate,
                                ffi::Result<ffi::AnyBuffer> out) {
  ExpertBiasUpdate op;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseExpertBiasUpdate(bias, counts, rate, *out, &op));
  IeeeFloatMode ieee;
  for (int64_t item = 0; item < op.batch; ++item) {
    switch (op.counts.type) {
      case CountType::kInt32:
        ComputeUpdate<int32_t>(op, item);
        break;
      case CountType::kInt64:
        ComputeUpdate<int64_t>(op, item);
        break;
      case CountType::kFloat32:
        ComputeUpdate<float>(op, item);
        break;
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RoutingStatsCpu, RoutingStatsImpl,
                              BindRoutingStats(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ExpertBiasUpdateCpu, ExpertBiasUpdateImpl,
                              BindExpertBiasUpdate(ffi::Ffi::Bind()));

}  // namespace jax_moe_det
