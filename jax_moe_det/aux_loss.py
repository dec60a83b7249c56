"""The auxiliary load-balancing loss of a mixture-of-experts router, with bits that never change.

The order of every sum is written in `ffi/core/slots.h` and `ffi/aux_loss/aux_loss.h`;
`reference.py` follows it in NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from jax_moe_det import _checks, _ffi

#: Name of the saved token counts, for `jax.checkpoint` policies.
RESIDUAL_NAME = "jax_moe_det.tokens_per_expert"


def aux_loss_workspace(probs_shape: Sequence[int], dtype: Any = jnp.float32) -> Any:
    """Shape and dtype of the scratch that one loss needs, from the C++ query.

    Lowering adds it as a hidden result, and XLA allocates it; under `vmap` there is one for each
    batch item.

    Args:
      probs_shape: `(num_tokens, num_columns)` of the scores.
      dtype: dtype of the scores: float32, bfloat16 or float16.

    Returns:
      A `jax.ShapeDtypeStruct`: float32 `[256]` for every shape and dtype.

    Raises:
      TypeError: `dtype` is not one of the three.
      ValueError: `probs_shape` has not two dimensions, or a negative one.
    """
    dtype = np.dtype(dtype)
    if dtype.name not in _checks.FLOAT_DTYPES:
        raise _checks.type_error("dtype", dtype, ", ".join(_checks.FLOAT_DTYPES))
    shape = tuple(probs_shape)
    if len(shape) != 2:
        raise _checks.value_error("probs_shape", shape, "(num_tokens, num_columns)")
    for size in shape:
        _checks.static_int("probs_shape", size, 0)
    return jax.ShapeDtypeStruct((_ffi.aux_loss_workspace_size(),), jnp.float32)


# ---- One device's pieces. Operands are [*batch, ...], see _ffi.make_primitive.


def _scale(num_experts: int, topk: int, coeff: float, total: float | None) -> dict[str, Any]:
    return {
        "num_experts": np.int64(num_experts),
        "topk": np.int64(topk),
        "coeff": np.float64(coeff),
        "total_num_tokens": _ffi.total_attribute(total),
    }


def _core_ranks(num_optional: int, masked: bool, *fixed: int) -> list[int]:
    """Ranks without the batch: of the fixed operands, then valid_mask [T] and N []."""
    return [*fixed, *([1] if masked else []), *([0] * (num_optional - masked))]


def _local_loss(*operands: Any, masked: bool, deterministic: bool, **scale: Any) -> Any:
    """probs, tokens_per_expert, [valid_mask], [N] -> loss."""
    ranks = _core_ranks(len(operands) - 2, masked, 2, 1)
    batch, operands = _ffi.fill_batch(operands, ranks)
    probs = operands[0]
    workspace = aux_loss_workspace(probs.shape[-2:], probs.dtype)
    target = "aux_loss_fwd" if deterministic else "aux_loss_fwd_atomic"
    results = (
        _ffi.typed_like(probs, batch, jnp.float32),
        _ffi.typed_like(probs, batch + workspace.shape, workspace.dtype),
    )
    return _ffi.call(target, results, *operands, **_scale(**scale))[0]


def _local_partials(*operands: Any, rows_per_slot: int) -> Any:
    """probs, tokens_per_expert, [valid_mask], whole slots of them -> partials."""
    ranks = _core_ranks(len(operands) - 2, len(operands) > 2, 2, 1)
    batch, operands = _ffi.fill_batch(operands, ranks)
    num_slots = -(-operands[0].shape[-2] // rows_per_slot)
    result = _ffi.typed_like(operands[0], (*batch, num_slots), jnp.float32)
    return _ffi.call("aux_loss_partials", result, *operands, rows_per_slot=np.int64(rows_per_slot))


def _local_final(partials: Any, *total: Any, **scale: Any) -> Any:
    """All shards' partials, [N] -> loss."""
    batch = _ffi.batch_shape((partials, *total), [1, *([0] * len(total))])
    partials = jnp.broadcast_to(partials, batch + partials.shape[-1:])
    total = tuple(_ffi.share_or_fill(x, 0, batch) for x in total)
    result = _ffi.typed_like(partials, batch, jnp.float32)
    return _ffi.call("aux_loss_final", result, partials, *total, **_scale(**scale))


def _local_grad(*operands: Any, masked: bool, **scale: Any) -> Any:
    """Types of probs, tokens_per_expert, d_loss, [valid_mask], [N] -> d_probs."""
    like, counts, d_loss, *rest = operands
    ranks = _core_ranks(len(rest), masked, 2, 1, 0)
    batch = _ffi.batch_shape(operands, ranks)
    # The row does not depend on the token: items that differ by their mask alone share it.
    mask, total = (rest[0], rest[1:]) if masked else (None, rest)
    row_batch, row_operands = _ffi.fill_batch((counts, d_loss, *total), [1, 0, *([0] * len(total))])
    columns = like.shape[-1:]
    row = _ffi.call(
        "aux_loss_bwd",
        _ffi.typed_like(counts, row_batch + columns, like.dtype),
        *row_operands,
        **_scale(**scale),
    )
    out = jnp.broadcast_to(row[..., None, :], batch + like.shape[-2:])
    if mask is None:
        return out
    keep = jnp.broadcast_to(mask[..., None], out.shape)
    return lax.select(keep, out, jnp.zeros_like(out))


# ---- Sharding.


def _gathered_loss(
    axes: Any, *operands: Any, num_shards: int, masked: bool, deterministic: bool, **scale: Any
) -> Any:
    """The one-device loss from one shard's rows, inside a context that names `axes`.

    Where a shard holds whole slots, 256 partials travel; otherwise the rows do. Floating-point
    sums never happen in the collective.
    """
    probs, counts, *rest = operands
    mask, total = (rest[:1], rest[1:]) if masked else ([], rest)
    rows_per_slot = _ffi.rows_per_whole_slot(probs.shape[-2] * num_shards, num_shards)
    if rows_per_slot is not None and deterministic:
        partials = _local_partials(probs, counts, *mask, rows_per_slot=rows_per_slot)
        return _local_final(_ffi.gather(partials, axes, partials.ndim - 1), *total, **scale)
    probs = _ffi.gather(probs, axes, probs.ndim - 2)
    mask = [_ffi.gather(x, axes, x.ndim - 1) for x in mask]
    return _local_loss(
        *_ffi.unify_varying(probs, counts, *mask, *total),
        masked=masked,
        deterministic=deterministic,
        **scale,
    )


def _batch_spec(specs: Sequence[tuple[Any, ...]], num_batch: int) -> tuple[Any, ...]:
    """For each batch dimension the mesh axes of the first operand that is sharded there.

    Operands may use one axis for different dimensions; the result uses it once.
    """
    out: list[Any] = []
    for i in range(num_batch):
        used = {name for axes in out for name in _ffi.axis_names(axes)}
        free = (spec[i] for spec in specs if spec[i] and not used & {*_ffi.axis_names(spec[i])})
        out.append(next(free, None))
    return tuple(out)


def _loss(*operands: Any, axis_name: Any, masked: bool, like: bool, **options: Any) -> Any:
    """The loss primitive's implementation on global arrays, or on one device's in shard_map."""
    if like:
        operands = operands[:-1]
    if axis_name is not None:
        return _gathered_loss(
            axis_name,
            *operands,
            num_shards=lax.axis_size(axis_name),
            masked=masked,
            **options,
        )
    local = functools.partial(_local_loss, masked=masked, **options)
    num_batch = operands[0].ndim - 2
    num_tokens = operands[0].shape[-2]

    def plan(mesh: Any, specs: Any) -> Any:
        rows = specs[0][-2]
        shards = _ffi.axis_size(mesh, rows)
        if _ffi.rows_per_whole_slot(num_tokens, shards) is None:
            rows = None
        batch = _batch_spec(specs, num_batch)
        used = {name for axes in batch for name in _ffi.axis_names(axes)}
        if used & {*_ffi.axis_names(rows)}:
            rows = None
        cores = [(rows, None), (None,), *([(rows,)] if masked else [])]
        cores += [()] * (len(operands) - len(cores))
        wanted = [_ffi.with_batch(x, batch, core) for x, core in zip(operands, cores, strict=True)]
        if rows is None:
            return local, wanted, PartitionSpec(*batch)
        sharded = functools.partial(
            _gathered_loss, rows, num_shards=shards, masked=masked, **options
        )
        return sharded, wanted, PartitionSpec(*batch)

    cores = ["te", "e", *(["t"] if masked else [])]
    cores += [""] * (len(operands) - len(cores))
    return _ffi.partition(
        local,
        _ffi.sharding_rule(operands, cores, [""]),
        plan,
        operands,
        reduction_factors=("t",),
        need_replication_factors=("e",),
    )


def _grad(*operands: Any, axis_name: Any, masked: bool, **options: Any) -> Any:
    """The gradient primitive's implementation: elementwise in tokens and columns."""
    del axis_name
    local = functools.partial(_local_grad, masked=masked, **options)
    num_batch = operands[0].ndim - 2

    def plan(_mesh: Any, specs: Any) -> Any:
        rows, columns = specs[0][-2:]
        batch = _batch_spec(specs[:1], num_batch)
        cores = [(rows, columns), (columns,), (), *([(rows,)] if masked else [])]
        cores += [()] * (len(operands) - len(cores))
        wanted = [_ffi.with_batch(x, batch, core) for x, core in zip(operands, cores, strict=True)]
        return local, wanted, PartitionSpec(*batch, rows, columns)

    # The other operands' dimensions have names of their own: probs alone shards the gradient.
    cores = ["te", "c", "", *(["m"] if masked else [])]
    cores += [""] * (len(operands) - len(cores))
    rule = _ffi.sharding_rule(operands, cores, ["te"], first_alone=True)
    return _ffi.partition(local, rule, plan, operands)


# ---- Primitives and their derivatives. The loss is linear in probs: its derivative is itself, its
# transpose is the gradient, and the gradient's transpose is the loss.


def _loss_type(*avals: Any, axis_name: Any, masked: bool, like: bool, **_: Any) -> Any:
    if like:
        avals = avals[:-1]
    probs = avals[0]
    batch = _ffi.batch_shape(avals, _core_ranks(len(avals) - 2, masked, 2, 1))
    out = _ffi.result_aval(
        probs, batch, _batch_spec([*map(_ffi.full_spec, avals)], len(batch)), jnp.float32
    )
    if axis_name is None:
        return out
    # Replicated over the axis, unless an operand of the final sum is not.
    manual = out.manual_axis_type
    varying = manual.varying - frozenset(axis_name)
    return out.update(manual_axis_type=manual.update(varying=varying))


def _grad_type(*avals: Any, masked: bool, **_: Any) -> Any:
    like = avals[0]
    batch = _ffi.batch_shape(avals, _core_ranks(len(avals) - 3, masked, 2, 1, 0))
    return _ffi.result_aval(like, batch + like.shape[-2:], _ffi.full_spec(like), like.dtype)


_bind_loss = _ffi.make_primitive("moe_aux_loss", _loss, _loss_type)
_bind_grad = _ffi.make_primitive("moe_aux_loss_grad", _grad, _grad_type)


# Operands of the loss: probs, tokens_per_expert, [valid_mask], [N], [like]. `like` is the primal
# probs where the first operand is a tangent: its value is never read, but it lends its sharding to
# the gradient, which XLA would otherwise replicate.


def _loss_jvp(
    primals: Any, tangents: Any, *, implementation: Any, like: bool, **params: Any
) -> Any:
    del implementation
    out = _bind_loss(*primals, like=like, **params)
    if type(tangents[0]) is ad.Zero:
        return out, _ffi.zero_tangent(out)
    probs, *rest = primals
    if like:
        probs = rest.pop()
    return out, _bind_loss(tangents[0], *rest, probs, like=True, **params)


def _loss_transpose(
    d_loss: Any,
    probs: Any,
    counts: Any,
    *rest: Any,
    implementation: Any,
    like: bool,
    deterministic: bool,
    axis_name: Any,
    **params: Any,
) -> Any:
    del implementation, deterministic
    num_operands = 2 + len(rest)
    if not ad.is_undefined_primal(probs):
        raise NotImplementedError("moe_aux_loss: only probs is a linear operand")
    aval = probs.aval
    if type(d_loss) is ad.Zero:
        return [ad.Zero(aval)] + [None] * (num_operands - 1)
    if like:
        *rest, exemplar = rest  # type: ignore[assignment]
    else:  # jax.linear_transpose: there is no primal
        exemplar = jnp.zeros(aval.shape, aval.dtype, device=_ffi.explicit_sharding(aval))
    d_loss = _ffi.whole_cotangent(d_loss, axis_name, aval)
    varying = aval.manual_axis_type.varying
    operands = _ffi.unify_varying(exemplar, counts, d_loss, *rest, over=varying)
    d_probs = _bind_grad(*operands, axis_name=None, **params)
    return [_ffi.sum_to_shape(d_probs, aval.shape)] + [None] * (num_operands - 1)


def _grad_jvp(primals: Any, tangents: Any, *, implementation: Any, **params: Any) -> Any:
    del implementation
    out = _bind_grad(*primals, **params)
    if type(tangents[2]) is ad.Zero:
        return out, _ffi.zero_tangent(out)
    like, counts, _, *rest = primals
    return out, _bind_grad(like, counts, tangents[2], *rest, **params)


def _grad_transpose(
    d_out: Any, like: Any, counts: Any, d_loss: Any, *rest: Any, implementation: Any, **params: Any
) -> Any:
    del implementation
    if not ad.is_undefined_primal(d_loss):
        raise NotImplementedError("moe_aux_loss_grad: only d_loss is a linear operand")
    if type(d_out) is ad.Zero:
        return [None, None, ad.Zero(d_loss.aval)] + [None] * len(rest)
    operands = _ffi.unify_varying(d_out, counts, *rest, like)
    out = _bind_loss(*operands, like=True, deterministic=True, **params)
    return [None, None, _ffi.sum_to_shape(out, d_loss.aval.shape)] + [None] * len(rest)


ad.primitive_jvps[_bind_loss.primitive] = _loss_jvp  # type: ignore[attr-defined]
ad.primitive_transposes[_bind_loss.primitive] = _loss_transpose  # type: ignore[attr-defined]
ad.primitive_jvps[_bind_grad.primitive] = _grad_jvp  # type: ignore[attr-defined]
ad.primitive_transposes[_bind_grad.primitive] = _grad_transpose  # type: ignore[attr-defined]


# ---- Public function.


def token_total(
    total_num_tokens: Any, num_tokens: int, mask: Any, axes: tuple[Hashable, ...] | None
) -> tuple[float | None, list[Any]]:
    """N: a static number, or None and the list of the one operand.

    By default the number of rows, or of valid rows; over the mesh axes `axes`, of all devices.
    """
    if total_num_tokens is not None:
        total = _checks.total_tokens("total_num_tokens", total_num_tokens)
    elif mask is None:
        total = float(num_tokens if axes is None else num_tokens * lax.axis_size(axes))
    else:
        total = jnp.sum(mask, dtype=jnp.uint32)
        total = total if axes is None else lax.psum(total, axes)
    return (total, []) if isinstance(total, float) else (None, [total])


def fused_moe_aux_loss(
    probs: Any,
    tokens_per_expert: Any,
    topk: int,
    coeff: float,
    *,
    num_experts: int | None = None,
    total_num_tokens: Any = None,
    valid_mask: Any = None,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    deterministic: bool = True,
) -> jax.Array:
    """Auxiliary load-balancing loss of a mixture-of-experts router.

    `loss = C * sum_e f[e] * sum_t p[t, e]` with `C = num_experts * coeff / (topk * N * N)`: the
    Switch Transformer loss (Fedus et al., 2021, arXiv:2101.03961, equations 4 to 6) for top-k
    routing, scaled so that perfect balance gives `coeff`.

    The bits of the loss and of its gradient depend on the input bits and static arguments alone:
    not on the run, the device, the backend, the number of devices or the transformation.

    The gradient with respect to `probs` is `C * f[e]` times the cotangent on every valid row, in
    `probs`' dtype; with respect to `tokens_per_expert` it is zero. The loss is linear in `probs`,
    so forward mode and higher orders work too.

    Args:
      probs: scores `[num_tokens, num_columns]`, float32, bfloat16 or float16. num_columns is
        num_experts, or a multiple of it (a folded sequence layout `[sequence, batch * experts]`).
      tokens_per_expert: tokens routed to each expert, `[num_columns]`, int32, int64 or float32.
      topk: experts per token; static.
      coeff: the loss coefficient; static, kept as float64. 0 switches the loss and its gradient
        off, whatever the other operands hold.
      num_experts: number of experts; static; default num_columns.
      total_num_tokens: N: an integer of any size, or an integer scalar array. Default: the number
        of rows, or of valid rows; over `axis_name`, of all devices. With 0 the loss is 0.
      valid_mask: bool `[num_tokens]`, True for a real token. Other rows add nothing, whatever they
        hold, and get gradient +0.
      axis_name: inside `jax.shard_map`, the mesh axis (or axes) over which the tokens are sharded.
        tokens_per_expert and total_num_tokens are then global, and the result is the loss of all
        tokens, replicated. Without it the function is local to a device.
      deterministic: False selects a CUDA kernel that adds with atomics, whose bits change from
        call to call; a negative control. On CPU it is the same code.

    Returns:
      The loss, float32 `[]`.

    Raises:
      TypeError: an argument has a wrong type or dtype, or a static one is traced.
      ValueError: an argument has a wrong shape or value.
    """
    probs = _checks.float_array("probs", probs, 2)
    num_tokens, num_columns = probs.shape
    if num_columns == 0:
        raise _checks.value_error("probs", f"shape {probs.shape}", "at least one column")
    if num_experts is None:
        num_experts = num_columns
    num_experts = _checks.static_int("num_experts", num_experts, 1)
    if num_columns % num_experts:
        raise _checks.value_error(
            "num_experts",
            f"{num_experts} for probs of {num_columns} columns",
            f"a divisor of {num_columns}",
        )
    topk = _checks.static_int("topk", topk, 1, num_experts)
    coeff = _checks.static_float("coeff", coeff)
    counts = _checks.counts_array("tokens_per_expert", tokens_per_expert, (num_columns,))
    deterministic = _checks.static_bool("deterministic", deterministic)
    axes = None if axis_name is None else _checks.bound_axes("axis_name", axis_name)
    mask = None
    if valid_mask is not None:
        mask = _checks.mask_array("valid_mask", valid_mask, (num_tokens,))
    static_total, total = token_total(total_num_tokens, num_tokens, mask, axes)

    counts = checkpoint_name(counts, RESIDUAL_NAME)
    optional: list[Any] = [] if mask is None else [mask]
    # N is global over axis_name: it need not vary over it, and the loss is then replicated.
    if axes is None:
        operands = _ffi.unify_varying(probs, counts, *optional, *total)
    else:
        over = () if not _ffi.varying_axes(probs) else axes
        operands = _ffi.unify_varying(probs, counts, *optional, over=over) + total
    return _bind_loss(
        *operands,
        axis_name=axes,
        masked=mask is not None,
        like=False,
        deterministic=deterministic,
        num_experts=num_experts,
        topk=topk,
        coeff=coeff,
        total=static_total,
    )
