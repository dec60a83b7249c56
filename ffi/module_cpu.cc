// The CPU module: registration table and workspace queries.
#include <nanobind/nanobind.h>

#include "aux_loss/aux_loss.h"
#include "aux_loss/aux_loss_cpu.h"
#include "core/registration.h"

namespace nb = nanobind;

namespace jax_moe_det {

NB_MODULE(_cpu, m) {
  m.def("targets", [] {
    nb::dict targets;
    AddTarget(targets, "jax_moe_det.aux_loss_fwd", AuxLossFwdCpu);
    // Without atomics there is one kernel: deterministic=False is the same code.
    AddTarget(targets, "jax_moe_det.aux_loss_fwd_atomic", AuxLossFwdCpu);
    AddTarget(targets, "jax_moe_det.aux_loss_partials", AuxLossPartialsCpu);
    AddTarget(targets, "jax_moe_det.aux_loss_final", AuxLossFinalCpu);
    AddTarget(targets, "jax_moe_det.aux_loss_bwd", AuxLossBwdCpu);
    return targets;
  });
  m.def("aux_loss_workspace_size", [] {
    AuxLossWorkspace workspace = {nullptr, 0};
    AuxLossWorkspaceQuery(&workspace);
    return workspace.num_elements;
  });
  m.def("rows_per_slot", &RowsPerSlot);
}

}  // namespace jax_moe_det
