"""Draws `benchmarks/results/*.json` of the loss: microseconds of this package and of plain JAX."""

from __future__ import annotations

import argparse
import json
import pathlib

import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
SERIES = {"ours": "jax_moe_det", "xla": "plain JAX", "atomic": "atomic kernel"}


def draw(record: dict, output: pathlib.Path) -> None:
    """One panel for each pass and dtype, a group of bars for each shape."""
    rows = record["aux_loss"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    passes = ["forward", "value_and_grad"]
    figure, axes = plt.subplots(
        len(passes), len(dtypes), figsize=(7 * len(dtypes), 7), squeeze=False
    )
    for i, name in enumerate(passes):
        for j, dtype in enumerate(dtypes):
            panel = axes[i][j]
            chosen = [row for row in rows if row["dtype"] == dtype]
            present = [s for s in SERIES if f"{name}_{s}_us" in chosen[0]]
            width = 0.8 / len(present)
            for k, series in enumerate(present):
                at = [x + (k - (len(present) - 1) / 2) * width for x in range(len(chosen))]
                times = [row[f"{name}_{series}_us"] for row in chosen]
                panel.bar(at, times, width, label=SERIES[series])
            if "read_only_us" in chosen[0] and name == "forward":
                floor = [row["read_only_us"] for row in chosen]
                panel.plot(range(len(chosen)), floor, "k_", markersize=24, label="read only")
            labels = [row["shape"].rsplit("-", 1)[-1] for row in chosen]
            panel.set_xticks(range(len(chosen)), labels, rotation=30)
            panel.set_title(f"{name}, {dtype}")
            panel.set_ylabel("microseconds")
            panel.legend()
    figure.suptitle(f"auxiliary loss, {record['device']}, jax {record['jax']}")
    figure.tight_layout()
    figure.savefig(output, dpi=120)


def main() -> None:
    """Draws one figure beside each result named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="default: all")
    args = parser.parse_args()
    for path in args.results or sorted((HERE / "results").glob("aux_loss_*.json")):
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
        print(f"written: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
