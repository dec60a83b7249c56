"""The top-k router of a mixture of experts, with bits that never change.

The order of selection, every sum and the gradient are written in
`ffi/topk_router/topk_router.h`; `reference.py` follows it in NumPy.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jax_moe_det import _checks, _ffi

#: Name of the saved routing map, for `jax.checkpoint` policies.
RESIDUAL_NAME = "jax_moe_det.routing_map"


class ScoreFunction(enum.IntEnum):
    """What turns logits into scores; the values of TransformerEngine."""

    SIGMOID = 0
    SOFTMAX = 1
    SQRTSOFTPLUS = 2


class RoutingMapFormat(enum.IntEnum):
    """A map of bools, or one of bits; the values of TransformerEngine."""

    BYTEMAP = 0
    BITMAP_U8 = 1


class _GroupScore(enum.StrEnum):
    SUM = "sum"
    TOP2 = "top2"
    MAX = "max"


class _ScoreKind(enum.IntEnum):
    """`ScoreKind` of topk_router.h."""

    SOFTMAX_AFTER_TOPK = 0
    SOFTMAX = 1
    SIGMOID = 2
    SQRTSOFTPLUS = 3


# ---- Operands are rows of experts, see _ffi.call_rows. Letters e, w and m are the last dimension
# of logits, of weights or scores, and of maps. The gradient alone has the logits' letter e among
# the results, so that its experts are sharded too.


def _fwd_cores(operands: Sequence[Any]) -> list[str]:
    """Of logits, [expert_bias], [valid_mask]."""
    return ["te", *("t" if x.dtype == jnp.bool_ else "e" for x in operands[1:])]


def _bwd_cores(operands: Sequence[Any], aux_scores: bool) -> list[str]:
    """Of logits, d_out, then [valid_mask] with aux scores, else routing_map."""
    return ["te", "tw", *("t" if aux_scores else "tm" for _ in operands[2:])]


def _fwd_results(logits: Any, aux_scores: bool, bitmap: bool) -> list[tuple[str, tuple[int], Any]]:
    """Of out and routing_map: that they have the tokens, the last dimension and the dtype."""
    num_experts = logits.shape[-1]
    last = -(-num_experts // 8) if bitmap else num_experts
    return [
        ("t", (num_experts,), jnp.float32 if aux_scores else logits.dtype),
        ("t", (last,), jnp.uint8 if bitmap else jnp.bool_),
    ]


def score_attributes(
    *, score_kind: int, topk: int, scaling_factor: float, eps: float
) -> dict[str, Any]:
    """What every handler of rows binds."""
    return {
        "score_kind": np.int64(score_kind),
        "topk": np.int64(topk),
        "scaling_factor": np.float32(scaling_factor),
        "eps": np.float32(eps),
    }


def selection_attributes(
    *, num_groups: int, group_topk: int, group_values: int, **score: Any
) -> dict[str, Any]:
    """What handlers that choose experts bind."""
    return {
        "num_groups": np.int64(num_groups),
        "group_topk": np.int64(group_topk),
        "group_values": np.int64(group_values),
        **score_attributes(**score),
    }


# ---- Any token or batch dimension stays sharded, rows are whole.


def _fwd(*operands: Any, num_lead: int, aux_scores: bool, bitmap: bool, **selection: Any) -> Any:
    """The router primitive's implementation."""
    cores = _fwd_cores(operands)

    def local(*operands: Any) -> Any:
        return _ffi.call_rows(
            "topk_router_fwd",
            operands,
            cores,
            num_lead,
            _fwd_results(operands[0], aux_scores, bitmap),
            aux_scores=aux_scores,
            **selection_attributes(**selection),
        )

    return _ffi.partition_rows(local, operands, cores, num_lead, ["tw", "tm"])


def _bwd(*operands: Any, num_lead: int, aux_scores: bool, **score: Any) -> Any:
    """The gradient primitive's implementation."""
    cores = _bwd_cores(operands, aux_scores)

    def local(*operands: Any) -> Any:
        logits = operands[0]
        result = ("t", logits.shape[-1:], logits.dtype)
        attributes = {"aux_scores": aux_scores, **score_attributes(**score)}
        return _ffi.call_rows("topk_router_bwd", operands, cores, num_lead, [result], **attributes)

    return _ffi.partition_rows(local, operands, cores, num_lead, ["te"])[0]


# ---- Types.


def _result_type(
    avals: Sequence[Any], cores: Sequence[str], num_lead: int, size: int, dtype: Any
) -> Any:
    """A result's type: the batch of all operands, tokens and sharding of the logits, whole rows."""
    logits = avals[0]
    batch = _ffi.batch_shape(avals, _ffi.core_ranks(cores, num_lead))
    shape = (*batch, *logits.shape[len(batch) : -1], size)
    return _ffi.result_aval(logits, shape, (*_ffi.full_spec(logits)[:-1], None), dtype)


def _fwd_type(*avals: Any, num_lead: int, aux_scores: bool, bitmap: bool, **_: Any) -> Any:
    return [
        _result_type(avals, _fwd_cores(avals), num_lead, size, dtype)
        for _, (size,), dtype in _fwd_results(avals[0], aux_scores, bitmap)
    ]


def _jvp_type(*avals: Any, num_lead: int, aux_scores: bool, **_: Any) -> Any:
    out, _map = _fwd_results(avals[0], aux_scores, bitmap=False)
    return _result_type(avals, _bwd_cores(avals, aux_scores), num_lead, *out[1], out[2])


def _bwd_type(*avals: Any, num_lead: int, aux_scores: bool, **_: Any) -> Any:
    logits = avals[0]
    cores = _bwd_cores(avals, aux_scores)
    out = _result_type(avals, cores, num_lead, logits.shape[-1], logits.dtype)
    return _ffi.result_aval(logits, out.shape, _ffi.full_spec(logits), out.dtype)


_bind_fwd = _ffi.make_primitive("moe_topk_router", _fwd, _fwd_type, multiple_results=True)
_bind_bwd = _ffi.make_primitive("moe_topk_router_bwd", _bwd, _bwd_type)


# ---- Derivatives. The tangent of `out` is a primitive that knows its transpose, the gradient, and
# cannot be computed: reverse mode never does. Not jax.custom_vjp: under vmap it adds the gradients
# of shared logits by an XLA reduction, whose order is not a loop's.


_jvp_primitive = _ffi.make_tangent_primitive("moe_topk_router", _jvp_type)


def _fwd_jvp(
    primals: Any,
    tangents: Any,
    *,
    implementation: Any,
    bitmap: bool,
    num_groups: int,
    group_topk: int,
    group_values: int,
    **params: Any,
) -> Any:
    del implementation
    groups = {"num_groups": num_groups, "group_topk": group_topk, "group_values": group_values}
    out, routing_map = _bind_fwd(*primals, bitmap=bitmap, **groups, **params)
    if params["aux_scores"]:
        saved = primals[1:]  # the mask
    else:
        routing_map = checkpoint_name(routing_map, RESIDUAL_NAME)
        saved = [routing_map]
    logits, d_logits = primals[0], tangents[0]
    if type(d_logits) is ad.Zero:
        d_out = _ffi.zero_tangent(out)
    else:
        d_out = _jvp_primitive.bind(logits, d_logits, *saved, **params)
    return [out, routing_map], [d_out, _ffi.zero_tangent(routing_map)]


def _jvp_transpose(d_out: Any, logits: Any, d_logits: Any, *saved: Any, **params: Any) -> Any:
    if type(d_out) is ad.Zero:
        grad = ad.Zero(d_logits.aval)
    else:
        grad = _bind_bwd(*_ffi.unify_varying(logits, d_out, *saved), **params)
        grad = _ffi.sum_to_shape(grad, d_logits.aval.shape)
    return [None, grad, *(None for _ in saved)]


def _bwd_jvp(primals: Any, tangents: Any, *, implementation: Any, **params: Any) -> Any:
    del implementation
    if type(tangents[0]) is not ad.Zero:
        raise NotImplementedError(
            "moe_topk_router_bwd: second derivatives of the router are not implemented"
        )
    logits, _, *saved = primals
    out = _bind_bwd(*primals, **params)
    if type(tangents[1]) is ad.Zero:
        return out, _ffi.zero_tangent(out)
    return out, _bind_bwd(logits, tangents[1], *saved, **params)


ad.primitive_jvps[_bind_fwd.primitive] = _fwd_jvp  # type: ignore[attr-defined]
ad.primitive_transposes[_jvp_primitive] = _jvp_transpose
ad.primitive_jvps[_bind_bwd.primitive] = _bwd_jvp  # type: ignore[attr-defined]


# ---- Public function, and the checks that `route` shares.


def _groups(
    num_groups: int | None, group_topk: int | None, group_score: Any, topk: int, num_experts: int
) -> dict[str, int]:
    """The checked group parameters of the primitive."""
    group_score = _checks.static_enum("group_score", group_score, _GroupScore)
    num_groups = -1 if num_groups is None else _checks.static_int("num_groups", num_groups, -1)
    group_topk = -1 if group_topk is None else _checks.static_int("group_topk", group_topk, -1)
    if num_groups == group_topk == -1:
        return {"num_groups": 1, "group_topk": 1, "group_values": 1}
    if num_groups == 0 or num_experts % num_groups:
        raise _checks.value_error(
            "num_groups", f"{num_groups} for {num_experts} experts", f"a divisor of {num_experts}"
        )
    if -1 in (num_groups, group_topk):
        raise _checks.value_error(
            "num_groups and group_topk", f"{num_groups} and {group_topk}", "both, or neither (-1)"
        )
    group_topk = _checks.static_int("group_topk", group_topk, 1, num_groups)
    group_size = num_experts // num_groups
    if group_topk * group_size < topk:
        raise _checks.value_error(
            "group_topk",
            f"{group_topk} groups of {group_size} experts for topk {topk}",
            "groups that hold topk experts together",
        )
    if group_score is _GroupScore.SUM and topk % group_topk:
        raise _checks.value_error(
            "group_topk",
            f"{group_topk} for topk {topk}",
            'a divisor of topk with group_score="sum"',
        )
    if num_groups == 1:
        return {"num_groups": 1, "group_topk": 1, "group_values": 1}
    values = {
        _GroupScore.SUM: topk // group_topk,
        _GroupScore.TOP2: min(2, group_size),
        _GroupScore.MAX: 1,
    }
    return {
        "num_groups": num_groups,
        "group_topk": group_topk,
        "group_values": values[group_score],
    }


def check_router(
    op: str,
    logits: Any,
    topk: Any,
    *,
    score_function: Any,
    use_pre_softmax: Any,
    num_groups: Any,
    group_topk: Any,
    group_score: Any,
    scaling_factor: Any,
    expert_bias: Any,
    eps: Any,
    valid_mask: Any,
    aux_scores: bool = False,
) -> tuple[list[Any], dict[str, Any]]:
    """Checks the arguments of a public function that calls this.

    Returns:
      logits, expert_bias and valid_mask, the latter two None where not given or not used; the
      primitives' parameters of score and groups.
    """
    logits = _checks.float_array("logits", logits, 2, or_more=True)
    num_experts = logits.shape[-1]
    if not 1 <= num_experts <= _ffi.max_experts:
        raise _checks.value_error(
            "logits", f"shape {logits.shape}", f"1 to {_ffi.max_experts} experts (last dimension)"
        )
    topk = _checks.static_int("topk", topk, 1, num_experts)
    use_pre_softmax = _checks.static_bool("use_pre_softmax", use_pre_softmax)
    groups = _groups(num_groups, group_topk, group_score, topk, num_experts)
    scaling_factor = _checks.static_float32("scaling_factor", scaling_factor)
    score = _checks.static_enum("score_function", score_function, ScoreFunction)
    eps = _checks.static_float32("eps", eps, 0)
    bias = mask = None
    if expert_bias is not None:
        bias = _checks.float32_array("expert_bias", expert_bias, (num_experts,))
    if valid_mask is not None:
        mask = _checks.mask_array("valid_mask", valid_mask, logits.shape[:-1])

    kind = _ScoreKind[score.name]
    if aux_scores:
        bias, scaling_factor = None, 1.0
        groups = dict.fromkeys(groups, 1)
    elif score is ScoreFunction.SOFTMAX and not use_pre_softmax:
        kind = _ScoreKind.SOFTMAX_AFTER_TOPK
        if topk == 1:
            warnings.warn(
                f"{op}: a softmax over one chosen expert is 1 and has no gradient, so the router "
                "cannot learn from its weight; use_pre_softmax=True keeps the gradient",
                stacklevel=3,
            )
    params = {"score_kind": int(kind), "topk": topk, "scaling_factor": scaling_factor, "eps": eps}
    return [logits, bias, mask], {**params, **groups}


def fused_topk_with_score_function(
    logits: Any,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = -1,
    group_topk: int | None = -1,
    scaling_factor: float = 1.0,
    score_function: str | int | ScoreFunction = "softmax",
    expert_bias: Any = None,
    compute_aux_scores: bool = False,
    routing_map_format: str | int | RoutingMapFormat = "bytemap",
    *,
    group_score: str = "sum",
    eps: float = 1e-20,
    valid_mask: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Scores of the experts and the topk of each token: weights or aux scores, and the map.

    Scores are float32, from the logits in float32: softmax over all experts, sigmoid, or
    sqrtsoftplus, `sqrt(log(1 + exp(x)))`. Selection is by score (softmax after top-k: by logit)
    plus `expert_bias`. The weights are of the scores without bias:

    - softmax, after top-k: softmax over the chosen logits;
    - softmax, `use_pre_softmax`: the chosen scores;
    - sigmoid and sqrtsoftplus: the chosen scores, divided by (their sum + `eps`) for `topk` > 1;

    times `scaling_factor`. The sigmoid with bias and groups is DeepSeek-V3's (arXiv:2412.19437,
    equations 12 to 16; the bias: arXiv:2408.15664); names, order of the arguments and sqrtsoftplus
    are those of `fused_topk_with_score_function` in TransformerEngine, and of Megatron-LM.

    Aux scores, for `fused_moe_aux_loss`, are the softmax over all experts, or the other scores
    divided by (their sum over all experts + `eps`). Their map is their own topk: bias, groups,
    `use_pre_softmax` and `scaling_factor` are checked and do not enter.

    One total order decides between experts, and between groups: higher first, then the lower index.
    -0.0 is less than +0.0; every NaN is equal and higher than +inf. So the experts of a token are
    distinct whatever its logits hold. A token with a NaN among its weights has only NaN weights,
    and a NaN gradient at the chosen experts (at all of them, for softmax before top-k and aux
    scores); no other token changes.

    The bits depend on the input bits and static arguments alone: not on the run, the device, the
    backend, the other tokens, the number of devices or the transformation.

    The gradient with respect to `logits` is that of the weights or aux scores with the choice held
    constant: +0 at experts that do not enter and in masked rows. `expert_bias` has gradient zero.
    Forward mode and second derivatives raise NotImplementedError.

    Args:
      logits: `[..., num_experts]`, at least two dimensions; float32, bfloat16 or float16.
      topk: experts per token, 1 to num_experts; static.
      use_pre_softmax: softmax over all experts before the selection, rather than over the chosen
        after it; static. Means nothing for the other score functions.
      num_groups: number of groups of consecutive experts, a divisor of num_experts; static. -1 or
        None, with group_topk: no groups.
      group_topk: groups whose experts may be chosen: those of the highest group scores. Together
        they hold at least topk experts; static.
      scaling_factor: factor of the weights; static, rounded to float32.
      score_function: "softmax", "sigmoid" or "sqrtsoftplus", or a `ScoreFunction`; static.
      expert_bias: float32 `[num_experts]`, added to the scores for the selection alone.
      compute_aux_scores: give aux scores in place of weights; static.
      routing_map_format: "bytemap" or "bitmap_u8", or a `RoutingMapFormat`; static.
      group_score: the score of a group: "sum" of its topk/group_topk highest selection values
        (TransformerEngine; group_topk then divides topk), of its "top2" (DeepSeek-V3), or its
        "max"; static.
      eps: added to the sum of scores that divides them, >= 0; static, rounded to float32.
      valid_mask: bool, shape `logits.shape[:-1]`, True for a real token. Other tokens get no expert
        and gradient +0, whatever they hold.

    Returns:
      Weights, `[..., num_experts]` in logits' dtype, +0 where not chosen; or aux scores, float32.
      The routing map, bool `[..., num_experts]`; or uint8 `[..., ceil(num_experts / 8)]`, a bit per
      expert, the lowest first.

    Raises:
      TypeError: an argument has a wrong type or dtype, or a static one is traced.
      ValueError: an argument has a wrong shape or value.
    """
    aux_scores = _checks.static_bool("compute_aux_scores", compute_aux_scores)
    map_format = _checks.static_enum("routing_map_format", routing_map_format, RoutingMapFormat)
    operands, params = check_router(
        "fused_topk_with_score_function",
        logits,
        topk,
        score_function=score_function,
        use_pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        group_score=group_score,
        scaling_factor=scaling_factor,
        expert_bias=expert_bias,
        eps=eps,
        valid_mask=valid_mask,
        aux_scores=aux_scores,
    )
    out, routing_map = _bind_fwd(
        *_ffi.unify_varying(*(x for x in operands if x is not None)),
        num_lead=operands[0].ndim - 1,
        aux_scores=aux_scores,
        bitmap=map_format is RoutingMapFormat.BITMAP_U8,
        **params,
    )
    return out, routing_map
