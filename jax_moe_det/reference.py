"""NumPy oracles that follow the documented order: the readable definition of every bit.

Slow, and without JAX. `ffi/core/slots.h` and `ffi/aux_loss/aux_loss.h` hold the same order in C++.
Inputs are arrays that NumPy can read (`jax.Array` too), with the dtypes of the public functions;
nothing is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

NUM_SLOTS = 256
CHUNK = 4
NUM_DOT_LANES = 256

# Significant bits, and exponent of the smallest normal value.
_FORMATS = {"float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14)}

_NAN: dict[str, Any] = {
    "float32": np.uint32(0x7FC00000),
    "bfloat16": np.uint16(0x7FC0),
    "float16": np.uint16(0x7E00),
}

# Elements of scores that are summed at a time; bounds memory, changes no bit.
_BLOCK = 1 << 23


def num_lanes(num_columns: int) -> int:
    """Lanes into which a slot's rows are dealt."""
    if num_columns > 128:
        return 16
    if num_columns > 32:
        return 32
    return 64 if num_columns > 16 else 128


def aux_loss(
    probs: Any,
    tokens_per_expert: Any,
    topk: int,
    coeff: float,
    *,
    num_experts: int | None = None,
    total_num_tokens: Any = None,
    valid_mask: Any = None,
) -> np.float32:
    """The auxiliary loss in the documented order; arguments as in `fused_moe_aux_loss`.

    Args:
      probs: scores `[num_tokens, num_columns]`, float32, bfloat16 or float16.
      tokens_per_expert: `[num_columns]`, int32, int64 or float32.
      topk: experts per token.
      coeff: the loss coefficient.
      num_experts: default num_columns.
      total_num_tokens: N; default the number of (valid) rows.
      valid_mask: bool `[num_tokens]`.

    Returns:
      The loss; a NaN is 0x7fc00000.
    """
    probs = np.asarray(probs)
    num_tokens, num_columns = probs.shape
    total = _total(num_tokens, total_num_tokens, valid_mask)
    if coeff == 0 or total == 0:  # switched off, whatever probs hold
        return np.float32(0)
    partials = aux_loss_partials(probs, tokens_per_expert, valid_mask=valid_mask)
    with np.errstate(all="ignore"):
        total_sum = _fold_adjacent_pairs(partials.astype(np.float64))
        loss = np.float32(total_sum * _scale(num_experts or num_columns, coeff, topk, total))
    return _canonical_nan(loss)


def aux_loss_partials(probs: Any, tokens_per_expert: Any, *, valid_mask: Any = None) -> np.ndarray:
    """The workspace of one loss: the partial sum of each slot, and +0 in slots without rows.

    Args:
      probs: as in `aux_loss`.
      tokens_per_expert: as in `aux_loss`.
      valid_mask: as in `aux_loss`.

    Returns:
      Float32 `[256]`; a NaN is 0x7fc00000.
    """
    counts = np.asarray(tokens_per_expert).astype(np.float64)  # exact up to 2^53, then nearest
    partials = np.zeros(NUM_SLOTS, np.float32)
    with np.errstate(all="ignore"):
        for first_slot, columns in _column_sums(np.asarray(probs), valid_mask):
            dots = _dot(counts, columns).astype(np.float32)
            partials[first_slot : first_slot + len(dots)] = dots
    return _canonical_nan(partials)


def aux_loss_grad(
    probs: Any,
    tokens_per_expert: Any,
    topk: int,
    coeff: float,
    *,
    d_loss: Any = 1.0,
    num_experts: int | None = None,
    total_num_tokens: Any = None,
    valid_mask: Any = None,
) -> np.ndarray:
    """The gradient of `aux_loss` with respect to `probs`, times the cotangent `d_loss` (float32).

    `C * f[e] * d_loss` in float64, left to right, rounded once to the dtype of `probs`; +0 on
    masked rows. Of `probs` only shape and dtype are read.

    Args:
      probs: as in `aux_loss`.
      tokens_per_expert: as in `aux_loss`.
      topk: as in `aux_loss`.
      coeff: as in `aux_loss`.
      d_loss: cotangent of the loss.
      num_experts: as in `aux_loss`.
      total_num_tokens: as in `aux_loss`.
      valid_mask: as in `aux_loss`.

    Returns:
      `[num_tokens, num_columns]`, dtype of `probs`.
    """
    shape, dtype = np.shape(probs), np.asarray(probs).dtype
    out = np.zeros(shape, dtype)
    total = _total(shape[0], total_num_tokens, valid_mask)
    if coeff == 0 or total == 0:
        return out
    counts = np.asarray(tokens_per_expert).astype(np.float64)
    with np.errstate(all="ignore"):
        scale = _scale(num_experts or shape[1], coeff, topk, total)
        row = round_once(scale * counts * np.float64(np.float32(d_loss)), dtype)
    out[...] = row
    if valid_mask is not None:
        out[~np.asarray(valid_mask)] = 0
    return out


def aux_loss_float64(
    probs: Any,
    tokens_per_expert: Any,
    topk: int,
    coeff: float,
    *,
    num_experts: int | None = None,
    total_num_tokens: Any = None,
    valid_mask: Any = None,
) -> np.float64:
    """The plain formula in float64, for tests of the error: no documented order.

    NumPy's pairwise sums are good to about 1e-15 relative on positive scores.

    Args:
      probs: as in `aux_loss`.
      tokens_per_expert: as in `aux_loss`.
      topk: as in `aux_loss`.
      coeff: as in `aux_loss`.
      num_experts: as in `aux_loss`.
      total_num_tokens: as in `aux_loss`.
      valid_mask: as in `aux_loss`.

    Returns:
      The loss.
    """
    probs = np.asarray(probs)
    num_tokens, num_columns = probs.shape
    total = _total(num_tokens, total_num_tokens, valid_mask)
    if coeff == 0 or total == 0:
        return np.float64(0)
    rows = probs if valid_mask is None else probs[np.asarray(valid_mask)]
    # A contiguous column at a time: NumPy adds pairwise along contiguous memory only.
    columns = np.array([rows[:, e].astype(np.float64).sum() for e in range(num_columns)])
    counts = np.asarray(tokens_per_expert).astype(np.float64)
    return (counts * columns).sum() * _scale(num_experts or num_columns, coeff, topk, total)


def round_once(x: Any, dtype: Any) -> np.ndarray:
    """Float64 rounded once to a float dtype, ties to even, NaN canonical.

    Not `astype`: a conversion to bfloat16 through float32 would round twice.

    Args:
      x: float64 of any shape.
      dtype: float32, bfloat16 or float16.

    Returns:
      The rounded array.
    """
    x = np.asarray(x, np.float64)
    dtype = np.dtype(dtype)
    bits, min_exponent = _FORMATS[dtype.name]
    with np.errstate(all="ignore"):
        # x = m * 2^exponent with 0.5 <= |m| < 1, so the last bit of the format weighs 2^quantum.
        _, exponent = np.frexp(x)
        quantum = np.maximum(exponent - 1, min_exponent) - (bits - 1)
        on_grid = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
        out = np.where(np.isfinite(x), on_grid, x).astype(dtype)  # exact, or infinity
    return _canonical_nan(out)


def _total(num_tokens: int, total_num_tokens: Any, valid_mask: Any) -> np.float64:
    """N as float64; an integer beyond float64 is infinity."""
    if total_num_tokens is None:
        rows = num_tokens if valid_mask is None else np.count_nonzero(np.asarray(valid_mask))
        return np.float64(rows)
    try:
        return np.float64(int(total_num_tokens))
    except OverflowError:
        return np.float64(math.inf)


def _scale(num_experts: int, coeff: float, topk: int, total: np.float64) -> np.float64:
    """C = num_experts * coeff / (topk * N * N), left to right."""
    return np.float64(num_experts) * np.float64(coeff) / (np.float64(topk) * total * total)


def _column_sums(probs: np.ndarray, valid_mask: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Float32 column sums `[slots, num_columns]` of runs of slots, with the first slot's number."""
    num_tokens, num_columns = probs.shape
    if num_tokens == 0:
        return
    rows_per_slot = -(-num_tokens // NUM_SLOTS)
    num_slots = -(-num_tokens // rows_per_slot)
    # A slot of few rows has as many lane sums as one with a row in every lane.
    slot_elements = max(rows_per_slot, num_lanes(num_columns)) * num_columns
    step = max(1, _BLOCK // slot_elements)
    for first in range(0, num_slots, step):
        slots = min(step, num_slots - first)
        begin, end = first * rows_per_slot, (first + slots) * rows_per_slot
        rows = probs[begin:end].astype(np.float32)
        if valid_mask is not None:
            keep = np.asarray(valid_mask)[begin:end, None]
            rows = np.where(keep, rows, np.float32(0))  # +0 in its place: nothing else moves
        missing = end - begin - len(rows)  # the last slot's absent rows are +0 too
        if missing:
            rows = np.concatenate([rows, np.zeros((missing, num_columns), np.float32)])
        yield first, _slot_sums(rows.reshape(slots, rows_per_slot, num_columns))


def _slot_sums(rows: np.ndarray) -> np.ndarray:
    """Float32 sums over the rows of `[slots, rows, num_columns]`."""
    slots, num_rows, num_columns = rows.shape
    lanes = num_lanes(num_columns)
    lane_sums = np.zeros((slots, lanes, num_columns), np.float64)
    # Row r is in lane r mod L, so L consecutive rows are one row of every lane.
    for start in range(0, num_rows, CHUNK * lanes):
        chunk = np.zeros((slots, min(lanes, num_rows - start), num_columns), np.float32)
        for i in range(CHUNK):
            begin = start + i * lanes
            one_row_each = rows[:, begin : begin + lanes]
            chunk[:, : one_row_each.shape[1]] += one_row_each
        lane_sums[:, : chunk.shape[1]] += chunk
    sums = lane_sums.astype(np.float32)
    while sums.shape[1] > 1:  # by halves: lane i takes lane i + h
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def _dot(counts: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Float64 dots of `counts` `[num_columns]` with float32 `columns` `[slots, num_columns]`."""
    lanes = np.zeros((len(columns), NUM_DOT_LANES), np.float64)
    for first in range(0, len(counts), NUM_DOT_LANES):
        block = columns[:, first : first + NUM_DOT_LANES].astype(np.float64)
        width = block.shape[1]
        lanes[:, :width] = _fma(counts[first : first + width], block, lanes[:, :width])
    return _fold_adjacent_pairs(lanes)


def _fma(count: np.ndarray, column: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Float64 `count * column + total` with one rounding; `column` holds float32 values."""
    # 26 bits of a count times the 24 of a column are exact in float64, and so is the product of
    # what is left of it (at most 27 bits); fsum adds three values with one rounding.
    mantissa, exponent = np.frexp(count)
    high = np.ldexp(np.trunc(np.ldexp(mantissa, 26)), exponent - 26)
    low = count - high
    out = count * column + total  # one rounding where the product is exact
    inexact = (low != 0) & np.isfinite(out)
    if inexact.any():
        terms = np.broadcast_arrays(high * column, low * column, total)
        out[inexact] = [math.fsum(t) for t in zip(*(t[inexact] for t in terms), strict=True)]
    return out


def _fold_adjacent_pairs(values: np.ndarray) -> np.ndarray:
    """Sum over the last axis, of a power-of-two size, by a tree of adjacent pairs."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def _canonical_nan(x: Any) -> Any:
    x = np.asarray(x)
    return np.where(np.isnan(x), _NAN[x.dtype.name].view(x.dtype), x)[()]
