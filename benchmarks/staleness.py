"""What a policy learns from responses of a bounded age: the quick start's GRPO for several bounds, at equal prompts.

From the root of the repository::

    python benchmarks/staleness.py --bounds 0 1 2 4 --steps 60 --out staleness.json

Prepares the task and warms the model up once, in ``runs/quickstart``, then trains from there for each bound and seed.
Weights change with ``in_flight: finish``, so that all tokens are as old as the bound allows: the worst case. Prints the
accuracy on held-out questions beside the steps.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/quickstart"))

import run as quickstart

HERE = Path(quickstart.__file__).parent


def prepare(workdir: Path) -> None:
    """Make the task, and a model that knows its form."""
    for command in (
        ["python", HERE / "prepare.py", "--out", "runs/quickstart"],
        ["verl-fit", "--config", HERE / "sft.yaml"],
    ):
        run(workdir, *command)


def train(workdir: Path, bound: int, seed: int, steps: int) -> list[tuple[int, float]]:
    """GRPO with a bound on age; gives the accuracy after some steps."""
    name = f"staleness {bound} seed {seed}"
    words: list[object] = ["verl-fit", "--seed_everything", seed, "--config", HERE / "grpo.yaml"]
    words += ["--trainer.max_steps", steps, "--trainer.logger.init_args.name", name]
    words += ["--rollout.max_staleness", bound]
    if bound:
        words += ["--model.corrections", '["TruncatedImportanceSampling"]']
    run(workdir, *words)
    metrics = max((workdir / "runs/quickstart" / name).glob("*/metrics.csv"))
    with metrics.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/reward")]
    return [(int(row["step"]) + 1, float(row["val/reward"])) for row in rows]


def run(workdir: Path, *words: object) -> None:
    """A command in a process of its own."""
    texts = [str(word) for word in words]
    sys.stdout.write(f"$ {shlex.join(texts)}\n")
    sys.stdout.flush()
    if code := quickstart.call(quickstart.run_command, workdir, texts):
        sys.exit(code)


def table(curves: dict[int, list[list[tuple[int, float]]]]) -> str:
    """A row for each bound: the accuracy after some steps, as a mean over the seeds."""
    steps = [step for step, _ in next(iter(curves.values()))[0]]
    lines = ["| `max_staleness` |" + "".join(f" step {step} |" for step in steps), "|---|" + "---|" * len(steps)]
    for bound, seeds in curves.items():
        means = [sum(curve[number][1] for curve in seeds) / len(seeds) for number in range(len(steps))]
        lines.append(f"| {bound} |" + "".join(f" {mean:.3f} |" for mean in means))
    return "\n".join(lines)


def main() -> None:
    """Train with each bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare(Path.cwd())
    curves = {
        bound: [train(Path.cwd(), bound, seed, options.steps) for seed in options.seeds] for bound in options.bounds
    }
    sys.stdout.write(table(curves) + "\n")
    if options.out:
        options.out.write_text(json.dumps({"command": shlex.join(sys.argv), "curves": curves}, indent=1))


if __name__ == "__main__":
    main()
