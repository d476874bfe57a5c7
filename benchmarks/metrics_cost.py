"""What the metrics of every run cost the host, and what `ProfilerCallback` costs in steps that it does not record.

From the root of the repository::

    python benchmarks/metrics_cost.py --out results.json

Trains PPO and SFT on a CPU with every step logged, times each call into the code that measures and logs, and prints it
beside the step, once without `ProfilerCallback` and once with one that records the last step only. Calls are timed one
by one, for two runs differ by more than what is to be measured. ``--step-seconds`` are the steps of a large model
elsewhere that the costs are compared with: the host's work does not grow with the model.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runs import make_chats, make_ppo, make_prompts, make_rollout, make_sft
from tests.tiny import quickstart, tiny_tokenizer, write_chat_file, write_prompt_file
from verl_lightning.callbacks import ProfilerCallback
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.modules import PPOModule, base, offline
from verl_lightning.modules.ppo_config import UpdateConfig
from verl_lightning.telemetry import batch_phases
from verl_lightning.telemetry.batch_phases import BatchPhases

WARM_UP = 2
"""First steps, which are not counted."""


class Meter:
    """Adds up the seconds of the calls that it wraps; a call within another one counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what is done within."""
        self._depth += 1
        start = time.perf_counter()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - start

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with self.running():
                return function(*arguments, **options)

        return call

    def borders(self, phase: Callable[..., Any]) -> Callable[..., Any]:
        """The context manager, of which entering and leaving count."""

        @contextmanager
        def enter(*arguments: Any) -> Iterator[None]:
            with self.running():
                manager = phase(*arguments)
                manager.__enter__()
            try:
                yield
            finally:
                with self.running():
                    manager.__exit__(None, None, None)

        return enter


def hooks(owner: type) -> list[str]:
    """The hooks that a callback has of its own."""
    return [name for name in vars(owner) if name.startswith("on_")]


@contextmanager
def metered(metrics: Meter, profiler: Meter) -> Iterator[None]:
    """Counts the code that measures and logs in one meter, the profiler's hooks in another."""
    with ExitStack() as stack:
        for name in hooks(BatchPhases):
            stack.enter_context(patch.object(BatchPhases, name, metrics.timed(getattr(BatchPhases, name))))
        for module in (offline, batch_phases):
            stack.enter_context(patch.object(module, "log_step", metrics.timed(module.log_step)))
        finish = metrics.timed(PPOModule._finish_iteration)
        stack.enter_context(patch.object(PPOModule, "_finish_iteration", finish))
        phase = metrics.borders(base.PostTrainingModule.phase)
        stack.enter_context(patch.object(base.PostTrainingModule, "phase", phase))
        for name in hooks(ProfilerCallback):
            stack.enter_context(patch.object(ProfilerCallback, name, profiler.timed(getattr(ProfilerCallback, name))))
        yield


class StepCosts(Callback):
    """Reads the meters and the clock as each step begins."""

    def __init__(self, *meters: Meter) -> None:
        self.meters = meters
        self.moments: list[tuple[float, ...]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self.moments.append((time.perf_counter(), *(meter.seconds for meter in self.meters)))

    def medians(self) -> list[float]:
        """Seconds of a step and of each meter in it."""
        counted = self.moments[WARM_UP:]
        steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(counted, counted[1:], strict=False)]
        return [statistics.median(column) for column in zip(*steps, strict=True)]


def train(task: str, folder: Path, arguments: argparse.Namespace, *, profiled: bool) -> dict[str, float]:
    """A run's median step and costs, in seconds."""
    seed_everything(1)
    metrics, profiler = Meter(), Meter()
    costs = StepCosts(metrics, profiler)
    num_steps = WARM_UP + arguments.steps + 2
    callbacks: list[Callback] = [costs]
    if profiled:
        callbacks.append(ProfilerCallback(steps=[num_steps], folder=str(folder / f"profile_{task}")))
    if task == "ppo":
        module: Any = make_ppo(folder / "model", update=UpdateConfig(mini_batch_size=4, micro_batch_size=16))
        data: Any = make_prompts(write_prompt_file(folder / "prompts.jsonl", num_rows=256))
        callbacks.append(make_rollout(num_samples=8, max_new_tokens=arguments.tokens))
    else:
        module = make_sft(folder / "model")
        data = make_chats(write_chat_file(folder / "chats.jsonl", num_rows=256), batch_size=arguments.batch_size)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=num_steps,
        callbacks=callbacks,
        logger=ResumableCSVLogger(folder / f"{task}_{profiled}"),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with metered(metrics, profiler):
        trainer.fit(module, datamodule=data)
    return dict(zip(("step", "metrics", "profiler"), costs.medians(), strict=True))


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each task."""
    tiny_tokenizer().save_pretrained(folder / "model")
    model = quickstart.build_model(
        tiny_tokenizer(), hidden_size=arguments.hidden_size, num_layers=arguments.layers, num_heads=4
    )
    model.save_pretrained(folder / "model")
    rows: list[dict[str, Any]] = []
    for task, elsewhere in zip(("sft", "ppo"), arguments.step_seconds, strict=True):
        plain = train(task, folder, arguments, profiled=False)
        profiled = train(task, folder, arguments, profiled=True)
        costs = {"metrics": plain["metrics"], "profiler_outside_its_steps": profiled["profiler"]}
        rows.append({"task": task, "step_ms": round(1000 * plain["step"], 2)})
        for name, seconds in costs.items():
            rows[-1][f"{name}_ms"] = round(1000 * seconds, 3)
            rows[-1][f"{name}_share"] = f"{seconds / plain['step']:.2%}"
            rows[-1][f"{name}_share_of_{elsewhere:g}_s"] = f"{seconds / elsewhere:.3%}"
    return rows


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="counted steps of each run")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="conversations in a step of SFT")
    parser.add_argument("--tokens", type=int, default=32, help="of a response, at most")
    parser.add_argument(
        "--step-seconds",
        type=float,
        nargs=2,
        default=(0.283, 8.0),
        help="a step of SFT and of PPO to compare with: those of benchmarks/results/2026-11-28-fsdp-h100.md",
    )
    parser.add_argument("--out", type=Path, help="for the numbers, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, Path(folder))
    versions = {package.__name__: package.__version__ for package in (torch, lightning)}
    cpu = platform.processor() or platform.machine()
    result = {"rows": rows, "cpu": cpu, "versions": versions, "command": shlex.join(sys.argv)}
    text = json.dumps(result, indent=2)
    sys.stdout.write(f"{text}\n")
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
