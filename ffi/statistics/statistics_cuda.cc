// CUDA handlers of the statistics: checks, then launchers.
#include "statistics/statistics_cuda.h"

#include <cuda_runtime_api.h>

#include "core/cuda_checks.h"
#include "core/ffi_checks.h"
#include "statistics/statistics_ffi.h"
#include "statistics/statistics_launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

ffi::Error RoutingStatsImpl(cudaStream_t stream, ffi::AnyBuffer counts,
                            ffi::Result<ffi::AnyBuffer> load, ffi::Result<ffi::AnyBuffer> summary,
                            ffi::Result<ffi::AnyBuffer> dead) {
  RoutingStatsOp op;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRoutingStats(counts, *load, *summary, *dead, &op));
  return FromCuda("routing_stats", LaunchRoutingStats(stream, op));
}

ffi::Error ExpertBiasUpdateImpl(cudaStream_t stream, ffi::AnyBuffer bias, ffi::AnyBuffer counts,
                                ffi::AnyBuffer rate, ffi::Result<ffi::AnyBuffer> out) {
  ExpertBiasUpdate op;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseExpertBiasUpdate(bias, counts, rate, *out, &op));
  return FromCuda("expert_bias_update", LaunchExpertBiasUpdate(stream, op));
}

auto OnStream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RoutingStatsCuda, RoutingStatsImpl, BindRoutingStats(OnStream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(ExpertBiasUpdateCuda, ExpertBiasUpdateImpl,
                              BindExpertBiasUpdate(OnStream()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_moe_det
