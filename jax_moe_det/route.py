"""The router step of a mixture of experts in one pass: choice, weights, counts and losses.

What is computed is written in `ffi/route/route.h`; `reference.py` follows it in NumPy.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jax_moe_det import _checks, _ffi, aux_loss, topk_router

#: Name of the saved routing, for `jax.checkpoint` policies; the saved counts of the auxiliary loss
#: have the name of `aux_loss.RESIDUAL_NAME`.
RESIDUAL_NAME = "jax_moe_det.routing_indices"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What `route` returns.

    Attributes:
      weights: weights of the chosen experts, `[..., topk]` in logits' dtype.
      indices: the chosen experts, int32 `[..., topk]`; num_experts where there is none.
      tokens_per_expert: choices of each expert, int32 `[num_experts]`.
      aux_loss: auxiliary load-balancing loss, float32 `[]`.
      z_loss: router z-loss, float32 `[]`.
    """

    weights: jax.Array
    indices: jax.Array
    tokens_per_expert: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingStats:
    """What `routing_stats` returns.

    Attributes:
      load: share of the tokens of each expert, float32 `[num_experts]`.
      max_violation: (largest count - mean) / mean, float32 `[]`.
      min_violation: (mean - smallest count) / mean, float32 `[]`.
      entropy: entropy of the load in nats, float32 `[]`.
      effective_experts: exp(entropy), float32 `[]`.
      dead: number of experts without a token, int32 `[]`.
    """

    load: jax.Array
    max_violation: jax.Array
    min_violation: jax.Array
    entropy: jax.Array
    effective_experts: jax.Array
    dead: jax.Array


class _LossMap(enum.StrEnum):
    DISPATCH = "dispatch"
    PLAIN = "plain"


# ---- Operands are rows of experts, see _ffi.call_rows. Letters: e experts, w choices, c counts,
# s slots; p are the counts of the loss, where those are not the routing's.
#
# The step: logits, [expert_bias], [valid_mask], [replayed indices], [N] ->
#     weights, indices, counts, aux_loss, z_loss, [plain counts].
# Its gradient: logits, indices, counts of the loss, [d_weights], [d_aux_loss], [d_z_loss],
#     [valid_mask], [N] -> d_logits. Of the three cotangents, `cotangents` tells which are there.

_RESULT_CORES = ["tw", "tw", "c", "", "", "p"]
_COTANGENT_CORES = ["tw", "", ""]


def _fwd_cores(operands: Sequence[Any]) -> list[str]:
    logits, *rest = operands

    def core(x: Any) -> str:
        if x.dtype == jnp.bool_:
            return "t"
        if jnp.issubdtype(x.dtype, jnp.floating):
            return "e"
        return "tw" if x.ndim == logits.ndim else ""

    return ["te", *map(core, rest)]


def _bwd_cores(operands: Sequence[Any], cotangents: Sequence[bool]) -> list[str]:
    given = [core for core, is_given in zip(_COTANGENT_CORES, cotangents, strict=True) if is_given]
    rest = operands[3 + len(given) :]
    return ["te", "tw", "c", *given, *("t" if x.dtype == jnp.bool_ else "" for x in rest)]


def _loss_attributes(
    aux_loss_coeff: float, z_loss_coeff: float, total: float | None
) -> dict[str, Any]:
    return {
        "aux_loss_coeff": np.float64(aux_loss_coeff),
        "z_loss_coeff": np.float64(z_loss_coeff),
        "total_num_tokens": _ffi.total_attribute(total),
    }


def _scratch_sizes(logits: Any, num_lead: int, selection: dict[str, Any]) -> tuple[int, ...]:
    """What decides the size of a scratch result."""
    num_tokens = math.prod(logits.shape[logits.ndim - 1 - num_lead : -1])
    names = ("topk", "num_groups", "group_values")
    return (num_tokens, logits.shape[-1], *(selection[name] for name in names))


def _result_sizes(logits: Any, topk: int) -> list[tuple[str, tuple[int, ...], Any]]:
    """Of weights, indices and counts."""
    return [
        ("t", (topk,), logits.dtype),
        ("t", (topk,), jnp.int32),
        ("", logits.shape[-1:], jnp.int32),
    ]


# ---- One device's pieces.


def _local(
    *operands: Any,
    num_lead: int,
    plain: bool,
    aux_loss_coeff: float,
    z_loss_coeff: float,
    total: float | None,
    **selection: Any,
) -> list[Any]:
    """The whole step."""
    logits = operands[0]
    workspace = _ffi.route_workspace_size(*_scratch_sizes(logits, num_lead, selection))
    *chosen, plain_counts, aux, z, _workspace = _ffi.call_rows(
        "route_fwd",
        operands,
        _fwd_cores(operands),
        num_lead,
        [
            *_result_sizes(logits, selection["topk"]),
            ("", (logits.shape[-1] if plain else 0,), jnp.int32),
            ("", (), jnp.float32),
            ("", (), jnp.float32),
            ("", (workspace,), jnp.float32),
        ],
        **topk_router.selection_attributes(**selection),
        **_loss_attributes(aux_loss_coeff, z_loss_coeff, total),
    )
    return [*chosen, aux, z, *([plain_counts] if plain else [])]


def _local_pass(
    *operands: Any,
    num_lead: int,
    plain: bool,
    rows_per_slot: int,
    wants_aux: bool,
    wants_z: bool,
    **selection: Any,
) -> tuple[list[Any], list[Any], Any, Any]:
    """Weights, indices; counts, [plain counts]; column sums and z partials, empty if not wanted."""
    logits = operands[0]
    sizes = _scratch_sizes(logits, num_lead, selection)
    num_slots = -(-sizes[0] // rows_per_slot)
    num_experts = logits.shape[-1]
    weights, indices, counts, plain_counts, column_sums, z_partials, _stats = _ffi.call_rows(
        "route_pass",
        operands,
        _fwd_cores(operands),
        num_lead,
        [
            *_result_sizes(logits, selection["topk"]),
            ("", (num_experts if plain else 0,), jnp.int32),
            ("", (num_slots, num_experts) if wants_aux else (0,), jnp.float32),
            ("", (num_slots if wants_z else 0,), jnp.float32),
            ("", (_ffi.route_row_stats_size(*sizes),), jnp.float32),
        ],
        rows_per_slot=np.int64(rows_per_slot),
        **topk_router.selection_attributes(**selection),
    )
    all_counts = [counts, *([plain_counts] if plain else [])]
    return [weights, indices], all_counts, column_sums, z_partials


def _local_partials(column_sums: Any, counts: Any, batch: tuple[int, ...]) -> Any:
    """Column sums of slots, counts of all tokens -> the aux loss's partials."""
    column_sums, counts = _ffi.unify_varying(column_sums, counts)
    column_sums = jnp.broadcast_to(column_sums, batch + column_sums.shape[-2:])
    results = [("", column_sums.shape[-2:-1], jnp.float32)]
    return _ffi.call_rows("route_partials", [column_sums, counts], ["se", "c"], 0, results)[0]


def _local_final(
    partials: Sequence[Any],
    total: Sequence[Any],
    batch: tuple[int, ...],
    num_experts: int,
    topk: int,
    **attributes: Any,
) -> list[Any]:
    """All slots' partials of both losses, each empty where there is none, [N] -> both losses."""
    filled = [jnp.broadcast_to(x, batch + x.shape[-1:]) for x in partials]
    return _ffi.call_rows(
        "route_final",
        _ffi.unify_varying(*filled, *total),
        ["s", "s", *("" for _ in total)],
        0,
        [("", (), jnp.float32)] * 2,
        num_experts=np.int64(num_experts),
        topk=np.int64(topk),
        **attributes,
    )


# ---- Sharding. Tokens stay where they are.


def _sharded(
    axes: Sequence[Any],
    num_shards: Sequence[int],
    *operands: Any,
    num_lead: int,
    plain: bool,
    aux_loss_coeff: float,
    z_loss_coeff: float,
    total: float | None,
    **selection: Any,
) -> list[Any]:
    """The step of one device's tokens, with the counts and losses of all.

    Counts are summed over the devices, as integers. Where a device holds whole slots, partials of
    the losses travel; otherwise the logits do. Floating-point sums never happen in a collective.

    Args:
      axes: for each token dimension the mesh axes that shard it, or None.
      num_shards: for each token dimension the number of its shards.
      *operands: one device's.
      num_lead: number of token dimensions.
      plain: does the aux loss have counts of its own?
      aux_loss_coeff: coefficient.
      z_loss_coeff: coefficient.
      total: N, None where that is an operand.
      **selection: parameters of score and groups.
    """
    logits = operands[0]
    num_batch = logits.ndim - 1 - num_lead
    lead, num_experts = logits.shape[num_batch:-1], logits.shape[-1]
    all_axes = tuple(name for x in axes for name in _ffi.axis_names(x))
    wants = {"wants_aux": aux_loss_coeff != 0, "wants_z": z_loss_coeff != 0}
    first, *others = (i for i, x in enumerate(axes) if x is not None)
    rows_per_slot = None
    if math.prod(lead[:first]) == 1 and not others:  # a device's tokens are consecutive
        shards = num_shards[first]
        rows_per_slot = _ffi.rows_per_whole_slot(math.prod(lead) * shards, shards)
    whole_slots = rows_per_slot is not None
    total_operand = operands[len(operands) - (total is None) :]

    chosen, counts, column_sums, z_partials = _local_pass(
        *operands[: len(operands) - (total is None)],
        num_lead=num_lead,
        plain=plain and whole_slots,
        rows_per_slot=rows_per_slot or max(1, _ffi.rows_per_slot(math.prod(lead))),
        **(wants if whole_slots else dict.fromkeys(wants, False)),
        **selection,
    )
    counts = lax.psum(counts, all_axes)
    batch = chosen[0].shape[:num_batch]
    if not whole_slots and any(wants.values()):
        # The losses of gathered tokens: their choice is not needed again.
        gathered = [x for x in operands if x is logits or x.dtype == jnp.bool_]
        for i, names in enumerate(axes):
            if names is not None:
                gathered = [_ffi.gather(x, names, num_batch + i) for x in gathered]
        num_tokens = math.prod(gathered[0].shape[num_batch:-1])
        _, all_counts, column_sums, z_partials = _local_pass(
            *gathered,
            num_lead=num_lead,
            plain=plain,
            rows_per_slot=max(1, _ffi.rows_per_slot(num_tokens)),
            **wants,
            **{**selection, "num_groups": 1, "group_topk": 1, "group_values": 1},
        )
        # Bias and replay, which may be batched where the logits are not, did not enter.
        counts += [jnp.broadcast_to(x, batch + x.shape[-1:]) for x in all_counts[1:]]
    partials = [column_sums, z_partials]
    if wants["wants_aux"]:
        partials[0] = _local_partials(column_sums, counts[-1], batch)
    if whole_slots and any(wants.values()):
        # One collective for both losses.
        travelling = [i for i, is_wanted in enumerate(wants.values()) if is_wanted]
        together = jnp.stack([partials[i] for i in travelling])
        arrived = _ffi.gather(together, all_axes, 1 + num_batch)
        for i, x in zip(travelling, arrived, strict=True):
            partials[i] = x
    losses = _local_final(
        partials,
        total_operand,
        batch,
        num_experts,
        selection["topk"],
        **_loss_attributes(aux_loss_coeff, z_loss_coeff, total),
    )
    return [*chosen, counts[0], *losses, *counts[1:]]


def _fwd(*operands: Any, axis_name: Any, num_lead: int, **options: Any) -> Any:
    """The step's implementation on global arrays, or on one device's in shard_map."""
    options["num_lead"] = num_lead
    unsharded = (None,) * (num_lead - 1)
    if axis_name is not None:
        axes = (axis_name, *unsharded)
        shards = (lax.axis_size(axis_name), *(1 for _ in unsharded))
        return _sharded(axes, shards, *operands, **options)

    def sharded(mesh: Any, axes: tuple[Any, ...]) -> Any:
        shards = [_ffi.axis_size(mesh, names) for names in axes]
        return functools.partial(_sharded, axes, shards, **options)

    return _ffi.partition_rows(
        functools.partial(_local, **options),
        operands,
        _fwd_cores(operands),
        num_lead,
        _RESULT_CORES[: 5 + options["plain"]],
        sharded,
    )


def _bwd(
    *operands: Any,
    num_lead: int,
    cotangents: tuple[bool, ...],
    distinct: bool,
    aux_loss_coeff: float,
    z_loss_coeff: float,
    total: float | None,
    **score: Any,
) -> Any:
    """The gradient's implementation."""
    cores = _bwd_cores(operands, cotangents)

    def local(*operands: Any) -> Any:
        logits = operands[0]
        given = iter(operands[3 : 3 + sum(cotangents)])
        empty = jnp.zeros((1,) * (logits.ndim - 1 - num_lead) + (0,), jnp.float32)
        return _ffi.call_rows(
            "route_bwd",
            [
                *operands[:3],
                *(next(given) if is_given else empty for is_given in cotangents),
                *operands[3 + sum(cotangents) :],
            ],
            [
                *cores[:3],
                *(
                    core if is_given else "s"
                    for core, is_given in zip(_COTANGENT_CORES, cotangents, strict=True)
                ),
                *cores[3 + sum(cotangents) :],
            ],
            num_lead,
            [("t", logits.shape[-1:], logits.dtype)],
            distinct=distinct,
            **topk_router.score_attributes(**score),
            **_loss_attributes(aux_loss_coeff, z_loss_coeff, total),
        )

    return _ffi.partition_rows(local, operands, cores, num_lead, ["te"])[0]


# ---- Types.


def _types(
    avals: Sequence[Any],
    cores: Sequence[str],
    num_lead: int,
    topk: int,
    axis_name: Any,
    total: float | None,
) -> list[Any]:
    """Types of weights, indices, counts, aux_loss, z_loss and plain counts."""
    logits = avals[0]
    batch = _ffi.batch_shape(avals, _ffi.core_ranks(cores, num_lead))
    lead = logits.shape[len(batch) : -1]
    spec = _ffi.full_spec(logits)[:-1]
    per_token = functools.partial(_ffi.result_aval, logits, (*batch, *lead, topk), (*spec, None))
    counts = _ffi.result_aval(
        logits, (*batch, logits.shape[-1]), (*spec[: len(batch)], None), jnp.int32
    )
    loss = _ffi.result_aval(logits, batch, spec[: len(batch)], jnp.float32)
    if axis_name is not None:
        # Replicated over the axis, unless N is not.
        manual = logits.manual_axis_type
        varying = manual.varying - frozenset(axis_name)
        counts = counts.update(manual_axis_type=manual.update(varying=varying))
        if total is None:
            varying |= avals[-1].manual_axis_type.varying
        loss = loss.update(manual_axis_type=manual.update(varying=varying))
    return [per_token(logits.dtype), per_token(jnp.int32), counts, loss, loss, counts]


def _fwd_type(
    *avals: Any, num_lead: int, plain: bool, topk: int, axis_name: Any, total: Any, **_: Any
) -> Any:
    return _types(avals, _fwd_cores(avals), num_lead, topk, axis_name, total)[: 5 + plain]


def _jvp_type(
    logits: Any,
    _d_logits: Any,
    *saved: Any,
    num_lead: int,
    topk: int,
    axis_name: Any,
    **params: Any,
) -> Any:
    avals = [logits, *saved]
    cores = _bwd_cores(avals, (False,) * 3)
    types = _types(avals, cores, num_lead, topk, axis_name, params["total"])
    return [types[0], *types[3:5]]


def _bwd_type(*avals: Any, num_lead: int, cotangents: tuple[bool, ...], **_: Any) -> Any:
    logits = avals[0]
    cores = _bwd_cores(avals, cotangents)
    batch = _ffi.batch_shape(avals, _ffi.core_ranks(cores, num_lead))
    shape = batch + logits.shape[len(batch) :]
    return _ffi.result_aval(logits, shape, _ffi.full_spec(logits), logits.dtype)


_bind_fwd = _ffi.make_primitive("moe_route", _fwd, _fwd_type, multiple_results=True)
_bind_bwd = _ffi.make_primitive("moe_route_bwd", _bwd, _bwd_type)


# ---- Derivatives. As in topk_router.py: the tangents are a primitive that knows its transpose, the
# gradient, and cannot be computed.


_jvp_primitive = _ffi.make_tangent_primitive("moe_route", _jvp_type, multiple_results=True)


def _fwd_jvp(
    primals: Any,
    tangents: Any,
    *,
    implementation: Any,
    plain: bool,
    num_groups: int,
    group_topk: int,
    group_values: int,
    **params: Any,
) -> Any:
    del implementation
    groups = {"num_groups": num_groups, "group_topk": group_topk, "group_values": group_values}
    weights, indices, counts, aux, z, *rest = _bind_fwd(*primals, plain=plain, **groups, **params)
    indices = checkpoint_name(indices, RESIDUAL_NAME)
    loss_counts = checkpoint_name(rest[0] if plain else counts, aux_loss.RESIDUAL_NAME)
    out = [weights, indices, *([counts] if plain else [loss_counts]), aux, z]
    out += [loss_counts] if plain else []
    cores = _fwd_cores(primals)
    d_out = [_ffi.zero_tangent(x) for x in out]
    if type(tangents[0]) is not ad.Zero:
        saved = [x for x, core in zip(primals, cores, strict=True) if core in ("t", "")]
        d_out[0], d_out[3], d_out[4] = _jvp_primitive.bind(
            primals[0],
            tangents[0],
            indices,
            loss_counts,
            *saved,
            distinct="tw" not in cores,
            **params,
        )
    return out, d_out


def _jvp_transpose(
    d_out: Any, logits: Any, d_logits: Any, *saved: Any, axis_name: Any, **params: Any
) -> Any:
    coeffs = (1.0, params["aux_loss_coeff"], params["z_loss_coeff"])
    cotangents = tuple(
        type(d) is not ad.Zero and coeff != 0 for d, coeff in zip(d_out, coeffs, strict=True)
    )
    aval = d_logits.aval
    if not any(cotangents):
        return [None, ad.Zero(aval), *(None for _ in saved)]
    d_weights, *d_losses = d_out
    whole = [d_weights]
    for d, is_given in zip(d_losses, cotangents[1:], strict=True):
        whole.append(_ffi.whole_cotangent(d, axis_name, aval) if is_given else d)
    given = [d for d, is_given in zip(whole, cotangents, strict=True) if is_given]
    indices, counts, *rest = saved
    operands = _ffi.unify_varying(logits, indices, counts, *given, *rest)
    grad = _bind_bwd(*operands, cotangents=cotangents, **params)
    return [None, _ffi.sum_to_shape(grad, aval.shape), *(None for _ in saved)]


def _bwd_jvp(
    primals: Any, tangents: Any, *, implementation: Any, cotangents: Any, **params: Any
) -> Any:
    del implementation
    if type(tangents[0]) is not ad.Zero:
        raise NotImplementedError(
            "moe_route_bwd: second derivatives of the router are not implemented"
        )
    out = _bind_bwd(*primals, cotangents=cotangents, **params)
    # Linear in the cotangents together.
    end = 3 + sum(cotangents)
    given = iter(tangents[3:end])
    nonzero = [next(given) if is_given else None for is_given in cotangents]
    nonzero = [None if type(d) is ad.Zero else d for d in nonzero]
    moved = [d for d in nonzero if d is not None]
    if not moved:
        return out, _ffi.zero_tangent(out)
    flags = tuple(d is not None for d in nonzero)
    return out, _bind_bwd(*primals[:3], *moved, *primals[end:], cotangents=flags, **params)


ad.primitive_jvps[_bind_fwd.primitive] = _fwd_jvp  # type: ignore[attr-defined]
ad.primitive_transposes[_jvp_primitive] = _jvp_transpose
ad.primitive_jvps[_bind_bwd.primitive] = _bwd_jvp  # type: ignore[attr-defined]


# ---- Statistics and the bias update: a row of experts, which is never sharded while it is read.


def _update(*operands: Any) -> Any:
    """expert_bias, counts, rate -> expert_bias."""
    cores = ["e", "c", ""]

    def local(*operands: Any) -> Any:
        results = [("", operands[0].shape[-1:], jnp.float32)]
        return _ffi.call_rows("expert_bias_update", operands, cores, 0, results)

    return _ffi.partition_rows(local, operands, cores, 0, ["e"])[0]


def _update_type(*avals: Any) -> Any:
    bias = avals[0]
    batch = _ffi.batch_shape(avals, [1, 1, 0])
    return _ffi.result_aval(bias, batch + bias.shape[-1:], _ffi.full_spec(bias), jnp.float32)


def _stats(counts: Any) -> Any:
    """Counts -> the fields of RoutingStats."""

    def local(counts: Any) -> Any:
        load, summary, dead = _ffi.call_rows(
            "routing_stats",
            [counts],
            ["e"],
            0,
            [
                ("", counts.shape[-1:], jnp.float32),
                ("", (4,), jnp.float32),
                ("", (), jnp.int32),
            ],
        )
        return [load, *(summary[..., i] for i in range(4)), dead]

    return _ffi.partition_rows(local, [counts], ["e"], 0, ["c", "", "", "", "", ""])


def _stats_type(counts: Any) -> Any:
    batch = counts.shape[:-1]
    spec = _ffi.full_spec(counts)[:-1]
    load = _ffi.result_aval(counts, counts.shape, (*spec, None), jnp.float32)
    scalar = functools.partial(_ffi.result_aval, counts, batch, spec)
    return [load, *(scalar(jnp.float32) for _ in range(4)), scalar(jnp.int32)]


_bind_update = _ffi.make_primitive("moe_expert_bias_update", _update, _update_type)
_bind_stats = _ffi.make_primitive("moe_routing_stats", _stats, _stats_type, multiple_results=True)


# ---- Public functions.


def route(
    logits: Any,
    topk: int,
    *,
    score_function: str | int | topk_router.ScoreFunction = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = -1,
    group_topk: int | None = -1,
    group_score: str = "sum",
    scaling_factor: float = 1.0,
    expert_bias: Any = None,
    eps: float = 1e-20,
    indices: Any = None,
    valid_mask: Any = None,
    aux_loss_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
    loss_map: str = "dispatch",
    total_num_tokens: Any = None,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
) -> Routing:
    """The router step in one pass over the logits: choice, weights, counts and both losses.

    Scores, selection, weights and their special values are those of
    `fused_topk_with_score_function`, by index rather than as a map. The losses:

    - `aux_loss` is `fused_moe_aux_loss` of the aux scores (softmax over all experts, or the other
      scores divided by (their sum over all experts + `eps`)) and the counts that `loss_map` names,
      bit for bit (Fedus et al., 2021, arXiv:2101.03961, equations 4 to 6);
    - `z_loss` is `z_loss_coeff / N * sum(logsumexp(logits)**2)` (Zoph et al., 2022,
      arXiv:2202.08906, equation 5).

    All leading dimensions together are the tokens, in row-major order: the results are those of the
    flat call, bit for bit. The bits depend on the input bits and static arguments alone: not on the
    run, the device, the backend, the number of devices or the transformation; weights and indices
    of a token not on the other tokens.

    The gradient with respect to `logits` is that of weights, aux_loss and z_loss together, with the
    choice and the counts held constant. `expert_bias` has gradient zero. Forward mode and second
    derivatives raise NotImplementedError.

    Args:
      logits: `[..., num_experts]`, at least two dimensions; float32, bfloat16 or float16.
      topk: experts per token, 1 to num_experts; static.
      score_function: "softmax", "sigmoid" or "sqrtsoftplus", or a `ScoreFunction`; static.
      use_pre_softmax: softmax over all experts before the selection, rather than over the chosen
        after it; static. Means nothing for the other score functions.
      num_groups: number of groups of consecutive experts, a divisor of num_experts; static. -1 or
        None, with group_topk: no groups.
      group_topk: groups whose experts may be chosen; static.
      group_score: the score of a group, "sum", "top2" or "max"; static.
      scaling_factor: factor of the weights; static, rounded to float32.
      expert_bias: float32 `[num_experts]`, added to the scores for the selection alone.
      eps: added to the sum of scores that divides them, >= 0; static, rounded to float32.
      indices: routing replay: `[..., topk]`, int32 or another integer dtype, the experts of each
        token in place of the router's own choice, in this order. Counts, losses and gradient are
        those of a call that chose them; bias and groups are checked and do not enter. An index
        outside 0 to num_experts - 1 means no expert; a repeated one counts each time.
      valid_mask: bool, shape `logits.shape[:-1]`, True for a real token. Other tokens get no
        expert, do not count, add nothing to the losses and have gradient +0, whatever they hold.
      aux_loss_coeff: coefficient of aux_loss; static, kept as float64. 0 switches it off.
      z_loss_coeff: coefficient of z_loss; static, kept as float64. 0 switches it off.
      loss_map: the counts of the aux loss: "dispatch", this routing's, or "plain", of the topk aux
        scores without bias and groups; static.
      total_num_tokens: N: an integer of any size, or an integer scalar array. Default: the number
        of tokens, or of valid ones; over `axis_name`, of all devices. With 0 the losses are 0.
      axis_name: inside `jax.shard_map`, the mesh axis (or axes) over which the tokens are sharded:
        those of one device follow those of the one before. tokens_per_expert and the losses are
        then those of all tokens, replicated; total_num_tokens is global; weights and indices stay
        local. Without it the function is local to a device.

    Returns:
      A `Routing`. A token that has no expert in a place has index num_experts and weight +0 there.

    Raises:
      TypeError: an argument has a wrong type or dtype, or a static one is traced.
      ValueError: an argument has a wrong shape or value.
    """
    (logits, bias, mask), selection = topk_router.check_router(
        "route",
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
    )
    lead, num_experts = logits.shape[:-1], logits.shape[-1]
    if indices is not None:
        shape = (*lead, selection["topk"])
        indices = _checks.indices_array("indices", indices, shape, num_experts)
    aux_loss_coeff = _checks.static_float("aux_loss_coeff", aux_loss_coeff)
    z_loss_coeff = _checks.static_float("z_loss_coeff", z_loss_coeff)
    plain = _checks.static_enum("loss_map", loss_map, _LossMap) is _LossMap.PLAIN
    axes = None if axis_name is None else _checks.bound_axes("axis_name", axis_name)
    static_total, total = aux_loss.token_total(total_num_tokens, math.prod(lead), mask, axes)
    if aux_loss_coeff == z_loss_coeff == 0:
        static_total, total = 0.0, []  # no loss reads it

    operands = [x for x in (logits, bias, mask, indices) if x is not None]
    if axes is None:
        operands = _ffi.unify_varying(*operands, *total)
    else:
        # N is global over the axes: it need not vary over them, and the losses then do not.
        union = frozenset().union(*map(_ffi.varying_axes, (*operands, *total)))
        operands = _ffi.unify_varying(*operands, over=[*union, *axes] if union else ()) + total
    weights, chosen, counts, aux, z, *_ = _bind_fwd(
        *operands,
        num_lead=len(lead),
        axis_name=axes,
        plain=plain and aux_loss_coeff != 0,
        aux_loss_coeff=aux_loss_coeff,
        z_loss_coeff=z_loss_coeff,
        total=static_total,
        **selection,
    )
    return Routing(weights, chosen, counts, aux, z)


def update_expert_bias(expert_bias: Any, tokens_per_expert: Any, rate: Any) -> jax.Array:
    """The bias of the next step: raised for experts below the mean count, lowered above it.

    `bias + rate * sign(mean(counts) - count)` (arXiv:2408.15664, algorithm 1). The sign comes from
    exact integers, for float32 counts from float64; then there is one float32 addition. Where the
    sign is 0 the bias keeps its bits.

    A pure function, without a derivative: no gradient flows through it.

    Args:
      expert_bias: float32 `[num_experts]`.
      tokens_per_expert: counts of all tokens, `[num_experts]`, int32, int64 or float32.
      rate: a number or a scalar array, rounded to float32.

    Returns:
      float32 `[num_experts]`.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: an argument has a wrong shape or value.
    """
    counts = _checks.counts_array("tokens_per_expert", tokens_per_expert)
    bias = _checks.float32_array("expert_bias", expert_bias, counts.shape)
    rate = _checks.float32_scalar("rate", rate)
    return _bind_update(*_ffi.unify_varying(*map(lax.stop_gradient, (bias, counts, rate))))


def routing_stats(tokens_per_expert: Any) -> RoutingStats:
    """How even the load of the experts is.

    For no tokens everything is 0, but `dead`, which is num_experts. Without a derivative: no
    gradient flows through it.

    Args:
      tokens_per_expert: counts, `[num_experts]`, int32, int64 or float32.

    Returns:
      A `RoutingStats`.

    Raises:
      TypeError: tokens_per_expert has a wrong dtype.
      ValueError: tokens_per_expert has a wrong shape.
    """
    counts = _checks.counts_array("tokens_per_expert", tokens_per_expert)
    return RoutingStats(*_bind_stats(lax.stop_gradient(counts)))
