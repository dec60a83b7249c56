"""Rank, dtype and range checks, in one message style: argument, what was given, what is allowed."""

from __future__ import annotations

import enum
import math
import numbers
import operator
from collections.abc import Hashable
from typing import Any, TypeVar

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


def static_bool(argument: str, value: Any) -> bool:
    """A Python or NumPy bool."""
    allowed = "True or False"
    _reject_array(argument, value, allowed)
    if not isinstance(value, bool | np.bool_):
        raise type_error(argument, repr(value), allowed)
    return bool(value)


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


def static_float32(argument: str, value: Any, low: float = -math.inf) -> float:
    """A Python or NumPy real number >= `low`, rounded to a finite float32."""
    number = static_float(argument, value)
    with np.errstate(over="ignore"):
        out = float(np.float32(number))
    if number < low or not math.isfinite(out):
        at_least = f" >= {low:g}" if low > -math.inf else ""
        raise value_error(argument, number, f"a number{at_least} that float32 can hold")
    return out + 0.0  # -0.0 is 0.0: two static values that are equal share a compilation


EnumT = TypeVar("EnumT", bound=enum.Enum)


def static_enum(argument: str, value: Any, members: type[EnumT]) -> EnumT:
    """A member of an enum, its name in any case, or its value."""
    allowed = ", ".join(name.lower() for name in members.__members__)
    _reject_array(argument, value, allowed)
    if isinstance(value, bool | np.bool_) or not isinstance(value, str | int | np.integer):
        raise type_error(argument, repr(value), allowed)
    try:
        return members[value.upper()] if isinstance(value, str) else members(value)
    except (KeyError, ValueError):
        raise value_error(argument, repr(value), allowed) from None


def float_array(argument: str, value: Any, ndim: int, *, or_more: bool = False) -> jax.Array:
    """An array of one of FLOAT_DTYPES with `ndim` dimensions, or at least so many."""
    x = jnp.asarray(value)
    if x.dtype.name not in FLOAT_DTYPES:
        raise type_error(argument, f"dtype {x.dtype}", ", ".join(FLOAT_DTYPES))
    if x.ndim < ndim or (x.ndim > ndim and not or_more):
        dimensions = f"{ndim} dimensions or more" if or_more else f"{ndim} dimensions"
        raise value_error(argument, f"shape {x.shape}", dimensions)
    return x


def float32_array(argument: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """A float32 array of the given shape; untyped numbers become float32."""
    is_typed = isinstance(value, jax.Array | np.ndarray | np.generic)
    x = jnp.asarray(value) if is_typed else jnp.asarray(value, jnp.float32)
    if x.dtype != jnp.float32:
        raise type_error(argument, f"dtype {x.dtype}", "float32")
    if x.shape != shape:
        raise value_error(argument, f"shape {x.shape}", f"shape {shape}")
    return x


def counts_array(argument: str, value: Any, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Token counts: int32, int64 or float32, never silently narrowed.

    Of the given shape, or else of one dimension that is not empty.
    """
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
    if shape is None and (x.ndim != 1 or x.size == 0):
        raise value_error(argument, f"shape {x.shape}", "one dimension, of at least one expert")
    if shape is not None and x.shape != shape:
        raise value_error(argument, f"shape {x.shape}", f"shape {shape}")
    return x


def indices_array(argument: str, value: Any, shape: tuple[int, ...], num_experts: int) -> jax.Array:
    """Expert indices of the given shape, any integer dtype, as int32.

    Those outside 0 to num_experts - 1 stay outside: a conversion would wrap them.
    """
    allowed = "int32, or another integer dtype"
    xp: Any = jnp
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
        xp = np  # NumPy's int64, which JAX may not hold
        if value.size == 0 and value.dtype == np.float64:
            value = value.astype(np.int32)  # untyped: no token
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise type_error(argument, f"dtype {value.dtype}", allowed)
    if value.shape != shape:
        raise value_error(argument, f"shape {value.shape}", f"shape {shape}")
    if value.dtype != jnp.int32 and value.dtype.itemsize >= 4:
        value = xp.where((value >= 0) & (value < num_experts), value, num_experts)
    return jnp.asarray(value).astype(jnp.int32)


def float32_scalar(argument: str, value: Any) -> jax.Array:
    """A real scalar, static or an array, rounded to float32."""
    if not isinstance(value, jax.Array):
        return jnp.asarray(np.float32(static_float32(argument, value)))
    allowed = "a real scalar"
    if not any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise type_error(argument, f"dtype {value.dtype}", allowed)
    if value.shape != ():
        raise value_error(argument, f"shape {value.shape}", allowed)
    return jax.lax.convert_element_type(value, jnp.float32)  # never weakly typed


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
