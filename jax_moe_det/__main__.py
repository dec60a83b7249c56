"""`python -m jax_moe_det`: what is built and present, and whether its bits are as promised."""

from __future__ import annotations

import argparse
import functools
import importlib.resources
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tabulate import tabulate

import jax_moe_det
from jax_moe_det import _ffi, fused_moe_aux_loss, reference, testing

TOPK = 6
COEFF = 0.01


def inputs(dtype: str, num_tokens: int, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and counts made of integer arithmetic, so that they are the same everywhere."""
    n = num_tokens * num_experts
    hashed = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    scores = (hashed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    probs = scores.reshape(num_tokens, num_experts).astype(
        np.dtype(getattr(ml_dtypes, dtype, dtype))
    )
    counts = (np.arange(num_experts) * 7919 % (2 * num_tokens)).astype(np.int32)
    return probs, counts


def mask(num_tokens: int) -> np.ndarray:
    """Every fifth token is padding."""
    return np.arange(num_tokens) % 5 != 0


#: Name, dtype, shape, masked.
CASES = {
    "aux_loss float32": ("float32", 4096, 64, False),
    "aux_loss bfloat16": ("bfloat16", 4096, 64, False),
    "aux_loss float16": ("float16", 4096, 64, False),
    "aux_loss masked": ("float32", 1000, 33, True),
    "aux_loss wide": ("float32", 700, 2304, False),
}


def case_arguments(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Scores, counts and mask of a case."""
    dtype, num_tokens, num_experts, masked = CASES[name]
    probs, counts = inputs(dtype, num_tokens, num_experts)
    return probs, counts, mask(num_tokens) if masked else None


def loss_and_gradient(
    probs: Any, counts: Any, valid_mask: Any, deterministic: bool = True
) -> tuple[jax.Array, jax.Array]:
    """What a case computes."""
    return jax.value_and_grad(
        lambda p: fused_moe_aux_loss(
            p, counts, TOPK, COEFF, valid_mask=valid_mask, deterministic=deterministic
        )
    )(probs)


def plain_jax(probs: Any, counts: Any, valid_mask: Any) -> Any:
    """The same in plain JAX, to compare times."""

    def loss(p: Any) -> Any:
        num_tokens, num_experts = p.shape
        scores = p.astype(jnp.float32)
        total: Any = num_tokens
        if valid_mask is not None:
            scores = jnp.where(valid_mask[:, None], scores, 0)
            total = jnp.sum(valid_mask).astype(jnp.float32)
        return jnp.sum(scores * counts) * (num_experts * COEFF / TOPK) / (total * total)

    return jax.value_and_grad(loss)(probs)


def reference_fingerprint(name: str) -> str:
    """A case's fingerprint from the NumPy reference: what the shipped table holds."""
    probs, counts, valid_mask = case_arguments(name)
    loss = reference.aux_loss(probs, counts, TOPK, COEFF, valid_mask=valid_mask)
    gradient = reference.aux_loss_grad(probs, counts, TOPK, COEFF, valid_mask=valid_mask)
    return testing.fingerprint((loss, gradient))


def shipped_table() -> dict[str, str]:
    """Case name to fingerprint, as shipped in the package."""
    text = importlib.resources.files(jax_moe_det).joinpath("fingerprints.json").read_text()
    return dict(json.loads(text))


def backend_status() -> dict[str, str]:
    """For each backend, "present: ..." or why it is not."""
    status = {}
    for backend in ("cpu", "cuda"):
        if backend not in _ffi.built_backends():
            status[backend] = "not built: no CUDA compiler was found when this wheel was built"
            continue
        try:
            devices = jax.devices(backend)
        except RuntimeError as error:
            status[backend] = f"built, not present: {str(error).splitlines()[0]}"
        else:
            status[backend] = f"present: {len(devices)} x {devices[0].device_kind}"
    return status


def _microseconds(fn: Callable[..., Any], args: Any) -> float:
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def check(backend: str, name: str, repeats: int, want: str) -> dict[str, Any]:
    """Runs one case on one backend."""
    device = jax.devices(backend)[0]
    args = jax.device_put(case_arguments(name), device)
    ours, plain = jax.jit(loss_and_gradient), jax.jit(plain_jax)
    patterns = {testing.fingerprint(ours(*args)) for _ in range(repeats)}
    row = {
        "backend": backend,
        "operation": name,
        "fingerprint": sorted(patterns)[0],
        "expected": want,
        "distinct": len(patterns),
        "ok": patterns == {want},
        "us": _microseconds(ours, args),
        "plain_jax_us": _microseconds(plain, args),
    }
    if backend == "cuda":
        atomic = jax.jit(functools.partial(loss_and_gradient, deterministic=False))
        row["distinct_atomic"] = len({testing.fingerprint(atomic(*args)) for _ in range(repeats)})
    return row


def main(argv: list[str] | None = None) -> int:
    """Prints the report; returns the exit status: 1 on any mismatch."""
    parser = argparse.ArgumentParser(prog="python -m jax_moe_det", description=__doc__)
    parser.add_argument("--backend", choices=["cpu", "cuda"], help="check only this one")
    parser.add_argument("--repeats", type=int, default=50, help="calls per operation (default 50)")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats: got {args.repeats}; allowed: an integer >= 1")

    status = backend_status()
    present = [b for b, words in status.items() if words.startswith("present")]
    wanted = [args.backend] if args.backend else present
    missing = [b for b in wanted if b not in present]
    table = shipped_table()
    rows = [
        check(backend, name, args.repeats, table[name])
        for backend in wanted
        if backend in present
        for name in CASES
    ]
    ok = not missing and all(row["ok"] for row in rows)
    if args.json:
        versions = {"version": jax_moe_det.__version__, "jax": jax.__version__}
        report = {**versions, "backends": status, "checks": rows, "ok": ok}
        print(json.dumps(report, indent=1))
        return 0 if ok else 1

    print(f"jax_moe_det {jax_moe_det.__version__}, jax {jax.__version__}")
    for backend, words in status.items():
        print(f"  {backend:5} {words}")
    print()
    shown = [
        {
            "backend": row["backend"],
            "operation": row["operation"],
            "fingerprint": row["fingerprint"][:16],
            "as shipped": "yes" if row["ok"] else f"NO, want {row['expected'][:16]}",
            f"bit patterns of {args.repeats}": row["distinct"],
            "of the atomic kernel": row.get("distinct_atomic", "-"),
            "us": f"{row['us']:.0f}",
            "plain JAX us": f"{row['plain_jax_us']:.0f}",
        }
        for row in rows
    ]
    print(tabulate(shown, headers="keys"))
    for backend in missing:
        print(f"\n{backend}: asked for, but {status[backend]}")
    print("\nAll bits are as promised." if ok else "\nFAILED: see above.")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
