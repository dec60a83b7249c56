// The CUDA module: registration table.
#include <nanobind/nanobind.h>

#include "aux_loss/aux_loss_cuda.h"
#include "core/registration.h"
#include "route/route_cuda.h"
#include "statistics/statistics_cuda.h"
#include "topk_router/topk_router_cuda.h"

namespace nb = nanobind;

namespace jax_moe_det {

NB_MODULE(_cuda, m) {
  m.def("targets", [] {
    nb::dict targets;
    AddTarget(targets, "jax_moe_det.aux_loss_fwd", AuxLossFwdCuda);
    AddTarget(targets, "jax_moe_det.aux_loss_fwd_atomic", AuxLossFwdAtomicCuda);
    AddTarget(targets, "jax_moe_det.aux_loss_partials", AuxLossPartialsCuda);
    AddTarget(targets, "jax_moe_det.aux_loss_final", AuxLossFinalCuda);
    AddTarget(targets, "jax_moe_det.aux_loss_bwd", AuxLossBwdCuda);
    AddTarget(targets, "jax_moe_det.topk_router_fwd", TopkRouterFwdCuda);
    AddTarget(targets, "jax_moe_det.topk_router_bwd", TopkRouterBwdCuda);
    AddTarget(targets, "jax_moe_det.route_fwd", RouteFwdCuda);
    AddTarget(targets, "jax_moe_det.route_pass", RoutePassCuda);
    AddTarget(targets, "jax_moe_det.route_partials", RoutePartialsCuda);
    AddTarget(targets, "jax_moe_det.route_final", RouteFinalCuda);
    AddTarget(targets, "jax_moe_det.route_bwd", RouteBwdCuda);
    AddTarget(targets, "jax_moe_det.routing_stats", RoutingStatsCuda);
    AddTarget(targets, "jax_moe_det.expert_bias_update", ExpertBiasUpdateCuda);
    return targets;
  });
}

}  // namespace jax_moe_det
