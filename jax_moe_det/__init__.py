"""Deterministic mixture-of-experts routing for JAX."""

import pkgutil

# In a clone, `python -m jax_moe_det` finds this folder first: the compiled modules are where pip
# put them.
__path__ = pkgutil.extend_path(__path__, __name__)

from jax_moe_det import testing as testing
from jax_moe_det.aux_loss import aux_loss_workspace as aux_loss_workspace
from jax_moe_det.aux_loss import fused_moe_aux_loss as fused_moe_aux_loss
from jax_moe_det.route import Routing as Routing
from jax_moe_det.route import RoutingStats as RoutingStats
from jax_moe_det.route import route as route
from jax_moe_det.route import routing_stats as routing_stats
from jax_moe_det.route import update_expert_bias as update_expert_bias
from jax_moe_det.topk_router import RoutingMapFormat as RoutingMapFormat
from jax_moe_det.topk_router import ScoreFunction as ScoreFunction
from jax_moe_det.topk_router import (
    fused_topk_with_score_function as fused_topk_with_score_function,
)

__version__ = "0.1.0"

__all__ = [
    "Routing",
    "RoutingMapFormat",
    "RoutingStats",
    "ScoreFunction",
    "aux_loss_workspace",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "route",
    "routing_stats",
    "testing",
    "update_expert_bias",
]
