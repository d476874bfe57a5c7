"""Commands of `verl-fit` that differ in their strategy alone, and what their trainings do."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from tests.examples.shipped import CHATS, PROMPTS, TINY, RecordedCLI
from tests.strategies.conformance import Bench
from verl_lightning.cli import normalize_arguments

TASKS = ("sft", "grpo")
STEPS = 4
"""Of a whole run; a checkpoint is saved at each second one."""

CALLBACKS = """
trainer:
  callbacks:
    - class_path: ModelCheckpoint
      init_args: {dirpath: DIR, filename: "{step}", every_n_train_steps: 2, save_top_k: -1}
    - class_path: HFCheckpoint
      init_args: {dirpath: DIR/hf}
"""


class Weights(Callback):
    """The policy's, when training starts and ends."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.taken.append({name: w.clone() for name, w in pl_module.contract.named_weights(pl_module.policy)})

    on_train_end = on_train_start


class WatchedCLI(RecordedCLI):
    """Keeps the weights too."""

    weights: Weights

    @override
    def before_fit(self) -> None:
        super().before_fit()
        self.weights = Weights()
        self.trainer.callbacks.append(self.weights)


def command(folder: Path, task: str, strategy: str, *more: Any) -> list[str]:
    """What follows `verl-fit`: a shipped file, the tiny model's settings, and a strategy."""
    own = folder / f"{strategy}-{task}.yaml"
    draft = own.with_suffix(f".{os.getpid()}")  # every rank writes the same, and none may read half of it
    draft.write_text(CALLBACKS.replace("DIR", str(folder / f"{strategy} {task}")))
    draft.replace(own)
    words = ["--config", task, "--config", str(own), *TINY.split(), *(CHATS if task == "sft" else PROMPTS).split()]
    words += ["--trainer.fast_dev_run", "false", "--trainer.max_steps", str(STEPS), "--trainer.devices", "2"]
    words += ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--model.actor.optim.lr", "1e-3"]
    return [*words, "--strategy", strategy, *map(str, more)]


def fit(folder: Path, words: list[str]) -> dict[str, Any]:
    """What a command's training measured, its first and last weights, and what it warned of."""
    with contextlib.chdir(folder), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cli = WatchedCLI(normalize_arguments(words))
    start, end = cli.weights.taken
    return {"steps": cli.recorder.steps, "start": start, "end": end, "told": [str(w.message) for w in told]}


def run_fsdp(folder: Path) -> dict[str, Any]:
    """A whole run of each task under `fsdp`, on each of its ranks."""
    return {task: fit(folder, command(folder, task, "fsdp")) for task in TASKS}


def switched(bench: Bench) -> dict[str, Any]:
    """The second half of each run under `megatron`, and a step from the folder that the run left."""
    runs = {}
    for task in TASKS:
        saved = bench.folder / f"fsdp {task}"
        resumed = fit(bench.folder, command(bench.folder, task, "megatron", "--ckpt_path", saved / "step=2.ckpt"))
        more = ("--model.actor.path", saved / "hf" / "last", "--trainer.max_steps", 1)
        runs[task] = {"resumed": resumed, "started": fit(bench.folder, command(bench.folder, task, "megatron", *more))}
    return runs
