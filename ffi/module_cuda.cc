// The CUDA module: registration table.
#include <nanobind/nanobind.h>

#include "aux_loss/aux_loss_cuda.h"
#include "core/registration.h"

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
    return targets;
  });
}

}  // namespace jax_moe_det
