"""The auxiliary loss: values, bits under everything that must not matter, gradients, messages.

Bits are compared exactly (`assert_same_bits`). Closeness to float64 is a separate test, with the
error model beside it. Names and docstrings carry the number of the case they come from.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import re
import threading

import cases
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations
from jax import lax

from jax_moe_det import aux_loss_workspace, fused_moe_aux_loss, reference
from jax_moe_det.aux_loss import RESIDUAL_NAME
from jax_moe_det.testing import assert_same_bits, check_reproducible, fingerprint

P4, COUNTS4 = cases.P4, cases.COUNTS4


def loss(probs, counts, topk=2, coeff=0.01, **options):
    return fused_moe_aux_loss(probs, counts, topk, coeff, **options)


loss_and_grad = jax.value_and_grad(loss)


@functools.cache
def compiled(topk, coeff, num_experts=None):
    return jax.jit(
        functools.partial(loss_and_grad, topk=topk, coeff=coeff, num_experts=num_experts)
    )


def jitted(probs, counts, topk=2, coeff=0.01, *, num_experts=None, **arrays):
    """Loss and gradient in one compiled program; `arrays` are traced."""
    return compiled(topk, coeff, num_experts)(probs, counts, **arrays)


def expected(probs, counts, topk=2, coeff=0.01, **options):
    """Loss and gradient of the reference."""
    return (
        reference.aux_loss(probs, counts, topk, coeff, **options),
        reference.aux_loss_grad(probs, counts, topk, coeff, **options),
    )


def bits(x):
    return int(np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}"))


# ---- Values


def test_aux_loss_a01_hand_case():
    value, grad = loss_and_grad(P4, COUNTS4)
    np.testing.assert_allclose(value, 0.01075, rtol=1e-6)
    np.testing.assert_allclose(grad, [[0.00375, 0.0025, 0.0025, 0.00125]] * 4, rtol=1e-6)
    assert value.dtype == jnp.float32
    assert value.shape == ()


@pytest.mark.parametrize(("topk", "count"), [(1, 2), (2, 4), (4, 8)])
def test_aux_loss_a02_balance_gives_coeff(topk, count):
    value = loss(np.full((8, 4), 0.25, np.float32), np.full(4, count, np.int32), topk)
    assert abs(bits(value) - bits(np.float32(0.01))) <= 1


def test_aux_loss_a03_collapse_gives_experts_times_coeff():
    probs = np.zeros((6, 4), np.float32)
    probs[:, 2] = 1
    assert_same_bits(loss(probs, np.array([0, 0, 6, 0]), 1, 0.5), jnp.float32(2))


def test_aux_loss_a04_shards_add_up():
    parts = [float(loss(P4[i : i + 2], COUNTS4, total_num_tokens=4)) for i in (0, 2)]
    np.testing.assert_allclose(parts, [0.006125, 0.004625], rtol=1e-6)
    np.testing.assert_allclose(sum(parts), 0.01075, rtol=1e-6)


def test_aux_loss_a05_total_static_and_traced():
    static = loss(P4[:2], COUNTS4, total_num_tokens=4)
    np.testing.assert_allclose(static, 0.006125, rtol=1e-6)
    for dtype in (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64):
        assert_same_bits(loss(P4[:2], COUNTS4, total_num_tokens=dtype(4)), static)
    for dtype in (jnp.int8, jnp.int16, jnp.int32, jnp.uint32):
        traced = jax.jit(lambda n: loss(P4[:2], COUNTS4, total_num_tokens=n))
        assert_same_bits(traced(jnp.asarray(4, dtype)), static)
        assert_same_bits(loss(P4[:2], COUNTS4, total_num_tokens=jnp.asarray(4, dtype)), static)
    with jax.enable_x64(True):
        for dtype in (jnp.int64, jnp.uint64):
            traced = jax.jit(lambda n: loss(P4[:2], COUNTS4, total_num_tokens=n))
            assert_same_bits(traced(jnp.asarray(4, dtype)), static)


@pytest.mark.parametrize("total", [2**31, 2**53 + 1, 2**70, 10**200, 10**400])
def test_aux_loss_total_of_any_size(total):
    got = loss_and_grad(P4, COUNTS4, coeff=1e30, total_num_tokens=total)
    assert_same_bits(got, expected(P4, COUNTS4, coeff=1e30, total_num_tokens=total))


def test_aux_loss_a06_folded_layout_is_sequences():
    sequences = [(P4[:2], np.array([2, 2, 0, 0])), (P4[2:], np.array([1, 0, 2, 1]))]
    values = [float(loss(p, c)) for p, c in sequences]
    np.testing.assert_allclose(values, [0.015, 0.0105], rtol=1e-6)
    folded = np.concatenate([p for p, _ in sequences], axis=1)
    counts = np.concatenate([c for _, c in sequences])
    np.testing.assert_allclose(loss(folded, counts, num_experts=4) / 2, 0.01275, rtol=1e-6)
    np.testing.assert_allclose(np.mean(values), 0.01275, rtol=1e-6)


def test_aux_loss_a08_c18_masked_row():
    mask = np.array([1, 1, 1, 0], bool)
    counts = np.array([2, 2, 1, 1])
    value, grad = loss_and_grad(P4, counts, valid_mask=mask)
    np.testing.assert_allclose(value, 0.0111111, rtol=1e-5)
    assert_same_bits(np.asarray(grad)[3], np.zeros(4, np.float32))  # +0, not -0
    assert (np.asarray(grad)[:3] > 0).all()
    # Selected away, never multiplied.
    for bad in (np.nan, np.inf, -1e38):
        dirty = P4.copy()
        dirty[3] = bad
        assert_same_bits(loss_and_grad(dirty, counts, valid_mask=mask), (value, grad))


@pytest.mark.parametrize("negative", [0.01, -0.01])
def test_aux_loss_masked_gradient_is_positive_zero(negative):
    mask = np.array([1, 0, 1, 0], bool)
    grad = jax.grad(loss)(P4, COUNTS4, coeff=negative, valid_mask=mask)
    assert_same_bits(np.asarray(grad)[~mask], np.zeros((2, 4), np.float32))


@pytest.mark.parametrize("total", [0, jnp.int32(0), None])
def test_aux_loss_a10_no_valid_token(total):
    none = np.zeros(4, bool)
    poison = np.full((4, 4), np.nan, np.float32)
    for probs in (P4, poison):
        got = loss_and_grad(probs, np.zeros(4, int), valid_mask=none, total_num_tokens=total)
        assert_same_bits(got, (jnp.float32(0), jnp.zeros((4, 4))))


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_aux_loss_a11_no_rows(dtype):
    probs = np.zeros((0, 8), cases.FLOAT_DTYPES[dtype])
    for options in ({}, {"total_num_tokens": 5}, {"valid_mask": np.zeros(0, bool)}):
        got = loss_and_grad(probs, np.zeros(8, np.int32), **options)
        assert_same_bits(got, (np.float32(0), probs))
    batch = jax.vmap(loss_and_grad, in_axes=(0, None))(probs[None].repeat(3, 0), np.zeros(8, int))
    assert_same_bits(batch, (np.zeros(3, np.float32), probs[None].repeat(3, 0)))


def test_aux_loss_a12_one_row():
    value = loss(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32), np.array([0, 0, 1, 1]), 2, 1.0)
    np.testing.assert_allclose(value, 1.4, rtol=1e-6)


@pytest.mark.parametrize("coeff", [0.0, -0.0, 0, np.float16(0)])
def test_aux_loss_a13_coeff_zero(coeff):
    for probs in (P4, np.full((4, 4), np.nan, np.float32), -P4):
        got = loss_and_grad(probs, COUNTS4, coeff=coeff)
        assert_same_bits(got, (jnp.float32(0), jnp.zeros((4, 4))))
    nan_counts = np.full(4, np.nan, np.float32)
    got = loss_and_grad(P4, nan_counts, coeff=coeff)
    assert_same_bits(got, (jnp.float32(0), jnp.zeros((4, 4))))


def test_aux_loss_a14_counts_above_float32():
    probs = np.array([[1, -1]], np.float32)
    counts = np.array([16777217, 16777216], np.int32)
    assert_same_bits(loss(probs, counts, 1, 0.5, total_num_tokens=1), jnp.float32(1))
    with jax.enable_x64(True):
        counts = np.array([2**53, 2**53 - 1])
        assert_same_bits(loss(probs, counts, 1, 0.5, total_num_tokens=1), jnp.float32(1))


def test_aux_loss_a17_float_counts():
    value = loss(P4, np.array([2.5, 1.5, 2, 2], np.float32))
    np.testing.assert_allclose(value, 0.010375, rtol=1e-6)
    assert_same_bits(loss(P4, [2.5, 1.5, 2.0, 2.0]), value)  # Python floats, as JAX takes them


def test_aux_loss_a19_bfloat16_probs():
    probs = P4.astype(jnp.bfloat16)
    value, grad = loss_and_grad(probs, COUNTS4)
    assert value.dtype == jnp.float32
    assert grad.dtype == jnp.bfloat16
    # One float32 rounding of a sum that float32 holds exactly here.
    np.testing.assert_allclose(value, reference.aux_loss_float64(probs, COUNTS4, 2, 0.01), 2e-7)
    assert value != value.astype(jnp.bfloat16).astype(jnp.float32)


def test_aux_loss_a27_static_numbers_of_any_width():
    want = loss_and_grad(P4, COUNTS4, topk=2, coeff=0.5)
    for kind in (np.float16, np.float32, np.float64, np.array):
        assert_same_bits(loss_and_grad(P4, COUNTS4, coeff=kind(0.5)), want)
    for kind in (np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.array):
        got = loss_and_grad(P4, COUNTS4, topk=kind(2), coeff=0.5, num_experts=kind(4))
        assert_same_bits(got, want)
    # float32(0.01) is another number than 0.01, and is kept as given.
    narrow = np.float32(0.01)
    assert_same_bits(loss(P4, COUNTS4, coeff=narrow), loss(P4, COUNTS4, coeff=float(narrow)))


def test_aux_loss_a28_no_clamping():
    value = loss(np.array([[-1, 2], [3, -4]], np.float32), np.array([1, 1]), 1, 1.0)
    assert_same_bits(value, jnp.float32(0))


def test_aux_loss_nan_reaches_the_loss_unless_masked():
    probs = P4.copy()
    probs[1, 3] = np.nan
    counts = np.array([3, 2, 2, 0])
    assert bits(loss(probs, counts)) == 0x7FC00000  # count 0 hides no NaN
    mask = np.array([1, 0, 1, 1], bool)
    assert np.isfinite(loss(probs, counts, valid_mask=mask))
    assert_same_bits(jax.grad(loss)(probs, counts), jax.grad(loss)(P4, counts))


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_aux_loss_nan_gradient_is_canonical(dtype):
    canonical = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[dtype]
    counts = np.array([np.nan, -np.nan, np.inf, 1], np.float32)
    probs = P4.astype(cases.FLOAT_DTYPES[dtype])
    _, vjp = jax.vjp(lambda p: loss(p, counts), probs)
    for d_loss, nans in ((1.0, 2), (0.0, 3), (-np.nan, 4)):
        (grad,) = vjp(jnp.float32(d_loss))
        row = np.asarray(grad)[0]
        assert np.isnan(row.astype(np.float32)).sum() == nans
        assert [bits(x) for x in row[:nans]] == [canonical] * nans
        want = reference.aux_loss_grad(probs, counts, 2, 0.01, d_loss=d_loss)
        assert_same_bits(grad, want)


# ---- The order of the sums. The reference and the handlers share no code. The workspace is
# compared too: the last rounding hides what the 256 roundings before it show.

TOKENS = (0, 1, 2, 255, 256, 257, 1000, 7168, 16384, 65537)
EXPERTS = (1, 2, 8, 33, 64, 128, 256, 512, 2304)


@functools.cache
def raw_fwd(num_experts):
    """Loss and workspace from the target itself."""
    results = (jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.float32))
    call = jax.ffi.ffi_call("jax_moe_det.aux_loss_fwd", results)
    attributes = {
        "num_experts": np.int64(num_experts),
        "topk": np.int64(1),
        "coeff": np.float64(0.7),
        "total_num_tokens": np.float64(3),
    }
    return jax.jit(lambda *operands: call(*operands, **attributes))


def check_order(probs, counts, mask=None):
    """Loss and partials against the reference."""
    num_experts = len(counts)
    optional = [] if mask is None else [mask]
    value, workspace = raw_fwd(num_experts)(probs, counts, *optional)
    assert_same_bits(workspace, reference.aux_loss_partials(probs, counts, valid_mask=mask))
    want = reference.aux_loss(probs, counts, 1, 0.7, total_num_tokens=3, valid_mask=mask)
    assert_same_bits(value, want)


@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_aux_loss_order(num_tokens, num_experts):
    seed = 1000 * num_tokens + num_experts
    rng = np.random.default_rng(seed)
    probs = rng.random((num_tokens, num_experts), np.float32)
    counts = cases.random_counts(seed, num_experts, high=2**31 - 1)
    run = jax.jit(functools.partial(loss, topk=1))
    assert_same_bits(run(probs, counts), reference.aux_loss(probs, counts, 1, 0.01))
    if num_tokens:
        probs[num_tokens // 2 :] *= -1  # the sum cancels, and shows every rounding
        check_order(probs, counts)
    if probs.size > 2**23:
        return  # the variants below change nothing in how large shapes are walked
    mask = cases.random_mask(seed, num_tokens)
    floats = cases.random_counts(seed, num_experts, "float32")
    for dtype, options in (("bfloat16", {"valid_mask": mask}), ("float16", {})):
        narrow = (probs - 0.25).astype(cases.FLOAT_DTYPES[dtype])
        total = jnp.int32(num_tokens + 3)
        got = jitted(narrow, floats, 1, total_num_tokens=total, **options)
        want = expected(narrow, floats, 1, total_num_tokens=num_tokens + 3, **options)
        assert_same_bits(got, want)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    num_tokens=st.integers(1, 900),
    num_experts=st.integers(1, 400),
    dtype=st.sampled_from(sorted(cases.FLOAT_DTYPES)),
    counts_dtype=st.sampled_from(["int32", "float32"]),
    masked=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_aux_loss_order_any_shape(num_tokens, num_experts, dtype, counts_dtype, masked, seed):
    probs = cases.special_scores("cancelling", seed, num_tokens, num_experts, dtype)
    counts = cases.random_counts(seed, num_experts, counts_dtype)
    mask = cases.random_mask(seed, num_tokens) if masked else None
    check_order(probs, counts, mask)


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
@pytest.mark.parametrize("num_experts", [1, 8, 16, 17, 32, 33, 64, 128, 129, 256, 520])
def test_aux_loss_order_cancelling(num_experts, dtype):
    """Both sides of every change of the number of lanes, with chunks full, partial and masked."""
    for num_tokens in (3000, 40000, 256 * 70 + 5):
        seed = num_tokens + num_experts
        probs = cases.special_scores("cancelling", seed, num_tokens, num_experts, dtype)
        counts = cases.random_counts(seed, num_experts)
        for mask in (None, cases.random_mask(seed, num_tokens)):
            check_order(probs, counts, mask)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(256, 1), (200, 1), (1, 256), (1, 200), (1, 520), (3, 2304)])
def test_aux_loss_order_of_the_float64_trees(shape, seed):
    """Values of 2^0 to 2^100 and their negatives: float64 loses a small one beside a large one."""
    rng = np.random.default_rng(seed)
    size = shape[0] * shape[1]
    half = np.ldexp(rng.uniform(1, 2, size // 2), rng.integers(0, 100, size // 2))
    probs = rng.permutation(np.concatenate([half, -half])).astype(np.float32).reshape(shape)
    check_order(probs, np.ones(shape[1], np.int32))


@pytest.mark.parametrize("rows_per_slot", [1, 3, 64, 1000])
def test_aux_loss_order_partials_of_a_shard(rows_per_slot):
    """A shard's partials are those of the whole; slots are counted from its first row."""
    num_slots = 7
    num_tokens = num_slots * rows_per_slot
    whole = cases.special_scores("cancelling", 1, 256 * rows_per_slot, 33, "float32")
    counts, mask = cases.random_counts(1, 33), cases.random_mask(1, 256 * rows_per_slot)
    call = jax.ffi.ffi_call(
        "jax_moe_det.aux_loss_partials", jax.ShapeDtypeStruct((num_slots,), jnp.float32)
    )
    first = 40
    rows = slice(first * rows_per_slot, first * rows_per_slot + num_tokens)
    got = call(whole[rows], counts, mask[rows], rows_per_slot=np.int64(rows_per_slot))
    want = reference.aux_loss_partials(whole, counts, valid_mask=mask)
    assert_same_bits(got, want[first : first + num_slots])


def test_aux_loss_reference_rounds_once():
    above_a_tie = np.array([1 + 2.0**-8 + 2.0**-30, 2.0**-133 * (0.5 + 2.0**-30), -(2.0**-140)])
    want = np.array([1 + 2.0**-7, 2.0**-133, -0.0]).astype(jnp.bfloat16)
    assert_same_bits(reference.round_once(above_a_tie, jnp.bfloat16), want)
    assert_same_bits(reference.round_once(3e38, np.float16), np.float16(np.inf))
    for dtype in (np.float32, np.float16):  # NumPy rounds these once itself
        x = np.ldexp(np.random.default_rng(0).uniform(-1, 1, 5000), np.arange(5000) % 200 - 150)
        with np.errstate(over="ignore"):
            want = x.astype(dtype)
        assert_same_bits(reference.round_once(x, dtype), want)


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
@pytest.mark.parametrize("kind", cases.SPECIAL_INPUTS)
def test_aux_loss_order_special(kind, dtype):
    # A scale of 1 would hide what a scale rounds, so coeff is odd; large, for subnormal sums.
    coeff = 3e36 if kind == "subnormal" else 0.7
    for num_tokens, num_experts in ((1, 8), (257, 2), (300, 64), (7168, 33), (5000, 256), (9, 520)):
        seed = num_tokens * num_experts
        probs = cases.special_scores(kind, seed, num_tokens, num_experts, dtype)
        counts = cases.random_counts(seed, num_experts)
        mask = cases.random_mask(seed, num_tokens)
        for options in ({}, {"valid_mask": mask}):
            got = jitted(probs, counts, 1, coeff, **options)
            assert_same_bits(got, expected(probs, counts, 1, coeff, **options))


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_aux_loss_subnormals_are_kept(dtype):
    """Subnormal scores, sums and losses: a backend that flushes gives 0."""
    probs = cases.special_scores("subnormal", 5, 4, 8, dtype)
    counts = np.arange(1, 9, dtype=np.int32)
    for coeff in (1.0, 2.0**-10):
        got = np.asarray(loss(np.abs(probs), counts, 1, coeff))
        assert got != 0  # in NumPy: XLA's own comparison flushes
        assert_same_bits(got, reference.aux_loss(np.abs(probs), counts, 1, coeff))
    # Gradients below the smallest normal value, with a mask that selects among them.
    smallest = {"float32": -126, "bfloat16": -126, "float16": -14}[dtype]
    mask = np.array([1, 1, 0, 1], bool)
    for options in ({}, {"valid_mask": mask}):
        run = jax.jit(jax.grad(functools.partial(loss, topk=1, coeff=2.0 ** (smallest - 3))))
        got = run(probs, counts, **options)
        want = reference.aux_loss_grad(probs, counts, 1, 2.0 ** (smallest - 3), **options)
        assert (want != 0).any()
        assert_same_bits(got, want)


def test_aux_loss_gradient_rounds_once():
    """1 + 2^-8 + 2^-30 is above a bfloat16 tie, on it after a rounding to float32."""
    coeff = 1 + 2.0**-8 + 2.0**-30
    probs = np.ones((1, 1), jnp.bfloat16)
    _, grad = jitted(probs, np.array([1]), 1, coeff)
    assert_same_bits(grad, np.full((1, 1), 1 + 2.0**-7, jnp.bfloat16))
    coeff = 1 + 2.0**-11 + 2.0**-40
    _, grad = jitted(np.ones((1, 1), np.float16), np.array([1]), 1, coeff)
    assert_same_bits(grad, np.full((1, 1), 1 + 2.0**-10, np.float16))


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_aux_loss_gradient_over_the_whole_range(dtype):
    """Counts over all exponents: normal, subnormal, zero, overflowing and tied results."""
    rng = np.random.default_rng(3)
    counts = np.ldexp(rng.uniform(-1, 1, 4096), rng.integers(-160, 128, 4096)).astype(np.float32)
    counts[:256] = np.round(counts[:256] * 0 + np.arange(256)) + 0.5  # many ties in 8 and 11 bits
    probs = np.zeros((1, 4096), cases.FLOAT_DTYPES[dtype])
    for coeff in (1.0, 0.37, 2.0**-20):
        _, vjp = jax.vjp(lambda p, coeff=coeff: loss(p, counts, 4096, coeff), probs)
        for d_loss in (1.0, -3.7e-3, 1e30):
            want = reference.aux_loss_grad(probs, counts, 4096, coeff, d_loss=d_loss)
            assert_same_bits(vjp(jnp.float32(d_loss))[0], want)


@pytest.mark.parametrize("counts_dtype", ["int32", "int64", "float32"])
def test_aux_loss_order_counts_dtype_x64(counts_dtype):
    with jax.enable_x64(True):
        for num_tokens, num_experts in ((300, 8), (1000, 300), (70, 2304)):
            probs = cases.random_scores(1, num_tokens, num_experts) - np.float32(1e-3)
            high = 2**62 if counts_dtype == "int64" else 2**31 - 1
            counts = cases.random_counts(2, num_experts, counts_dtype, high)
            assert_same_bits(jitted(probs, counts), expected(probs, counts))


def test_aux_loss_cancelling_int64_counts_are_fused():
    """Column 256 meets column 0 in dot lane 0: only a fused multiply-add keeps the low bits."""
    with jax.enable_x64(True):
        probs = np.zeros((1, 257), np.float32)
        probs[0, 0] = -(1 + 2.0**-23)
        probs[0, 256] = 1 + 2.0**-23
        counts = np.zeros(257, np.int64)
        counts[0], counts[256] = 2**53 - 2, 2**53 - 1
        got = loss(probs, counts, 1, 1 / 257)
        assert_same_bits(got, reference.aux_loss(probs, counts, 1, 1 / 257))
        # -(2^53 - 2)(1 + 2^-23) rounds to an even multiple of 2; the fused product does not.
        rounded_twice = float(np.float64(2**53 - 1) * np.float64(1 + 2.0**-23)) - float(
            np.float64(2**53 - 2) * np.float64(1 + 2.0**-23)
        )
        assert float(got) != pytest.approx(rounded_twice, rel=1e-6)


@pytest.mark.parametrize("folds", [2, 3, 64])
def test_aux_loss_order_folded(folds):
    probs = cases.random_scores(4, 700, 8 * folds)
    counts = cases.random_counts(5, 8 * folds)
    mask = cases.random_mask(6, 700)
    for options in ({}, {"valid_mask": mask}):
        got = jitted(probs, counts, num_experts=8, **options)
        assert_same_bits(got, expected(probs, counts, num_experts=8, **options))


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_aux_loss_order_model_shapes(shape):
    probs, counts = cases.routed(shape.num_tokens, shape.num_experts, shape.topk)
    got = jax.jit(functools.partial(loss, topk=shape.topk))(probs, counts)
    assert_same_bits(got, reference.aux_loss(probs, counts, shape.topk, 0.01))


# Bits that never change: an edit here is a breaking change, and belongs in CHANGELOG.md under
# "bits changed". The inputs come from IEEE operations alone, so no libm enters.
GOLDEN = {
    (1, 1): 0xBA859CFA,
    (37, 33): 0xBD86FF5F,
    (1000, 8): 0x3689A5E9,
    (7168, 64): 0x37D3DF31,
    (4096, 256): 0x3A39775C,
    (300, 2304): 0x40A23C06,
}


@pytest.mark.parametrize(("num_tokens", "num_experts"), GOLDEN)
def test_aux_loss_golden_bits(num_tokens, num_experts):
    logits = cases.lattice_logits(num_tokens, num_experts)
    # Every addition rounds, and the halves nearly cancel.
    probs = np.float32(1) / (np.float32(3) + np.abs(logits) * np.float32(1.7))
    probs[num_tokens // 2 :] *= np.float32(-0.999)
    counts = (np.arange(num_experts) * 37 % 101 + 1).astype(np.int32)
    got = jax.jit(functools.partial(loss, topk=1))(probs, counts)
    assert bits(got) == GOLDEN[num_tokens, num_experts], hex(bits(got))


def test_aux_loss_workspace_query():
    for shape in ((0, 1), (1, 1), (4096, 256), (2**22, 2304), (2**40, 2**20)):
        for dtype in (jnp.float32, jnp.bfloat16, np.float16, "float32"):
            workspace = aux_loss_workspace(shape, dtype)
            assert isinstance(workspace, jax.ShapeDtypeStruct)
            assert workspace.shape == (256,)
            assert workspace.dtype == jnp.float32
    assert aux_loss_workspace((4, 4)) == aux_loss_workspace((8, 2), jnp.bfloat16)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, bool, np.complex64, "float64"])
def test_aux_loss_workspace_dtype_is_checked_as_given(dtype):
    for x64 in (False, True):
        with jax.enable_x64(x64):
            with pytest.raises(TypeError, match="float32, bfloat16, float16") as error:
                aux_loss_workspace((4, 4), dtype)
            assert np.dtype(dtype).name in str(error.value)


def test_aux_loss_workspace_shape_is_checked():
    with pytest.raises(ValueError, match=r"probs_shape.*\(4,\)"):
        aux_loss_workspace((4,))
    with pytest.raises(ValueError, match=r"probs_shape.*\(2, 4, 4\)"):
        aux_loss_workspace((2, 4, 4))
    with pytest.raises(ValueError, match=r"probs_shape.*-1"):
        aux_loss_workspace((-1, 4))


# ---- Error. One chunk of four float32 additions, a lane and a fold of at most 7 levels, a partial
# and the loss: 13 roundings of 2^-24 in the worst case (7.7e-7), whatever T. Roundings of positive
# sums are nearly independent, so tested inputs stay within 2e-7. A float32 sum over 2^22 rows would
# be off by 1e-2.


@pytest.mark.parametrize("num_tokens", [50001, 2**20, 2**22])
@pytest.mark.parametrize("constant", [0.1, 1 / 3, 0.7, 1e-3, 0.999])
def test_aux_loss_error_constant_scores(num_tokens, constant):
    probs = np.full((num_tokens, 2), constant, np.float32)
    counts = np.array([num_tokens // 3, num_tokens - num_tokens // 3], np.int32)
    want = reference.aux_loss_float64(probs, counts, 1, 0.01)
    assert abs(float(loss(probs, counts, 1)) / want - 1) <= 2e-7


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(50001, 64), (2**20, 8), (2**22, 2)])
@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_aux_loss_error_random_scores(num_tokens, num_experts, dtype):
    probs = cases.random_scores(7, num_tokens, num_experts, dtype)
    counts = cases.random_counts(8, num_experts, high=num_tokens)
    mask = cases.random_mask(9, num_tokens)
    for options in ({}, {"valid_mask": mask}):
        want = reference.aux_loss_float64(probs, counts, 1, 0.01, **options)
        assert abs(float(loss(probs, counts, 1, **options)) / want - 1) <= 2e-7


# ---- Transformations


@pytest.fixture(scope="module")
def batch():
    """Five items of everything: probs, counts, mask and N."""
    probs, counts = zip(*(cases.routed(16 + i, 8, 2) for i in range(5)), strict=True)
    probs = np.stack([p[-16:] for p in probs])
    mask = np.stack([cases.random_mask(i, 16) for i in range(5)])
    return probs, np.stack(counts), mask, np.arange(10, 15, dtype=np.int32)


def masked_loss(probs, counts, mask, total):
    return loss(probs, counts, valid_mask=mask, total_num_tokens=total)


def test_aux_loss_same_bits_eager_jit_and_disable_jit():
    probs, counts = cases.routed(300, 16, 4)
    mask = cases.random_mask(1, 300)
    want = expected(probs, counts, valid_mask=mask)
    assert_same_bits(jitted(probs, counts, valid_mask=mask), want)
    assert_same_bits(loss_and_grad(probs, counts, valid_mask=mask), want)
    assert_same_bits(
        loss_and_grad(jnp.asarray(probs), list(map(int, counts)), valid_mask=mask), want
    )
    with jax.disable_jit():
        assert_same_bits(loss_and_grad(probs, counts, valid_mask=mask), want)
        assert_same_bits(jitted(probs, counts, valid_mask=mask), want)


def test_aux_loss_d01_vmap_equals_loop(batch):
    probs, counts, _, _ = batch
    want = np.stack([loss(p, c) for p, c in zip(probs, counts, strict=True)])
    assert want.shape == (5,)
    assert_same_bits(jax.vmap(loss)(probs, counts), want)
    assert_same_bits(jax.jit(jax.vmap(loss))(probs, counts), want)
    assert_same_bits(want, np.stack([expected(*x)[0] for x in zip(probs, counts, strict=True)]))


@pytest.mark.parametrize("mapped", [m for m in itertools.product([0, 1], repeat=4) if any(m)])
def test_aux_loss_d02_vmap_any_mix_of_operands(batch, mapped):
    """Loss and gradient with each of probs, counts, mask and N batched or shared."""
    in_axes = tuple(0 if m else None for m in mapped)
    operands = [x if m else x[2] for x, m in zip(batch, mapped, strict=True)]
    fun = jax.value_and_grad(masked_loss)
    want = [
        fun(*(x[i] if m else x for x, m in zip(operands, mapped, strict=True))) for i in range(5)
    ]
    want = jax.tree.map(lambda *xs: np.stack(xs), *want)
    assert_same_bits(jax.jit(jax.vmap(fun, in_axes))(*operands), want)
    # Reverse mode through the batch: what is shared gets the sum, added as a loop adds it.
    weights = np.arange(1, 6, dtype=np.float32)

    def batched(p):
        return jnp.dot(weights, jax.vmap(masked_loss, in_axes)(p, *operands[1:]))

    grad = jax.grad(batched)(operands[0])
    rows = np.stack([w * g for w, g in zip(weights, want[1], strict=True)])
    np.testing.assert_allclose(grad, rows if mapped[0] else rows.sum(0), rtol=1e-6)


def test_aux_loss_d02_vmap_moved_axes(batch):
    probs, counts, mask, total = batch
    want = np.stack([masked_loss(*x) for x in zip(*batch, strict=True)])
    grads = np.stack([jax.grad(masked_loss)(*x) for x in zip(*batch, strict=True)])
    for axis in (0, 1, 2):
        moved = np.moveaxis(probs, 0, axis), counts.T, mask.T, total
        axes = (axis, 1, 1, 0)
        assert_same_bits(jax.vmap(masked_loss, axes)(*moved), want)
        mapped = jax.vmap(jax.grad(masked_loss), axes, out_axes=axis)
        assert_same_bits(mapped(*moved), np.moveaxis(grads, 0, axis))
    assert_same_bits(
        jax.vmap(loss, (None, 1))(probs[0], counts.T), jax.vmap(loss, (None, 0))(probs[0], counts)
    )
    assert_same_bits(
        jax.vmap(jax.grad(loss), (2, 1), out_axes=1)(np.moveaxis(probs, 0, 2), counts.T),
        np.moveaxis(jax.vmap(jax.grad(loss))(probs, counts), 0, 1),
    )


def test_aux_loss_d04_nested_vmap():
    probs = jax.nn.softmax(cases.lattice_logits(2 * 3 * 8, 16)).reshape(2, 3, 8, 16)
    counts = cases.random_counts(1, 2 * 3 * 16).reshape(2, 3, 16)
    want = [
        [loss_and_grad(p, c) for p, c in zip(*x, strict=True)]
        for x in zip(probs, counts, strict=True)
    ]
    values = np.array([[v for v, _ in row] for row in want])
    grads = np.array([[g for _, g in row] for row in want])
    nested = jax.vmap(jax.vmap(loss_and_grad))
    assert_same_bits(nested(probs, counts), (values, grads))
    assert_same_bits(jax.jit(nested)(probs, counts), (values, grads))
    # grad of vmap: one loss of each item enters, with cotangent 1.
    assert_same_bits(jax.grad(lambda p: jax.vmap(jax.vmap(loss))(p, counts).sum())(probs), grads)
    # An outer axis over probs, an inner one over counts.
    crossed = jax.vmap(jax.vmap(loss, (None, 0)), (0, None))(probs[0], counts[0])
    want = [[loss(p, c) for c in counts[0]] for p in probs[0]]
    assert_same_bits(crossed, np.array(want))
    crossed = jax.vmap(jax.vmap(loss_and_grad, (0, None)), (None, 0))(probs[0], counts[0])
    want = [[loss_and_grad(p, c) for p in probs[0]] for c in counts[0]]
    assert_same_bits(
        crossed,
        jax.tree.map(lambda *x: np.stack(x).reshape(3, 3, *x[0].shape), *itertools.chain(*want)),
    )


@pytest.mark.parametrize("size", [1, 2, 300])
def test_aux_loss_batch_size_does_not_matter(size):
    probs, counts = cases.routed(70, 33, 5)
    want = loss_and_grad(probs, counts)
    got = jax.jit(jax.vmap(loss_and_grad))(
        np.broadcast_to(probs, (size, *probs.shape)), np.broadcast_to(counts, (size, 33))
    )
    for i in {0, size // 2, size - 1}:
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), want)


def test_aux_loss_vmap_of_nothing():
    got = jax.vmap(loss_and_grad)(np.zeros((0, 4, 4), np.float32), np.zeros((0, 4), np.int32))
    assert_same_bits(got, (np.zeros(0, np.float32), np.zeros((0, 4, 4), np.float32)))


def test_aux_loss_c12_remat_is_bitwise_the_same():
    logits = np.zeros((8, 64), np.float32)

    def f(x):
        probs = jax.nn.softmax(x)
        counts = jnp.sum(probs >= 1 / 64, axis=0, dtype=jnp.int32)
        return loss(probs, counts)

    assert_same_bits(jax.jit(jax.grad(jax.checkpoint(f)))(logits), jax.jit(jax.grad(f))(logits))
    probs, counts = cases.routed(64, 8, 2)
    remat = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))
    assert_same_bits(remat(probs, counts), expected(probs, counts))


def test_aux_loss_c13_remat_policies(capsys):
    probs, _ = cases.routed(64, 8, 2)

    def f(p):
        counts = jnp.sum(p > 0.125, axis=0, dtype=jnp.int32)
        return loss(jnp.sin(p), counts) ** 2

    want = jax.jit(jax.grad(f))(probs)
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names(RESIDUAL_NAME)
    for policy in (
        policies.nothing_saveable,
        policies.everything_saveable,
        policies.dots_saveable,
        named,
    ):
        assert_same_bits(jax.jit(jax.grad(jax.checkpoint(f, policy=policy)))(probs), want)
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(f, policy=named), probs)
    assert f"i32[8] named '{RESIDUAL_NAME}'" in capsys.readouterr().out


def test_aux_loss_c14_scan_equals_unrolled():
    probs, counts = cases.routed(64, 16, 4)
    mix = cases.random_scores(3, 64, 16)
    layers = np.linspace(0.5, 1.5, 4, dtype=np.float32)
    mask = cases.random_mask(1, 64)  # captured, like probs, counts and mix

    def layer(x, scale):
        x = x * scale
        two = loss(x, counts) + loss(x * 2, counts, valid_mask=mask)
        return jnp.roll(x, 1, axis=1) * mix, two  # one rounding, however XLA fuses it

    def scanned(x):
        return lax.scan(layer, x, layers)[1]

    captured = [a.copy() for a in (probs, counts, mix, mask)]
    want_losses, x = [], jnp.asarray(probs)
    step = jax.jit(layer)
    for scale in layers:
        x, one = step(x, scale)
        want_losses.append(one)
    run = jax.jit(scanned)
    check_reproducible(run, probs, repeats=50)
    assert_same_bits(run(probs), np.stack(want_losses))
    grad = jax.jit(jax.grad(lambda x: scanned(x).sum()))
    check_reproducible(grad, probs, repeats=50)
    for before, after in zip(captured, (probs, counts, mix, mask), strict=True):
        assert_same_bits(after, before)


def test_aux_loss_in_cond_while_and_map():
    probs, counts = cases.routed(64, 16, 4)
    want = loss(probs, counts)
    cond = jax.jit(lambda flag, p: lax.cond(flag, lambda p: loss(p, counts), lambda p: p[0, 0], p))
    assert_same_bits(cond(True, probs), want)
    assert_same_bits(cond(False, probs), probs[0, 0])

    def body(state):
        i, _ = state
        return i + 1, loss(probs, counts)

    looped = jax.jit(lambda: lax.while_loop(lambda s: s[0] < 3, body, (0, jnp.float32(0))))
    assert_same_bits(looped()[1], want)
    many = np.stack([probs, probs * 2])
    assert_same_bits(
        lax.map(lambda p: loss(p, counts), many), np.stack([loss(p, counts) for p in many])
    )


def test_aux_loss_d13_donation():
    probs, counts = cases.routed(64, 16, 4)
    want = expected(probs, counts)
    kept = jnp.asarray(probs)
    assert_same_bits(jax.jit(loss_and_grad)(kept, counts), want)
    assert_same_bits(kept, probs)
    donated = jnp.array(probs, copy=True)
    assert_same_bits(jax.jit(loss_and_grad, donate_argnums=0)(donated, counts), want)
    assert donated.is_deleted()


def test_aux_loss_d14_x64():
    probs, counts = cases.routed(64, 16, 4)
    want = expected(probs, counts)
    with jax.enable_x64(True):
        got = loss_and_grad(probs, counts, topk=2, coeff=0.01, total_num_tokens=64)
        assert_same_bits(got, want)
        for dtype in (np.int32, np.int64, np.float32):
            assert_same_bits(loss_and_grad(probs, counts.astype(dtype)), want)
        assert_same_bits(loss_and_grad(probs, [int(c) for c in counts]), want)
        # A Python list of floats is float64 to NumPy, and float32 to this op, as without x64.
        assert_same_bits(
            loss(P4, [2.5, 1.5, 2.0, 2.0]),
            reference.aux_loss(P4, np.array([2.5, 1.5, 2, 2], np.float32), 2, 0.01),
        )
        mask = cases.random_mask(3, 64)
        assert_same_bits(
            jitted(probs, counts, valid_mask=mask), expected(probs, counts, valid_mask=mask)
        )


def test_aux_loss_debug_nans():
    probs, counts = cases.routed(64, 16, 4)
    want = expected(probs, counts)
    with jax.debug_nans(True):
        assert_same_bits(loss_and_grad(probs, counts), want)
        assert_same_bits(jitted(probs, counts), want)
        poison = probs.copy()
        poison[3, 4] = np.nan
        mask = np.arange(64) != 3
        got = jitted(poison, counts, valid_mask=mask)
        assert_same_bits(got, expected(probs, counts, valid_mask=mask))
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(jitted(probs * np.nan, counts))


def test_aux_loss_rank_promotion_raise(batch):
    probs, counts, mask, _ = batch
    with jax.numpy_rank_promotion("raise"):
        fun = jax.value_and_grad(masked_loss)
        one = fun(probs[0], counts[0], mask[0], jnp.int32(10))
        assert_same_bits(
            one, expected(probs[0], counts[0], valid_mask=mask[0], total_num_tokens=10)
        )
        many = jax.vmap(fun, (0, None, 0, None))(probs, counts[0], mask, jnp.int32(10))
        assert_same_bits(jax.tree.map(lambda x: x[0], many), one)
        jax.vmap(jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, counts).sum()))(probs)
        jax.jacrev(loss)(probs[0], counts[0])
        jax.hessian(loss)(probs[0], counts[0])


def test_aux_loss_strict_promotion(batch):
    probs, counts, mask, total = batch
    with jax.numpy_dtype_promotion("strict"):
        jax.vmap(jax.value_and_grad(masked_loss))(probs, counts, mask, total)
        jax.jacfwd(loss)(probs[0].astype(jnp.bfloat16), counts[0])


def test_aux_loss_outputs_are_never_weakly_typed():
    weak = jnp.broadcast_to(jnp.asarray(0.25), (4, 4))
    assert weak.weak_type
    value, grad = loss_and_grad(weak, COUNTS4)
    assert not value.weak_type
    assert not grad.weak_type or weak.weak_type  # a gradient has its primal's type
    value = jax.jit(lambda p: loss(p * 1.0, COUNTS4))(weak)
    assert not value.weak_type
    weak_total = jnp.asarray(4)
    assert not loss(P4, COUNTS4, total_num_tokens=weak_total).weak_type
    assert_same_bits(loss(P4, COUNTS4, total_num_tokens=weak_total), loss(P4, COUNTS4))
    _, tangent = jax.jvp(lambda p: loss(p, COUNTS4), (jnp.asarray(P4),), (jnp.asarray(P4),))
    assert not tangent.weak_type
    assert not jax.vmap(loss, (0, None))(P4[None], COUNTS4).weak_type
    assert not loss(weak, jnp.broadcast_to(jnp.asarray(2), (4,))).weak_type


# ---- Gradients


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_aux_loss_c16_gradient_dtype_and_bits(dtype):
    probs, counts = cases.routed(300, 33, 5)
    probs = probs.astype(cases.FLOAT_DTYPES[dtype])
    got = jitted(probs, counts)
    assert got[0].dtype == jnp.float32
    assert got[1].dtype == probs.dtype
    assert_same_bits(got, expected(probs, counts))
    _, vjp = jax.vjp(lambda p: loss(p, counts), probs)
    for d_loss in (0.0, -1.0, 3.7, 1e-30):
        want = reference.aux_loss_grad(probs, counts, 2, 0.01, d_loss=d_loss)
        assert_same_bits(vjp(jnp.float32(d_loss))[0], want)


def test_aux_loss_gradient_is_a_float64_difference():
    """Not the reference's formula: central differences of the float64 loss."""
    counts = np.array([5, 0, 7, 1])
    grad = np.asarray(jax.grad(loss)(P4, counts, 2, 0.3, total_num_tokens=9))
    for index in np.ndindex(4, 4):
        sides = []
        for step in (0.5, -0.5):
            moved = P4.astype(np.float64)
            moved[index] += step
            sides.append(reference.aux_loss_float64(moved, counts, 2, 0.3, total_num_tokens=9))
        np.testing.assert_allclose(grad[index], sides[0] - sides[1], rtol=1e-6, atol=1e-9)


def test_aux_loss_c06_unused_outputs():
    probs, counts = cases.routed(16, 8, 2)

    def forward(p):
        return {"value": (p**2).sum(), "loss": loss(p, counts)}

    assert_same_bits(jax.grad(lambda p: forward(p)["loss"])(probs), expected(probs, counts)[1])
    assert_same_bits(jax.grad(lambda p: forward(p)["value"])(probs), 2 * probs)
    for dtype in (jnp.float32, jnp.bfloat16):
        grad = jax.grad(lambda p: 1.0 * (loss(p, counts) > 0))(probs.astype(dtype))
        assert_same_bits(grad, np.zeros((16, 8), dtype))
        stopped = jax.grad(lambda p: lax.stop_gradient(loss(p, counts)))(probs.astype(dtype))
        assert_same_bits(stopped, np.zeros((16, 8), dtype))
    value, aux = jax.grad(lambda p: (loss(p, counts), loss(p * 2, counts)), has_aux=True)(probs)
    assert_same_bits((value, aux), (expected(probs, counts)[1], loss(probs * 2, counts)))


def test_aux_loss_c07_integer_inputs():
    mask = np.array([1, 1, 0, 1], bool)
    _, vjp = jax.vjp(
        lambda p, c, n, m: loss(p, c, total_num_tokens=n, valid_mask=m),
        P4, COUNTS4, jnp.int32(3), mask,
    )  # fmt: skip
    d_probs, d_counts, d_total, d_mask = vjp(jnp.float32(1))
    assert_same_bits(d_probs, expected(P4, COUNTS4, valid_mask=mask)[1])
    for cotangent, shape in ((d_counts, (4,)), (d_total, ()), (d_mask, (4,))):
        assert cotangent.dtype == jax.dtypes.float0
        assert cotangent.shape == shape
    grads = jax.grad(loss, argnums=(0, 1), allow_int=True)(P4, COUNTS4)
    assert_same_bits(grads[0], expected(P4, COUNTS4)[1])
    assert grads[1].dtype == jax.dtypes.float0


def test_aux_loss_float_counts_have_zero_gradient():
    counts = COUNTS4.astype(np.float32)
    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(P4, counts)
    assert_same_bits(grads, (expected(P4, counts)[1], np.zeros(4, np.float32)))
    assert_same_bits(jax.grad(lambda c: loss(P4, c))(counts), np.zeros(4, np.float32))
    _, tangent = jax.jvp(lambda c: loss(P4, c), (counts,), (np.ones(4, np.float32),))
    assert_same_bits(tangent, np.float32(0))


def test_aux_loss_c09_jacobians():
    probs = np.tile(np.array([0.3, -0.2, 1.1, 0.9], np.float32), (3, 1))
    grad = expected(probs, COUNTS4)[1]
    assert_same_bits(jax.jacrev(loss)(probs, COUNTS4), grad)
    # Several outputs: vmap of the backward with the cotangent batched alone.
    scales = jnp.array([1.0, -2.5, 1e-3], jnp.float32)

    def many(p):
        return jnp.stack([loss(p, COUNTS4) * s for s in scales])

    _, vjp = jax.vjp(many, probs)
    rows = np.stack([vjp(basis)[0] for basis in np.eye(3, dtype=np.float32)])
    assert_same_bits(jax.jacrev(many)(probs), rows)
    assert_same_bits(jax.jit(jax.jacrev(many))(probs), rows)


def test_aux_loss_c09_forward_mode_is_the_loss_of_the_tangent():
    """Linear in probs: the tangent's loss, and the Jacobian's entries, are losses themselves."""
    probs, counts = cases.routed(64, 8, 2)
    direction = cases.random_scores(2, 64, 8) - np.float32(0.1)
    mask = cases.random_mask(3, 64)
    for options in ({}, {"valid_mask": mask}):
        f = functools.partial(loss, counts=counts, **options)
        got = jax.jit(lambda p, d, f=f: jax.jvp(f, (p,), (d,)))(probs, direction)
        assert_same_bits(got, (f(probs), f(direction)))
    small, small_counts = P4[:3], COUNTS4
    want = np.zeros((3, 4), np.float32)
    for index in np.ndindex(3, 4):
        basis = np.zeros((3, 4), np.float32)
        basis[index] = 1
        want[index] = loss(basis, small_counts)
    assert_same_bits(jax.jacfwd(loss)(small, small_counts), want)


def test_aux_loss_linearize_and_transpose():
    probs, counts = cases.routed(64, 8, 2)
    value, linear = jax.linearize(lambda p: loss(p, counts), probs)
    assert_same_bits(value, loss(probs, counts))
    assert_same_bits(linear(probs * 3), loss(probs * 3, counts))
    (transposed,) = jax.linear_transpose(lambda p: loss(p, counts), probs)(jnp.float32(1))
    assert_same_bits(transposed, expected(probs, counts)[1])
    mask = cases.random_mask(4, 64)
    (transposed,) = jax.linear_transpose(lambda p: loss(p, counts, valid_mask=mask), probs)(
        jnp.float32(0.3)
    )
    want = reference.aux_loss_grad(probs, counts, 2, 0.01, d_loss=0.3, valid_mask=mask)
    assert_same_bits(transposed, want)


def test_aux_loss_second_order():
    probs, counts = cases.routed(5, 8, 2)
    assert_same_bits(jax.hessian(loss)(probs, counts), np.zeros((5, 8, 5, 8), np.float32))
    # Through another function: d2 (loss^2) = 2 g g^T.
    grad = expected(probs, counts)[1].astype(np.float64)
    hessian = jax.hessian(lambda p: loss(p, counts) ** 2)(probs)
    np.testing.assert_allclose(hessian, 2 * np.multiply.outer(grad, grad), rtol=1e-5)
    for outer in (jax.jacfwd, jax.jacrev):
        for inner in (jax.jacfwd, jax.jacrev):
            got = outer(inner(lambda p: loss(p, counts) ** 2))(probs)
            np.testing.assert_allclose(got, hessian, rtol=1e-5)


def test_aux_loss_second_order_in_the_cotangent():
    """The gradient is linear in the cotangent: its derivative there is a loss again."""
    probs, counts = cases.routed(64, 8, 2)
    weights = cases.random_scores(5, 64, 8)
    mask = cases.random_mask(6, 64)
    for options in ({}, {"valid_mask": mask}):
        _, vjp = jax.vjp(lambda p, options=options: loss(p, counts, **options), probs)
        got = jax.grad(lambda g, vjp=vjp: (vjp(g)[0] * weights).sum())(jnp.float32(1))
        assert_same_bits(got, loss(weights, counts, **options))
        primal, tangent = jax.jvp(
            lambda g, vjp=vjp: vjp(g)[0], (jnp.float32(2),), (jnp.float32(3),)
        )
        want = [
            reference.aux_loss_grad(probs, counts, 2, 0.01, d_loss=d, **options) for d in (2, 3)
        ]
        assert_same_bits((primal, tangent), tuple(want))


# ---- System


def test_aux_loss_a22_one_bit_pattern():
    probs, counts = cases.routed(4096, 256, 8)
    run = jax.jit(functools.partial(loss_and_grad, topk=8))
    first = check_reproducible(run, probs, counts, repeats=20)
    assert_same_bits(first, expected(probs, counts, 8))
    check_reproducible(jax.jit(functools.partial(loss, topk=8)), probs, counts, repeats=1000)


PROCESS = """
    import functools
    import jax
    import cases
    from jax_moe_det import fused_moe_aux_loss
    from jax_moe_det.testing import fingerprint

    probs, counts = cases.routed(4096, 256, 8)
    run = jax.jit(jax.value_and_grad(functools.partial(fused_moe_aux_loss, topk=8, coeff=0.01)))
    print(fingerprint(run(probs, counts)))
"""


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--xla_gpu_deterministic_ops=true",
        "--xla_gpu_deterministic_ops=true --xla_gpu_exclude_nondeterministic_ops=true",
        "--xla_gpu_enable_command_buffer=",
        "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    ],
    ids=["default", "deterministic", "exclude", "no_command_buffer", "one_thread"],
)
def test_aux_loss_a24_d30_processes_and_flags(run_python, flags):
    probs, counts = cases.routed(4096, 256, 8)
    assert run_python(PROCESS, env={"XLA_FLAGS": flags}) == fingerprint(expected(probs, counts, 8))


def test_aux_loss_d21_changing_inputs_and_totals():
    """One compiled function: nothing is frozen into it, nothing stays in its workspace."""
    run = jax.jit(masked_loss_and_grad)
    for i in range(20):
        total = 4 + 3 * i
        probs = cases.random_scores(i, 300, 16)
        counts = cases.random_counts(i, 16)
        mask = cases.random_mask(i, 300)
        want = expected(probs, counts, valid_mask=mask, total_num_tokens=total)
        assert_same_bits(run(probs, counts, mask, jnp.int32(total)), want)


masked_loss_and_grad = jax.value_and_grad(masked_loss)


def test_aux_loss_d23_threads():
    inputs = [(cases.random_scores(i, 512, 16), cases.random_counts(i, 16)) for i in range(8)]
    want = [expected(*x) for x in inputs]
    run = jax.jit(loss_and_grad)
    barrier = threading.Barrier(8)

    def work(i):
        barrier.wait()
        for _ in range(200):
            assert_same_bits(run(*inputs[i]), want[i])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_aux_loss_d25_two_losses_in_one_program():
    a, b = cases.routed(4096, 16, 4), cases.routed(70, 33, 5)
    both = jax.jit(lambda a, b: (loss(*a), loss(*b), loss(*a), loss(*a, coeff=0.5)))
    want = (loss(*a), loss(*b), loss(*a), loss(*a, coeff=0.5))
    check_reproducible(both, a, b, repeats=20)
    assert_same_bits(both(a, b), want)


def test_aux_loss_one_jitted_call_is_one_compilation():
    probs = jnp.asarray(cases.random_scores(1, 61, 7))  # a shape that no other test uses
    counts = jnp.asarray(cases.random_counts(1, 7))
    for fun in (
        lambda p, c: loss(p, c),
        lambda p, c: loss_and_grad(p, c),
        lambda p, c: jax.vmap(loss_and_grad)(p[None], c[None]),
        lambda p, c: jax.jvp(lambda p: loss(p, c), (p,), (p,)),
    ):
        run = jax.jit(fun)
        with count_compilations() as events:
            jax.block_until_ready(run(probs, counts))
        assert len(events) == 1
        with count_compilations() as events:
            jax.block_until_ready(run(probs + 0, counts))
        assert len(events) <= 1  # the addition


def test_aux_loss_repeated_eager_call_compiles_nothing():
    probs = jnp.asarray(cases.random_scores(1, 63, 7))
    counts = jnp.asarray(cases.random_counts(1, 7))
    mask = jnp.asarray(cases.random_mask(1, 63))
    total = jnp.int32(3)

    def everything():
        loss(probs, counts)
        loss(probs, counts, total_num_tokens=total, valid_mask=mask)
        loss_and_grad(probs, counts)
        loss_and_grad(probs, counts, valid_mask=mask)
        jax.vmap(loss, (0, None))(probs[None], counts)
        jax.jvp(lambda p: loss(p, counts), (probs,), (probs,))

    with count_compilations() as events:
        everything()
    assert events
    with count_compilations() as events:
        everything()
    assert not events


def test_aux_loss_recompiles_for_no_total():
    """A traced N is data: another value is the same program."""
    run = jax.jit(lambda n: loss(P4, COUNTS4, total_num_tokens=n))
    run(jnp.int32(4))
    with count_compilations() as events:
        got = [run(np.int32(n)) for n in (5, 7, 0, 1000)]
    assert not events
    want = [reference.aux_loss(P4, COUNTS4, 2, 0.01, total_num_tokens=n) for n in (5, 7, 0, 1000)]
    assert_same_bits(got, want)


TARGETS = ("jax_moe_det.aux_loss_fwd", "jax_moe_det.aux_loss_bwd")


def test_aux_loss_d19_export_round_trip(run_python, tmp_path):
    probs, counts = cases.routed(64, 16, 4)
    platform = jax.default_backend()
    exported = jax.export.export(
        jax.jit(loss_and_grad),
        platforms=["cuda" if platform == "gpu" else platform],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(t) for t in TARGETS],
    )(probs, counts)
    path = tmp_path / "exported"
    path.write_bytes(exported.serialize(vjp_order=0))
    program = """
        import pathlib
        import sys
        import jax
        import cases
        import jax_moe_det
        from jax_moe_det.testing import fingerprint

        exported = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
        print(fingerprint(exported.call(*cases.routed(64, 16, 4))))
    """
    assert run_python(program, str(path)) == fingerprint(expected(probs, counts))


def test_aux_loss_d19_export_of_the_derivative():
    probs, counts = cases.routed(64, 16, 4)
    exported = jax.export.export(
        jax.jit(loss),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(t) for t in TARGETS],
    )(probs, counts)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert_same_bits(jax.grad(again.call)(probs, counts), expected(probs, counts)[1])


def test_aux_loss_d19_export_needs_the_disabled_check():
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility") as e:
        jax.export.export(jax.jit(loss))(P4, COUNTS4)
    assert TARGETS[0] in str(e.value)


def test_aux_loss_d20_lowers_for_cuda_without_a_gpu(run_python):
    program = """
        import sys
        import jax
        import jax.numpy as jnp
        from jax import export
        from jax_moe_det import fused_moe_aux_loss

        assert jax.default_backend() == "cpu"

        def run(p, c, m, n):
            return jax.value_and_grad(fused_moe_aux_loss)(
                p, c, 2, 0.01, valid_mask=m, total_num_tokens=n)

        args = [jax.ShapeDtypeStruct(s, d) for s, d in (
            ((64, 8), jnp.bfloat16), ((8,), jnp.int32), ((64,), bool), ((), jnp.int32))]
        lowered = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",))
        checks = [export.DisabledSafetyCheck.custom_call(t) for t in sys.argv[1:]]
        exported = export.export(
            jax.jit(run), platforms=["cuda", "cpu"], disabled_checks=checks)(*args)
        assert exported.platforms == ("cuda", "cpu")
        assert "cpu" not in lowered.as_text().lower()
        for text in (lowered.as_text(), exported.mlir_module()):
            assert all(text.count("@" + t + "(") == 1 for t in sys.argv[1:]), text
            assert text.count("stablehlo.custom_call @") == len(sys.argv[1:]), text
        print("done")
    """
    assert run_python(program, *TARGETS, env={"JAX_PLATFORMS": "cpu"}) == "done"


# ---- Raw targets: the second line of checks


def raw(target="aux_loss_fwd", workspace=((256,), jnp.float32), drop=(), **changed):
    attributes = {
        "num_experts": np.int64(4),
        "topk": np.int64(2),
        "coeff": np.float64(0.01),
        "total_num_tokens": np.float64(4),
        **changed,
    }
    for name in drop:
        del attributes[name]
    results = (jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct(*workspace))
    call = jax.ffi.ffi_call(f"jax_moe_det.{target}", results)
    return jax.block_until_ready(call(P4, COUNTS4, **attributes))


@pytest.mark.parametrize("target", ["aux_loss_fwd", "aux_loss_fwd_atomic"])
def test_aux_loss_d27_raw_call(target):
    value, workspace = raw(target)
    if target == "aux_loss_fwd":
        assert_same_bits(value, loss(P4, COUNTS4))
        # Rows 0 to 3 are slots 0 to 3; unused partials are written, as +0.
        partials = (P4.astype(np.float64) @ COUNTS4).astype(np.float32)
        np.testing.assert_allclose(workspace[:4], partials, rtol=1e-6)
        assert_same_bits(workspace[4:], np.zeros(252, np.float32))


@pytest.mark.parametrize("target", ["aux_loss_fwd", "aux_loss_fwd_atomic"])
@pytest.mark.parametrize(
    ("shape", "dtype", "given"),
    [
        ((255,), jnp.float32, "1020 bytes"),
        ((1023,), jnp.int8, "1023 bytes"),
        ((1024,), jnp.int8, "1024 bytes"),
        ((0,), jnp.float32, "0 bytes"),
        ((257,), jnp.float32, "1028 bytes"),
        ((256,), jnp.int32, "S32"),
        ((), jnp.float32, "4 bytes"),
    ],
)
def test_aux_loss_d27_wrong_workspace(target, shape, dtype, given):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as error:
        raw(target, workspace=(shape, dtype))
    message = str(error.value)
    assert "aux_loss_fwd: workspace" in message
    assert given in message
    assert "(1024 bytes)" in message.split("wanted")[1]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_experts": np.int64(3)}, ["num_experts", "3", "4"]),
        ({"topk": np.int64(5)}, ["topk", "5", "1 to 4"]),
        ({"topk": np.int64(0)}, ["topk", "0", "1 to 4"]),
        ({"total_num_tokens": np.float64(-2)}, ["total_num_tokens", "-2", "at least 0"]),
        ({"total_num_tokens": np.float64(-1)}, ["total_num_tokens"]),  # an operand, and none came
    ],
)
def test_aux_loss_raw_call_checks_attributes(changed, words):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as error:
        raw(**changed)
    assert all(word in str(error.value) for word in ["aux_loss_fwd", *words])


# Every attribute that a handler binds.
ATTRIBUTES = {
    "aux_loss_fwd": {"num_experts", "topk", "coeff", "total_num_tokens"},
    "aux_loss_fwd_atomic": {"num_experts", "topk", "coeff", "total_num_tokens"},
    "aux_loss_bwd": {"num_experts", "topk", "coeff", "total_num_tokens"},
    "aux_loss_final": {"num_experts", "topk", "coeff", "total_num_tokens"},
    "aux_loss_partials": {"rows_per_slot"},
}


def emitted_attributes(text):
    """Attribute names of each of our custom calls in compiled HLO or lowered StableHLO."""
    found = {}
    for line in text.splitlines():
        target = re.search(r"@?jax_moe_det\.(\w+)", line)
        config = re.search(r"backend_config ?= ?\{([^}]*)\}", line)
        if target and config and "custom" in line:
            found[target[1]] = set(re.findall(r"(\w+) = ", config[1]))
    return found


def test_aux_loss_attributes_are_those_the_handlers_bind(cpu_devices):
    def everything(p, c):
        return loss_and_grad(p, c), loss(p, c, deterministic=False)

    found = emitted_attributes(jax.jit(everything).lower(P4, COUNTS4).as_text())
    mesh = jax.make_mesh(
        (4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=cpu_devices[:4]
    )
    spec = jax.sharding.NamedSharding(mesh, jax.P("a"))
    probs = jax.device_put(cases.random_scores(1, 1024, 4), spec)
    found |= emitted_attributes(jax.jit(loss).lower(probs, COUNTS4).compile().as_text())
    assert found == ATTRIBUTES


@pytest.mark.parametrize("target", ATTRIBUTES)
def test_aux_loss_handlers_bind_no_more_and_no_less(target):
    given = {
        "num_experts": np.int64(4),
        "topk": np.int64(2),
        "coeff": np.float64(0.01),
        "total_num_tokens": np.float64(4),
        "rows_per_slot": np.int64(1),
    }
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    row = jax.ShapeDtypeStruct((4,), jnp.float32)
    workspace = jax.ShapeDtypeStruct((256,), jnp.float32)
    operands, results = {
        "aux_loss_fwd": ((P4, COUNTS4), (scalar, workspace)),
        "aux_loss_fwd_atomic": ((P4, COUNTS4), (scalar, workspace)),
        "aux_loss_bwd": ((COUNTS4, np.float32(1)), row),
        "aux_loss_final": ((np.zeros(256, np.float32),), scalar),
        "aux_loss_partials": ((P4, COUNTS4), row),
    }[target]
    call = jax.ffi.ffi_call(f"jax_moe_det.{target}", results)
    bound = {name: given[name] for name in ATTRIBUTES[target]}
    jax.block_until_ready(call(*operands, **bound))
    others = [{k: v for k, v in bound.items() if k != name} for name in bound]
    for wrong in [*others, {**bound, "extra": np.int64(1)}]:
        with pytest.raises(jax.errors.JaxRuntimeError, match="attributes"):
            jax.block_until_ready(call(*operands, **wrong))


# ---- Messages: the argument, what was given, what is allowed. At trace time, eager and in jit.


def under_jit(function):
    return jax.jit(function)()


@pytest.mark.parametrize("run", [lambda f: f(), under_jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("changed", "exception", "words"),
    [
        # D17
        ({"probs": np.ones((4, 4), np.int8)}, TypeError, ["probs", "int8", "bfloat16"]),
        ({"probs": np.ones((4, 4), np.complex64)}, TypeError, ["probs", "complex64", "float16"]),
        ({"probs": np.ones((4, 4), bool)}, TypeError, ["probs", "bool", "float32"]),
        ({"probs": np.ones(4, np.float32)}, ValueError, ["probs", "(4,)", "2 dimensions"]),
        ({"probs": np.ones((2, 4, 4), np.float32)}, ValueError, ["probs", "(2, 4, 4)"]),
        ({"probs": np.ones((4, 0), np.float32)}, ValueError, ["probs", "(4, 0)", "column"]),
        ({"counts": np.ones(4, bool)}, TypeError, ["tokens_per_expert", "bool", "int32, int64"]),
        ({"counts": np.ones(4, np.int16)}, TypeError, ["tokens_per_expert", "int16", "float32"]),
        ({"counts": np.ones(4, np.uint32)}, TypeError, ["tokens_per_expert", "uint32"]),
        ({"counts": np.ones(4, np.float16)}, TypeError, ["tokens_per_expert", "float16"]),
        ({"counts": np.ones(4, np.float64)}, TypeError, ["tokens_per_expert", "float64"]),
        ({"counts": np.ones(5, np.int32)}, ValueError, ["tokens_per_expert", "(5,)", "(4,)"]),
        ({"counts": np.ones((4, 1), np.int32)}, ValueError, ["tokens_per_expert", "(4, 1)"]),
        ({"topk": 0}, ValueError, ["topk", "0", "1 to 4"]),
        ({"topk": 5}, ValueError, ["topk", "5", "1 to 4"]),
        ({"topk": -1}, ValueError, ["topk", "-1"]),
        ({"topk": 2.0}, TypeError, ["topk", "2.0", "integer"]),
        ({"topk": True}, TypeError, ["topk", "True", "integer"]),
        ({"topk": None}, TypeError, ["topk", "None", "integer"]),
        ({"coeff": "0.1"}, TypeError, ["coeff", "'0.1'", "number"]),
        ({"coeff": np.inf}, ValueError, ["coeff", "inf", "finite"]),
        ({"coeff": np.nan}, ValueError, ["coeff", "nan", "finite"]),
        ({"coeff": 1j}, TypeError, ["coeff", "1j", "number"]),
        ({"coeff": True}, TypeError, ["coeff", "True", "number"]),
        ({"num_experts": 0}, ValueError, ["num_experts", "0"]),
        ({"num_experts": 3}, ValueError, ["num_experts", "3", "4"]),
        ({"num_experts": 8}, ValueError, ["num_experts", "8", "4"]),
        ({"num_experts": 2, "topk": 3}, ValueError, ["topk", "3", "1 to 2"]),
        ({"valid_mask": np.ones(4, int)}, TypeError, ["valid_mask", "int", "bool"]),
        ({"valid_mask": np.ones(3, bool)}, ValueError, ["valid_mask", "(3,)", "(4,)"]),
        ({"valid_mask": np.ones((4, 4), bool)}, ValueError, ["valid_mask", "(4, 4)", "(4,)"]),
        ({"total_num_tokens": -1}, ValueError, ["total_num_tokens", "-1", ">= 0"]),
        ({"total_num_tokens": 4.0}, TypeError, ["total_num_tokens", "4.0", "integer"]),
        ({"total_num_tokens": True}, TypeError, ["total_num_tokens", "True", "integer"]),
        ({"deterministic": 2}, TypeError, ["deterministic", "2", "True or False"]),
        # A07
        (
            {
                "probs": np.ones((4, 6), np.float32),
                "counts": np.ones(6, np.int32),
                "num_experts": 4,
            },
            ValueError,
            ["num_experts", "4", "6 columns"],
        ),
        # A18
        (
            {"counts": np.array([40840, 40960, 1, 1], jnp.bfloat16)},
            TypeError,
            ["tokens_per_expert", "bfloat16", "int32, int64, float32"],
        ),
        # A16
        (
            {"counts": np.array([2**32 + 1, 5, 1, 1], np.int64)},
            ValueError,
            ["tokens_per_expert", "4294967297", "x64"],
        ),
        (
            {"counts": [1, 2, 3, -(2**31) - 1]},
            ValueError,
            ["tokens_per_expert", "-2147483649", "x64"],
        ),
    ],
)
def test_aux_loss_messages(changed, exception, words, run):
    arguments = {"probs": P4, "counts": COUNTS4, **changed}
    with pytest.raises(exception) as error:
        run(lambda: loss(**arguments))
    message = str(error.value)
    assert message.startswith(words[0])
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("name", "value"),
    [("coeff", 0.01), ("topk", 2), ("num_experts", 4), ("coeff", jnp.bfloat16(1))],
)
def test_aux_loss_a27_traced_statics(name, value):
    value = jnp.asarray(value)
    with pytest.raises(TypeError, match=f"{name}: got a traced value.*{name} is static"):
        jax.jit(lambda x: loss(P4, COUNTS4, **{name: x}))(value)
    with pytest.raises(TypeError, match=f"{name}: got a jax.Array.*{name} is static"):
        loss(P4, COUNTS4, **{name: value})


def test_aux_loss_traced_total_messages():
    for total, exception, words in (
        (jnp.float32(4), TypeError, ["float32", "integer scalar"]),
        (jnp.array(True), TypeError, ["bool", "integer scalar"]),
        (jnp.array([4]), ValueError, ["(1,)", "integer scalar"]),
    ):
        for run in (
            jax.jit(lambda n: loss(P4, COUNTS4, total_num_tokens=n)),
            lambda n: loss(P4, COUNTS4, total_num_tokens=n),
        ):
            with pytest.raises(exception, match=r"^total_num_tokens") as error:
                run(total)
            assert all(word in str(error.value) for word in words)


def test_aux_loss_d16_float64():
    probs = P4.astype(np.float64)
    # Without x64 a NumPy float64 is cast, as JAX does everywhere.
    assert_same_bits(loss(probs, COUNTS4), loss(P4, COUNTS4))
    with jax.enable_x64(True):
        for given in (probs, jnp.asarray(probs)):
            with pytest.raises(TypeError, match=r"probs.*float64.*float32, bfloat16, float16"):
                loss(given, COUNTS4)
            with pytest.raises(TypeError, match=r"probs.*float64"):
                jax.jit(loss)(given, COUNTS4)
        with pytest.raises(TypeError, match=r"tokens_per_expert.*float64"):
            loss(P4, jnp.ones(4, jnp.float64))


def test_aux_loss_a16_int64_values_that_fit():
    for dtype in (np.int64, np.int32):
        counts = np.array([3, 2, 2, 2**31 - 1], dtype)
        assert_same_bits(loss(P4, counts), reference.aux_loss(P4, counts, 2, 0.01))
    with jax.enable_x64(True):
        counts = np.array([2**32 + 1, 5, 1, 1])
        assert_same_bits(loss(P4, counts), reference.aux_loss(P4, counts, 2, 0.01))


def test_aux_loss_unknown_axis_name():
    """Only mesh axes: vmap's name would be taken for one device's rows."""
    with pytest.raises(ValueError, match=r"axis_name: got 'nowhere'; allowed: mesh axes"):
        loss(P4, COUNTS4, axis_name="nowhere")
    with pytest.raises(ValueError, match=r"axis_name: got 'items'; allowed: mesh axes"):
        jax.vmap(lambda p: loss(p, COUNTS4, axis_name="items"), axis_name="items")(P4[None])


# ---- deterministic=False


def test_aux_loss_atomic_kernel_is_close():
    """The negative control differs in its bits, never in its value."""
    probs, counts = cases.routed(4096, 64, 6)
    mask = cases.random_mask(1, 4096)
    for options in ({}, {"valid_mask": mask}):
        got = loss(probs, counts, 6, deterministic=False, **options)
        # 4096 float32 additions in any order: at most 4096 roundings.
        np.testing.assert_allclose(got, loss(probs, counts, 6, **options), rtol=4096 * 2.0**-24)
        grads = [
            jax.grad(loss)(probs, counts, 6, deterministic=d, **options) for d in (True, False)
        ]
        assert_same_bits(grads[0], grads[1])
    if jax.default_backend() == "cpu":  # one kernel
        assert_same_bits(loss(probs, counts, deterministic=False), loss(probs, counts))
    assert_same_bits(loss(P4, COUNTS4, coeff=0.0, deterministic=False), np.float32(0))


def test_aux_loss_atomic_kernel_vmap():
    probs = np.stack([cases.random_scores(i, 300, 16) for i in range(3)])
    counts = cases.random_counts(1, 16)
    run = functools.partial(loss, deterministic=False)
    got = jax.vmap(run, (0, None))(probs, counts)
    np.testing.assert_allclose(got, [loss(p, counts) for p in probs], rtol=1e-5)


# ---- What only a GPU can show


def on_cpu(function, *arguments):
    """Runs a jitted function on the CPU backend, whatever the default backend is."""
    return jax.jit(function)(*jax.device_put(arguments, jax.devices("cpu")[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_aux_loss_a25_gpu_equals_cpu(shape, dtype):
    probs, counts = cases.routed(shape.num_tokens, shape.num_experts, shape.topk)
    probs = probs.astype(cases.FLOAT_DTYPES[dtype])
    mask = cases.random_mask(1, shape.num_tokens)

    def run(p, c, m):
        plain = loss_and_grad(p, c, shape.topk)
        return plain, loss_and_grad(p, c, shape.topk, valid_mask=m)

    gpu = jax.jit(run)(*jax.device_put((probs, counts, mask), jax.devices("cuda")[0]))
    assert_same_bits(gpu, on_cpu(run, probs, counts, mask))


@pytest.mark.gpu
def test_aux_loss_a22_gpu_one_bit_pattern_and_the_atomic_kernel_many():
    rng = np.random.default_rng(0)
    device = jax.devices("cuda")[0]
    probs = jax.device_put(rng.random((16384, 256), np.float32), device)
    counts = jax.device_put(cases.random_counts(1, 256), device)
    patterns = {}
    for deterministic in (True, False):
        run = jax.jit(functools.partial(loss, topk=8, deterministic=deterministic))
        patterns[deterministic] = {bits(run(probs, counts)) for _ in range(1000)}
    assert patterns[True] == {bits(reference.aux_loss(probs, counts, 8, 0.01))}
    # The test can fail: the same check on atomic additions finds a difference.
    assert len(patterns[False]) > 1


@pytest.mark.gpu
def test_aux_loss_gpu_same_bits_beside_other_work():
    """Multiprocessors that other kernels hold change when a block runs, not what it adds."""
    device = jax.devices("cuda")[0]
    stop = threading.Event()

    def load():
        x = jax.device_put(np.ones((4096, 4096), np.float32), device)
        multiply = jax.jit(lambda x: (x @ x) * 1e-4)
        while not stop.is_set():
            x = multiply(x)
            x.block_until_ready()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for num_tokens, num_experts in ((4096, 64), (16384, 256), (7168, 33)):
            probs = cases.random_scores(1, num_tokens, num_experts)
            counts = cases.random_counts(2, num_experts)
            run = jax.jit(loss_and_grad)
            operands = jax.device_put((probs, counts), device)
            first = check_reproducible(run, *operands, repeats=50)
            assert_same_bits(first, expected(probs, counts))
            check_reproducible(jax.jit(loss), *operands, repeats=300)
    finally:
        stop.set()
        thread.join()


REPLAY = """
    import functools
    import hashlib
    import sys
    import jax
    import jax.numpy as jnp
    import cases
    from jax_moe_det import fused_moe_aux_loss
    from jax_moe_det.testing import fingerprint

    @jax.jit
    def run(probs, counts, total):
        f = functools.partial(fused_moe_aux_loss, topk=2, coeff=0.01, total_num_tokens=total)
        # Several of ours in one program, so that there is a graph to capture.
        return jax.value_and_grad(f)(probs, counts), f(probs * 2, counts), f(probs[::2], counts)

    device = jax.devices(sys.argv[1])[0]
    digest = hashlib.sha256()
    for i in range(20):
        inputs = cases.random_scores(i, 1000, 64), cases.random_counts(i, 64), jnp.int32(4 + 3 * i)
        digest.update(fingerprint(run(*jax.device_put(inputs, device))).encode())
    print(digest.hexdigest())
"""


@pytest.mark.gpu
def test_aux_loss_d21_gpu_command_buffers(run_python):
    """Twenty replays with other inputs and totals: the CPU's bits, captured or not."""
    want = run_python(REPLAY, "cpu")
    for flags in (
        "",
        "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_graph_min_graph_size=1",
    ):
        assert run_python(REPLAY, "cuda", env={"XLA_FLAGS": flags}) == want, flags


@pytest.mark.gpu
def test_aux_loss_b46_gpu_above_2_to_31_elements():
    """Exact by construction: every sum of these powers of two fits its format."""
    num_tokens, num_experts = 932100, 2304
    assert num_tokens * num_experts > 2**31

    @jax.jit
    def run():
        row = jnp.exp2(-(jnp.arange(num_experts) % 4)).astype(jnp.bfloat16)
        probs = jnp.broadcast_to(row, (num_tokens, num_experts))
        last = jnp.arange(num_tokens)[:, None] >= num_tokens - 64
        probs = lax.optimization_barrier(jnp.where(last, jnp.bfloat16(2), probs))
        counts = jnp.ones(num_experts, jnp.int32)
        value, grad = jax.value_and_grad(loss)(probs, counts, 1, 1.0, total_num_tokens=1000)
        return value, jnp.all(grad == grad[:1]), grad[-1]

    with jax.default_device(jax.devices("cuda")[0]):
        value, same_rows, row = run()
    total = (num_tokens - 64) * (num_experts // 4 * 1.875) + 64 * num_experts * 2.0
    scale = num_experts / (1000.0 * 1000.0)
    assert_same_bits(value, np.float32(total * scale))
    assert same_rows
    assert_same_bits(row, reference.round_once(np.full(num_experts, scale), jnp.bfloat16))


@pytest.mark.parametrize("num_tokens", [1, 3, 255, 256, 300])
def test_aux_loss_dirty_workspace(num_tokens):
    """Nothing relies on zeroed memory: freed NaNs lie where the workspace may be put."""
    probs = cases.random_scores(1, num_tokens, 16)
    counts = cases.random_counts(2, 16)

    @jax.jit
    def run(p, c):
        # A sort is no fusion: its NaNs stand in this program's temporary memory before the loss.
        dirt = lax.optimization_barrier(jnp.sort(jnp.full((8, 256), jnp.nan) * p[0, 0]))
        p = jnp.where(jnp.isnan(dirt).all(), p, 0)
        return [loss(p, c) for _ in range(3)]

    want = reference.aux_loss(probs, counts, 2, 0.01)
    for _ in range(5):
        freed = [jax.block_until_ready(jnp.full(256 * 2**i, jnp.nan)) for i in range(8)]
        del freed
        assert_same_bits(loss(probs, counts), want)
        assert_same_bits(run(probs, counts), [want] * 3)
