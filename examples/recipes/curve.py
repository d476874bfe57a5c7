"""Draws a run's reward, and tells its numbers at a few steps: ``python examples/recipes/curve.py RUN --out FILE``."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib
from matplotlib import pyplot

STEPS = (1, 10, 50, 100)
TRAINED = ("critic/score/mean", "train/loss")
HELD_OUT = ("val/reward", "val/loss")


def read(file: Path, names: tuple[str, ...]) -> tuple[str, dict[int, float]]:
    """The first of some metrics that a run has, and its value by step."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    for name in names:
        if found := {int(row["step"]) + 1: float(row[name]) for row in rows if row.get(name)}:
            return name, found
    return names[0], {}


def main() -> None:
    """Draws, and prints a table."""
    parser = argparse.ArgumentParser(description="Draw a run's curve, and print its numbers at a few steps.")
    parser.add_argument("run", type=Path, help="folder of the run, such as runs/first")
    parser.add_argument("--out", type=Path, default=Path("curve.png"), help="PNG to write")
    arguments = parser.parse_args()
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for names in (TRAINED, HELD_OUT):
        name, values = read(arguments.run / "metrics.csv", names)
        axes.plot(list(values), list(values.values()), label=name)
        shown = {step: values[step] for step in (*STEPS, max(values, default=0)) if step in values}
        print(name, *(f"step {step}: {value:.3f}" for step, value in shown.items()), sep="  ")
    axes.set_xlabel("step")
    axes.legend()
    figure.savefig(arguments.out, dpi=80)


if __name__ == "__main__":
    main()
