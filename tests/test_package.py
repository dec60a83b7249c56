"""The package as a whole: what its import does and does not do."""

from __future__ import annotations

import importlib.metadata
import pathlib

import jax
import numpy as np
import pytest

import jax_moe_det
from jax_moe_det import _ffi


def test_d29_import_starts_no_backend_and_loads_no_cuda_library(run_python):
    """A backend that does not exist would raise as soon as one is started."""
    program = """
        import pathlib
        import re
        import jax

        def cuda_libraries():
            lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
            found = {line.split()[-1] for line in lines if ".so" in line}
            return {path for path in found if re.search("libcuda|libnccl|libcublas", path)}

        before = cuda_libraries()
        import jax_moe_det
        import jax_moe_det.testing
        import jax_moe_det.reference

        assert cuda_libraries() <= before, cuda_libraries() - before
        try:
            jax.devices()
        except RuntimeError as error:
            assert "no_such_backend" in str(error)
            print("nothing was started")
    """
    env = {"JAX_PLATFORMS": "no_such_backend"}
    assert run_python(program, env=env) == "nothing was started"


def test_import_leaves_the_configuration_alone(run_python):
    program = """
        import jax
        before = dict(jax.config.values)
        import jax_moe_det
        changed = {k for k, v in jax.config.values.items() if before.get(k) != v}
        assert not changed, changed
        print("same")
    """
    assert run_python(program) == "same"


def test_reference_needs_no_jax(run_python):
    """The definition of the bits can be read, and run, without the package's compiled parts."""
    program = """
        import importlib.util
        import pathlib
        import sys
        import numpy as np

        path = pathlib.Path(sys.argv[1])
        spec = importlib.util.spec_from_file_location("reference", path)
        reference = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(reference)
        assert "jax" not in sys.modules
        print(reference.aux_loss(np.full((8, 4), 0.25, np.float32), np.full(4, 2), 1, 0.5))
    """
    path = pathlib.Path(jax_moe_det.__file__).parent / "reference.py"
    assert run_python(program, str(path)) == "0.5"


def test_public_names():
    for name in jax_moe_det.__all__:
        assert getattr(jax_moe_det, name) is not None
    assert {"aux_loss_workspace", "fused_moe_aux_loss", "testing"} <= set(jax_moe_det.__all__)
    assert jax_moe_det.__version__ == importlib.metadata.version("jax-moe-det")


def test_every_backend_has_every_target():
    """A target that one platform lacks would fail at run time on that platform alone."""
    assert "cpu" in _ffi.built_backends()
    targets = {name: set(m.targets()) for name, m in _ffi._MODULES.items() if m is not None}
    assert targets["cpu"]
    assert all(names == targets["cpu"] for names in targets.values())
    assert all(name.startswith("jax_moe_det.") for name in targets["cpu"])


@pytest.mark.gpu
def test_gpu_backend_is_built():
    assert "cuda" in _ffi.built_backends()
    out = jax_moe_det.fused_moe_aux_loss(np.ones((4, 4), np.float32), np.ones(4, np.int32), 1, 1.0)
    assert out.devices() <= set(jax.devices("cuda"))
