"""Deterministic mixture-of-experts routing for JAX."""

import pkgutil

# In a clone, `python -m jax_moe_det` finds this folder first: the compiled modules are where pip
# put them.
__path__ = pkgutil.extend_path(__path__, __name__)

from jax_moe_det import testing as testing
from jax_moe_det.aux_loss import aux_loss_workspace as aux_loss_workspace
from jax_moe_det.aux_loss import fused_moe_aux_loss as fused_moe_aux_loss

__version__ = "0.1.0"

__all__ = ["aux_loss_workspace", "fused_moe_aux_loss", "testing"]
