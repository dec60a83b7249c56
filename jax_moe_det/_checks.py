"""Rank, dtype and range checks, in one message style: argument, what was given, what is allowed."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
COUNT_DTYPES = ("int32", "int64", "float32")


def type_error(argument: str, given: object, allowed: str) -> TypeError:
    """A TypeError in this package's message style."""
    return TypeError(f"{argument}: got {given}; allowed: {allowed}")


def value_error(argument: str, given: object, allowed: str) -> ValueError:
    """A ValueError in this package's message style."""
    return ValueError(f"{argument}: got {given}; allowed: {allowed}")


def _reject_array(argument: str, value: Any, allowed: str) -> None:
    if isinstance(value, jax.Array):  # traced values too
        kind = "a traced value" if isinstance(value, jax.core.Tracer) else "a jax.Array"
        raise type_error(
            argument, f"{kind} ({jax.typeof(value)})", f"{allowed}; {argument} is static"
        )


def static_int(argument: str, value: Any, low: int, high: int | None = None) -> int:
    """A Python or NumPy integer from `low` to `high`, both included."""
    allowed = f"an integer from {low} to {high}" if high is not None else f"an integer >= {low}"
    _reject_array(argument, value, allowed)
    if isinstance(value, bool | np.bool_):
        raise type_error(argument, repr(value), allowed)
    try:
        out = operator.index(value)
    except TypeError:
        raise type_error(argument, repr(value), allowed) from None
    if out < low or (high is not None and out > high):
        raise value_error(argument, out, allowed)
    return out


def static_float(argument: str, value: Any) -> float:
    """A finite Python or NumPy real number, as float64."""
    allowed = "a finite Python or NumPy number"
    _reject_array(argument, value, allowed)
    is_scalar = isinstance(value, numbers.Real | np.generic) or (
        isinstance(value, np.ndarray) and value.ndim == 0
    )
    if not is_scalar or isinstance(value, bool | np.bool_ | complex | np.complexfloating):
        raise type_error(argument, repr(value), allowed)
    try:
        out = float(value)
    except (TypeError, ValueError, OverflowError):
        raise type_error(argument, repr(value), allowed) from None
    if not math.isfinite(out):
        raise value_error(argument, out, allowed)
    return out


def float_array(argument: str, value: Any, ndim: int) -> jax.Array:
    """An array of one of FLOAT_DTYPES with `ndim` dimensions."""
    x = jnp.asarray(value)
    if x.dtype.name not in FLOAT_DTYPES:
        raise type_error(argument, f"dtype {x.dtype}", ", ".join(FLOAT_DTYPES))
    if x.ndim != ndim:
        raise value_error(argument, f"shape {x.shape}", f"{ndim} dimensions")
    return x


def counts_array(argument: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """Token counts of the given shape: int32, int64 or float32, never silently narrowed."""
    allowed = ", ".join(COUNT_DTYPES)
    if not isinstance(value, jax.Array):
        is_typed = isinstance(value, np.ndarray | np.generic)
        host = np.asarray(value)
        if not is_typed and host.dtype == np.float64:
            host = host.astype(np.float32)  # Python floats, as JAX takes them
        if host.dtype.name not in COUNT_DTYPES:
            raise type_error(argument, f"dtype {host.dtype}", allowed)
        if host.dtype == np.int64 and not jax.config.read("jax_enable_x64"):
            limits = np.iinfo(np.int32)
            wrong = host[(host < limits.min) | (host > limits.max)]
            if wrong.size:
                raise value_error(
                    argument,
                    f"int64 value {wrong.flat[0]} while jax_enable_x64 is off",
                    f"values that fit int32 ({limits.min} to {limits.max}), or jax_enable_x64",
                )
            host = host.astype(np.int32)
        value = host
    x = jnp.asarray(value)
    if x.dtype.name not in COUNT_DTYPES:
        raise type_error(argument, f"dtype {x.dtype}", allowed)
    if x.shape != shape:
        raise value_error(argument, f"shape {x.shape}", f"shape {shape}")
    return x


def mask_array(argument: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """A boolean array of the given shape."""
    x = jnp.asarray(value)
    if x.dtype != jnp.bool_:
        raise type_error(argument, f"dtype {x.dtype}", "bool")
    if x.shape != shape:
        raise value_error(argument, f"shape {x.shape}", f"shape {shape}")
    return x


def total_tokens(argument: str, value: Any) -> float | jax.Array:
    """A token total: a static integer >= 0 of any size as float64, or an integer scalar array."""
    if isinstance(value, jax.Array):
        allowed = "an integer scalar"
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise type_error(argument, f"dtype {value.dtype}", allowed)
        if value.shape != ():
            raise value_error(argument, f"shape {value.shape}", allowed)
        if value.dtype.itemsize < 4:
            value = value.astype(jnp.int32)
        return jax.lax.convert_element_type(value, value.dtype)  # never weakly typed
    total = static_int(argument, value, 0)
    try:
        return float(total)
    except OverflowError:
        return math.inf


def bound_axes(argument: str, value: Any) -> tuple[Hashable, ...]:
    """Names of mesh axes that the surrounding shard_map or pmap binds; not those of vmap."""
    names = tuple(value) if isinstance(value, tuple | list) else (value,)
    bound = jax.sharding.get_abstract_mesh().manual_axes
    for name in names:
        if name not in bound:
            allowed = f"mesh axes of the surrounding jax.shard_map {tuple(bound)}"
            raise value_error(argument, repr(name), allowed)
    return names
