"""The router on one device or many: the same bits, no collective where none is needed, true types.

All on eight CPU devices, whatever the default backend is.
"""

from __future__ import annotations

import functools
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

from jax_moe_det import fused_moe_aux_loss, fused_topk_with_score_function, reference
from jax_moe_det.testing import assert_same_bits, check_reproducible

SIGMOID = {
    "score_function": "sigmoid",
    "num_groups": 4,
    "group_topk": 2,
    "scaling_factor": 2.5,
}


@pytest.fixture(autouse=True)
def _on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def router(logits, topk=4, **options):
    return fused_topk_with_score_function(logits, topk, **options)


def with_gradient(logits, d_out, bias=None, mask=None, **options):
    """Weights or scores, map and gradient."""
    out, vjp, routing_map = jax.vjp(
        lambda x: router(x, expert_bias=bias, valid_mask=mask, **options), logits, has_aux=True
    )
    return out, routing_map, vjp(d_out)[0]


def sigmoid_step(logits, d_out, bias, mask):
    return with_gradient(logits, d_out, bias, mask, **SIGMOID)


def expected(logits, d_out, bias=None, mask=None, **options):
    """The same from the reference."""
    options |= {"expert_bias": bias, "valid_mask": mask}
    out, routing_map = reference.topk_router(logits, 4, **options)
    return out, routing_map, reference.topk_router_grad(logits, routing_map, d_out, 4, **options)


def inputs(num_tokens, num_experts=16, dtype="float32", kind="special", seed=0):
    """Logits, cotangent, bias and mask."""
    return (
        cases.logits(kind, seed, num_tokens, num_experts, dtype),
        cases.logits("normal", seed + 1, num_tokens, num_experts, dtype),
        cases.logits("normal", seed + 2, 1, num_experts)[0],
        cases.random_mask(seed + 3, num_tokens),
    )


def stack(items):
    return jax.tree.map(lambda *xs: np.stack(xs), *items)


# ---- jit on sharded arrays


@pytest.mark.parametrize("num_tokens", [8, 64, 1000])
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_topk_router_d06_rows_sharded(num_devices, num_tokens):
    """No collective at all: rows do not meet."""
    mesh = make_mesh((num_devices,), ("dp",))
    logits, d_out, bias, mask = inputs(num_tokens)
    x, d, m = put(mesh, (logits, P("dp")), (d_out, P("dp", None)), (mask, P("dp")))
    run = jax.jit(sigmoid_step)
    got = run(x, d, bias, m)
    assert_same_bits(got, expected(logits, d_out, bias, mask, **SIGMOID))
    for y in got:
        assert y.sharding.is_equivalent_to(x.sharding, 2)
    assert not collectives(run, x, d, bias, m)
    plain = jax.jit(with_gradient)
    assert_same_bits(plain(x, d), expected(logits, d_out))
    assert not collectives(plain, x, d)


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
@pytest.mark.parametrize("options", [
    {"use_pre_softmax": True},
    {"score_function": "sqrtsoftplus", "routing_map_format": "bitmap_u8"},
    {"score_function": "sigmoid", "compute_aux_scores": True},
], ids=str)  # fmt: skip
def test_topk_router_sharded_modes(options, dtype):
    mesh = make_mesh((8,), ("a",))
    logits, d_out, _, mask = inputs(64, 33, dtype)
    if "compute_aux_scores" in options:
        d_out = d_out.astype(np.float32)
    x, d, m = put(mesh, (logits, P("a")), (d_out, P("a")), (mask, P("a")))
    got = jax.jit(lambda x, d, m: with_gradient(x, d, None, m, **options))(x, d, m)
    assert_same_bits(got, expected(logits, d_out, None, mask, **options))


SPECS = [
    P("a", None),
    P(("b", "a"), None),
    P(None, "a"),
    P(None, ("a", "b")),
    P("a", "b"),
    P("b", "a"),
    P(),
]


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_topk_router_any_sharding_of_any_operand(spec, axis_type):
    """Experts sharded: gathered whole, never a local top-k."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    logits, d_out, bias, mask = inputs(64)
    rows, columns = (*spec, None, None)[:2]
    want = expected(logits, d_out, bias, mask, **SIGMOID)
    with jax.set_mesh(mesh):
        for d_spec, bias_spec, mask_spec in (
            (spec, P(columns), P(rows)),
            (P(), P(), P()),
            (P("b", "a"), P(("a", "b")), P("a")),
        ):
            operands = put(
                mesh, (logits, spec), (d_out, d_spec), (bias, bias_spec), (mask, mask_spec)
            )
            # An explicit mesh has a cotangent sharded as its primal's result.
            run = jax.jit(lambda x, d, b, m: sigmoid_step(x, _as_result(x, d), b, m))
            got = run(*operands)
            assert_same_bits(got, want)
            assert got[2].sharding.is_equivalent_to(operands[0].sharding, 2)
            assert_adds_no_floats(run, *operands)
        x, d = put(mesh, (logits, spec), (d_out, spec))
        got = with_gradient(x, _as_result(x, d))  # eager
        assert_same_bits(got, expected(logits, d_out))


def _as_result(x, d):
    """The cotangent with the sharding that the weights' type has, on an explicit mesh."""
    sharding = jax.typeof(jax.eval_shape(router, x)[0]).sharding
    mesh = sharding.mesh
    return jax.reshard(d, sharding) if not mesh.empty and mesh.explicit_axes else d


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P("b", None, "a")], ids=str)
def test_topk_router_sharded_leading_dimensions(spec, axis_type):
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    logits, _, bias, mask = inputs(8 * 8)
    want = expected(logits, np.ones_like(logits), bias, mask, **SIGMOID)
    want = jax.tree.map(lambda x: x.reshape(8, 8, 16), want)
    with jax.set_mesh(mesh):
        x, m = put(mesh, (logits.reshape(8, 8, 16), spec), (mask.reshape(8, 8), P(*spec[:2])))

        def f(x):
            out, routing_map = router(x, expert_bias=bias, valid_mask=m, **SIGMOID)
            return out.sum(), (out, routing_map)

        grad, (out, routing_map) = jax.jit(jax.grad(f, has_aux=True))(x)
    assert_same_bits((out, routing_map, grad), want)
    assert grad.sharding.is_equivalent_to(x.sharding, 3)
    if len(spec) < 3:
        assert out.sharding.is_equivalent_to(x.sharding, 3)


def test_topk_router_d10_padded_tokens():
    """Ten tokens on four devices: padded to twelve, the padding masked."""
    logits, d_out, *_ = inputs(10, kind="normal")
    padding = np.full((2, 16), np.nan, np.float32)
    mesh = make_mesh((4,), ("dp",))
    x, d, m = put(
        mesh,
        (np.concatenate([logits, padding]), P("dp")),
        (np.concatenate([d_out, padding]), P("dp")),
        (np.arange(12) < 10, P("dp")),
    )
    got = jax.jit(lambda x, d, m: with_gradient(x, d, None, m))(x, d, m)
    for padded, want in zip(got, expected(logits, d_out), strict=True):
        assert_same_bits(np.asarray(padded)[:10], want)
        assert_same_bits(np.asarray(padded)[10:], np.zeros((2, 16), want.dtype))


def test_topk_router_uneven_shards_inside_jit():
    """61 rows over eight devices, 17 experts over two, by a constraint inside the program."""
    mesh = make_mesh((4, 2), ("a", "b"))
    logits, d_out, *_ = inputs(61, 17, kind="infinite")
    for spec in (P(("a", "b")), P("a", "b"), P(None, "a")):

        @jax.jit
        def run(x, d, spec=spec):
            x = lax.with_sharding_constraint(x * 1, NamedSharding(mesh, spec))
            return with_gradient(x, d)

        assert_same_bits(run(logits, d_out), expected(logits, d_out))


def test_topk_router_in_and_out_shardings():
    mesh = make_mesh((4, 2), ("a", "b"))
    logits, d_out, *_ = inputs(64)
    rows, whole = NamedSharding(mesh, P(("a", "b"))), NamedSharding(mesh, P())
    columns = NamedSharding(mesh, P(None, "a"))
    run = jax.jit(with_gradient, in_shardings=(rows, columns), out_shardings=(whole, rows, columns))
    got = check_reproducible(run, logits, d_out, repeats=20)
    assert_same_bits(got, expected(logits, d_out))


@pytest.mark.parametrize(
    "specs",
    [
        # logits and cotangent [batch, rows, columns], bias [batch, columns], mask [batch, rows]
        (P("a"), P("a"), P("a"), P("a")),
        (P(None, "a"), P(None, "a"), P(), P(None, "a")),
        (P("a", "b"), P("a", "b"), P("a"), P("a", "b")),
        (P("b", None, "a"), P("b", "a"), P("b", "a"), P("b")),
        # One axis for different dimensions of different operands.
        (P(None, "a"), P("a"), P("a"), P("a")),
        (P(), P("b", "a"), P("a", "b"), P("b", "a")),
    ],
    ids=str,
)
def test_topk_router_batched_and_sharded(specs):
    mesh = make_mesh((4, 2), ("a", "b"))
    items = [inputs(16, seed=i) for i in range(8)]
    want = stack([expected(*x, **SIGMOID) for x in items])
    operands = put(mesh, *zip(stack(items), specs, strict=True))
    run = jax.jit(jax.vmap(sigmoid_step))
    got = run(*operands)
    assert_same_bits(got, want)
    assert_adds_no_floats(run, *operands)
    # Logits, or all but the logits, shared by the batch.
    logits, d_out, bias, mask = stack(items)
    (x,) = put(mesh, (logits[0], P(*specs[0][1:])))
    got = jax.jit(jax.vmap(sigmoid_step, (None, 0, 0, 0)))(x, *operands[1:])
    want = [expected(logits[0], *y, **SIGMOID) for y in zip(d_out, bias, mask, strict=True)]
    assert_same_bits(got, stack(want))
    got = jax.jit(jax.vmap(sigmoid_step, (0, 0, None, None)))(*operands[:2], bias[0], mask[0])
    want = [expected(*y, bias[0], mask[0], **SIGMOID) for y in zip(logits, d_out, strict=True)]
    assert_same_bits(got, stack(want))


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_topk_router_shared_logits_gradient_of_a_sharded_batch(axis_type):
    """The gradient of shared logits is a sum over the batch, in the order of a loop."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    logits, _, _, mask = inputs(16, kind="normal")
    bias = np.stack([inputs(16, seed=i)[2] for i in range(8)])
    with jax.set_mesh(mesh):
        x, b = put(mesh, (logits, P("b")), (bias, P("a")))

        def total(x, b):
            one = functools.partial(router, valid_mask=mask, **SIGMOID)
            return jax.vmap(lambda x, b: one(x, expert_bias=b)[0], (None, 0))(x, b).sum()

        grad = jax.jit(jax.grad(total))(x, b)
    want = np.zeros((16, 16), np.float32)
    for one in bias[::-1]:
        want += expected(logits, np.ones_like(logits), one, mask, **SIGMOID)[2]
    assert_same_bits(grad, want)
    assert grad.sharding.is_equivalent_to(x.sharding, 2)


def test_topk_router_d02_vmap_spmd_axis_name():
    mesh = make_mesh((4, 2), ("a", "b"))
    items = [inputs(16, seed=i)[:2] for i in range(4)]
    want = stack([expected(*x) for x in items])
    with jax.set_mesh(mesh):
        operands = put(mesh, *((x, P("a", "b")) for x in stack(items)))
        run = jax.jit(jax.vmap(with_gradient, spmd_axis_name="a"))
        assert_same_bits(run(*operands), want)

        def constrained(x, d):
            return with_gradient(lax.with_sharding_constraint(x, P("b", None)), d)

        assert_same_bits(jax.jit(jax.vmap(constrained, spmd_axis_name="a"))(*operands), want)


def test_topk_router_sharded_inside_a_model():
    """Logits from a sharded product, under scan and remat; the loss beside the weights."""
    mesh = make_mesh((4, 2), ("dp", "tp"))
    x = np.random.default_rng(0).integers(-3, 4, (64, 8)).astype(np.float32)
    w = np.random.default_rng(1).integers(-3, 4, (3, 8, 16)).astype(np.float32)

    @jax.checkpoint
    def layer(x, w):
        logits = x @ w  # of integers: exact in any order
        weights, routing_map = router(logits)
        scores, _ = router(logits, compute_aux_scores=True)
        counts = jnp.sum(routing_map, axis=0, dtype=jnp.int32)
        return x, (weights, counts, fused_moe_aux_loss(scores, counts, 4, 0.01))

    def run(x, w):
        return lax.scan(layer, x, w)[1]

    def loss(x, w):
        weights, _, losses = run(x, w)
        return (weights * weights).sum() + losses.sum()

    xs, ws = put(mesh, (x, P("dp", None)), (w, P(None, None, "tp")))
    assert_same_bits(jax.jit(run)(xs, ws), jax.jit(run)(x, w))
    grads = jax.jit(jax.grad(loss, argnums=1))
    np.testing.assert_allclose(grads(xs, ws), grads(x, w), rtol=1e-4, atol=1e-5)  # XLA's products


def test_topk_router_sharded_compiles_once():
    mesh = make_mesh((8,), ("a",))
    logits, d_out, *_ = inputs(72, 9)  # a shape of its own
    x, d = put(mesh, (logits, P("a")), (d_out, P("a")))
    with count_compilations() as events:
        jax.block_until_ready(jax.jit(with_gradient)(x, d))
        assert len(events) == 1
        jax.block_until_ready(with_gradient(x, d))
        events.clear()
        jax.block_until_ready(with_gradient(x, d))
        assert not events


# ---- shard_map


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_topk_router_shard_map(num_devices, axis_type, check_vma):
    """Local rows, a replicated bias; the gradient from outside and from inside."""
    mesh = make_mesh((num_devices,), ("a",), axis_type)
    logits, d_out, bias, mask = inputs(64)
    specs = (P("a"), P("a"), P(), P("a"))
    operands = put(mesh, *zip((logits, d_out, bias, mask), specs, strict=True))
    want = expected(logits, d_out, bias, mask, **SIGMOID)
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    inside = jax.jit(wrap(sigmoid_step, in_specs=specs, out_specs=P("a")))
    assert_same_bits(inside(*operands), want)
    assert not collectives(inside, *operands)
    mapped = wrap(
        lambda x, b, m: router(x, expert_bias=b, valid_mask=m, **SIGMOID),
        in_specs=(P("a"), P(), P("a")),
        out_specs=P("a"),
    )

    def outside(x, d, b, m):
        out, vjp, routing_map = jax.vjp(lambda x, b: mapped(x, b, m), x, b, has_aux=True)
        return out, routing_map, *vjp(d)

    got = jax.jit(outside)(*operands)
    assert_same_bits(got[:3], want)
    assert_same_bits(got[3], np.zeros_like(bias))
    assert got[2].sharding.is_equivalent_to(operands[0].sharding, 2)


def test_topk_router_shard_map_constants_vary():
    """The mask is the same everywhere, the bias varies by device: so must the results."""
    mesh = make_mesh((8,), ("a",))
    logits, d_out, _, mask = inputs(16)
    bias = np.stack([inputs(16, seed=i)[2] for i in range(8)])

    def local(b):
        # A gradient of logits that do not vary would be that of all devices.
        x, d = lax.pcast((logits, d_out), "a", to="varying")
        return jax.tree.map(lambda y: y[None], sigmoid_step(x, d, b[0], mask))

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    assert_same_bits(run(bias), stack([expected(logits, d_out, b, mask, **SIGMOID) for b in bias]))

    def forward(b):  # nor need the logits vary
        return router(logits, expert_bias=b[0], valid_mask=mask, **SIGMOID)[0][None]

    run = jax.jit(jax.shard_map(forward, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    assert_same_bits(
        run(bias), np.stack([expected(logits, d_out, b, mask, **SIGMOID)[0] for b in bias])
    )


@pytest.mark.parametrize("varies", ["logits", "bias", "mask"])
@pytest.mark.parametrize("result", [0, 1])
def test_topk_router_shard_map_wrong_out_specs_is_refused(varies, result):
    mesh = make_mesh((8,), ("a",))
    logits, _, bias, mask = inputs(16)
    operands = {"logits": logits, "bias": bias, "mask": mask}

    def local(x):
        # Gathered by a collective whose result still counts as varying.
        given = {**operands, varies: lax.all_gather(x, "a", tiled=True)}
        bias, mask = given["bias"], given["mask"]
        return router(given["logits"], expert_bias=bias, valid_mask=mask, **SIGMOID)[result]

    run = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(run)(operands[varies])


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("spec", [P(("a", "b"), None), P("a", "b"), P("a", None)], ids=str)
def test_topk_router_shard_map_over_some_axes(spec, axis_type):
    """Manual over one axis; XLA partitions over the other."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    logits, _, bias, mask = inputs(64)
    ones = np.ones_like(logits)
    with jax.set_mesh(mesh):
        x, b, m = put(mesh, (logits, spec), (bias, P()), (mask, P("a")))
        run = jax.shard_map(
            lambda x, b, m: router(x, expert_bias=b, valid_mask=m, **SIGMOID),
            in_specs=(P("a"), P(), P("a")),
            out_specs=P("a"),
            axis_names={"a"},
        )
        got = jax.jit(run)(x, b, m)
        grad = jax.jit(jax.grad(lambda x, b, m: run(x, b, m)[0].sum()))(x, b, m)
    assert_same_bits((*got, grad), expected(logits, ones, bias, mask, **SIGMOID))


def test_topk_router_shard_map_vmap_scan_and_remat():
    mesh = make_mesh((8,), ("a",))
    items = [inputs(64, seed=i)[:2] for i in range(3)]
    logits, d_out = stack(items)
    want = stack([expected(*x) for x in items])
    spec = P(None, "a")

    def scanned(x, d):
        return lax.scan(lambda _, xd: (None, jax.checkpoint(with_gradient)(*xd)), None, (x, d))[1]

    for f in (
        jax.vmap(with_gradient),
        scanned,
        lambda x, d: lax.map(lambda y: with_gradient(*y), (x, d)),
    ):
        run = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        assert_same_bits(jax.jit(run)(logits, d_out), want)
    # vmap of a shard_map.
    one = jax.shard_map(with_gradient, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a"))
    assert_same_bits(jax.jit(jax.vmap(one))(logits, d_out), want)


def test_topk_router_d08_counts_and_loss_of_all_devices():
    """A router step inside shard_map: local weights, the counts' psum, one-device loss."""
    mesh = make_mesh((8,), ("dp",))
    logits, d_out, bias, mask = inputs(2048, kind="normal")

    def step(x, d, b, m, axis_name=None):
        def f(x):
            weights, routing_map = router(x, expert_bias=b, valid_mask=m, **SIGMOID)
            scores, _ = router(x, score_function="sigmoid", compute_aux_scores=True, valid_mask=m)
            counts = jnp.sum(routing_map, axis=0, dtype=jnp.int32)
            if axis_name is not None:
                counts = lax.psum(counts, axis_name)
            loss = fused_moe_aux_loss(scores, counts, 4, 0.5, valid_mask=m, axis_name=axis_name)
            return weights, (loss, counts)

        weights, vjp, (loss, counts) = jax.vjp(f, x, has_aux=True)
        d_loss = jax.grad(lambda x: f(x)[1][0])(x)
        return weights, loss, counts, vjp(d)[0], d_loss

    run = jax.shard_map(
        functools.partial(step, axis_name="dp"),
        mesh=mesh,
        in_specs=(P("dp"), P("dp"), P(), P("dp")),
        out_specs=(P("dp"), P(), P(), P("dp"), P("dp")),
    )
    operands = (logits, d_out, bias, mask)
    assert_same_bits(jax.jit(run)(*operands), jax.jit(step)(*operands))


def test_topk_router_d12_pmap():
    devices = jax.devices("cpu")[:8]
    logits, d_out, bias, mask = inputs(64)
    run = jax.pmap(sigmoid_step, in_axes=(0, 0, None, 0), devices=devices)
    got = run(*(x.reshape(8, 8, -1) for x in (logits, d_out)), bias, mask.reshape(8, 8))
    got = jax.tree.map(lambda x: np.asarray(x).reshape(64, 16), got)
    assert_same_bits(got, expected(logits, d_out, bias, mask, **SIGMOID))


# ---- Export and processes


def test_topk_router_export_of_a_sharded_program():
    mesh = make_mesh((8,), ("a",))
    logits, d_out, bias, mask = inputs(64)
    specs = (P("a"), P("a"), P(), P("a"))
    run = jax.jit(
        jax.shard_map(sigmoid_step, mesh=mesh, in_specs=specs, out_specs=P("a")),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
    )
    targets = ("jax_moe_det.topk_router_fwd", "jax_moe_det.topk_router_bwd")
    exported = jax.export.export(
        run,
        platforms=["cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(t) for t in targets],
    )(logits, d_out, bias, mask)
    again = jax.export.deserialize(exported.serialize())
    got = jax.jit(again.call)(*put(mesh, *zip((logits, d_out, bias, mask), specs, strict=True)))
    assert_same_bits(got, expected(logits, d_out, bias, mask, **SIGMOID))


PROCESS = """
    import sys
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))

    import cases
    from jax_moe_det import fused_topk_with_score_function, reference
    from jax_moe_det.testing import assert_same_bits

    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    logits, d_out = cases.logits("special", 1, 64, 16), cases.logits("normal", 2, 64, 16)
    want = reference.topk_router(logits, 4, use_pre_softmax=True)
    want = *want, reference.topk_router_grad(logits, want[1], d_out, 4, use_pre_softmax=True)

    @jax.jit
    def run(x, d):
        out, vjp, routing_map = jax.vjp(
            lambda x: fused_topk_with_score_function(x, 4, use_pre_softmax=True), x, has_aux=True)
        return out, routing_map, vjp(d)[0]

    for spec in (P("a"), P(None, "a")):
        x, d = (
            jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__)
            for x in (logits, d_out))
        for got, one in zip(run(x, d), want):
            assert len(got.addressable_shards) == 4
            for shard in got.addressable_shards:
                assert_same_bits(np.asarray(shard.data), one[shard.index])
    print("done")
"""


def test_topk_router_two_processes(run_python):
    """Two processes of four devices: rows where they are, experts through another library."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    waits = [run_python.start(PROCESS, str(i), address, env=env) for i in range(2)]
    assert [wait().splitlines()[-1] for wait in waits] == ["done", "done"]
