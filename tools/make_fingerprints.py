"""Writes `jax_moe_det/fingerprints.json` from the NumPy reference, never from a kernel."""

import json
import pathlib

from jax_moe_det.__main__ import CASES

PATH = pathlib.Path(__file__).parent.parent / "jax_moe_det" / "fingerprints.json"

if __name__ == "__main__":
    table = {name: case.reference_fingerprint() for name, case in CASES.items()}
    PATH.write_text(json.dumps(table, indent=1) + "\n")
    print(f"written: {PATH}")
