"""Shapes and inputs that tests and benchmarks share. NumPy only."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """A router's shape, named after models of that many experts and that top-k."""

    name: str
    num_tokens: int
    num_experts: int
    topk: int

    def __str__(self) -> str:
        return f"{self.name}-{self.num_tokens}x{self.num_experts}k{self.topk}"


SHAPES = (
    Shape("deepseek_v2_lite", 4096, 64, 6),
    Shape("qwen3_30b", 8192, 128, 8),
    Shape("glam", 16384, 64, 2),
    Shape("qwen3_next", 4096, 512, 10),
    Shape("deepseek_v3", 16384, 256, 8),
    Shape("deepseek_v3_long", 65536, 256, 8),
    Shape("qwen3_235b_long", 131072, 128, 8),
)

FLOAT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

#: Four tokens and four experts, for cases small enough to check by hand.
P4 = np.array(
    [[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]],
    np.float32,
)
COUNTS4 = np.array([3, 2, 2, 1], np.int32)


def lattice_logits(num_tokens: int, num_experts: int) -> np.ndarray:
    """Logits on a lattice from -4 to 4, float32: exact, and without ties inside a row.

    `((37*e + 11*t) mod 2^m) * 2^(3-m) - 4` with m = max(1, ceil(log2 num_experts)); exact in
    bfloat16 too for num_experts <= 256.
    """
    m = max(1, math.ceil(math.log2(num_experts)))
    t, e = np.ogrid[:num_tokens, :num_experts]
    return (((37 * e + 11 * t) % 2**m) * 2.0 ** (3 - m) - 4).astype(np.float32)


def top_experts(scores: np.ndarray, topk: int) -> np.ndarray:
    """Indices `[num_tokens, topk]` of each row's highest scores, lower index first among equals."""
    return np.argsort(-scores.astype(np.float64), axis=-1, kind="stable")[:, :topk]


def routed(num_tokens: int, num_experts: int, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """Normalised sigmoid scores of `lattice_logits`, float32, and int32 counts of their top k."""
    scores = 1 / (1 + np.exp(-lattice_logits(num_tokens, num_experts).astype(np.float64)))
    scores = (scores / scores.sum(axis=-1, keepdims=True)).astype(np.float32)
    chosen = top_experts(scores, topk)
    return scores, np.bincount(chosen.ravel(), minlength=num_experts).astype(np.int32)


def random_scores(seed: int, num_tokens: int, num_experts: int, dtype: str = "float32"):
    """Rows of a softmax over random normal logits."""
    rng = np.random.default_rng(seed)
    x = np.exp(rng.standard_normal((num_tokens, num_experts), np.float32))
    x /= x.sum(axis=-1, keepdims=True)
    return x.astype(FLOAT_DTYPES[dtype])


def random_counts(seed: int, num_experts: int, dtype: str = "int32", high: int = 1000):
    """Counts from 0 to `high`; those in float32 are averages, not integers."""
    rng = np.random.default_rng(seed)
    if dtype == "float32":
        return rng.uniform(0, high, num_experts).astype(np.float32)
    return rng.integers(0, high, num_experts).astype(dtype)


def random_mask(seed: int, num_tokens: int) -> np.ndarray:
    """About 70 % of the tokens are valid."""
    return np.random.default_rng(seed).random(num_tokens) < 0.7


def _subnormal(rng, shape, dtype):
    smallest = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}[dtype]
    return rng.integers(-100, 100, shape) * smallest


def _cancelling(rng, shape, dtype):
    # Every row has its negative somewhere else: the exact sum is 0, and what is left of it is the
    # rounding errors, so any other order gives other bits.
    half = rng.uniform(0.1, 1, (shape[0] // 2, shape[1]))
    rest = np.full((shape[0] % 2, shape[1]), 1e-3)
    return rng.permutation(np.concatenate([half, -half, rest]))


def _magnitudes(rng, shape, dtype):
    top = {"float32": 100, "bfloat16": 100, "float16": 12}[dtype]
    return np.ldexp(rng.uniform(-1, 1, shape), rng.integers(-8, top, shape))


def _overflowing(rng, shape, dtype):
    # Some float32 sums overflow to infinity on their way, in one order and not in another.
    largest = {"float32": 3e38, "bfloat16": 3e38, "float16": 6e4}[dtype]
    return rng.uniform(-largest, largest, shape)


def _sprinkle(*values):
    def make(rng, shape, dtype):
        x = rng.uniform(-1, 1, shape)
        flat = x.reshape(-1)
        if flat.size:
            places = rng.integers(0, flat.size, len(values))
            flat[places] = values
        return x

    return make


def _signed_zeros(rng, shape, dtype):
    return np.where(rng.random(shape) < 0.5, -0.0, 0.0)


SPECIAL_INPUTS = {
    "subnormal": _subnormal,
    "cancelling": _cancelling,
    "magnitudes": _magnitudes,
    "overflowing": _overflowing,
    "nan": _sprinkle(np.nan),
    "negative_nan": _sprinkle(-np.nan),
    "infinite": _sprinkle(np.inf),
    "infinities": _sprinkle(np.inf, -np.inf),
    "signed_zeros": _signed_zeros,
}


def special_scores(kind: str, seed: int, num_tokens: int, num_experts: int, dtype: str):
    """Scores of one of `SPECIAL_INPUTS`."""
    values = SPECIAL_INPUTS[kind](np.random.default_rng(seed), (num_tokens, num_experts), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(FLOAT_DTYPES[dtype])


def _tied(rng, shape, dtype):
    # At most four values in a row: every cut is a tie.
    return rng.integers(0, 4, shape) / 4 - rng.integers(0, 3, (shape[0], 1))


def _tails(rng, shape, dtype):
    # Scores that underflow beside scores that do not; rows whose every score does.
    return rng.uniform(-100, 20, shape) + rng.choice([0, -40, -120, 60], (shape[0], 1))


def _huge(rng, shape, dtype):
    largest = {"float32": 3e38, "bfloat16": 3e38, "float16": 6e4}[dtype]
    return rng.uniform(-1, 1, shape) * rng.choice([1e3, 1e4, largest], (shape[0], 1))


def _sparsely(*values):
    """Normal logits; two rows of three have these values at about a third of the experts."""

    def make(rng, shape, dtype):
        places = (rng.random(shape) < 0.3) & (rng.random((shape[0], 1)) < 0.7)
        return np.where(places, rng.choice(values, shape), rng.standard_normal(shape))

    return make


def _rows_of(*values):
    """Normal logits; half of the rows are one of these values, all along."""

    def make(rng, shape, dtype):
        row = rng.choice(values, (shape[0], 1))
        return np.where(rng.random((shape[0], 1)) < 0.5, row, rng.standard_normal(shape))

    return make


LOGIT_KINDS = {
    "normal": lambda rng, shape, dtype: 2 * rng.standard_normal(shape),
    "tied": _tied,
    "tails": _tails,
    "huge": _huge,
    "subnormal": _subnormal,
    "signed_zeros": _signed_zeros,
    "nan": _sparsely(np.nan, -np.nan),
    "infinite": _sparsely(np.inf, -np.inf),
    "minus_infinity": _sparsely(-np.inf),
    "special": _sparsely(np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40),
    "constant_rows": _rows_of(np.nan, np.inf, -np.inf, 0.0, -0.0, -300.0),
}


def logits(kind: str, seed: int, num_tokens: int, num_experts: int, dtype: str = "float32"):
    """Logits of one of `LOGIT_KINDS`."""
    values = LOGIT_KINDS[kind](np.random.default_rng(seed), (num_tokens, num_experts), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(FLOAT_DTYPES[dtype])
