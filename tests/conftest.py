"""Devices for the tests: eight on the CPU, and what to do with `gpu` tests where there is none."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import pytest

NUM_CPU_DEVICES = 8
# JAX reads both when it starts its backends, which no import does.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_CPU_DEVICES}"
)
# Tests start processes that use the same GPU: none may take all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

TESTS = pathlib.Path(__file__).parent


def has_gpu() -> bool:
    """Is a CUDA device present?"""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def pytest_collection_modifyitems(config, items):
    del config
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or has_gpu() or os.environ.get("JAX_MOE_DET_REQUIRE_GPU") == "1":
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.fail("needs a CUDA device, and JAX_MOE_DET_REQUIRE_GPU=1 demands one")


@pytest.fixture
def cpu_devices():
    """Eight CPU devices, whatever the default backend is."""
    return jax.devices("cpu")[:NUM_CPU_DEVICES]


class PythonRunner:
    """Runs programs in fresh Python processes that can import the tests' modules."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def start(self, program: str, *arguments: str, env: dict[str, str] | None = None):
        """Starts a program; returns a function that waits for it and returns what it printed."""
        path = self._folder / f"program{len(list(self._folder.iterdir()))}.py"
        path.write_text(textwrap.dedent(program))
        # An empty entry would be this folder, whose package has no compiled modules.
        search = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-W", "error", str(path), *arguments],
            env={**os.environ, "PYTHONPATH": search, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

        def finish() -> str:
            try:
                out, error = process.communicate(timeout=300)
            finally:
                process.kill()  # this process alone; nothing if it has ended
            assert process.returncode == 0, error[-4000:]
            return out.strip()

        return finish

    def __call__(self, program: str, *arguments: str, env: dict[str, str] | None = None) -> str:
        """Runs a program and returns what it printed."""
        return self.start(program, *arguments, env=env)()


@pytest.fixture
def run_python(tmp_path):
    return PythonRunner(tmp_path)
