"""Trains a small mixture-of-experts language model, and checks that its bits repeat.

A byte-level transformer learns the help texts that ship with Python (`pydoc_data.topics`). Each
layer's router is one call of `jax_moe_det.route`: the chosen experts, their weights, and the two
losses that train it. The script trains twice on one device, and once on four CPU devices with the
tokens sharded over them. Then it checks

1. the weights of the two runs on one device: their SHA-256 must be equal;
2. *same logits in, same bits out*: the router logits of run 1 go, step by step, through `route` on
   four CPU devices, sharded. Everything it returns, and its gradient, must have the bits of one
   device. This is the promise of jax_moe_det, and it holds as well where run 1 was on a GPU;
3. the losses of the run on four devices against those of run 1. Here the logits come out of XLA's
   own matmuls and sums, whose bits nobody promises. This model therefore keeps every
   floating-point sum inside one sequence, which the compiler sees in the same shape on one device
   and on four, and adds the sequences' gradients in a fixed order (see `make_step`). On CPU the
   trainings then agree to the last bit (with jax 0.10 to 0.12 on x86-64), and the script insists.
   Between a GPU and a CPU XLA's matmuls differ: there it only says how many steps agree.

Run it with `python examples/train_moe.py`; it exits with 1 if a comparison fails.
"""

from __future__ import annotations

import argparse
import functools
import os
import pydoc_data.topics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jax_moe_det import Routing, route
from jax_moe_det.testing import fingerprint

NUM_SHARDS = 4
VOCAB = 256  # bytes
NUM_LAYERS = 2
WIDTH = 48
HIDDEN = 96
NUM_EXPERTS = 8
TOPK = 2
OPTIMIZER = optax.adam(3e-3)

LAYER_WEIGHTS = ("query_key_value", "attention_out", "router", "expert_in", "expert_out")
Weights = dict[str, jax.Array]


# ---- The model, for one sequence.


def init_weights(seed: int, seq_len: int) -> Weights:
    """Draws the weights; what the layers hold is stacked in a leading axis."""
    shapes = {
        "embed": (VOCAB, WIDTH),
        "position": (seq_len, WIDTH),
        "query_key_value": (NUM_LAYERS, WIDTH, 3 * WIDTH),
        "attention_out": (NUM_LAYERS, WIDTH, WIDTH),
        "router": (NUM_LAYERS, WIDTH, NUM_EXPERTS),
        "expert_in": (NUM_LAYERS, NUM_EXPERTS, WIDTH, HIDDEN),
        "expert_out": (NUM_LAYERS, NUM_EXPERTS, HIDDEN, WIDTH),
        "unembed": (WIDTH, VOCAB),
    }
    # NumPy's generator gives the same weights on every backend.
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(0.0, shape[-2] ** -0.5, shape), jnp.float32)
        for name, shape in shapes.items()
    }


def normalize(x: jax.Array) -> jax.Array:
    """Scales each token's activations to a root mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(x: jax.Array, query_key_value: jax.Array, out: jax.Array) -> jax.Array:
    """Causal self-attention with one head, `[seq_len, WIDTH]` to the same."""
    query, key, value = jnp.split(x @ query_key_value, 3, axis=-1)
    scores = query @ key.T * WIDTH**-0.5
    causal = jnp.tril(jnp.ones(scores.shape, bool))
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ value @ out


def embed(weights: Weights, tokens: jax.Array) -> jax.Array:
    """The activations of one sequence, `[seq_len, WIDTH]`."""
    # A matmul instead of a look-up: the gradient of a look-up is a scatter-add, atomic on a GPU.
    return jax.nn.one_hot(tokens[:-1], VOCAB) @ weights["embed"] + weights["position"]


def attend(layer: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The layer's attention, and the router's logits `[seq_len, NUM_EXPERTS]`."""
    x += attention(normalize(x), layer["query_key_value"], layer["attention_out"])
    return x, normalize(x) @ layer["router"]


def experts(layer: Weights, x: jax.Array, weights: jax.Array, indices: jax.Array) -> jax.Array:
    """The experts that the router chose for each token, `[seq_len, TOPK]`, by its weights.

    All experts run on all tokens, which is simple, and fast enough at this size.
    """
    gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(indices, NUM_EXPERTS))
    # relu is exact. The multiply-adds of a gelu may be fused in one program and not in another, and
    # run 3 is another program than run 1.
    hidden = jax.nn.relu(jnp.einsum("td,edh->eth", normalize(x), layer["expert_in"]))
    outputs = jnp.einsum("eth,ehd->etd", hidden, layer["expert_out"])
    return x + jnp.einsum("etd,te->td", outputs, gates)


def cross_entropy(weights: Weights, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """That of each next byte, `[seq_len]`."""
    log_probs = jax.nn.log_softmax(normalize(x) @ weights["unembed"])
    return -jnp.sum(jax.nn.one_hot(tokens[1:], VOCAB) * log_probs, axis=-1)


# ---- Training.


class Coeffs(NamedTuple):
    """The coefficients of the router's two losses."""

    aux_loss: float
    z_loss: float


class Record(NamedTuple):
    """What one step leaves behind; the routers' part is stacked, layer by layer."""

    lm_loss: Any  # float32 []
    logits: Any  # of the routers, float32 [NUM_LAYERS, batch_size, seq_len, NUM_EXPERTS]
    routing: Routing


def route_tokens(logits: jax.Array, coeffs: Coeffs) -> Routing:
    """The router: the whole batch's tokens, in whatever way they are sharded."""
    return route(logits, TOPK, aux_loss_coeff=coeffs.aux_loss, z_loss_coeff=coeffs.z_loss)


Step = Callable[[Weights, Any, Any], tuple[Weights, Any, Record]]


@functools.cache  # run 2 takes the compiled step of run 1
def make_step(mesh: Mesh, coeffs: Coeffs) -> Step:
    """Builds the jitted training step `(weights, state, batch) -> (weights, state, record)`.

    The batch `[batch_size, seq_len + 1]` is sharded over the mesh; weights are on every device.
    """

    def whole(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))

    def each(fn: Callable[..., Any], *args: Any) -> Any:
        # One sequence after another, so that the compiler sees the same shapes on any number of
        # devices: with vmap the bits of a matmul may depend on how many sequences a device holds.
        return jax.shard_map(
            lambda *args: jax.lax.map(lambda x: fn(*x), args),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
        )(*args)

    def loss(copies: Weights, batch: jax.Array) -> tuple[jax.Array, Record]:
        x = each(embed, copies, batch)
        layers = []
        for i in range(NUM_LAYERS):
            layer = {name: copies[name][:, i] for name in LAYER_WEIGHTS}
            x, logits = each(attend, layer, x)
            routing = route_tokens(logits, coeffs)
            x = each(experts, layer, x, routing.weights, routing.indices)
            layers.append((logits, routing))
        logits, routing = jax.tree.map(lambda *layers: jnp.stack(layers), *layers)
        lm_loss = whole(each(cross_entropy, copies, x, batch)).mean()
        total = lm_loss + routing.aux_loss.sum() + routing.z_loss.sum()
        return total, Record(lm_loss, logits, routing)

    @jax.jit
    def step(weights: Weights, state: Any, batch: jax.Array) -> tuple[Weights, Any, Record]:
        # The usual gradient with respect to `weights` would be summed over tokens inside an
        # all-reduce, in an order that depends on the number of devices. So each sequence gets its
        # own copy of the weights, the copies' gradients are gathered, and every device adds them
        # in the order of the batch. It costs one gradient per sequence in memory; a large job would
        # rather share the weights, and keep the promise of the router alone.
        copies = jax.tree.map(lambda w: jnp.broadcast_to(w, (len(batch), *w.shape)), weights)
        grads, record = jax.grad(loss, has_aux=True)(copies, batch)
        zeros = jax.tree.map(jnp.zeros_like, weights)
        grads, _ = jax.lax.scan(
            lambda total, grad: (jax.tree.map(jnp.add, total, grad), None),
            zeros,
            jax.tree.map(whole, grads),
        )
        updates, state = OPTIMIZER.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, record

    return step


def train(
    title: str, devices: Sequence[Any], batches: np.ndarray, args: argparse.Namespace
) -> tuple[str, list[Record]]:
    """Trains from the start on `devices`; returns the weights' SHA-256 and every step's record."""
    mesh = Mesh(np.array(devices), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    by_sequence = NamedSharding(mesh, PartitionSpec("data"))
    step = make_step(mesh, args.coeffs)

    weights = jax.device_put(init_weights(args.seed, args.seq_len), replicated)
    state = jax.device_put(OPTIMIZER.init(weights), replicated)
    records = []
    progress = tqdm(batches, desc=title)
    for batch in progress:
        batch = jax.device_put(batch, by_sequence)
        weights, state, record = step(weights, state, batch)
        record = jax.tree.map(np.asarray, record)
        records.append(record)
        progress.set_postfix(
            lm_loss=f"{record.lm_loss:.3f}",
            aux_loss=f"{record.routing.aux_loss.sum():.5f}",
            z_loss=f"{record.routing.z_loss.sum():.5f}",
        )
    return fingerprint(weights), records


# ---- Comparisons.


def count_replayed(records: list[Record], devices: Sequence[Any], coeffs: Coeffs) -> int:
    """Feeds a run's router logits to one device and, token-sharded, to all of `devices`.

    Returns:
      The number of steps at which both give the routing of the run, and both the same gradient.
    """

    @jax.jit
    def routing_and_grad(logits: jax.Array) -> tuple[Routing, jax.Array]:
        def total(logits: jax.Array) -> tuple[jax.Array, Routing]:
            routing = jax.vmap(lambda layer: route_tokens(layer, coeffs))(logits)
            # Squared, or the gradient of the weights, whose sum is 1, would be zero.
            losses = routing.aux_loss.sum() + routing.z_loss.sum()
            return (routing.weights**2).sum() + losses, routing

        grad, routing = jax.grad(total, has_aux=True)(logits)
        return routing, grad

    mesh = Mesh(np.array(devices), ("data",))
    by_token = NamedSharding(mesh, PartitionSpec(None, "data"))
    num_equal = 0
    for record in tqdm(records, desc="replay"):
        routing, grad = routing_and_grad(record.logits)
        sharded = routing_and_grad(jax.device_put(record.logits, by_token))
        expected = fingerprint((record.routing, grad))
        num_equal += fingerprint((routing, grad)) == fingerprint(sharded) == expected
    return num_equal


def count_equal_losses(a: list[Record], b: list[Record]) -> int:
    """The number of steps at which two runs have the bits of all three losses."""

    def losses(record: Record) -> str:
        return fingerprint((record.lm_loss, record.routing.aux_loss, record.routing.z_loss))

    return sum(losses(x) == losses(y) for x, y in zip(a, b, strict=True))


# ---- The script.


def draw_batches(args: argparse.Namespace) -> np.ndarray:
    """Random pieces of the text, int32 `[steps, batch_size, seq_len + 1]`."""
    topics = pydoc_data.topics.topics
    text = np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    rng = np.random.default_rng(args.seed)
    starts = rng.integers(0, len(text) - args.seq_len, (args.steps, args.batch_size, 1))
    return text[starts + np.arange(args.seq_len + 1)].astype(np.int32)


def format_terms(terms: np.ndarray) -> str:
    """Nine significant digits: different float32 values look different."""
    return "  ".join(f"{term:<12.9g}" for term in terms)


def report(what: str, same: bool) -> bool:
    """Prints the outcome of a comparison and returns it."""
    print(f"{'same bits' if same else 'DIFFERENT'}: {what}")
    return same


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences; a multiple of 4")
    parser.add_argument("--seq-len", type=int, default=64, help="bytes")
    parser.add_argument("--aux-loss-coeff", type=float, default=1e-2)
    parser.add_argument("--z-loss-coeff", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.coeffs = Coeffs(args.aux_loss_coeff, args.z_loss_coeff)
    if args.steps < 1 or args.seq_len < 1:
        parser.error("--steps and --seq-len must be at least 1")
    # Two on each device: XLA would unroll a loop over one sequence, and compile it differently.
    if args.batch_size < 2 * NUM_SHARDS or args.batch_size % NUM_SHARDS:
        parser.error(
            f"--batch-size must be a multiple of {NUM_SHARDS}, and {2 * NUM_SHARDS} at least"
        )
    return args


def main() -> int:
    """Trains, compares and prints; returns the exit status."""
    args = parse_args()
    # JAX reads both settings when it starts its backends, at the first call for devices below.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + f" --xla_force_host_platform_device_count={NUM_SHARDS}"
        # XLA's own GPU kernels: only those whose bits repeat, and none chosen by a timing.
        + " --xla_gpu_deterministic_ops=true"
    )
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms and "cpu" not in platforms.split(","):
        jax.config.update("jax_platforms", f"{platforms},cpu")

    device = jax.devices()[0]
    shards = jax.devices("cpu")[:NUM_SHARDS]
    batches = draw_batches(args)
    start = time.perf_counter()
    first, records = train("run 1", [device], batches, args)
    second, _ = train("run 2", [device], batches, args)
    replayed = count_replayed(records, shards, args.coeffs)
    third, sharded_records = train(f"{NUM_SHARDS} devices", shards, batches, args)
    trained_alike = count_equal_losses(records, sharded_records)

    num_tokens = args.batch_size * args.seq_len
    print(f"{device.device_kind}, jax {jax.__version__}: {args.steps} steps of {num_tokens} tokens")
    print(
        f"LM loss {records[0].lm_loss:.3f} at the first step, {records[-1].lm_loss:.3f} at the last"
    )
    print("\nSHA-256 of the weights")
    print(f"  run 1, 1 device       {first}")
    print(f"  run 2, 1 device       {second}")
    print(f"  run 3, {NUM_SHARDS} CPU devices  {third}")
    print(f"\naux loss of each layer  run 1, 1 device             run 3, {NUM_SHARDS} CPU devices")
    for step in sorted({0, args.steps // 2, args.steps - 1}):
        terms = [format_terms(run[step].routing.aux_loss) for run in (records, sharded_records)]
        print(f"  step {step:<16d} {terms[0]}  {terms[1].rstrip()}")
    print()

    on_cpu = device.platform == "cpu"
    ok = report("weights of run 1 and run 2", first == second)
    ok &= report(
        f"routing, losses and gradient from run 1's logits, 1 device and {NUM_SHARDS} CPU devices: "
        f"{replayed} of {args.steps} steps",
        replayed == args.steps,
    )
    agree = report(
        f"LM, aux and z loss of run 1 and run 3: {trained_alike} of {args.steps} steps",
        trained_alike == args.steps,
    )
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if ok and (agree or not on_cpu) else 1


if __name__ == "__main__":
    raise SystemExit(main())
