"""The examples run, and find the bits that they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_train_moe_same_bits():
    steps = 3
    size = ["--batch-size", "8", "--seq-len", "32"]
    run = subprocess.run(
        [sys.executable, EXAMPLES / "train_moe.py", "--steps", str(steps), *size],
        # On a GPU machine too: this process may hold the GPU's memory.
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    weights = dict(re.findall(r"(run \d), .* ([0-9a-f]{64})$", run.stdout, re.MULTILINE))
    assert list(weights) == ["run 1", "run 2", "run 3"]
    assert weights["run 1"] == weights["run 2"]
    checks = re.findall(r"^same bits: .*$", run.stdout, re.MULTILINE)
    assert len(checks) == 3
    assert "run 1 and run 2" in checks[0]
    for check in checks[1:]:
        assert check.endswith(f"{steps} of {steps} steps")
