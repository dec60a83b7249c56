"""Several GPUs, or as many CPU devices: the bits of one CPU device, whatever NCCL does.

The work is done in processes of their own, because NCCL reads its environment once, and because one
process for each device is one of the ways. Each compares what its devices hold with what one CPU
device gave here. Below two GPUs the GPU variants skip; the CPU variants run the same code.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import pathlib
import pickle
import socket

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_route_sharding import GLOBAL, STEPS, operands, routing, step, token_specs

from jax_moe_det import fused_moe_aux_loss
from jax_moe_det.testing import assert_same_bits

# NVLink multicast stays off: NVLS.
NCCL = {
    "default": {},
    "ring_simple": {"NCCL_ALGO": "ring", "NCCL_PROTO": "Simple"},
    "ring_ll": {"NCCL_ALGO": "ring", "NCCL_PROTO": "LL"},
    # Only the all-reduce has a tree: for the all-gather NCCL would find no algorithm, and fail.
    "tree_simple": {"NCCL_ALGO": "ring;allreduce:tree", "NCCL_PROTO": "Simple"},
    "tree_ll": {"NCCL_ALGO": "ring;allreduce:tree", "NCCL_PROTO": "LL"},
}
SETTINGS = [pytest.param("cpu", {}, id="cpu")] + [
    pytest.param("cuda", variables, id=f"gpu-{name}", marks=pytest.mark.multi_gpu)
    for name, variables in NCCL.items()
]
NUM_CPU_DEVICES = 4
STEP_NAMES = ("plain", "masked")
TRAINING_STEPS = 2
SEQ_LEN = 16
COEFFS = (0.01, 0.001)  # of aux loss and z-loss


# ---- What is computed, in a worker and here.


def example():
    """The module of the example."""
    spec = importlib.util.spec_from_file_location(
        "train_moe", pathlib.Path(__file__).parents[1] / "examples" / "train_moe.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss_step(given, **options):
    """The auxiliary loss and its gradient."""

    def loss(probs):
        return fused_moe_aux_loss(
            probs, given["counts"], 4, 0.01, valid_mask=given["valid_mask"], **options
        )

    return jax.value_and_grad(loss)(given["probs"])


def mapped_step(mesh, specs, name):
    """`step` with the routing inside shard_map."""
    local = functools.partial(routing, axis_name="a", **STEPS[name][1])
    return functools.partial(
        step, run=jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=GLOBAL)
    )


def mapped_loss(mesh, specs):
    """`loss_step` inside shard_map."""
    return jax.shard_map(
        functools.partial(loss_step, axis_name="a"),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(P(), P("a")),
    )


def make_cases(num_shards):
    """For each name operands and what one CPU device gives: sizes of whole slots, and not.

    Both sizes are multiples of num_shards. 2 * (at most 255) tokens are slots of two; 257 times
    num_shards are slots of num_shards + 1, which divides no shard.
    """
    out = {}
    for num_tokens in (2 * num_shards * (255 // num_shards), 257 * num_shards):
        mask = cases.random_mask(3, num_tokens)
        given = {
            "probs": cases.random_scores(1, num_tokens, 16),
            "counts": cases.random_counts(2, 16),
            "valid_mask": mask,
        }
        out["loss", num_tokens] = given, jax.jit(loss_step)(given)
        for name in STEP_NAMES:
            names, options = STEPS[name]
            given = operands(num_tokens, *names)
            out[name, num_tokens] = given, jax.jit(functools.partial(step, **options))(given)
    return jax.tree.map(np.asarray, out)


# ---- In a worker.


def place(mesh, x, spec):
    """A global array, in one process or many."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__)


def assert_shards_are_of(got, want):
    """What the devices of this process hold has the bits of one device's result."""
    for x, one in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert x.addressable_shards
        for shard in x.addressable_shards:
            assert_same_bits(np.asarray(shard.data), np.asarray(one)[shard.index])


def check_ops(mesh, all_cases):
    """Loss and route on a mesh, in every way; yields the name of each comparison that held."""
    for (name, num_tokens), (given, want) in all_cases.items():
        sharded = ("probs", *token_specs())
        specs = {n: P("a") if n in sharded else P() for n in given}
        placed = {n: place(mesh, x, specs[n]) for n, x in given.items()}
        if name == "loss":
            ways = {"jit": loss_step, "shard_map": mapped_loss(mesh, specs)}
        else:
            automatic = functools.partial(step, **STEPS[name][1])
            ways = {"jit": automatic, "shard_map": mapped_step(mesh, specs, name)}
        for way, run in ways.items():
            assert_shards_are_of(jax.jit(run)(placed), want)
            yield f"{name} {num_tokens} {way}"


def train(train_moe, devices, batch_size):
    """The example's training steps: weights, and the record of each step."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    train_step = train_moe.make_step(mesh, train_moe.Coeffs(*COEFFS))
    weights = train_moe.init_weights(0, SEQ_LEN)
    state = train_moe.OPTIMIZER.init(weights)
    weights, state = jax.tree.map(lambda x: place(mesh, x, P()), (weights, state))
    text = np.random.default_rng(0).integers(97, 123, (TRAINING_STEPS, batch_size, SEQ_LEN + 1))
    records = []
    for batch in text.astype(np.int32):
        weights, state, record = train_step(weights, state, place(mesh, batch, P("data")))
        records.append(record)
    return weights, records


def worker(folder, sizes, num_processes="1", process_id="0", address=""):
    """Compares on meshes of so many devices; prints the comparisons that held."""
    folder, sizes = pathlib.Path(folder), json.loads(sizes)
    num_processes, process_id = int(num_processes), int(process_id)
    if num_processes > 1:
        if jax.config.jax_platforms == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        one = {} if jax.config.jax_platforms == "cpu" else {"local_device_ids": [process_id]}
        jax.distributed.initialize(
            address, num_processes=num_processes, process_id=process_id, **one
        )
        assert len(jax.local_devices()) == 1
    all_cases, num_shards = pickle.loads((folder / "cases.pickle").read_bytes())
    # The example wants two sequences on each device.
    run_training = functools.partial(train, example(), batch_size=2 * num_shards)
    one_device = jax.tree.map(np.asarray, run_training(jax.local_devices()[:1]))
    held = []
    for size in sizes:
        devices = jax.devices()[:size]
        mesh = jax.make_mesh((size,), ("a",), (AxisType.Auto,), devices=devices)
        held += [f"{size} {name}" for name in check_ops(mesh, all_cases)]
        assert_shards_are_of(run_training(devices), one_device)
        held.append(f"{size} training")
    # XLA's matmuls on a GPU have other bits than on a CPU; the routing of their results has not.
    records = [(record.logits, record.routing) for record in one_device[1]]
    (folder / f"records{process_id}.pickle").write_bytes(pickle.dumps(records))
    print(json.dumps(held))


PROGRAM = """
    import sys
    from test_multi_gpu import worker

    worker(*sys.argv[1:])
"""


# ---- Here.


def num_devices(platform):
    """How many devices the workers may use; skips where these are fewer than two."""
    if platform == "cpu":
        return NUM_CPU_DEVICES
    try:
        count = len(jax.devices("cuda"))
    except RuntimeError:
        count = 0
    if count < 2:
        pytest.skip(f"needs 2 CUDA devices, has {count}")
    return count


def mesh_sizes(count):
    """1, 2, 4, ... and all."""
    return sorted({2**i for i in range(count.bit_length())} | {count})


def environment(platform, variables, devices_per_process):
    flags = {
        "cpu": f"--xla_force_host_platform_device_count={devices_per_process}",
        # For the training alone: XLA's own kernels, none chosen by a timing.
        "cuda": "--xla_gpu_deterministic_ops=true",
    }
    out = {"JAX_PLATFORMS": platform, "XLA_FLAGS": flags[platform], "NCCL_NVLS_ENABLE": "0"}
    return {**out, **variables}


@pytest.fixture
def prepared(tmp_path):
    """Writes the workers' cases; returns the names of the comparisons on one mesh."""

    def prepare(num_shards):
        with jax.default_device(jax.devices("cpu")[0]):
            all_cases = make_cases(num_shards)
        (tmp_path / "cases.pickle").write_bytes(pickle.dumps((all_cases, num_shards)))
        names = [f"{name} {n} {way}" for name, n in all_cases for way in ("jit", "shard_map")]
        return [*names, "training"]

    return prepare


def assert_routed_as_on_cpu(path):
    """The routing that a worker's training recorded is that of one CPU device."""
    records = pickle.loads(path.read_bytes())
    assert len(records) == TRAINING_STEPS
    train_moe = example()
    one = functools.partial(train_moe.route_tokens, coeffs=train_moe.Coeffs(*COEFFS))
    for logits, recorded in records:
        with jax.default_device(jax.devices("cpu")[0]):
            assert_same_bits(jax.jit(jax.vmap(one))(jnp.asarray(logits)), recorded)


@pytest.mark.parametrize(("platform", "variables"), SETTINGS)
def test_multi_gpu_same_bits_in_one_process(platform, variables, run_python, prepared, tmp_path):
    """Meshes of 1, 2, 4, ... devices: loss, route and a training, under jit and shard_map."""
    sizes = mesh_sizes(num_devices(platform))
    names = prepared(math.lcm(*sizes))
    env = environment(platform, variables, sizes[-1])
    out = run_python(PROGRAM, str(tmp_path), json.dumps(sizes), env=env)
    held = json.loads(out.splitlines()[-1])
    assert held == [f"{size} {name}" for size in sizes for name in names]
    assert_routed_as_on_cpu(tmp_path / "records0.pickle")


@pytest.mark.parametrize(("platform", "variables"), SETTINGS)
def test_multi_gpu_same_bits_in_many_processes(platform, variables, run_python, prepared, tmp_path):
    """One process for each device, by jax.distributed."""
    sizes = mesh_sizes(num_devices(platform))
    names = prepared(math.lcm(*sizes))
    env = environment(platform, variables, 1)
    # Two are enough of processes that share a few cores.
    for size in sizes[1:] if platform == "cuda" else [2]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        waits = [
            run_python.start(
                PROGRAM, str(tmp_path), json.dumps([size]), str(size), str(i), address, env=env
            )
            for i in range(size)
        ]
        for i, wait in enumerate(waits):
            assert json.loads(wait().splitlines()[-1]) == [f"{size} {name}" for name in names]
            assert_routed_as_on_cpu(tmp_path / f"records{i}.pickle")


@pytest.mark.gpu
def test_multi_gpu_worker_on_one_gpu(run_python, prepared, tmp_path):
    """The same on a mesh of one GPU: what it computes has the bits of the CPU."""
    names = prepared(2)
    env = environment("cuda", {}, 1)
    out = run_python(PROGRAM, str(tmp_path), json.dumps([1]), env=env)
    assert json.loads(out.splitlines()[-1]) == [f"1 {name}" for name in names]
    assert_routed_as_on_cpu(tmp_path / "records0.pickle")
