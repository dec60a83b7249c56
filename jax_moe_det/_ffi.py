"""Loads the compiled modules, registers their targets and builds primitives on them.

The only file that knows the FFI, a platform name or a mesh.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jax_moe_det._cpu as _cpu


def _import_cuda() -> ModuleType | None:
    # Not built is not broken: only a missing module is quiet.
    try:
        return importlib.import_module("jax_moe_det._cuda")
    except ModuleNotFoundError as error:
        if error.name != "jax_moe_det._cuda":
            raise
        return None


_MODULES = {"cpu": _cpu, "CUDA": _import_cuda()}

for _platform, _module in _MODULES.items():
    if _module is not None:
        for _name, _capsule in _module.targets().items():
            jax.ffi.register_ffi_target(_name, _capsule, platform=_platform)

aux_loss_workspace_size: Callable[[], int] = _cpu.aux_loss_workspace_size
rows_per_slot: Callable[[int], int] = _cpu.rows_per_slot
max_experts: int = _cpu.max_experts
# Elements per batch item, from num_tokens, num_experts, topk, num_groups and group_values.
route_workspace_size: Callable[..., int] = _cpu.route_workspace_size
route_row_stats_size: Callable[..., int] = _cpu.route_row_stats_size

# As the attribute total_num_tokens: N is an operand.
_TOTAL_IS_OPERAND = -1.0


def built_backends() -> list[str]:
    """Names of the backends in this build: "cpu", and "cuda" where a CUDA compiler was found."""
    return [name.lower() for name, module in _MODULES.items() if module is not None]


# ---- Types


def typed_like(x: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The type of a result computed from `x`: varies over the mesh axes that `x` varies over.

    A fresh ShapeDtypeStruct would forget that inside shard_map, and wrong data would pass.
    """
    if not varying_axes(x):
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    return result_aval(jax.typeof(x), shape, (None,) * len(shape), dtype)


def result_aval(aval: Any, shape: Sequence[int], spec: Sequence[Any], dtype: Any) -> Any:
    """As `typed_like`, from an abstract value, with mesh axes for the result's dimensions."""
    return aval.update(
        shape=tuple(shape),
        dtype=jnp.dtype(dtype),
        weak_type=False,
        sharding=aval.sharding.update(spec=PartitionSpec(*spec)),
    )


def zero_tangent(primal: Any) -> Any:
    """The symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual mesh axes over which `x` varies by device."""
    manual = jax.typeof(x).manual_axis_type
    return frozenset() if manual is None else frozenset(manual.varying)


def unify_varying(*operands: Any, over: Sequence[Any] = ()) -> list[Any]:
    """Marks every operand as varying over the union of what all vary over, and `over`."""
    union = frozenset(over).union(*map(varying_axes, operands))
    out = []
    for x in operands:
        missing = tuple(sorted(union - varying_axes(x), key=str))
        out.append(lax.pcast(x, missing, to="varying") if missing else x)
    return out


def call(target: str, results: Any, *operands: Any, **attributes: Any) -> Any:
    """Calls the FFI target `jax_moe_det.<target>` of the platform that the program runs on."""
    return jax.ffi.ffi_call(f"jax_moe_det.{target}", results)(*operands, **attributes)


def total_attribute(total: float | None) -> np.float64:
    """The attribute total_num_tokens: N, or that N is an operand."""
    return np.float64(_TOTAL_IS_OPERAND if total is None else total)


# ---- Batches. Operands of a primitive are [*batch, ...], of size 1 where one is shared.


def batch_shape(operands: Sequence[Any], core_ranks: Sequence[int]) -> tuple[int, ...]:
    """The batch dimensions of all operands together."""
    leading = [x.shape[: x.ndim - rank] for x, rank in zip(operands, core_ranks, strict=True)]
    return jnp.broadcast_shapes(*leading)


def share_or_fill(x: Any, rank: int, batch: tuple[int, ...]) -> Any:
    """Handlers take an operand once or once per item; anything between is broadcast."""
    leading = x.shape[: x.ndim - rank]
    if leading == batch or all(size == 1 for size in leading):
        return x
    return jnp.broadcast_to(x, batch + x.shape[x.ndim - rank :])


def fill_batch(operands: Sequence[Any], core_ranks: Sequence[int]) -> tuple[Any, tuple[Any, ...]]:
    """The batch's shape, and the operands as handlers take them."""
    batch = batch_shape(operands, core_ranks)
    filled = (share_or_fill(x, r, batch) for x, r in zip(operands, core_ranks, strict=True))
    return batch, tuple(filled)


def ordered_sum(x: Any, axis: int) -> Any:
    """Sum over one axis in descending order, as JAX adds the cotangents of a Python loop."""
    x = jnp.moveaxis(replicate_axis(x, axis), axis, 0)
    start = jnp.full_like(x[0], -0.0)  # a sum of -0.0 alone is -0.0
    return lax.scan(lambda total, item: (total + item, None), start, x, reverse=True)[0]


def sum_to_shape(x: Any, shape: tuple[int, ...]) -> Any:
    """Sums the batch dimensions that `shape` has once: the operand was shared by the batch."""
    for axis, size in enumerate(shape):
        if size != x.shape[axis]:
            x = jnp.expand_dims(ordered_sum(x, axis), axis)
    return x


# ---- Rows of experts. Operands are [*batch, *core], where letters spell a core: t is the num_lead
# token dimensions together, any other letter is one dimension. The first operand, the logits, is
# "te"; with no token dimensions "e".


def core_ranks(cores: Sequence[str], num_lead: int) -> list[int]:
    """Ranks of the cores."""
    return [len(core.replace("t", "t" * num_lead)) for core in cores]


def call_rows(
    target: str,
    operands: Sequence[Any],
    cores: Sequence[str],
    num_lead: int,
    results: Sequence[tuple[str, Sequence[int], Any]],
    **attributes: Any,
) -> list[Any]:
    """Calls a handler, whose operands are [batch or 1, num_tokens, ...].

    Args:
      target: the target's name.
      operands: `[*batch, *core]`.
      cores: the operands' cores.
      num_lead: number of token dimensions.
      results: of each result "t" or "", whether it has the tokens; its other sizes; its dtype.
      **attributes: the handler's.
    """
    ranks = core_ranks(cores, num_lead)
    batch, operands = fill_batch(operands, ranks)
    logits = operands[0]
    lead = logits.shape[len(batch) : len(batch) + num_lead]
    num_tokens = math.prod(lead)
    flat = []
    for x, core, rank in zip(operands, cores, ranks, strict=True):
        items = math.prod(x.shape[: x.ndim - rank])
        others = iter(x.shape[x.ndim - len(core.replace("t", "")) :])
        flat.append(x.reshape(items, *(num_tokens if n == "t" else next(others) for n in core)))
    types = [
        typed_like(logits, (math.prod(batch), *([num_tokens] if core else []), *sizes), dtype)
        for core, sizes, dtype in results
    ]
    out = call(target, types, *flat, **attributes)
    return [
        x.reshape(*batch, *(lead if core else ()), *sizes)
        for x, (core, sizes, _) in zip(out, results, strict=True)
    ]


def partition_rows(
    local: Callable[..., Any],
    operands: Sequence[Any],
    cores: Sequence[str],
    num_lead: int,
    results: Sequence[str],
    sharded: Callable[[Any, tuple[Any, ...]], Callable[..., Any]] | None = None,
) -> Any:
    """Calls `local` on shards of whole rows, whose batch and tokens are those of the logits.

    Args:
      local: from operands to the list of results.
      operands: `[*batch, *core]`.
      cores: the operands' cores.
      num_lead: number of token dimensions.
      results: the results' cores. One with the logits' letter e is sharded there as they are.
      sharded: from the mesh and the mesh axes of the token dimensions, some of them not None, to
        what takes the place of `local`.
    """
    num_batch = operands[0].ndim - core_ranks(cores[:1], num_lead)[0]

    def spec_of(core: str, tokens: tuple[Any, ...]) -> list[Any]:
        return [axes for letter in core for axes in (tokens if letter == "t" else [None])]

    def plan(mesh: Any, specs: Any) -> Any:
        batch, tokens = specs[0][:num_batch], specs[0][num_batch : num_batch + num_lead]
        if sharded is not None:
            # Tokens meet: XLA's padding of uneven shards would count.
            sizes = operands[0].shape[num_batch:]
            tokens = tuple(
                None if size % axis_size(mesh, axes) else axes
                for size, axes in zip(sizes, tokens, strict=False)
            )
        wanted = [
            with_batch(x, batch, spec_of(core, tokens))
            for x, core in zip(operands, cores, strict=True)
        ]
        run = local if sharded is None or not any(tokens) else sharded(mesh, tokens)
        return run, wanted, [PartitionSpec(*batch, *spec_of(core, tokens)) for core in results]

    def names(core: str, operand: int) -> list[str]:
        tokens = [f"t{operand}{i}" for i in range(num_lead)]
        return [name for letter in core for name in (tokens if letter == "t" else letter)]

    # Other operands have names of their own: the logits, operand 0, alone shard the results.
    rule = sharding_rule(
        operands,
        [names(core, i) for i, core in enumerate(cores)],
        [names(core, 0) for core in results],
        first_alone=True,
    )
    whole = dict.fromkeys("".join([*cores, *results]).replace("t", ""))
    return partition(local, rule, plan, operands, need_replication_factors=tuple(whole))


# ---- Partitioning


def in_manual_context() -> bool:
    """Is this traced inside shard_map (or pmap), where operands are one device's?"""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def axis_names(axes: Any) -> tuple[Any, ...]:
    """The mesh axes of one dimension in a spec."""
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def axis_size(mesh: Any, axes: Any) -> int:
    """Number of shards of one dimension."""
    return math.prod(mesh.shape[name] for name in axis_names(axes))


def rows_per_whole_slot(num_tokens: int, num_shards: int) -> int | None:
    """Rows per slot, where each of the shards holds whole slots."""
    rows = rows_per_slot(num_tokens)
    whole = num_tokens > 0 and num_tokens % (num_shards * rows) == 0
    return rows if whole else None


def gather(x: Any, axes: Any, axis: int) -> Any:
    """All devices' `x`, along one dimension, on each of them."""
    if x.shape[axis] == 0:
        return jnp.zeros(x.shape, x.dtype)  # the collective refuses it
    # Where types say what varies by device (shard_map), gathered data does not.
    to = "invarying" if varying_axes(x) else "varying"
    return lax.all_gather(x, axes, axis=axis, tiled=True, to=to)


def whole_cotangent(cotangent: Any, axes: tuple[Any, ...] | None, operand: Any) -> Any:
    """The cotangent of a result that is replicated over `axes`, from the operand's type."""
    if axes is None or set(axes) <= set(operand.manual_axis_type.varying):
        return cotangent
    # Without varying types (check_vma=False, pmap) every device holds a share of the cotangent.
    return ordered_sum(lax.all_gather(cotangent, axes, axis=0), 0)


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """The sharding in the type of a value on an explicit mesh."""
    mesh = aval.sharding.mesh
    return aval.sharding if not mesh.empty and mesh.explicit_axes else None


def full_spec(x: Any) -> tuple[Any, ...]:
    """The mesh axes of every dimension of a value with a NamedSharding."""
    spec = tuple(x.sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def _replicate_explicit(x: Any) -> Any:
    sharding = explicit_sharding(jax.typeof(x))
    return x if sharding is None else jax.reshard(x, sharding.update(spec=PartitionSpec()))


def replicate_axis(x: Any, axis: int) -> Any:
    """On an explicit mesh, `x` with one dimension that no mesh axis shards."""
    sharding = explicit_sharding(jax.typeof(x))
    if sharding is None or axis >= len(sharding.spec) or sharding.spec[axis] is None:
        return x
    spec = [None if i == axis else axes for i, axes in enumerate(sharding.spec)]
    return jax.reshard(x, sharding.update(spec=PartitionSpec(*spec)))


def with_batch(operand: Any, batch_spec: Sequence[Any], core: Sequence[Any]) -> tuple[Any, ...]:
    """The spec of an operand: its batch's mesh axes, but where it is shared, then `core`."""
    leading = (
        axes if size > 1 else None for axes, size in zip(batch_spec, operand.shape, strict=False)
    )
    return (*leading, *core)


def sharding_rule(
    operands: Sequence[Any],
    cores: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
    *,
    first_alone: bool = False,
) -> str:
    """Shardy's rule: batch dimensions are shared by name, those of size 1 stand alone.

    `cores` and `results` name the other dimensions of each operand and result. `first_alone`: the
    results share the batch with the first operand alone.
    """
    num_batch = operands[0].ndim - len(cores[0])
    used = iter("hijklnopqrsuvwxyz" * 8)
    names = [f"b{i}" for i in range(num_batch)]
    batch = jnp.broadcast_shapes(*(x.shape[:num_batch] for x in operands))
    sides: list[str] = []
    for x, core in zip(operands, cores, strict=True):
        shares = not (first_alone and sides)
        leading = [
            name if shares and x.shape[i] == batch[i] else f"{next(used)}{len(sides)}{i}"
            for i, name in enumerate(names)
        ]
        sides.append(" ".join([*leading, *core]))
    return f"{', '.join(sides)} -> {', '.join(' '.join([*names, *core]) for core in results)}"


def partition(
    fun: Callable[..., Any],
    rule: str,
    plan: Callable[[Any, list[tuple[Any, ...]]], tuple[Callable[..., Any], list[Any], Any]],
    operands: Sequence[Any],
    **rule_options: Any,
) -> Any:
    """Calls `fun(*operands)`, partitioned by hand where the operands are sharded.

    Args:
      fun: the whole op on unsharded operands.
      rule: Shardy's sharding rule.
      plan: from the mesh and the operands' partition specs (padded to their ranks) to the function
        of one device's shards, the specs of the operands that it wants, and the PartitionSpec of
        its result, or of each of its results.
      operands: arrays.
      **rule_options: reduction_factors and need_replication_factors of the rule.
    """

    def whole(*xs: Any) -> Any:
        return fun(*map(_replicate_explicit, xs))

    if in_manual_context():
        # A shard_map over some axes only leaves the others to XLA, which gathers over them.
        return whole(*operands)

    def _partition(mesh: Any, args: Any, _result: Any) -> Any:
        shardings = [arg.sharding for arg in args]
        mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), mesh)
        specs = [
            full_spec(arg) if isinstance(arg.sharding, NamedSharding) else (None,) * arg.ndim
            for arg in args
        ]
        local, wanted, result = plan(mesh, specs)

        def one_device(*shards: Any) -> Any:
            # Shards are plain arrays: an explicit mesh would have their ops name shardings.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return local(*shards)

        return (
            mesh,
            one_device,
            jax.tree.map(functools.partial(NamedSharding, mesh), result),
            tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in wanted),
        )

    partitioned = custom_partitioning(whole)
    partitioned.def_partition(partition=_partition, sharding_rule=rule, **rule_options)
    return partitioned(*operands)


# ---- Primitives


@functools.cache
def _jitted(fun: Callable[..., Any], params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(fun, **dict(params)))


def make_primitive(
    name: str,
    implementation: Callable[..., Any],
    result_type: Callable[..., Any],
    *,
    multiple_results: bool = False,
) -> Callable[..., Any]:
    """Builds a primitive and returns the function that binds it.

    `implementation(*operands, **params)` computes it from FFI calls; `result_type(*avals,
    **params)` is its abstract evaluation; with `multiple_results` both give a list. Operands are
    `[*batch, ...]` with the same number of batch dimensions each, of size 1 where an operand is
    shared: `vmap` adds one in front. The bound function carries the primitive as `.primitive`, for
    its differentiation rules.
    """
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results

    def bind(*operands: Any, **params: Any) -> Any:
        # jit looks for custom partitioning in the jaxprs that it finds in parameters; tracing
        # through jit makes equal calls share one jaxpr.
        traced = _jitted(implementation, tuple(params.items())).trace(*operands)
        return primitive.bind(*operands, implementation=traced.jaxpr, **params)

    @primitive.def_impl
    def _impl(*operands: Any, implementation: Any, **params: Any) -> Any:
        del implementation
        with jax.disable_jit(False):  # an op has no Python steps to show
            return _jitted(bind, tuple(params.items()))(*operands)

    @primitive.def_abstract_eval
    def _abstract_eval(*avals: Any, implementation: Any, **params: Any) -> Any:
        del implementation
        return result_type(*avals, **params)

    def _run(*operands: Any, implementation: Any, **_: Any) -> Any:
        results = jaxpr_as_fun(implementation)(*operands)
        return results if multiple_results else results[0]

    mlir.register_lowering(primitive, mlir.lower_fun(_run, multiple_results=multiple_results))

    def _batch(operands: Any, dims: Any, *, implementation: Any, **params: Any) -> Any:
        del implementation
        moved = [
            jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        out = bind(*moved, **params)
        return out, jax.tree.map(lambda _: 0, out)

    batching.primitive_batchers[primitive] = _batch
    bind.primitive = primitive  # type: ignore[attr-defined]
    return bind


def make_tangent_primitive(
    name: str, result_type: Callable[..., Any], *, multiple_results: bool = False
) -> Primitive:
    """Builds the tangent of an op in reverse mode alone: it is transposed, never computed."""

    def no_forward_mode(*_operands: Any, **_params: Any) -> Any:
        raise NotImplementedError(
            f"{name}: forward-mode derivatives (jax.jvp, jax.jacfwd), and second ones that need "
            "them, are not implemented; use jax.vjp, jax.grad or jax.jacrev"
        )

    primitive = Primitive(f"{name}_jvp")
    primitive.multiple_results = multiple_results
    primitive.def_impl(no_forward_mode)
    primitive.def_abstract_eval(result_type)
    mlir.register_lowering(primitive, no_forward_mode)
    batching.primitive_batchers[primitive] = no_forward_mode
    return primitive
