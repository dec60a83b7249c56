"""`route` on one device or many: the same bits, the fewest collectives, and true types.

All on eight CPU devices, whatever the default backend is. What is expected comes from the call on
one device, which test_route.py compares with the reference.
"""

from __future__ import annotations

import functools
import re
import socket

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AXIS_TYPES, assert_adds_no_floats, collectives, make_mesh, put

from jax_moe_det import (
    Routing,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    route,
    routing_stats,
    update_expert_bias,
)
from jax_moe_det.testing import assert_same_bits, check_reproducible

TOPK = 4
BOTH = {"aux_loss_coeff": 0.01, "z_loss_coeff": 0.1}
GROUPS = {
    "score_function": "sigmoid",
    "num_groups": 4,
    "group_topk": 2,
    "scaling_factor": 2.5,
}


@pytest.fixture(autouse=True)
def _on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


# ---- The step, and its operands: a dict, so that each test names those that it has.


def routing(given, **options):
    """The routing of operands under the names of the arguments of `route`."""
    others = {name: x for name, x in given.items() if name not in ("logits", "d_weights")}
    return route(given["logits"], TOPK, **others, **options)


def step(given, run=routing, **options):
    """The routing, and the gradient of the logits for cotangents of weights and both losses."""

    def total(logits):
        out = run({**given, "logits": logits}, **options)
        sum_of_weights = (out.weights * like(out.weights, given["d_weights"])).sum()
        if options.get("axis_name") is not None:  # one value of all devices, as the losses are
            sum_of_weights = lax.psum(sum_of_weights, options["axis_name"])
        return sum_of_weights + 0.75 * out.aux_loss + 1.25 * out.z_loss, out

    grad, out = jax.grad(total, has_aux=True)(given["logits"])
    return out, grad


def like(x, y):
    """`y` with the sharding in the type of `x`, which explicit meshes ask for."""
    sharding = jax.typeof(x).sharding
    explicit = not sharding.mesh.empty and sharding.mesh.explicit_axes
    return jax.reshard(y, sharding) if explicit else y


@functools.cache
def jitted_step(options):
    return jax.jit(functools.partial(step, **dict(options)))


def one_device(given, **options):
    """What one device gives, in NumPy arrays."""
    return jax.tree.map(np.asarray, jitted_step(tuple(options.items()))(given))


def operands(num_tokens, *names, num_experts=16, dtype="float32", kind="normal", seed=0):
    """Logits, the weights' cotangent and the named other operands."""
    everything = {
        "logits": cases.logits(kind, seed, num_tokens, num_experts, dtype),
        "d_weights": cases.logits("normal", seed + 1, num_tokens, TOPK, dtype),
        "expert_bias": cases.logits("normal", seed + 2, 1, num_experts)[0],
        "valid_mask": cases.random_mask(seed + 3, num_tokens),
        # Some of them repeat an expert, and some name none.
        "indices": np.random.default_rng(seed + 4)
        .integers(-1, num_experts + 1, (num_tokens, TOPK))
        .astype(np.int32),
        "total_num_tokens": np.int32(3 * num_tokens // 4 + seed),
    }
    return {name: everything[name] for name in ("logits", "d_weights", *names)}


def place(mesh, given, specs):
    """Operands on the mesh, by the specs under their names; the others replicated."""
    return {name: put(mesh, (x, specs.get(name, P())))[0] for name, x in given.items()}


def token_specs(*axes):
    """Specs of the operands that have tokens."""
    return dict.fromkeys(("logits", "d_weights", "valid_mask", "indices"), P(*axes))


def stack(items):
    return jax.tree.map(lambda *xs: np.stack(xs), *items)


def has_whole_slots(num_tokens, num_devices):
    """Is every device's shard a number of slots?"""
    return num_tokens % (num_devices * -(-num_tokens // 256)) == 0


def float_gathers(found):
    """Number of all-gathers of floats among the collectives of a program, which add no floats."""
    kinds = [kind for dtype, kind in found if dtype[0] in "fb"]
    assert not {"all-reduce", "reduce-scatter"} & {*kinds}, found
    return kinds.count("all-gather")


# Named operands and options: every output, each loss alone, both, and none.
STEPS = {
    "no_loss": ((), {}),
    "aux": ((), {"aux_loss_coeff": 0.01}),
    "z": (("valid_mask",), {"z_loss_coeff": 0.1}),
    "both": ((), BOTH),
    "masked": (("valid_mask",), {**BOTH, "use_pre_softmax": True}),
    "groups": (("expert_bias", "valid_mask"), {**BOTH, **GROUPS}),
    "plain": (
        ("expert_bias", "valid_mask", "total_num_tokens"),
        {**BOTH, **GROUPS, "loss_map": "plain"},
    ),
    "replay": (("indices", "total_num_tokens"), {**BOTH, "score_function": "sqrtsoftplus"}),
    "static_total": (("valid_mask",), {**BOTH, "total_num_tokens": 12345}),
}


# ---- jit on sharded arrays


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("num_tokens", [64, 1000, 2048])
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_route_d06_tokens_sharded(num_devices, num_tokens, name):
    """Tokens stay where they are; partials of both losses travel together, or the logits do."""
    mesh = make_mesh((num_devices,), ("dp",))
    names, options = STEPS[name]
    given = operands(num_tokens, *names)
    placed = place(mesh, given, token_specs("dp"))
    run = jax.jit(functools.partial(step, **options))
    out, grad = run(placed)
    assert_same_bits((out, grad), one_device(given, **options))
    for x in (out.weights, out.indices, grad):
        assert x.sharding.is_equivalent_to(placed["logits"].sharding, 2)
    for x in (out.tokens_per_expert, out.aux_loss, out.z_loss):
        assert x.sharding.is_fully_replicated
    found = collectives(run, placed)
    assert float_gathers(found) == (num_devices > 1 and name != "no_loss")
    if num_devices > 1 and (name == "no_loss" or has_whole_slots(num_tokens, num_devices)):
        # Else the mask travels with the logits.
        kinds = [kind for _, kind in found]
        assert kinds.count("all-gather") == (name != "no_loss")
        assert set(kinds) <= {"all-gather", "all-reduce"}


@pytest.mark.parametrize(("num_devices", "num_tokens"), [(3, 510), (5, 510), (6, 510), (7, 1792)])
def test_route_d06_odd_numbers_of_devices(num_devices, num_tokens):
    """255 slots on three or five devices; on six and seven, whose shards cut slots, a gather."""
    mesh = make_mesh((num_devices,), ("dp",))
    names, options = STEPS["plain"]
    given = operands(num_tokens, *names)
    run = jax.jit(functools.partial(step, **options))
    assert_same_bits(run(place(mesh, given, token_specs("dp"))), one_device(given, **options))


@pytest.mark.parametrize("coeffs", [("aux_loss_coeff", "z_loss_coeff"), ("z_loss_coeff",)])
def test_route_whole_slots_exchange_partials_only(coeffs):
    """One gather of 256 numbers for each loss that is on; the counts are added as integers."""
    mesh = make_mesh((8,), ("dp",))
    given = operands(4096, num_experts=64)
    placed = place(mesh, given, token_specs("dp"))
    run = jax.jit(functools.partial(step, **{name: BOTH[name] for name in coeffs}))
    text = run.lower(placed).compile().as_text()
    assert re.search(rf"f32\[{len(coeffs)},256\]\S* all-gather\(", text)
    found = collectives(run, placed)
    assert float_gathers(found) == 1
    assert ("s32", "all-reduce") in found
    for target in ("pass", "final", "bwd"):
        assert f"jax_moe_det.route_{target}" in text
    assert ("jax_moe_det.route_partials" in text) == (len(coeffs) == 2)
    assert "jax_moe_det.route_fwd" not in text


def test_route_sharded_is_the_loss_of_the_scores():
    """Sharded `route` has the bits of sharded top-k and loss, composed by the user."""
    mesh = make_mesh((8,), ("dp",))
    given = operands(2048, "expert_bias", "valid_mask")
    placed = place(mesh, given, token_specs("dp"))

    @jax.jit
    def composed(given):
        x, mask = given["logits"], given["valid_mask"]
        _, routing_map = fused_topk_with_score_function(
            x, TOPK, expert_bias=given["expert_bias"], valid_mask=mask, **GROUPS
        )
        scores, _ = fused_topk_with_score_function(
            x, TOPK, score_function="sigmoid", compute_aux_scores=True, valid_mask=mask
        )
        counts = jnp.sum(routing_map, axis=0, dtype=jnp.int32)
        return counts, fused_moe_aux_loss(scores, counts, TOPK, 0.01, valid_mask=mask)

    out = jax.jit(functools.partial(routing, **BOTH, **GROUPS))(placed)
    assert_same_bits((out.tokens_per_expert, out.aux_loss), composed(placed))


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_route_sharded_dtypes(dtype):
    mesh = make_mesh((8,), ("a",))
    for num_tokens in (64, 1000):
        given = operands(num_tokens, "valid_mask", num_experts=33, dtype=dtype)
        run = jax.jit(functools.partial(step, **BOTH))
        assert_same_bits(run(place(mesh, given, token_specs("a"))), one_device(given, **BOTH))


@pytest.mark.parametrize("kind", cases.LOGIT_KINDS)
def test_route_sharded_special_values(kind):
    mesh = make_mesh((8,), ("a",))
    for name in ("masked", "plain"):
        names, options = STEPS[name]
        given = operands(2048, *names, kind=kind)
        run = jax.jit(functools.partial(step, **options))
        got = run(place(mesh, given, token_specs("a")))
        assert_same_bits(got, one_device(given, **options))


SPECS = [
    P("a", None),
    P("b", None),
    P(("b", "a"), None),
    P(None, "a"),
    P(None, ("a", "b")),
    P("a", "b"),
    P("b", "a"),
    P(),
]


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_route_any_sharding_of_any_operand(spec, axis_type):
    """Experts sharded: gathered whole, never a local top-k. Other operands follow, or do not."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    rows, columns = (*spec, None, None)[:2]
    follow = {**token_specs(rows), "expert_bias": P(columns)}
    other = {
        "d_weights": P("b", "a"),
        "expert_bias": P(("a", "b")),
        "valid_mask": P("a"),
        "indices": P("b", "a"),
    }
    with jax.set_mesh(mesh):
        for name, specs in (("plain", follow), ("plain", {}), ("plain", other), ("replay", other)):
            names, options = STEPS[name]
            given = operands(64, *names)
            placed = place(mesh, given, {**specs, "logits": spec})
            run = jax.jit(functools.partial(step, **options))
            out, grad = run(placed)
            assert_same_bits((out, grad), one_device(given, **options))
            assert grad.sharding.is_equivalent_to(placed["logits"].sharding, 2)
            for x in (out.tokens_per_expert, out.aux_loss, out.z_loss):
                assert x.sharding.is_fully_replicated
            assert_adds_no_floats(run, placed)
        assert_same_bits(routing(placed, **options), out)  # eager


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (1, 512), (40, 25)], ids=str)
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P("b", None, "a")], ids=str)
def test_route_sharded_leading_dimensions(spec, shape, axis_type):
    """All leading dimensions are the tokens, in row-major order, however they are sharded."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    sizes = {None: 1, "a": 4, "b": 2}
    if any(size % sizes[axis] for size, axis in zip(shape, (*spec, None)[:2], strict=True)):
        spec = P(None, None, "a")
    num_tokens = shape[0] * shape[1]
    names, options = STEPS["plain"]
    flat = operands(num_tokens, *names)
    given = {
        name: x.reshape(*shape, *x.shape[1:]) if name in token_specs() else x
        for name, x in flat.items()
    }
    out, grad = one_device(flat, **options)
    want = (
        Routing(
            out.weights.reshape(*shape, TOPK),
            out.indices.reshape(*shape, TOPK),
            out.tokens_per_expert,
            out.aux_loss,
            out.z_loss,
        ),
        grad.reshape(*shape, 16),
    )
    with jax.set_mesh(mesh):
        placed = place(mesh, given, {**token_specs(*spec[:2]), "logits": spec})
        run = jax.jit(functools.partial(step, **options))
        out, grad = run(placed)
    assert_same_bits((out, grad), want)
    assert grad.sharding.is_equivalent_to(placed["logits"].sharding, 3)
    assert_adds_no_floats(run, placed)
    rows = NamedSharding(mesh, P(*spec[:2]))
    for x in (out.weights, out.indices):
        assert x.sharding.is_equivalent_to(rows, 3)


def test_route_leading_dimension_of_one_keeps_whole_slots():
    """A batch of one long sequence: its shards are consecutive tokens, and stay."""
    mesh = make_mesh((8,), ("a",))
    given = operands(2048)
    given = {name: x[None] for name, x in given.items()}
    run = jax.jit(functools.partial(step, **BOTH))
    placed = place(mesh, given, token_specs(None, "a"))
    assert_same_bits(run(placed), one_device(given, **BOTH))
    assert re.search(r"f32\[2,256\]\S* all-gather\(", run.lower(placed).compile().as_text())


@pytest.mark.parametrize("name", ["both", "groups"])
def test_route_d10_padded_tokens(name):
    """Ten tokens on four devices: padded to twelve, the padding masked."""
    mesh = make_mesh((4,), ("dp",))
    names, options = STEPS[name]
    given = operands(10, *(n for n in names if n != "valid_mask"))
    want, want_grad = one_device(given, **options)
    padded = dict(given, valid_mask=np.arange(12) < 10)
    for n in ("logits", "d_weights"):
        padded[n] = np.pad(given[n], ((0, 2), (0, 0)), constant_values=np.nan)
    run = jax.jit(functools.partial(step, **options))
    out, grad = run(place(mesh, padded, token_specs("dp")))
    for got, one, pad in (
        (out.weights, want.weights, 0),
        (out.indices, want.indices, 16),
        (grad, want_grad, 0),
    ):
        assert_same_bits(got, np.pad(one, ((0, 2), (0, 0)), constant_values=pad))
    for n in ("tokens_per_expert", "aux_loss", "z_loss"):
        assert_same_bits(getattr(out, n), getattr(want, n))


@pytest.mark.parametrize("num_tokens", [61, 250, 1001, 2043])
def test_route_uneven_shards_inside_jit(num_tokens):
    """Sizes that no device count divides, by a constraint inside the program."""
    mesh = make_mesh((4, 2), ("a", "b"))
    names, options = STEPS["plain"]
    given = operands(num_tokens, *names, num_experts=20)
    want = one_device(given, **options)
    for spec in (P(("a", "b")), P("a", "b"), P("b", "a"), P(None, "a")):

        @jax.jit
        def run(given, spec=spec):
            rows = NamedSharding(mesh, spec)
            x = lax.with_sharding_constraint(given["logits"] * 1, rows)
            return step({**given, "logits": x}, **options)

        assert_same_bits(run(given), want)


@pytest.mark.parametrize("name", ["both", "plain"])
def test_route_no_tokens_sharded(name):
    """No device has a token: shapes are kept, counts and losses are 0."""
    mesh = make_mesh((8,), ("a",))
    names, options = STEPS[name]
    given = operands(0, *names)
    want = one_device(given, **options)
    assert_same_bits(want[0].tokens_per_expert, np.zeros(16, np.int32))
    specs = {n: token_specs("a").get(n, P()) for n in given}
    placed = place(mesh, given, specs)
    assert_same_bits(jax.jit(functools.partial(step, **options))(placed), want)
    if "valid_mask" in names:
        return  # in shard_map XLA fails on a program that reads nothing but empty operands
    mapped = jax.shard_map(
        functools.partial(routing, axis_name="a", **options),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=GLOBAL,
    )
    assert_same_bits(jax.jit(functools.partial(step, run=mapped))(placed), want)


def test_route_in_and_out_shardings():
    mesh = make_mesh((4, 2), ("a", "b"))
    given = operands(2048)
    rows, whole = NamedSharding(mesh, P(("a", "b"))), NamedSharding(mesh, P())
    columns = NamedSharding(mesh, P(None, "a"))
    run = jax.jit(
        functools.partial(step, **BOTH),
        in_shardings=({"logits": rows, "d_weights": columns},),
        out_shardings=(Routing(whole, rows, NamedSharding(mesh, P("b")), whole, whole), columns),
    )
    got = check_reproducible(run, given, repeats=20)
    assert_same_bits(got, one_device(given, **BOTH))


def test_route_other_totals_take_no_compilation():
    """N traced: another value, the same program."""
    mesh = make_mesh((8,), ("a",))
    given = operands(2048, "total_num_tokens")
    run = jax.jit(functools.partial(step, **BOTH))
    totals = (2048, 77, 0, 2**31 - 1)
    want = [one_device({**given, "total_num_tokens": np.int32(n)}, **BOTH) for n in totals]
    jax.block_until_ready(run(place(mesh, given, token_specs("a"))))
    with count_compilations() as events:
        got = [
            run(place(mesh, {**given, "total_num_tokens": np.int32(n)}, token_specs("a")))
            for n in totals
        ]
        assert not events
    assert_same_bits(got, want)


def test_route_sharded_compiles_once():
    mesh = make_mesh((8,), ("a",))
    given = operands(72, num_experts=9)  # a shape of its own
    x = place(mesh, given, token_specs("a"))["logits"]
    run = functools.partial(route, topk=2, **BOTH)
    with count_compilations() as events:
        jax.block_until_ready(jax.jit(run)(x))
        assert len(events) == 1
        jax.block_until_ready(run(x))
        events.clear()
        jax.block_until_ready(run(x))
        assert not events


# ---- Batches


BATCH_SPECS = [
    # logits [batch, rows, columns], mask [batch, rows], bias [batch, columns]
    (P("a"), P("a"), P("a")),
    (P(None, "a"), P(None, "a"), P()),
    (P("a", "b"), P("a", "b"), P("a")),
    (P("b", None, "a"), P("b"), P("b", "a")),
    # One axis for different dimensions of different operands.
    (P(None, "a"), P("a"), P("a")),
    (P(), P("b", "a"), P("a", "b")),
]


@pytest.mark.parametrize(("num_tokens", "loss_map"), [(16, "dispatch"), (300, "plain")])
@pytest.mark.parametrize("specs", BATCH_SPECS, ids=str)
def test_route_batched_and_sharded(specs, num_tokens, loss_map):
    """Batches of whole slots or not; some operands shared by the batch; equal to a loop."""
    mesh = make_mesh((4, 2), ("a", "b"))
    options = {**BOTH, **GROUPS, "loss_map": loss_map}
    items = [
        operands(num_tokens, "expert_bias", "valid_mask", "total_num_tokens", seed=i)
        for i in range(8)
    ]
    by_name = dict(zip(("logits", "valid_mask", "expert_bias"), specs, strict=True))
    by_name["d_weights"] = P(*by_name["logits"][:2])
    batched = stack(items)
    # All batched; the logits shared by the batch; all but the logits shared.
    for shared in (
        (),
        ("logits",),
        ("logits", "valid_mask", "total_num_tokens"),
        ("valid_mask", "expert_bias", "total_num_tokens"),
    ):
        given = {n: x[0] if n in shared else x for n, x in batched.items()}
        dims = {n: None if n in shared else 0 for n in given}
        one = functools.partial(step, **options)
        want = stack(
            [
                one_device({n: x if n in shared else x[i] for n, x in given.items()}, **options)
                for i in range(8)
            ]
        )
        placed = place(
            mesh, given, {n: P(*s[1:]) if n in shared else s for n, s in by_name.items()}
        )
        run = jax.jit(jax.vmap(one, (dims,)))
        out, grad = run(placed)
        assert_same_bits((out, grad), want)
        if not shared:
            assert grad.sharding.is_equivalent_to(placed["logits"].sharding, 3)
        assert_adds_no_floats(run, placed)


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_route_shared_logits_gradient_of_a_sharded_batch(axis_type):
    """The gradient of shared logits is a sum over the batch, in the order of a loop."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    given = operands(64, "d_weights")
    biases = stack([operands(64, "expert_bias", seed=i)["expert_bias"] for i in range(8)])
    with jax.set_mesh(mesh):
        x, b = put(mesh, (given["logits"], P("b")), (biases, P("a")))

        def total(x, b):
            def one(x, b):
                return route(x, TOPK, expert_bias=b, **BOTH, **GROUPS)

            out = jax.vmap(one, (None, 0))(x, b)
            return out.weights.sum() + out.aux_loss.sum() + out.z_loss.sum()

        grad = jax.jit(jax.grad(total))(x, b)
    want = np.zeros((64, 16), np.float32)
    for bias in biases[::-1]:

        def one(x, bias=bias):
            out = route(x, TOPK, expert_bias=bias, **BOTH, **GROUPS)
            return out.weights.sum() + out.aux_loss + out.z_loss

        want += np.asarray(jax.jit(jax.grad(one))(given["logits"]))
    assert_same_bits(grad, want)
    assert grad.sharding.is_equivalent_to(x.sharding, 2)


def test_route_d02_vmap_spmd_axis_name():
    mesh = make_mesh((4, 2), ("a", "b"))
    items = [operands(64, "valid_mask", seed=i) for i in range(4)]
    want = stack([one_device(given, **BOTH) for given in items])
    with jax.set_mesh(mesh):
        placed = place(mesh, stack(items), token_specs("a", "b"))
        one = functools.partial(step, **BOTH)
        assert_same_bits(jax.jit(jax.vmap(one, spmd_axis_name="a"))(placed), want)

        def constrained(given):
            x = lax.with_sharding_constraint(given["logits"], P("b", None))
            return one({**given, "logits": x})

        assert_same_bits(jax.jit(jax.vmap(constrained, spmd_axis_name="a"))(placed), want)


def test_route_sharded_inside_a_model():
    """Logits from a sharded product, under scan and remat, in one program."""
    mesh = make_mesh((4, 2), ("dp", "tp"))
    x = np.random.default_rng(0).integers(-3, 4, (2048, 8)).astype(np.float32)
    w = np.random.default_rng(1).integers(-3, 4, (3, 8, 16)).astype(np.float32)

    @jax.checkpoint
    def layer(x, w):
        return x, route(x @ w, TOPK, **BOTH)  # of integers: exact in any order

    def run(x, w):
        return lax.scan(layer, x, w)[1]

    def loss(x, w):
        out = run(x, w)
        return (out.weights * out.weights).sum() + out.aux_loss.sum() + out.z_loss.sum()

    xs, ws = put(mesh, (x, P("dp", None)), (w, P(None, None, "tp")))
    assert_same_bits(jax.jit(run)(xs, ws), jax.jit(run)(x, w))
    grads = jax.jit(jax.grad(loss, argnums=1))
    np.testing.assert_allclose(grads(xs, ws), grads(x, w), rtol=1e-4, atol=1e-4)  # XLA's products


# ---- shard_map


GLOBAL = Routing(P("a"), P("a"), P(), P(), P())


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1000, 2048])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_route_shard_map_axis_name(num_devices, num_tokens, axis_type, check_vma):
    """Counts and losses of all tokens, replicated; the gradient from outside and from inside."""
    mesh = make_mesh((num_devices,), ("a",), axis_type)
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    all_names = ("no_loss", "both", "groups", "plain", "replay", "static_total")
    usual = axis_type is AXIS_TYPES[0] and check_vma and num_devices > 1
    for name in all_names if usual else ("groups", "plain"):
        names, options = STEPS[name]
        given = operands(num_tokens, *names)
        want = one_device(given, **options)
        specs = {n: token_specs("a").get(n, P()) for n in given}
        placed = place(mesh, given, specs)
        local = functools.partial(routing, axis_name="a", **options)
        mapped = wrap(local, in_specs=(specs,), out_specs=GLOBAL)
        outside = jax.jit(functools.partial(step, run=mapped))
        out, grad = outside(placed)
        assert_same_bits((out, grad), want)
        assert grad.sharding.is_equivalent_to(placed["logits"].sharding, 2)
        for x in (out.tokens_per_expert, out.aux_loss, out.z_loss):
            assert x.sharding.is_fully_replicated
        assert float_gathers(collectives(jax.jit(mapped), placed)) == (name != "no_loss")
        assert_adds_no_floats(outside, placed)
        if check_vma:
            inside = wrap(
                functools.partial(step, axis_name="a", **options),
                in_specs=(specs,),
                out_specs=(GLOBAL, P("a")),
            )
            assert_same_bits(jax.jit(inside)(placed), want)


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a"), "a", "b", ["a", "b"]], ids=str)
def test_route_shard_map_axes_of_a_mesh(axes):
    """Tokens over both axes in either order, or over one and replicated over the other."""
    mesh = make_mesh((4, 2), ("a", "b"))
    names, options = STEPS["plain"]
    given = operands(2048, *names)
    rows = P(tuple(axes) if isinstance(axes, list) else axes)
    specs = {n: rows if n in token_specs() else P() for n in given}
    mapped = jax.shard_map(
        functools.partial(routing, axis_name=axes, **options),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=Routing(rows, rows, P(), P(), P()),
    )
    got = jax.jit(functools.partial(step, run=mapped))(place(mesh, given, specs))
    assert_same_bits(got, one_device(given, **options))


def test_route_shard_map_leading_dimensions():
    """Inside, the tokens of one device follow those of the one before, whatever their shape."""
    mesh = make_mesh((8,), ("a",))
    names, options = STEPS["groups"]
    given = operands(2048, *names)
    given = {
        n: x.reshape(32, 64, *x.shape[1:]) if n in token_specs() else x for n, x in given.items()
    }
    specs = {n: token_specs("a").get(n, P()) for n in given}
    mapped = jax.shard_map(
        functools.partial(routing, axis_name="a", **options),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=GLOBAL,
    )
    got = jax.jit(functools.partial(step, run=mapped))(place(mesh, given, specs))
    assert_same_bits(got, one_device(given, **options))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_route_shard_map_local(axis_type, check_vma):
    """Without axis_name every device routes by itself, and nothing travels."""
    mesh = make_mesh((8,), ("a",), axis_type)
    names, options = STEPS["masked"]
    given = operands(512, *names)
    specs = {n: token_specs("a").get(n, P()) for n in given}

    def local(given):
        return jax.tree.map(lambda x: x[None], step(given, **options))

    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P("a"), check_vma=check_vma)
    )
    placed = place(mesh, given, specs)
    want = [
        one_device({n: x[64 * i : 64 * i + 64] for n, x in given.items()}, **options)
        for i in range(8)
    ]
    assert_same_bits(run(placed), stack(want))
    assert not collectives(run, placed)


def test_route_shard_map_constants_vary():
    """Logits and mask are the same everywhere, the bias varies by device: so do the results."""
    mesh = make_mesh((8,), ("a",))
    given = operands(64, "valid_mask")
    biases = stack([operands(64, "expert_bias", seed=i)["expert_bias"] for i in range(8)])
    options = {**BOTH, **GROUPS}

    def local(b):
        # A gradient of logits that do not vary would be that of all devices.
        x = lax.pcast(given["logits"], "a", to="varying")
        out = step({**given, "logits": x, "expert_bias": b[0]}, **options)
        return jax.tree.map(lambda y: y[None], out)

    want = stack([one_device({**given, "expert_bias": b}, **options) for b in biases])
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    assert_same_bits(run(biases), want)

    def forward(b):  # nor need the logits vary
        out = routing({**given, "expert_bias": b[0]}, **options)
        return jax.tree.map(lambda y: y[None], out)

    run = jax.jit(jax.shard_map(forward, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    assert_same_bits(run(biases), want[0])


ALL_NAMES = ("expert_bias", "valid_mask", "indices", "total_num_tokens")


@pytest.mark.parametrize("varies", ["logits", *ALL_NAMES])
def test_route_shard_map_wrong_out_specs_is_refused(varies):
    """A local routing varies by device in all it gives: JAX refuses to call any of it replicated.

    N alone may be read by the losses alone, yet the whole is one primitive.
    """
    mesh = make_mesh((8,), ("a",))
    given = operands(16, *ALL_NAMES)

    def local(x, field):
        # Gathered by a collective whose result still counts as varying.
        x = x[0] if varies == "total_num_tokens" else lax.all_gather(x, "a", tiled=True)
        return getattr(routing({**given, varies: x}, **BOTH), field)

    x = np.arange(8, dtype=np.int32) if varies == "total_num_tokens" else given[varies]
    for field in ("weights", "indices", "tokens_per_expert", "aux_loss", "z_loss"):
        run = jax.shard_map(
            functools.partial(local, field=field), mesh=mesh, in_specs=P("a"), out_specs=P()
        )
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(run)(x)


def test_route_shard_map_axis_name_of_varying_totals():
    """N that varies over the axis makes the losses vary, and nothing else."""
    mesh = make_mesh((8,), ("a",))
    given = operands(2048)
    totals = np.arange(1, 9, dtype=np.int32) * 100

    def local(x, n):
        out = route(x, TOPK, total_num_tokens=n[0], axis_name="a", **BOTH)
        return out.tokens_per_expert, out.aux_loss[None], out.z_loss[None]

    wrap = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("a"), P("a")))
    got = jax.jit(wrap(local, out_specs=(P(), P("a"), P("a"))))(given["logits"], totals)
    want = [one_device({**given, "total_num_tokens": n}, **BOTH)[0] for n in totals]
    assert_same_bits(got[0], want[0].tokens_per_expert)
    assert_same_bits(got[1:], (stack([x.aux_loss for x in want]), stack([x.z_loss for x in want])))
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(wrap(lambda x, n: local(x, n)[1][0], out_specs=P()))(given["logits"], totals)


def test_route_shard_map_axis_name_of_replicated_operands():
    """A bias that varies is no reason to call weights and indices replicated, nor are counts."""
    mesh = make_mesh((8,), ("a",))
    given = operands(64, "valid_mask")
    tiled = {n: np.tile(x, (8,) + (1,) * (x.ndim - 1)) for n, x in given.items()}
    want = one_device(tiled, **BOTH)[0]

    def local():
        # The logits are on every device: there are eight times as many tokens.
        return routing(given, axis_name="a", **BOTH)

    run = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=Routing(P(), P(), P(), P(), P()))
    out = jax.jit(run)()
    assert_same_bits(out.tokens_per_expert, want.tokens_per_expert)
    assert_same_bits((out.aux_loss, out.z_loss), (want.aux_loss, want.z_loss))
    assert_same_bits(out.weights, want.weights[:64])


@pytest.mark.parametrize("axis_name", ["a", None])
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("spec", [P(("a", "b"), None), P("a", "b"), P("a", None)], ids=str)
def test_route_shard_map_over_some_axes(spec, axis_type, axis_name):
    """Manual over one axis; XLA partitions over the other."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    names, options = STEPS["plain"]
    given = operands(2048, *names)
    manual = {n: token_specs("a").get(n, P()) for n in given}
    with jax.set_mesh(mesh):
        placed = place(mesh, given, {**manual, "logits": spec})

        def local(given):
            out = routing(given, axis_name=axis_name, **options)
            if axis_name is None:  # the local counts and losses, one after another
                one = (out.tokens_per_expert, out.aux_loss[None], out.z_loss[None])
                out = Routing(out.weights, out.indices, *one)
            return out

        mapped = jax.shard_map(
            local,
            in_specs=(manual,),
            out_specs=P("a") if axis_name is None else GLOBAL,
            axis_names={"a"},
        )
        got = jax.jit(mapped)(placed)

        def total(x):
            out = mapped({**placed, "logits": x})
            d_weights = like(out.weights, placed["d_weights"])
            losses = 0.75 * out.aux_loss.sum() + 1.25 * out.z_loss.sum()
            return (out.weights * d_weights).sum() + losses

        grad = jax.jit(jax.grad(total))(placed["logits"])
    if axis_name is not None:
        assert_same_bits((got, grad), one_device(given, **options))
        return
    parts = [
        one_device(
            {n: x[512 * i : 512 * i + 512] if n in token_specs() else x for n, x in given.items()},
            **options,
        )
        for i in range(4)
    ]
    want, want_grad = jax.tree.map(lambda *xs: np.concatenate([*map(np.atleast_1d, xs)]), *parts)
    assert_same_bits((got, grad), (want, want_grad))


@pytest.mark.parametrize("num_tokens", [1000, 2048])
def test_route_shard_map_vmap_scan_and_remat(num_tokens):
    mesh = make_mesh((8,), ("a",))
    names, options = STEPS["plain"]
    items = [operands(num_tokens, *names, seed=i) for i in range(3)]
    want = stack([one_device(given, **options) for given in items])
    batched = stack(items)
    one = functools.partial(step, axis_name="a", **options)
    specs = {n: P(None, *s) for n in batched for s in [token_specs("a").get(n, P())]}
    shared = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(Routing(P(None, "a"), P(None, "a"), P(), P(), P()), P(None, "a")),
    )

    def scanned(given):
        return lax.scan(lambda _, x: (None, jax.checkpoint(one)(x)), None, given)[1]

    for f in (jax.vmap(one), scanned, lambda given: lax.map(one, given)):
        assert_same_bits(jax.jit(shared(f))(batched), want)
    # vmap of a shard_map.
    inner = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=({n: token_specs("a").get(n, P()) for n in batched},),
        out_specs=(GLOBAL, P("a")),
    )
    assert_same_bits(jax.jit(jax.vmap(inner))(batched), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_route_d08_local_losses_and_psum(check_vma):
    """Local losses with a global N: the user's own psum makes the z-loss, and the gradient."""
    mesh = make_mesh((2,), ("dp",))
    given = operands(512)

    def f(x):
        out = route(x, TOPK, total_num_tokens=512, z_loss_coeff=0.1)
        return lax.psum((out.z_loss, out.tokens_per_expert), "dp")

    run = jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P(), check_vma=check_vma)
    grad, (z, counts) = jax.jit(
        jax.grad(lambda x: (run(x)[0], run(x)), has_aux=True),
    )(given["logits"])
    want = route(given["logits"], TOPK, z_loss_coeff=0.1)
    assert [s.data.item() for s in z.addressable_shards] == pytest.approx(
        [want.z_loss.item()] * 2, 1e-6
    )
    assert_same_bits(counts, want.tokens_per_expert)
    want_grad = jax.grad(lambda x: route(x, TOPK, z_loss_coeff=0.1).z_loss)(given["logits"])
    assert_same_bits(grad, want_grad)


def test_route_axis_name_outside_shard_map_is_refused():
    given = operands(16)
    with pytest.raises(ValueError, match="axis_name: got 'a'; allowed: mesh axes"):
        jax.jit(functools.partial(route, topk=2, axis_name="a"))(given["logits"])
    mesh = make_mesh((2,), ("a",))
    run = jax.shard_map(
        lambda x: route(x, 2, axis_name=("a", "c")).weights,
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P("a"),
    )
    with pytest.raises(ValueError, match=r"axis_name: got 'c'; allowed: .*'a'"):
        jax.jit(run)(given["logits"])


# ---- pmap


@pytest.mark.parametrize("num_tokens", [1000, 2048])
def test_route_d12_pmap_axis_name(num_tokens):
    """Each device has counts and losses of all tokens."""
    devices = jax.devices("cpu")[:8]
    names, options = STEPS["plain"]
    given = operands(num_tokens, *names)
    sharded = {
        n: x.reshape(8, -1, *x.shape[1:]) if n in token_specs() else x for n, x in given.items()
    }
    dims = {n: 0 if n in token_specs() else None for n in given}
    run = functools.partial(jax.pmap, axis_name="i", in_axes=(dims,), devices=devices)
    out = run(functools.partial(routing, axis_name="i", **options))(sharded)
    want, want_grad = one_device(given, **options)
    for name in ("weights", "indices"):
        one = getattr(want, name)
        assert_same_bits(getattr(out, name), one.reshape(8, -1, TOPK))
    for name in ("tokens_per_expert", "aux_loss", "z_loss"):
        one = getattr(want, name)
        assert_same_bits(getattr(out, name), np.broadcast_to(one, (8, *one.shape)))
    # Each of the eight devices has a sum of its own, and pmap's gradient is that of all of them.
    _, grad = run(functools.partial(step, axis_name="i", **options))(sharded)
    assert_same_bits(np.asarray(grad).reshape(num_tokens, 16), want_grad * np.float32(8))


def test_route_d12_pmap_local():
    devices = jax.devices("cpu")[:2]
    items = [operands(64, "valid_mask", seed=i) for i in range(2)]
    got = jax.pmap(functools.partial(step, **BOTH), devices=devices)(stack(items))
    assert_same_bits(got, stack([one_device(given, **BOTH) for given in items]))


# ---- The bias update and the statistics


COUNTS_SPECS = [P(), P("a"), P("b"), P(("a", "b"))]


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("spec", COUNTS_SPECS, ids=str)
def test_bias_update_and_stats_of_sharded_counts(spec, axis_type):
    """They read all experts, wherever these are; the results are on every device."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    bias = operands(1, "expert_bias")["expert_bias"]
    for dtype in ("int32", "float32"):
        counts = cases.random_counts(3, 16, dtype)
        counts[5] = 0
        want = jax.jit(routing_stats)(counts), jax.jit(update_expert_bias)(bias, counts, 0.01)
        with jax.set_mesh(mesh):
            for bias_spec in COUNTS_SPECS:
                c, b, rate = put(mesh, (counts, spec), (bias, bias_spec), (np.float32(0.01), P()))
                stats = jax.jit(routing_stats)(c)
                new_bias = jax.jit(update_expert_bias)(b, c, rate)
                assert_same_bits((stats, new_bias), want)
                for x in jax.tree.leaves(stats)[1:]:
                    assert x.sharding.is_fully_replicated
                run = jax.jit(lambda b, c: (routing_stats(c), update_expert_bias(b, c, 0.01)))
                assert_adds_no_floats(run, b, c)
            assert_same_bits((routing_stats(c), update_expert_bias(b, c, rate)), want)  # eager


def test_bias_update_and_stats_after_a_sharded_step():
    """The whole loop of aux-loss-free balancing, with tokens sharded, inside and outside."""
    mesh = make_mesh((8,), ("a",))
    given = operands(2048, "expert_bias")

    def train(given, axis_name=None):
        def one(bias, _):
            out = routing({**given, "expert_bias": bias}, axis_name=axis_name, **GROUPS)
            counts = out.tokens_per_expert
            return update_expert_bias(bias, counts, 0.01), routing_stats(counts)

        return lax.scan(one, given["expert_bias"], None, length=5)

    want = jax.jit(train)(given)
    specs = {n: token_specs("a").get(n, P()) for n in given}
    placed = place(mesh, given, specs)
    assert_same_bits(jax.jit(train)(placed), want)
    run = jax.shard_map(
        functools.partial(train, axis_name="a"), mesh=mesh, in_specs=(specs,), out_specs=P()
    )
    assert_same_bits(jax.jit(run)(placed), want)


def test_bias_update_and_stats_batched_and_sharded():
    """One row of counts for each layer, the layers sharded."""
    mesh = make_mesh((4, 2), ("a", "b"))
    counts = np.stack([cases.random_counts(i, 16) for i in range(8)])
    bias = cases.logits("normal", 1, 8, 16)
    rates = np.linspace(0.001, 0.008, 8).astype(np.float32)
    want = stack(
        [
            (jax.jit(routing_stats)(c), jax.jit(update_expert_bias)(b, c, r))
            for b, c, r in zip(bias, counts, rates, strict=True)
        ]
    )
    run = jax.jit(jax.vmap(lambda b, c, r: (routing_stats(c), update_expert_bias(b, c, r))))
    for specs in ((P("a"), P("a"), P("a")), (P("b", "a"), P("a", "b"), P()), (P(), P("a"), P("b"))):
        placed = put(mesh, *zip((bias, counts, rates), specs, strict=True))
        assert_same_bits(run(*placed), want)


@pytest.mark.parametrize("varies", ["bias", "counts", "rate"])
def test_bias_update_shard_map_wrong_out_specs_is_refused(varies):
    mesh = make_mesh((8,), ("a",))
    given = {
        "bias": operands(1, "expert_bias")["expert_bias"],
        "counts": cases.random_counts(1, 16),
        "rate": np.float32(0.01),
    }

    def local(x, update):
        x = x[0] if varies == "rate" else lax.all_gather(x, "a", tiled=True)
        now = {**given, varies: x}
        if update:
            return update_expert_bias(now["bias"], now["counts"], now["rate"])
        return routing_stats(now["counts"])

    x = np.full(8, 0.01, np.float32) if varies == "rate" else given[varies]
    for update in (True, False)[: 1 + (varies == "counts")]:
        run = jax.shard_map(
            functools.partial(local, update=update), mesh=mesh, in_specs=P("a"), out_specs=P()
        )
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(run)(x)


# ---- Export and processes


def test_route_export_of_a_sharded_program():
    mesh = make_mesh((8,), ("a",))
    given = operands(2048, "valid_mask")
    specs = token_specs("a")
    specs = {n: specs[n] for n in given}
    mapped = jax.shard_map(
        functools.partial(step, axis_name="a", **BOTH),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(GLOBAL, P("a")),
    )
    run = jax.jit(mapped, in_shardings=({n: NamedSharding(mesh, s) for n, s in specs.items()},))
    targets = (f"jax_moe_det.route_{name}" for name in ("pass", "partials", "final", "bwd"))
    jax.export.register_pytree_node_serialization(
        Routing,
        serialized_name="jax_moe_det.Routing",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )
    exported = jax.export.export(
        run,
        platforms=["cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(t) for t in targets],
    )(given)
    again = jax.export.deserialize(exported.serialize())
    got = jax.jit(again.call)(place(mesh, given, specs))
    assert_same_bits(got, one_device(given, **BOTH))


PROCESS = """
    import functools
    import sys
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))

    from jax_moe_det.testing import assert_same_bits
    from test_route_sharding import GLOBAL, STEPS, one_device, operands, routing, step, token_specs

    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("a",), axis_types=(axis_type,))
        for num_tokens in (1000, 2048):
            names, options = STEPS["plain"]
            given = operands(num_tokens, *names)
            want = one_device(given, **options)
            specs = {n: token_specs("a").get(n, P()) for n in given}

            def place(specs):
                return {
                    n: jax.make_array_from_callback(
                        x.shape, NamedSharding(mesh, specs[n]), np.asarray(x).__getitem__)
                    for n, x in given.items()}

            mapped = jax.shard_map(
                functools.partial(routing, axis_name="a", **options),
                mesh=mesh, in_specs=(specs,), out_specs=GLOBAL)
            for run, placed in (
                (functools.partial(step, **options), place(specs)),
                (functools.partial(step, **options), place({**specs, "logits": P(None, "a")})),
                (functools.partial(step, run=mapped), place(specs)),
            ):
                with jax.set_mesh(mesh):
                    got = jax.jit(run)(placed)
                for x, one in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                    assert len(x.addressable_shards) == 4
                    for shard in x.addressable_shards:
                        assert_same_bits(np.asarray(shard.data), one[shard.index])
    print("done")
"""


def test_route_two_processes(run_python):
    """Two processes of four devices: the bits of one device, over another collective library."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    waits = [run_python.start(PROCESS, str(i), address, env=env) for i in range(2)]
    assert [wait().splitlines()[-1] for wait in waits] == ["done", "done"]
