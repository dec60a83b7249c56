"""One device or many: the same bits, the fewest collectives, and types that tell the truth.

All on eight CPU devices, whatever the default backend is.
"""

from __future__ import annotations

import functools
import math
import re
import socket

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_moe_det import fused_moe_aux_loss, reference
from jax_moe_det.testing import assert_same_bits, check_reproducible

P4, COUNTS4 = cases.P4, cases.COUNTS4
AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]


def loss(probs, counts, topk=2, coeff=0.01, **options):
    return fused_moe_aux_loss(probs, counts, topk, coeff, **options)


loss_and_grad = jax.value_and_grad(loss)


def masked_loss(probs, counts, mask, total):
    return loss(probs, counts, valid_mask=mask, total_num_tokens=total)


@pytest.fixture(autouse=True)
def _on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def make_mesh(shape, names, axis_type=AxisType.Auto):
    devices = jax.devices("cpu")[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names), devices=devices)


def put(mesh, *arrays_and_specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arrays_and_specs]


def inputs(num_tokens, num_experts, dtype="float32"):
    probs = cases.random_scores(num_tokens, num_tokens, num_experts, dtype)
    return probs, cases.random_counts(1, num_experts), cases.random_mask(2, num_tokens)


def expected(probs, counts, topk=2, coeff=0.01, **options):
    return (
        reference.aux_loss(probs, counts, topk, coeff, **options),
        reference.aux_loss_grad(probs, counts, topk, coeff, **options),
    )


def collectives(run, *operands):
    """Names and result types of the collectives in the compiled program."""
    text = run.lower(*operands).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= \(?(\w+)\[.*? ({kinds})(?:-start)?\(", text)


def gathers(run, *operands):
    """Number of all-gathers of floats, in a program whose collectives add no floats."""
    floats = [kind for dtype, kind in collectives(run, *operands) if dtype[0] in "fb"]
    assert not {"all-reduce", "reduce-scatter"} & {*floats}, floats
    return floats.count("all-gather")


# ---- jit on sharded arrays


@pytest.mark.parametrize("num_tokens", [64, 256, 1000, 2048, 4096])
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_aux_loss_d06_rows_sharded(num_devices, num_tokens):
    """Shards hold whole slots or not: 256 partials travel, or the rows do."""
    mesh = make_mesh((num_devices,), ("dp",))
    probs, counts, mask = inputs(num_tokens, 8)
    p, m = put(mesh, (probs, P("dp", None)), (mask, P("dp")))
    run = jax.jit(loss_and_grad)
    value, grad = run(p, counts)
    assert_same_bits((value, grad), expected(probs, counts))
    assert value.sharding.is_fully_replicated
    assert grad.sharding.is_equivalent_to(p.sharding, 2)
    # Gathering a mesh of one device is nothing.
    assert gathers(run, p, counts) == (num_devices > 1)
    masked = jax.jit(lambda p, c, m: loss_and_grad(p, c, valid_mask=m))
    assert_same_bits(masked(p, counts, m), expected(probs, counts, valid_mask=mask))
    assert gathers(masked, p, counts, m) == (num_devices > 1)


def test_aux_loss_whole_slots_exchange_partials_only():
    mesh = make_mesh((8,), ("dp",))
    probs, counts, _ = inputs(4096, 64)
    (p,) = put(mesh, (probs, P("dp")))
    text = jax.jit(loss_and_grad).lower(p, counts).compile().as_text()
    assert re.search(r"f32\[256\]\S* all-gather\(", text)
    assert "aux_loss_partials" in text
    assert "aux_loss_final" in text
    assert "aux_loss_fwd" not in text


SPECS = [
    P("a", None),
    P("b", None),
    P(("a", "b"), None),
    P(("b", "a"), None),
    P(None, "a"),
    P(None, ("a", "b")),
    P("a", "b"),
    P("b", "a"),
    P(),
]


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_aux_loss_any_sharding_of_any_operand(spec, axis_type):
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    probs, counts, mask = inputs(2048, 16)
    rows, columns = (*spec, None, None)[:2]
    want = expected(probs, counts)
    masked_want = expected(probs, counts, valid_mask=mask, total_num_tokens=1500)
    with jax.set_mesh(mesh):
        # Counts and mask with their dimension's sharding, with another, and replicated.
        for counts_spec, mask_spec in (
            (P(columns), P(rows)),
            (P(), P()),
            (P("b"), P("a")),
            (P(("a", "b")), P("b")),
        ):
            p, c, m, n = put(
                mesh,
                (probs, spec),
                (counts, counts_spec),
                (mask, mask_spec),
                (np.int32(1500), P()),
            )
            run = jax.jit(loss_and_grad)
            value, grad = run(p, c)
            assert_same_bits((value, grad), want)
            assert value.sharding.is_fully_replicated
            assert grad.sharding.is_equivalent_to(p.sharding, 2)
            gathers(run, p, c)  # no sum of floats
            masked = jax.jit(jax.value_and_grad(masked_loss))
            got = masked(p, c, m, n)
            assert_same_bits(got, masked_want)
            assert got[1].sharding.is_equivalent_to(p.sharding, 2)
            gathers(masked, p, c, m, n)
        assert_same_bits(loss_and_grad(p, c), want)  # eager
        if columns is None and rows is not None:
            (c,) = put(mesh, (counts, P()))
            assert gathers(run, p, c) == 1


@pytest.mark.parametrize("dtype", cases.FLOAT_DTYPES)
def test_aux_loss_sharded_dtypes(dtype):
    mesh = make_mesh((8,), ("a",))
    probs, counts, mask = inputs(2048, 33, dtype)
    p, m = put(mesh, (probs, P("a")), (mask, P("a")))
    run = jax.jit(lambda p, m: loss_and_grad(p, counts, valid_mask=m))
    assert_same_bits(run(p, m), expected(probs, counts, valid_mask=mask))


def test_aux_loss_sharded_special_values():
    mesh = make_mesh((8,), ("a",))
    for kind in cases.SPECIAL_INPUTS:
        probs = cases.special_scores(kind, 1, 2048, 16, "float32")
        counts = cases.random_counts(1, 16)
        coeff = 3e36 if kind == "subnormal" else 0.7
        run = jax.jit(functools.partial(loss_and_grad, coeff=coeff))
        got = run(*put(mesh, (probs, P("a"))), counts)
        assert_same_bits(got, expected(probs, counts, coeff=coeff))


def test_aux_loss_sharded_folded_columns():
    mesh = make_mesh((8,), ("a",))
    probs, counts, _ = inputs(2048, 32)
    run = jax.jit(functools.partial(loss_and_grad, num_experts=8))
    got = run(*put(mesh, (probs, P("a"))), counts)
    assert_same_bits(got, expected(probs, counts, num_experts=8))


def test_aux_loss_d10_padded_tokens():
    """Ten tokens on four devices: padded to twelve, the padding masked."""
    probs, counts, _ = inputs(10, 8)
    want = expected(probs, counts)
    padded = np.concatenate([probs, np.full((2, 8), np.nan, np.float32)])
    mask = np.arange(12) < 10
    mesh = make_mesh((4,), ("dp",))
    p, m = put(mesh, (padded, P("dp")), (mask, P("dp")))
    value, grad = jax.jit(lambda p, m: loss_and_grad(p, counts, valid_mask=m))(p, m)
    assert_same_bits(value, want[0])
    assert_same_bits(np.asarray(grad)[:10], want[1])
    assert_same_bits(np.asarray(grad)[10:], np.zeros((2, 8), np.float32))


def test_aux_loss_uneven_shards_inside_jit():
    """1001 rows over eight devices, by a constraint inside the program."""
    mesh = make_mesh((8,), ("a",))
    probs, counts, _ = inputs(1001, 16)

    @jax.jit
    def run(p):
        p = lax.with_sharding_constraint(p * 1, NamedSharding(mesh, P("a", None)))
        return loss_and_grad(p, counts)

    assert_same_bits(run(probs), expected(probs, counts))


def test_aux_loss_in_and_out_shardings():
    mesh = make_mesh((4, 2), ("a", "b"))
    probs, counts, _ = inputs(2048, 16)
    rows, whole = NamedSharding(mesh, P(("a", "b"))), NamedSharding(mesh, P())
    run = jax.jit(loss_and_grad, in_shardings=(rows, whole), out_shardings=(whole, rows))
    check_reproducible(run, probs, counts, repeats=20)
    assert_same_bits(run(probs, counts), expected(probs, counts))


def test_aux_loss_sharded_forward_mode_and_transpose():
    mesh = make_mesh((4, 2), ("a", "b"))
    probs, counts, mask = inputs(2048, 16)
    tangent = cases.random_scores(9, 2048, 16)
    p, d, m = put(mesh, (probs, P("a")), (tangent, P(("a", "b"))), (mask, P("a")))

    def f(p):
        return loss(p, counts, valid_mask=m)

    value, out = jax.jit(lambda p, d: jax.jvp(f, (p,), (d,)))(p, d)
    assert_same_bits(value, expected(probs, counts, valid_mask=mask)[0])
    assert_same_bits(out, expected(tangent, counts, valid_mask=mask)[0])
    (back,) = jax.jit(lambda g: jax.linear_transpose(f, p)(g))(jnp.float32(1))
    assert_same_bits(back, expected(probs, counts, valid_mask=mask)[1])
    # Second order in the cotangent: the loss of the weights, whose rows are sharded.
    got = jax.jit(lambda p, w: jax.grad(lambda g: (jax.vjp(f, p)[1](g)[0] * w).sum())(1.0))(p, d)
    np.testing.assert_allclose(got, out, rtol=1e-6)


def test_aux_loss_sharded_inside_a_model():
    """Logits from a sharded product, the loss under scan and remat, in one program."""
    mesh = make_mesh((4, 2), ("dp", "tp"))
    x = np.random.default_rng(0).integers(-3, 4, (2048, 8)).astype(np.float32)
    w = np.random.default_rng(1).integers(-3, 4, (3, 8, 16)).astype(np.float32)

    @jax.checkpoint
    def layer(carry, w):
        probs = jnp.abs(x_of(carry) @ w)  # integers: exact in any order
        counts = jnp.sum(probs > 10, axis=0, dtype=jnp.int32)
        return carry, loss(probs, counts)

    def x_of(carry):
        return carry

    def run(x, w):
        return lax.scan(layer, x, w)[1]

    values = jax.jit(run)(x, w)
    grads = jax.jit(jax.grad(lambda x, w: run(x, w).sum(), argnums=1))(x, w)
    xs, ws = put(mesh, (x, P("dp", None)), (w, P(None, None, "tp")))
    assert_same_bits(jax.jit(run)(xs, ws), values)
    sharded = jax.jit(jax.grad(lambda x, w: run(x, w).sum(), argnums=1))(xs, ws)
    np.testing.assert_allclose(sharded, grads, rtol=1e-4)  # XLA's own products


def batched_inputs():
    probs = np.stack([cases.random_scores(i, 512, 8) for i in range(8)])
    counts = np.stack([cases.random_counts(i, 8) for i in range(8)])
    mask = np.stack([cases.random_mask(i, 512) for i in range(8)])
    return probs, counts, mask


def stacked(pairs):
    return tuple(np.stack(x) for x in zip(*pairs, strict=True))


@pytest.mark.parametrize(
    "specs",
    [
        # probs [batch, rows, columns], counts [batch, columns], mask [batch, rows]
        (P("a"), P("a"), P("a")),
        (P(None, "a"), P(), P(None, "a")),
        (P("a", "b"), P("a"), P("a", "b")),
        (P("b", None, "a"), P("b", "a"), P("b")),
        # One axis for different dimensions of different operands.
        (P(None, "a"), P("a"), P("a")),
        (P(None, None, "a"), P("a"), P("b", "a")),
        (P("a", "b"), P("b", "a"), P()),
        (P(), P("b", "a"), P("a", "b")),
    ],
    ids=str,
)
def test_aux_loss_batched_and_sharded(specs):
    mesh = make_mesh((4, 2), ("a", "b"))
    arrays = batched_inputs()
    want = stacked(expected(p, c, valid_mask=m) for p, c, m in zip(*arrays, strict=True))
    operands = put(mesh, *zip(arrays, specs, strict=True))
    run = jax.jit(jax.vmap(jax.value_and_grad(lambda p, c, m: loss(p, c, valid_mask=m))))
    value, grad = run(*operands)
    assert_same_bits((value, grad), want)
    assert grad.sharding.is_equivalent_to(operands[0].sharding, 3)
    gathers(run, *operands)


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P("b", None, "a")], ids=str)
def test_aux_loss_batched_sharded_and_shared(spec, axis_type):
    """Counts and mask are shared by the batch, or probs are: their gradient is then a sum."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    probs, counts, mask = batched_inputs()
    batch, rows, columns = (*spec, None, None)[:3]
    with jax.set_mesh(mesh):
        p, c, m = put(mesh, (probs, spec), (counts[0], P()), (mask[0], P(rows)))
        fun = jax.value_and_grad(lambda p, c, m: loss(p, c, valid_mask=m))
        value, grad = jax.jit(jax.vmap(fun, (0, None, None)))(p, c, m)
        want = stacked(expected(p, counts[0], valid_mask=mask[0]) for p in probs)
        assert_same_bits((value, grad), want)
        assert grad.sharding.is_equivalent_to(p.sharding, 3)

        p, c = put(mesh, (probs[0], P(rows, columns)), (counts, P(batch)))

        def total(p, c):
            return jax.vmap(loss, (None, 0))(p, c).sum()

        values = jax.jit(jax.vmap(loss, (None, 0)))(p, c)
        assert_same_bits(values, np.stack([expected(probs[0], c)[0] for c in counts]))
        grad = jax.jit(jax.grad(total))(p, c)
        # JAX adds the cotangents of a loop from the last to the first.
        want = np.zeros((512, 8), np.float32)
        for c in counts[::-1]:
            want += expected(probs[0], c)[1]
        assert_same_bits(grad, want)
        assert grad.sharding.is_equivalent_to(p.sharding, 2)


def test_aux_loss_nested_batches_on_one_axis():
    mesh = make_mesh((4, 2), ("a", "b"))
    probs = np.stack([cases.random_scores(i, 256, 8) for i in range(16)]).reshape(4, 4, 256, 8)
    counts = np.stack([cases.random_counts(i, 8) for i in range(16)]).reshape(4, 4, 8)
    run = jax.jit(jax.vmap(jax.vmap(loss_and_grad)))
    want = jax.tree.map(np.asarray, run(probs, counts))
    assert_same_bits(want[0][2, 3], expected(probs[2, 3], counts[2, 3])[0])
    for specs in (
        (P("a"), P(None, "a")),
        (P(None, "a"), P("a", "b")),
        (P(None, None, "a"), P("a")),
    ):
        operands = put(mesh, *zip((probs, counts), specs, strict=True))
        got = run(*operands)
        assert_same_bits(got, want)
        assert got[1].sharding.is_equivalent_to(operands[0].sharding, 4)


def test_aux_loss_d02_vmap_spmd_axis_name():
    mesh = make_mesh((4, 2), ("a", "b"))
    probs = np.stack([cases.random_scores(i, 512, 8) for i in range(4)])
    counts = cases.random_counts(1, 8)
    want = [expected(p, counts) for p in probs]
    want = tuple(np.stack(x) for x in zip(*want, strict=True))
    with jax.set_mesh(mesh):
        (p,) = put(mesh, (probs, P("a", "b")))
        run = jax.jit(jax.vmap(loss_and_grad, (0, None), spmd_axis_name="a"))
        assert_same_bits(run(p, counts), want)

        def constrained(p):
            p = lax.with_sharding_constraint(p, P("b", None))
            return loss_and_grad(p, counts)

        assert_same_bits(jax.jit(jax.vmap(constrained, spmd_axis_name="a"))(p), want)


def test_aux_loss_atomic_kernel_sharded():
    mesh = make_mesh((8,), ("a",))
    probs, counts, _ = inputs(2048, 16)
    (p,) = put(mesh, (probs, P("a")))
    run = jax.jit(functools.partial(loss_and_grad, deterministic=False))
    value, grad = run(p, counts)
    np.testing.assert_allclose(value, expected(probs, counts)[0], rtol=1e-5)
    assert_same_bits(grad, expected(probs, counts)[1])


def test_aux_loss_sharded_compiles_once():
    mesh = make_mesh((8,), ("a",))
    probs, counts, _ = inputs(2040, 8)  # a shape of its own
    p, c = put(mesh, (probs, P("a")), (counts, P()))
    with count_compilations() as events:
        jax.block_until_ready(jax.jit(loss_and_grad)(p, c))
        assert len(events) == 1
        jax.block_until_ready(loss_and_grad(p, c))
        events.clear()
        jax.block_until_ready(loss_and_grad(p, c))
        assert not events


# ---- shard_map


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1000, 2048])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_aux_loss_shard_map_axis_name(num_devices, num_tokens, axis_type, check_vma):
    mesh = make_mesh((num_devices,), ("a",), axis_type)
    probs, counts, mask = inputs(num_tokens, 16)
    p, c, m = put(mesh, (probs, P("a")), (counts, P()), (mask, P("a")))
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    specs = (P("a"), P(), P("a"))
    for options, want in (
        ({}, expected(probs, counts)),
        ({"total_num_tokens": 77}, expected(probs, counts, total_num_tokens=77)),
    ):
        plain = functools.partial(loss, axis_name="a", **options)
        mapped = wrap(plain, in_specs=specs[:2], out_specs=P())
        outside = jax.jit(jax.value_and_grad(mapped))
        got = outside(p, c)
        assert_same_bits(got, want)
        assert got[0].sharding.is_fully_replicated
        assert got[1].sharding.is_equivalent_to(p.sharding, 2)
        assert gathers(jax.jit(mapped), p, c) == 1
        gathers(outside, p, c)
    masked = wrap(lambda p, c, m: loss(p, c, valid_mask=m, axis_name="a"), in_specs=specs,
                  out_specs=P())  # fmt: skip
    want = expected(probs, counts, valid_mask=mask)
    assert_same_bits(jax.jit(jax.value_and_grad(masked))(p, c, m), want)
    with jax.set_mesh(mesh):  # which eager gradients on an explicit mesh need, of any function
        assert_same_bits(jax.value_and_grad(masked)(p, c, m), want)


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_aux_loss_shard_map_gradient_inside(axis_type):
    mesh = make_mesh((8,), ("a",), axis_type)
    for num_tokens in (1000, 2048):
        probs, counts, mask = inputs(num_tokens, 16)
        p, c, m, n = put(mesh, (probs, P("a")), (counts, P()), (mask, P("a")), (np.int32(900), P()))

        def inside(p, c, m, n):
            plain = jax.value_and_grad(lambda p: loss(p, c, axis_name="a"))(p)
            masked = jax.value_and_grad(
                lambda p: loss(p, c, valid_mask=m, total_num_tokens=n, axis_name="a")
            )(p)
            return plain, masked

        run = jax.jit(
            jax.shard_map(
                inside,
                mesh=mesh,
                in_specs=(P("a"), P(), P("a"), P()),
                out_specs=((P(), P("a")), (P(), P("a"))),
            )
        )
        want = (
            expected(probs, counts),
            expected(probs, counts, valid_mask=mask, total_num_tokens=900),
        )
        assert_same_bits(run(p, c, m, n), want)


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a"), "a", "b"])
def test_aux_loss_shard_map_axes_of_a_mesh(axes):
    """Tokens over both axes in either order, or over one and replicated over the other."""
    mesh = make_mesh((4, 2), ("a", "b"))
    probs, counts, mask = inputs(2048, 16)
    p, m = put(mesh, (probs, P(axes)), (mask, P(axes)))
    run = jax.shard_map(
        lambda p, m: loss(p, counts, valid_mask=m, axis_name=axes),
        mesh=mesh,
        in_specs=(P(axes), P(axes)),
        out_specs=P(),
    )
    assert_same_bits(
        jax.jit(jax.value_and_grad(run))(p, m), expected(probs, counts, valid_mask=mask)
    )
    if isinstance(axes, tuple):
        listed = jax.shard_map(
            lambda p: loss(p, counts, axis_name=list(axes)),
            mesh=mesh,
            in_specs=P(axes),
            out_specs=P(),
        )
        assert_same_bits(jax.jit(listed)(p), expected(probs, counts)[0])


def test_aux_loss_shard_map_constants_vary():
    """Probs are the same everywhere, the mask varies by device: so must the loss."""
    mesh = make_mesh((8,), ("a",))
    probs, counts, _ = inputs(16, 8)
    masks = np.stack([cases.random_mask(i, 16) for i in range(8)])

    def local(m):
        return loss(probs, counts, valid_mask=m[0])[None]

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    want = np.array([expected(probs, counts, valid_mask=m)[0] for m in masks])
    assert_same_bits(run(masks), want)
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(jax.shard_map(lambda m: local(m)[0], mesh=mesh, in_specs=P("a"), out_specs=P()))(
            masks
        )


@pytest.mark.parametrize("varies", ["probs", "counts", "mask", "total"])
def test_aux_loss_shard_map_wrong_out_specs_is_refused(varies):
    """A local loss varies by device: the type says so, and JAX refuses to call it replicated."""
    mesh = make_mesh((8,), ("a",))
    probs, counts, mask = inputs(16, 8)
    operands = {"probs": probs, "counts": counts, "mask": mask, "total": np.int32(16)}

    def local(x):
        # Gathered by a collective whose result still counts as varying.
        x = x[0] if varies == "total" else lax.all_gather(x, "a", tiled=True)
        return masked_loss(**{**operands, varies: x})

    run = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(run)(np.arange(8) if varies == "total" else operands[varies])


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_aux_loss_shard_map_over_some_axes(axis_type):
    """Manual over one axis; XLA partitions over the other."""
    mesh = make_mesh((4, 2), ("a", "b"), axis_type)
    probs, counts, mask = inputs(2048, 16)
    want = expected(probs, counts, valid_mask=mask)
    for spec in (P(("a", "b"), None), P("a", "b"), P("a", None)):
        p, c, m = put(mesh, (probs, spec), (counts, P()), (mask, P("a")))
        with jax.set_mesh(mesh):
            run = jax.shard_map(
                lambda p, c, m: loss(p, c, valid_mask=m, axis_name="a"),
                in_specs=(P("a"), P(), P("a")),
                out_specs=P(),
                axis_names={"a"},
            )
            got = jax.jit(jax.value_and_grad(run))(p, c, m)
        assert_same_bits(got, want)


def test_aux_loss_shard_map_vmap_scan_and_remat():
    mesh = make_mesh((8,), ("a",))
    probs = np.stack([cases.random_scores(i, 2048, 8) for i in range(3)])
    counts = np.stack([cases.random_counts(i, 8) for i in range(3)])
    want = [expected(*x) for x in zip(probs, counts, strict=True)]
    want = tuple(np.stack(x) for x in zip(*want, strict=True))
    specs = (P(None, "a"), P())
    one = functools.partial(loss, axis_name="a")

    def scanned(p, c):
        return lax.scan(lambda _, x: (None, jax.checkpoint(one)(*x)), None, (p, c))[1]

    for f in (jax.vmap(one), scanned, lambda p, c: lax.map(lambda x: one(*x), (p, c))):
        run = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P())
        assert_same_bits(jax.jit(run)(probs, counts), want[0])
        grad = jax.grad(lambda p, c, run=run: run(p, c).sum())
        assert_same_bits(jax.jit(grad)(probs, counts), want[1])
    # vmap of a shard_map.
    run = jax.vmap(jax.shard_map(one, mesh=mesh, in_specs=(P("a"), P()), out_specs=P()))
    assert_same_bits(jax.jit(run)(probs, counts), want[0])


def test_aux_loss_shard_map_forward_mode():
    mesh = make_mesh((8,), ("a",))
    probs, counts, _ = inputs(2048, 8)
    tangent = cases.random_scores(3, 2048, 8)
    run = jax.shard_map(
        functools.partial(loss, axis_name="a"), mesh=mesh, in_specs=(P("a"), P()), out_specs=P()
    )
    got = jax.jit(lambda p, d: jax.jvp(lambda p: run(p, counts), (p,), (d,)))(probs, tangent)
    assert_same_bits(got, (expected(probs, counts)[0], expected(tangent, counts)[0]))


@pytest.mark.parametrize("check_vma", [True, False])
def test_aux_loss_d08_local_losses_and_psum(check_vma):
    """Partial losses with global counts and N: the user's own psum makes the whole."""
    mesh = make_mesh((2,), ("dp",))
    local_counts = np.array([[2, 2, 0, 0], [1, 0, 2, 1]], np.int32)

    def f(p, c):
        counts = lax.psum(c[0], "dp")
        return lax.psum(loss(p, counts, total_num_tokens=4), "dp")

    run = jax.shard_map(
        f, mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P(), check_vma=check_vma
    )
    value, grad = jax.jit(jax.value_and_grad(run))(P4, local_counts)
    assert [s.data.item() for s in value.addressable_shards] == pytest.approx([0.01075] * 2, 1e-6)
    assert_same_bits(grad, expected(P4, COUNTS4)[1])


# ---- pmap


def test_aux_loss_d12_pmap():
    devices = jax.devices("cpu")[:2]
    local_counts = np.array([[2, 2, 0, 0], [1, 0, 2, 1]], np.int32)

    def f(p, c):
        counts = lax.psum(c, "i")
        return lax.psum(loss(p, counts, total_num_tokens=4), "i")

    values = jax.pmap(f, axis_name="i", devices=devices)(P4.reshape(2, 2, 4), local_counts)
    np.testing.assert_allclose(values, [0.01075] * 2, rtol=1e-6)


@pytest.mark.parametrize("num_tokens", [1000, 2048])
def test_aux_loss_pmap_axis_name(num_tokens):
    devices = jax.devices("cpu")[:8]
    probs, counts, mask = inputs(num_tokens, 16)
    want = expected(probs, counts, valid_mask=mask)
    one = functools.partial(jax.pmap, axis_name="i", in_axes=(0, None, 0), devices=devices)
    operands = (probs.reshape(8, -1, 16), counts, mask.reshape(8, -1))

    def f(p, c, m):
        return loss(p, c, valid_mask=m, axis_name="i")

    assert_same_bits(one(f)(*operands), np.broadcast_to(want[0], 8))
    # Each of the eight devices has a loss of its own, and pmap's gradient is that of their sum.
    grads = np.asarray(one(jax.grad(f))(*operands)).reshape(num_tokens, 16)
    assert_same_bits(
        grads, reference.aux_loss_grad(probs, counts, 2, 0.01, d_loss=8.0, valid_mask=mask)
    )


# ---- Export and processes


def test_aux_loss_export_of_a_sharded_program():
    mesh = make_mesh((8,), ("a",))
    probs, counts, _ = inputs(2048, 16)
    rows, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    run = jax.jit(
        jax.shard_map(
            functools.partial(loss, axis_name="a"),
            mesh=mesh,
            in_specs=(P("a"), P()),
            out_specs=P(),
        ),
        in_shardings=(rows, whole),
    )
    targets = ("jax_moe_det.aux_loss_partials", "jax_moe_det.aux_loss_final")
    exported = jax.export.export(
        run,
        platforms=["cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(t) for t in targets],
    )(probs, counts)
    again = jax.export.deserialize(exported.serialize())
    got = jax.jit(again.call)(*put(mesh, (probs, P("a")), (counts, P())))
    assert_same_bits(got, expected(probs, counts)[0])


PROCESS = """
    import functools
    import re
    import sys
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))

    import cases
    from jax_moe_det import fused_moe_aux_loss, reference
    from jax_moe_det.testing import assert_same_bits

    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    loss = functools.partial(fused_moe_aux_loss, topk=2, coeff=0.01)
    for num_tokens in (1000, 4096):
        probs = cases.random_scores(1, num_tokens, 16)
        counts, mask = cases.random_counts(1, 16), cases.random_mask(2, num_tokens)
        want = reference.aux_loss(probs, counts, 2, 0.01, valid_mask=mask)
        want_grad = reference.aux_loss_grad(probs, counts, 2, 0.01, valid_mask=mask)
        p, m = (
            jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("a")), x.__getitem__)
            for x in (probs, mask))

        def plain(p, m):
            return loss(p, counts, valid_mask=m)

        mapped = jax.shard_map(
            lambda p, m: loss(p, counts, valid_mask=m, axis_name="a"),
            mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P())
        for f in (plain, mapped):
            value, grad = jax.jit(jax.value_and_grad(f))(p, m)
            assert_same_bits(np.asarray(value), want)
            assert len(grad.addressable_shards) == 4
            for shard in grad.addressable_shards:
                assert_same_bits(np.asarray(shard.data), want_grad[shard.index])
    print("done")
"""


def test_aux_loss_two_processes(run_python):
    """Two processes of four devices: the bits of one device, over another collective library."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    waits = [run_python.start(PROCESS, str(i), address, env=env) for i in range(2)]
    assert [wait().splitlines()[-1] for wait in waits] == ["done", "done"]
