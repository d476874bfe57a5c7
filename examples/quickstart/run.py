"""The quick start end to end: builds a tiny model and its task, warms it up with SFT, improves it with GRPO and PPO.

    python examples/quickstart/run.py

runs these commands, which you can as well type yourself, and then draws what happened::

    python examples/quickstart/prepare.py --out runs/quickstart
    verl-fit --config examples/quickstart/sft.yaml
    verl-fit --config examples/quickstart/grpo.yaml
    verl-fit --config examples/quickstart/ppo.yaml

It ends with a table of the exact-match accuracy on held-out questions, ``runs/quickstart/curves.png``, and the trained
policies as Hugging Face folders. It exits with 1 if reinforcement learning lifted the accuracy by less than it should.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
# To import Lightning takes longer than to train here: it is imported once, and each command runs in a fork.
CONTEXT = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
if sys.platform != "win32":
    CONTEXT.set_forkserver_preload(["verl_lightning.cli.lightning_cli"])


def train(workdir: Path, *, seed: int, steps: int) -> None:
    """Prepare the task and run the three trainings, each in a process of its own."""
    commands = [["python", HERE / "prepare.py", "--out", "runs/quickstart", "--seed", seed]]
    verl_fit = ["verl-fit", "--seed_everything", seed, "--config"]
    commands.append([*verl_fit, HERE / "sft.yaml"])
    commands += [[*verl_fit, HERE / f"{name}.yaml", "--trainer.max_steps", steps] for name in ("grpo", "ppo")]
    for command in commands:
        words = [str(word) for word in command]
        print(f"\n$ {' '.join(words)}", flush=True)
        if code := call(run_command, workdir, words):
            sys.exit(code)


def run_command(words: list[str]) -> None:
    """A script of Python, or `verl-fit`."""
    if words[0] == "python":
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
    else:
        from verl_lightning.cli import main  # late: this process only has others do things

        main(words[1:])


def show(seed: int) -> None:
    """Say what came of it; exits with 1 if a training lifted the accuracy by less than it should."""
    from report import report

    sys.exit(0 if report(Path("runs/quickstart"), title=f"Exact match on held-out questions, seed {seed}") else 1)


def call(function: Callable[..., None], workdir: Path, *args: object) -> int | None:
    """The exit code of a process that calls a function in a folder."""
    process = CONTEXT.Process(target=_call, args=(function, workdir, args))
    process.start()
    process.join()
    return process.exitcode


def _call(function: Callable[..., None], workdir: Path, args: tuple[object, ...]) -> None:
    os.chdir(workdir)
    function(*args)


def main() -> None:
    """Run the quick start for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="several run in runs/seed_N each")
    parser.add_argument("--steps", type=int, default=80, help="iterations of GRPO and of PPO")
    options = parser.parse_args()
    codes = []
    for seed in options.seeds:
        workdir = Path.cwd() if len(options.seeds) == 1 else Path.cwd() / "runs" / f"seed_{seed}"
        workdir.mkdir(parents=True, exist_ok=True)
        train(workdir, seed=seed, steps=options.steps)
        codes.append(call(show, workdir, seed))
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
