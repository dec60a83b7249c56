"""NumPy oracles that follow the documented order: the readable definition of every bit.

Slow, and without JAX. `ffi/core/`, and the header of each operation in its folder of `ffi/`, hold
the same order in C++. Inputs are arrays that NumPy can read (`jax.Array` too), with the
dtypes of the public functions; nothing is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
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


def _column_sums(
    probs: np.ndarray, valid_mask: Any, lanes: int | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Float32 column sums `[slots, num_columns]` of runs of slots, with the first slot's number."""
    num_tokens, num_columns = probs.shape
    lanes = lanes or num_lanes(num_columns)
    if num_tokens == 0:
        return
    rows_per_slot = -(-num_tokens // NUM_SLOTS)
    num_slots = -(-num_tokens // rows_per_slot)
    # A slot of few rows has as many lane sums as one with a row in every lane.
    slot_elements = max(rows_per_slot, lanes) * num_columns
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
        yield first, _slot_sums(rows.reshape(slots, rows_per_slot, num_columns), lanes)


def _slot_sums(rows: np.ndarray, lanes: int) -> np.ndarray:
    """Float32 sums over the rows of `[slots, rows, num_columns]`."""
    slots, num_rows, num_columns = rows.shape
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


# ---- Exact float32 functions: `ffi/core/exact_math.h`


def fma_float32(a: Any, b: Any, c: Any) -> np.ndarray:
    """Float32 `a * b + c` with one rounding, which NumPy lacks.

    The product of two float32 is exact in float64. The float64 sum is rounded to odd (an inexact
    result gets a last bit of 1), after which the rounding to float32 is as good as the only one.

    Args:
      a: float32 of any shape.
      b: float32.
      c: float32.

    Returns:
      Float32, of the broadcast shape.
    """
    product = np.float64(a) * np.float64(b)
    addend = np.float64(c)
    nearest = product + addend
    # Knuth's exact error of a sum: nearest + error = product + addend.
    second = nearest - product
    error = (product - (nearest - second)) + (addend - second)
    is_even = (np.asarray(nearest).view(np.uint64) & np.uint64(1)) == 0
    adjust = is_even & np.isfinite(nearest) & (error != 0)
    odd = np.nextafter(nearest, np.where(error > 0, np.inf, -np.inf))
    return np.where(adjust, odd, nearest).astype(np.float32)


def exp_non_positive(x: Any) -> np.ndarray:
    """exp(x) of float32 x <= 0; +0 below 2^-126.5.

    Cody and Waite's reduction x = k * ln(2) + r and a polynomial of degree 6, times 2^k.

    Args:
      x: float32 of any shape.

    Returns:
      Float32; NaN (of any bits) for NaN.
    """
    x = np.asarray(x, np.float32)
    x = np.where(x < _EXP_CUT, _EXP_CUT, x)
    shifted = fma_float32(x, _LOG2_E, _ROUND_TO_INTEGER)
    k = shifted - _ROUND_TO_INTEGER
    r = fma_float32(k, -_LN2, x)
    r = fma_float32(k, _LN2_EXCESS, r)
    # The low bits of `shifted` are k + 127: the exponent field of 2^k.
    power_of_two = (np.asarray(shifted).view(np.uint32) << np.uint32(23)).view(np.float32)
    return _horner(_EXP, r) * power_of_two


def sigmoid(x: Any) -> np.ndarray:
    """1 / (1 + exp(-x)).

    Args:
      x: float32 of any shape.

    Returns:
      Float32; a NaN is 0x7fc00000.
    """
    x = np.asarray(x, np.float32)
    z = exp_non_positive(-np.abs(x))
    r = _ONE / (_ONE + z)
    return _canonical_nan(np.where(x >= 0, r, z * r))


def sigmoid_slope(x: Any) -> np.ndarray:
    """Derivative of `sigmoid`, as exp(-|x|) / (1 + exp(-|x|))^2.

    Args:
      x: float32 of any shape.

    Returns:
      Float32; a NaN is 0x7fc00000.
    """
    z = exp_non_positive(-np.abs(np.asarray(x, np.float32)))
    r = _ONE / (_ONE + z)
    return _canonical_nan(z * r * r)


def sqrt_softplus(x: Any) -> np.ndarray:
    """sqrt(log(1 + exp(x))); exp(x / 2) for x < -20.

    Args:
      x: float32 of any shape.

    Returns:
      Float32; a NaN is 0x7fc00000.
    """
    is_tail, z, root = _softplus(x)
    return _canonical_nan(np.where(is_tail, z, root))


def sqrt_softplus_slope(x: Any) -> np.ndarray:
    """Derivative of `sqrt_softplus`, as sigmoid(x) / (2 sqrt_softplus(x)) with one division.

    Args:
      x: float32 of any shape.

    Returns:
      Float32; a NaN is 0x7fc00000.
    """
    is_tail, z, root = _softplus(x)
    numerator = np.where(np.asarray(x, np.float32) >= 0, _ONE, z)
    denominator = np.where(is_tail, _TWO, (_ONE + z) * (_TWO * root))
    return _canonical_nan(numerator / denominator)


def _softplus(x: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Is x < -20; exp(-|x|), there exp(x / 2); sqrt(log(1 + exp(x))), wrong there."""
    x = np.asarray(x, np.float32)
    is_tail = x < _SOFTPLUS_TAIL
    z = exp_non_positive(np.where(is_tail, _HALF * x, -np.abs(x)))
    # log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), the latter of z in [0, 1].
    log1p = fma_float32(_horner(_LOG1P_UNIT, z), z * z, z)
    return is_tail, z, np.sqrt(np.where(x > 0, x, _ZERO) + log1p)


def log1p(x: Any) -> np.ndarray:
    """log(1 + x) of float32 x from 0 to 2^126.

    1 + x = (1 + m) * 2^e with m in [-1/4, 1/2]: e * ln(2) and a polynomial of degree 10 in m.

    Args:
      x: float32 of any shape.

    Returns:
      Float32; a NaN is 0x7fc00000.
    """
    x = np.asarray(x, np.float32)
    bits = np.asarray(x + _ONE).view(np.uint32) - np.uint32(0x3F400000)
    e = (bits & np.uint32(0xFF800000)).view(np.int32) >> 23
    scale = np.ldexp(_ONE, -e)
    m = x * scale + (scale - _ONE)
    log1p_m = fma_float32(_horner(_LOG1P, m), m * m, m)
    exponent = e.astype(np.float32)
    # ln(2) in a head, whose product with e is exact, and a tail.
    y = exponent * _LN2_HEAD + (log1p_m + exponent * _LN2_TAIL)
    return _canonical_nan(np.where(x == 0, x, np.where(e == 0, log1p_m, y)))


def _horner(coefficients: list[np.float32], x: np.ndarray) -> np.ndarray:
    """A polynomial, highest power first."""
    p: Any = coefficients[0]
    for c in coefficients[1:]:
        p = fma_float32(p, x, c)
    return p


def _hex(*words: str) -> list[np.float32]:
    return [np.float32(float.fromhex(word)) for word in words]


_ZERO, _HALF, _ONE, _TWO = _hex("0x0p+0", "0x1p-1", "0x1p+0", "0x1p+1")
_EXP_CUT = np.float32(-88.03)
_SOFTPLUS_TAIL = np.float32(-20)
_ROUND_TO_INTEGER, _LOG2_E = _hex("0x1.8000fep+23", "0x1.715476p+0")
_LN2, _LN2_EXCESS = _hex("0x1.62e430p-1", "0x1.05c610p-29")
_EXP = _hex(
    "0x1.6a21acp-10", "0x1.123b6ap-7", "0x1.5558fap-5", "0x1.555490p-3", "0x1.fffffcp-2",
    "0x1p+0", "0x1p+0",
)  # fmt: skip
_LOG1P_UNIT = _hex(
    "0x1.5fa0dap-8", "-0x1.eca398p-6", "0x1.44707ap-4", "-0x1.19af8ep-3", "0x1.884554p-3",
    "-0x1.fd1368p-3", "0x1.5535dep-2", "-0x1.ffff14p-2",
)  # fmt: skip
_LOG1P = _hex(
    "-0x1.71bc28p-5", "0x1.ace4c6p-4", "-0x1.0d99b2p-3", "0x1.288260p-3", "-0x1.54eddep-3",
    "0x1.99698ap-3", "-0x1.000048p-2", "0x1.5555a4p-2", "-0x1p-1",
)  # fmt: skip
_LN2_HEAD, _LN2_TAIL = _hex("0x1.63p-1", "-0x1.bd0106p-13")


# ---- The router: `ffi/topk_router/topk_router.h`

ROW_LANES = 128


def row_sum(values: np.ndarray) -> np.ndarray:
    """Float32 sum over the experts of a row.

    Expert e goes to lane e mod 128, ascending, from +0; the lanes fold over adjacent pairs.

    Args:
      values: float32 `[rows, num_experts]`; +0 where an expert does not take part.

    Returns:
      Float32 `[rows]`.
    """
    lanes = np.zeros((len(values), ROW_LANES), np.float32)
    for first in range(0, values.shape[1], ROW_LANES):
        block = values[:, first : first + ROW_LANES]
        lanes[:, : block.shape[1]] += block
    return _fold_adjacent_pairs(lanes)


def list_sum(values: np.ndarray) -> np.ndarray:
    """Float32 sum of a list of values for each row: adjacent pairs, padded to a power of two.

    The weights' and groups' lists are in order of selection, those of the gradient in order of
    expert.

    Args:
      values: float32 `[rows, n]`; padded with +0.

    Returns:
      Float32 `[rows]`.
    """
    n = values.shape[1]
    padded = np.zeros((len(values), 1 << (n - 1).bit_length()), np.float32)
    padded[:, :n] = values
    return _fold_adjacent_pairs(padded)


def softmax(x: np.ndarray, sum_of: Callable[[np.ndarray], np.ndarray] = row_sum) -> np.ndarray:
    """Softmax of rows, `e * (1 / S)` with e = exp(x - max) and S the sum of e.

    Args:
      x: float32 `[rows, n]`.
      sum_of: row_sum or list_sum.

    Returns:
      Float32 `[rows, n]`; a NaN is 0x7fc00000.
    """
    e = exp_non_positive(x - x.max(axis=1, keepdims=True))
    return _canonical_nan(e * (_ONE / sum_of(e))[:, None])


def selection_key(value: np.ndarray) -> np.ndarray:
    """The integer that ranks a float32: `ffi/core/selection_key.h`.

    It orders as the values do, with -0 below +0 and every NaN equal and above +infinity.

    Args:
      value: float32 of any shape.

    Returns:
      Uint32; never 0, the key of an excluded expert.
    """
    bits = np.asarray(_canonical_nan(value)).view(np.uint32)
    is_negative = (bits >> np.uint32(31)).astype(bool)
    return bits ^ np.where(is_negative, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))


def select(key: np.ndarray, k: int) -> np.ndarray:
    """The k highest keys of each row: higher first, then lower index.

    Args:
      key: uint32 `[rows, n]`.
      k: how many, at most n.

    Returns:
      Indices `[rows, k]`, in that order.
    """
    index = np.broadcast_to(np.arange(key.shape[1]), key.shape)
    return np.lexsort((index, ~key), axis=-1)[:, :k]


def topk_router(
    logits: Any,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
    expert_bias: Any = None,
    compute_aux_scores: bool = False,
    routing_map_format: str = "bytemap",
    group_score: str = "sum",
    eps: float = 1e-20,
    valid_mask: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The top-k router in the documented order; as `fused_topk_with_score_function`.

    Args:
      logits: `[..., num_experts]`, float32, bfloat16 or float16.
      topk: experts per token.
      use_pre_softmax: softmax over all experts, before the choice.
      num_groups: groups of consecutive experts; -1 for none.
      group_topk: groups kept.
      scaling_factor: of the weights; -0.0 counts as 0.0.
      score_function: "softmax", "sigmoid" or "sqrtsoftplus".
      expert_bias: float32 `[num_experts]`, added to what is selected by.
      compute_aux_scores: dense scores for the auxiliary loss in place of weights.
      routing_map_format: "bytemap" or "bitmap_u8".
      group_score: "sum", "top2" or "max".
      eps: added to the sum by which scores are divided.
      valid_mask: bool, the shape of logits without experts.

    Returns:
      Weights `[..., num_experts]` in the dtype of logits, or float32 aux scores; and the map, bool
      `[..., num_experts]` or uint8 `[..., ceil(num_experts / 8)]`.
    """
    logits = np.asarray(logits)
    x = logits.reshape(-1, logits.shape[-1]).astype(np.float32)
    valid = _valid_rows(valid_mask, len(x))
    with np.errstate(all="ignore"):
        if compute_aux_scores:
            out = aux_scores(x, score_function, eps)
            chosen = select(selection_key(out), topk)
            dtype = np.dtype(np.float32)
        else:
            score = _selection_score(x, score_function, use_pre_softmax)
            chosen = _choice(score, topk, num_groups, group_topk, expert_bias, group_score)
            out = np.zeros(x.shape, np.float32)
            weight = _choice_weights(
                score, chosen, use_pre_softmax, scaling_factor, score_function, eps
            )
            np.put_along_axis(out, chosen, weight, axis=1)
            dtype = logits.dtype
        out = round_once(np.where(valid[:, None], out, _ZERO), dtype)
    is_chosen = np.zeros(x.shape, bool)
    np.put_along_axis(is_chosen, chosen, True, axis=1)
    is_chosen &= valid[:, None]
    routing_map = np.packbits(is_chosen, axis=1, bitorder="little")
    if routing_map_format == "bytemap":
        routing_map = is_chosen
    leading = logits.shape[:-1]
    return out.reshape(logits.shape), routing_map.reshape(*leading, routing_map.shape[1])


def aux_scores(x: np.ndarray, score_function: str, eps: float) -> np.ndarray:
    """Scores for the auxiliary loss: softmax, or divided by the sum over all experts.

    Args:
      x: float32 `[rows, num_experts]`.
      score_function: as in `topk_router`.
      eps: as in `topk_router`.

    Returns:
      Float32 `[rows, num_experts]`.
    """
    if score_function == "softmax":
        return softmax(x)
    score = _SCORES[score_function](x)
    return _canonical_nan(score * _normalizing_factor(row_sum(score), eps)[:, None])


def topk_router_grad(
    logits: Any,
    routing_map: Any,
    d_probs: Any,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
    compute_aux_scores: bool = False,
    routing_map_format: str = "bytemap",
    eps: float = 1e-20,
    valid_mask: Any = None,
    **selection: Any,
) -> np.ndarray:
    """The gradient of `topk_router` with respect to logits, from the map that it returned.

    Over the experts that have a score in the result (all of them for aux scores and the softmax
    before top-k, else the chosen ones), with g = scale * d_weight at the chosen experts (aux
    scores: g = d_score): softmax p * (g - dot), dot = sum(p * g); sigmoid kinds (slope * n) *
    (g - dot), dot = sum((s * n) * g), n = 1 / (sum(s) + eps). Sums over all experts are
    `row_sum`, over the chosen ones, in ascending order, `list_sum`.

    Args:
      logits: as in `topk_router`.
      routing_map: the map; not read for aux scores.
      d_probs: cotangent of the weights or aux scores, with their shape and dtype.
      topk: as in `topk_router`.
      use_pre_softmax: as in `topk_router`.
      scaling_factor: as in `topk_router`.
      score_function: as in `topk_router`.
      compute_aux_scores: as in `topk_router`.
      routing_map_format: as in `topk_router`.
      eps: as in `topk_router`.
      valid_mask: as in `topk_router`; read for aux scores: a masked row's map is empty.
      **selection: the other arguments of `topk_router`, which have no part in the gradient.

    Returns:
      `[..., num_experts]`, dtype of logits; +0 at masked rows, and where no score enters.
    """
    del selection
    logits = np.asarray(logits)
    x = logits.reshape(-1, logits.shape[-1]).astype(np.float32)
    g = np.asarray(d_probs).reshape(x.shape).astype(np.float32)
    is_dense = compute_aux_scores or (score_function == "softmax" and use_pre_softmax)
    sum_of = row_sum if is_dense else list_sum
    with np.errstate(all="ignore"):
        if compute_aux_scores:
            valid = _valid_rows(valid_mask, len(x))
        else:
            is_chosen = unpack_map(routing_map, x.shape[1], routing_map_format).reshape(x.shape)
            valid = np.asarray(is_chosen.any(axis=1))
            g = np.where(is_chosen, (np.float32(scaling_factor) + _ZERO) * g, _ZERO)
        experts: Any = np.broadcast_to(np.arange(x.shape[1]), x.shape)
        if not is_dense:  # the topk chosen ones; any of a row that has none
            experts = np.argsort(~is_chosen, axis=1, kind="stable")[:, :topk]
            x, g = (np.take_along_axis(y, experts, axis=1) for y in (x, g))
        is_normalized = topk > 1 or compute_aux_scores
        gradient = _score_gradient(x, g, sum_of, score_function, eps, is_normalized)
        out = np.zeros(logits.shape, logits.dtype).reshape(-1, logits.shape[-1])
        gradient = round_once(np.where(valid[:, None], gradient, _ZERO), logits.dtype)
        np.put_along_axis(out, experts, gradient, axis=1)
        return out.reshape(logits.shape)


def unpack_map(routing_map: Any, num_experts: int, routing_map_format: str) -> np.ndarray:
    """The map of either format as bool `[..., num_experts]`.

    Args:
      routing_map: bool, or uint8 with the lowest bit first.
      num_experts: number of experts.
      routing_map_format: "bytemap" or "bitmap_u8".

    Returns:
      Is this expert chosen?
    """
    routing_map = np.asarray(routing_map)
    if routing_map_format == "bytemap":
        return routing_map
    bits = np.unpackbits(routing_map, axis=-1, count=num_experts, bitorder="little")
    return bits.astype(bool)


def topk_router_float64(
    logits: Any,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
    expert_bias: Any = None,
    compute_aux_scores: bool = False,
    group_score: str = "sum",
    eps: float = 1e-20,
    valid_mask: Any = None,
    is_chosen: Any = None,
    **formats: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The plain formulas in float64, for tests of the error: no documented order of sums.

    Args:
      logits: as in `topk_router`.
      topk: as in `topk_router`.
      use_pre_softmax: as in `topk_router`.
      num_groups: as in `topk_router`.
      group_topk: as in `topk_router`.
      scaling_factor: as in `topk_router`.
      score_function: as in `topk_router`.
      expert_bias: as in `topk_router`.
      compute_aux_scores: as in `topk_router`.
      group_score: as in `topk_router`.
      eps: as in `topk_router`.
      valid_mask: as in `topk_router`.
      is_chosen: bool `[..., num_experts]`, the choice; default: by the float64 values.
      **formats: routing_map_format, not read.

    Returns:
      Float64 weights or aux scores `[..., num_experts]`; and the map, bool.
    """
    del formats
    logits = np.asarray(logits)
    x = logits.reshape(-1, logits.shape[-1]).astype(np.float64)
    valid = _valid_rows(valid_mask, len(x))[:, None]
    with np.errstate(all="ignore"):
        score = _scores_float64(x, score_function)
        if compute_aux_scores and score_function != "softmax":
            score = score / (score.sum(axis=1, keepdims=True) + eps)
        value = score
        if not compute_aux_scores:
            if score_function == "softmax" and not use_pre_softmax:
                value = x
            if expert_bias is not None:
                value = value + np.asarray(expert_bias, np.float64)
        if is_chosen is None:
            excluded = np.zeros(x.shape, bool)
            if num_groups > 1 and not compute_aux_scores:
                grouped = value.reshape(len(x), num_groups, -1)
                n = group_values(group_score, topk, group_topk, grouped.shape[2])
                group = np.sort(grouped, axis=2)[:, :, ::-1][:, :, :n].sum(axis=2)
                lost = ~_is_among(_order_float64(group)[:, :group_topk], group.shape)
                excluded = np.repeat(lost, grouped.shape[2], axis=1)
            order = _order_float64(value, excluded)
            is_chosen = _is_among(order[:, :topk], x.shape) & valid
        is_chosen = np.asarray(is_chosen).reshape(x.shape)
        if not compute_aux_scores:
            total = np.where(is_chosen, score, 0).sum(axis=1, keepdims=True)
            if score_function != "softmax" and topk > 1:
                score = score / (total + eps)
            elif score_function == "softmax" and not use_pre_softmax:
                score = _scores_float64(np.where(is_chosen, x, -np.inf), "softmax")
            score = np.where(is_chosen, score * scaling_factor, 0)
        score = np.where(valid, score, 0)
    return score.reshape(logits.shape), is_chosen.reshape(logits.shape)


def topk_router_grad_float64(
    logits: Any,
    is_chosen: Any,
    d_probs: Any,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
    compute_aux_scores: bool = False,
    eps: float = 1e-20,
    valid_mask: Any = None,
    **selection: Any,
) -> np.ndarray:
    """The gradient of `topk_router_float64` for a given choice, from the Jacobian's definition.

    Args:
      logits: as in `topk_router`.
      is_chosen: bool `[..., num_experts]`.
      d_probs: cotangent of the weights or aux scores.
      topk: as in `topk_router`.
      use_pre_softmax: as in `topk_router`.
      scaling_factor: as in `topk_router`.
      score_function: as in `topk_router`.
      compute_aux_scores: as in `topk_router`.
      eps: as in `topk_router`.
      valid_mask: as in `topk_router`.
      **selection: the other arguments of `topk_router`, not read.

    Returns:
      Float64 `[..., num_experts]`.
    """
    del selection
    logits = np.asarray(logits)
    x = logits.reshape(-1, logits.shape[-1]).astype(np.float64)
    g = np.asarray(d_probs).reshape(x.shape).astype(np.float64)
    chosen = np.asarray(is_chosen).reshape(x.shape)
    takes_part = np.broadcast_to(_valid_rows(valid_mask, len(x))[:, None], x.shape)
    if not compute_aux_scores:
        g = np.where(chosen, scaling_factor * g, 0)
        if score_function != "softmax" or not use_pre_softmax:
            takes_part = takes_part & chosen
    with np.errstate(all="ignore"):
        if score_function == "softmax":
            p = _scores_float64(np.where(takes_part, x, -np.inf), "softmax")
            out = p * (g - (p * g).sum(axis=1, keepdims=True))
        else:
            score = _scores_float64(x, score_function)
            s = 1 / (1 + np.exp(-x))
            # s * (1 - s) without its cancellation; s / (2 * sqrt(softplus)).
            slope = s / (1 + np.exp(x)) if score_function == "sigmoid" else s / (2 * score)
            out = slope * g
            if compute_aux_scores or topk > 1:
                score = np.where(takes_part, score, 0)
                n = 1 / (score.sum(axis=1, keepdims=True) + eps)
                out = slope * n * (g - (score * n * g).sum(axis=1, keepdims=True))
    return np.where(takes_part, out, 0).reshape(logits.shape)


def group_values(group_score: str, topk: int, group_topk: int, group_size: int) -> int:
    """How many of its highest selection values are a group's score.

    Args:
      group_score: "sum", "top2" or "max".
      topk: experts per token.
      group_topk: groups kept.
      group_size: experts in a group.

    Returns:
      A number from 1 to group_size.
    """
    if group_score == "sum":
        return topk // group_topk
    return min(2, group_size) if group_score == "top2" else 1


def _selection_score(x: np.ndarray, score_function: str, use_pre_softmax: bool) -> np.ndarray:
    """What is selected by, before the bias, and weighed: softmax after top-k, the logits."""
    if score_function != "softmax":
        return _SCORES[score_function](x)
    return softmax(x) if use_pre_softmax else x


def _choice(
    score: np.ndarray,
    topk: int,
    num_groups: int,
    group_topk: int,
    expert_bias: Any,
    group_score: str,
) -> np.ndarray:
    """The chosen experts `[rows, topk]`, in order."""
    key = selection_key(score if expert_bias is None else score + np.asarray(expert_bias))
    if num_groups > 1:
        group_size = score.shape[1] // num_groups
        values = group_values(group_score, topk, group_topk, group_size)
        key = _keep_groups(key, num_groups, group_topk, values)
    return select(key, topk)


def _choice_weights(
    score: np.ndarray,
    chosen: np.ndarray,
    use_pre_softmax: bool,
    scaling_factor: float,
    score_function: str,
    eps: float,
) -> np.ndarray:
    """Float32 weights of the chosen experts, in their order; +0 where there is no expert."""
    topk = chosen.shape[1]
    after_topk = score_function == "softmax" and not use_pre_softmax
    is_expert, weight = _gather(score, chosen, -np.inf if after_topk else 0)
    if after_topk:
        weight = softmax(weight, list_sum)
    elif score_function != "softmax" and topk > 1:
        weight = weight * _normalizing_factor(list_sum(weight), eps)[:, None]
    weight = np.where(is_expert, weight * (np.float32(scaling_factor) + _ZERO), _ZERO)
    has_nan = np.isnan(weight).any(axis=1, keepdims=True)
    return np.where(is_expert & has_nan, np.float32(np.nan), weight)


def _gather(x: np.ndarray, indices: np.ndarray, absent: float) -> tuple[np.ndarray, np.ndarray]:
    """Which of the indices are experts; their values in x, `absent` for the others."""
    is_expert = (indices >= 0) & (indices < x.shape[1])
    values = np.take_along_axis(x, np.where(is_expert, indices, 0), axis=1)
    return is_expert, np.where(is_expert, values, x.dtype.type(absent))


def _score_gradient(
    x: np.ndarray,
    g: np.ndarray,
    sum_of: Callable[[np.ndarray], np.ndarray],
    score_function: str,
    eps: float,
    is_normalized: bool,
) -> np.ndarray:
    """Float32 gradient of the scores of rows, or of lists, with respect to their logits x."""
    if score_function == "softmax":
        p = softmax(x, sum_of)
        return p * (g - sum_of(p * g)[:, None])
    slope = _SLOPES[score_function](x)
    if not is_normalized:  # the weight of a single expert is its score
        return slope * g
    score = _SCORES[score_function](x)
    n = _normalizing_factor(sum_of(score), eps)[:, None]
    dot = sum_of(score * n * g)[:, None]
    return (slope * n) * (g - dot)


def _keep_groups(key: np.ndarray, num_groups: int, group_topk: int, values: int) -> np.ndarray:
    """Keys `[rows, num_experts]`, 0 (excluded) in all but the highest groups."""
    grouped = key.reshape(len(key) * num_groups, -1)
    highest = np.take_along_axis(grouped, select(grouped, values), axis=1)
    score = list_sum(_selection_value(highest)).reshape(len(key), num_groups)
    kept = _is_among(select(selection_key(score), group_topk), score.shape)
    return np.where(np.repeat(kept, grouped.shape[1], axis=1), key, np.uint32(0))


def _selection_value(key: np.ndarray) -> np.ndarray:
    """The inverse of `selection_key`."""
    is_positive = (key >> np.uint32(31)).astype(bool)
    bits = key ^ np.where(is_positive, np.uint32(0x80000000), np.uint32(0xFFFFFFFF))
    return bits.view(np.float32)


def _normalizing_factor(total: np.ndarray, eps: float) -> np.ndarray:
    """1 / (total + eps); the largest float32 where that overflows and total + eps is not 0."""
    denominator = total + np.float32(eps)
    factor = _ONE / denominator
    largest = np.finfo(np.float32).max
    return np.where((denominator > 0) & (factor > largest), largest, factor)


def _valid_rows(valid_mask: Any, num_rows: int) -> np.ndarray:
    if valid_mask is None:
        return np.ones(num_rows, bool)
    return np.asarray(valid_mask).reshape(num_rows)


def _is_among(indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Bool of this shape: is the place named in its row of indices?"""
    out = np.zeros(shape, bool)
    np.put_along_axis(out, indices, True, axis=1)
    return out


def _scores_float64(x: np.ndarray, score_function: str) -> np.ndarray:
    if score_function == "softmax":
        e = np.exp(x - x.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)
    if score_function == "sigmoid":
        return 1 / (1 + np.exp(-x))
    return np.sqrt(np.logaddexp(0, x))


def _order_float64(value: np.ndarray, excluded: Any = False) -> np.ndarray:
    """Places in order of selection: NaN, then the highest, then lower index; excluded ones last."""
    index = np.broadcast_to(np.arange(value.shape[1]), value.shape)
    last = np.broadcast_to(excluded, value.shape)
    return np.lexsort((index, -value, ~np.isnan(value), last), axis=-1)


_SCORES = {"sigmoid": sigmoid, "sqrtsoftplus": sqrt_softplus}
_SLOPES = {"sigmoid": sigmoid_slope, "sqrtsoftplus": sqrt_softplus_slope}


# ---- The router step in one pass: `ffi/route/route.h`


def route(
    logits: Any,
    topk: int,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.float32, np.float32]:
    """The router step in the documented order; arguments as in the public `route`.

    Args:
      logits: as in `topk_router`.
      topk: as in `topk_router`.
      score_function: as in `topk_router`.
      use_pre_softmax: as in `topk_router`.
      num_groups: as in `topk_router`.
      group_topk: as in `topk_router`.
      group_score: as in `topk_router`.
      scaling_factor: as in `topk_router`.
      expert_bias: as in `topk_router`.
      eps: as in `topk_router`.
      indices: int32 `[..., topk]`, the choice, in place of the router's own.
      valid_mask: as in `topk_router`.
      aux_loss_coeff: coefficient.
      z_loss_coeff: coefficient.
      loss_map: "dispatch" or "plain": whose counts the aux loss takes.
      total_num_tokens: N; default the number of (valid) rows.

    Returns:
      weights `[..., topk]`, dtype of logits; indices int32 `[..., topk]`, num_experts where there
      is no expert; tokens_per_expert int32 `[num_experts]`; aux_loss and z_loss, float32.
    """
    logits = np.asarray(logits)
    num_experts = logits.shape[-1]
    x = logits.reshape(-1, num_experts).astype(np.float32)
    valid = _valid_rows(valid_mask, len(x))
    with np.errstate(all="ignore"):
        score = _selection_score(x, score_function, use_pre_softmax)
        if indices is None:
            chosen = _choice(score, topk, num_groups, group_topk, expert_bias, group_score)
        else:
            chosen = np.asarray(indices).reshape(-1, topk)
        is_chosen = valid[:, None] & (chosen >= 0) & (chosen < num_experts)
        chosen = np.where(is_chosen, chosen, num_experts).astype(np.int32)
        weights = _choice_weights(
            score, chosen, use_pre_softmax, scaling_factor, score_function, eps
        )
        counts = loss_counts = choice_counts(chosen, num_experts)
        scores = aux_scores(x, score_function, eps)
        if loss_map == "plain":
            loss_counts = _plain_counts(scores, topk, valid)
        aux = aux_loss(
            scores, loss_counts, topk, aux_loss_coeff,
            total_num_tokens=total_num_tokens, valid_mask=valid,
        )  # fmt: skip
        z = _z_loss(x, z_loss_coeff, _total(len(x), total_num_tokens, valid), valid)
    shape = (*logits.shape[:-1], topk)
    return round_once(weights, logits.dtype).reshape(shape), chosen.reshape(shape), counts, aux, z


def route_grad(
    logits: Any,
    topk: int,
    indices: Any,
    d_weights: Any = None,
    d_aux_loss: Any = None,
    d_z_loss: Any = None,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    eps: float = 1e-20,
    valid_mask: Any = None,
    aux_loss_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
    loss_map: str = "dispatch",
    total_num_tokens: Any = None,
    **selection: Any,
) -> np.ndarray:
    """The gradient of `route` with respect to logits, from the indices that it returned.

    In two parts. `sparse` is the weights' gradient at the chosen experts, as in
    `topk_router_grad` but for its lists, which are in order of selection; the gradients of an
    expert that is chosen twice are added in that order. `dense` is the losses' gradient at every
    expert: that of the aux scores, and the softmax times zg = (z_loss_coeff / N * 2 * d_z_loss) *
    logsumexp. The softmax before top-k takes the weights' and the aux loss's cotangents together.

    Args:
      logits: as in `route`.
      topk: as in `route`.
      indices: of the result of `route`.
      d_weights: cotangent of the weights, dtype of logits; None: there is none.
      d_aux_loss: cotangent of aux_loss; None: there is none.
      d_z_loss: cotangent of z_loss; None: there is none.
      score_function: as in `route`.
      use_pre_softmax: as in `route`.
      scaling_factor: as in `route`.
      eps: as in `route`.
      valid_mask: as in `route`.
      aux_loss_coeff: as in `route`.
      z_loss_coeff: as in `route`.
      loss_map: as in `route`.
      total_num_tokens: as in `route`.
      **selection: the other arguments of `route`, which have no part in the gradient.

    Returns:
      `[..., num_experts]`, dtype of logits; +0 at masked rows.
    """
    del selection
    logits = np.asarray(logits)
    num_experts = logits.shape[-1]
    x = logits.reshape(-1, num_experts).astype(np.float32)
    chosen = np.asarray(indices).reshape(-1, topk)
    valid = _valid_rows(valid_mask, len(x))
    total = _total(len(x), total_num_tokens, valid)
    has_aux = d_aux_loss is not None and aux_loss_coeff != 0 and total != 0
    has_z = d_z_loss is not None and z_loss_coeff != 0 and total != 0
    is_softmax = score_function == "softmax"
    before_topk = is_softmax and use_pre_softmax
    dense = np.zeros(x.shape, np.float32)
    sparse = np.zeros(x.shape, np.float32)
    with np.errstate(all="ignore"):
        if d_weights is not None:
            is_expert, chosen_x = _gather(x, chosen, -np.inf)  # a score of +0
            g = np.asarray(d_weights).reshape(chosen.shape).astype(np.float32)
            g = np.where(is_expert, (np.float32(scaling_factor) + _ZERO) * g, _ZERO)
            if not before_topk:
                g = _score_gradient(chosen_x, g, list_sum, score_function, eps, topk > 1)
            for i in range(topk):
                rows = np.flatnonzero(is_expert[:, i])
                sparse[rows, chosen[rows, i]] += g[rows, i]
        aux = np.zeros(x.shape, np.float32)
        if has_aux:
            counts = choice_counts(chosen, num_experts)
            if loss_map == "plain":
                counts = _plain_counts(aux_scores(x, score_function, eps), topk, valid)
            aux = aux_loss_grad(
                x, counts, topk, aux_loss_coeff, d_loss=d_aux_loss,
                total_num_tokens=total_num_tokens, valid_mask=valid,
            )  # fmt: skip
        zg = np.zeros((len(x), 1), np.float32)
        if has_z:
            h = np.float32(np.float64(z_loss_coeff) / total * 2 * np.float64(np.float32(d_z_loss)))
            zg = (h * log_sum_exp(x))[:, None]
        if not is_softmax:
            if has_aux:
                dense = _score_gradient(x, aux, row_sum, score_function, eps, True)
            if has_z:
                dense = dense + softmax(x) * zg
        elif has_aux or has_z or (before_topk and d_weights is not None):
            p = softmax(x)
            g = aux + sparse if before_topk else aux
            dense = p * ((g - row_sum(p * g)[:, None]) + zg)
        out = dense if before_topk else dense + sparse
        out = np.where(valid[:, None], out, _ZERO)
    return round_once(out, logits.dtype).reshape(logits.shape)


def route_float64(
    logits: Any,
    topk: int,
    indices: Any,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    eps: float = 1e-20,
    valid_mask: Any = None,
    aux_loss_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
    tokens_per_expert: Any = None,
    total_num_tokens: Any = None,
) -> tuple[np.ndarray, np.float64, np.float64]:
    """The plain formulas in float64, for tests of the error: no documented order of sums.

    Args:
      logits: as in `route`.
      topk: as in `route`.
      indices: of the result of `route`: the choice is not made again.
      score_function: as in `route`.
      use_pre_softmax: as in `route`.
      scaling_factor: as in `route`.
      eps: as in `route`.
      valid_mask: as in `route`.
      aux_loss_coeff: as in `route`.
      z_loss_coeff: as in `route`.
      tokens_per_expert: counts of the aux loss; default those of `indices`.
      total_num_tokens: as in `route`.

    Returns:
      weights `[..., topk]`, aux_loss and z_loss.
    """
    logits = np.asarray(logits)
    x = logits.reshape(-1, logits.shape[-1]).astype(np.float64)
    chosen = np.asarray(indices).reshape(-1, topk)
    valid = _valid_rows(valid_mask, len(x))
    total = _total(len(x), total_num_tokens, valid)
    counts = tokens_per_expert
    if counts is None:
        counts = choice_counts(chosen, x.shape[1])
    with np.errstate(all="ignore"):
        score = _scores_float64(x, score_function)
        after_topk = score_function == "softmax" and not use_pre_softmax
        is_expert, weights = _gather(score, chosen, 0)
        if after_topk or (score_function != "softmax" and topk > 1):
            used_eps = 0 if after_topk else eps
            weights = weights / (weights.sum(axis=1, keepdims=True) + used_eps)
        weights = np.where(is_expert, weights * scaling_factor, 0)
        if score_function != "softmax":
            score = score / (score.sum(axis=1, keepdims=True) + eps)
        aux = aux_loss_float64(
            score, counts, topk, aux_loss_coeff,
            total_num_tokens=total_num_tokens, valid_mask=valid,
        )  # fmt: skip
        z = np.float64(0)
        if z_loss_coeff != 0 and total != 0:
            z = z_loss_coeff / total * (np.logaddexp.reduce(x[valid], axis=1) ** 2).sum()
    return weights.reshape(*logits.shape[:-1], topk), aux, z


def route_grad_float64(
    logits: Any,
    topk: int,
    indices: Any,
    d_weights: Any,
    d_aux_loss: float,
    d_z_loss: float,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    eps: float = 1e-20,
    valid_mask: Any = None,
    aux_loss_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
    tokens_per_expert: Any = None,
    total_num_tokens: Any = None,
) -> np.ndarray:
    """The gradient of `route_float64`, from the Jacobians' definition.

    Args:
      logits: as in `route_float64`.
      topk: as in `route_float64`.
      indices: as in `route_float64`.
      d_weights: cotangent of the weights.
      d_aux_loss: cotangent of aux_loss.
      d_z_loss: cotangent of z_loss.
      score_function: as in `route_float64`.
      use_pre_softmax: as in `route_float64`.
      scaling_factor: as in `route_float64`.
      eps: as in `route_float64`.
      valid_mask: as in `route_float64`.
      aux_loss_coeff: as in `route_float64`.
      z_loss_coeff: as in `route_float64`.
      tokens_per_expert: as in `route_float64`.
      total_num_tokens: as in `route_float64`.

    Returns:
      Float64 `[..., num_experts]`.
    """
    logits = np.asarray(logits)
    num_experts = logits.shape[-1]
    x = logits.reshape(-1, num_experts).astype(np.float64)
    chosen = np.asarray(indices).reshape(-1, topk)
    valid = _valid_rows(valid_mask, len(x))
    total = _total(len(x), total_num_tokens, valid)
    counts = tokens_per_expert
    if counts is None:
        counts = choice_counts(chosen, num_experts)
    is_expert, chosen_x = _gather(x, chosen, 0)
    g = np.where(is_expert, np.asarray(d_weights).reshape(chosen.shape), 0) * scaling_factor
    options: dict[str, Any] = {"score_function": score_function, "eps": eps}
    if score_function != "softmax" or not use_pre_softmax:
        # The chosen experts as a row of their own.
        g = topk_router_grad_float64(chosen_x, is_expert, g, topk, **options)
    sparse = np.zeros(x.shape)
    rows = np.broadcast_to(np.arange(len(x))[:, None], chosen.shape)
    np.add.at(sparse, (rows[is_expert], chosen[is_expert]), g[is_expert])
    everything = np.ones(x.shape, bool)
    if score_function == "softmax" and use_pre_softmax:
        sparse = topk_router_grad_float64(x, everything, sparse, topk, use_pre_softmax=True)
    d_scores = np.zeros(x.shape)
    if total != 0:
        d_scores[:] = _scale(num_experts, aux_loss_coeff, topk, total) * counts * d_aux_loss
    out = sparse + topk_router_grad_float64(
        x, everything, d_scores, topk, compute_aux_scores=True, **options
    )
    if total != 0:
        h = z_loss_coeff / total * 2 * d_z_loss
        out += _scores_float64(x, "softmax") * (h * np.logaddexp.reduce(x, axis=1)[:, None])
    return np.where(valid[:, None], out, 0).reshape(logits.shape)


def choice_counts(indices: Any, num_experts: int) -> np.ndarray:
    """How often each expert is among the indices: int32 `[num_experts]`.

    Args:
      indices: integers of any shape; those that are no expert do not count.
      num_experts: number of experts.

    Returns:
      The counts.
    """
    indices = np.asarray(indices)
    indices = indices[(indices >= 0) & (indices < num_experts)]
    return np.bincount(indices, minlength=num_experts).astype(np.int32)


def log_sum_exp(x: np.ndarray) -> np.ndarray:
    """log(sum(exp(x))) of rows, as max + log1p(S - 1) with S the `row_sum` of exp(x - max).

    Args:
      x: float32 `[rows, num_experts]`.

    Returns:
      Float32 `[rows]`.
    """
    largest = x.max(axis=1, keepdims=True)
    return largest[:, 0] + log1p(row_sum(exp_non_positive(x - largest)) - _ONE)


def _z_loss(x: np.ndarray, coeff: float, total: np.float64, valid: np.ndarray) -> np.float32:
    """The squares are summed as one more column of the aux loss."""
    if coeff == 0 or total == 0:
        return np.float32(0)
    lse = log_sum_exp(x)
    partials = np.zeros(NUM_SLOTS, np.float32)
    for first, sums in _column_sums((lse * lse)[:, None], valid, num_lanes(x.shape[1])):
        partials[first : first + len(sums)] = sums[:, 0]
    square_sum = _fold_adjacent_pairs(partials.astype(np.float64))
    return _canonical_nan(np.float32(square_sum * (np.float64(coeff) / total)))


def _plain_counts(scores: np.ndarray, topk: int, valid: np.ndarray) -> np.ndarray:
    """Counts of the topk aux scores of valid rows."""
    return choice_counts(select(selection_key(scores[valid]), topk), scores.shape[1])


# ---- Statistics and the bias update: `ffi/statistics/statistics.h`

STATISTICS_LANES = 128


def update_expert_bias(expert_bias: Any, tokens_per_expert: Any, rate: float) -> np.ndarray:
    """`bias + rate * sign(mean - count)`; as the public function.

    The sign is that of sum - count * num_experts: of exact integers, or of float64 for float32
    counts.

    Args:
      expert_bias: float32 `[num_experts]`.
      tokens_per_expert: int32, int64 or float32 `[num_experts]`.
      rate: rounded to float32.

    Returns:
      Float32 `[num_experts]`; where the sign is 0, the bits of the bias.
    """
    bias = np.asarray(expert_bias)
    counts, total = _exact_counts(tokens_per_expert)
    step = np.float32(rate)
    out = bias.copy()
    with np.errstate(all="ignore"):
        for e, count in enumerate(counts):
            excess = count * len(counts)
            if excess != total:
                below, above = excess < total, excess > total
                out[e] = bias[e] + step if below else bias[e] - step if above else np.nan
                out[e] = _canonical_nan(out[e])
    return out


def routing_stats(
    tokens_per_expert: Any,
) -> tuple[np.ndarray, np.float32, np.float32, np.float32, np.float32, np.int32]:
    """How even the load is; as the public function.

    Sums of integers are exact, and rounded to float64 where they are divided. Those of float32
    counts, and of the entropy's terms, are float64 sums of lanes: expert e goes to lane e mod 128,
    ascending; the lanes fold by halves.

    Args:
      tokens_per_expert: int32, int64 or float32 `[num_experts]`.

    Returns:
      load float32 `[num_experts]`; max_violation, min_violation, entropy and effective_experts,
      float32; dead, int32.
    """
    counts, total = _exact_counts(tokens_per_expert)
    n = len(counts)
    dead = np.int32(sum(count == 0 for count in counts))
    zero = np.float32(0)
    if total == 0:
        return np.zeros(n, np.float32), zero, zero, zero, zero, dead
    with np.errstate(all="ignore"):
        load = np.array([np.float64(count) for count in counts]) / np.float64(total)
        largest, smallest = max(counts), min(counts)
        if any(count != count for count in counts):
            largest = smallest = np.float64(np.nan)
        max_violation = np.float64(largest * n - total) / np.float64(total)
        min_violation = np.float64(total - smallest * n) / np.float64(total)
        entropy = _lane_sum(np.array([_entropy_term(q) for q in load]))
        # exp of the entropy's head; the rest of it is a factor of its own.
        head = np.float32(entropy)
        effective = np.float64(exp_non_positive(head)) * (1 + (entropy - np.float64(head)))
        summary = [max_violation, min_violation, entropy, effective]
        numbers = _canonical_nan(np.array(summary).astype(np.float32))
        return (_canonical_nan(load.astype(np.float32)), *numbers, dead)


def _exact_counts(tokens_per_expert: Any) -> tuple[list[Any], Any]:
    """Counts and their sum: Python integers, or float64."""
    counts = np.asarray(tokens_per_expert)
    if counts.dtype.kind == "i":
        numbers = counts.tolist()
        return numbers, sum(numbers)
    counts = counts.astype(np.float64)
    with np.errstate(all="ignore"):
        return list(counts), _lane_sum(counts)


def _lane_sum(values: np.ndarray) -> np.float64:
    """Float64 sum over the experts."""
    lanes = np.zeros(STATISTICS_LANES)
    for first in range(0, len(values), STATISTICS_LANES):
        block = values[first : first + STATISTICS_LANES]
        lanes[: len(block)] += block
    while len(lanes) > 1:  # by halves
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def _entropy_term(q: float) -> float:
    """-q * log(q); NaN for what is no share of a load."""
    if not 0 <= q < math.inf:
        return math.nan
    return -(q * _log(q)) if q >= _SMALLEST_NORMAL else 0.0


def _log(x: float) -> float:
    """log(x) of a normal float64 x > 0.

    x = 2^e * m with m in [3/4, 3/2), and log(m) = 2 * atanh(s), s = (m - 1) / (m + 1).
    """
    m, e = math.frexp(x)
    if m < 0.75:
        m, e = 2 * m, e - 1
    s = (m - 1) / (m + 1)
    s2 = s * s
    series = 1 / 25
    for k in range(23, 0, -2):
        series = _fma_float64(series, s2, 1 / k)
    return _fma_float64(float(e), _LN2_FLOAT64, 2 * s * series)


def _fma_float64(a: float, b: float, c: float) -> float:
    """Float64 `a * b + c` of finite numbers with one rounding."""
    return float(Fraction(a) * Fraction(b) + Fraction(c))


_SMALLEST_NORMAL = 2.0**-1022
_LN2_FLOAT64 = float.fromhex("0x1.62e42fefa39efp-1")
