"""`python -m jax_moe_det`: what is built and present, and whether its bits are as promised."""

from __future__ import annotations

import argparse
import dataclasses
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
from jax import lax
from tabulate import tabulate

import jax_moe_det
from jax_moe_det import (
    _ffi,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    reference,
    route,
    routing_stats,
    testing,
    update_expert_bias,
)

COEFF = 0.01


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation, forward and backward, on arguments that are the same everywhere."""

    #: NumPy arrays, or None for an operand that is left out.
    arguments: Callable[[], tuple[Any, ...]]
    #: Of the arguments: what is checked, the same in plain JAX, and its definition in NumPy.
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    reference: Callable[..., Any]
    #: The same with atomic additions, as a negative control on a GPU.
    atomic: Callable[..., Any] | None = None

    def reference_fingerprint(self) -> str:
        """From the NumPy reference: what the shipped table holds."""
        return testing.fingerprint(self.reference(*self.arguments()))


def uniform(dtype: str, num_tokens: int, num_experts: int) -> np.ndarray:
    """Numbers from 0 to 1 made of integer arithmetic, so that they are the same everywhere."""
    n = num_tokens * num_experts
    hashed = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (hashed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return numbers.reshape(num_tokens, num_experts).astype(
        np.dtype(getattr(ml_dtypes, dtype, dtype))
    )


def mask(num_tokens: int) -> np.ndarray:
    """Every fifth token is padding."""
    return np.arange(num_tokens) % 5 != 0


def loss_case(dtype: str, num_tokens: int, num_experts: int, *, masked: bool = False) -> Case:
    """The auxiliary loss and its gradient."""
    topk = 6

    def arguments() -> tuple[Any, ...]:
        counts = (np.arange(num_experts) * 7919 % (2 * num_tokens)).astype(np.int32)
        valid_mask = mask(num_tokens) if masked else None
        return uniform(dtype, num_tokens, num_experts), counts, valid_mask

    def ours(probs: Any, counts: Any, valid_mask: Any, deterministic: bool = True) -> Any:
        return jax.value_and_grad(
            lambda p: fused_moe_aux_loss(
                p, counts, topk, COEFF, valid_mask=valid_mask, deterministic=deterministic
            )
        )(probs)

    def plain(probs: Any, counts: Any, valid_mask: Any) -> Any:
        def loss(p: Any) -> Any:
            scores = p.astype(jnp.float32)
            total: Any = num_tokens
            if valid_mask is not None:
                scores = jnp.where(valid_mask[:, None], scores, 0)
                total = jnp.sum(valid_mask).astype(jnp.float32)
            return jnp.sum(scores * counts) * (num_experts * COEFF / topk) / (total * total)

        return jax.value_and_grad(loss)(probs)

    def in_numpy(probs: Any, counts: Any, valid_mask: Any) -> Any:
        return (
            reference.aux_loss(probs, counts, topk, COEFF, valid_mask=valid_mask),
            reference.aux_loss_grad(probs, counts, topk, COEFF, valid_mask=valid_mask),
        )

    atomic = functools.partial(ours, deterministic=False)
    return Case(arguments, ours, plain, in_numpy, atomic)


def router_case(
    dtype: str,
    num_tokens: int,
    num_experts: int,
    topk: int,
    *,
    masked: bool = False,
    biased: bool = False,
    **options: Any,
) -> Case:
    """The router's weights or aux scores, its map and its gradient."""

    def arguments() -> tuple[Any, ...]:
        numbers = uniform("float32", 2 * num_tokens, num_experts)
        out_dtype = "float32" if options.get("compute_aux_scores") else dtype
        logits = (numbers[:num_tokens] * 8 - 4).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
        d_out = (numbers[num_tokens:] - np.float32(0.5)).astype(
            np.dtype(getattr(ml_dtypes, out_dtype, out_dtype))
        )
        bias = (np.arange(num_experts) * 37 % 64 / 256).astype(np.float32) if biased else None
        return logits, d_out, bias, mask(num_tokens) if masked else None

    def forward_and_backward(route: Callable[..., Any], logits: Any, d_out: Any) -> Any:
        out, vjp, routing_map = jax.vjp(route, logits, has_aux=True)
        return out, routing_map, vjp(d_out)[0]

    def ours(logits: Any, d_out: Any, bias: Any, valid_mask: Any) -> Any:
        def route(x: Any) -> Any:
            return fused_topk_with_score_function(
                x, topk, expert_bias=bias, valid_mask=valid_mask, **options
            )

        return forward_and_backward(route, logits, d_out)

    def plain(logits: Any, d_out: Any, bias: Any, valid_mask: Any) -> Any:
        def route(x: Any) -> Any:
            return plain_router(x, topk, bias, valid_mask, **options)

        return forward_and_backward(route, logits, d_out)

    def in_numpy(logits: Any, d_out: Any, bias: Any, valid_mask: Any) -> Any:
        arrays = {"expert_bias": bias, "valid_mask": valid_mask}
        out, routing_map = reference.topk_router(logits, topk, **arrays, **options)
        gradient = reference.topk_router_grad(logits, routing_map, d_out, topk, **arrays, **options)
        return out, routing_map, gradient

    return Case(arguments, ours, plain, in_numpy)


def route_case(
    dtype: str,
    num_tokens: int,
    num_experts: int,
    topk: int,
    *,
    masked: bool = False,
    biased: bool = False,
    replayed: bool = False,
    **options: Any,
) -> Case:
    """The router step: routing, both losses, and the gradient of weights and losses together."""
    options = {"aux_loss_coeff": 1.0, "z_loss_coeff": 0.1, **options}
    d_aux, d_z = np.float32(0.75), np.float32(1.25)

    def arguments() -> tuple[Any, ...]:
        type_ = np.dtype(getattr(ml_dtypes, dtype, dtype))
        numbers = uniform("float32", 2 * num_tokens, num_experts)
        logits = (numbers[:num_tokens] * 8 - 4).astype(type_)
        d_weights = (numbers[num_tokens:, :topk] - np.float32(0.5)).astype(type_)
        bias = (np.arange(num_experts) * 37 % 64 / 256).astype(np.float32) if biased else None
        indices = None
        if replayed:  # some name no expert
            choices = np.arange(num_tokens * topk, dtype=np.int32).reshape(num_tokens, topk)
            indices = choices * 37 % (num_experts + 1)
        return logits, d_weights, bias, mask(num_tokens) if masked else None, indices

    def forward_and_backward(f: Callable[..., Any], logits: Any, d_weights: Any) -> Any:
        losses, vjp, rest = jax.vjp(f, logits, has_aux=True)
        return *losses, *rest, vjp((d_weights, d_aux, d_z))[0]

    def ours(logits: Any, d_weights: Any, bias: Any, valid_mask: Any, indices: Any) -> Any:
        def step(x: Any) -> Any:
            out = route(
                x, topk, expert_bias=bias, valid_mask=valid_mask, indices=indices, **options
            )
            return (out.weights, out.aux_loss, out.z_loss), (out.indices, out.tokens_per_expert)

        return forward_and_backward(step, logits, d_weights)

    def plain(logits: Any, d_weights: Any, bias: Any, valid_mask: Any, indices: Any) -> Any:
        def step(x: Any) -> Any:
            return plain_route(x, topk, bias, valid_mask, indices, **options)

        return forward_and_backward(step, logits, d_weights)

    def in_numpy(logits: Any, d_weights: Any, bias: Any, valid_mask: Any, indices: Any) -> Any:
        arrays = {"expert_bias": bias, "valid_mask": valid_mask}
        weights, chosen, counts, aux, z = reference.route(
            logits, topk, indices=indices, **arrays, **options
        )
        gradient = reference.route_grad(
            logits, topk, chosen, d_weights, d_aux, d_z, **arrays, **options
        )
        return weights, aux, z, chosen, counts, gradient

    return Case(arguments, ours, plain, in_numpy)


def statistics_case(num_experts: int) -> Case:
    """Statistics of the load, and the bias update."""
    rate = 0.001

    def arguments() -> tuple[Any, ...]:
        counts = (np.arange(num_experts) * 7919 % 5000 // 3).astype(np.int32)
        bias = (np.arange(num_experts) * 37 % 64 / 256).astype(np.float32)
        return counts, bias

    def ours(counts: Any, bias: Any) -> Any:
        return *jax.tree.leaves(routing_stats(counts)), update_expert_bias(bias, counts, rate)

    def plain(counts: Any, bias: Any) -> Any:
        load = counts / jnp.sum(counts)
        entropy = jnp.sum(jax.scipy.special.entr(load))
        violations = num_experts * jnp.max(load) - 1, 1 - num_experts * jnp.min(load)
        new_bias = bias + rate * jnp.sign(1 / num_experts - load)
        dead = jnp.sum(counts == 0, dtype=jnp.int32)
        return load, *violations, entropy, jnp.exp(entropy), dead, new_bias

    def in_numpy(counts: Any, bias: Any) -> Any:
        return *reference.routing_stats(counts), reference.update_expert_bias(bias, counts, rate)

    return Case(arguments, ours, plain, in_numpy)


def plain_scores(x: Any, score_function: str, after_topk: bool) -> Any:
    """Scores in plain JAX; of a softmax after top-k, the logits."""
    functions: dict[str, Callable[..., Any]] = {
        "softmax": lambda x: x if after_topk else jax.nn.softmax(x),
        "sigmoid": jax.nn.sigmoid,
        "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    }
    return functions[score_function](x)


def plain_choice(values: Any, topk: int, num_groups: int, group_topk: int) -> Any:
    """The experts that `lax.top_k` chooses; a group's score is the sum of its two highest."""
    values = lax.stop_gradient(values)
    if num_groups > 1:
        grouped = values.reshape(len(values), num_groups, -1)
        _, kept = lax.top_k(lax.top_k(grouped, 2)[0].sum(axis=2), group_topk)
        is_kept = jax.nn.one_hot(kept, num_groups, dtype=bool).any(axis=1)
        values = jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(values.shape)
    return lax.top_k(values, topk)[1]


def plain_weights(scores: Any, chosen: Any, score_function: str, after_topk: bool) -> Any:
    """Weights of the chosen experts before scaling; 0 where there is none."""
    is_expert = chosen < scores.shape[1]
    weights = jnp.take_along_axis(scores, jnp.where(is_expert, chosen, 0), axis=1)
    if after_topk:
        weights = jax.nn.softmax(weights, where=is_expert)
    weights = jnp.where(is_expert, weights, 0)
    if score_function != "softmax" and chosen.shape[1] > 1:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return weights


def plain_router(
    logits: Any,
    topk: int,
    bias: Any,
    valid_mask: Any,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int = 1,
    group_topk: int = 1,
    group_score: str = "top2",
    scaling_factor: float = 1.0,
    compute_aux_scores: bool = False,
) -> Any:
    """The router in plain JAX, to compare times."""
    assert group_score == "top2"
    x = logits.astype(jnp.float32)
    num_tokens = len(x)
    is_softmax = score_function == "softmax"
    after_topk = is_softmax and not use_pre_softmax and not compute_aux_scores
    scores = plain_scores(x, score_function, after_topk)
    if compute_aux_scores and not is_softmax:
        scores = scores / jnp.sum(scores, axis=1, keepdims=True)
    values = scores if bias is None else scores + bias
    chosen = plain_choice(values, topk, num_groups, group_topk)
    rows = jnp.arange(num_tokens)[:, None]
    valid = jnp.ones(num_tokens, bool) if valid_mask is None else valid_mask
    routing_map = jnp.zeros(x.shape, bool).at[rows, chosen].set(valid[:, None])
    if compute_aux_scores:
        return jnp.where(valid[:, None], scores, 0), routing_map
    weights = plain_weights(scores, chosen, score_function, after_topk)
    weights = jnp.where(valid[:, None], weights * scaling_factor, 0).astype(logits.dtype)
    return jnp.zeros(x.shape, logits.dtype).at[rows, chosen].set(weights), routing_map


def plain_route(
    logits: Any,
    topk: int,
    bias: Any,
    valid_mask: Any,
    indices: Any,
    *,
    aux_loss_coeff: float,
    z_loss_coeff: float,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int = 1,
    group_topk: int = 1,
    group_score: str = "top2",
    scaling_factor: float = 1.0,
    loss_map: str = "dispatch",
) -> Any:
    """The router step in plain JAX, to compare times: (weights, losses), (indices, counts)."""
    assert group_score == "top2"
    x = logits.astype(jnp.float32)
    num_tokens, num_experts = x.shape
    after_topk = score_function == "softmax" and not use_pre_softmax
    valid = jnp.ones(num_tokens, bool) if valid_mask is None else valid_mask
    valid = valid[:, None]
    total = jnp.sum(valid).astype(jnp.float32)

    def count(chosen: Any) -> Any:
        chosen = jnp.where(valid, chosen, num_experts)
        return jnp.zeros(num_experts, jnp.int32).at[chosen].add(1, mode="drop")

    scores = plain_scores(x, score_function, after_topk)
    if indices is None:
        values = scores if bias is None else scores + bias
        indices = plain_choice(values, topk, num_groups, group_topk)
    chosen = jnp.where(valid, indices, num_experts)
    weights = plain_weights(scores, chosen, score_function, after_topk) * scaling_factor
    counts = count(chosen)
    if score_function == "softmax":
        aux_scores = jax.nn.softmax(x)
    else:
        aux_scores = scores / jnp.sum(scores, axis=1, keepdims=True)
    loss_counts = counts if loss_map == "dispatch" else count(plain_choice(aux_scores, topk, 1, 1))
    aux = jnp.sum(jnp.where(valid, aux_scores, 0) * loss_counts)
    aux = aux * (num_experts * aux_loss_coeff / topk) / (total * total)
    squares = jax.nn.logsumexp(x, axis=1, keepdims=True) ** 2
    z = jnp.sum(jnp.where(valid, squares, 0)) * z_loss_coeff / total
    return (weights.astype(logits.dtype), aux, z), (chosen, counts)


CASES = {
    "aux_loss float32": loss_case("float32", 4096, 64),
    "aux_loss bfloat16": loss_case("bfloat16", 4096, 64),
    "aux_loss float16": loss_case("float16", 4096, 64),
    "aux_loss masked": loss_case("float32", 1000, 33, masked=True),
    "aux_loss wide": loss_case("float32", 700, 2304),
    "topk_router softmax": router_case("float32", 4096, 64, 6),
    "topk_router softmax first": router_case("float32", 2048, 128, 8, use_pre_softmax=True),
    "topk_router sigmoid, bias, groups": router_case(
        "float32",
        1024,
        256,
        8,
        biased=True,
        score_function="sigmoid",
        num_groups=8,
        group_topk=4,
        group_score="top2",
        scaling_factor=2.5,
    ),
    "topk_router sqrtsoftplus bfloat16": router_case(
        "bfloat16", 2048, 64, 6, score_function="sqrtsoftplus"
    ),
    "topk_router aux scores, masked": router_case(
        "float32", 1000, 33, 4, masked=True, score_function="sigmoid", compute_aux_scores=True
    ),
    "topk_router wide": router_case("float16", 200, 2304, 36),
    "route softmax": route_case("float32", 4096, 64, 6),
    "route softmax first bfloat16, masked": route_case(
        "bfloat16", 2048, 128, 8, masked=True, use_pre_softmax=True
    ),
    "route sigmoid, bias, groups": route_case(
        "float32",
        1024,
        256,
        8,
        biased=True,
        score_function="sigmoid",
        num_groups=8,
        group_topk=4,
        group_score="top2",
        scaling_factor=2.5,
        loss_map="plain",
    ),
    "route replay, masked": route_case(
        "float32", 1000, 33, 4, masked=True, replayed=True, score_function="sqrtsoftplus"
    ),
    "route wide": route_case("float16", 200, 2304, 36, score_function="sigmoid"),
    "statistics": statistics_case(256),
}


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
    case = CASES[name]
    args = jax.device_put(case.arguments(), device)
    ours, plain = jax.jit(case.ours), jax.jit(case.plain)
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
    if backend == "cuda" and case.atomic is not None:
        atomic = jax.jit(case.atomic)
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
