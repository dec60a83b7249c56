"""Trains a small mixture-of-experts language model, and checks that its bits repeat.

A byte-level transformer learns the help texts that ship with Python (`pydoc_data.topics`). Each
layer's router is balanced by `jax_moe_det.fused_moe_aux_loss`. The script trains twice on one
device, and once on four CPU devices with the tokens sharded over them. Then it checks

1. the weights of the two runs on one device: their SHA-256 must be equal;
2. *same scores in, same bits out*: the router scores of run 1 go, step by step, through the loss on
   four CPU devices, sharded. Loss terms and gradient must have the bits of one device. This is
   the promise of jax_moe_det, and it holds as well where run 1 was on a GPU;
3. the loss terms of the run on four devices against those of run 1. Here the scores come out of
   XLA's own matmuls and sums, whose bits nobody promises. This model therefore keeps every
   floating-point sum inside one sequence, which the compiler sees in the same shape on one device
   and on four, and adds the sequences' gradients in a fixed order (see `make_step`). On CPU the
   trainings then agree to the last bit (with jax 0.10 to 0.12 on x86-64), and the script insists.
   Between a GPU and a CPU XLA's matmuls differ: there it only says how many steps agree.

Run it with `python examples/train_moe.py`; it exits with 1 if a comparison fails.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
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

from jax_moe_det import fused_moe_aux_loss

NUM_SHARDS = 4
VOCAB = 256  # bytes
NUM_LAYERS = 2
WIDTH = 48
HIDDEN = 96
NUM_EXPERTS = 8
TOPK = 2
LAYER_WEIGHTS = ("query_key_value", "attention_out", "router", "expert_in", "expert_out")
OPTIMIZER = optax.adam(3e-3)

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


def moe(
    x: jax.Array, router: jax.Array, expert_in: jax.Array, expert_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mixture of experts: every token's output comes from the TOPK experts that it scores highest.

    All experts run on all tokens and a mask selects, which is simple, and fast enough at this size.

    Returns:
      The output `[seq_len, WIDTH]`, and what the auxiliary loss needs: the router scores
      `[seq_len, NUM_EXPERTS]` and the number of tokens of each expert, int32 `[NUM_EXPERTS]`.
    """
    scores = jax.nn.softmax(x @ router)
    _, chosen = jax.lax.top_k(scores, TOPK)
    mask = jax.nn.one_hot(chosen, NUM_EXPERTS, dtype=jnp.int32).sum(axis=1)
    gates = scores * mask
    gates /= gates.sum(axis=-1, keepdims=True)
    # relu is exact. The multiply-adds of a gelu may be fused in one program and not in another, and
    # run 3 is another program than run 1.
    hidden = jax.nn.relu(jnp.einsum("td,edh->eth", x, expert_in))
    outputs = jnp.einsum("eth,ehd->etd", hidden, expert_out)
    return jnp.einsum("etd,te->td", outputs, gates), scores, mask.sum(axis=0)


def forward(weights: Weights, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Predicts each next byte of one sequence, `tokens` of `[seq_len + 1]`.

    Returns:
      The cross-entropy `[seq_len]`, the router scores `[NUM_LAYERS, seq_len, NUM_EXPERTS]` and the
      tokens per expert `[NUM_LAYERS, NUM_EXPERTS]`.
    """
    # A matmul instead of a look-up: the gradient of a look-up is a scatter-add, atomic on a GPU.
    inputs, targets = jax.nn.one_hot(tokens[:-1], VOCAB), jax.nn.one_hot(tokens[1:], VOCAB)
    x = inputs @ weights["embed"] + weights["position"]
    scores, counts = [], []
    for layer in range(NUM_LAYERS):
        w = {name: weights[name][layer] for name in LAYER_WEIGHTS}
        x += attention(normalize(x), w["query_key_value"], w["attention_out"])
        y, layer_scores, layer_counts = moe(
            normalize(x), w["router"], w["expert_in"], w["expert_out"]
        )
        x += y
        scores.append(layer_scores)
        counts.append(layer_counts)
    log_probs = jax.nn.log_softmax(normalize(x) @ weights["unembed"])
    return -jnp.sum(targets * log_probs, axis=-1), jnp.stack(scores), jnp.stack(counts)


# ---- Training.


def loss_terms(scores: jax.Array, counts: jax.Array, coeff: float) -> jax.Array:
    """The auxiliary loss of each layer, `[NUM_LAYERS]`, over the tokens of the whole batch."""
    return jax.vmap(lambda p, f: fused_moe_aux_loss(p, f, TOPK, coeff))(scores, counts)


class Record(NamedTuple):
    """What one step leaves behind."""

    lm_loss: Any  # float32 []
    aux_loss: Any  # float32 [NUM_LAYERS]
    scores: Any  # float32 [NUM_LAYERS, num_tokens, NUM_EXPERTS]
    counts: Any  # int32 [NUM_LAYERS, NUM_EXPERTS]


Step = Callable[[Weights, Any, Any], tuple[Weights, Any, Record]]


@functools.cache  # run 2 takes the compiled step of run 1
def make_step(mesh: Mesh, coeff: float) -> Step:
    """Builds the jitted training step `(weights, state, batch) -> (weights, state, record)`.

    The batch `[batch_size, seq_len + 1]` is sharded over the mesh; weights are on every device.
    """

    def whole(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))

    # One sequence after another, so that the compiler sees the same shapes on any number of
    # devices: with vmap the bits of a matmul may depend on how many sequences a device holds.
    forward_each = jax.shard_map(
        lambda copies, batch: jax.lax.map(lambda x: forward(*x), (copies, batch)),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )

    def loss(copies: Weights, batch: jax.Array) -> tuple[jax.Array, Record]:
        lm_losses, scores, counts = forward_each(copies, batch)
        # The tokens of all sequences, one after another: [NUM_LAYERS, num_tokens, NUM_EXPERTS].
        scores = jnp.moveaxis(scores, 1, 0).reshape(NUM_LAYERS, -1, NUM_EXPERTS)
        counts = counts.sum(axis=0)  # integers: exact in any order, on any number of devices
        aux_loss = loss_terms(scores, counts, coeff)
        lm_loss = whole(lm_losses).mean()
        return lm_loss + aux_loss.sum(), Record(lm_loss, aux_loss, scores, counts)

    @jax.jit
    def step(weights: Weights, state: Any, batch: jax.Array) -> tuple[Weights, Any, Record]:
        # The usual gradient with respect to `weights` would be summed over tokens inside an
        # all-reduce, in an order that depends on the number of devices. So each sequence gets its
        # own copy of the weights, the copies' gradients are gathered, and every device adds them
        # in the order of the batch. It costs one gradient per sequence in memory; a large job would
        # rather share the weights, and keep the promise of the loss alone.
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
    step = make_step(mesh, args.coeff)

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
            lm_loss=f"{record.lm_loss:.3f}", aux_loss=f"{record.aux_loss.sum():.5f}"
        )
    return fingerprint(weights), records


# ---- Comparisons.


def fingerprint(tree: Any) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of all arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Compares bits, not values: `==` takes -0.0 for +0.0, and no NaN for itself."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def count_replayed(records: list[Record], devices: Sequence[Any], coeff: float) -> int:
    """Feeds a run's router scores to one device and, token-sharded, to all of `devices`.

    Returns:
      The number of steps at which both give the loss terms of the run, and both the same gradient.
    """

    @jax.jit
    def terms_and_grad(scores: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        terms, vjp = jax.vjp(lambda p: loss_terms(p, counts, coeff), scores)
        return terms, vjp(jnp.ones_like(terms))[0]

    mesh = Mesh(np.array(devices), ("data",))
    by_token = NamedSharding(mesh, PartitionSpec(None, "data", None))
    replicated = NamedSharding(mesh, PartitionSpec())
    num_equal = 0
    for record in tqdm(records, desc="replay"):
        terms, grad = terms_and_grad(record.scores, record.counts)
        sharded_terms, sharded_grad = terms_and_grad(
            jax.device_put(record.scores, by_token), jax.device_put(record.counts, replicated)
        )
        num_equal += (
            same_bits(np.asarray(terms), record.aux_loss)
            and same_bits(np.asarray(sharded_terms), record.aux_loss)
            and same_bits(np.asarray(sharded_grad), np.asarray(grad))
        )
    return num_equal


def count_equal_terms(a: list[Record], b: list[Record]) -> int:
    """The number of steps at which two runs have the bits of both the aux loss and the LM loss."""
    return sum(
        same_bits(x.aux_loss, y.aux_loss) and same_bits(x.lm_loss, y.lm_loss)
        for x, y in zip(a, b, strict=True)
    )


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
    parser.add_argument("--coeff", type=float, default=1e-2, help="of the auxiliary loss")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
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
    replayed = count_replayed(records, shards, args.coeff)
    third, sharded_records = train(f"{NUM_SHARDS} devices", shards, batches, args)
    trained_alike = count_equal_terms(records, sharded_records)

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
        terms = [format_terms(run[step].aux_loss) for run in (records, sharded_records)]
        print(f"  step {step:<16d} {terms[0]}  {terms[1].rstrip()}")
    print()

    on_cpu = device.platform == "cpu"
    ok = report("weights of run 1 and run 2", first == second)
    ok &= report(
        f"aux loss and gradient from run 1's scores, 1 device and {NUM_SHARDS} CPU devices: "
        f"{replayed} of {args.steps} steps",
        replayed == args.steps,
    )
    agree = report(
        f"aux loss and LM loss of run 1 and run 3: {trained_alike} of {args.steps} steps",
        trained_alike == args.steps,
    )
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if ok and (agree or not on_cpu) else 1


if __name__ == "__main__":
    raise SystemExit(main())
