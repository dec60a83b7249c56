"""Times this package against plain JAX in one run; writes JSON to `benchmarks/results/`.

Method: R calls unrolled in the body of a device loop, chained by `optimization_barrier` so that
they run in order and none is dropped; the loop carries all R results, so that none is unused and
command buffers replay on the same addresses; inputs above 6 MB rotate over at least 256 MB, so
that the L2 cache does not hide the memory. The figure is the median of 7 loops divided by the
calls, in microseconds. Inputs are random, never zeros.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from tabulate import tabulate

from jax_moe_det import fused_moe_aux_loss

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tests.cases import SHAPES, Shape  # noqa: E402

ROTATE_ABOVE = 6 << 20
ROTATE_OVER = 256 << 20
COEFF = 0.01


def time_us(fn: Callable[..., Any], buffers: list[jax.Array], *rest: jax.Array) -> float:
    """Median microseconds of `fn(buffer, *rest)`."""
    on_gpu = jax.default_backend() == "gpu"
    unrolled = len(buffers) * (max(1, 16 // len(buffers)) if on_gpu else 1)
    # A guess of the time, 2 us and 4 TB/s (CPU: 10 GB/s), sets the loops: about 60 ms of calls,
    # beside which the start of the program does not count. The number is static: a loop of
    # unknown length asks the host after every turn.
    guess_us = 2 + buffers[0].nbytes / (4e6 if on_gpu else 1e4)
    loops = max(1, int(60e3 / (guess_us * unrolled)))

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

    # The loop's results stay on the device: a host that hands out buffers is slower than the op.
    @jax.jit
    def run(buffers: list[jax.Array], rest: tuple[jax.Array, ...]) -> Any:
        start = [fn(buffers[0], *rest)] * unrolled
        return lax.fori_loop(0, loops, body, (start, rest))  # all results: none is unused

    jax.block_until_ready(run(buffers, rest))
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        jax.block_until_ready(run(buffers, rest))
        times.append((time.perf_counter() - begin) / (loops * unrolled))
    return statistics.median(times) * 1e6


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


def bench_aux_loss(shape: Shape, dtype: str, read_only: Any, atomic: bool) -> dict[str, Any]:
    """Loss forward and value_and_grad of one shape."""
    num_bytes = shape.num_tokens * shape.num_experts * jnp.dtype(dtype).itemsize
    count = 1 if num_bytes <= ROTATE_ABOVE else -(-ROTATE_OVER // num_bytes)
    keys = jax.random.split(jax.random.key(0), count + 1)
    make = jax.jit(
        lambda key: jax.nn.softmax(
            jax.random.normal(key, (shape.num_tokens, shape.num_experts))
        ).astype(dtype)
    )
    buffers = [make(key) for key in keys[1:]]
    counts = jax.random.randint(keys[0], (shape.num_experts,), 0, 2 * shape.num_tokens)
    fns = {
        "ours": lambda p, f: fused_moe_aux_loss(p, f, shape.topk, COEFF),
        "atomic": lambda p, f: fused_moe_aux_loss(p, f, shape.topk, COEFF, deterministic=False),
        "xla": lambda p, f: loss_xla(p, f, shape.topk),
    }
    if not atomic:
        del fns["atomic"]
    row: dict[str, Any] = {"shape": str(shape), "dtype": dtype, "bytes": num_bytes}
    for name, fn in fns.items():
        row[f"forward_{name}_us"] = time_us(fn, buffers, counts)
    for name in ("ours", "xla"):
        row[f"value_and_grad_{name}_us"] = time_us(jax.value_and_grad(fns[name]), buffers, counts)
    if read_only is not None:
        row["read_only_us"] = time_us(lambda p, _: read_only(p), buffers, counts)
    row["forward_ratio"] = row["forward_xla_us"] / row["forward_ours_us"]
    row["value_and_grad_ratio"] = row["value_and_grad_xla_us"] / row["value_and_grad_ours_us"]
    return row


def main() -> None:
    """Runs the benchmarks named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", help="names of tests/cases.py; default: all")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/<op>_<device>.json")
    parser.add_argument("--atomic", action="store_true", help="time the atomic kernel too")
    args = parser.parse_args()
    device = jax.devices()[0]
    name = device.device_kind.lower().replace(" ", "_")
    output = args.output or HERE / "results" / f"aux_loss_{name}.json"
    read_only = read_only_kernel()
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        for shape in SHAPES:
            if args.shapes is not None and shape.name not in args.shapes:
                continue
            rows.append(bench_aux_loss(shape, dtype, read_only, args.atomic))
            record = {"device": device.device_kind, "jax": jax.__version__, "aux_loss": rows}
            output.write_text(json.dumps(record, indent=1) + "\n")  # what is there is kept
    table = []
    for row in rows:
        cells = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in row.items()}
        table.append({k.replace("value_and_grad", "vg"): v for k, v in cells.items()})
    print(tabulate(table, headers="keys"))
    print(f"written: {output}")


if __name__ == "__main__":
    main()
