"""The top-k router: values, order, bits under everything that must not matter, gradients, messages.

Bits are compared exactly (`assert_same_bits`). Closeness to float64 is a separate test, with the
error model beside it. Names and docstrings carry the number of the case they come from.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import re
import threading
import warnings

import cases
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations
from jax import lax

from jax_moe_det import (
    RoutingMapFormat,
    ScoreFunction,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    reference,
)
from jax_moe_det.testing import assert_same_bits, check_reproducible, fingerprint
from jax_moe_det.topk_router import RESIDUAL_NAME

L4 = np.array([[0.3, -0.2, 1.1, 0.9]], np.float32)
D4 = np.array([[1, 2, 3, 4]], np.float32)

# Score function, use_pre_softmax, compute_aux_scores: everything that has its own arithmetic.
MODES = {
    "softmax": {"score_function": "softmax"},
    "pre_softmax": {"score_function": "softmax", "use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
    "aux_softmax": {"score_function": "softmax", "compute_aux_scores": True},
    "aux_sigmoid": {"score_function": "sigmoid", "compute_aux_scores": True},
    "aux_sqrtsoftplus": {"score_function": "sqrtsoftplus", "compute_aux_scores": True},
}
WEIGHT_MODES = {name: mode for name, mode in MODES.items() if "aux" not in name}
no_gradient_warning = pytest.mark.filterwarnings("ignore:.*over one chosen expert:UserWarning")


def router(logits, topk=2, **options):
    return fused_topk_with_score_function(logits, topk, **options)


def sigmoid_router(logits, bias=None, mask=None, topk=2):
    return router(logits, topk, score_function="sigmoid", expert_bias=bias, valid_mask=mask)


def with_gradient(logits, d_out, topk=2, **options):
    """Weights or scores, map and gradient."""
    out, vjp, routing_map = jax.vjp(
        lambda x: router(x, topk, **options), jnp.asarray(logits), has_aux=True
    )
    return out, routing_map, vjp(d_out)[0]


def expected(logits, d_out, topk=2, **options):
    """The same from the reference."""
    out, routing_map = reference.topk_router(logits, topk, **options)
    return (
        out,
        routing_map,
        reference.topk_router_grad(logits, routing_map, d_out, topk, **options),
    )


@functools.cache
def compiled(topk, statics):
    return jax.jit(
        lambda x, d, arrays: with_gradient(x, d, topk, **dict(statics), **arrays),
    )


def jitted(logits, d_out, topk=2, *, expert_bias=None, valid_mask=None, **statics):
    """`with_gradient` in one compiled program, shared by equal static arguments."""
    arrays = {"expert_bias": expert_bias, "valid_mask": valid_mask}
    return compiled(topk, tuple(statics.items()))(logits, d_out, arrays)


def cotangent(logits, seed=0, kind="normal", **mode):
    dtype = "float32" if mode.get("compute_aux_scores") else logits.dtype.name
    flat = cases.logits(kind, seed + 77, logits.size // logits.shape[-1], logits.shape[-1], dtype)
    return flat.reshape(logits.shape)


def check(logits, topk=2, seed=0, **options):
    """Public function under jit, with its gradient, against the reference."""
    d_out = cotangent(logits, seed, **options)
    assert_same_bits(
        jitted(logits, d_out, topk, **options), expected(logits, d_out, topk, **options)
    )


def experts(routing_map):
    """The chosen experts of each row."""
    return [np.flatnonzero(row).tolist() for row in np.asarray(routing_map)]


def float32(x):
    return np.asarray(x).astype(np.float32)


def zeros_like(x):
    return np.zeros(x.shape, x.dtype)


def aux_loss(logits, topk, **mode):
    scores, routing_map = router(logits, topk, compute_aux_scores=True, **mode)
    return fused_moe_aux_loss(scores, jnp.sum(routing_map, 0, dtype=jnp.int32), topk, 0.01)


# ---- Values


@pytest.mark.parametrize(
    ("mode", "scale", "weights"),
    [
        ("softmax", 1, [0, 0, 0.549833997, 0.450166003]),
        ("pre_softmax", 1, [0, 0, 0.393609124, 0.322259895]),
        ("sigmoid", 2.5, [0, 0, 1.283628477, 1.216371523]),
        ("sqrtsoftplus", 1, [0, 0, 0.513914329, 0.486085671]),
    ],
)
def test_topk_router_b01_hand_case(mode, scale, weights):
    got, routing_map = router(L4, 2, scaling_factor=scale, **MODES[mode])
    np.testing.assert_allclose(got, [weights], rtol=1e-6)
    assert_same_bits(routing_map, np.array([[False, False, True, True]]))
    assert got.dtype == jnp.float32


def test_topk_router_b02_all_equal():
    weights, routing_map = router(np.zeros((3, 64), np.float32), 8)
    want = np.arange(64) < 8
    assert_same_bits(routing_map, np.tile(want, (3, 1)))
    assert_same_bits(weights, np.tile(np.where(want, np.float32(0.125), np.float32(0)), (3, 1)))


def test_topk_router_b03_tie_between_lanes():
    logits = np.zeros((1, 32), np.float32)
    logits[0, [1, 16]] = 1
    assert experts(router(logits, 1, use_pre_softmax=True)[1]) == [[1]]


@pytest.mark.parametrize("mode", MODES)
def test_topk_router_b05_many_ties_in_bfloat16(mode):
    t, e = np.ogrid[:64, :384]
    logits = (((7 * e + 3 * t) % 16) / 8).astype(jnp.bfloat16)
    _, routing_map = router(logits, 8, **MODES[mode])
    want = np.argsort(-logits.astype(np.float64), axis=-1, kind="stable")[:, :8]
    assert experts(routing_map) == np.sort(want).tolist()


def test_topk_router_b07_finite_value_first():
    logits = np.array([[1] + [-np.inf] * 7], np.float32)
    weights, routing_map = router(logits, 2)
    assert experts(routing_map) == [[0, 1]]
    assert_same_bits(weights, np.array([[1, 0, 0, 0, 0, 0, 0, 0]], np.float32))


@pytest.mark.parametrize("mode", MODES)
def test_topk_router_b09_row_of_minus_infinity(mode):
    logits = cases.lattice_logits(3, 16)
    logits[1] = -np.inf
    d_out = cotangent(logits, **MODES[mode])
    got = with_gradient(logits, d_out, 3, **MODES[mode])
    assert experts(got[1])[1] == [0, 1, 2]
    row = np.asarray(got[0])[1]
    wanted = 0.0 if "sig" in mode or "sqrt" in mode else np.nan
    np.testing.assert_array_equal(row if "aux" in mode else row[:3], wanted)
    without = with_gradient(logits[[0, 2]], d_out[[0, 2]], 3, **MODES[mode])
    assert_same_bits(jax.tree.map(lambda x: np.asarray(x)[[0, 2]], got), without)


@pytest.mark.parametrize("mode", MODES)
def test_topk_router_b10_nan_row(mode):
    """NaN ranks first and stays visible; forward and backward, in its row alone."""
    logits = np.tile(np.array([1, 0, 3, 2], np.float32), (3, 2))
    logits[1, 1] = np.nan
    logits[2] = np.nan
    d_out = cotangent(logits, **MODES[mode])
    got = with_gradient(logits, d_out, 2, **MODES[mode])
    # A NaN makes every softmax score NaN, and every score that is divided by a sum with it.
    all_nan = "aux" in mode or mode == "pre_softmax"
    chosen = [0, 1] if all_nan else [1, 2]
    assert experts(got[1]) == [[2, 6], chosen, [0, 1]]
    for row in (1, 2):
        takes_part = np.ones(8, bool) if all_nan else np.asarray(got[1])[row]
        weights, grad = np.asarray(got[0])[row], np.asarray(got[2])[row]
        is_weight = takes_part if "aux" in mode else np.asarray(got[1])[row]
        assert_same_bits(weights, np.where(is_weight, np.float32(np.nan), np.float32(0)))
        assert_same_bits(grad, np.where(takes_part, np.float32(np.nan), np.float32(0)))
    first = with_gradient(logits[:1], d_out[:1], 2, **MODES[mode])
    assert_same_bits(jax.tree.map(lambda x: np.asarray(x)[:1], got), first)


def test_topk_router_b10_nan_hand_case():
    for mode in ("softmax", "sigmoid"):
        _, routing_map = router(np.array([[1, np.nan, 3, 2]], np.float32), 2, **MODES[mode])
        assert experts(routing_map) == [[1, 2]]


def test_topk_router_b12_plus_infinity():
    weights, routing_map = sigmoid_router(np.array([[np.inf, 0, 1, 2]], np.float32))
    assert experts(routing_map) == [[0, 3]]
    np.testing.assert_allclose(weights, [[0.531689469, 0, 0, 0.468310531]], rtol=1e-6)


@no_gradient_warning
@pytest.mark.parametrize(
    ("row", "topk", "chosen"),
    [([-0.0, 0.0], 1, [1]), ([0.0, -0.0], 1, [0]), ([-0.0, 0.0, -1.0], 2, [0, 1])],
)
def test_topk_router_b14_signed_zero(row, topk, chosen):
    logits = np.array([row], np.float32)
    assert experts(router(logits, topk)[1]) == [chosen]
    # The order within the choice, -0.0 after 0.0, through k = 1.
    if topk == 2:
        assert experts(router(logits, 1)[1]) == [[1]]


@no_gradient_warning
def test_topk_router_b16_one_expert():
    logits = np.array([[0.7], [-3]], np.float32)
    d_out = np.array([[3], [-5]], np.float32)
    for mode in ("softmax", "pre_softmax"):
        got = with_gradient(logits, d_out, 1, **MODES[mode])
        ones = np.ones((2, 1), np.float32)
        assert_same_bits(got, (ones, np.ones((2, 1), bool), 0 * ones))
    weights, routing_map = router(logits, 1, score_function="sigmoid")
    np.testing.assert_allclose(weights, [[0.668187772], [0.047425873]], rtol=1e-6)
    assert np.asarray(routing_map).all()
    for mode in MODES:
        check(logits, 1, **MODES[mode])


def test_topk_router_b17_every_expert():
    weights, routing_map = sigmoid_router(L4, topk=4)
    want = [[0.231087910, 0.181093700, 0.301816170, 0.286002220]]
    np.testing.assert_allclose(weights, want, rtol=1e-6)
    assert np.asarray(routing_map).all()


def test_topk_router_b18_one_sigmoid_is_not_renormalised():
    weights, _ = router(L4, 1, score_function="sigmoid", scaling_factor=2)
    np.testing.assert_allclose(weights, [[0, 0, 1.500520211, 0]], rtol=1e-6)


def test_topk_router_b19_softmax_over_one_expert_warns():
    """At trace time, once, at the caller's line."""
    run = jax.jit(lambda x, d: with_gradient(x, d, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights, _, grad = run(L4, D4)
        run(L4 + 1, D4)
    (warning,) = caught
    assert warning.category is UserWarning
    assert re.search("no gradient.*use_pre_softmax", str(warning.message))
    assert warning.filename == __file__
    assert_same_bits((weights, grad), (np.array([[0, 0, 1, 0]], np.float32), zeros_like(L4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, _ = router(L4, 1, use_pre_softmax=True)
        router(L4, 1, score_function="sigmoid")
        router(L4, 1, compute_aux_scores=True)
        router(L4, 2)
    np.testing.assert_allclose(weights, [[0, 0, 0.393609124, 0]], rtol=1e-6)


@pytest.mark.parametrize("map_format", ["bitmap_u8", RoutingMapFormat.BITMAP_U8, 1, np.int64(1)])
@pytest.mark.parametrize(
    ("num_experts", "chosen", "want"),
    [
        (5, [0, 3], [9]),
        (33, [8, 32], [0, 1, 0, 0, 1]),
        (32, [7, 8, 15, 31], [128, 129, 0, 128]),
        (8, [7], [128]),
        (1, [0], [1]),
    ],
)
def test_topk_router_b20_bitmap(num_experts, chosen, want, map_format):
    logits = np.full((1, num_experts), -1, np.float32)
    logits[0, chosen] = 1
    got = router(logits, len(chosen), routing_map_format=map_format, score_function="sigmoid")
    plain = router(logits, len(chosen), score_function="sigmoid")
    assert_same_bits(got, (plain[0], np.array([want], np.uint8)))


def test_topk_router_b21_rows_do_not_depend_on_their_number():
    logits = cases.lattice_logits(129, 33)
    d_out = cotangent(logits)
    whole = jax.tree.map(np.asarray, jitted(logits, d_out, 5))
    assert_same_bits(whole, expected(logits, d_out, 5))
    for num_tokens in (1, 2, 3, 4, 5, 15, 16, 17, 127, 128, 129):
        got = jitted(logits[:num_tokens], d_out[:num_tokens], 5)
        assert_same_bits(got, jax.tree.map(lambda x, n=num_tokens: x[:n], whole))


def test_topk_router_b22_33_experts():
    logits = cases.lattice_logits(37, 33)
    weights, routing_map = router(logits, 5)
    weights = np.asarray(weights)
    assert experts(routing_map)[0] == sorted([19, 12, 31, 5, 24])
    np.testing.assert_allclose(
        weights[0, [19, 12, 31]], [0.314164235, 0.215921710, 0.190550240], rtol=1e-6
    )
    assert experts(routing_map)[36] == sorted([10, 29, 3, 22, 15])
    counts = np.asarray(routing_map).sum(0)
    assert counts[:6].tolist() == [6, 6, 5, 6, 5, 6]
    assert (counts.max(), counts.argmax()) == (7, 10)
    np.testing.assert_allclose(aux_loss(logits, 5), 0.010081852, rtol=1e-6)


def test_topk_router_b24_deepseek_v3():
    logits = cases.lattice_logits(64, 256)
    bias = (0.03125 * (np.arange(256) % 5)).astype(np.float32)
    weights, routing_map = router(
        logits, 8, num_groups=8, group_topk=4, scaling_factor=2.5, score_function="sigmoid",
        expert_bias=bias, group_score="top2",
    )  # fmt: skip
    chosen = experts(routing_map)
    assert chosen[0] == sorted([249, 159, 69, 34, 83, 89, 228, 138])
    np.testing.assert_allclose(np.asarray(weights)[0, 249], 0.315083266, rtol=1e-6)
    assert chosen[63] == sorted([244, 154, 64, 209, 78, 84, 223, 133])
    counts = np.asarray(routing_map).sum(0)
    assert (counts.max(), counts.argmax()) == (10, 24)
    np.testing.assert_allclose(
        aux_loss(logits, 8, score_function="sigmoid"), 0.010023229, rtol=1e-6
    )


def test_topk_router_b26_512_experts():
    logits = cases.lattice_logits(19, 512)
    weights, routing_map = router(logits, 10, use_pre_softmax=True)
    want = [83, 166, 249, 332, 415, 498, 69, 152, 235, 318]
    assert experts(routing_map)[0] == sorted(want)
    np.testing.assert_allclose(np.asarray(weights)[0, 83], 0.015508766, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(weights, np.float64).sum(), 2.749361089, rtol=1e-6)
    np.testing.assert_allclose(aux_loss(logits, 10), 0.018077384, rtol=1e-6)


def test_topk_router_b27_2304_experts():
    logits = cases.lattice_logits(33, 2304)
    weights, routing_map = sigmoid_router(logits, topk=36)
    weights = np.asarray(weights)
    assert {1107, 2214, 332, 1439} <= {*experts(routing_map)[0]}
    assert np.argsort(-weights[0], kind="stable")[:4].tolist() == [1107, 2214, 332, 1439]
    assert np.argsort(-weights[32], kind="stable")[:4].tolist() == [1651, 876, 1983, 101]
    np.testing.assert_allclose(weights[0, 1107], 0.027809900, rtol=1e-6)
    np.testing.assert_allclose((weights.astype(np.float64) ** 2).sum(), 0.916667142, rtol=1e-6)
    counts = np.asarray(routing_map).sum(0)
    assert (counts.max(), counts.argmax()) == (7, 1651)


def test_topk_router_b31_groups_of_negative_values():
    logits = np.array([[2, 1, 0, -1, 1.5, 1.4, -2, -3]], np.float32)
    _, routing_map = router(
        logits, 2, num_groups=4, group_topk=1, score_function="sigmoid",
        expert_bias=np.full(8, -2, np.float32),
    )  # fmt: skip
    assert experts(routing_map) == [[4, 5]]


def test_topk_router_losing_groups_rank_below_minus_infinity():
    """Two experts at -inf in the kept group come before everything outside it."""
    logits = np.array([[5, -np.inf, -np.inf, -np.inf, 4, 3, 2, 1]], np.float32)
    for score in ("top2", "max", "sum"):
        _, routing_map = router(
            logits, 3, num_groups=2, group_topk=1, group_score="max" if score == "sum" else score
        )
        want = [4, 5, 6] if score == "top2" else [0, 1, 2]
        assert experts(routing_map) == [want]
    # Groups tie: the lower index is kept. Every NaN ties too, and ranks first.
    tied = np.array([[1, 2, 2, 1, 0, 2]], np.float32)
    _, routing_map = router(tied, 2, num_groups=3, group_topk=1)
    assert experts(routing_map) == [[0, 1]]
    tied[0, 4] = np.nan
    _, routing_map = router(tied, 2, num_groups=3, group_topk=1)
    assert experts(routing_map) == [[4, 5]]


def test_topk_router_b34_bias_much_larger_than_scores():
    logits = np.array([[-18, -18.5, -17, -19]], np.float32)
    weights, routing_map = sigmoid_router(logits, np.array([12, 12, 11, 12], np.float32))
    assert experts(routing_map) == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.622459331, 0.377540669, 0, 0]], rtol=1e-6)


def test_topk_router_b35_bias_minus_infinity():
    logits = np.array([[0, 1, 2, 3]], np.float32)
    bias = np.array([0, 0, -np.inf, 0], np.float32)
    weights, routing_map = sigmoid_router(logits, bias)
    assert experts(routing_map) == [[1, 3]]
    np.testing.assert_allclose(weights, [[0, 0.434215002, 0, 0.565784998]], rtol=1e-6)


def test_topk_router_b37_bias_never_enters_the_weights():
    logits = cases.lattice_logits(8, 32)
    bias = np.linspace(-1, 1, 32, dtype=np.float32)
    weights, routing_map = sigmoid_router(logits, bias, topk=4)
    # Two by two: the sum of a choice does not depend on its order.
    pair, pair_map = sigmoid_router(logits, bias)
    alone = np.where(pair_map, logits, np.float32(-np.inf))
    assert_same_bits(sigmoid_router(alone)[0], pair)
    scores = np.where(routing_map, reference.sigmoid(logits), 0)
    np.testing.assert_allclose(weights, scores / scores.sum(1, keepdims=True), rtol=1e-6)
    assert experts(routing_map) != experts(sigmoid_router(logits, topk=4)[1])


def test_topk_router_b38_bias_stays_float32():
    logits = np.zeros((1, 4), jnp.bfloat16)
    bias = np.array([0, 0.0001, 0, 0], np.float32)
    assert experts(sigmoid_router(logits, bias, topk=1)[1]) == [[1]]
    assert experts(sigmoid_router(logits, [0, 0.0001, 0, 0], topk=1)[1]) == [[1]]


def test_topk_router_b40_eps():
    logits = np.array([[-60, -61]], np.float32)
    weights, _ = router(logits, 2, score_function="sigmoid")
    np.testing.assert_allclose(weights, [[8.75650e-7, 3.22134e-7]], rtol=1e-5)
    weights, _ = router(logits, 2, score_function="sigmoid", eps=0)
    np.testing.assert_allclose(weights, [[0.731058579, 0.268941421]], rtol=1e-6)


def test_topk_router_b42_huge_logits():
    logits = np.array([[1e4, 9999, -1e4, 0]], np.float32)
    for mode in ("softmax", "pre_softmax"):
        weights, _ = router(logits, 2, **MODES[mode])
        np.testing.assert_allclose(weights, [[0.731058579, 0.268941421, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize("mode", WEIGHT_MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_topk_router_b43_16_bits_round_once(dtype, mode):
    logits = cases.lattice_logits(40, 32)
    weights, routing_map = router(logits, 8, **MODES[mode])
    narrow = router(logits.astype(cases.FLOAT_DTYPES[dtype]), 8, **MODES[mode])
    want = reference.round_once(weights, cases.FLOAT_DTYPES[dtype])
    assert_same_bits(narrow, (want, routing_map))


@pytest.mark.parametrize("map_format", ["bytemap", "bitmap_u8"])
@pytest.mark.parametrize("lead", [(2, 3, 4), (1, 24), (24, 1), (4, 6)])
def test_topk_router_b44_leading_dimensions(lead, map_format):
    flat = cases.lattice_logits(24, 16)
    mask = cases.random_mask(1, 24)
    d_out = cotangent(flat)
    options = {"score_function": "sigmoid", "routing_map_format": map_format}
    want = with_gradient(flat, d_out, valid_mask=mask, **options)
    got = jitted(
        flat.reshape(*lead, 16), d_out.reshape(*lead, 16), valid_mask=mask.reshape(lead), **options
    )
    assert_same_bits(got, jax.tree.map(lambda x: x.reshape(*lead, x.shape[-1]), want))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lead", [(0,), (0, 3), (2, 0)])
def test_topk_router_no_rows(lead, mode):
    logits = np.zeros((*lead, 9), jnp.bfloat16)
    dtype = np.float32 if "aux" in mode else logits.dtype
    for map_format, size, map_dtype in (("bytemap", 9, bool), ("bitmap_u8", 2, np.uint8)):
        got = with_gradient(
            logits, np.zeros((*lead, 9), dtype), valid_mask=np.zeros(lead, bool),
            routing_map_format=map_format, **MODES[mode],
        )  # fmt: skip
        want = (np.zeros((*lead, 9), dtype), np.zeros((*lead, size), map_dtype), logits)
        assert_same_bits(got, want)


@pytest.mark.parametrize("mode", MODES)
def test_topk_router_c18_masked_rows_are_positive_zero(mode):
    """Whatever they, or their cotangent, hold; and the other rows are those of no mask."""
    logits = cases.logits("normal", 1, 12, 9)
    d_out = cotangent(logits, **MODES[mode])
    mask = np.arange(12) % 3 != 1
    options = {**MODES[mode]} if "aux" in mode else {**MODES[mode], "scaling_factor": -1.5}
    want = [np.array(x) for x in with_gradient(logits, d_out, 4, **options)]
    for x in want:
        x[~mask] = 0
    assert_same_bits(jitted(logits, d_out, 4, valid_mask=mask, **options), tuple(want))
    for bad in (np.nan, np.inf, -1e38):
        dirty, d_dirty = logits.copy(), d_out.copy()
        dirty[~mask], d_dirty[~mask] = bad, bad
        assert_same_bits(jitted(dirty, d_dirty, 4, valid_mask=mask, **options), tuple(want))


@pytest.mark.parametrize("mode", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_topk_router_c18_unchosen_experts_are_positive_zero(mode):
    """Their cotangents are not read: a NaN there changes nothing."""
    for d_out in (D4, -D4, np.where([1, 1, 0, 0], np.nan, D4).astype(np.float32)):
        weights, _, grad = with_gradient(L4, d_out, scaling_factor=-2.0, **MODES[mode])
        for x in (weights, grad):
            assert_same_bits(np.asarray(x)[:, :2], np.zeros((1, 2), np.float32))
            assert (np.asarray(x)[:, 2:] != 0).all()


def test_topk_router_statics_of_any_kind():
    bias = np.array([0, 0.4, 0, 0], np.float32)
    run = functools.partial(router, L4, expert_bias=bias)
    for function in ScoreFunction:
        want = run(2, score_function=function.name.lower(), scaling_factor=0.5)
        for spelling in (function.name, function.name.capitalize(), function, int(function)):
            assert_same_bits(run(2, score_function=spelling, scaling_factor=0.5), want)
        for kind in (np.float16, np.float32, np.float64, np.array):
            got = run(2, score_function=function, scaling_factor=kind(0.5), eps=kind(0))
            assert_same_bits(got, run(2, score_function=function, scaling_factor=0.5, eps=0.0))
        for kind in (np.int8, np.uint8, np.int32, np.int64, np.uint64, np.array):
            got = run(kind(2), score_function=function, num_groups=kind(2), group_topk=kind(2))
            assert_same_bits(got, run(2, score_function=function, num_groups=2, group_topk=2))
    assert [int(f) for f in ScoreFunction] == [0, 1, 2]
    assert [f.name for f in ScoreFunction] == ["SIGMOID", "SOFTMAX", "SQRTSOFTPLUS"]
    assert [int(f) for f in RoutingMapFormat] == [0, 1]
    assert_same_bits(run(2, use_pre_softmax=np.bool_(True)), run(2, use_pre_softmax=True))
    # By position, in TransformerEngine's order.
    got = fused_topk_with_score_function(L4, 2, False, 2, 1, 2.5, "sigmoid", bias, False, "bytemap")
    want = router(
        L4, 2, num_groups=2, group_topk=1, scaling_factor=2.5, score_function="sigmoid",
        expert_bias=bias,
    )  # fmt: skip
    assert_same_bits(got, want)


def test_topk_router_scaling_by_zero_of_either_sign():
    """Static values that are equal share a compilation, so that -0.0 counts as 0.0."""
    logits = cases.logits("special", 1, 20, 8)
    for mode in WEIGHT_MODES.values():
        for scale in (0.0, -0.0, 0):
            check(logits, 3, scaling_factor=scale, **mode)


def test_topk_router_no_groups_and_one_group_are_the_same():
    logits = cases.logits("special", 3, 20, 12)
    want = router(logits, 5)
    for groups in ((-1, -1), (None, None), (1, 1)):
        assert_same_bits(router(logits, 5, num_groups=groups[0], group_topk=groups[1]), want)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_topk_router_what_does_not_enter_the_aux_scores(function):
    logits = cases.logits("normal", 1, 8, 12)
    want = router(logits, 3, score_function=function, compute_aux_scores=True)
    got = fused_topk_with_score_function(
        logits, 3, True, 4, 3, 2.5, function, np.arange(12, dtype=np.float32), True, "bytemap"
    )
    assert_same_bits(got, want)
    # The map is the topk of these very values.
    assert experts(want[1]) == np.sort(cases.top_experts(np.asarray(want[0]), 3)).tolist()


def test_topk_router_sigmoid_kinds_ignore_use_pre_softmax():
    for function in ("sigmoid", "sqrtsoftplus"):
        want = router(L4, score_function=function)
        assert_same_bits(router(L4, score_function=function, use_pre_softmax=True), want)


# ---- Bits. The reference and the handlers share no code.

EXPERTS = (1, 2, 5, 8, 33, 64, 100, 128, 256, 384, 512, 640, 2304, 8192)


def groupings(num_experts, topk):
    """Groups that divide, for each group score."""
    for num_groups in (2, 3, 4, 5, 8, 16, num_experts):
        if num_experts % num_groups or num_groups > num_experts:
            continue
        for group_topk in {1, 2, num_groups // 2, num_groups} - {0}:
            if group_topk > num_groups or group_topk * (num_experts // num_groups) < topk:
                continue
            for score in ("sum", "top2", "max"):
                if score != "sum" or topk % group_topk == 0:
                    yield {
                        "num_groups": num_groups,
                        "group_topk": group_topk,
                        "group_score": score,
                    }


def configurations(num_experts, dtype):
    """topk, mode, groups, scaling, eps, format; and which of bias and mask: several per mode."""
    rng = np.random.default_rng([num_experts, len(dtype), ord(dtype[0])])
    sizes = [k for k in (1, 2, 8, 10, 31, 32, 33, 64, 65, num_experts) if k <= num_experts]
    sizes = sorted({*sizes})
    for i, mode in enumerate(MODES.values()):
        chosen = [sizes[i % len(sizes)], sizes[-1 - i % len(sizes)], sizes[len(sizes) // 2]]
        for k in {*chosen[: 3 if dtype == "float32" else 2]}:
            statics = {**mode, "scaling_factor": float(rng.choice([1.0, 2.5, -0.3]))}
            statics["eps"] = float(rng.choice([1e-20, 0.0, 1e-6, 1e-44]))
            if rng.random() < 0.4:
                statics["routing_map_format"] = "bitmap_u8"
            choices = [*groupings(num_experts, k)]
            if choices and rng.random() < 0.6:
                statics |= choices[rng.integers(len(choices))]
            yield k, statics, rng.random() < 0.5, rng.random() < 0.3


@no_gradient_warning
@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_topk_router_bits(num_experts, dtype):
    """Every mode, on rows of every kind of value, in one program for each width and dtype."""
    rows = 4 if num_experts <= 640 else 1
    logits = np.concatenate(
        [
            cases.logits(kind, num_experts + i, rows, num_experts, dtype)
            for i, kind in enumerate(cases.LOGIT_KINDS)
        ]
    )
    num_tokens = len(logits)
    biases = np.stack(
        [
            cases.logits(kind, num_experts, 1, num_experts)[0] / 4
            for kind in ("normal", "tied", "special", "minus_infinity")
        ]
    )
    mask = cases.random_mask(num_experts, num_tokens)
    chosen = [*configurations(num_experts, dtype)]
    arguments = []
    for i, (topk, statics, biased, masked) in enumerate(chosen):
        arrays = {}
        if biased:
            arrays["expert_bias"] = biases[i % len(biases)]
        if masked:
            arrays["valid_mask"] = mask
        kind = ("normal", "special")[i % 2]
        arguments.append((topk, statics, arrays, cotangent(logits, i, kind, **statics)))

    @jax.jit
    def run(x, many):
        return [
            with_gradient(x, d, topk, **statics, **arrays)
            for (topk, statics, *_), (arrays, d) in zip(arguments, many, strict=True)
        ]

    got = run(logits, [(arrays, d) for _, _, arrays, d in arguments])
    for one, (topk, statics, arrays, d_out) in zip(got, arguments, strict=True):
        want = expected(logits, d_out, topk, **statics, **arrays)
        for name, x, y in zip(("out", "map", "gradient"), one, want, strict=True):
            try:
                assert_same_bits(x, y)
            except AssertionError as error:
                pytest.fail(f"{name} of topk {topk}, {statics}, {[*arrays]}: {error}")


def check_properties(logits, got, topk, num_groups=1, **options):
    """What holds for every input, whatever the reference says."""
    out, routing_map, grad = (np.asarray(x) for x in got)
    mask = options.get("valid_mask")
    valid = np.ones(len(logits), bool) if mask is None else mask
    aux = options.get("compute_aux_scores", False)
    assert (routing_map.sum(1) == topk * valid).all()  # distinct experts, always k
    for x in (out, grad):
        assert_same_bits(x[~valid], np.zeros(x[~valid].shape, x.dtype))
    if not aux:
        assert_same_bits(out[~routing_map], np.zeros(out[~routing_map].shape, out.dtype))
    is_nan = np.isnan(float32(out))
    entering = np.ones_like(routing_map) if aux else routing_map
    assert (is_nan == (is_nan.any(1, keepdims=True) & entering & valid[:, None])).all()
    if options["score_function"] == "softmax" and (aux or options.get("use_pre_softmax")):
        entering = np.ones_like(routing_map)
    want_nan = is_nan.any(1, keepdims=True) & entering & valid[:, None]
    assert (np.isnan(float32(grad)) == want_nan).all()
    finite = np.isfinite(float32(logits)).all(1)
    assert np.isfinite(float32(out[finite])).all()


@no_gradient_warning
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_topk_router_properties(data):
    num_experts = data.draw(st.integers(1, 300), "num_experts")
    num_tokens = data.draw(st.integers(1, 40), "num_tokens")
    topk = data.draw(st.integers(1, num_experts), "topk")
    dtype = data.draw(st.sampled_from(sorted(cases.FLOAT_DTYPES)), "dtype")
    kind = data.draw(st.sampled_from(sorted(cases.LOGIT_KINDS)), "kind")
    mode = data.draw(st.sampled_from(sorted(MODES)), "mode")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    options = {**MODES[mode], "scaling_factor": data.draw(st.sampled_from([1.0, -2.5]))}
    choices = [*groupings(num_experts, topk)]
    if choices and data.draw(st.booleans(), "grouped"):
        options |= data.draw(st.sampled_from(choices), "groups")
    if data.draw(st.booleans(), "biased"):
        options["expert_bias"] = cases.logits("normal", seed, 1, num_experts)[0]
    if data.draw(st.booleans(), "masked"):
        options["valid_mask"] = cases.random_mask(seed, num_tokens)
    logits = cases.logits(kind, seed, num_tokens, num_experts, dtype)
    d_out = cotangent(logits, 1, **options)
    got = with_gradient(logits, d_out, topk, **options)
    assert_same_bits(got, expected(logits, d_out, topk, **options))
    check_properties(logits, got, topk, **options)


@no_gradient_warning
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", cases.LOGIT_KINDS)
def test_topk_router_rows_do_not_meet(kind, mode):
    """Rows of special values between others change none of them, forward or backward."""
    logits = cases.logits("normal", 5, 16, 24)
    d_out = cotangent(logits, **MODES[mode])
    want = [np.asarray(x) for x in jitted(logits, d_out, 3, **MODES[mode])]
    odd = np.arange(16) % 2 == 1
    mixed, d_mixed = logits.copy(), d_out.copy()
    mixed[odd] = cases.logits(kind, 6, 8, 24)
    d_mixed[odd] = cases.logits("special", 7, 8, 24)
    got = [np.asarray(x) for x in jitted(mixed, d_mixed, 3, **MODES[mode])]
    assert_same_bits([x[~odd] for x in got], [x[~odd] for x in want])
    check_properties(mixed[~odd], [x[~odd] for x in got], 3, **MODES[mode])


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_topk_router_bits_of_model_shapes(shape):
    """Every row that a kernel may treat apart: the first, the last, and some between."""
    logits = cases.logits("normal", 1, 4096, shape.num_experts)
    mode = {"score_function": "sigmoid"} if shape.num_experts == 256 else {}
    d_out = cotangent(logits)
    got = [np.asarray(x) for x in jitted(logits, d_out, shape.topk, **mode)]
    rows = np.unique(np.r_[0:64, 1000:1064, 4032:4096])
    want = expected(logits[rows], d_out[rows], shape.topk, **mode)
    assert_same_bits(tuple(x[rows] for x in got), want)


def test_topk_router_reference_fma_rounds_once():
    """Against exact rational arithmetic, and against both orders of double rounding."""
    f = np.float32
    one_up = f(1 + 2.0**-23)
    assert_same_bits(reference.fma_float32(one_up, one_up, -f(1 + 2.0**-22)), f(2.0**-46))
    # The exact sum lies just above (below) a float32 tie that float64 cannot tell from it.
    tie = f(1 + 2.0**-12) * f(1 - 2.0**-12)
    assert tie == f(1 - 2.0**-24)
    for sign, want in ((1, f(2)), (-1, f(2))):
        tiny = f(sign * 2.0**-100)
        assert_same_bits(reference.fma_float32(f(2), f(1), tiny), want)
    above = reference.fma_float32(f(1 + 2.0**-12), f(1 + 2.0**-12), f(2.0**-80))
    on = reference.fma_float32(f(1 + 2.0**-12), f(1 + 2.0**-12), f(0))
    below = reference.fma_float32(f(1 + 2.0**-12), f(1 + 2.0**-12), f(-(2.0**-80)))
    assert_same_bits((above, on, below), (f(1 + 2.0**-11 + 2.0**-23), *[f(1 + 2.0**-11)] * 2))
    # Subnormal results round once too.
    smallest = f(2.0**-149)
    assert_same_bits(reference.fma_float32(smallest, f(0.5), f(0)), f(0))
    assert_same_bits(reference.fma_float32(smallest, f(0.5), smallest * f(0)), f(0))
    half_up = reference.fma_float32(f(2.0**-75), f(2.0**-75 * (1 + 2.0**-23)), f(0))
    assert_same_bits(half_up, smallest)


# Bits that never change: an edit here is a breaking change, and belongs in CHANGELOG.md under
# "bits changed". The inputs come from IEEE operations alone, so no libm enters.
GOLDEN = {
    "softmax": "9655d660a9d5a84c",
    "pre_softmax": "d00d4288b2397029",
    "sigmoid": "9fa1aaca82b1cbd4",
    "sqrtsoftplus": "7dd1a70873522cad",
    "aux_softmax": "8f27dbe9dcd17ab1",
    "aux_sigmoid": "abd9ecf15c37b183",
    "aux_sqrtsoftplus": "3546a653776cd23e",
}


@pytest.mark.parametrize("mode", GOLDEN)
def test_topk_router_golden_bits(mode):
    logits = cases.lattice_logits(64, 100) * np.float32(1.37)
    d_out = np.float32(1) / (np.float32(3) + logits * logits)
    options = dict(MODES[mode])
    if mode == "sigmoid":
        bias = cases.lattice_logits(1, 100)[0] * np.float32(0.05)
        options |= {"num_groups": 10, "group_topk": 4, "scaling_factor": 2.5, "expert_bias": bias}
    got = jitted(logits, d_out, 8, **options)
    assert fingerprint(got)[:16] == GOLDEN[mode]


# ---- Error.
#
# Relative to float64, for logits of a few units: exp is good to 8e-8 and its argument x - max to
# |x - max| * 2^-24, below 5e-7 for |x - max| < 8; sigmoid 2.1e-7, sqrtsoftplus 1.3e-7; a sum of
# positive terms to 6e-8 per level, whose roundings are nearly independent; three products 6e-8
# each. A gradient has the difference g - dot of numbers that are good to that: 2e-5 of its row's
# norm allows for rows whose cotangents agree to a hundredth, where all but that cancels.


@no_gradient_warning
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_experts", [8, 64, 256, 2304])
def test_topk_router_error(num_experts, mode):
    logits = np.random.default_rng(1).standard_normal((64, num_experts), np.float32)
    d_out = np.random.default_rng(2).standard_normal((64, num_experts), np.float32)
    for topk in (1, 2, 8):
        out, routing_map, grad = with_gradient(logits, d_out, topk, **MODES[mode])
        want, want_map = reference.topk_router_float64(logits, topk, **MODES[mode])
        assert_same_bits(routing_map, want_map)
        np.testing.assert_allclose(out, want, rtol=1e-6)
        want = reference.topk_router_grad_float64(logits, want_map, d_out, topk, **MODES[mode])
        assert_row_error(grad, want, 2e-5)


def assert_row_error(got, want, bound):
    """Largest error in a row, relative to the row's norm; exact zeros where the row is zero."""
    error = np.abs(np.asarray(got, np.float64) - want).max(axis=-1)
    norm = np.linalg.norm(want, axis=-1)
    assert (error <= bound * norm).all(), (error / norm).max()


@no_gradient_warning
@pytest.mark.parametrize("groups", [{}, {"num_groups": 6, "group_topk": 3, "group_score": "max"}])
@pytest.mark.parametrize("mode", WEIGHT_MODES)
def test_topk_router_c05_random_gradients(mode, groups):
    """Against float64, choice included, on rows whose choice is clear."""
    logits = np.random.default_rng(1).standard_normal((32, 48)).astype(np.float32)
    bias = None if mode == "softmax" else np.linspace(-0.1, 0.1, 48, dtype=np.float32)
    d_out = np.random.default_rng(2).standard_normal((32, 48)).astype(np.float32)
    for topk in (1, 2, 8, 48):
        if groups and topk == 48:
            continue
        options = {**MODES[mode], **groups, "expert_bias": bias, "scaling_factor": 2.5}
        _, routing_map, grad = with_gradient(logits, d_out, topk, **options)
        _, chosen = reference.topk_router_float64(logits, topk, **options)
        # Rows in which no expert is within 1e-3 of the cut stay the same under a shift of 1e-3.
        clear = np.ones(32, bool)
        for seed in range(8):
            shift = np.random.default_rng(seed).uniform(-5e-4, 5e-4, logits.shape)
            shifted = reference.topk_router_float64(logits + shift, topk, **options)[1]
            clear &= (shifted == chosen).all(axis=1)
        assert clear.sum() > 16
        assert_same_bits(np.asarray(routing_map)[clear], chosen[clear])
        want = reference.topk_router_grad_float64(logits, routing_map, d_out, topk, **options)
        if mode == "softmax" and topk == 1:
            assert_same_bits(grad, zeros_like(logits))
            continue
        assert_row_error(grad, want, 2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_topk_router_gradient_is_a_float64_difference(mode):
    """Not the gradient's formula: central differences of the float64 weights."""
    logits = np.random.default_rng(3).standard_normal((3, 7)).astype(np.float32)
    d_out = np.random.default_rng(4).standard_normal((3, 7)).astype(np.float32)
    _, routing_map, grad = with_gradient(logits, d_out, 3, **MODES[mode])
    want = np.zeros((3, 7))
    for e in range(7):
        sides = []
        for step in (1e-5, -1e-5):
            moved = logits.astype(np.float64)
            moved[:, e] += step
            out, _ = reference.topk_router_float64(moved, 3, is_chosen=routing_map, **MODES[mode])
            sides.append((out * d_out).sum(axis=1))
        want[:, e] = (sides[0] - sides[1]) / 2e-5
    assert_row_error(grad, want, 2e-6)


@pytest.mark.parametrize("mode", ["sigmoid", "sqrtsoftplus"])
def test_topk_router_error_in_the_tails(mode):
    """Small scores keep their relative error, weights and gradients."""
    logits = np.linspace(-80, 20, 64 * 8, dtype=np.float32).reshape(64, 8)
    d_out = np.random.default_rng(5).standard_normal((64, 8)).astype(np.float32)
    options = {**MODES[mode], "eps": 0.0}
    weights, routing_map, grad = with_gradient(logits, d_out, 3, **options)
    want, _ = reference.topk_router_float64(logits, 3, is_chosen=routing_map, **options)
    np.testing.assert_allclose(weights, want, rtol=2e-6)
    want = reference.topk_router_grad_float64(logits, routing_map, d_out, 3, **options)
    assert_row_error(grad, want, 2e-5)


# ---- Gradients


@pytest.mark.parametrize(
    ("mode", "scale", "want"),
    [
        ("sqrtsoftplus", 1, [0, 0, -0.067546673, 0.071546218]),
        ("sigmoid", 2.5, [0, 0, -0.155974464, 0.180525809]),
        ("softmax", 1, [0, 0, -0.247516573, 0.247516573]),
        ("pre_softmax", 1, [-0.436820620, -0.264945099, 0.208665205, 0.493100515]),
    ],
)
def test_topk_router_c01_gradients(mode, scale, want):
    _, _, grad = with_gradient(L4, D4, scaling_factor=scale, **MODES[mode])
    np.testing.assert_allclose(grad, [want], rtol=2e-6)


@no_gradient_warning
@pytest.mark.parametrize(
    ("mode", "scale", "want"),
    [
        ("sigmoid", 2, [0, 0, 1.124219277, 0]),
        ("pre_softmax", 1, [-0.208841106, -0.126668534, 0.716042945, -0.380533305]),
        ("softmax", 1, [0, 0, 0, 0]),
    ],
)
def test_topk_router_c03_gradients_of_one_expert(mode, scale, want):
    _, _, grad = with_gradient(L4, D4, 1, scaling_factor=scale, **MODES[mode])
    np.testing.assert_allclose(grad, [want], rtol=1e-6)


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_topk_router_c06_unused_outputs(dtype):
    logits = cases.logits("normal", 1, 16, 8, dtype)
    ones = np.ones_like(logits)
    want = expected(logits, ones, score_function="sigmoid")

    def forward(x):
        weights, routing_map = sigmoid_router(x)
        scores, _ = router(x, score_function="sigmoid", compute_aux_scores=True)
        counts = jnp.sum(routing_map, axis=0, dtype=jnp.int32)
        return weights, routing_map, fused_moe_aux_loss(scores, counts, 2, 0.01)

    assert_same_bits(jax.grad(lambda x: forward(x)[0].sum())(logits), want[2])
    for only_map in (
        lambda x: 1.0 * forward(x)[1].sum(),
        lambda x: jnp.where(forward(x)[1], 1.0, 2.0).sum(),
        lambda x: lax.stop_gradient(forward(x)[0]).astype(jnp.float32).sum(),
    ):
        assert_same_bits(jax.grad(only_map)(logits), zeros_like(logits))
    # The loss alone of (weights, map, loss).
    grad = jax.grad(lambda x: forward(x)[2])(logits)
    scores, _ = reference.topk_router(logits, 2, score_function="sigmoid", compute_aux_scores=True)
    d_scores = reference.aux_loss_grad(scores, want[1].sum(0).astype(np.int32), 2, 0.01)
    want_loss = reference.topk_router_grad(
        logits, None, d_scores, 2, score_function="sigmoid", compute_aux_scores=True
    )
    assert_same_bits(grad, want_loss)
    value, routing_map = jax.grad(lambda x: (forward(x)[0].sum(), forward(x)[1]), has_aux=True)(
        logits
    )
    assert_same_bits((value, routing_map), (want[2], want[1]))


@pytest.mark.parametrize("mode", MODES)
def test_topk_router_bias_and_mask_have_no_gradient(mode):
    logits = cases.logits("normal", 1, 4, 8)
    bias = np.linspace(-1, 1, 8, dtype=np.float32)
    mask = np.array([1, 1, 0, 1], bool)

    def f(x, b, m):
        return router(x, expert_bias=b, valid_mask=m, **MODES[mode])[0]

    out, vjp = jax.vjp(f, logits, bias, mask)
    d_logits, d_bias, d_mask = vjp(jnp.ones_like(out))
    want = expected(logits, np.ones_like(out), expert_bias=bias, valid_mask=mask, **MODES[mode])
    assert_same_bits((out, d_logits), (want[0], want[2]))
    assert_same_bits(d_bias, zeros_like(bias))
    assert d_mask.dtype == jax.dtypes.float0
    assert_same_bits(jax.grad(lambda b: f(logits, b, mask).sum())(bias), zeros_like(bias))
    # The map is an output with a float0 cotangent.
    (out, routing_map), vjp = jax.vjp(lambda x: router(x, **MODES[mode]), logits)
    (grad,) = vjp((jnp.ones_like(out), np.zeros(routing_map.shape, jax.dtypes.float0)))
    assert_same_bits(grad, expected(logits, np.ones_like(out), **MODES[mode])[2])


@pytest.mark.parametrize("mode", MODES)
def test_topk_router_c09_jacrev(mode):
    logits = np.tile(L4, (3, 1)) * np.array([[1], [0.5], [-1]], np.float32)

    def f(x):
        return router(x, **MODES[mode])[0]

    out, vjp = jax.vjp(f, logits)
    basis = np.eye(12, dtype=np.float32).reshape(12, 3, 4)
    rows = np.stack([vjp(d)[0] for d in basis]).reshape(*out.shape, 3, 4)
    assert_same_bits(jax.jacrev(f)(logits), rows)
    assert_same_bits(jax.jit(jax.jacrev(f))(logits), rows)


@pytest.mark.parametrize("mode", ["softmax", "pre_softmax", "aux_sigmoid"])
@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_topk_router_c16_gradient_dtypes(dtype, mode):
    logits = cases.logits("normal", 1, 16, 8, dtype)
    out, _, grad = with_gradient(logits, cotangent(logits, **MODES[mode]), **MODES[mode])
    assert out.dtype == (jnp.float32 if "aux" in mode else logits.dtype)
    assert grad.dtype == logits.dtype

    def loss(x):  # float32 on top of 16-bit weights
        return (router(x, **MODES[mode])[0].astype(jnp.float32) ** 2).sum()

    grad = jax.grad(loss)(logits)
    d_out = jnp.asarray(2 * out.astype(jnp.float32)).astype(out.dtype)
    assert_same_bits(grad, expected(logits, np.asarray(d_out), **MODES[mode])[2])


@pytest.mark.parametrize("mode", MODES)
def test_topk_router_second_order_raises(mode):
    """Right, or an error that names the op; never zeros."""

    def f(x):
        return (router(x, **MODES[mode])[0] ** 2).sum()

    inner = jax.grad(f)
    for second in (
        lambda x: jax.grad(lambda x: inner(x).sum())(x),
        lambda x: jax.jacrev(inner)(x),
        lambda x: jax.hessian(f)(x),
        lambda x: jax.jvp(inner, (x,), (x,)),
        lambda x: jax.jit(jax.jacrev(inner))(x),
        lambda x: jax.grad(lambda x: jax.checkpoint(inner)(x).sum())(x),
    ):
        with pytest.raises(NotImplementedError, match="topk_router"):
            second(L4)
    for first in (lambda x: jax.jvp(f, (x,), (x,)), jax.jacfwd(f), jax.jit(jax.jacfwd(f))):
        with pytest.raises(NotImplementedError, match="topk_router"):
            first(L4)


@pytest.mark.parametrize("mode", ["softmax", "aux_sigmoid"])
def test_topk_router_linear_in_the_cotangent(mode):
    """The gradient's derivative in the cotangent is the gradient of the tangent."""
    logits = cases.logits("normal", 1, 3, 5)
    _, vjp = jax.vjp(lambda x: router(x, **MODES[mode])[0], logits)
    d_out = cotangent(logits)
    primal, tangent = jax.jvp(lambda d: vjp(d)[0], (d_out,), (2 * d_out,))
    assert_same_bits((primal, tangent), (vjp(d_out)[0], vjp(2 * d_out)[0]))


# ---- Transformations


@pytest.fixture(scope="module")
def batch():
    """Five items of everything: logits, bias, mask, cotangent."""
    logits = np.stack([cases.logits("special", i, 12, 9) for i in range(5)])
    bias = np.stack([cases.logits("normal", 10 + i, 1, 9)[0] for i in range(5)])
    mask = np.stack([cases.random_mask(i, 12) for i in range(5)])
    return logits, bias, mask, cotangent(logits)


def biased(logits, bias, mask, d_out):
    return with_gradient(
        logits, d_out, 3, score_function="sigmoid", expert_bias=bias, valid_mask=mask
    )


def stack(items):
    return jax.tree.map(lambda *xs: np.stack(xs), *items)


@pytest.mark.parametrize("mode", MODES)
def test_topk_router_same_bits_eager_jit_and_disable_jit(mode):
    logits = cases.logits("special", 1, 50, 16)
    mask = cases.random_mask(1, 50)
    d_out = cotangent(logits, **MODES[mode])
    want = expected(logits, d_out, 4, valid_mask=mask, **MODES[mode])
    assert_same_bits(jitted(logits, d_out, 4, valid_mask=mask, **MODES[mode]), want)
    assert_same_bits(with_gradient(logits, d_out, 4, valid_mask=mask, **MODES[mode]), want)
    with jax.disable_jit():
        assert_same_bits(with_gradient(logits, d_out, 4, valid_mask=mask, **MODES[mode]), want)
        assert_same_bits(router(logits.tolist(), 4, valid_mask=mask, **MODES[mode]), want[:2])


@pytest.mark.parametrize("mapped", [m for m in itertools.product([0, 1], repeat=4) if any(m)])
def test_topk_router_d02_vmap_any_mix_of_operands(batch, mapped):
    """Weights, map and gradient with each of logits, bias, mask and cotangent batched or shared."""
    in_axes = tuple(0 if m else None for m in mapped)
    operands = [x if m else x[2] for x, m in zip(batch, mapped, strict=True)]
    run = jax.jit(biased)
    want = stack(
        [run(*(x[i] if m else x for x, m in zip(operands, mapped, strict=True))) for i in range(5)]
    )
    assert_same_bits(jax.jit(jax.vmap(biased, in_axes))(*operands), want)


@pytest.mark.parametrize("mapped", [(0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0), (1, 1, 1)])
def test_topk_router_d04_grad_of_vmap(batch, mapped):
    """A shared operand's gradient is the sum, added as JAX adds a Python loop's cotangents."""
    logits, bias, mask = (x if m else x[2] for x, m in zip(batch[:3], mapped, strict=True))
    in_axes = tuple(0 if m else None for m in mapped)
    d_out = batch[3]

    def batched(x):
        out, _ = jax.vmap(functools.partial(sigmoid_router, topk=3), in_axes)(x, bias, mask)
        return jnp.sum(out * d_out)

    def looped(x):
        total = 0.0
        for i in range(5):
            one = (y[i] if m else y for y, m in zip((x, bias, mask), mapped, strict=True))
            total = total + jnp.sum(sigmoid_router(*one, topk=3)[0] * d_out[i])
        return total

    clean = np.where(np.isfinite(logits), logits, 0).astype(np.float32)
    assert_same_bits(jax.jit(jax.grad(batched))(clean), jax.jit(jax.grad(looped))(clean))


@pytest.mark.parametrize("aux", [False, True])
def test_topk_router_d02_vmap_moved_axes(batch, aux):
    logits, bias, mask, d_out = batch

    def f(x, b, m, d):
        return with_gradient(
            x, d, 3, score_function="sigmoid", expert_bias=b, valid_mask=m, compute_aux_scores=aux
        )

    run = jax.jit(f)
    want = stack([run(*x) for x in zip(*batch, strict=True)])
    for axis in (0, 1, 2):
        moved = np.moveaxis(logits, 0, axis), bias.T, mask.T, np.moveaxis(d_out, 0, axis)
        got = jax.jit(jax.vmap(f, (axis, 1, 1, axis), out_axes=axis))(*moved)
        assert_same_bits(got, jax.tree.map(lambda x, a=axis: np.moveaxis(x, 0, a), want))


@pytest.mark.parametrize("map_format", ["bytemap", "bitmap_u8"])
def test_topk_router_d04_nested_vmap(map_format):
    logits = cases.lattice_logits(2 * 3 * 8, 16).reshape(2, 3, 8, 16)
    d_out = cotangent(logits)
    bias = cases.logits("normal", 1, 6, 16).reshape(2, 3, 16)

    def f(x, d, b):
        return with_gradient(
            x, d, 3, score_function="sigmoid", expert_bias=b, routing_map_format=map_format
        )

    run = jax.jit(f)
    want = stack(
        [stack([run(*x) for x in zip(*xs, strict=True)])
         for xs in zip(logits, d_out, bias, strict=True)]
    )  # fmt: skip
    assert_same_bits(jax.jit(jax.vmap(jax.vmap(f)))(logits, d_out, bias), want)
    # An outer axis over the logits, an inner one over the bias, and the other way round.
    x, d, b = logits[0], d_out[0], bias[0]
    crossed = jax.jit(jax.vmap(jax.vmap(f, (None, None, 0)), (0, 0, None)))(x, d, b)
    pairs = [[run(x[i], d[i], b[j]) for j in range(3)] for i in range(3)]
    assert_same_bits(crossed, stack([stack(row) for row in pairs]))
    crossed = jax.jit(jax.vmap(jax.vmap(f, (0, 0, None)), (None, None, 0)))(x, d, b)
    assert_same_bits(crossed, stack([stack(list(row)) for row in zip(*pairs, strict=True)]))


def test_topk_router_vmap_over_experts_of_leading_dimensions():
    logits = cases.logits("normal", 1, 24, 16).reshape(2, 3, 4, 16)
    want = router(logits, 3)
    for axis in (0, 1, 2):
        got = jax.vmap(lambda x: router(x, 3), in_axes=axis, out_axes=axis)(logits)
        assert_same_bits(got, want)
    got = jax.vmap(lambda x: router(x, 3))(np.zeros((0, 4, 16), np.float32))
    assert_same_bits(got, (np.zeros((0, 4, 16), np.float32), np.zeros((0, 4, 16), bool)))


@pytest.mark.parametrize("size", [1, 2, 100])
def test_topk_router_batch_size_does_not_matter(size):
    logits = cases.logits("special", 1, 17, 33)
    d_out = cotangent(logits)
    want = jitted(logits, d_out, 5)
    many = (np.broadcast_to(x, (size, *x.shape)) for x in (logits, d_out))
    got = jax.jit(jax.vmap(lambda x, d: with_gradient(x, d, 5)))(*many)
    for i in {0, size // 2, size - 1}:
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), want)


def test_topk_router_c12_remat_with_ties():
    logits = np.zeros((8, 64), np.float32)
    g = cases.logits("normal", 1, 8, 64)

    def f(x):
        weights, routing_map = router(x, 8)
        return jnp.sum(g * weights), routing_map

    plain = jax.jit(jax.value_and_grad(f, has_aux=True))(logits)
    remat = jax.jit(jax.value_and_grad(jax.checkpoint(f), has_aux=True))(logits)
    assert_same_bits(remat, plain)
    assert experts(remat[0][1]) == [[*range(8)]] * 8


@pytest.mark.parametrize("aux", [False, True])
def test_topk_router_c13_remat_policies(aux, capsys):
    logits = cases.logits("normal", 1, 8, 64)
    g = cases.logits("normal", 2, 8, 64)

    def f(x):
        out, _ = router(jnp.sin(x), 8, score_function="sigmoid", compute_aux_scores=aux)
        return jnp.sum(jnp.cos(out) * g)

    want = jax.jit(jax.grad(f))(logits)
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names(RESIDUAL_NAME)
    for policy in (
        policies.nothing_saveable,
        policies.everything_saveable,
        policies.dots_saveable,
        named,
    ):
        got = jax.jit(jax.grad(jax.checkpoint(f, policy=policy)))(logits)
        assert_same_bits(got, want)
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(f, policy=named), logits)
    printed = capsys.readouterr().out
    if not aux:  # aux scores need no map
        assert f"bool[8,64] named '{RESIDUAL_NAME}'" in printed


def test_topk_router_c14_scan_equals_unrolled():
    """Two ops in a body that captures constants, over four layers."""
    logits = cases.logits("normal", 1, 64, 16)
    mix = cases.logits("normal", 2, 64, 16)
    bias = cases.logits("normal", 3, 1, 16)[0]
    mask = cases.random_mask(1, 64)
    g = cases.logits("normal", 4, 64, 16)
    layers = np.linspace(0.5, 1.5, 4, dtype=np.float32)

    def layer(x, scale):
        x = x * scale
        weights, routing_map = router(
            x, 4, score_function="sigmoid", expert_bias=bias, valid_mask=mask
        )
        counts = jnp.sum(routing_map, axis=0, dtype=jnp.int32)
        scores, _ = router(x, 4, compute_aux_scores=True)
        # One rounding at a time, however XLA fuses it.
        x = lax.optimization_barrier(jnp.roll(weights, 1, axis=1) * mix)
        return x, (fused_moe_aux_loss(scores, counts, 4, 0.01), routing_map)

    captured = [a.copy() for a in (logits, mix, bias, mask)]
    step = jax.jit(layer)
    want, x = [], jnp.asarray(logits)
    for scale in layers:
        x, one = step(x, scale)
        want.append(one)
    run = jax.jit(lambda x: lax.scan(layer, x, layers))
    assert_same_bits(check_reproducible(run, logits, repeats=50), (x, stack(want)))
    _, vjp = jax.vjp(lambda x: lax.scan(layer, x, layers)[0], logits)
    grads = check_reproducible(jax.jit(lambda d: vjp(d)[0]), g, repeats=50)
    d = jnp.asarray(g)
    inputs, x = [], jnp.asarray(logits)
    for scale in layers:
        inputs.append((x, scale))
        x, _ = step(x, scale)
    back = jax.jit(lambda x, scale, d: jax.vjp(lambda x: layer(x, scale)[0], x)[1](d)[0])
    for one in reversed(inputs):
        d = back(*one, d)
    assert_same_bits(grads, d)
    for before, after in zip(captured, (logits, mix, bias, mask), strict=True):
        assert_same_bits(after, before)


def test_topk_router_in_cond_while_and_map():
    logits = cases.logits("normal", 1, 16, 8)
    d_out = cotangent(logits)
    want = with_gradient(logits, d_out)
    nothing = jax.tree.map(jnp.zeros_like, want)
    cond = jax.jit(
        lambda flag, x: lax.cond(flag, lambda x: with_gradient(x, d_out), lambda x: nothing, x)
    )
    assert_same_bits(cond(True, logits), want)
    assert_same_bits(cond(False, logits), nothing)

    def body(state):
        return state[0] + 1, with_gradient(logits, d_out)

    looped = jax.jit(lambda: lax.while_loop(lambda s: s[0] < 3, body, (0, nothing)))
    assert_same_bits(looped()[1], want)
    many = np.stack([logits, logits * 2])
    got = lax.map(lambda x: with_gradient(x, d_out), many)
    assert_same_bits(got, stack([with_gradient(x, d_out) for x in many]))


def test_topk_router_d13_donation():
    logits = cases.logits("normal", 1, 16, 8)
    d_out = cotangent(logits)
    want = expected(logits, d_out)
    kept = jnp.asarray(logits)
    assert_same_bits(jax.jit(with_gradient)(kept, d_out), want)
    assert_same_bits(kept, logits)
    for argument in (0, 1):
        donated = [jnp.array(logits, copy=True), jnp.array(d_out, copy=True)]
        run = jax.jit(lambda x, d: with_gradient(x, d)[1:], donate_argnums=argument)
        assert_same_bits(run(*donated), want[1:])
        assert donated[argument].is_deleted()
        assert not donated[1 - argument].is_deleted()


@no_gradient_warning
def test_topk_router_d14_x64():
    logits = cases.logits("special", 1, 16, 8)
    with jax.enable_x64(True):
        for mode in MODES.values():
            for dtype in cases.FLOAT_DTYPES.values():
                x = logits.astype(dtype)
                d_out = cotangent(x, **mode)
                options = {**mode, "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5}
                got = with_gradient(x, d_out, 2, **options)
                assert_same_bits(got, expected(x, d_out, 2, **options))
        bias = [0.0, 0.5, 0.0, 0.0]  # Python floats become float32
        got = sigmoid_router(L4, bias)
        want = reference.topk_router(
            L4, 2, score_function="sigmoid", expert_bias=np.array(bias, np.float32)
        )
        assert_same_bits(got, want)
        test_topk_router_b01_hand_case("sigmoid", 2.5, [0, 0, 1.283628477, 1.216371523])
        test_topk_router_b22_33_experts()
        test_topk_router_b24_deepseek_v3()
        test_topk_router_b16_one_expert()


def test_topk_router_debug_nans():
    logits = cases.logits("normal", 1, 16, 8)
    d_out = cotangent(logits)
    mask = np.arange(16) != 3
    poison = logits.copy()
    poison[3, 4] = np.nan
    with jax.debug_nans(True):
        assert_same_bits(with_gradient(logits, d_out), expected(logits, d_out))
        got = jitted(poison, d_out, valid_mask=mask)
        assert_same_bits(got, expected(poison, d_out, valid_mask=mask))
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(router(poison, 2))


def test_topk_router_rank_and_strict_promotion(batch):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        one = biased(*(x[0] for x in batch))
        many = jax.vmap(biased, (0, None, 0, 0))(batch[0], batch[1][0], *batch[2:])
        assert_same_bits(jax.tree.map(lambda x: x[0], many), one)
        run = functools.partial(sigmoid_router, topk=3)
        jax.grad(lambda x: jax.vmap(run, (None, 0))(x, batch[1])[0].sum())(batch[0][0])
        jax.jacrev(lambda x: router(x, compute_aux_scores=True)[0])(L4.astype(jnp.bfloat16))


def test_topk_router_outputs_are_never_weakly_typed():
    weak = jnp.broadcast_to(jnp.asarray(0.25), (4, 4))
    assert weak.weak_type
    for mode in MODES.values():
        for run in (router, jax.jit(functools.partial(router, **mode))):
            out, routing_map = run(weak, **({} if run is not router else mode))
            assert not out.weak_type
            assert not routing_map.weak_type
        out, _ = jax.vmap(lambda x, mode=mode: router(x, **mode))(weak[None])
        assert not out.weak_type
    strong = jnp.asarray(np.full((4, 4), 0.25, np.float32))
    assert_same_bits(router(weak), router(strong))
    grad = jax.grad(lambda x: router(x)[0].sum())(strong)
    assert not grad.weak_type
    weak_bias = jnp.broadcast_to(jnp.asarray(0.25), (4,))
    assert not sigmoid_router(weak, weak_bias)[0].weak_type


# ---- System


@no_gradient_warning
def test_topk_router_one_jitted_call_is_one_compilation():
    logits = jnp.asarray(cases.logits("normal", 1, 13, 7))  # a shape that no other test uses
    d_out = jnp.asarray(cotangent(logits))
    bias = jnp.zeros(7, jnp.float32)
    for fun in (
        lambda x, d, b: router(x, 3),
        lambda x, d, b: with_gradient(x, d, 3, score_function="sigmoid", expert_bias=b),
        lambda x, d, b: with_gradient(x, d, 1, compute_aux_scores=True),
        lambda x, d, b: jax.vmap(lambda x: router(x, 3))(x[None]),
        lambda x, d, b: jax.jacrev(lambda x: router(x, 3)[0])(x),
    ):
        run = jax.jit(fun)
        with count_compilations() as events:
            jax.block_until_ready(run(logits, d_out, bias))
        assert len(events) == 1
        with count_compilations() as events:
            jax.block_until_ready(run(logits, d_out, bias))
        assert not events


def test_topk_router_repeated_eager_call_compiles_nothing():
    logits = jnp.asarray(cases.logits("normal", 1, 11, 7))
    d_out = jnp.asarray(cotangent(logits))
    bias = jnp.zeros(7, jnp.float32)
    mask = jnp.asarray(cases.random_mask(1, 11))

    def everything():
        router(logits, 3)
        router(logits, 3, scaling_factor=2, routing_map_format="bitmap_u8")
        sigmoid_router(logits, bias, mask)
        with_gradient(logits, d_out, 3)
        with_gradient(logits, d_out, 3, compute_aux_scores=True, valid_mask=mask)
        jax.vmap(lambda x: router(x, 3))(logits[None])
        jax.vmap(sigmoid_router, (None, 0, None))(logits, bias[None], mask)

    with count_compilations() as events:
        everything()
    assert events
    with count_compilations() as events:
        everything()
    assert not events


def test_topk_router_d21_changing_inputs():
    """One compiled function: nothing is frozen into it, nothing stays behind."""
    for i in range(20):
        logits = cases.logits(["special", "tied", "normal"][i % 3], i, 40, 16)
        options = {
            "expert_bias": cases.logits("normal", i, 1, 16)[0],
            "valid_mask": cases.random_mask(i, 40),
        }
        check(logits, 4, i, score_function="sigmoid", num_groups=4, group_topk=2, **options)


def test_topk_router_d23_threads():
    inputs = [(x := cases.logits("special", i, 256, 16), cotangent(x, i)) for i in range(8)]
    want = [expected(*x) for x in inputs]
    run = jax.jit(with_gradient)
    run(*inputs[0])
    barrier = threading.Barrier(8)

    def work(i):
        barrier.wait()
        for _ in range(200):
            assert_same_bits(run(*inputs[i]), want[i])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_topk_router_d25_two_routers_in_one_program():
    a, b = cases.logits("normal", 1, 64, 16), cases.logits("special", 2, 70, 33)

    def both(a, b):
        return (
            router(a, 4),
            router(b, 5, score_function="sigmoid"),
            router(a, 4),
            router(a, 4, use_pre_softmax=True),
            router(a, 4, compute_aux_scores=True),
        )

    assert_same_bits(check_reproducible(jax.jit(both), a, b, repeats=20), both(a, b))


def process_inputs():
    logits = cases.lattice_logits(512, 256)
    return logits, np.float32(1) / (np.float32(5) + logits)


PROCESS = """
    import jax
    import numpy as np
    import cases
    from jax_moe_det import fused_topk_with_score_function
    from jax_moe_det.testing import fingerprint

    @jax.jit
    def run(x, d):
        f = lambda x: fused_topk_with_score_function(x, 8, score_function="sigmoid")
        out, vjp, routing_map = jax.vjp(f, x, has_aux=True)
        return out, routing_map, vjp(d)[0]

    logits = cases.lattice_logits(512, 256)
    print(fingerprint(run(logits, np.float32(1) / (np.float32(5) + logits))))
"""


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--xla_gpu_deterministic_ops=true --xla_gpu_exclude_nondeterministic_ops=true",
        "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    ],
    ids=["default", "exclude", "one_thread"],
)
def test_topk_router_d30_processes_and_flags(run_python, flags):
    want = fingerprint(expected(*process_inputs(), 8, score_function="sigmoid"))
    assert run_python(PROCESS, env={"XLA_FLAGS": flags}) == want


TARGETS = ("jax_moe_det.topk_router_fwd", "jax_moe_det.topk_router_bwd")
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(t) for t in TARGETS]


def test_topk_router_d19_export_round_trip(run_python, tmp_path):
    logits, d_out = process_inputs()
    platform = jax.default_backend()
    exported = jax.export.export(
        jax.jit(lambda x, d: with_gradient(x, d, 8)),
        platforms=["cuda" if platform == "gpu" else platform],
        disabled_checks=CHECKS,
    )(logits, d_out)
    path = tmp_path / "exported"
    path.write_bytes(exported.serialize(vjp_order=0))
    program = """
        import pathlib
        import sys
        import jax
        import numpy as np
        import cases
        import jax_moe_det
        from jax_moe_det.testing import fingerprint

        exported = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
        logits = cases.lattice_logits(512, 256)
        print(fingerprint(exported.call(logits, np.float32(1) / (np.float32(5) + logits))))
    """
    assert run_python(program, str(path)) == fingerprint(expected(logits, d_out, 8))


def test_topk_router_d19_export_of_the_derivative():
    exported = jax.export.export(
        jax.jit(lambda x: router(x, score_function="sigmoid")[0]), disabled_checks=CHECKS
    )(L4)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    grad = jax.grad(lambda x: (again.call(x) * D4).sum())(L4)
    assert_same_bits(grad, expected(L4, D4, score_function="sigmoid")[2])
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility") as e:
        jax.export.export(jax.jit(router))(L4)
    assert TARGETS[0] in str(e.value)


def test_topk_router_d20_lowers_for_cuda_without_a_gpu(run_python):
    program = """
        import sys
        import jax
        import jax.numpy as jnp
        from jax import export
        from jax_moe_det import fused_topk_with_score_function

        assert jax.default_backend() == "cpu"

        def run(x, d, b, m):
            out, vjp, routing_map = jax.vjp(lambda x: fused_topk_with_score_function(
                x, 2, score_function="sigmoid", expert_bias=b, valid_mask=m), x, has_aux=True)
            return out, routing_map, vjp(d)

        args = [jax.ShapeDtypeStruct(s, d) for s, d in (
            ((64, 8), jnp.bfloat16), ((64, 8), jnp.bfloat16), ((8,), jnp.float32), ((64,), bool))]
        lowered = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",))
        checks = [export.DisabledSafetyCheck.custom_call(t) for t in sys.argv[1:]]
        exported = export.export(
            jax.jit(run), platforms=["cuda", "cpu"], disabled_checks=checks)(*args)
        assert "cpu" not in lowered.as_text().lower()
        for text in (lowered.as_text(), exported.mlir_module()):
            assert all(text.count("@" + t + "(") == 1 for t in sys.argv[1:]), text
            assert text.count("stablehlo.custom_call @") == len(sys.argv[1:]), text
        print("done")
    """
    assert run_python(program, *TARGETS, env={"JAX_PLATFORMS": "cpu"}) == "done"


# Every attribute that a handler binds.
ATTRIBUTES = {
    "topk_router_fwd": {
        "score_kind", "aux_scores", "topk", "num_groups", "group_topk", "group_values",
        "scaling_factor", "eps",
    },
    "topk_router_bwd": {"score_kind", "aux_scores", "topk", "scaling_factor", "eps"},
}  # fmt: skip


def test_topk_router_attributes_are_those_the_handlers_bind():
    text = jax.jit(with_gradient).lower(L4, D4).as_text()
    found = {}
    for line in text.splitlines():
        target = re.search(r"@jax_moe_det\.(\w+)", line)
        config = re.search(r"backend_config ?= ?\{([^}]*)\}", line)
        if target and config:
            found[target[1]] = set(re.findall(r"(\w+) = ", config[1]))
    assert found == ATTRIBUTES


def raw(target, operands, **changed):
    """A handler's own call; the batch dimension leads."""
    attributes = {
        "score_kind": np.int64(2), "aux_scores": np.bool_(False), "topk": np.int64(2),
        "scaling_factor": np.float32(1), "eps": np.float32(1e-20), "num_groups": np.int64(1),
        "group_topk": np.int64(1), "group_values": np.int64(1),
    }  # fmt: skip
    attributes = {k: v for k, v in attributes.items() if k in ATTRIBUTES[target]} | changed
    attributes = {k: v for k, v in attributes.items() if v is not None}
    out = jax.ShapeDtypeStruct((1, 1, 4), jnp.float32)
    results = [out, jax.ShapeDtypeStruct((1, 1, 4), jnp.bool_)] if "fwd" in target else out
    call = jax.ffi.ffi_call(f"jax_moe_det.{target}", results)
    return jax.block_until_ready(call(*operands, **attributes))


def raw_operands(target):
    if target == "topk_router_fwd":
        return (L4[None],)
    return L4[None], D4[None], np.array([[[False, False, True, True]]])


@pytest.mark.parametrize("target", ATTRIBUTES)
def test_topk_router_handlers_bind_no_more_and_no_less(target):
    operands = raw_operands(target)
    want = with_gradient(L4, D4, score_function="sigmoid")
    got = raw(target, operands)
    got = jax.tree.map(lambda x: x[0], got)
    assert_same_bits(got, list(want[:2]) if target == "topk_router_fwd" else want[2])
    wrong = [{name: None} for name in ATTRIBUTES[target]]
    for changed in [*wrong, {"extra": np.int64(1)}]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"attribute|Attribute"):
            raw(target, operands, **changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"topk": np.int64(5)}, ["topk", "5", "1 to 4"]),
        ({"topk": np.int64(0)}, ["topk", "0", "1 to 4"]),
        ({"score_kind": np.int64(4)}, ["score_kind", "4", "0 to 3"]),
        ({"score_kind": np.int64(-1)}, ["score_kind", "-1"]),
        ({"score_kind": np.int64(0), "aux_scores": np.bool_(True)}, ["score_kind", "aux"]),
        ({"num_groups": np.int64(3)}, ["num_groups", "3", "divisor of 4"]),
        ({"num_groups": np.int64(0)}, ["num_groups", "0"]),
        ({"num_groups": np.int64(4), "group_topk": np.int64(1)}, ["group_topk", "1", "2 to 4"]),
        ({"group_values": np.int64(5)}, ["group_values", "5"]),
        ({"eps": np.float32(-1)}, ["eps", "-1"]),
        ({"eps": np.float32(np.nan)}, ["eps", "nan"]),
        ({"scaling_factor": np.float32(np.inf)}, ["scaling_factor", "inf"]),
    ],
)
def test_topk_router_raw_call_checks_attributes(changed, words):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as error:
        raw("topk_router_fwd", (L4[None],), **changed)
    assert all(word in str(error.value) for word in ["topk_router_fwd", *words]), error.value


# ---- Messages: the argument, what was given, what is allowed. At trace time, eager and in jit.


def under_jit(function):
    return jax.jit(function)()


@pytest.mark.parametrize("run", [lambda f: f(), under_jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("changed", "exception", "words"),
    [
        # D17
        ({"logits": np.ones((4, 4), np.int8)}, TypeError, ["logits", "int8", "bfloat16"]),
        ({"logits": np.ones((4, 4), np.complex64)}, TypeError, ["logits", "complex64"]),
        ({"logits": np.ones((4, 4), bool)}, TypeError, ["logits", "bool", "float32"]),
        ({"logits": np.ones(4, np.float32)}, ValueError, ["logits", "(4,)", "2 dimensions"]),
        ({"logits": np.float32(1)}, ValueError, ["logits", "()", "2 dimensions"]),
        ({"logits": np.ones((4, 0), np.float32)}, ValueError, ["logits", "(4, 0)", "8192"]),
        ({"logits": np.ones((1, 8193), np.float32)}, ValueError, ["logits", "8193", "8192"]),
        ({"topk": 0}, ValueError, ["topk", "0", "1 to 4"]),
        ({"topk": 5}, ValueError, ["topk", "5", "1 to 4"]),
        ({"topk": -1}, ValueError, ["topk", "-1"]),
        ({"topk": 2.0}, TypeError, ["topk", "2.0", "integer"]),
        ({"topk": True}, TypeError, ["topk", "True", "integer"]),
        ({"topk": None}, TypeError, ["topk", "None", "integer"]),
        ({"use_pre_softmax": 1}, TypeError, ["use_pre_softmax", "1", "True or False"]),
        ({"compute_aux_scores": "no"}, TypeError, ["compute_aux_scores", "'no'"]),
        ({"scaling_factor": "1"}, TypeError, ["scaling_factor", "'1'", "number"]),
        ({"scaling_factor": np.inf}, ValueError, ["scaling_factor", "inf", "finite"]),
        ({"scaling_factor": np.nan}, ValueError, ["scaling_factor", "nan", "finite"]),
        ({"scaling_factor": 1e39}, ValueError, ["scaling_factor", "1e+39", "float32"]),
        ({"scaling_factor": None}, TypeError, ["scaling_factor", "None"]),
        ({"eps": -1e-9}, ValueError, ["eps", "-1e-09", ">= 0"]),
        ({"eps": np.nan}, ValueError, ["eps", "nan"]),
        ({"eps": 1j}, TypeError, ["eps", "1j", "number"]),
        ({"score_function": "relu"}, ValueError, ["score_function", "'relu'", "sqrtsoftplus"]),
        ({"score_function": 3}, ValueError, ["score_function", "3", "sigmoid"]),
        ({"score_function": None}, TypeError, ["score_function", "None", "softmax"]),
        ({"score_function": True}, TypeError, ["score_function", "True"]),
        ({"routing_map_format": "bits"}, ValueError, ["routing_map_format", "'bits'", "bytemap"]),
        ({"routing_map_format": 2}, ValueError, ["routing_map_format", "2", "bitmap_u8"]),
        ({"group_score": "mean"}, ValueError, ["group_score", "'mean'", "top2"]),
        ({"group_score": None}, TypeError, ["group_score", "None", "sum"]),
        ({"expert_bias": np.zeros(5, np.float32)}, ValueError, ["expert_bias", "(5,)", "(4,)"]),
        ({"expert_bias": np.zeros((1, 4), np.float32)}, ValueError, ["expert_bias", "(1, 4)"]),
        ({"expert_bias": np.zeros(4, jnp.bfloat16)}, TypeError, ["expert_bias", "bfloat16"]),
        ({"expert_bias": np.zeros(4, np.int32)}, TypeError, ["expert_bias", "int32", "float32"]),
        ({"valid_mask": np.ones(4, int)}, TypeError, ["valid_mask", "int", "bool"]),
        ({"valid_mask": np.ones(3, bool)}, ValueError, ["valid_mask", "(3,)", "(4,)"]),
        ({"valid_mask": np.ones((4, 4), bool)}, ValueError, ["valid_mask", "(4, 4)", "(4,)"]),
        # Groups
        ({"num_groups": 2}, ValueError, ["num_groups and group_topk", "2 and -1", "both"]),
        ({"group_topk": 2}, ValueError, ["num_groups and group_topk", "-1 and 2", "both"]),
        ({"num_groups": 3, "group_topk": 1}, ValueError, ["num_groups", "3", "4"]),
        ({"num_groups": 0, "group_topk": 1}, ValueError, ["num_groups", "0"]),
        ({"num_groups": 8, "group_topk": 1}, ValueError, ["num_groups", "8", "4"]),
        ({"num_groups": 2, "group_topk": 3}, ValueError, ["group_topk", "3", "1 to 2"]),
        ({"num_groups": 2, "group_topk": 0}, ValueError, ["group_topk", "0", "1 to 2"]),
        ({"num_groups": -2, "group_topk": 1}, ValueError, ["num_groups", "-2"]),
        ({"num_groups": 2.0, "group_topk": 1}, TypeError, ["num_groups", "2.0"]),
        (
            {"num_groups": 4, "group_topk": 1, "group_score": "max"},
            ValueError,
            ["group_topk", "1", "2"],
        ),
        (
            {"topk": 3, "num_groups": 2, "group_topk": 2},
            ValueError,
            ["group_topk", "2", "3", "sum"],
        ),
        # B29
        (
            {"logits": np.ones((2, 10), np.float32), "num_groups": 4, "group_topk": 2},
            ValueError,
            ["num_groups", "4", "10"],
        ),
    ],
)
def test_topk_router_b29_d17_messages(changed, exception, words, run):
    arguments = {"logits": np.ones((4, 4), np.float32), "topk": 2, **changed}
    for aux in (False, True):  # what aux scores do not use is checked too
        with pytest.raises(exception) as error:
            run(lambda aux=aux: router(**{"compute_aux_scores": aux, **arguments}))
        message = str(error.value)
        assert message.startswith(words[0])
        assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topk", 2), ("scaling_factor", 1.0), ("eps", 0.5), ("num_groups", 2), ("group_topk", 1),
        ("use_pre_softmax", True), ("compute_aux_scores", True), ("score_function", 1),
        ("routing_map_format", 0),
    ],
)  # fmt: skip
def test_topk_router_traced_statics(name, value):
    value = jnp.asarray(value)
    with pytest.raises(TypeError, match=f"{name}: got a traced value.*{name} is static"):
        jax.jit(lambda v: router(**{"logits": L4, "topk": 2, name: v}))(value)
    with pytest.raises(TypeError, match=f"{name}: got a jax.Array.*{name} is static"):
        router(**{"logits": L4, "topk": 2, name: value})


def test_topk_router_d16_float64():
    logits = L4.astype(np.float64)
    # Without x64 a NumPy float64 is cast, as JAX does everywhere.
    assert_same_bits(router(logits), router(L4))
    with jax.enable_x64(True):
        for given in (logits, jnp.asarray(logits)):
            with pytest.raises(TypeError, match=r"logits.*float64.*float32, bfloat16, float16"):
                router(given)
            with pytest.raises(TypeError, match=r"logits.*float64"):
                jax.jit(router)(given)
        with pytest.raises(TypeError, match=r"expert_bias.*float64"):
            sigmoid_router(L4, jnp.zeros(4, jnp.float64))


# ---- What only a GPU can show


def on_device(platform, function, *arguments):
    return jax.jit(function)(*jax.device_put(arguments, jax.devices(platform)[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", cases.SHAPES[:5], ids=str)
def test_topk_router_gpu_equals_cpu(shape, mode, dtype):
    logits = np.concatenate(
        [
            cases.logits(kind, i, shape.num_tokens // 16, shape.num_experts, dtype)
            for i, kind in enumerate(("normal", "special", "tied", "tails"))
        ]
    )
    mask = cases.random_mask(1, len(logits))
    d_out = cotangent(logits, **MODES[mode])

    def run(x, d, m):
        plain = with_gradient(x, d, shape.topk, **MODES[mode])
        return plain, with_gradient(x, d, shape.topk, valid_mask=m, **MODES[mode])

    gpu = on_device("cuda", run, logits, d_out, mask)
    assert_same_bits(gpu, on_device("cpu", run, logits, d_out, mask))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["softmax", "sigmoid", "aux_softmax"])
def test_topk_router_gpu_one_bit_pattern(mode):
    device = jax.devices("cuda")[0]
    logits = cases.logits("normal", 1, 4096, 256)
    d_out = cotangent(logits)
    run = jax.jit(lambda x, d: with_gradient(x, d, 8, **MODES[mode]))
    operands = jax.device_put((logits, d_out), device)
    first = [jnp.asarray(x) for x in run(*operands)]

    @jax.jit
    def same(a, b):  # of every bit, where they are
        def as_integers(x):
            return x if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, jnp.uint32)

        pairs = zip(a, b, strict=True)
        return jnp.array([jnp.all(as_integers(x) == as_integers(y)) for x, y in pairs])

    assert all(bool(same(first, run(*operands)).all()) for _ in range(1000))
    assert_same_bits(tuple(first), on_device("cpu", run, logits, d_out))
    changed = operands[0].at[7, 7].set(100)  # the comparison can fail
    assert not same(first, run(changed, operands[1])).all()


@pytest.mark.gpu
def test_topk_router_gpu_same_bits_beside_other_work():
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
        for num_tokens, num_experts in ((1024, 64), (2048, 256), (700, 33)):
            logits = cases.logits("special", 1, num_tokens, num_experts)
            operands = jax.device_put((logits, cotangent(logits)), device)
            run = jax.jit(lambda x, d: with_gradient(x, d, 8))
            first = check_reproducible(run, *operands, repeats=50)
            assert_same_bits(first, on_device("cpu", run, *operands))
    finally:
        stop.set()
        thread.join()


REPLAY = """
    import hashlib
    import sys
    import jax
    import cases
    from jax_moe_det import fused_topk_with_score_function
    from jax_moe_det.testing import fingerprint

    @jax.jit
    def run(x, d, bias, mask):
        def one(x, d, **options):
            f = lambda x: fused_topk_with_score_function(x, 4, **options)
            out, vjp, routing_map = jax.vjp(f, x, has_aux=True)
            return out, routing_map, vjp(d)[0]
        # Several of ours in one program, so that there is a graph to capture.
        return one(x, d), one(x, d, compute_aux_scores=True), one(
            x, d, score_function="sigmoid", expert_bias=bias, valid_mask=mask)

    device = jax.devices(sys.argv[1])[0]
    digest = hashlib.sha256()
    for i in range(20):
        inputs = (cases.logits(["normal", "special"][i % 2], i, 500, 64),
                  cases.logits("normal", 100 + i, 500, 64),
                  cases.logits("normal", 200 + i, 1, 64)[0], cases.random_mask(i, 500))
        digest.update(fingerprint(run(*jax.device_put(inputs, device))).encode())
    print(digest.hexdigest())
"""


@pytest.mark.gpu
def test_topk_router_d21_gpu_command_buffers(run_python):
    """Twenty replays with other inputs: the CPU's bits, captured or not."""
    want = run_python(REPLAY, "cpu")
    for flags in (
        "",
        "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_graph_min_graph_size=1",
    ):
        assert run_python(REPLAY, "cuda", env={"XLA_FLAGS": flags}) == want, flags


@pytest.mark.gpu
def test_topk_router_b46_gpu_above_2_to_31_elements():
    """Rows past 2^31 elements are those of a small call, forward and backward."""
    num_tokens, num_experts = 932100, 2304
    assert num_tokens * num_experts > 2**31
    device = jax.devices("cuda")[0]
    small = jax.device_put(cases.lattice_logits(4096, num_experts).astype(jnp.bfloat16), device)
    d_small = jnp.flip(small, axis=1)
    want = jax.jit(lambda x, d: with_gradient(x, d, 8))(small, d_small)

    @jax.jit
    def run(x, d):
        rows = jnp.arange(num_tokens) % 4096
        x, d = lax.optimization_barrier((x[rows], d[rows]))
        results = with_gradient(x, d, 8)
        return [y[-64:] for y in results], [y[:64] for y in results]

    last, first = run(small, d_small)
    rows = np.arange(num_tokens - 64, num_tokens) % 4096
    assert_same_bits(tuple(last), jax.tree.map(lambda x: np.asarray(x)[rows], want))
    assert_same_bits(tuple(first), jax.tree.map(lambda x: np.asarray(x)[:64], want))
