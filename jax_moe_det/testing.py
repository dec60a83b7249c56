"""Comparison of bits, for tests of this package and of programs that use it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np


def fingerprint(tree: Any) -> str:
    """SHA-256 of the dtypes, shapes and bits of a pytree's leaves, in tree order.

    Args:
      tree: a pytree of JAX or NumPy arrays, Python scalars and PRNG keys.

    Returns:
      64 hexadecimal digits: the same on every machine, whatever its byte order.

    Raises:
      TypeError: a leaf has no bits to speak of (a string, an arbitrary object).
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        dtype, bits = _dtype_and_bits(path, leaf)
        # The header ends in a zero byte and says how many bytes follow: no two trees run together.
        digest.update(f"{dtype} {bits.shape}\0".encode())
        digest.update(np.ascontiguousarray(bits).data)
    return digest.hexdigest()


def assert_same_bits(got: Any, want: Any) -> None:
    """Checks that two pytrees have the same structure, dtypes, shapes and bits.

    Stricter than equality: +0 and -0 differ, and two NaNs are the same if their bits are.

    Args:
      got: a pytree of JAX or NumPy arrays, Python scalars and PRNG keys.
      want: the same, to compare with.

    Raises:
      AssertionError: any difference; it names the first leaf and index that differ, both values
        with their bits, and how many units in the last place (ulp) lie between them.
      TypeError: a leaf has no bits to speak of (a string, an arbitrary object).
    """
    flattened: list[Any] = [jax.tree_util.tree_flatten_with_path(tree) for tree in (got, want)]
    (got_leaves, got_structure), (want_leaves, want_structure) = flattened
    if got_structure != want_structure:
        raise AssertionError(f"structure: got {got_structure}, want {want_structure}")
    for (path, got_leaf), (_, want_leaf) in zip(got_leaves, want_leaves, strict=True):
        name = f"leaf {jax.tree_util.keystr(path)}" if path else "value"
        got_dtype, got_bits = _dtype_and_bits(path, got_leaf)
        want_dtype, want_bits = _dtype_and_bits(path, want_leaf)
        if got_dtype != want_dtype:
            raise AssertionError(f"{name}: got dtype {got_dtype}, want {want_dtype}")
        if got_bits.shape != want_bits.shape:
            raise AssertionError(f"{name}: got shape {got_bits.shape}, want {want_bits.shape}")
        if not np.array_equal(got_bits, want_bits):
            raise AssertionError(f"{name}: {_describe(got_dtype, got_bits, want_bits)}")


def check_reproducible(
    fn: Callable[..., Any],
    *args: Any,
    repeats: int = 100,
    jit: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Calls a function again and again and checks that its output bits never change.

    Args:
      fn: called as given, `repeats` times; returns a pytree of arrays or scalars.
      *args: positional arguments of `fn`. A function that donates them cannot be repeated.
      repeats: number of calls, at least 1.
      jit: also call `jax.jit(fn)` as often, and demand the bits of the calls as given.
      kwargs: keyword arguments of `fn`.

    Returns:
      The first call's output, in NumPy arrays.

    Raises:
      AssertionError: an output differs from the first call's. It names the call, the first leaf
        and index that differ, and the distance in "N ulp".
      ValueError: `repeats` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}; allowed: an integer >= 1")
    kwargs = dict(kwargs or {})
    # The first output is copied: a later call may write where it lies.
    first = jax.tree.map(_host_copy, fn(*args, **kwargs))
    runs = [("call", fn, range(2, repeats + 1))]
    if jit:
        runs.append(("jitted call", jax.jit(fn), range(1, repeats + 1)))
    for kind, run, calls in runs:
        for i in calls:
            output = jax.tree.map(_host_copy, run(*args, **kwargs))
            try:
                assert_same_bits(output, first)
            except AssertionError as error:
                message = f"{kind} {i} of {repeats} differs from the first call: {error}"
                raise AssertionError(message) from None
    return first


def _host_copy(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return np.array(leaf)


def _dtype_and_bits(path: Any, leaf: Any) -> tuple[str, np.ndarray]:
    """Name of a leaf's dtype, and its bits as an array of unsigned integers of its shape.

    A complex number is two of them, along a last axis of its own.
    """
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf))
    x = np.asarray(leaf)
    name = x.dtype.name
    if x.dtype.kind in "OUSMm" or x.dtype.names is not None:
        raise TypeError(
            f"leaf {jax.tree_util.keystr(path)}: got {type(leaf).__name__} of dtype {x.dtype}; "
            "allowed: arrays and scalars of booleans and numbers, and PRNG keys"
        )
    if x.dtype.kind == "c":
        x = x[..., None].view(x.real.dtype)
    return name, x.astype(x.dtype.newbyteorder("<"), copy=False).view(f"<u{x.dtype.itemsize}")


def _describe(dtype: str, got: np.ndarray, want: np.ndarray) -> str:
    """The first difference of two arrays of bits, in words."""
    differs = got != want
    flat = int(np.argmax(differs))
    index = tuple(int(i) for i in np.unravel_index(flat, got.shape))
    sides = [bits.reshape(-1)[flat : flat + 1] for bits in (got, want)]
    number = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    digits = 2 * got.dtype.itemsize
    shown = []
    for bits in sides:
        value = bits if number.startswith("key<") else bits.view(_numpy_dtype(number))
        shown.append(f"{value[0]} (0x{int(bits[0]):0{digits}x})")
    at = f"first difference at {index}: got {shown[0]}, want {shown[1]}, "
    count = f"; {np.count_nonzero(differs)} of {got.size} differ"
    return at + _distance(number, *sides) + count


def _distance(dtype: str, got: np.ndarray, want: np.ndarray) -> str:
    """How far apart two numbers are: in units in the last place, for floats."""
    if dtype.startswith("key<") or dtype == "bool":
        return "not numbers"
    number = _numpy_dtype(dtype)
    if not jax.dtypes.issubdtype(number, np.floating):
        return f"{abs(int(got.view(number)[0]) - int(want.view(number)[0]))} apart"
    if any(np.isnan(bits.view(number)[0]) for bits in (got, want)):
        return "no distance in ulp from a NaN"
    places = []
    for bits in (got, want):
        width = 8 * bits.dtype.itemsize
        magnitude = int(bits[0]) & ((1 << (width - 1)) - 1)
        places.append(-magnitude if int(bits[0]) >> (width - 1) else magnitude)
    return f"{abs(places[0] - places[1])} ulp"


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
