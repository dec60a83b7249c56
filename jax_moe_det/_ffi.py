"""Loads the compiled modules, registers their targets and builds primitives on them.

The only file that knows the FFI, a platform name or a mesh.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
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


def built_backends() -> list[str]:
    """Names of the backends in this build: "cpu", and "cuda" where a CUDA compiler was found."""
    return [name.lower() for name, module in _MODULES.items() if module is not None]


# ---- Types


def typed_like(x: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The type of a result computed from `x`: varies over the mesh axes that `x` varies over.

    A fresh ShapeDtypeStruct would forget that inside shard_map, and wrong data would pass.
    """
    aval = jax.typeof(x)
    if not varying_axes(x):
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    spec = PartitionSpec(*(None,) * len(shape))
    return aval.update(
        shape=tuple(shape),
        dtype=jnp.dtype(dtype),
        weak_type=False,
        sharding=aval.sharding.update(spec=spec),
    )


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


# ---- Partitioning


def in_manual_context() -> bool:
    """Is this traced inside shard_map (or pmap), where operands are one device's?"""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


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


def partition(
    fun: Callable[..., Any],
    rule: str,
    plan: Callable[[Any, list[tuple[Any, ...]]], tuple[Callable[..., Any], list[Any], Any]],
    operands: Sequence[Any],
    **rule_options: Any,
) -> Any:
    """Calls `fun(*operands)`, partitioned by hand where the operands are sharded.

    Args:
      fun: the whole op on unsharded operands; one result.
      rule: Shardy's sharding rule.
      plan: from the mesh and the operands' partition specs (padded to their ranks) to the function
        of one device's shards, the specs of the operands that it wants, and its result's spec.
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
            NamedSharding(mesh, PartitionSpec(*result)),
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
) -> Callable[..., Any]:
    """Builds a primitive with one result and returns the function that binds it.

    `implementation(*operands, **params)` computes it from FFI calls; `result_type(*avals,
    **params)` is its abstract evaluation. Operands are `[*batch, ...]` with the same number of
    batch dimensions each, of size 1 where an operand is shared: `vmap` adds one in front. The
    bound function carries the primitive as `.primitive`, for its differentiation rules.
    """
    primitive = Primitive(name)

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
        return jaxpr_as_fun(implementation)(*operands)[0]

    mlir.register_lowering(primitive, mlir.lower_fun(_run, multiple_results=False))

    def _batch(operands: Any, dims: Any, *, implementation: Any, **params: Any) -> Any:
        del implementation
        moved = [
            jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        return bind(*moved, **params), 0

    batching.primitive_batchers[primitive] = _batch
    bind.primitive = primitive  # type: ignore[attr-defined]
    return bind
