// CUDA handlers of the router step: checks, then launchers.
#include "route/route_cuda.h"

#include <cuda_runtime_api.h>

#include "core/cuda_checks.h"
#include "core/ffi_checks.h"
#include "route/route_ffi.h"
#include "route/route_launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {
namespace {

ffi::Error RouteFwdImpl(cudaStream_t stream, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> indices,
                        ffi::Result<ffi::AnyBuffer> counts, ffi::Result<ffi::AnyBuffer> plain,
                        ffi::Result<ffi::AnyBuffer> aux_loss, ffi::Result<ffi::AnyBuffer> z_loss,
                        ffi::Result<ffi::AnyBuffer> workspace, ffi::Dictionary attributes) {
  RoutePass pass;
  RoutePartials partials;
  RouteFinal final_sum;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRouteFwd(
      logits, rest, {*weights, *indices, *counts, *plain, *aux_loss, *z_loss, *workspace},
      attributes, &pass, &partials, &final_sum));
  cudaError_t status = LaunchRoutePass(stream, pass);
  if (status == cudaSuccess && pass.column_sums != nullptr) {
    status = LaunchRoutePartials(stream, partials);
  }
  if (status == cudaSuccess) status = LaunchRouteFinal(stream, final_sum);
  return FromCuda("route_fwd", status);
}

ffi::Error RoutePassImpl(cudaStream_t stream, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                         ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> indices,
                         ffi::Result<ffi::AnyBuffer> counts, ffi::Result<ffi::AnyBuffer> plain,
                         ffi::Result<ffi::AnyBuffer> column_sums,
                         ffi::Result<ffi::AnyBuffer> z_partials,
                         ffi::Result<ffi::AnyBuffer> row_stats, ffi::Dictionary attributes) {
  RoutePass pass;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRoutePass(
      logits, rest, {*weights, *indices, *counts, *plain, *column_sums, *z_partials, *row_stats},
      attributes, &pass));
  return FromCuda("route_pass", LaunchRoutePass(stream, pass));
}

ffi::Error RoutePartialsImpl(cudaStream_t stream, ffi::AnyBuffer column_sums, ffi::AnyBuffer counts,
                             ffi::Result<ffi::AnyBuffer> out) {
  RoutePartials partials;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRoutePartials(column_sums, counts, *out, &partials));
  return FromCuda("route_partials", LaunchRoutePartials(stream, partials));
}

ffi::Error RouteFinalImpl(cudaStream_t stream, ffi::AnyBuffer aux_partials,
                          ffi::AnyBuffer z_partials, ffi::RemainingArgs rest,
                          ffi::Result<ffi::AnyBuffer> aux_loss, ffi::Result<ffi::AnyBuffer> z_loss,
                          ffi::Dictionary attributes) {
  RouteFinal final_sum;
  JAX_MOE_DET_RETURN_IF_ERROR(
      ParseRouteFinal(aux_partials, z_partials, rest, *aux_loss, *z_loss, attributes, &final_sum));
  return FromCuda("route_final", LaunchRouteFinal(stream, final_sum));
}

ffi::Error RouteBwdImpl(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer indices,
                        ffi::AnyBuffer counts, ffi::AnyBuffer d_weights, ffi::AnyBuffer d_aux_loss,
                        ffi::AnyBuffer d_z_loss, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> d_logits, ffi::Dictionary attributes) {
  RouteBwd op;
  JAX_MOE_DET_RETURN_IF_ERROR(ParseRouteBwd(logits, indices, counts, d_weights, d_aux_loss,
                                            d_z_loss, rest, *d_logits, attributes, &op));
  return FromCuda("route_bwd", LaunchRouteBwd(stream, op));
}

auto OnStream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteFwdCuda, RouteFwdImpl, BindRouteFwd(OnStream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(RoutePassCuda, RoutePassImpl, BindRoutePass(OnStream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(RoutePartialsCuda, RoutePartialsImpl, BindRoutePartials(OnStream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteFinalCuda, RouteFinalImpl, BindRouteFinal(OnStream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteBwdCuda, RouteBwdImpl, BindRouteBwd(OnStream()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_moe_det
