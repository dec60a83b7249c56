"""Times loss and route on 1, 2, 4, ... devices, tokens sharded; writes JSON to `results/`.

Method of run.py, whose timing this uses: each figure is that of a loop of calls that run in order.
The tokens are those of one step, whatever the number of devices. "forward" of route is all that it
returns, with both losses on; "grad" is that and the gradient for a random cotangent of the weights.

Beside each figure the time of its collectives alone, on the shapes that travel (a dimension of 256
slots, and the counts of all experts), and their share of the whole: `all_gather_share` is what the
exchange of partials costs, `all_reduce_share` what the sum of the counts does.

On a CPU the devices are forced, and share its cores: that shows that the script works, no more.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from run import COEFF, HERE, SHAPES, Row, Shape, compiled_loop, median_us, num_buffers, print_table

from jax_moe_det import Routing, fused_moe_aux_loss, route

NUM_SLOTS = 256
Z_COEFF = 1e-3
GPU_SHAPES = ("deepseek_v3", "deepseek_v3_long", "qwen3_235b_long")
CPU_SHAPES = ("deepseek_v2_lite",)


def loss_forward(buffer: Any, counts: jax.Array, topk: int) -> jax.Array:
    """The loss."""
    return fused_moe_aux_loss(buffer[0], counts, topk, COEFF)


def loss_grad(buffer: Any, counts: jax.Array, topk: int) -> Any:
    """The loss and its gradient."""
    return jax.value_and_grad(lambda p: loss_forward((p,), counts, topk))(buffer[0])


def route_forward(buffer: Any, _: jax.Array, topk: int) -> Routing:
    """The routing, with both losses."""
    return route(buffer[0], topk, aux_loss_coeff=COEFF, z_loss_coeff=Z_COEFF)


def route_grad(buffer: Any, counts: jax.Array, topk: int) -> Any:
    """The routing, and the gradient of weights and losses together."""
    logits, d_weights = buffer

    def f(logits: jax.Array) -> Any:
        out = route_forward((logits,), counts, topk)
        return (out.weights, out.aux_loss, out.z_loss), out

    results, vjp, out = jax.vjp(f, logits, has_aux=True)
    one = jnp.ones_like(results[1])
    return out, vjp((d_weights, one, one))[0]


# Steps, and the number of losses whose partials travel together.
STEPS: dict[str, tuple[Callable[..., Any], int]] = {
    "loss forward": (loss_forward, 1),
    "loss grad": (loss_grad, 1),
    "route forward": (route_forward, 2),
    "route grad": (route_grad, 2),
}


def random_buffers(shape: Shape, dtype: str, mesh: Mesh) -> list[tuple[jax.Array, jax.Array]]:
    """Logits (which serve as scores too) and cotangents of the weights, sharded by tokens."""
    rows = NamedSharding(mesh, P("dp"))

    @functools.partial(jax.jit, out_shardings=(rows, rows))
    def make(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(key)
        sizes = (shape.num_experts, shape.topk)
        x, d = (
            jax.random.normal(k, (shape.num_tokens, n)).astype(dtype)
            for k, n in zip(keys, sizes, strict=True)
        )
        return x, d

    # What counts for the caches is what one device reads.
    size = shape.num_tokens * shape.num_experts * jnp.dtype(dtype).itemsize // mesh.size
    return [make(key) for key in jax.random.split(jax.random.key(0), num_buffers(size, size))]


def collective_us(mesh: Mesh, name: str, shape: tuple[int, ...], dtype: Any) -> float:
    """The time of one collective alone: "all_gather" or "all_reduce", to a result of `shape`."""
    if mesh.size == 1:
        return 0.0
    spec = P(None, "dp") if name == "all_gather" else P("dp")
    # Each device adds counts of its own.
    given = shape if name == "all_gather" else (mesh.size, *shape)
    x = jax.device_put(jnp.ones(given, dtype), NamedSharding(mesh, spec))

    def local(x: jax.Array) -> jax.Array:
        if name == "all_gather":
            return lax.all_gather(x, "dp", axis=1, tiled=True, to="invarying")
        return lax.psum(x[0], "dp")

    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P())
    return median_us(*compiled_loop(run, [x]))


def bench(shape: Shape, dtype: str, sizes: list[int]) -> Iterator[Row]:
    """The rows of one shape, the number of devices growing."""
    first: dict[str, float] = {}
    for size in sizes:
        devices = jax.devices()[:size]
        mesh = jax.make_mesh((size,), ("dp",), (AxisType.Auto,), devices=devices)
        buffers = random_buffers(shape, dtype, mesh)
        whole = NamedSharding(mesh, P())
        counts = jax.random.randint(
            jax.random.key(1), (shape.num_experts,), 0, 2 * shape.num_tokens
        )
        counts = jax.device_put(counts, whole)
        reduce_us = collective_us(mesh, "all_reduce", (shape.num_experts,), jnp.int32)
        gather_us = {
            n: collective_us(mesh, "all_gather", (n, NUM_SLOTS), jnp.float32) for n in (1, 2)
        }
        for step, (fn, num_losses) in STEPS.items():
            us = median_us(*compiled_loop(functools.partial(fn, topk=shape.topk), buffers, counts))
            first.setdefault(step, us)
            row: Row = {"shape": str(shape), "dtype": dtype, "step": step, "devices": size}
            row |= {"us": us, "speedup": first[step] / us}
            row |= {"all_gather_us": gather_us[num_losses]}
            row |= {"all_gather_share": gather_us[num_losses] / us}
            if num_losses == 2:
                row |= {"all_reduce_us": reduce_us, "all_reduce_share": reduce_us / us}
            yield row


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--devices", nargs="+", type=int, help="numbers of devices; default: 1, 2, 4, ... and all"
    )
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, help="of tests/cases.py")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--output", type=pathlib.Path, help="default: results/scaling_<device>")
    args = parser.parse_args()
    if args.devices and "xla_force_host_platform_device_count" not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        jax.config.update("jax_num_cpu_devices", max(args.devices))  # means nothing to a GPU
    count = len(jax.devices())
    sizes = sorted(args.devices or {2**i for i in range(count.bit_length())} | {count})
    if sizes[-1] > count:
        parser.error(f"--devices: {sizes[-1]} of {count}")
    on_gpu = jax.default_backend() == "gpu"
    wanted = args.shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)
    kind = jax.devices()[0].device_kind
    output = args.output or HERE / "results" / f"scaling_{kind.lower().replace(' ', '_')}.json"
    rows: list[Row] = []
    for dtype in args.dtypes:
        for shape in (shape for shape in SHAPES if shape.name in wanted):
            for row in bench(shape, dtype, sizes):
                rows.append(row)
                print(
                    *(f"{v:.2f}" if isinstance(v, float) else v for v in row.values()), flush=True
                )
                record = {"device": kind, "jax": jax.__version__, "scaling": rows}
                output.write_text(json.dumps(record, indent=1) + "\n")  # what is there is kept
    print_table(rows)
    print(f"written: {output}")


if __name__ == "__main__":
    main()
