"""The router step: values, bits, the joint gradient, transformations, messages; statistics too.

Bits are compared exactly (`assert_same_bits`). Closeness to float64 is a separate test, with the
error model beside it. Names and docstrings carry the number of the case they come from. What the
router alone decides (selection, weights) is tested in test_topk_router.py; here it is tested that
`route` has those bits.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
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
    Routing,
    RoutingStats,
    ScoreFunction,
    _ffi,
    aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    reference,
    route,
    routing_stats,
    update_expert_bias,
)
from jax_moe_det.route import RESIDUAL_NAME
from jax_moe_det.testing import assert_same_bits, check_reproducible, fingerprint

L4 = np.array([[0.3, -0.2, 1.1, 0.9]], np.float32)
D2 = np.array([[4, 3]], np.float32)  # of experts 3 and 2 the cotangents of case C01, by choice

# Everything that has its own arithmetic.
MODES = {
    "softmax": {"score_function": "softmax"},
    "pre_softmax": {"score_function": "softmax", "use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
}
BOTH = {"aux_loss_coeff": 0.01, "z_loss_coeff": 0.001}
BIG = {"aux_loss_coeff": 10.0, "z_loss_coeff": 1.0}  # gradients as large as those of the weights
D_AUX, D_Z = 0.75, 1.25
no_gradient_warning = pytest.mark.filterwarnings("ignore:.*over one chosen expert:UserWarning")


def step(logits, d_weights, topk=2, **options):
    """The routing, and the gradient of logits for cotangents of weights and both losses."""

    def f(x):
        out = route(x, topk, **options)
        return (out.weights, out.aux_loss, out.z_loss), out

    _, vjp, out = jax.vjp(f, jnp.asarray(logits), has_aux=True)
    return out, vjp((jnp.asarray(d_weights), jnp.float32(D_AUX), jnp.float32(D_Z)))[0]


def expected_grad(logits, topk, out, *cotangents, **options):
    """The reference's gradient for a routing."""
    options = {name: x for name, x in options.items() if name != "indices"}
    return reference.route_grad(logits, topk, out.indices, *cotangents, **options)


def expected(logits, d_weights, topk=2, **options):
    """`step` from the reference."""
    out = Routing(*reference.route(logits, topk, **options))
    return out, expected_grad(logits, topk, out, d_weights, D_AUX, D_Z, **options)


@functools.cache
def compiled(topk, statics):
    return jax.jit(lambda x, d, arrays: step(x, d, topk, **dict(statics), **arrays))


ARRAYS = ("expert_bias", "valid_mask", "indices")


def jitted(logits, d_weights, topk=2, **options):
    """`step` in one compiled program, shared by equal static arguments."""
    arrays = {name: options.pop(name, None) for name in ARRAYS}
    return compiled(topk, tuple(options.items()))(logits, d_weights, arrays)


def cotangent(logits, topk=2, seed=0, kind="normal"):
    """Of the weights."""
    num_tokens = logits.size // logits.shape[-1] if logits.size else 0
    flat = cases.logits(kind, seed + 77, num_tokens, topk, logits.dtype.name)
    return flat.reshape(*logits.shape[:-1], topk)


def check(logits, topk=2, seed=0, **options):
    """Public function under jit, with its gradient, against the reference."""
    d_weights = cotangent(logits, topk, seed)
    assert_same_bits(
        jitted(logits, d_weights, topk, **options), expected(logits, d_weights, topk, **options)
    )


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def float32(x):
    return np.asarray(x).astype(np.float32)


def zeros_like(x):
    return np.zeros(x.shape, x.dtype)


def stack(items):
    return jax.tree.map(lambda *xs: np.stack(xs), *items)


def random_indices(seed, num_tokens, num_experts, topk):
    """Choices to replay: some repeat an expert, and some name none."""
    rng = np.random.default_rng(seed)
    return rng.integers(-1, num_experts + 1, (num_tokens, topk)).astype(np.int32)


# ---- Values


def test_route_b47_given_indices():
    """Weights of the given experts, in the given order; gradient at them alone."""
    out, grad = step(L4, D2, score_function="sigmoid", indices=np.array([[1, 3]]), scaling_factor=1)
    # Float64's; the case's [.387697, .612303] are 4e-6 off.
    np.testing.assert_allclose(out.weights, [[0.387701325, 0.612298675]], rtol=1e-6)
    assert out.indices.tolist() == [[1, 3]]
    assert out.tokens_per_expert.tolist() == [0, 1, 0, 1]
    assert (np.asarray(grad) != 0).tolist() == [[False, True, False, True]]
    swapped, grad2 = step(L4, D2[:, ::-1], score_function="sigmoid", indices=np.array([[3, 1]]))
    assert_same_bits(swapped.weights, np.asarray(out.weights)[:, ::-1])
    np.testing.assert_allclose(grad2, grad, rtol=1e-6)


def test_route_b22_b24_b26_b27_order_of_the_choice():
    """The experts of a token come out in descending order; what else those cases know."""
    logits = cases.lattice_logits(37, 33)
    out = to_numpy(route(logits, 5, aux_loss_coeff=0.01))
    assert out.indices[0].tolist() == [19, 12, 31, 5, 24]
    assert out.indices[36].tolist() == [10, 29, 3, 22, 15]
    np.testing.assert_allclose(
        out.weights[0, :3], [0.314164235, 0.215921710, 0.190550240], rtol=1e-6
    )
    counts = out.tokens_per_expert
    assert counts[:6].tolist() == [6, 6, 5, 6, 5, 6]
    assert (counts.max(), counts.argmax()) == (7, 10)
    np.testing.assert_allclose(out.aux_loss, 0.010081852, rtol=1e-6)

    out = to_numpy(
        route(cases.lattice_logits(19, 512), 10, use_pre_softmax=True, aux_loss_coeff=0.01)
    )
    assert out.indices[0].tolist() == [83, 166, 249, 332, 415, 498, 69, 152, 235, 318]
    np.testing.assert_allclose(out.weights[0, 0], 0.015508766, rtol=1e-6)
    np.testing.assert_allclose(out.aux_loss, 0.018077384, rtol=1e-6)

    out = to_numpy(route(cases.lattice_logits(33, 2304), 36, score_function="sigmoid"))
    assert out.indices[0, :4].tolist() == [1107, 2214, 332, 1439]
    assert out.indices[32, :4].tolist() == [1651, 876, 1983, 101]
    np.testing.assert_allclose(out.weights[0, 0], 0.027809900, rtol=1e-6)
    counts = out.tokens_per_expert
    assert (counts.max(), counts.argmax()) == (7, 1651)


def deepseek_v3(**options):
    """Case B24's input."""
    bias = (0.03125 * (np.arange(256) % 5)).astype(np.float32)
    return to_numpy(
        route(
            cases.lattice_logits(64, 256), 8, num_groups=8, group_topk=4, scaling_factor=2.5,
            score_function="sigmoid", expert_bias=bias, group_score="top2", **options,
        )
    )  # fmt: skip


def test_route_b24_f07_loss_map():
    """Counts of the loss: the router's, or of the aux scores without bias and groups."""
    out = deepseek_v3()
    assert out.indices[0].tolist() == [249, 159, 69, 34, 83, 89, 228, 138]
    assert out.indices[63].tolist() == [244, 154, 64, 209, 78, 84, 223, 133]
    np.testing.assert_allclose(out.weights[0, 0], 0.315083266, rtol=1e-6)
    counts = out.tokens_per_expert
    assert (counts.max(), counts.argmax()) == (10, 24)

    scores, plain_map = fused_topk_with_score_function(
        cases.lattice_logits(64, 256), 8, score_function="sigmoid", compute_aux_scores=True
    )
    plain = np.asarray(plain_map).sum(0, dtype=np.int32)
    assert plain[:6].tolist() == [2, 1, 2, 3, 2, 2]
    for loss_map, loss_counts in (("dispatch", counts), ("plain", plain), ("PLAIN", plain)):
        got = deepseek_v3(loss_map=loss_map, aux_loss_coeff=0.01)
        assert_same_bits(got.aux_loss, fused_moe_aux_loss(scores, loss_counts, 8, 0.01))
        assert_same_bits(dataclasses.replace(got, aux_loss=out.aux_loss), out)
    np.testing.assert_allclose(got.aux_loss, 0.010023229, rtol=1e-6)


def test_route_f06_z_loss():
    """The square of logsumexp, mean over valid rows; 0 for none."""
    row = np.array([0.5, 2, -1, 2, 0], np.float32)
    logits = np.stack([row, row + 1, row])
    coeff = {"z_loss_coeff": 1.0}
    np.testing.assert_allclose(route(logits[:1], 2, **coeff).z_loss, 8.288073188, rtol=1e-6)
    second = (np.sqrt(8.288073188) + 1) ** 2
    got = route(logits, 2, **coeff).z_loss
    np.testing.assert_allclose(got, (2 * 8.288073188 + second) / 3, rtol=1e-6)
    mask = np.array([True, False, True])
    got = route(logits, 2, valid_mask=mask, **coeff).z_loss
    np.testing.assert_allclose(got, 8.288073188, rtol=1e-6)
    none = np.zeros(3, bool)
    assert_same_bits(route(logits, 2, valid_mask=none, **coeff).z_loss, np.float32(0))
    # N of the whole: shards and micro-batches add up.
    parts = [route(x, 2, total_num_tokens=3, **coeff).z_loss for x in (logits[:1], logits[1:])]
    np.testing.assert_allclose(sum(parts), route(logits, 2, **coeff).z_loss, rtol=1e-6)


def test_route_f05_a08_padding():
    """Counts [2, 2, 1, 1] of the choice of three valid tokens, and their loss."""
    logits = np.log(cases.P4)
    given = {
        "indices": np.array([[0, 1], [1, 0], [2, 3], [3, 2]], np.int32),
        "valid_mask": np.array([1, 1, 1, 0], bool),
        "aux_loss_coeff": 0.01,
    }
    out, grad = step(logits, cotangent(logits), **given)
    assert out.tokens_per_expert.tolist() == [2, 2, 1, 1]
    assert int(out.tokens_per_expert.sum()) == 6
    np.testing.assert_allclose(out.aux_loss, 0.0111111111, rtol=1e-6)
    assert out.indices.tolist() == [[0, 1], [1, 0], [2, 3], [4, 4]]
    assert_same_bits((out.weights[3], grad[3]), (np.zeros(2, np.float32), zeros_like(L4[0])))
    # A01: all four tokens, as a softmax of their probabilities' logarithms.
    whole = {"indices": np.array([[0, 1], [0, 1], [0, 2], [2, 3]]), "aux_loss_coeff": 0.01}
    out = route(logits, 2, **whole)
    assert out.tokens_per_expert.tolist() == cases.COUNTS4.tolist()
    np.testing.assert_allclose(out.aux_loss, 0.01075, rtol=1e-6)


def test_route_b10_nan_row_makes_the_losses_nan():
    """It counts k experts; masked away, it does nothing."""
    logits = cases.logits("normal", 1, 6, 8)
    want = route(logits, 2, valid_mask=np.arange(6) != 4, **BOTH)
    nan = np.float32(np.nan)
    for value in (np.nan, np.inf):  # an infinite maximum makes the softmax NaN
        dirty = logits.copy()
        dirty[4, 3] = value
        out = route(dirty, 2, **BOTH)
        assert_same_bits((out.aux_loss, out.z_loss), (nan, nan))
        assert int(out.tokens_per_expert.sum()) == 12
        assert_same_bits(route(dirty, 2, valid_mask=np.arange(6) != 4, **BOTH), want)


@pytest.mark.parametrize("mode", MODES)
def test_route_a10_no_valid_token(mode):
    """Losses +0 and gradient +0, whatever the tokens hold."""
    logits = cases.logits("special", 1, 12, 9)
    mask = np.zeros(12, bool)
    out, grad = step(logits, cotangent(logits, 3), 3, valid_mask=mask, **BOTH, **MODES[mode])
    want = Routing(
        np.zeros((12, 3), np.float32), np.full((12, 3), 9, np.int32), np.zeros(9, np.int32),
        np.float32(0), np.float32(0),
    )  # fmt: skip
    assert_same_bits((out, grad), (want, zeros_like(logits)))


@pytest.mark.parametrize("lead", [(0,), (0, 3), (2, 0)])
def test_route_a11_no_rows(lead):
    logits = np.zeros((*lead, 9), jnp.bfloat16)
    d_weights = np.zeros((*lead, 3), logits.dtype)
    want = Routing(
        d_weights, np.zeros((*lead, 3), np.int32), np.zeros(9, np.int32), np.float32(0),
        np.float32(0),
    )  # fmt: skip
    everything = {
        "valid_mask": np.zeros(lead, bool), "indices": np.zeros((*lead, 3), int),
        "loss_map": "plain",
    }  # fmt: skip
    for mode in MODES.values():
        for options in ({}, everything, {"total_num_tokens": 5}):
            got = step(logits, d_weights, 3, **BOTH, **options, **mode)
            assert_same_bits(got, (want, logits))


def test_route_is_a_pytree_and_frozen():
    out = route(L4, 2)
    assert [f.name for f in dataclasses.fields(out)] == [
        "weights", "indices", "tokens_per_expert", "aux_loss", "z_loss",
    ]  # fmt: skip
    assert [x.shape for x in jax.tree.leaves(out)] == [(1, 2), (1, 2), (4,), (), ()]
    assert [x.dtype.name for x in jax.tree.leaves(out)] == [
        "float32", "int32", "int32", "float32", "float32",
    ]  # fmt: skip
    assert isinstance(jax.jit(lambda x: route(x, 2))(L4), Routing)
    with pytest.raises(dataclasses.FrozenInstanceError):
        out.weights = None


@no_gradient_warning
def test_route_b16_b17_one_expert_and_every_expert():
    for mode in MODES.values():
        check(np.array([[0.7], [-3]], np.float32), 1, **mode, **BIG)
        check(cases.logits("normal", 1, 5, 4), 4, **mode, **BIG)
    out = route(np.array([[0.7], [-3]], np.float32), 1, score_function="sigmoid")
    np.testing.assert_allclose(out.weights, [[0.668187772], [0.047425873]], rtol=1e-6)


def test_route_b19_softmax_over_one_expert_warns():
    """At trace time, once, at the caller's line; not where the weights have a gradient."""
    run = jax.jit(lambda x: route(x, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(L4)
        run(L4 + 1)
    (warning,) = caught
    assert warning.category is UserWarning
    assert re.search(r"^route: .*no gradient.*use_pre_softmax", str(warning.message))
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        route(L4, 1, use_pre_softmax=True)
        route(L4, 1, score_function="sigmoid")
        route(L4, 2)


# ---- The bits of the other operations


@no_gradient_warning
@pytest.mark.parametrize("kind", ["normal", "special", "tied"])
@pytest.mark.parametrize("mode", MODES)
def test_route_has_the_bits_of_the_other_operations(mode, kind):
    """Weights and choice of the router; the loss of the aux scores and the same counts."""
    mask = cases.random_mask(1, 600)
    bias = cases.logits("normal", 2, 1, 24)[0] / 4
    biased = {
        "expert_bias": bias, "num_groups": 6, "group_topk": 3, "group_score": "top2",
        "scaling_factor": 2.5,
    }  # fmt: skip
    arguments = [
        (topk, options, masked, loss_map)
        for topk, options in ((1, {}), (4, {}), (4, biased), (24, {}))
        for masked, loss_map in ((False, "dispatch"), (True, "plain"))
    ]

    @jax.jit
    def run(x, m):
        pairs = []
        for topk, options, masked, loss_map in arguments:
            given = {**MODES[mode], **({"valid_mask": m} if masked else {})}
            ours = route(x, topk, loss_map=loss_map, **BOTH, **given, **options)
            probs, chosen = fused_topk_with_score_function(x, topk, **given, **options)
            scores, plain = fused_topk_with_score_function(
                x, topk, compute_aux_scores=True, **given
            )
            counts = jnp.sum(plain if loss_map == "plain" else chosen, axis=0, dtype=jnp.int32)
            loss = fused_moe_aux_loss(
                scores, counts, topk, BOTH["aux_loss_coeff"], valid_mask=m if masked else None
            )
            pairs.append((ours, probs, chosen, loss))
        return pairs

    logits = cases.logits(kind, 3, 600, 24, "bfloat16" if mode == "sigmoid" else "float32")
    for ours, probs, chosen, loss in to_numpy(run(logits, mask)):
        assert_same_bits(ours.aux_loss, loss)
        counts = np.bincount(ours.indices.ravel(), minlength=25)[:24].astype(np.int32)
        assert_same_bits(ours.tokens_per_expert, counts)
        assert_same_bits(ours.tokens_per_expert, chosen.sum(0, dtype=np.int32))
        for t in range(600):
            row = ours.indices[t]
            experts = row[row < 24]
            assert sorted(experts) == np.flatnonzero(chosen[t]).tolist()
            assert_same_bits(ours.weights[t, : len(experts)], probs[t, experts])


# ---- Bits. The reference and the handlers share no code.

EXPERTS = (1, 2, 5, 33, 64, 128, 256, 512, 2304)


def groupings(num_experts, topk):
    """Groups that divide, for each group score."""
    for num_groups in (2, 3, 4, 8, 11, num_experts):
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


def configurations(num_experts, num_tokens, dtype):
    """Of each mode several choices of topk and options."""
    rng = np.random.default_rng([num_experts, len(dtype), ord(dtype[0])])
    sizes = sorted({k for k in (1, 2, 8, 36, num_experts) if k <= num_experts})
    for i, mode in enumerate(MODES.values()):
        for k in {sizes[i % len(sizes)], sizes[-1 - i % len(sizes)], sizes[len(sizes) // 2]}:
            options = {**mode, "scaling_factor": float(rng.choice([1.0, 2.5, -0.3]))}
            options["eps"] = float(rng.choice([1e-20, 0.0, 1e-6, 1e-44]))
            # Each loss, both, or none.
            options["aux_loss_coeff"] = float(rng.choice([0, 0.01, -30]))
            options["z_loss_coeff"] = float(rng.choice([0, 0.001, 2]))
            options["loss_map"] = str(rng.choice(["dispatch", "plain"]))
            if rng.random() < 0.3:
                options["total_num_tokens"] = int(rng.choice([0, 1, 1000, 10**400]))
            choices = [*groupings(num_experts, k)]
            if choices and rng.random() < 0.6:
                options |= choices[rng.integers(len(choices))]
            if rng.random() < 0.5:
                kind = rng.choice(["normal", "tied", "special", "minus_infinity"])
                options["expert_bias"] = cases.logits(kind, i, 1, num_experts)[0] / 4
            if rng.random() < 0.4:
                options["valid_mask"] = cases.random_mask(i, num_tokens)
            if rng.random() < 0.3:
                options["indices"] = random_indices(i, num_tokens, num_experts, k)
            yield k, options


def split(options):
    """Arrays and statics."""
    arrays = {name: x for name, x in options.items() if name in ARRAYS}
    return arrays, {name: x for name, x in options.items() if name not in ARRAYS}


def assert_same_fields(got, want, what):
    """As `assert_same_bits` of a step, naming the field and `what`."""
    names = [f.name for f in dataclasses.fields(Routing)] + ["gradient"]
    pairs = zip(names, jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for name, x, y in pairs:
        try:
            assert_same_bits(x, y)
        except AssertionError as error:
            pytest.fail(f"{name} of {what}: {error}")


@no_gradient_warning
@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_route_bits(num_experts, dtype):
    """Every mode, on rows of every kind of value, in one program for each width and dtype."""
    rows = 4 if num_experts <= 512 else 1
    logits = np.concatenate(
        [
            cases.logits(kind, num_experts + i, rows, num_experts, dtype)
            for i, kind in enumerate(cases.LOGIT_KINDS)
        ]
    )
    arguments = []
    for i, (topk, options) in enumerate(configurations(num_experts, len(logits), dtype)):
        d_weights = cotangent(logits, topk, i, ("normal", "special")[i % 2])
        arguments.append((topk, options, d_weights))

    @jax.jit
    def run(x, many):
        return [
            step(x, d, topk, **arrays, **split(options)[1])
            for (topk, options, _), (arrays, d) in zip(arguments, many, strict=True)
        ]

    got = run(logits, [(split(options)[0], d) for _, options, d in arguments])
    for one, (topk, options, d_weights) in zip(got, arguments, strict=True):
        want = expected(logits, d_weights, topk, **options)
        arrays, statics = split(options)
        assert_same_fields(one, want, f"topk {topk}, {statics}, {[*arrays]}")
    # The losses of these rows are mostly NaN; those of normal rows are not.
    normal = cases.logits("normal", 1, 40, num_experts, dtype)
    topk = min(num_experts, 8)
    mask = cases.random_mask(2, 40)
    for mode in ("pre_softmax", "sqrtsoftplus"):
        check(normal, topk, loss_map="plain", valid_mask=mask, **BIG, **MODES[mode])


@pytest.mark.parametrize(
    ("num_tokens", "num_experts"),
    [
        (300, 200),  # two rows a slot; slots without rows
        (256 * 16 + 100, 130),  # more rows than lanes
        (256 * 65, 129),  # 16 lanes, a second chunk of one row
        (256 * 130 - 77, 33),  # 32 lanes
        (256 * 257, 17),  # 64 lanes
        (256 * 520 - 1, 3),  # 128 lanes
    ],
)
def test_route_losses_of_many_rows(num_tokens, num_experts):
    """Every level of the sums: chunks, lanes, slots."""
    logits = cases.logits("normal", num_tokens, num_tokens, num_experts)
    mask = cases.random_mask(1, num_tokens)
    options = {"valid_mask": mask, "score_function": "sigmoid", **BOTH}
    got = jax.jit(lambda x, m: route(x, 2, **{**options, "valid_mask": m}))(logits, mask)
    assert_same_bits(got, Routing(*reference.route(logits, 2, **options)))
    # The z loss does not depend on the score function.
    z = jax.jit(lambda x, m: route(x, 2, valid_mask=m, z_loss_coeff=0.001).z_loss)
    assert_same_bits(z(logits, mask), got.z_loss)


def check_properties(logits, got, topk, **options):
    """What holds for every input without replay, whatever the reference says."""
    out, grad = to_numpy(got)
    num_experts = logits.shape[-1]
    mask = options.get("valid_mask")
    valid = np.ones(len(logits), bool) if mask is None else mask
    for row in out.indices[valid]:  # distinct experts, always k
        assert len({*row.tolist()}) == topk
    assert ((out.indices >= 0) & (out.indices < num_experts))[valid].all()
    assert (out.indices[~valid] == num_experts).all()
    for x in (out.weights, grad):
        assert_same_bits(x[~valid], np.zeros(x[~valid].shape, x.dtype))
    is_nan = np.isnan(float32(out.weights))
    assert (is_nan == is_nan.any(1, keepdims=True)).all()  # all k, or none
    assert out.tokens_per_expert.sum() == topk * valid.sum()
    if np.isnan(float32(logits[valid])).any():
        for loss, coeff in ((out.aux_loss, "aux_loss_coeff"), (out.z_loss, "z_loss_coeff")):
            is_on = options.get(coeff) and options.get("total_num_tokens") != 0
            assert np.isnan(loss) == bool(is_on)
    finite = np.isfinite(float32(logits)).all(1)
    assert np.isfinite(float32(out.weights[finite])).all()


@no_gradient_warning
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_route_properties(data):
    num_experts = data.draw(st.integers(1, 200), "num_experts")
    num_tokens = data.draw(st.integers(1, 400), "num_tokens")
    topk = data.draw(st.integers(1, min(num_experts, 40)), "topk")
    dtype = data.draw(st.sampled_from(sorted(cases.FLOAT_DTYPES)), "dtype")
    kind = data.draw(st.sampled_from(sorted(cases.LOGIT_KINDS)), "kind")
    mode = data.draw(st.sampled_from(sorted(MODES)), "mode")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    options = {
        **MODES[mode],
        "scaling_factor": data.draw(st.sampled_from([1.0, -2.5])),
        "aux_loss_coeff": data.draw(st.sampled_from([0.0, 0.01, -30.0])),
        "z_loss_coeff": data.draw(st.sampled_from([0.0, 0.001, 3.0])),
        "loss_map": data.draw(st.sampled_from(["dispatch", "plain"])),
        "total_num_tokens": data.draw(st.sampled_from([None, 0, 7, 10**9])),
    }
    choices = [*groupings(num_experts, topk)]
    if choices and data.draw(st.booleans(), "grouped"):
        options |= data.draw(st.sampled_from(choices), "groups")
    if data.draw(st.booleans(), "biased"):
        options["expert_bias"] = cases.logits("normal", seed, 1, num_experts)[0]
    if data.draw(st.booleans(), "masked"):
        options["valid_mask"] = cases.random_mask(seed, num_tokens)
    if data.draw(st.booleans(), "replayed"):
        options["indices"] = random_indices(seed, num_tokens, num_experts, topk)
    logits = cases.logits(kind, seed, num_tokens, num_experts, dtype)
    d_weights = cotangent(logits, topk, 1)
    got = step(logits, d_weights, topk, **options)
    assert_same_bits(got, expected(logits, d_weights, topk, **options))
    if "indices" not in options:
        check_properties(logits, got, topk, **options)


@pytest.mark.parametrize("mode", ["softmax", "sigmoid"])
def test_route_b21_rows_do_not_depend_on_their_number(mode):
    """Weights and choice, and the gradient of the weights; the losses see every token."""
    logits = cases.lattice_logits(129, 33)
    d_weights = cotangent(logits, 5)
    out, grad = to_numpy(jitted(logits, d_weights, 5, **MODES[mode]))
    assert_same_bits((out, grad), expected(logits, d_weights, 5, **MODES[mode]))
    for num_tokens in (1, 2, 3, 4, 5, 15, 16, 17, 127, 128, 129):
        got, d_logits = jitted(logits[:num_tokens], d_weights[:num_tokens], 5, **MODES[mode])
        want = (out.weights[:num_tokens], out.indices[:num_tokens], grad[:num_tokens])
        assert_same_bits((got.weights, got.indices, d_logits), want)


@no_gradient_warning
@pytest.mark.parametrize("mode", MODES)
def test_route_rows_do_not_meet(mode):
    """Rows of special values between others change neither their routing nor their gradient.

    The losses' gradient enters each row by the counts alone: those are replayed.
    """
    logits = cases.logits("normal", 5, 16, 24)
    d_weights = cotangent(logits, 3)
    odd = np.arange(16) % 2 == 1
    fixed = {"indices": reference.route(logits, 3)[1], **BIG, **MODES[mode]}
    for options in ({**MODES[mode]}, fixed):
        want, d_want = to_numpy(jitted(logits, d_weights, 3, **options))
        for kind in cases.LOGIT_KINDS:
            mixed, d_mixed = logits.copy(), d_weights.copy()
            mixed[odd] = cases.logits(kind, 6, 8, 24)
            d_mixed[odd] = cases.logits("special", 7, 8, 3)
            got, d_got = to_numpy(jitted(mixed, d_mixed, 3, **options))
            assert_same_bits(
                [x[~odd] for x in (got.weights, got.indices, d_got)],
                [x[~odd] for x in (want.weights, want.indices, d_want)],
            )


@pytest.mark.parametrize("lead", [(2, 3, 4), (1, 24), (24, 1), (4, 6)])
def test_route_b44_leading_dimensions(lead):
    """All together are the tokens: the bits of the flat call, losses and counts included."""
    flat = cases.lattice_logits(24, 16)
    d_weights = cotangent(flat)
    masked = {"valid_mask": cases.random_mask(1, 24)}
    for arrays in (masked, {**masked, "indices": random_indices(1, 24, 16, 2)}):
        options = {"score_function": "sigmoid", **BIG}
        out, grad = to_numpy(step(flat, d_weights, **arrays, **options))
        shaped = {name: x.reshape(*lead, *x.shape[1:]) for name, x in arrays.items()}
        got = jitted(flat.reshape(*lead, 16), d_weights.reshape(*lead, 2), **shaped, **options)
        want = dataclasses.replace(
            out,
            weights=out.weights.reshape(*lead, 2),
            indices=out.indices.reshape(*lead, 2),
        )
        assert_same_bits(got, (want, grad.reshape(*lead, 16)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_route_b43_16_bits_round_once(dtype, mode):
    """Exact 16-bit logits: weights rounded once; counts and losses those of float32."""
    logits = cases.lattice_logits(40, 32)
    want = to_numpy(route(logits, 8, **BOTH, **MODES[mode]))
    weights = reference.round_once(want.weights, cases.FLOAT_DTYPES[dtype])
    got = route(logits.astype(cases.FLOAT_DTYPES[dtype]), 8, **BOTH, **MODES[mode])
    assert_same_bits(got, dataclasses.replace(want, weights=weights))


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_route_bits_of_model_shapes(shape):
    logits = cases.logits("normal", 1, 2048, shape.num_experts)
    mode = {"score_function": "sigmoid"} if shape.num_experts == 256 else {}
    check(logits, shape.topk, **mode, **BOTH)


# Bits that never change: an edit here is a breaking change, and belongs in CHANGELOG.md under
# "bits changed". The inputs come from IEEE operations alone, so no libm enters.
GOLDEN = {
    "softmax": "48e75aedf332b26e",
    "pre_softmax": "6c4a7d4008de1431",
    "sigmoid": "5b65a8e19fc00cda",
    "sqrtsoftplus": "3193f6ab41c25e9a",
}


@pytest.mark.parametrize("mode", GOLDEN)
def test_route_golden_bits(mode):
    logits = cases.lattice_logits(600, 100) * np.float32(1.37)
    d_weights = np.float32(1) / (np.float32(3) + logits[:, :8] * logits[:, :8])
    options = {**MODES[mode], **BIG}
    if mode == "sigmoid":
        bias = cases.lattice_logits(1, 100)[0] * np.float32(0.05)
        options |= {"num_groups": 10, "group_topk": 4, "scaling_factor": 2.5, "expert_bias": bias}
    got = jitted(logits, d_weights, 8, **options)
    assert fingerprint(got)[:16] == GOLDEN[mode]


def test_route_reference_log1p():
    """Against NumPy's float64, at the arguments of log(sum of exp) and around the reductions."""
    x = np.concatenate(
        [
            np.linspace(0, 8191, 100001),
            np.geomspace(1e-7, 1, 20001),
            *(np.ldexp(np.linspace(0.999, 1.001, 201), n) - 1 for n in range(1, 14)),
            *(1.5 * np.ldexp(np.linspace(0.999, 1.001, 201), n) - 1 for n in range(14)),
        ]
    ).astype(np.float32)
    assert (x >= 0).all()
    np.testing.assert_allclose(reference.log1p(x), np.log1p(x.astype(np.float64)), rtol=9.4e-8)
    special = np.array([0, np.nan, 2.0**-149], np.float32)
    assert_same_bits(reference.log1p(special), special)


# ---- Masks, replay, N, coefficients


@pytest.mark.parametrize("mode", MODES)
def test_route_c18_masked_rows_are_positive_zero(mode):
    """Whatever they, or their cotangent, hold; and nothing else depends on what they hold."""
    logits = cases.logits("normal", 1, 12, 9)
    d_weights = cotangent(logits, 4)
    mask = np.arange(12) % 3 != 1
    options = {**MODES[mode], "scaling_factor": -1.5, "valid_mask": mask, **BIG}
    want = to_numpy(jitted(logits, d_weights, 4, **options))
    for x, fill in ((want[0].weights, 0), (want[0].indices, 9), (want[1], 0)):
        assert_same_bits(x[~mask], np.full(x[~mask].shape, fill, x.dtype))
    assert (want[1][mask] != 0).all()
    for bad in (np.nan, np.inf, -1e38):
        dirty, d_dirty = logits.copy(), d_weights.copy()
        dirty[~mask], d_dirty[~mask] = bad, bad
        assert_same_bits(jitted(dirty, d_dirty, 4, **options), want)
    # Of the weights alone, the other rows are those of no mask.
    plain = {**MODES[mode], "scaling_factor": -1.5}
    out, grad = to_numpy(jitted(logits, d_weights, 4, **plain))
    masked, d_masked = to_numpy(jitted(logits, d_weights, 4, valid_mask=mask, **plain))
    for x, y in ((masked.weights, out.weights), (masked.indices, out.indices), (d_masked, grad)):
        assert_same_bits(x[mask], y[mask])


@pytest.mark.parametrize("mode", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_route_c18_unchosen_experts_are_positive_zero(mode):
    for d_weights in (D2, -D2):
        out, grad = step(L4, d_weights, scaling_factor=-2.0, **MODES[mode])
        assert out.indices.tolist() == [[2, 3]]
        assert_same_bits(np.asarray(grad)[:, :2], np.zeros((1, 2), np.float32))
        assert (np.asarray(grad)[:, 2:] != 0).all()


@no_gradient_warning
@pytest.mark.parametrize("mode", MODES)
def test_route_replay_of_its_own_choice(mode):
    """`Routing.indices` fed back: every bit of the call that chose them, masked rows included."""
    for topk, kind in ((1, "special"), (4, "special"), (12, "normal"), (4, "constant_rows")):
        logits = cases.logits(kind, 3, 40, 12)
        d_weights = cotangent(logits, topk)
        bias = cases.logits("normal", 1, 1, 12)[0]
        options = {"valid_mask": cases.random_mask(1, 40), **BIG, **MODES[mode]}
        want = jitted(logits, d_weights, topk, expert_bias=bias, **options)
        given = {"indices": np.asarray(want[0].indices), **options}
        assert_same_bits(jitted(logits, d_weights, topk, **given), want)
        # The bias is not used,
        assert_same_bits(jitted(logits, d_weights, topk, expert_bias=-bias, **given), want)
    # and neither are groups.
    logits = cases.logits("special", 4, 40, 12)
    d_weights = cotangent(logits, 4)
    groups = {"num_groups": 4, "group_topk": 2, "group_score": "max"}
    plain = jitted(logits, d_weights, 4, **options)
    grouped = jitted(logits, d_weights, 4, **groups, **options)
    assert not np.array_equal(plain[0].indices, grouped[0].indices)
    for want, others in ((plain, groups), (grouped, {})):
        given = {"indices": np.asarray(want[0].indices), **options, **others}
        assert_same_bits(jitted(logits, d_weights, 4, **given), want)


@pytest.mark.parametrize("mode", MODES)
def test_route_replay_of_what_is_no_expert(mode):
    """An index outside [0, E) is one expert less: index E, weight +0, no count, no gradient."""
    logits = cases.logits("normal", 1, 4, 6)
    d_weights = cotangent(logits, 4)
    d_weights[:, 2] = np.nan  # not read
    outside = (-1, 6, 7, -(2**31), 2**31 - 1)
    indices = np.array([[0, 3, 0, 5], [5, 2, 0, 1], [1, 0, 0, 2], [3, 4, 0, 0]], np.int32)
    kept = indices[:, [0, 1, 3]]
    options = {"aux_loss_coeff": 10.0, "z_loss_coeff": 1.0, **MODES[mode]}
    results = []
    for value in outside:
        indices[:, 2] = value
        results.append(to_numpy(jitted(logits, d_weights, 4, indices=indices, **options)))
    for one in results:
        assert_same_bits(one, results[0])
    out, grad = results[0]
    assert out.indices[:, 2].tolist() == [6] * 4
    assert_same_bits(out.indices[:, [0, 1, 3]], kept)
    assert_same_bits(out.weights[:, 2], np.zeros(4, np.float32))
    assert_same_bits(out.tokens_per_expert, np.bincount(kept.ravel(), minlength=6).astype("int32"))
    assert np.isfinite(grad).all()
    # The weights are those of the three experts.
    three = route(logits, 3, indices=kept, **MODES[mode])
    np.testing.assert_allclose(out.weights[:, [0, 1, 3]], three.weights, rtol=1e-6)
    # No expert at all: nothing but the losses.
    nobody = np.full((4, 4), -1, np.int32)
    out, grad = step(logits, d_weights, 4, indices=nobody, **options)
    assert_same_bits(out.weights, np.zeros((4, 4), np.float32))
    assert_same_bits((out.tokens_per_expert, out.aux_loss), (np.zeros(6, np.int32), np.float32(0)))
    z_grad = jax.grad(lambda x: D_Z * route(x, 4, **options).z_loss)(logits)
    np.testing.assert_allclose(grad, z_grad, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_route_replay_of_repeated_experts(mode):
    """Each time counts; the gradient is the sum. Against float64, and against the reference."""
    logits = cases.logits("normal", 1, 20, 6)
    d_weights = cotangent(logits, 4)
    indices = random_indices(3, 20, 6, 4)
    indices[0] = 2
    options = {"indices": indices, "scaling_factor": 1.5, **BIG, **MODES[mode]}
    out, grad = to_numpy(jitted(logits, d_weights, 4, **options))
    assert_same_bits((out, grad), expected(logits, d_weights, 4, **options))
    assert out.tokens_per_expert.tolist() == [int((indices == e).sum()) for e in range(6)]
    assert out.indices[0].tolist() == [2] * 4
    assert_same_bits(out.weights[0], np.repeat(out.weights[0, :1], 4))
    del options["indices"]
    want = reference.route_float64(logits, 4, indices, **options)
    for x, y in zip((out.weights, out.aux_loss, out.z_loss), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    want = reference.route_grad_float64(logits, 4, indices, d_weights, D_AUX, D_Z, **options)
    assert_row_error(grad, want, 2e-5)


def test_route_replay_ignores_masked_rows():
    logits = cases.logits("normal", 1, 12, 9)
    d_weights = cotangent(logits, 3)
    mask = np.arange(12) % 3 != 1
    indices = random_indices(1, 12, 9, 3)
    options = {"valid_mask": mask, "score_function": "sigmoid", **BIG}
    want = to_numpy(jitted(logits, d_weights, 3, indices=indices, **options))
    assert (want[0].indices[~mask] == 9).all()
    for value in (0, 8, -5, 2**31 - 1):
        other = indices.copy()
        other[~mask] = value
        assert_same_bits(jitted(logits, d_weights, 3, indices=other, **options), want)


@pytest.mark.parametrize("x64", [False, True])
def test_route_replay_dtypes(x64):
    """Any integer dtype, and no value wraps into the range of the experts."""
    logits = cases.logits("normal", 1, 3, 5)
    small = np.array([[4, 0], [2, 2], [1, 3]])
    with jax.enable_x64(x64):
        want = route(logits, 2, indices=small.astype(np.int32), **BOTH)
        for dtype in ("int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"):
            assert_same_bits(route(logits, 2, indices=small.astype(dtype), **BOTH), want)
            given = jnp.asarray(small.astype(dtype))
            assert_same_bits(jax.jit(lambda i: route(logits, 2, indices=i, **BOTH))(given), want)
        assert_same_bits(route(logits, 2, indices=small.tolist(), **BOTH), want)
        outside = small.copy()
        outside[0, 1] = -1
        want = route(logits, 2, indices=outside, **BOTH)
        for dtype, value in (
            ("int64", 2**32), ("int64", -(2**32)), ("uint64", 2**63 + 2**32), ("uint32", 2**32 - 1),
            ("int8", -128), ("uint8", 255),
        ):  # fmt: skip
            wide = small.astype(dtype)
            wide[0, 1] = value
            assert_same_bits(route(logits, 2, indices=wide, **BOTH), want)
            if x64 or wide.itemsize < 8:
                assert_same_bits(route(logits, 2, indices=jnp.asarray(wide), **BOTH), want)


TOTALS = [0, 1, 7, 40, 2**31 - 1]


@pytest.mark.parametrize("masked", [False, True])
def test_route_total_num_tokens_static_and_traced(masked):
    """A Python or NumPy integer, or a scalar array of any integer dtype, eager and in jit."""
    logits = cases.logits("normal", 1, 40, 16)
    d_weights = cotangent(logits)
    mask = cases.random_mask(1, 40) if masked else None
    options = {"score_function": "sigmoid", "valid_mask": mask, **BIG}
    traced = jax.jit(lambda n: step(logits, d_weights, total_num_tokens=n, **options))
    for total in TOTALS:
        want = expected(logits, d_weights, total_num_tokens=total, **options)
        for given in (total, np.int64(total)):
            got = step(logits, d_weights, total_num_tokens=given, **options)
            assert_same_bits(got, want)
        assert_same_bits(traced(np.int32(total)), want)
        if total < 128:
            assert_same_bits(traced(np.int8(total)), want)
        assert_same_bits(traced(np.uint32(total)), want)
    assert_same_bits(traced(np.uint32(2**32 - 1)), step(
        logits, d_weights, total_num_tokens=2**32 - 1, **options))  # fmt: skip
    with jax.enable_x64(True):
        for total in (5, 2**53 + 1, 2**63 - 1):
            want = expected(logits, d_weights, total_num_tokens=total, **options)
            for dtype in (np.int64, np.uint64):
                got = jax.jit(lambda n: step(logits, d_weights, total_num_tokens=n, **options))(
                    dtype(total)
                )
                assert_same_bits(got, want)
    # By default the number of (valid) rows.
    count = 40 if mask is None else int(mask.sum())
    assert_same_bits(
        jitted(logits, d_weights, **options),
        step(logits, d_weights, total_num_tokens=count, **options),
    )
    huge = to_numpy(step(logits, d_weights, total_num_tokens=10**400, **options))
    assert_same_bits((huge[0].aux_loss, huge[0].z_loss), (np.float32(0), np.float32(0)))
    assert_same_bits(huge, expected(logits, d_weights, total_num_tokens=10**400, **options))


@pytest.mark.parametrize("mode", MODES)
def test_route_a13_coefficient_zero(mode):
    """Losses +0 whatever the logits hold; the gradient is that of the weights alone."""
    logits = cases.logits("special", 1, 20, 9)
    d_weights = cotangent(logits, 3)
    out, grad = step(logits, d_weights, 3, **MODES[mode])
    assert_same_bits((out.aux_loss, out.z_loss), (np.float32(0), np.float32(0)))

    def weights(x):
        return route(x, 3, **BOTH, **MODES[mode]).weights

    assert_same_bits(jax.vjp(weights, logits)[1](d_weights)[0], grad)
    for options in (
        {"aux_loss_coeff": 0, "z_loss_coeff": -0.0},
        {"total_num_tokens": 0, **BOTH},
        {"total_num_tokens": jnp.int32(0), **BOTH},
        {"loss_map": "plain", "total_num_tokens": jnp.int32(9)},
    ):
        assert_same_bits(step(logits, d_weights, 3, **options, **MODES[mode]), (out, grad))
    # One loss does not see the other.
    both = route(logits[:1], 3, **BOTH, **MODES[mode])
    for name, value in (("aux_loss_coeff", both.aux_loss), ("z_loss_coeff", both.z_loss)):
        one = route(logits[:1], 3, **{name: BOTH[name]}, **MODES[mode])
        wanted = ["aux_loss", "z_loss"][name == "z_loss_coeff"]
        assert_same_bits(getattr(one, wanted), value)


def test_route_statics_of_any_kind():
    bias = np.array([0, 0.4, 0, 0], np.float32)
    run = functools.partial(route, L4, expert_bias=bias)
    for function in ScoreFunction:
        want = run(2, score_function=function.name.lower(), scaling_factor=0.5, **BOTH)
        for spelling in (function.name.capitalize(), function, int(function)):
            got = run(2, score_function=spelling, scaling_factor=0.5, **BOTH)
            assert_same_bits(got, want)
        for kind in (np.float16, np.float32, np.float64, np.array):
            given = {"scaling_factor": kind(0.5), "eps": kind(0), "aux_loss_coeff": kind(2),
                     "z_loss_coeff": kind(0.25)}  # fmt: skip
            plain = {name: float(x) for name, x in given.items()}
            assert_same_bits(run(2, score_function=function, **given),
                             run(2, score_function=function, **plain))  # fmt: skip
        for kind in (np.int8, np.uint64, np.array):
            got = run(kind(2), score_function=function, num_groups=kind(2), group_topk=kind(2))
            assert_same_bits(got, run(2, score_function=function, num_groups=2, group_topk=2))
    assert_same_bits(run(2, use_pre_softmax=np.bool_(True)), run(2, use_pre_softmax=True))
    for groups in ((None, None), (1, 1)):
        assert_same_bits(run(2, num_groups=groups[0], group_topk=groups[1]), run(2))
    # Static values that are equal share a compilation, so that -0.0 counts as 0.0.
    for mode in MODES.values():
        for scale in (-0.0, 0.0):
            check(L4, scaling_factor=scale, **mode)


def test_route_coefficients_stay_float64():
    """In float32 these coefficients would be the same, or infinite."""
    logits = cases.logits("normal", 1, 20, 9)
    for coeff in (1e300, 1e-300, 1 + 1e-9):
        for loss in ("aux_loss_coeff", "z_loss_coeff"):
            total = 10**150 if coeff == 1e300 else None
            check(logits, **{loss: coeff}, total_num_tokens=total)


# ---- Error.
#
# Weights: see test_topk_router.py. logsumexp has the error of max (none), of a sum of positive
# terms below 2e-7 in float32, and that of log1p, of a number that is at least log(num_experts): its
# square is good to 1e-6. The gradient's contributions are added once each.


def assert_row_error(got, want, bound):
    """Largest error in a row, relative to the row's norm; exact zeros where the row is zero."""
    error = np.abs(np.asarray(got, np.float64) - want).max(axis=-1)
    norm = np.linalg.norm(want, axis=-1)
    assert (error <= bound * norm).all(), (error / norm).max()


@no_gradient_warning
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_experts", [8, 64, 256, 2304])
def test_route_error(num_experts, mode):
    num_tokens = 1000 if num_experts < 1000 else 100
    logits = np.random.default_rng(1).standard_normal((num_tokens, num_experts), np.float32)
    d_weights = np.random.default_rng(2).standard_normal((num_tokens, 8), np.float32)
    options = {**BIG, **MODES[mode]}
    out, grad = to_numpy(jitted(logits, d_weights, 8, **options))
    want = reference.route_float64(logits, 8, out.indices, **options)
    for x, y in zip((out.weights, out.aux_loss, out.z_loss), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    want = reference.route_grad_float64(logits, 8, out.indices, d_weights, D_AUX, D_Z, **options)
    assert_row_error(grad, want, 2e-5)


@no_gradient_warning
@pytest.mark.parametrize("groups", [{}, {"num_groups": 6, "group_topk": 3, "group_score": "max"}])
@pytest.mark.parametrize("mode", MODES)
def test_route_c05_random_gradients(mode, groups):
    """sum(weights * w) + aux_loss + z_loss against float64, choice included where it is clear."""
    logits = np.random.default_rng(1).standard_normal((32, 48)).astype(np.float32)
    bias = None if mode == "softmax" else np.linspace(-0.1, 0.1, 48, dtype=np.float32)
    for topk in (1, 2, 8, 48):
        if groups and topk == 48:
            continue
        w = np.random.default_rng(2).standard_normal((32, topk)).astype(np.float32)
        options = {**MODES[mode], "scaling_factor": 2.5}
        selection = {**groups, "expert_bias": bias}

        def loss(x, topk=topk, w=w, options=options, selection=selection):
            out = route(x, topk, **BIG, **options, **selection)
            return jnp.sum(out.weights * w) + out.aux_loss + out.z_loss, out

        grad, out = jax.jit(jax.grad(loss, has_aux=True))(logits)
        out = to_numpy(out)
        _, chosen = reference.topk_router_float64(logits, topk, **options, **selection)
        # Rows in which no expert is within 1e-3 of the cut stay the same under a shift of 1e-3.
        clear = np.ones(32, bool)
        for seed in range(8):
            shift = np.random.default_rng(seed).uniform(-5e-4, 5e-4, logits.shape)
            shifted = reference.topk_router_float64(logits + shift, topk, **options, **selection)
            clear &= (shifted[1] == chosen).all(axis=1)
        assert clear.sum() > 16
        for t in np.flatnonzero(clear):
            assert sorted(out.indices[t].tolist()) == np.flatnonzero(chosen[t]).tolist()
        want = reference.route_grad_float64(logits, topk, out.indices, w, 1, 1, **BIG, **options)
        assert_row_error(grad, want, 2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_route_gradient_is_a_float64_difference(mode):
    """Not the gradient's formula: central differences of the float64 results."""
    logits = np.random.default_rng(3).standard_normal((3, 7)).astype(np.float32)
    d_weights = cotangent(logits, 3)
    options = {**BIG, **MODES[mode], "valid_mask": np.array([True, True, False])}
    indices = np.array([[6, 1, 1], [3, 2, 7], [0, 1, 2]], np.int32)
    for replayed in (None, indices):
        out, grad = to_numpy(step(logits, d_weights, 3, indices=replayed, **options))
        want = np.zeros((3, 7))
        for t, e in itertools.product(range(3), range(7)):
            sides = []
            for size in (1e-5, -1e-5):
                moved = logits.astype(np.float64)
                moved[t, e] += size
                weights, aux, z = reference.route_float64(moved, 3, out.indices, **options)
                sides.append((weights * d_weights).sum() + D_AUX * aux + D_Z * z)
            want[t, e] = (sides[0] - sides[1]) / 2e-5
        assert_row_error(grad, want, 2e-6)
        closed = reference.route_grad_float64(
            logits, 3, out.indices, d_weights, D_AUX, D_Z, **options
        )
        assert_row_error(closed, want, 1e-8)


# ---- Gradients


def by_expert(d_experts, out):
    """Cotangents of the chosen experts' weights, in order of the choice."""
    return np.take_along_axis(d_experts, np.asarray(out.indices), axis=-1)


D4 = np.array([[1, 2, 3, 4]], np.float32)


@pytest.mark.parametrize(
    ("mode", "scale", "want"),
    [
        ("sqrtsoftplus", 1, [0, 0, -0.067546673, 0.071546218]),
        ("sigmoid", 2.5, [0, 0, -0.155974464, 0.180525809]),
        ("softmax", 1, [0, 0, -0.247516573, 0.247516573]),
        ("pre_softmax", 1, [-0.436820620, -0.264945099, 0.208665205, 0.493100515]),
    ],
)
def test_route_c01_gradients(mode, scale, want):
    options = {"scaling_factor": scale, **MODES[mode]}
    d_weights = by_expert(D4, route(L4, 2, **options))
    _, grad = step(L4, d_weights, **options)
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
def test_route_c03_gradients_of_one_expert(mode, scale, want):
    options = {"scaling_factor": scale, **MODES[mode]}
    d_weights = by_expert(D4, route(L4, 1, **options))
    _, grad = step(L4, d_weights, 1, **options)
    np.testing.assert_allclose(grad, [want], rtol=1e-6)


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_route_c06_unused_outputs(mode, dtype):
    """A loss of some outputs has the gradient of those; one of integers alone has zeros."""
    logits = cases.logits("normal", 1, 16, 8, dtype)
    options = {**BIG, **MODES[mode]}
    out = Routing(*reference.route(logits, 2, **options))
    ones = np.ones((16, 2), logits.dtype)
    for name, cotangents in (
        ("weights", (ones, None, None)),
        ("aux_loss", (None, 1, None)),
        ("z_loss", (None, None, 1)),
    ):
        grad = jax.grad(lambda x, n=name: getattr(route(x, 2, **options), n).sum())(logits)
        assert_same_bits(grad, expected_grad(logits, 2, out, *cotangents, **options))
    grad = jax.grad(lambda x: (lambda r: r.aux_loss + r.z_loss)(route(x, 2, **options)))(logits)
    assert_same_bits(grad, expected_grad(logits, 2, out, None, 1, 1, **options))
    for unused in (
        lambda r: 1.0 * r.tokens_per_expert.sum(),
        lambda r: jnp.where(r.indices > 3, 1.0, 2.0).sum(),
        lambda r: lax.stop_gradient(r.aux_loss),
    ):
        assert_same_bits(jax.grad(lambda x, f=unused: f(route(x, 2, **options)))(logits),
                         zeros_like(logits))  # fmt: skip
    off = jax.grad(lambda x: (lambda r: r.aux_loss + r.z_loss)(route(x, 2, **MODES[mode])))
    assert_same_bits(off(logits), zeros_like(logits))
    value, routing = jax.grad(
        lambda x: (lambda r: (r.aux_loss, r))(route(x, 2, **options)), has_aux=True
    )(logits)
    want = expected_grad(logits, 2, out, None, 1, None, **options)
    assert_same_bits((value, routing), (want, out))


def test_route_c07_other_operands_have_no_gradient():
    """float0 for integers and the mask, +0 for the bias; the cotangents of integers are float0."""
    logits = cases.logits("normal", 1, 4, 8)
    bias = np.linspace(-1, 1, 8, dtype=np.float32)
    mask = np.array([1, 1, 0, 1], bool)
    indices = random_indices(1, 4, 8, 2)

    def f(x, b, m, i, n):
        return route(
            x, 2, expert_bias=b, valid_mask=m, indices=i, total_num_tokens=n,
            score_function="sigmoid", **BIG,
        )  # fmt: skip

    out, vjp = jax.vjp(f, logits, bias, mask, indices, np.int32(5))
    float0 = {name: np.zeros(getattr(out, name).shape, jax.dtypes.float0)
              for name in ("indices", "tokens_per_expert")}  # fmt: skip
    d_weights = cotangent(logits)
    d_out = Routing(jnp.asarray(d_weights), **float0, aux_loss=jnp.float32(D_AUX),
                    z_loss=jnp.float32(D_Z))  # fmt: skip
    d_logits, d_bias, *others = vjp(d_out)
    options = {"expert_bias": bias, "valid_mask": mask, "indices": indices,
               "total_num_tokens": 5, "score_function": "sigmoid", **BIG}  # fmt: skip
    want = expected(logits, d_weights, **options)
    assert_same_bits((out, d_logits), want)
    assert_same_bits(d_bias, zeros_like(bias))
    assert all(d.dtype == jax.dtypes.float0 for d in others)
    assert [d.shape for d in others] == [(4,), (4, 2), ()]
    grads = jax.grad(lambda *args: f(*args).z_loss, argnums=(0, 1, 3), allow_int=True)(
        logits, bias, mask, indices, np.int32(5)
    )
    assert_same_bits(grads[1], zeros_like(bias))
    assert grads[2].dtype == jax.dtypes.float0


@pytest.mark.parametrize("mode", MODES)
def test_route_c09_jacrev(mode):
    """Of weights and both losses at once: vmap of the gradient over the cotangents alone."""
    logits = np.tile(L4, (3, 1)) * np.array([[1], [0.5], [-1]], np.float32)

    def f(x):
        out = route(x, 2, **BIG, **MODES[mode])
        return out.weights, out.aux_loss, out.z_loss

    out, vjp = jax.vjp(f, logits)
    zeros = jax.tree.map(jnp.zeros_like, out)
    basis = np.eye(6, dtype=np.float32).reshape(6, 3, 2)
    rows = np.stack([vjp((d, *zeros[1:]))[0] for d in basis]).reshape(3, 2, 3, 4)
    d_aux = vjp((zeros[0], jnp.float32(1), zeros[2]))[0]
    d_z = vjp((zeros[0], zeros[1], jnp.float32(1)))[0]
    for run in (jax.jacrev(f), jax.jit(jax.jacrev(f))):
        assert_same_bits(run(logits), (rows, d_aux, d_z))


@pytest.mark.parametrize("mode", ["softmax", "pre_softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_route_c16_gradient_dtypes(dtype, mode):
    """The gradient has the logits' dtype; 16-bit cotangents and float32 losses are accepted."""
    logits = cases.logits("normal", 1, 16, 8, dtype)
    options = {**BIG, **MODES[mode]}
    out, grad = step(logits, cotangent(logits), **options)
    assert out.weights.dtype == grad.dtype == logits.dtype
    assert out.aux_loss.dtype == out.z_loss.dtype == jnp.float32

    def loss(x):  # float32 on top of 16-bit weights
        routing = route(x, 2, **options)
        squares = (routing.weights.astype(jnp.float32) ** 2).sum()
        return squares + routing.aux_loss + routing.z_loss

    d_weights = (2 * out.weights.astype(jnp.float32)).astype(logits.dtype)
    want = expected_grad(logits, 2, to_numpy(out), np.asarray(d_weights), 1, 1, **options)
    assert_same_bits(jax.grad(loss)(logits), want)


@pytest.mark.parametrize("mode", MODES)
def test_route_second_order_raises(mode):
    """Right, or an error that names the op; never zeros."""

    def f(x):
        out = route(x, 2, **BIG, **MODES[mode])
        return (out.weights**2).sum() + out.aux_loss + out.z_loss

    inner = jax.grad(f)
    for second in (
        lambda x: jax.grad(lambda x: inner(x).sum())(x),
        lambda x: jax.jacrev(inner)(x),
        lambda x: jax.hessian(f)(x),
        lambda x: jax.jvp(inner, (x,), (x,)),
        lambda x: jax.jit(jax.jacrev(inner))(x),
        lambda x: jax.grad(lambda x: jax.checkpoint(inner)(x).sum())(x),
    ):
        with pytest.raises(NotImplementedError, match="moe_route"):
            second(L4)
    for first in (lambda x: jax.jvp(f, (x,), (x,)), jax.jacfwd(f), jax.jit(jax.jacfwd(f))):
        with pytest.raises(NotImplementedError, match="moe_route"):
            first(L4)


def test_route_linear_in_the_cotangents():
    """The gradient's derivative in the cotangents is the gradient of their tangents."""
    logits = cases.logits("normal", 1, 3, 5)

    def f(x):
        out = route(x, 2, score_function="sigmoid", **BIG)
        return out.weights, out.aux_loss, out.z_loss

    _, vjp = jax.vjp(f, logits)
    d = (cotangent(logits), np.float32(D_AUX), np.float32(D_Z))
    twice = jax.tree.map(lambda x: 2 * x, d)
    got = jax.jvp(lambda d: vjp(d)[0], (d,), (twice,))
    assert_same_bits(got, (vjp(d)[0], vjp(twice)[0]))
    # One of them alone.
    primal, tangent = jax.jvp(lambda z: vjp((*d[:2], z))[0], (d[2],), (d[2],))
    z_alone = jax.grad(lambda x: D_Z * f(x)[2])(logits)
    assert_same_bits((primal, tangent), (vjp(d)[0], z_alone))


# ---- Transformations


@pytest.fixture(scope="module")
def batch():
    """Five items of everything."""
    return {
        "logits": np.stack([cases.logits("special", i, 12, 9) for i in range(5)]),
        "d_weights": np.stack([cases.logits("normal", 20 + i, 12, 3) for i in range(5)]),
        "expert_bias": np.stack([cases.logits("normal", 10 + i, 1, 9)[0] for i in range(5)]),
        "valid_mask": np.stack([cases.random_mask(i, 12) for i in range(5)]),
        "total_num_tokens": np.array([3, 0, 7, 12, 10**6], np.int32),
        "indices": np.stack([random_indices(i, 12, 9, 3) for i in range(5)]),
    }


def batch_step(given, **options):
    """`step` of named operands."""
    others = {name: x for name, x in given.items() if name not in ("logits", "d_weights")}
    options = {"score_function": "sigmoid", **BIG, **options}
    return step(given["logits"], given["d_weights"], 3, **others, **options)


def item(given, i, axes=0):
    """One item of the batched operands."""
    axes = dict.fromkeys(given, 0) if axes == 0 else axes
    return {
        name: x if axes[name] is None else np.take(x, i, axes[name]) for name, x in given.items()
    }


@pytest.mark.parametrize("mode", MODES)
def test_route_same_bits_eager_jit_and_disable_jit(mode):
    logits = cases.logits("special", 1, 50, 16)
    d_weights = cotangent(logits, 4)
    options = {"valid_mask": cases.random_mask(1, 50), **BIG, **MODES[mode]}
    want = expected(logits, d_weights, 4, **options)
    assert_same_bits(jitted(logits, d_weights, 4, **options), want)
    assert_same_bits(step(logits, d_weights, 4, **options), want)
    with jax.disable_jit():
        assert_same_bits(step(logits, d_weights, 4, **options), want)
        assert_same_bits(route(logits.tolist(), 4, **options), want[0])


MIXES = [m for m in itertools.product([0, None], repeat=5) if any(x == 0 for x in m)]


@pytest.mark.parametrize("mapped", MIXES, ids=str)
def test_route_d02_vmap_any_mix_of_operands(batch, mapped):
    """Every output and the gradient, with each operand batched or shared."""
    names = ("logits", "d_weights", "expert_bias", "valid_mask", "total_num_tokens")
    axes = dict(zip(names, mapped, strict=True))
    given = {name: batch[name] if axes[name] == 0 else batch[name][2] for name in names}
    if mapped in MIXES[::3]:  # replay in place of the bias
        given["indices"], axes["indices"] = given.pop("expert_bias"), axes.pop("expert_bias")
        given["indices"] = batch["indices"] if axes["indices"] == 0 else batch["indices"][2]
    plain = {"loss_map": "plain"} if mapped in MIXES[::2] else {}
    want = stack([BATCH_STEP[bool(plain)](item(given, i, axes)) for i in range(5)])
    got = jax.jit(jax.vmap(functools.partial(batch_step, **plain), (axes,)))(given)
    assert_same_bits(got, want)


BATCH_STEP = {
    False: jax.jit(batch_step),
    True: jax.jit(functools.partial(batch_step, loss_map="plain")),
}


def test_route_d02_vmap_moved_axes(batch):
    given = {name: x for name, x in batch.items() if name != "indices"}
    want = stack([BATCH_STEP[False](item(given, i)) for i in range(5)])
    for axis, out_axis in ((1, 0), (2, 1)):
        axes = {name: min(axis, x.ndim - 1) for name, x in given.items()}
        moved = {name: np.moveaxis(x, 0, axes[name]) for name, x in given.items()}

        def run(x):  # the losses have no other axis
            out, grad = batch_step(x)
            return (out.weights, out.indices, out.tokens_per_expert, grad), (
                out.aux_loss,
                out.z_loss,
            )

        got = jax.jit(jax.vmap(run, (axes,), out_axes=(out_axis, 0)))(moved)
        out, grad = want
        arrays = (out.weights, out.indices, out.tokens_per_expert, grad)
        arrays = jax.tree.map(lambda x, a=out_axis: np.moveaxis(x, 0, a), arrays)
        assert_same_bits(got, (arrays, (out.aux_loss, out.z_loss)))


def test_route_d04_nested_vmap():
    logits = cases.lattice_logits(2 * 3 * 8, 16).reshape(2, 3, 8, 16)
    d_weights = cotangent(logits, 3)
    bias = cases.logits("normal", 1, 6, 16).reshape(2, 3, 16)

    def f(x, d, b):
        return step(x, d, 3, score_function="sigmoid", expert_bias=b, **BIG)

    run = jax.jit(f)
    want = stack(
        [stack([run(*x) for x in zip(*xs, strict=True)])
         for xs in zip(logits, d_weights, bias, strict=True)]
    )  # fmt: skip
    assert_same_bits(jax.jit(jax.vmap(jax.vmap(f)))(logits, d_weights, bias), want)
    # An outer axis over the logits, an inner one over the bias, and the other way round.
    x, d, b = logits[0], d_weights[0], bias[0]
    pairs = [[run(x[i], d[i], b[j]) for j in range(3)] for i in range(3)]
    crossed = jax.jit(jax.vmap(jax.vmap(f, (None, None, 0)), (0, 0, None)))(x, d, b)
    assert_same_bits(crossed, stack([stack(row) for row in pairs]))
    crossed = jax.jit(jax.vmap(jax.vmap(f, (0, 0, None)), (None, None, 0)))(x, d, b)
    assert_same_bits(crossed, stack([stack(list(row)) for row in zip(*pairs, strict=True)]))
    empty = jax.vmap(lambda x: route(x, 3, **BOTH))(np.zeros((0, 4, 16), np.float32))
    assert empty.weights.shape == (0, 4, 3)
    assert empty.aux_loss.shape == (0,)


@pytest.mark.parametrize("mapped", [(None, 0, 0), (None, 0, None), (None, None, 0), (0, None, 0)])
def test_route_d04_grad_of_vmap(batch, mapped):
    """A shared operand's gradient is the sum, added as JAX adds a Python loop's cotangents."""
    names = ("logits", "expert_bias", "valid_mask")
    axes = dict(zip(names, mapped, strict=True))
    given = {name: batch[name] if axes[name] == 0 else batch[name][2] for name in names}
    logits = given.pop("logits")
    logits = np.where(np.isfinite(logits), logits, 0).astype(np.float32)
    d_weights = batch["d_weights"]

    def one(x, others, d):
        out = route(x, 3, score_function="sigmoid", **others, **BIG)
        return jnp.sum(out.weights * d) + out.aux_loss + out.z_loss

    def batched(x):
        in_axes = (axes["logits"], {name: axes[name] for name in given}, 0)
        # Not jnp.sum, whose order is XLA's.
        losses = jax.vmap(one, in_axes)(x, given, d_weights)
        return functools.reduce(lambda a, b: a + b, [losses[i] for i in range(5)])

    def looped(x):
        others = [item(given, i, axes) for i in range(5)]
        losses = [
            one(x if axes["logits"] is None else x[i], others[i], d_weights[i]) for i in range(5)
        ]
        return functools.reduce(lambda a, b: a + b, losses)

    assert_same_bits(jax.jit(jax.grad(batched))(logits), jax.jit(jax.grad(looped))(logits))


@pytest.mark.parametrize("size", [1, 2, 100])
def test_route_batch_size_does_not_matter(size):
    logits = cases.logits("normal", 1, 300, 33)
    d_weights = cotangent(logits, 5)
    want = to_numpy(jitted(logits, d_weights, 5, **BIG))
    many = (np.broadcast_to(x, (size, *x.shape)) for x in (logits, d_weights))
    got = to_numpy(jax.jit(jax.vmap(lambda x, d: step(x, d, 5, **BIG)))(*many))
    for i in {0, size // 2, size - 1}:
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), want)


def test_route_c12_remat_with_ties():
    logits = np.zeros((8, 64), np.float32)
    g = cases.logits("normal", 1, 8, 8)

    def f(x):
        out = route(x, 8, **BIG)
        return jnp.sum(g * out.weights) + out.aux_loss + out.z_loss, out

    plain = jax.jit(jax.value_and_grad(f, has_aux=True))(logits)
    remat = jax.jit(jax.value_and_grad(jax.checkpoint(f), has_aux=True))(logits)
    assert_same_bits(remat, plain)
    assert remat[0][1].indices.tolist() == [[*range(8)]] * 8


@pytest.mark.parametrize("loss_map", ["dispatch", "plain"])
def test_route_c13_remat_policies(loss_map, capsys):
    """Saved by name: the choice, and the counts of the loss; neither makes the step run again."""
    logits = cases.logits("normal", 1, 8, 64)
    g = cases.logits("normal", 2, 8, 8)

    def f(x):
        out = route(jnp.sin(x), 8, score_function="sigmoid", loss_map=loss_map, **BIG)
        return jnp.sum(jnp.cos(out.weights) * g) + jnp.sin(out.aux_loss) + out.z_loss

    want = jax.jit(jax.grad(f))(logits)
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names(RESIDUAL_NAME, aux_loss.RESIDUAL_NAME)
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
    assert f"i32[8,8] named '{RESIDUAL_NAME}'" in printed
    assert f"i32[64] named '{aux_loss.RESIDUAL_NAME}'" in printed


def test_route_c13_saved_choice_is_not_computed_again():
    """With both names saved, a linear use of the outputs runs the forward pass once."""
    logits = cases.logits("normal", 1, 8, 64)
    named = jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME, aux_loss.RESIDUAL_NAME)

    def f(x):
        out = route(x, 8, **BIG)
        return jnp.sum(out.weights) + out.aux_loss + out.z_loss

    def passes(policy):  # before XLA, which may find the two passes equal
        grad = jax.grad(jax.checkpoint(f, policy=policy))
        return str(jax.make_jaxpr(grad)(logits)).count("= moe_route[")

    assert passes(named) == 1
    assert passes(jax.checkpoint_policies.nothing_saveable) == 2


def test_route_c14_scan_equals_unrolled():
    """Two ops in a body that captures constants, over four layers."""
    logits = cases.logits("normal", 1, 64, 16)
    mix = cases.logits("normal", 2, 64, 16)
    bias = cases.logits("normal", 3, 1, 16)[0]
    mask = cases.random_mask(1, 64)
    g = cases.logits("normal", 4, 64, 16)
    layers = np.linspace(0.5, 1.5, 4, dtype=np.float32)

    def layer(state, scale):
        x, b = state
        x = x * scale
        out = route(x, 4, score_function="sigmoid", expert_bias=b, valid_mask=mask, **BIG)
        b = update_expert_bias(b, out.tokens_per_expert, 0.01)
        # One rounding at a time, however XLA fuses it.
        x = lax.optimization_barrier(jnp.tile(out.weights, (1, 4)) * mix)
        return (x, b), out

    captured = [a.copy() for a in (logits, mix, bias, mask)]
    run_layer = jax.jit(layer)
    want, state = [], (jnp.asarray(logits), jnp.asarray(bias))
    states = []
    for scale in layers:
        states.append((*state, scale))
        state, one = run_layer(state, scale)
        want.append(one)
    run = jax.jit(lambda x: lax.scan(layer, (x, bias), layers))
    assert_same_bits(check_reproducible(run, logits, repeats=50), (state, stack(want)))

    def results(x, b, scale):
        (x, _), out = layer((x, b), scale)
        return x, out.aux_loss, out.z_loss

    def scanned(x):
        (x, _), out = lax.scan(layer, (x, jnp.asarray(bias)), layers)
        return x, out.aux_loss, out.z_loss

    _, vjp = jax.vjp(scanned, logits)
    d_losses = np.arange(1, 5, dtype=np.float32)
    grads = check_reproducible(jax.jit(lambda d: vjp((d, d_losses, d_losses))[0]), g, repeats=50)
    back = jax.jit(
        lambda x, b, scale, d, dl: jax.vjp(lambda x: results(x, b, scale), x)[1]((d, dl, dl))[0]
    )
    d = jnp.asarray(g)
    for one, dl in zip(reversed(states), reversed(d_losses), strict=True):
        d = back(*one, d, dl)
    assert_same_bits(grads, d)
    for before, after in zip(captured, (logits, mix, bias, mask), strict=True):
        assert_same_bits(after, before)


def test_route_in_cond_while_and_map():
    logits = cases.logits("normal", 1, 16, 8)
    d_weights = cotangent(logits)
    run = functools.partial(step, d_weights=d_weights, **BIG)
    want = run(logits)
    nothing = jax.tree.map(jnp.zeros_like, want)
    cond = jax.jit(lambda flag, x: lax.cond(flag, run, lambda x: nothing, x))
    assert_same_bits(cond(True, logits), want)
    assert_same_bits(cond(False, logits), nothing)

    def body(state):
        return state[0] + 1, run(logits)

    looped = jax.jit(lambda: lax.while_loop(lambda s: s[0] < 3, body, (0, nothing)))
    assert_same_bits(looped()[1], want)
    many = np.stack([logits, logits * 2])
    assert_same_bits(lax.map(run, many), stack([run(x) for x in many]))


def test_route_d13_donation():
    logits = cases.logits("normal", 1, 16, 8)
    d_weights = cotangent(logits)
    want = expected(logits, d_weights, **BIG)
    kept = jnp.asarray(logits)
    run = functools.partial(step, **BIG)
    assert_same_bits(jax.jit(run)(kept, d_weights), want)
    assert_same_bits(kept, logits)
    for argument in (0, 1):
        donated = [jnp.array(logits, copy=True), jnp.array(d_weights, copy=True)]
        assert_same_bits(jax.jit(run, donate_argnums=argument)(*donated), want)
        assert donated[argument].is_deleted()
        assert not donated[1 - argument].is_deleted()


@no_gradient_warning
def test_route_d14_x64():
    logits = cases.logits("special", 1, 16, 8)
    with jax.enable_x64(True):
        for mode in MODES.values():
            for dtype in cases.FLOAT_DTYPES.values():
                x = logits.astype(dtype)
                options = {**mode, **BIG, "num_groups": 4, "group_topk": 2, "loss_map": "plain"}
                d_weights = cotangent(x)
                got = step(x, d_weights, **options)
                assert_same_bits(got, expected(x, d_weights, **options))
        bias = [0.0, 0.5, 0.0, 0.0]  # Python floats become float32
        got = route(L4, 2, score_function="sigmoid", expert_bias=bias)
        want = reference.route(
            L4, 2, score_function="sigmoid", expert_bias=np.array(bias, np.float32)
        )
        assert_same_bits(got, Routing(*want))
        test_route_b47_given_indices()
        test_route_b22_b24_b26_b27_order_of_the_choice()
        test_route_b24_f07_loss_map()
        test_route_f05_a08_padding()
        test_route_f06_z_loss()


def test_route_debug_nans():
    logits = cases.logits("normal", 1, 16, 8)
    d_weights = cotangent(logits)
    mask = np.arange(16) != 3
    poison = logits.copy()
    poison[3, 4] = np.nan
    with jax.debug_nans(True):
        assert_same_bits(step(logits, d_weights, **BIG), expected(logits, d_weights, **BIG))
        got = jitted(poison, d_weights, valid_mask=mask, **BIG)
        assert_same_bits(got, expected(poison, d_weights, valid_mask=mask, **BIG))
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(route(poison, 2))


def test_route_rank_and_strict_promotion(batch):
    given = {name: x for name, x in batch.items() if name != "indices"}
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        one = batch_step(item(given, 0))
        axes = {**dict.fromkeys(given, 0), "expert_bias": None}
        shared = {**given, "expert_bias": given["expert_bias"][0]}
        many = jax.vmap(batch_step, (axes,))(shared)
        assert_same_bits(jax.tree.map(lambda x: x[0], many), one)
        replayed = {**item(given, 0), "indices": batch["indices"][0]}
        batch_step(replayed, loss_map="plain")
        jax.grad(lambda x: jax.vmap(lambda b: route(x, 3, expert_bias=b, **BIG))(
            given["expert_bias"]).z_loss.sum())(given["logits"][0])  # fmt: skip
        jax.jacrev(lambda x: route(x, 2, **BOTH).weights)(L4.astype(jnp.bfloat16))


def test_route_outputs_are_never_weakly_typed():
    weak = jnp.broadcast_to(jnp.asarray(0.25), (4, 4))
    assert weak.weak_type
    weak_bias = jnp.broadcast_to(jnp.asarray(0.25), (4,))
    weak_total = jnp.asarray(7)
    assert weak_total.weak_type
    for mode in MODES.values():
        f = functools.partial(
            route, topk=2, expert_bias=weak_bias, total_num_tokens=weak_total, **BOTH, **mode
        )
        for out in (f(weak), jax.jit(f)(weak), jax.vmap(f)(weak[None])):
            assert not any(x.weak_type for x in jax.tree.leaves(out))
    strong = jnp.asarray(np.full((4, 4), 0.25, np.float32))
    assert_same_bits(route(weak, 2, **BOTH), route(strong, 2, **BOTH))
    grad = jax.grad(lambda x: route(x, 2, **BOTH).aux_loss)(strong)
    assert not grad.weak_type


# ---- System


@no_gradient_warning
def test_route_one_jitted_call_is_one_compilation():
    logits = jnp.asarray(cases.logits("normal", 1, 13, 7))  # a shape that no other test uses
    d_weights = jnp.asarray(cotangent(logits, 3))
    bias = jnp.zeros(7, jnp.float32)
    mask = jnp.asarray(cases.random_mask(1, 13))
    for fun in (
        lambda x, d, b, m: route(x, 3),
        lambda x, d, b, m: step(x, d, 3, score_function="sigmoid", expert_bias=b, **BIG),
        lambda x, d, b, m: step(x, d, 3, valid_mask=m, loss_map="plain", **BIG),
        lambda x, d, b, m: jax.vmap(lambda x: route(x, 3, **BOTH))(x[None]),
        lambda x, d, b, m: jax.jacrev(lambda x: route(x, 3, **BOTH).weights)(x),
    ):
        run = jax.jit(fun)
        with count_compilations() as events:
            jax.block_until_ready(run(logits, d_weights, bias, mask))
        assert len(events) == 1
        with count_compilations() as events:
            jax.block_until_ready(run(logits, d_weights, bias, mask))
        assert not events


def test_route_repeated_eager_call_compiles_nothing():
    logits = jnp.asarray(cases.logits("normal", 1, 11, 7))
    d_weights = jnp.asarray(cotangent(logits, 3))
    bias = jnp.zeros(7, jnp.float32)
    mask = jnp.asarray(cases.random_mask(1, 11))
    indices = jnp.asarray(random_indices(1, 11, 7, 3))

    def everything():
        route(logits, 3)
        route(logits, 3, scaling_factor=2, valid_mask=mask, **BOTH)
        route(logits, 3, indices=indices, total_num_tokens=jnp.int32(5), **BOTH)
        step(logits, d_weights, 3, expert_bias=bias, loss_map="plain", **BOTH)
        jax.vmap(lambda x: route(x, 3, **BOTH))(logits[None])
        jax.vmap(lambda b: route(logits, 3, expert_bias=b))(bias[None])

    with count_compilations() as events:
        everything()
    assert events
    with count_compilations() as events:
        everything()
    assert not events


def test_route_other_values_of_n_take_no_compilation():
    run = jax.jit(lambda x, n: route(x, 2, total_num_tokens=n, **BOTH))
    logits = cases.logits("normal", 1, 12, 5)
    run(logits, np.int32(12))
    with count_compilations() as events:
        got = [run(logits, np.int32(n)) for n in (1, 100)]
    assert not events
    want = [route(logits, 2, total_num_tokens=n, **BOTH) for n in (1, 100)]
    assert_same_bits(got, want)


@pytest.mark.parametrize(("num_experts", "topk"), [(256, 8), (640, 8), (256, 33)])
@pytest.mark.parametrize("mode", MODES)
def test_route_memory_holds_no_tokens_by_experts(mode, num_experts, topk):
    """One read of the logits, one write of their gradient: what else there is, is smaller."""
    num_tokens = 8192

    def loss(x, w):
        out = route(x, topk, **BIG, **MODES[mode])
        return jnp.sum(out.weights * w) + out.aux_loss + out.z_loss

    shapes = [jax.ShapeDtypeStruct((num_tokens, n), jnp.float32) for n in (num_experts, topk)]
    lowered = jax.jit(jax.value_and_grad(loss)).lower(*shapes)
    calls = re.findall(r"custom_call @(\S+)\(", lowered.as_text())
    assert calls == ["jax_moe_det.route_fwd", "jax_moe_det.route_bwd"]
    memory = lowered.compile().memory_analysis()
    size = num_tokens * num_experts * 4
    assert memory.temp_size_in_bytes < size
    # A second such array would be seen.
    assert size <= memory.output_size_in_bytes < size + 1024


def test_route_d21_changing_inputs():
    """One compiled function: nothing is frozen into it, nothing stays behind."""
    run = jax.jit(
        lambda x, d, b, m, n: step(
            x, d, 4, score_function="sigmoid", num_groups=4, group_topk=2, expert_bias=b,
            valid_mask=m, total_num_tokens=n, **BIG,
        )
    )  # fmt: skip
    for i in range(20):
        logits = cases.logits(["special", "tied", "normal"][i % 3], i, 400, 16)
        d_weights = cotangent(logits, 4, i)
        bias, mask = cases.logits("normal", i, 1, 16)[0], cases.random_mask(i, 400)
        total = np.int32([4, 5, 7, 0, 1000][i % 5])
        want = expected(
            logits, d_weights, 4, score_function="sigmoid", num_groups=4, group_topk=2,
            expert_bias=bias, valid_mask=mask, total_num_tokens=total, **BIG,
        )  # fmt: skip
        assert_same_bits(run(logits, d_weights, bias, mask, total), want)


def test_route_d23_threads():
    inputs = [(x := cases.logits("normal", i, 300, 16), cotangent(x, 2, i)) for i in range(8)]
    want = [expected(*x, **BIG) for x in inputs]
    run = jax.jit(functools.partial(step, **BIG))
    run(*inputs[0])
    barrier = threading.Barrier(8)

    def work(i):
        barrier.wait()
        for _ in range(200):
            assert_same_bits(run(*inputs[i]), want[i])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_route_d25_two_routes_in_one_program():
    """With the same loss twice, and other ops of the package around them."""
    a, b = cases.logits("normal", 1, 64, 16), cases.logits("special", 2, 700, 33)

    def both(a, b):
        first = route(a, 4, **BOTH)
        return (
            first,
            route(b, 5, score_function="sigmoid", **BOTH),
            route(a, 4, **BOTH),
            route(a, 4, use_pre_softmax=True, **BOTH),
            fused_topk_with_score_function(a, 4),
            routing_stats(first.tokens_per_expert),
        )

    assert_same_bits(check_reproducible(jax.jit(both), a, b, repeats=20), both(a, b))


@pytest.mark.parametrize("num_tokens", [1, 3, 255, 300])
def test_route_dirty_workspace(num_tokens):
    """Nothing relies on zeroed memory: freed NaNs lie where the workspace may be put."""
    logits = cases.logits("normal", 1, num_tokens, 16)
    d_weights = cotangent(logits)

    @jax.jit
    def run(x, d):
        # A sort is no fusion: its NaNs stand in this program's temporary memory before the step.
        dirt = lax.optimization_barrier(jnp.sort(jnp.full((8, 8192), jnp.nan) * x[0, 0]))
        x = jnp.where(jnp.isnan(dirt).all(), x, 0)
        return [step(x, d, **BIG) for _ in range(3)]

    want = expected(logits, d_weights, **BIG)
    for _ in range(5):
        freed = [jax.block_until_ready(jnp.full(256 * 2**i, jnp.nan)) for i in range(10)]
        del freed
        assert_same_bits(step(logits, d_weights, **BIG), want)
        assert_same_bits(run(logits, d_weights), [want] * 3)


def process_inputs():
    logits = cases.lattice_logits(512, 256)
    return logits, np.float32(1) / (np.float32(5) + logits[:, :8])


PROCESS = """
    import jax
    import numpy as np
    import cases
    import test_route
    from jax_moe_det.testing import fingerprint

    run = jax.jit(lambda x, d: test_route.step(
        x, d, 8, score_function="sigmoid", aux_loss_coeff=0.01, z_loss_coeff=0.001))
    print(fingerprint(run(*test_route.process_inputs())))
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
def test_route_d30_processes_and_flags(run_python, flags):
    want = fingerprint(expected(*process_inputs(), 8, score_function="sigmoid", **BOTH))
    assert run_python(PROCESS, env={"XLA_FLAGS": flags}) == want


TARGETS = ("jax_moe_det.route_fwd", "jax_moe_det.route_bwd")
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(t) for t in TARGETS]


def test_route_d19_export_round_trip(run_python, tmp_path):
    """Leaves, since a Routing would need its type registered with jax.export."""
    logits, d_weights = process_inputs()
    platform = jax.default_backend()
    exported = jax.export.export(
        jax.jit(lambda x, d: jax.tree.leaves(step(x, d, 8, **BOTH))),
        platforms=["cuda" if platform == "gpu" else platform],
        disabled_checks=CHECKS,
    )(logits, d_weights)
    path = tmp_path / "exported"
    path.write_bytes(exported.serialize(vjp_order=0))
    program = """
        import pathlib
        import sys
        import jax
        import test_route
        from jax_moe_det.testing import fingerprint

        exported = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
        print(fingerprint(exported.call(*test_route.process_inputs())))
    """
    want = jax.tree.leaves(expected(logits, d_weights, 8, **BOTH))
    assert run_python(program, str(path)) == fingerprint(want)


def test_route_d19_export_of_the_derivative():
    def losses(x):
        out = route(x, 2, score_function="sigmoid", **BIG)
        return out.weights, out.aux_loss, out.z_loss

    exported = jax.export.export(jax.jit(losses), disabled_checks=CHECKS)(L4)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    cotangents = (D2, np.float32(D_AUX), np.float32(D_Z))
    grad = jax.vjp(again.call, L4)[1](cotangents)[0]
    assert_same_bits(grad, expected(L4, D2, score_function="sigmoid", **BIG)[1])
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility") as e:
        jax.export.export(jax.jit(losses))(L4)
    assert TARGETS[0] in str(e.value)


def test_route_d20_lowers_for_cuda_without_a_gpu(run_python):
    program = """
        import sys
        import jax
        import jax.numpy as jnp
        from jax import export
        import test_route
        from jax_moe_det import routing_stats, update_expert_bias

        assert jax.default_backend() == "cpu"

        def run(x, d, b, m, n):
            out, grad = test_route.step(
                x, d, score_function="sigmoid", expert_bias=b, valid_mask=m, total_num_tokens=n,
                aux_loss_coeff=0.01, z_loss_coeff=0.001, loss_map="plain")
            counts = out.tokens_per_expert
            others = routing_stats(counts), update_expert_bias(b, counts, 0.1)
            return jax.tree.leaves((out, grad, others))

        args = [jax.ShapeDtypeStruct(s, d) for s, d in (
            ((64, 8), jnp.bfloat16), ((64, 2), jnp.bfloat16), ((8,), jnp.float32), ((64,), bool),
            ((), jnp.int32))]
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
    targets = (*TARGETS, "jax_moe_det.routing_stats", "jax_moe_det.expert_bias_update")
    assert run_python(program, *targets, env={"JAX_PLATFORMS": "cpu"}) == "done"


# ---- Raw targets: the second line of checks

# Every attribute that a handler binds.
_SCORE = {"score_kind", "topk", "scaling_factor", "eps"}
_SELECTION = _SCORE | {"num_groups", "group_topk", "group_values"}
_LOSSES = {"aux_loss_coeff", "z_loss_coeff", "total_num_tokens"}
ATTRIBUTES = {
    "route_fwd": _SELECTION | _LOSSES,
    "route_pass": _SELECTION | {"rows_per_slot"},
    "route_partials": set(),
    "route_final": {"num_experts", "topk"} | _LOSSES,
    "route_bwd": _SCORE | {"distinct"} | _LOSSES,
    "routing_stats": set(),
    "expert_bias_update": set(),
}


def emitted_attributes(text):
    """Attribute names of each of our custom calls in compiled HLO or lowered StableHLO."""
    found = {}
    for line in text.splitlines():
        target = re.search(r"@?jax_moe_det\.(\w+)", line)
        if target and "custom" in line:
            config = re.search(r"backend_config ?= ?\{([^}]*)\}", line)
            found[target[1]] = set(re.findall(r"(\w+) = ", config[1])) if config else set()
    return found


def test_route_attributes_are_those_the_handlers_bind(cpu_devices):
    def everything(x, d):
        out, grad = step(x, d, **BIG)
        counts = out.tokens_per_expert
        return out, grad, routing_stats(counts), update_expert_bias(x[0], counts, 0.1)

    found = emitted_attributes(jax.jit(everything).lower(L4, D2).as_text())
    mesh = jax.make_mesh(
        (4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=cpu_devices[:4]
    )
    spec = jax.sharding.NamedSharding(mesh, jax.P("a"))
    logits = jax.device_put(cases.logits("normal", 1, 1024, 4), spec)
    sharded = jax.jit(lambda x: route(x, 2, **BIG)).lower(logits).compile().as_text()
    found |= emitted_attributes(sharded)
    assert found == ATTRIBUTES


def test_route_replayed_experts_may_repeat():
    """What lets the CUDA kernel write an expert's gradient once, and a replay forbids."""
    for indices, want in ((None, "true"), (np.array([[1, 1]]), "false")):
        run = functools.partial(step, indices=indices)
        assert f"distinct = {want}" in jax.jit(run).lower(L4, D2).as_text()


def given_attributes(target):
    attributes = {
        "score_kind": np.int64(2), "topk": np.int64(2), "scaling_factor": np.float32(1),
        "eps": np.float32(1e-20), "num_groups": np.int64(1), "group_topk": np.int64(1),
        "group_values": np.int64(1), "aux_loss_coeff": np.float64(10),
        "z_loss_coeff": np.float64(1), "total_num_tokens": np.float64(3),
        "rows_per_slot": np.int64(1), "num_experts": np.int64(4), "distinct": np.bool_(True),
    }  # fmt: skip
    return {name: attributes[name] for name in ATTRIBUTES[target]}


RAW_LOGITS = np.tile(L4, (3, 1)) * np.array([[1], [0.5], [-1]], np.float32)
RAW_OPTIONS = {"score_function": "sigmoid", **BIG}


def raw(target, operands, results, **changed):
    """A handler's own call; results are pairs of shape and dtype, the batch dimension leads."""
    attributes = {**given_attributes(target), **changed}
    attributes = {k: v for k, v in attributes.items() if v is not None}
    call = jax.ffi.ffi_call(
        f"jax_moe_det.{target}", [jax.ShapeDtypeStruct(*result) for result in results]
    )
    return jax.block_until_ready(call(*operands, **attributes))


F32, S32 = np.float32, np.int32
WORKSPACE = 256 * (4 + 2)
RAW_CHOICE = [((1, 3, 2), F32), ((1, 3, 2), S32), ((1, 4), S32), ((1, 0), S32)]
RAW_RESULTS = {
    "route_fwd": [*RAW_CHOICE, ((1,), F32), ((1,), F32), ((1, WORKSPACE), F32)],
    "route_pass": [*RAW_CHOICE, ((1, 3, 4), F32), ((1, 3), F32), ((1, 0), F32)],
    "route_partials": [((1, 3), F32)],
    "route_final": [((1,), F32), ((1,), F32)],
    "route_bwd": [((1, 3, 4), F32)],
    "routing_stats": [((1, 4), F32), ((1, 4), F32), ((1,), S32)],
    "expert_bias_update": [((1, 4), F32)],
}


def raw_operands():
    """Of every target, with the results that are wanted."""
    d_weights = cotangent(RAW_LOGITS)
    out, grad = expected(RAW_LOGITS, d_weights, **RAW_OPTIONS)
    logits, counts = RAW_LOGITS[None], out.tokens_per_expert[None]
    _, _, _, _, column_sums, z_partials, _ = raw("route_pass", (logits,), RAW_RESULTS["route_pass"])
    (partials,) = raw("route_partials", (column_sums, counts), RAW_RESULTS["route_partials"])
    one = np.ones(1, np.float32)
    return {
        "route_fwd": ((logits,), jax.tree.leaves(out)),
        "route_pass": ((logits,), jax.tree.leaves(out)[:3]),
        "route_partials": ((column_sums, counts), None),
        "route_final": ((partials, z_partials), [out.aux_loss, out.z_loss]),
        "route_bwd": (
            (logits, out.indices[None], counts, d_weights[None], D_AUX * one, D_Z * one),
            [grad],
        ),
        "routing_stats": ((counts,), None),
        "expert_bias_update": ((L4, counts, one), None),
    }


@pytest.mark.parametrize("target", ATTRIBUTES)
def test_route_handlers_bind_no_more_and_no_less(target):
    """And the pieces of the sharded step have its bits."""
    operands, want = raw_operands()[target]
    got = raw(target, operands, RAW_RESULTS[target])
    if want is not None:
        got = [x[0] for x in got if x.size]
        got = got[:5] if target == "route_fwd" else got[: len(want)]
        assert_same_bits(got, want)
    if not ATTRIBUTES[target]:  # of a target that binds none, the runtime does not look at them
        return
    wrong = [{name: None} for name in ATTRIBUTES[target]]
    for changed in [*wrong, {"extra": np.int64(1)}]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"attribute|Attribute"):
            raw(target, operands, RAW_RESULTS[target], **changed)


@pytest.mark.parametrize(
    ("shape", "dtype", "given"),
    [
        ((1, WORKSPACE - 1), F32, f"{4 * WORKSPACE - 4} bytes"),
        ((1, 4 * WORKSPACE - 1), np.int8, f"{4 * WORKSPACE - 1} bytes"),
        ((1, 4 * WORKSPACE), np.int8, f"{4 * WORKSPACE} bytes"),
        ((1, 0), F32, "0 bytes"),
        ((1, WORKSPACE + 1), F32, f"{4 * WORKSPACE + 4} bytes"),
        ((2, WORKSPACE), F32, f"{8 * WORKSPACE} bytes"),
        ((1, WORKSPACE), np.int32, "S32"),
        ((), F32, "4 bytes"),
    ],
)
def test_route_d27_wrong_workspace(shape, dtype, given):
    """INVALID_ARGUMENT with what is needed and given, before anything runs."""
    results = [*RAW_RESULTS["route_fwd"][:-1], (shape, dtype)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as error:
        raw("route_fwd", (RAW_LOGITS[None],), results)
    message = str(error.value)
    assert "route_fwd: workspace" in message
    assert given in message
    assert f"({4 * WORKSPACE} bytes)" in message.split("wanted")[1]


def test_route_d27_workspace_query():
    """Column sums and two partials for each slot; three numbers a token for the widest rows."""
    for num_tokens, num_experts, per_token in ((1, 4, 0), (4096, 512, 0), (100, 640, 3)):
        size = _ffi.route_workspace_size(num_tokens, num_experts, 8, 1, 1)
        assert size == 256 * (num_experts + 2) + per_token * num_tokens


@pytest.mark.parametrize(
    ("target", "changed", "words"),
    [
        ("route_fwd", {"topk": np.int64(5)}, ["topk", "5", "1 to 4"]),
        ("route_fwd", {"topk": np.int64(0)}, ["topk", "0", "1 to 4"]),
        ("route_fwd", {"score_kind": np.int64(4)}, ["score_kind", "4", "0 to 3"]),
        ("route_fwd", {"num_groups": np.int64(3)}, ["num_groups", "3", "divisor of 4"]),
        ("route_fwd", {"group_values": np.int64(5)}, ["group_values", "5"]),
        ("route_fwd", {"eps": np.float32(-1)}, ["eps", "-1"]),
        ("route_fwd", {"scaling_factor": np.float32(np.nan)}, ["scaling_factor", "nan"]),
        ("route_fwd", {"aux_loss_coeff": np.float64(np.inf)}, ["aux_loss_coeff", "inf"]),
        ("route_fwd", {"z_loss_coeff": np.float64(np.nan)}, ["z_loss_coeff", "nan"]),
        ("route_fwd", {"total_num_tokens": np.float64(-2)}, ["total_num_tokens", "-2"]),
        ("route_fwd", {"total_num_tokens": np.float64(-1)}, ["total_num_tokens"]),  # none came
        ("route_pass", {"rows_per_slot": np.int64(0)}, ["rows_per_slot", "0"]),
        ("route_pass", {"topk": np.int64(-1)}, ["topk", "-1"]),
        ("route_final", {"topk": np.int64(5)}, ["topk", "5", "1 to 4"]),
        ("route_final", {"num_experts": np.int64(0)}, ["num_experts", "0"]),
        ("route_bwd", {"topk": np.int64(5)}, ["topk", "5", "1 to 4"]),
        ("route_bwd", {"z_loss_coeff": np.float64(np.inf)}, ["z_loss_coeff", "inf"]),
    ],
)
def test_route_raw_call_checks_attributes(target, changed, words):
    operands, _ = raw_operands()[target]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as error:
        raw(target, operands, RAW_RESULTS[target], **changed)
    assert all(word in str(error.value) for word in [target, *words]), error.value


@pytest.mark.parametrize(
    ("target", "place", "wrong", "words"),
    [
        ("route_fwd", 0, np.zeros((1, 3, 5), F32), ["counts", "[1, 4]", "5"]),
        ("route_fwd", 0, np.zeros((2, 3, 4), F32), ["logits", "[2, 3, 4]"]),
        ("route_fwd", 0, np.zeros((1, 3, 4), np.int32), ["logits", "S32", "BF16"]),
        ("route_fwd", 1, np.zeros((1, 5), F32), ["expert_bias", "[1, 5]", "4"]),
        ("route_fwd", 1, np.zeros((1, 4), bool), ["valid_mask", "[1, 4]", "3"]),
        ("route_fwd", 1, np.zeros((1, 3, 3), S32), ["indices", "[1, 3, 3]", "2"]),
        ("route_fwd", 1, np.zeros((2,), S32), ["optional operand", "S32[2]"]),
        ("route_fwd", 1, np.zeros((1, 3, 2), np.int8), ["optional operand", "S8[1, 3, 2]"]),
        ("route_pass", 1, np.zeros((1,), S32), ["optional operand", "S32[1]"]),
        ("route_partials", 0, np.zeros((1, 257, 4), F32), ["column_sums", "257", "256"]),
        ("route_partials", 1, np.zeros((1, 5), S32), ["tokens_per_expert", "5", "4"]),
        ("route_final", 1, np.zeros((1, 4), F32), ["slots of z_partials", "4", "3"]),
        ("route_final", 0, np.zeros((2, 3), F32), ["partials", "[2, 3]"]),
        ("route_bwd", 1, np.zeros((1, 3, 3), S32), ["indices", "[1, 3, 3]", "2"]),
        ("route_bwd", 1, np.zeros((1, 3, 2), np.int8), ["indices", "S8", "S32"]),
        ("route_bwd", 3, np.zeros((1, 3, 2), jnp.bfloat16), ["d_weights", "BF16", "F32"]),
        ("route_bwd", 3, np.zeros((1, 2, 2), F32), ["d_weights", "[1, 2, 2]", "3"]),
        ("route_bwd", 4, np.zeros((2,), F32), ["d_aux_loss", "[2]"]),
        ("route_bwd", 5, np.zeros((1,), jnp.bfloat16), ["d_z_loss", "BF16", "F32"]),
        ("route_bwd", 6, np.zeros((1, 4), bool), ["valid_mask", "[1, 4]", "3"]),
    ],
)
def test_route_raw_call_checks_operands(target, place, wrong, words):
    operands = [*raw_operands()[target][0]]
    operands[place : place + 1] = [wrong]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as error:
        raw(target, operands, RAW_RESULTS[target])
    message = str(error.value)
    assert target in message
    assert all(word in message for word in words), message


# ---- Messages: the argument, what was given, what is allowed. At trace time, eager and in jit.


def under_jit(function):
    return jax.jit(function)()


@pytest.mark.parametrize("run", [lambda f: f(), under_jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("changed", "exception", "words"),
    [
        ({"logits": np.ones((4, 4), np.int8)}, TypeError, ["logits", "int8", "bfloat16"]),
        ({"logits": np.ones((4, 4), np.complex64)}, TypeError, ["logits", "complex64"]),
        ({"logits": np.ones(4, np.float32)}, ValueError, ["logits", "(4,)", "2 dimensions"]),
        ({"logits": np.ones((4, 0), np.float32)}, ValueError, ["logits", "(4, 0)", "8192"]),
        ({"logits": np.ones((1, 8193), np.float32)}, ValueError, ["logits", "8193", "8192"]),
        ({"topk": 0}, ValueError, ["topk", "0", "1 to 4"]),
        ({"topk": 5}, ValueError, ["topk", "5", "1 to 4"]),
        ({"topk": 2.0}, TypeError, ["topk", "2.0", "integer"]),
        ({"use_pre_softmax": 1}, TypeError, ["use_pre_softmax", "1", "True or False"]),
        ({"scaling_factor": np.nan}, ValueError, ["scaling_factor", "nan", "finite"]),
        ({"eps": -1e-9}, ValueError, ["eps", "-1e-09", ">= 0"]),
        ({"score_function": "relu"}, ValueError, ["score_function", "'relu'", "sqrtsoftplus"]),
        ({"group_score": "mean"}, ValueError, ["group_score", "'mean'", "top2"]),
        ({"expert_bias": np.zeros(5, np.float32)}, ValueError, ["expert_bias", "(5,)", "(4,)"]),
        ({"expert_bias": np.zeros(4, jnp.bfloat16)}, TypeError, ["expert_bias", "bfloat16"]),
        ({"valid_mask": np.ones(4, int)}, TypeError, ["valid_mask", "int", "bool"]),
        ({"valid_mask": np.ones(3, bool)}, ValueError, ["valid_mask", "(3,)", "(4,)"]),
        ({"num_groups": 2}, ValueError, ["num_groups and group_topk", "2 and -1", "both"]),
        ({"num_groups": 3, "group_topk": 1}, ValueError, ["num_groups", "3", "4"]),
        ({"num_groups": 2, "group_topk": 3}, ValueError, ["group_topk", "3", "1 to 2"]),
        # Checked with replay too.
        ({"num_groups": 3, "group_topk": 1, "indices": np.zeros((4, 2), int)}, ValueError,
         ["num_groups", "3", "4"]),
        ({"expert_bias": np.zeros(5, np.float32), "indices": np.zeros((4, 2), int)}, ValueError,
         ["expert_bias", "(5,)"]),
        ({"indices": np.zeros((4, 2), np.float32)}, TypeError, ["indices", "float32", "int32"]),
        ({"indices": np.zeros((4, 2), bool)}, TypeError, ["indices", "bool", "int32"]),
        ({"indices": np.zeros((4, 3), int)}, ValueError, ["indices", "(4, 3)", "(4, 2)"]),
        ({"indices": np.zeros(8, int)}, ValueError, ["indices", "(8,)", "(4, 2)"]),
        ({"aux_loss_coeff": np.inf}, ValueError, ["aux_loss_coeff", "inf", "finite"]),
        ({"aux_loss_coeff": None}, TypeError, ["aux_loss_coeff", "None"]),
        ({"aux_loss_coeff": True}, TypeError, ["aux_loss_coeff", "True"]),
        ({"z_loss_coeff": np.nan}, ValueError, ["z_loss_coeff", "nan", "finite"]),
        ({"z_loss_coeff": "1"}, TypeError, ["z_loss_coeff", "'1'"]),
        ({"z_loss_coeff": 1j}, TypeError, ["z_loss_coeff", "1j"]),
        ({"loss_map": "none"}, ValueError, ["loss_map", "'none'", "dispatch, plain"]),
        ({"loss_map": None}, TypeError, ["loss_map", "None", "dispatch"]),
        ({"loss_map": 0}, ValueError, ["loss_map", "0", "dispatch"]),
        ({"total_num_tokens": -1}, ValueError, ["total_num_tokens", "-1", ">= 0"]),
        ({"total_num_tokens": 4.0}, TypeError, ["total_num_tokens", "4.0", "integer"]),
        ({"total_num_tokens": True}, TypeError, ["total_num_tokens", "True"]),
        ({"axis_name": "data"}, ValueError, ["axis_name", "'data'", "shard_map"]),
    ],
)  # fmt: skip
def test_route_b29_d17_messages(changed, exception, words, run):
    arguments = {"logits": np.ones((4, 4), np.float32), "topk": 2, **changed}
    with pytest.raises(exception) as error:
        run(lambda: route(**arguments))
    message = str(error.value)
    assert message.startswith(words[0])
    assert all(word in message for word in words), message


def test_route_total_num_tokens_array_messages():
    for value, exception, words in (
        (jnp.float32(4), TypeError, ["float32", "integer scalar"]),
        (jnp.array([4]), ValueError, ["(1,)", "integer scalar"]),
        (jnp.array(True), TypeError, ["bool", "integer scalar"]),
    ):
        for run in (route, jax.jit(route, static_argnums=1, static_argnames="aux_loss_coeff")):
            with pytest.raises(exception) as error:
                run(L4, 2, total_num_tokens=value, aux_loss_coeff=0.01)
            message = str(error.value)
            assert message.startswith("total_num_tokens: got ")
            assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topk", 2), ("scaling_factor", 1.0), ("eps", 0.5), ("num_groups", 2), ("group_topk", 1),
        ("use_pre_softmax", True), ("score_function", 1), ("aux_loss_coeff", 0.01),
        ("z_loss_coeff", 0.01), ("loss_map", 0), ("group_score", 0),
    ],
)  # fmt: skip
def test_route_a27_traced_statics(name, value):
    value = jnp.asarray(value)
    with pytest.raises(TypeError, match=f"{name}: got a traced value.*{name} is static"):
        jax.jit(lambda v: route(**{"logits": L4, "topk": 2, name: v}))(value)
    with pytest.raises(TypeError, match=f"{name}: got a jax.Array.*{name} is static"):
        route(**{"logits": L4, "topk": 2, name: value})


def test_route_d16_float64():
    logits = L4.astype(np.float64)
    # Without x64 a NumPy float64 is cast, as JAX does everywhere.
    assert_same_bits(route(logits, 2, **BOTH), route(L4, 2, **BOTH))
    with jax.enable_x64(True):
        for given in (logits, jnp.asarray(logits)):
            for run in (route, jax.jit(route, static_argnums=1)):
                with pytest.raises(TypeError, match=r"logits.*float64.*float32, bfloat16, float16"):
                    run(given, 2)
        with pytest.raises(TypeError, match=r"expert_bias.*float64"):
            route(L4, 2, expert_bias=jnp.zeros(4, jnp.float64))


# ---- The bias update and the statistics


def all_stats(counts):
    return RoutingStats(*reference.routing_stats(counts))


def check_counts(counts, rate=0.001):
    """Both functions, eager and in jit, against the reference."""
    bias = np.linspace(-1, 1, len(counts), dtype=np.float32)
    want = all_stats(counts)
    assert_same_bits(routing_stats(counts), want)
    assert_same_bits(jax.jit(routing_stats)(counts), want)
    want = reference.update_expert_bias(bias, counts, rate)
    assert_same_bits(update_expert_bias(bias, counts, rate), want)
    run = jax.jit(update_expert_bias, static_argnums=2)
    assert_same_bits(run(bias, counts, rate), want)


def test_bias_update_f01():
    bias = np.array([0.5, -0.25, 0, -0.0], np.float32)
    got = update_expert_bias(bias, np.array([5, 3, 4, 4], np.int32), 0.001)
    step = np.float32(0.001)
    # At the mean the bias keeps its bits, also those of -0.
    want = np.array([np.float32(0.5) - step, np.float32(-0.25) + step, 0, -0.0], np.float32)
    assert_same_bits(got, want)
    zero = update_expert_bias(np.zeros(4, np.float32), [5, 3, 4, 4], 0.001)
    assert_same_bits(zero, np.array([-step, step, 0, 0], np.float32))


def test_bias_update_f02_exact_counts_decide_the_sign():
    """64 shards; in bfloat16 the sums would round, and the sign could flip."""
    rng = np.random.default_rng(0)
    shards = np.stack([rng.multinomial(n, np.full(64, 1 / 64)) for n in (40840, 41080)], axis=1)
    counts = jnp.sum(jnp.asarray(shards, jnp.int32), axis=0)
    assert counts.tolist() == [40840, 41080]  # mean 40960
    assert float(jnp.bfloat16(40840)) == 40960
    got = update_expert_bias(np.zeros(2, np.float32), counts, 0.001)
    assert_same_bits(got, np.array([0.001, -0.001], np.float32))


@pytest.mark.parametrize(
    ("counts", "signs"),
    [
        # A mean of 2^31 - 2 + 2/3: the sum does not fit int32, and the mean is no integer.
        (np.array([2**31 - 1, 2**31 - 2, 2**31 - 1], np.int32), [-1, 1, -1]),
        (np.array([2**24 + 1, 2**24, 2**24 + 1, 2**24 + 2], np.int32), [0, 1, 0, -1]),
        (np.array([2**24 + 2, 2**24, 2**24 + 1], np.float32), [-1, 1, 1]),  # 2^24 + 1 rounds
        (np.array([0.5, 0.25, 0.75], np.float32), [0, 1, -1]),
        (np.array([7], np.int32), [0]),
        (np.array([0, 0, 0], np.int32), [0, 0, 0]),
    ],
    ids=str,
)
def test_bias_update_signs(counts, signs):
    got = update_expert_bias(np.zeros(len(counts), np.float32), counts, 0.25)
    assert_same_bits(got, (0.25 * np.array(signs)).astype(np.float32))
    check_counts(counts)


def test_bias_update_rate():
    """Static or traced, of any real kind, rounded to float32; then one float32 addition."""
    bias = np.array([1, 1], np.float32)
    counts = np.array([1, 0], np.int32)
    want = reference.update_expert_bias(bias, counts, 0.1)
    assert_same_bits(want, np.array([1 - np.float32(0.1), 1 + np.float32(0.1)], np.float32))
    for rate in (0.1, np.float64(0.1), np.float32(0.1), np.array(0.1), jnp.float32(0.1)):
        assert_same_bits(update_expert_bias(bias, counts, rate), want)
        assert_same_bits(jax.jit(lambda r: update_expert_bias(bias, counts, r))(rate), want)
    with jax.enable_x64(True):
        assert_same_bits(update_expert_bias(bias, counts, jnp.float64(0.1)), want)
        assert_same_bits(update_expert_bias(bias, counts, 0.1), want)
    for rate in (2, np.int8(2), jnp.int32(2), jnp.bfloat16(2), -2.0):
        want = reference.update_expert_bias(bias, counts, float(rate))
        assert_same_bits(update_expert_bias(bias, counts, rate), want)
    for bits in (2.0**-149, 3e38, 0.0):  # subnormal, infinite sums, and none
        big = np.array([-3e38, 2.0**-149], np.float32)
        want = reference.update_expert_bias(big, counts, bits)
        assert_same_bits(update_expert_bias(big, counts, bits), want)
    nan = update_expert_bias(np.full(2, np.nan, np.float32), counts, jnp.float32(0.1))
    assert_same_bits(nan, np.full(2, np.nan, np.float32))


SIZES = (1, 2, 5, 127, 128, 129, 256, 700)


@pytest.mark.parametrize("num_experts", SIZES)
def test_stats_and_update_bits(num_experts):
    rng = np.random.default_rng(num_experts)
    for dtype in ("int32", "float32"):
        check_counts(cases.random_counts(1, num_experts, dtype))
        check_counts(cases.random_counts(2, num_experts, dtype, high=3))
    skewed = np.zeros(num_experts, np.int32)
    skewed[-1] = 2**31 - 1
    check_counts(skewed)
    check_counts(rng.integers(2**30, 2**31, num_experts).astype(np.int32))
    check_counts(np.zeros(num_experts, np.int32))
    check_counts(rng.integers(-(2**31), 2**31, num_experts).astype(np.int32))  # no real counts
    check_counts(np.ldexp(rng.random(num_experts), -149 + rng.integers(0, 270, num_experts))
                 .astype(np.float32))  # fmt: skip
    with jax.enable_x64(True):
        check_counts(cases.random_counts(3, num_experts, "int64"))
        check_counts(rng.integers(0, 2**62, num_experts))
        check_counts(np.array([*cases.random_counts(4, num_experts, "int64")]) + 2**53)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -1.0, -0.0, 2.0**-149, 3e38])
def test_stats_and_update_of_special_float_counts(value):
    for place in (0, 1, 130):
        counts = cases.random_counts(1, 131, "float32")
        counts[place] = value
        check_counts(counts)
    check_counts(np.full(3, value, np.float32))
    check_counts(np.array([value, -value, 0], np.float32))


def test_stats_hand_case():
    got = routing_stats(np.array([5, 3, 4, 4], np.int32))
    assert_same_bits(got.load, np.array([5, 3, 4, 4], np.float32) / np.float32(16))
    assert_same_bits((got.max_violation, got.min_violation), (np.float32(0.25), np.float32(0.25)))
    p = np.array([5, 3, 4, 4]) / 16
    entropy = -(p * np.log(p)).sum()
    np.testing.assert_allclose(got.entropy, entropy, rtol=6e-8)
    np.testing.assert_allclose(got.effective_experts, np.exp(entropy), rtol=2e-7)
    assert_same_bits(got.dead, np.int32(0))
    even = routing_stats([7] * 8)
    assert_same_bits((even.max_violation, even.min_violation), (np.float32(0), np.float32(0)))
    np.testing.assert_allclose((even.entropy, even.effective_experts), (np.log(8), 8), rtol=1e-7)
    one = routing_stats([0, 9, 0])
    assert_same_bits(one, RoutingStats(
        np.array([0, 1, 0], np.float32), np.float32(2), np.float32(1), np.float32(0),
        np.float32(1), np.int32(2)))  # fmt: skip
    # Exact where a float32 sum of the counts is not.
    got = routing_stats(np.array([2**24 + 1, 2**24 - 1], np.int32))
    assert_same_bits(got.max_violation, np.float32(2.0**-24))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("x64", [False, True])
def test_stats_of_no_tokens(dtype, x64):
    """All 0, but `dead`, which is num_experts; float32 and int32 also under x64."""
    zero = np.float32(0)
    want = RoutingStats(np.zeros(5, np.float32), zero, zero, zero, zero, np.int32(5))
    with jax.enable_x64(x64):
        assert_same_bits(routing_stats(np.zeros(5, dtype)), want)
        assert_same_bits(jax.jit(routing_stats)(np.zeros(5, dtype)), want)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("num_experts", SIZES)
def test_stats_error(num_experts, dtype):
    """One rounding to float32 of float64 values; two for exp(entropy)."""
    counts = cases.random_counts(1, num_experts, dtype, high=10000)
    got = routing_stats(counts)
    exact = counts.astype(np.float64)
    mean = exact.mean()
    load = exact / exact.sum()
    positive = load[load > 0]
    entropy = -(positive * np.log(positive)).sum()
    ulp = 2.0**-24
    np.testing.assert_allclose(got.load, load, rtol=ulp)
    np.testing.assert_allclose(got.max_violation, (exact.max() - mean) / mean, rtol=ulp, atol=1e-15)
    np.testing.assert_allclose(got.min_violation, (mean - exact.min()) / mean, rtol=ulp, atol=1e-15)
    np.testing.assert_allclose(got.entropy, entropy, rtol=1.001 * ulp, atol=1e-15)
    np.testing.assert_allclose(got.effective_experts, np.exp(entropy), rtol=8e-8 + ulp)
    assert int(got.dead) == (counts == 0).sum()


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40))
def test_stats_and_update_properties(numbers):
    counts = np.array(numbers, np.int32)
    got = to_numpy(routing_stats(counts))
    assert_same_bits(got, all_stats(counts))
    n, total = len(numbers), sum(numbers)
    if total:
        assert 0 <= got.max_violation <= n - 1
        assert 0 <= got.min_violation <= 1
        assert 1 <= got.effective_experts <= n * (1 + 1e-6)
        assert (got.load > 0).tolist() == [c > 0 for c in numbers]
    assert got.dead == numbers.count(0)
    bias = np.ones(n, np.float32)
    new = update_expert_bias(bias, counts, 0.5)
    signs = [(total > c * n) - (total < c * n) for c in numbers]
    assert np.asarray(new).tolist() == [1 + 0.5 * s for s in signs]


def test_stats_and_update_vmap():
    """Any mix of mapped operands equals the loop."""
    counts = np.stack([cases.random_counts(i, 9) for i in range(5)])
    counts[3] = 0
    bias = np.stack([cases.logits("normal", i, 1, 9)[0] for i in range(5)])
    rate = np.linspace(0, 1, 5, dtype=np.float32)
    want = stack([routing_stats(x) for x in counts])
    assert_same_bits(jax.vmap(routing_stats)(counts), want)
    assert_same_bits(jax.jit(jax.vmap(routing_stats, 1))(counts.T), want)
    assert_same_bits(
        jax.vmap(jax.vmap(routing_stats))(counts[None]), jax.tree.map(lambda x: x[None], want)
    )
    operands = (bias, counts, rate)
    for mapped in itertools.product([0, None], repeat=3):
        if mapped == (None,) * 3:
            continue
        given = [x if m == 0 else x[2] for x, m in zip(operands, mapped, strict=True)]
        want = stack(
            [
                update_expert_bias(*(x[i] if m == 0 else x for x, m in zip(
                    given, mapped, strict=True)))
                for i in range(5)
            ]
        )  # fmt: skip
        assert_same_bits(jax.jit(jax.vmap(update_expert_bias, mapped))(*given), want)
    for f in (routing_stats, lambda c: update_expert_bias(bias[0], c, 0.1)):
        assert jax.tree.leaves(jax.vmap(f)(np.zeros((0, 9), np.int32)))[0].shape == (0, 9)


def test_stats_and_update_have_no_derivative():
    """No gradient flows through them: zeros, also under a second derivative."""
    counts = np.array([1, 2.5, 4], np.float32)
    bias = np.array([0.5, 0.25, 0], np.float32)

    def f(b, c, r):
        stats = routing_stats(c)
        return update_expert_bias(b, c, r).sum() + stats.entropy + stats.load[0]

    operands = (bias, counts, np.float32(0.1))
    zeros = jax.tree.map(zeros_like, operands)
    assert_same_bits(jax.grad(f, argnums=(0, 1, 2))(*operands), zeros)
    assert_same_bits(jax.jvp(f, operands, operands)[1], np.float32(0))
    assert_same_bits(jax.hessian(f)(*operands), np.zeros((3, 3), np.float32))
    tokens = jax.grad(
        lambda x: (lambda r: r.z_loss + routing_stats(r.tokens_per_expert).entropy)(
            route(x, 2, z_loss_coeff=1.0)
        )
    )(L4)
    assert_same_bits(tokens, jax.grad(lambda x: route(x, 2, z_loss_coeff=1.0).z_loss)(L4))


def test_stats_and_update_types():
    """Never weakly typed, frozen pytrees, one compilation, and none when repeated eagerly."""
    counts = jnp.asarray(np.arange(11, dtype=np.int32))
    bias = jnp.zeros(11, jnp.float32)
    weak = jnp.broadcast_to(jnp.asarray(2), (11,))
    assert weak.weak_type
    weak_bias = jnp.broadcast_to(jnp.asarray(0.5), (11,))
    for out in (routing_stats(weak), update_expert_bias(weak_bias, weak, 0.1)):
        assert not any(x.weak_type for x in jax.tree.leaves(out))
    stats = routing_stats(counts)
    assert [f.name for f in dataclasses.fields(stats)] == [
        "load", "max_violation", "min_violation", "entropy", "effective_experts", "dead",
    ]  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.load = None

    def both(b, c):
        return update_expert_bias(b, c, 0.1), routing_stats(c)

    both(bias, counts)
    with count_compilations() as events:
        both(bias, counts)
    assert not events
    run = jax.jit(both)
    with count_compilations() as events:
        jax.block_until_ready(run(bias, counts))
    assert len(events) == 1


@pytest.mark.parametrize("run", [lambda f: f(), under_jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("changed", "exception", "words"),
    [
        ({"tokens_per_expert": np.ones(4, bool)}, TypeError, ["bool", "int32, int64, float32"]),
        ({"tokens_per_expert": np.ones(4, np.int8)}, TypeError, ["int8"]),
        ({"tokens_per_expert": np.ones(4, jnp.bfloat16)}, TypeError, ["bfloat16"]),
        ({"tokens_per_expert": np.ones(4, np.float64)}, TypeError, ["float64"]),
        ({"tokens_per_expert": np.array([2**32 + 1] * 4)}, ValueError, ["4294967297", "x64"]),
        ({"tokens_per_expert": np.ones((2, 4), np.int32)}, ValueError, ["(2, 4)"]),
        ({"tokens_per_expert": np.ones(0, np.int32)}, ValueError, ["(0,)", "at least one"]),
        ({"tokens_per_expert": np.int32(3)}, ValueError, ["()"]),
        ({"expert_bias": np.zeros(5, np.float32)}, ValueError, ["(5,)", "(4,)"]),
        ({"expert_bias": np.zeros(4, jnp.bfloat16)}, TypeError, ["bfloat16", "float32"]),
        ({"expert_bias": np.zeros(4, np.int32)}, TypeError, ["int32", "float32"]),
        ({"rate": np.inf}, ValueError, ["inf", "finite"]),
        ({"rate": 1e39}, ValueError, ["1e+39", "float32"]),
        ({"rate": "0.1"}, TypeError, ["'0.1'"]),
        ({"rate": True}, TypeError, ["True"]),
        ({"rate": np.zeros(4, np.float32)}, TypeError, ["[0., 0., 0., 0.]"]),
        ({"rate": jnp.array([0.1])}, ValueError, ["(1,)", "scalar"]),
        ({"rate": jnp.array(True)}, TypeError, ["bool", "scalar"]),
        ({"rate": jnp.array(1j)}, TypeError, ["complex64", "scalar"]),
    ],
)
def test_stats_and_update_messages(changed, exception, words, run):
    (name,) = changed
    arguments = {
        "expert_bias": np.zeros(4, np.float32),
        "tokens_per_expert": np.ones(4, np.int32),
        "rate": 0.1,
    } | changed
    functions = [lambda: update_expert_bias(**arguments)]
    if name == "tokens_per_expert":
        functions.append(lambda: routing_stats(changed[name]))
    for function in functions:
        with pytest.raises(exception) as error:
            run(function)
        message = str(error.value)
        assert message.startswith(f"{name}: got ")
        assert all(word in message for word in words), message


# ---- What only a GPU can show


def on_device(platform, function, *arguments):
    return jax.jit(function)(*jax.device_put(arguments, jax.devices(platform)[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", cases.SHAPES[:5], ids=str)
def test_route_gpu_equals_cpu(shape, mode, dtype):
    """Special rows apart from normal ones, which have losses that are no NaN."""
    many = cases.logits("normal", 9, shape.num_tokens, shape.num_experts, dtype)
    special = np.concatenate(
        [
            cases.logits(kind, i, 256, shape.num_experts, dtype)
            for i, kind in enumerate(cases.LOGIT_KINDS)
        ]
    )
    bias = cases.logits("normal", 3, 1, shape.num_experts)[0] / 4
    groups = {"num_groups": 8, "group_topk": 4, "group_score": "top2", "scaling_factor": 2.5}

    def run(x, d, mask, bias, indices):
        return [
            step(x, d, shape.topk, **MODES[mode], **BIG, **options)
            for options in (
                {},
                {"valid_mask": mask, "expert_bias": bias, "loss_map": "plain", **groups},
                {"indices": indices, "valid_mask": mask},
            )
        ] + [step(x, d, shape.topk, **MODES[mode])]

    for logits in (many, special):
        operands = (
            logits, cotangent(logits, shape.topk), cases.random_mask(1, len(logits)), bias,
            random_indices(1, len(logits), shape.num_experts, shape.topk),
        )  # fmt: skip
        assert_same_bits(on_device("cuda", run, *operands), on_device("cpu", run, *operands))


@pytest.mark.gpu
@no_gradient_warning
@pytest.mark.parametrize("num_experts", [1, 2, 5, 33, 100, 640, 2304, 8192])
def test_route_gpu_equals_cpu_odd_widths(num_experts):
    """Every kernel: rows in registers or not, few and many choices."""
    logits = np.concatenate(
        [cases.logits(kind, i, 100, num_experts) for i, kind in enumerate(cases.LOGIT_KINDS)]
    )
    normal = cases.logits("normal", 1, 1000, num_experts)
    for topk in sorted({k for k in (1, 2, 8, 36, num_experts) if k <= min(num_experts, 64)}):

        def run(x, d, topk=topk):
            return [step(x, d, topk, **mode, **BIG) for mode in MODES.values()]

        for x in (logits, normal):
            operands = (x, cotangent(x, topk))
            assert_same_bits(on_device("cuda", run, *operands), on_device("cpu", run, *operands))


@pytest.mark.gpu
def test_stats_and_update_gpu_equals_cpu():
    def run(b, counts):
        return [(routing_stats(c), update_expert_bias(b, c, 0.001)) for c in counts]

    for num_experts in SIZES:
        bias = cases.logits("normal", 1, 1, num_experts)[0]
        counts = [
            cases.random_counts(i, num_experts, d) for i, d in enumerate(["int32", "float32"])
        ]
        counts += [np.zeros(num_experts, np.int32)]
        counts[1][-1] = 2.0**-149
        gpu, cpu = (on_device(platform, run, bias, counts) for platform in ("cuda", "cpu"))
        assert_same_bits(gpu, cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["softmax", "pre_softmax", "sigmoid"])
def test_route_gpu_one_bit_pattern(mode):
    device = jax.devices("cuda")[0]
    logits = cases.logits("normal", 1, 4096, 256)
    d_weights = cotangent(logits, 8)
    run = jax.jit(lambda x, d: step(x, d, 8, **MODES[mode], **BIG))
    operands = jax.device_put((logits, d_weights), device)
    first = jax.tree.leaves(run(*operands))

    @jax.jit
    def same(a, b):  # of every bit, where they are
        pairs = zip(a, jax.tree.leaves(b), strict=True)
        bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
        return jnp.array([jnp.all(bits(x) == bits(y)) for x, y in pairs])

    assert all(bool(same(first, run(*operands)).all()) for _ in range(1000))
    assert_same_bits(first, jax.tree.leaves(on_device("cpu", run, logits, d_weights)))
    changed = operands[0].at[7, 7].set(100)  # the comparison can fail
    assert not same(first, run(changed, operands[1])).all()


@pytest.mark.gpu
def test_route_gpu_same_bits_beside_other_work():
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
        for num_tokens, num_experts in ((4096, 64), (8192, 256), (7000, 33), (500, 2304)):
            logits = cases.logits("normal", 1, num_tokens, num_experts)
            operands = jax.device_put((logits, cotangent(logits, 8)), device)
            run = jax.jit(lambda x, d: step(x, d, 8, **BIG))
            first = check_reproducible(run, *operands, repeats=100)
            assert_same_bits(first, on_device("cpu", run, *operands))
    finally:
        stop.set()
        thread.join()


REPLAY = """
    import hashlib
    import sys
    import jax
    import numpy as np
    import cases
    import test_route
    from jax_moe_det import routing_stats, update_expert_bias
    from jax_moe_det.testing import fingerprint

    @jax.jit
    def run(x, d, bias, mask, total):
        # Several of ours in one program, so that there is a graph to capture.
        big = {"aux_loss_coeff": 10.0, "z_loss_coeff": 1.0, "total_num_tokens": total}
        first = test_route.step(x, d, 4, **big)
        second = test_route.step(
            x, d, 4, score_function="sigmoid", expert_bias=bias, valid_mask=mask, loss_map="plain",
            **big)
        counts = second[0].tokens_per_expert
        replayed = test_route.step(x, d, 4, indices=first[0].indices, **big)
        return first, second, replayed, routing_stats(counts), update_expert_bias(bias, counts, .1)

    device = jax.devices(sys.argv[1])[0]
    digest = hashlib.sha256()
    for i in range(20):
        inputs = (cases.logits(["normal", "special"][i % 2], i, 500, 64),
                  cases.logits("normal", 100 + i, 500, 4),
                  cases.logits("normal", 200 + i, 1, 64)[0], cases.random_mask(i, 500),
                  np.int32([4, 5, 7, 0][i % 4]))
        digest.update(fingerprint(run(*jax.device_put(inputs, device))).encode())
    print(digest.hexdigest())
"""


@pytest.mark.gpu
def test_route_d21_gpu_command_buffers(run_python):
    """Twenty replays with other inputs and totals: the CPU's bits, captured or not."""
    want = run_python(REPLAY, "cpu")
    for flags in (
        "",
        "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_graph_min_graph_size=1",
    ):
        assert run_python(REPLAY, "cuda", env={"XLA_FLAGS": flags}) == want, flags


@pytest.mark.gpu
def test_route_d23_gpu_streams():
    """Threads that run one program at once, each with its inputs: no scratch is shared."""
    device = jax.devices("cuda")[0]
    inputs = [(x := cases.logits("normal", i, 3000, 64), cotangent(x, 4, i)) for i in range(4)]
    run = jax.jit(lambda x, d: step(x, d, 4, **BIG))
    want = [on_device("cpu", run, *x) for x in inputs]
    operands = [jax.device_put(x, device) for x in inputs]
    run(*operands[0])

    def work(i):
        for _ in range(50):
            assert_same_bits(run(*operands[i]), want[i])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.gpu
def test_route_b46_gpu_above_2_to_31_elements():
    """Rows past 2^31 elements are those of a small call, forward and backward.

    The losses' gradient depends on N and the counts: here it is of the weights alone, and that of
    the losses on the small call's counts, which are the big call's times a whole number.
    """
    num_experts, period, times = 2304, 4096, 228
    num_tokens = period * times
    assert num_tokens * num_experts > 2**31
    device = jax.devices("cuda")[0]
    logits = cases.lattice_logits(period, num_experts).astype(jnp.bfloat16)
    small = jax.device_put(logits, device)
    d_small = jnp.flip(small, axis=1)[:, :8]
    want, d_want = to_numpy(jax.jit(lambda x, d: step(x, d, 8))(small, d_small))
    # C has N squared below it and the counts above: as N grows, so do they.
    total = 1024
    losses = jax.jit(lambda x, d: step(x, d, 8, total_num_tokens=total, **BOTH))(small, d_small)

    @jax.jit
    def run(x, d):
        rows = jnp.arange(num_tokens) % period
        x, d = lax.optimization_barrier((x[rows], d[rows]))
        out, grad = step(x, d, 8)
        with_losses = step(x, d, 8, total_num_tokens=total, **BOTH)[0]
        ends = [(y[:64], y[-64:]) for y in (out.weights, out.indices, grad)]
        return ends, with_losses.tokens_per_expert, with_losses.aux_loss, with_losses.z_loss

    ends, counts, aux, z = to_numpy(run(small, d_small))
    rows = np.arange(num_tokens - 64, num_tokens) % period
    for (first, last), whole in zip(ends, (want.weights, want.indices, d_want), strict=True):
        assert_same_bits((first, last), (whole[:64], whole[rows]))
    assert_same_bits(counts, times * want.tokens_per_expert)
    np.testing.assert_allclose(aux, times**2 * np.float64(losses[0].aux_loss), rtol=3e-7)
    np.testing.assert_allclose(z, times * np.float64(losses[0].z_loss), rtol=3e-7)
