"""Draws `benchmarks/results/*.json`: microseconds of this package and of plain JAX."""

from __future__ import annotations

import argparse
import json
import pathlib

import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
TITLES = {"aux_loss": "auxiliary loss", "topk_router": "top-k router", "route": "route"}
PASSES = {
    "aux_loss": ("forward", "value_and_grad"),
    "topk_router": ("forward", "vjp"),
    "route": ("forward", "value_and_grad"),
}
SERIES = {
    "ours": "jax_moe_det",
    "xla": "plain JAX",
    "argmax": "plain JAX, rounds of argmax",
    "top_k": "plain JAX, lax.top_k",
    "atomic": "atomic kernel",
}


def draw_panel(panel: plt.Axes, rows: list[dict], name: str) -> None:
    """A group of bars for each row that has this pass."""
    rows = [row for row in rows if f"{name}_ours_us" in row]
    if not rows:
        return
    present = [s for s in SERIES if any(f"{name}_{s}_us" in row for row in rows)]
    width = 0.8 / len(present)
    for k, series in enumerate(present):
        at = [x + (k - (len(present) - 1) / 2) * width for x in range(len(rows))]
        times = [row.get(f"{name}_{series}_us", 0) for row in rows]
        panel.bar(at, times, width, label=SERIES[series])
    if "read_only_us" in rows[0] and name == "forward":
        floor = [row["read_only_us"] for row in rows]
        panel.plot(range(len(rows)), floor, "k_", markersize=24, label="read only")
    labels = [row["shape"].rsplit("-", 1)[-1] for row in rows]
    panel.set_xticks(range(len(rows)), labels, rotation=30)
    panel.set_ylabel("microseconds")
    panel.legend()


def draw(record: dict, output: pathlib.Path) -> None:
    """One panel for each kind, pass and dtype, a group of bars for each shape."""
    op = next(op for op in TITLES if op in record)
    rows = record[op]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    kinds = list(dict.fromkeys(row.get("kind", "") for row in rows))
    lines = [(kind, name) for kind in kinds for name in PASSES[op]]
    figure, axes = plt.subplots(
        len(lines), len(dtypes), figsize=(7 * len(dtypes), 3.5 * len(lines)), squeeze=False
    )
    for i, (kind, name) in enumerate(lines):
        for j, dtype in enumerate(dtypes):
            panel = axes[i][j]
            chosen = [r for r in rows if (r["dtype"], r.get("kind", "")) == (dtype, kind)]
            panel.set_title(", ".join(word for word in (kind, name, dtype) if word))
            draw_panel(panel, chosen, name)
    figure.suptitle(f"{TITLES[op]}, {record['device']}, jax {record['jax']}")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(output, dpi=120)
    plt.close(figure)


def draw_scaling(record: dict, output: pathlib.Path) -> None:
    """Of `scaling.py`: a panel for each step, a line over the devices for each shape and dtype."""
    rows = record["scaling"]
    steps = list(dict.fromkeys(row["step"] for row in rows))
    figure, axes = plt.subplots(1, len(steps), figsize=(4.5 * len(steps), 4), squeeze=False)
    for panel, step in zip(axes[0], steps, strict=True):
        lines: dict[str, list[dict]] = {}
        for row in rows:
            if row["step"] == step:
                lines.setdefault(f"{row['shape'].rsplit('-', 1)[-1]} {row['dtype']}", []).append(
                    row
                )
        for label, line in lines.items():
            panel.plot([r["devices"] for r in line], [r["us"] for r in line], "o-", label=label)
        collective = [row for row in rows if row["step"] == step and row["all_gather_us"]]
        at = [row["devices"] for row in collective]
        panel.plot(at, [row["all_gather_us"] for row in collective], "kx", label="all-gather alone")
        panel.set_title(step)
        panel.set_xlabel("devices")
        panel.set_ylabel("microseconds")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.legend()
    figure.suptitle(f"tokens sharded, {record['device']}, jax {record['jax']}")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(output, dpi=120)
    plt.close(figure)


def main() -> None:
    """Draws one figure beside each result named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="default: all")
    args = parser.parse_args()
    everything = (
        p for op in [*TITLES, "scaling"] for p in sorted((HERE / "results").glob(f"{op}_*.json"))
    )
    for path in args.results or everything:
        record = json.loads(path.read_text())
        (draw_scaling if "scaling" in record else draw)(record, path.with_suffix(".png"))
        print(f"written: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
