// The CPU module: registration table and workspace queries.
#include <nanobind/nanobind.h>

#include "aux_loss/aux_loss.h"
#include "aux_loss/aux_loss_cpu.h"
#include "core/registration.h"
#include "route/route.h"
#include "route/route_cpu.h"
#include "statistics/statistics_cpu.h"
#include "topk_router/topk_router.h"
#include "topk_router/topk_router_cpu.h"

namespace nb = nanobind;

namespace jax_moe_det {

namespace {

// What decides the size of a workspace.
TopkRouterOptions SelectionSizes(int topk, int num_groups, int group_values) {
  TopkRouterOptions options = {};
  options.topk = topk;
  options.num_groups = num_groups;
  options.group_values = group_values;
  return options;
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("targets", [] {
    nb::dict targets;
    AddTarget(targets, "jax_moe_det.aux_loss_fwd", AuxLossFwdCpu);
    // Without atomics there is one kernel: deterministic=False is the same code.
    AddTarget(targets, "jax_moe_det.aux_loss_fwd_atomic", AuxLossFwdCpu);
    AddTarget(targets, "jax_moe_det.aux_loss_partials", AuxLossPartialsCpu);
    AddTarget(targets, "jax_moe_det.aux_loss_final", AuxLossFinalCpu);
    AddTarget(targets, "jax_moe_det.aux_loss_bwd", AuxLossBwdCpu);
    AddTarget(targets, "jax_moe_det.topk_router_fwd", TopkRouterFwdCpu);
    AddTarget(targets, "jax_moe_det.topk_router_bwd", TopkRouterBwdCpu);
    AddTarget(targets, "jax_moe_det.route_fwd", RouteFwdCpu);
    AddTarget(targets, "jax_moe_det.route_pass", RoutePassCpu);
    AddTarget(targets, "jax_moe_det.route_partials", RoutePartialsCpu);
    AddTarget(targets, "jax_moe_det.route_final", RouteFinalCpu);
    AddTarget(targets, "jax_moe_det.route_bwd", RouteBwdCpu);
    AddTarget(targets, "jax_moe_det.routing_stats", RoutingStatsCpu);
    AddTarget(targets, "jax_moe_det.expert_bias_update", ExpertBiasUpdateCpu);
    return targets;
  });
  m.def("aux_loss_workspace_size", [] {
    AuxLossWorkspace workspace = {nullptr, 0};
    AuxLossWorkspaceQuery(&workspace);
    return workspace.num_elements;
  });
  m.def("rows_per_slot", &RowsPerSlot);
  m.attr("max_experts") = kMaxExperts;
  m.def("route_workspace_size",
        [](int64_t num_tokens, int num_experts, int topk, int num_groups, int group_values) {
          RouteWorkspace workspace = {nullptr, 0};
          RouteWorkspaceQuery(num_tokens, num_experts,
                              SelectionSizes(topk, num_groups, group_values), &workspace);
          return workspace.num_elements;
        });
  m.def("route_row_stats_size", [](int64_t num_tokens, int num_experts, int topk, int num_groups,
                                   int group_values) {
    return RouteRowStats(num_tokens, num_experts, SelectionSizes(topk, num_groups, group_values));
  });
}

}  // namespace jax_moe_det
