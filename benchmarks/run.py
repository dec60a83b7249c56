"""Times this package against plain JAX in one run; writes JSON to `benchmarks/results/`.

Method: R calls unrolled in the body of a device loop, chained by `optimization_barrier` so that
they run in order and none is dropped; the loop carries all R results, so that none is unused and
command buffers replay on the same addresses; inputs above 6 MB rotate over at least 256 MB, so
that the L2 cache does not hide the memory. The figure is the median of 7 loops (of 3 to 6 where
these take more than a second) divided by the calls, in microseconds. Inputs are random, never
zeros.

Router: a call moves its inputs and its results, which are R different ones, so both count towards
the 256 MB. "vjp" is forward and backward: weights, map and the gradient for a random cotangent of
the weights. Its rows are compared with two programs of plain JAX that give the same dense weights
and map: k rounds of argmax, the faster one on a GPU, and `lax.top_k`, the faster one on a CPU.

Route: "value_and_grad" is that of sum(weights * w) + aux_loss with a random w, "forward" is what
`route` gives: weights, indices, counts and aux_loss; both keep all of these. The two programs of
plain JAX compute the same, in float32: that with argmax has no scatter, that with `lax.top_k` has.
Their results are compared with ours once for each pass, kind and dtype.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tabulate import tabulate

from jax_moe_det import fused_moe_aux_loss, fused_topk_with_score_function, route

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tests.cases import SHAPES, Shape  # noqa: E402

ROTATE_ABOVE = 6 << 20
ROTATE_OVER = 256 << 20
COEFF = 0.01
EPS = 1e-20
# On CPU, XLA takes the barriers away before it looks for what does not depend on the loop.
OPTIONS: dict[str, Any] = {
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion,"
    "while-loop-expensive-invariant-code-motion"
}

# What a row is compared with, by name; "ours" is this package.
Functions = dict[str, Callable[..., Any]]
Row = dict[str, Any]


# ---- Time.


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays, or of their shapes and dtypes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def num_buffers(bytes_per_call: int, bytes_of_input: int) -> int:
    """How many sets of inputs to rotate over."""
    return 1 if bytes_of_input <= ROTATE_ABOVE else max(2, -(-ROTATE_OVER // bytes_per_call))


def check_loop(hlo: str, calls: int, loops: int) -> None:
    """Fails if this package's calls were merged, or moved out of a loop of more than one turn."""
    call = 'custom_call_target="jax_moe_det.'
    outside = hlo[hlo.index("\nENTRY ") :].split("\n}", 1)[0].count(call)
    inside = hlo.count(call) - outside
    if loops == 1:
        outside, inside = 0, outside + inside
    if outside or 0 < inside < calls:
        raise RuntimeError(f"of {calls} calls {inside} are in the loop and {outside} outside")


def compiled_loop(
    fn: Callable[..., Any], buffers: list[Any], *rest: Any, unroll: int = 16, slowness: float = 1
) -> tuple[Callable[[], Any], int]:
    """A compiled loop of `fn(buffer, *rest)`, and its number of calls.

    `unroll` is the least number of calls in the body, on a GPU; `slowness` says how much slower
    than a copy of the inputs `fn` is thought to be.
    """
    on_gpu = jax.default_backend() == "gpu"
    unrolled = len(buffers) * (max(1, unroll // len(buffers)) if on_gpu else 1)
    # A guess of the time, 2 us and 4 TB/s (CPU: 10 GB/s), sets the loops: about 30 ms of calls,
    # beside which the start of the program (0.1 ms) does not count. The number is static: a loop of
    # unknown length asks the host after every turn.
    guess_us = slowness * (2 + num_bytes(buffers[0]) / (4e6 if on_gpu else 1e4))
    loops = max(1, int(30e3 / (guess_us * unrolled)))
    fn = jax.jit(fn)  # traced once, not once for each call; XLA inlines it

    # The loop's results stay on the device: a host that hands out buffers is slower than the op.
    @jax.jit
    def run(buffers: list[Any], rest: tuple[Any, ...]) -> Any:
        def body(_: Any, state: Any) -> Any:
            outs, rest = state
            out = outs[-1]
            new = []
            for i in range(unrolled):
                # Every operand waits for the last result, or equal calls would be merged.
                x, rest, _ = lax.optimization_barrier((buffers[i % len(buffers)], rest, out))
                out = fn(x, *rest)
                new.append(out)
            return new, rest

        out = jax.eval_shape(fn, buffers[0], *rest)
        start = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)] * unrolled
        return lax.fori_loop(0, loops, body, (start, rest))  # all results: none is unused

    compiled = run.lower(buffers, rest).compile(compiler_options=OPTIONS)
    check_loop(compiled.as_text() or "", unrolled, loops)
    return lambda: compiled(buffers, rest), loops * unrolled


def median_us(run: Callable[[], Any], calls: int) -> float:
    """Median microseconds of one call of a compiled loop."""
    jax.block_until_ready(run())
    times: list[float] = []
    while len(times) < 3 or (len(times) < 7 and sum(times) < 1):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / calls * 1e6


def time_us(fn: Callable[..., Any], buffers: list[Any], *rest: Any) -> float:
    """Median microseconds of `fn(buffer, *rest)`, whose buffers and results are any pytrees."""
    return median_us(*compiled_loop(fn, buffers, *rest))


# ---- The auxiliary loss.


def read_only_kernel() -> Callable[[jax.Array], jax.Array] | None:
    """A kernel that only reads its operand, built here; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    library = pathlib.Path(tempfile.mkdtemp()) / "read_only.so"
    command = ["nvcc", "-O3", "-std=c++17", "-arch=native", "-shared", "-Xcompiler", "-fPIC"]
    command += [f"-I{jax.ffi.include_dir()}", str(HERE / "read_only.cu"), "-o", str(library)]
    subprocess.run(command, check=True)
    handler = ctypes.CDLL(str(library)).ReadOnlyCuda
    jax.ffi.register_ffi_target("read_only", jax.ffi.pycapsule(handler), platform="CUDA")
    return lambda x: jax.ffi.ffi_call("read_only", jax.ShapeDtypeStruct((), jnp.float32))(x)


def loss_xla(probs: jax.Array, counts: jax.Array, topk: int) -> jax.Array:
    """The loss in plain JAX."""
    num_tokens, num_experts = probs.shape
    scale = num_experts * COEFF / (topk * num_tokens * num_tokens)
    return jnp.sum(probs.astype(jnp.float32) * counts.astype(jnp.float32)) * scale


def bench_aux_loss(shape: Shape, dtype: str, read_only: Any, atomic: bool) -> Row:
    """Loss forward and value_and_grad of one shape."""
    size = shape.num_tokens * shape.num_experts * jnp.dtype(dtype).itemsize
    count = num_buffers(size, size)
    keys = jax.random.split(jax.random.key(0), count + 1)
    make = jax.jit(
        lambda key: jax.nn.softmax(
            jax.random.normal(key, (shape.num_tokens, shape.num_experts))
        ).astype(dtype)
    )
    buffers = [make(key) for key in keys[1:]]
    counts = jax.random.randint(keys[0], (shape.num_experts,), 0, 2 * shape.num_tokens)
    fns: Functions = {
        "ours": lambda p, f: fused_moe_aux_loss(p, f, shape.topk, COEFF),
        "atomic": lambda p, f: fused_moe_aux_loss(p, f, shape.topk, COEFF, deterministic=False),
        "xla": lambda p, f: loss_xla(p, f, shape.topk),
    }
    if not atomic:
        del fns["atomic"]
    row: Row = {"shape": str(shape), "dtype": dtype, "bytes": size}
    for name, fn in fns.items():
        row[f"forward_{name}_us"] = time_us(fn, buffers, counts)
    for name in ("ours", "xla"):
        row[f"value_and_grad_{name}_us"] = time_us(jax.value_and_grad(fns[name]), buffers, counts)
    if read_only is not None:
        row["read_only_us"] = time_us(lambda p, _: read_only(p), buffers, counts)
    row["forward_ratio"] = row["forward_xla_us"] / row["forward_ours_us"]
    row["value_and_grad_ratio"] = row["value_and_grad_xla_us"] / row["value_and_grad_ours_us"]
    return row


# ---- The top-k router.


@dataclasses.dataclass(frozen=True)
class RouterKind:
    """Static options of the router, and whether it has a bias."""

    score_function: str
    use_pre_softmax: bool = False
    biased: bool = False
    num_groups: int = -1
    group_topk: int = -1

    def has(self, shape: Shape) -> bool:
        """Is this kind measured at this shape?"""
        return self.num_groups == -1 or (shape.topk % 4 == 0 and shape.num_experts >= 128)


ROUTER_KINDS = {
    "softmax": RouterKind("softmax"),
    "sigmoid_bias": RouterKind("sigmoid", biased=True),
    "sigmoid_groups": RouterKind("sigmoid", biased=True, num_groups=8, group_topk=4),
    "softmax_first": RouterKind("softmax", use_pre_softmax=True),
}
# Thought to be so many times slower than a copy of the logits; see compiled_loop.
ROUTER_SLOWNESS = {"ours": 4, "argmax": 16, "top_k": 32}
PEERS = ("argmax", "top_k")
CPU_ROUTER_SHAPES = ("deepseek_v2_lite", "deepseek_v3")


def argmax_map(values: jax.Array, topk: int) -> jax.Array:
    """The topk of the last axis as a map, by rounds of argmax."""
    column = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    chosen = jnp.zeros(values.shape, bool)
    for _ in range(topk):
        best = jnp.argmax(jnp.where(chosen, -jnp.inf, values), axis=-1)
        chosen |= column == best[..., None]
    return chosen


def scores_xla(logits: jax.Array, kind: RouterKind) -> jax.Array:
    """What is selected by, without bias."""
    x = logits.astype(jnp.float32)
    if kind.score_function == "sigmoid":
        return jax.nn.sigmoid(x)
    return jax.nn.softmax(x) if kind.use_pre_softmax else x


def values_argmax(scores: jax.Array, bias: Any, topk: int, kind: RouterKind) -> jax.Array:
    """What is selected by: with bias, and -inf in groups that lose."""
    values = lax.stop_gradient(scores if bias is None else scores + bias)
    if kind.num_groups < 0:
        return values
    grouped = values.reshape(len(values), kind.num_groups, -1)
    best = argmax_map(grouped, topk // kind.group_topk)
    kept = argmax_map(jnp.sum(jnp.where(best, grouped, 0), axis=-1), kind.group_topk)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(values.shape)


def values_top_k(scores: jax.Array, bias: Any, topk: int, kind: RouterKind) -> jax.Array:
    """The same by lax.top_k."""
    values = lax.stop_gradient(scores if bias is None else scores + bias)
    if kind.num_groups < 0:
        return values
    rows = jnp.arange(len(values))[:, None]
    grouped = values.reshape(len(values), kind.num_groups, -1)
    best = jnp.sum(lax.top_k(grouped, topk // kind.group_topk)[0], axis=-1)
    _, groups = lax.top_k(best, kind.group_topk)
    kept = jnp.zeros(best.shape, bool).at[rows, groups].set(True)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(values.shape)


def router_argmax(logits: jax.Array, bias: Any, topk: int, kind: RouterKind) -> Any:
    """The router in plain JAX, by rounds of argmax and dense arithmetic."""
    scores = scores_xla(logits, kind)
    chosen = argmax_map(values_argmax(scores, bias, topk, kind), topk)
    if kind.score_function == "sigmoid":
        weights = jnp.where(chosen, scores, 0)
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + EPS
    elif kind.use_pre_softmax:
        weights = jnp.where(chosen, scores, 0)
    else:
        weights = jax.nn.softmax(jnp.where(chosen, scores, -jnp.inf))
    return weights.astype(logits.dtype), chosen


def router_top_k(logits: jax.Array, bias: Any, topk: int, kind: RouterKind) -> Any:
    """The router in plain JAX, by lax.top_k, with weights and map scattered."""
    scores = scores_xla(logits, kind)
    rows = jnp.arange(len(scores))[:, None]
    if bias is None:
        weights, chosen = lax.top_k(scores, topk)
    else:
        _, chosen = lax.top_k(values_top_k(scores, bias, topk, kind), topk)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if kind.score_function == "sigmoid":
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + EPS
    elif not kind.use_pre_softmax:
        weights = jax.nn.softmax(weights)
    at = (rows, chosen)
    how: dict[str, Any] = {"unique_indices": True, "mode": "promise_in_bounds"}
    dense = jnp.zeros(logits.shape, logits.dtype).at[at].set(weights.astype(logits.dtype), **how)
    return dense, jnp.zeros(logits.shape, bool).at[at].set(True, **how)


def router_ours(logits: jax.Array, bias: Any, topk: int, kind: RouterKind) -> Any:
    """The router of this package."""
    options = {k: v for k, v in vars(kind).items() if k != "biased"}
    return fused_topk_with_score_function(logits, topk, expert_bias=bias, **options)


def bench_router(shape: Shape, dtype: str, kind_name: str, peers: list[str]) -> Row:
    """The router of one shape, forward, and forward and backward."""
    kind = ROUTER_KINDS[kind_name]
    routers: Functions = {"ours": router_ours, "argmax": router_argmax, "top_k": router_top_k}
    routers = {name: routers[name] for name in ("ours", *peers)}

    def forward(router: Any, buffer: Any, bias: Any) -> Any:
        return router(buffer[0], bias, shape.topk, kind)

    def vjp(router: Any, buffer: Any, bias: Any) -> Any:
        logits, d_weights = buffer
        weights, pullback, routing_map = jax.vjp(
            lambda x: router(x, bias, shape.topk, kind), logits, has_aux=True
        )
        return weights, routing_map, pullback(d_weights)[0]

    elements = shape.num_tokens * shape.num_experts
    size = elements * jnp.dtype(dtype).itemsize
    # Logits, weights and map; backward, the cotangent and the gradient too.
    counts = {
        "forward": num_buffers(2 * size + elements, size),
        "vjp": num_buffers(4 * size + elements, size),
    }
    keys = jax.random.split(jax.random.key(0), max(counts.values()) + 1)
    make = jax.jit(
        lambda key: jax.random.normal(key, (2, shape.num_tokens, shape.num_experts)).astype(dtype)
    )
    buffers = [tuple(make(key)) for key in keys[1:]]
    bias = 0.1 * jax.random.normal(keys[0], (shape.num_experts,)) if kind.biased else None

    # Compilation is what a run waits for: all programs of a row at once, before any is timed, and
    # few calls in the body of the slower ones.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        loops = {
            f"{step.__name__}_{name}": pool.submit(
                compiled_loop,
                functools.partial(step, router),
                buffers[: counts[step.__name__]],
                bias,
                unroll=16 if name == "ours" else 8,
                slowness=ROUTER_SLOWNESS[name],
            )
            for step in (forward, vjp)
            for name, router in routers.items()
        }
    row: Row = {"shape": str(shape), "dtype": dtype, "kind": kind_name, "bytes": size}
    for name, loop in loops.items():
        row[f"{name}_us"] = median_us(*loop.result())
    for step_name in counts:
        for peer in peers:
            times = [row[f"{step_name}_{name}_us"] for name in (peer, "ours")]
            row[f"{step_name}_ratio_{peer}"] = times[0] / times[1]
    return row


# ---- The whole step.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def pick(scores: jax.Array, chosen: jax.Array, num_experts: int) -> jax.Array:
    """Scores of the chosen experts; the gradient has no scatter."""
    del num_experts
    return jnp.take_along_axis(scores, chosen, axis=-1, mode="promise_in_bounds")


def pick_bwd(num_experts: int, chosen: jax.Array, d_out: jax.Array) -> Any:
    """The gradient of `pick`."""
    column = lax.broadcasted_iota(jnp.int32, (len(chosen), num_experts), 1)
    d_scores = jnp.zeros(column.shape, d_out.dtype)
    for i in range(chosen.shape[1]):
        d_scores = jnp.where(column == chosen[:, i : i + 1], d_out[:, i : i + 1], d_scores)
    return d_scores, None


pick.defvjp(lambda scores, chosen, n: (pick(scores, chosen, n), chosen), pick_bwd)


def finish_route(
    logits: jax.Array, weights: jax.Array, chosen: jax.Array, counts: jax.Array, kind: RouterKind
) -> Any:
    """Weights from the chosen scores, and the auxiliary loss."""
    (num_tokens, num_experts), topk = logits.shape, chosen.shape[1]
    x = logits.astype(jnp.float32)
    if kind.score_function == "sigmoid":
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + EPS
        aux_scores = jax.nn.sigmoid(x)
        aux_scores /= jnp.sum(aux_scores, axis=-1, keepdims=True) + EPS
    else:
        weights = weights if kind.use_pre_softmax else jax.nn.softmax(weights)
        aux_scores = jax.nn.softmax(x)
    scale = num_experts * COEFF / (topk * num_tokens * num_tokens)
    aux_loss = jnp.sum(jnp.sum(aux_scores, axis=0) * counts.astype(jnp.float32)) * scale
    return weights.astype(logits.dtype), chosen, counts, aux_loss


def route_argmax(logits: jax.Array, bias: Any, topk: int, kind: RouterKind) -> Any:
    """The step in plain JAX, by rounds of argmax; no scatter in either direction."""
    scores = scores_xla(logits, kind)
    values = values_argmax(scores, bias, topk, kind)
    column = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    chosen = jnp.zeros(values.shape, bool)
    rounds = []
    for _ in range(topk):
        best = jnp.argmax(jnp.where(chosen, -jnp.inf, values), axis=-1)[:, None]
        chosen |= column == best
        rounds.append(best)
    indices = jnp.concatenate(rounds, axis=1)
    counts = jnp.sum(chosen, axis=0, dtype=jnp.int32)
    return finish_route(logits, pick(scores, indices, values.shape[1]), indices, counts, kind)


def route_top_k(logits: jax.Array, bias: Any, topk: int, kind: RouterKind) -> Any:
    """The step in plain JAX, by lax.top_k, gather and scatter."""
    scores = scores_xla(logits, kind)
    _, indices = lax.top_k(values_top_k(scores, bias, topk, kind), topk)
    counts = jnp.zeros(logits.shape[1], jnp.int32).at[indices.reshape(-1)].add(1)
    weights = jnp.take_along_axis(scores, indices, axis=-1, mode="promise_in_bounds")
    return finish_route(logits, weights, indices, counts, kind)


def route_ours(logits: jax.Array, bias: Any, topk: int, kind: RouterKind) -> Any:
    """The step of this package."""
    options = {k: v for k, v in vars(kind).items() if k != "biased"}
    out = route(logits, topk, expert_bias=bias, aux_loss_coeff=COEFF, **options)
    return out.weights, out.indices, out.tokens_per_expert, out.aux_loss


ROUTES: Functions = {"ours": route_ours, "argmax": route_argmax, "top_k": route_top_k}


def route_step(
    step: str, name: str, topk: int, kind: RouterKind, buffer: Any, bias: Any
) -> tuple[Any, ...]:
    """One call: weights, indices, counts, aux_loss; with "value_and_grad" its two results too."""
    logits, factors = buffer

    def loss(logits: jax.Array) -> Any:
        out = ROUTES[name](logits, bias, topk, kind)
        return jnp.sum((out[0] * factors).astype(jnp.float32)) + out[3], out

    if step == "forward":
        return tuple(loss(logits)[1])
    (value, out), d_logits = jax.value_and_grad(loss, has_aux=True)(logits)
    return *out, value, d_logits


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_buffer(key: jax.Array, shape: Shape, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Logits and factors of the weights."""
    keys = jax.random.split(key)
    logits = jax.random.normal(keys[0], (shape.num_tokens, shape.num_experts)).astype(dtype)
    return logits, jax.random.normal(keys[1], (shape.num_tokens, shape.topk)).astype(dtype)


def route_loops(
    shapes: list[Shape], dtype: str, kind_name: str, step: str, peers: list[str]
) -> dict[Shape, dict[str, Any]]:
    """The compiled loops of some shapes. Compiled together: that is what a run waits for."""
    kind = ROUTER_KINDS[kind_name]
    loops: dict[Shape, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for shape in shapes:
            keys = jax.random.split(jax.random.key(0))
            bias = 0.1 * jax.random.normal(keys[0], (shape.num_experts,)) if kind.biased else None
            first = random_buffer(keys[1], shape, dtype)
            moved = num_bytes(first) + (num_bytes(first[0]) if step == "value_and_grad" else 0)
            count = num_buffers(moved, num_bytes(first[0]))
            if jax.default_backend() == "cpu":
                count = min(count, 4)  # arithmetic, not memory, is what takes milliseconds there
            rest = jax.random.split(keys[1], count)[1:]
            buffers = [first, *(random_buffer(key, shape, dtype) for key in rest)]
            loops[shape] = {
                name: pool.submit(
                    compiled_loop,
                    functools.partial(route_step, step, name, shape.topk, kind),
                    buffers,
                    bias,
                    unroll=16 if name == "ours" else 8,
                    slowness=ROUTER_SLOWNESS[name],
                )
                for name in ("ours", *peers)
            }
    return {
        shape: {name: loop.result() for name, loop in of_shape.items()}
        for shape, of_shape in loops.items()
    }


def check_agreement(got: Any, want: Any, kind: RouterKind) -> None:
    """Fails if two implementations computed something else on the same inputs."""
    close = np.testing.assert_allclose
    weights, indices, counts, aux_loss, *step = (np.asarray(x) for x in got)
    weights2, indices2, counts2, aux_loss2, *step2 = (np.asarray(x) for x in want)
    exact = weights.dtype == np.float32
    # bfloat16: two roundings may fall to either side.
    rtol = 1e-5 if exact else 2**-7
    num_tokens = len(indices)
    # Scores that differ in the last bit may change places, in the rare row that has a near tie.
    same = np.all(indices == indices2, axis=-1)
    num_moved = np.sum(indices != indices2)
    if np.mean(~same) > 1e-3 or np.abs(counts - counts2).sum() > 2 * num_moved:
        raise AssertionError(f"{np.mean(~same):.2%} of the rows have other experts, or counts")
    close(aux_loss, aux_loss2, rtol=1e-5)
    close(weights[same].astype(np.float32), weights2[same].astype(np.float32), rtol, 1e-7)
    if step:
        value, d_logits = step
        atol = (1e-4 if exact else 1e-2) * num_tokens**0.5 + 10 * num_moved
        close(value, step2[0], rtol=1e-3, atol=atol)
        d_logits, d_logits2 = (x[same].astype(np.float32) for x in (d_logits, step2[1]))
        close(d_logits, d_logits2, rtol, 1e-6 if exact else 1e-3)
        if not kind.use_pre_softmax:
            # Experts that are not chosen have the gradient of the auxiliary loss alone, which is
            # about COEFF / num_tokens times the score.
            np.put_along_axis(d_logits, indices[same], 0, axis=-1)
            np.put_along_axis(d_logits2, indices[same], 0, axis=-1)
            close(d_logits, d_logits2, 1e-3 if exact else 2**-6, 1e-6 * COEFF / num_tokens)


def bench_route(
    shape: Shape,
    dtype: str,
    kind_name: str,
    step: str,
    peers: list[str],
    all_loops: Callable[[], dict[Shape, dict[str, Any]]],
    check: bool,
) -> Row:
    """The whole step of one shape."""
    loops = all_loops().pop(shape)  # its memory is free again after this row
    size = shape.num_tokens * shape.num_experts * jnp.dtype(dtype).itemsize
    row: Row = {"shape": str(shape), "dtype": dtype, "kind": kind_name, "bytes": size}
    if check:
        results = {name: run()[0][0] for name, (run, _) in loops.items()}
        for peer in peers:
            check_agreement(results["ours"], results[peer], ROUTER_KINDS[kind_name])
    for name, loop in loops.items():
        row[f"{step}_{name}_us"] = median_us(*loop)
    for peer in peers:
        row[f"{step}_ratio_{peer}"] = row[f"{step}_{peer}_us"] / row[f"{step}_ours_us"]
    return row


# ---- The command line.

# A row's name, and what measures it.
Plan = Iterator[tuple[str, Callable[[], Row]]]


def plan_aux_loss(args: argparse.Namespace, shapes: list[Shape]) -> Plan:
    """The rows of the loss."""
    read_only = read_only_kernel()
    for dtype in args.dtypes:
        for shape in shapes:
            bench = functools.partial(bench_aux_loss, shape, dtype, read_only, args.atomic)
            yield f"{dtype} {shape}", bench


def plan_router(args: argparse.Namespace, shapes: list[Shape]) -> Plan:
    """The rows of the router."""
    for dtype in args.dtypes:
        for kind in args.kinds:
            for shape in shapes:
                if ROUTER_KINDS[kind].has(shape):
                    bench = functools.partial(bench_router, shape, dtype, kind, args.peers)
                    yield f"{dtype} {kind} {shape}", bench


def plan_route(args: argparse.Namespace, shapes: list[Shape]) -> Plan:
    """The rows of the whole step, the most wanted first."""
    for step in args.passes:
        for dtype in args.dtypes:
            for kind in args.kinds:
                group = [shape for shape in shapes if ROUTER_KINDS[kind].has(shape)]
                what = (dtype, kind, step, args.peers)
                loops = functools.cache(functools.partial(route_loops, group, *what))
                for shape in group:
                    check = shape is group[0]
                    bench = functools.partial(bench_route, shape, *what, loops, check)
                    yield f"{step} {dtype} {kind} {shape}", bench


PLANS = {"aux_loss": plan_aux_loss, "topk_router": plan_router, "route": plan_route}


def row_key(row: Row) -> tuple[Any, ...]:
    """What a row measures."""
    return row["shape"], row["dtype"], row.get("kind")


def shape_words(shape: Shape) -> tuple[str, str]:
    """What a shape is called on the command line."""
    return shape.name, f"{shape.num_tokens}x{shape.num_experts}x{shape.topk}"


def print_table(rows: list[Row]) -> None:
    """Prints the rows with short headings."""
    table = []
    for row in rows:
        cells = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in row.items()}
        table.append({k.replace("value_and_grad", "vg"): v for k, v in cells.items()})
    print(tabulate(table, headers="keys"), flush=True)


def main() -> None:
    """Runs the benchmarks named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=[word for shape in SHAPES for word in shape_words(shape)],
        help="of tests/cases.py, by name or size; default: all (router and route on a CPU: two)",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(ROUTER_KINDS),
        default=list(ROUTER_KINDS),
        help="of router and route; default: all",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=PEERS,
        default=list(PEERS),
        help="plain JAX beside router and route; default: both",
    )
    parser.add_argument(
        "--passes",
        nargs="+",
        choices=["value_and_grad", "forward"],
        default=["value_and_grad", "forward"],
        help="of route, in this order; default: both",
    )
    parser.add_argument(
        "--output", type=pathlib.Path, help="a file, for one --op; default: results/<op>_<device>"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the figures of the output file that this run does not measure",
    )
    parser.add_argument("--atomic", action="store_true", help="time the atomic loss kernel too")
    parser.add_argument(
        "--budget-s", type=float, help="start no row after so many seconds; say what is missing"
    )
    args = parser.parse_args()
    if args.output is not None and len(args.op) > 1:
        parser.error("--output: give one --op")
    begin = time.monotonic()
    device = jax.devices()[0]
    name = device.device_kind.lower().replace(" ", "_")
    missing = []
    for op in args.op:
        output = args.output or HERE / "results" / f"{op}_{name}.json"
        wanted = args.shapes or [shape.name for shape in SHAPES]
        if args.shapes is None and op != "aux_loss" and device.platform == "cpu":
            wanted = list(CPU_ROUTER_SHAPES)
        shapes = [shape for shape in SHAPES if set(wanted) & set(shape_words(shape))]
        record: dict[tuple[Any, ...], Row] = {}
        rows: dict[tuple[Any, ...], Row] = {}
        if args.keep and output.exists():
            record = {row_key(row): row for row in json.loads(output.read_text())[op]}
        plan = list(PLANS[op](args, shapes))
        for i, (label, bench) in enumerate(plan):
            if args.budget_s is not None and time.monotonic() - begin > args.budget_s:
                missing.append(f"{op} {label}")
                continue
            row = bench()
            figures = [
                f"{k.removesuffix('_us')} {v:.2f}" for k, v in row.items() if isinstance(v, float)
            ]
            seconds = time.monotonic() - begin
            print(f"[{seconds:.0f} s] {op} {i + 1}/{len(plan)} {label}:", *figures, flush=True)
            key = row_key(row)
            record.setdefault(key, {}).update(row)
            rows[key] = record[key]
            everything = {
                "device": device.device_kind,
                "jax": jax.__version__,
                op: list(record.values()),
            }
            output.write_text(json.dumps(everything, indent=1) + "\n")  # what is there is kept
        print_table(list(rows.values()))
        print(f"written: {output}" if rows else f"{op}: no row was measured", flush=True)
    if missing:
        print(f"missing, {args.budget_s:g} s were over:", *missing, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
