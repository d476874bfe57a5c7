"""Chains of attempts to run: each is killed at a moment and the next one goes on, until one comes to the end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.environments.worlds import Counting
from tests.processes import Process, run_verl_fit, start, start_ranks, wait_until
from tests.resume.engine import make_supervised_rollout
from tests.resume.kill_points import SIGNALS, Kill, Killer
from tests.runs import make_model_config, make_ppo, make_prompts, make_trainer
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.callbacks import HFCheckpoint, HFRollout, SamplesTable
from verl_lightning.environments.config import EpisodesConfig
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules.last_checkpoint import last_checkpoint
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig
from verl_lightning.rewards.pool import RewardConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.strategies import DDPStrategy, FSDPStrategy

REWARDS = Path(__file__).with_name("kill_rewards.py")
NUM_STEPS = 6
TIME = re.compile(rb'"seconds": *[-+.0-9e]+')
STRATEGIES: dict[str, Callable[[], Any]] = {
    "auto": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "fsdp in the background": lambda: FSDPStrategy(async_save=True),
}


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A run that is started again and again."""

    folder: Path
    """Where all happens."""

    attempt: Callable[..., None]
    """What each process does; called with ``arguments`` and a `Kill` or None."""

    arguments: Sequence[Any]
    """What it must know."""

    ranks: Sequence[int] = (1,)
    """How many processes the first attempt has, the second, and so on, over and over."""

    def run(self, name: str, kills: Sequence[Kill] = ()) -> Path:
        """Comes to the end in a folder of this name, by one attempt more than there are kills; gives the run's folder.

        After each attempt, nothing may be left of it but files.
        """
        folder = self.folder / name
        for number, kill in enumerate([*kills, None]):
            with ExitStack() as stack:
                processes = [stack.enter_context(process) for process in self._start(folder, number, kill)]
                if kill is None:
                    for process in processes:
                        process.wait()
                else:
                    victim = processes[kill.rank]
                    assert -victim.join() in SIGNALS, f"{kill} of attempt {number}:\n{victim.output[-5000:]}"
            wait_until(lambda: not at_work_in(folder))
        (run,) = {path.parents[1] for path in folder.glob("runs/*/checkpoints/last.ckpt")}
        return run

    def _start(self, folder: Path, number: int, kill: Kill | None) -> list[Process]:
        outputs = folder.with_name(f"output of {folder.name}") / str(number)
        ranks = self.ranks[number % len(self.ranks)]
        if ranks == 1:
            output = outputs / "rank_0.txt"
            return [start(self.attempt, *self.arguments, kill, folder=folder, output=output)]
        return start_ranks(ranks, self.attempt, *self.arguments, kill, folder=folder, outputs=outputs)


def train(strategy: str, model: Path, prompts: Path, kill: Kill | None) -> None:
    """PPO with all phases; an epoch has three steps. Goes on with what lies in the working directory.

    Under fsdp it plays episodes, whose history the model's template may write anew.
    """
    seed_everything(3, verbose=False)
    actor = make_model_config(model, optim=OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=2))
    module = make_ppo(
        model,
        actor=actor,
        critic=CriticConfig(model=actor),
        advantage=GAE(),
        kl=KLConfig(coef=0.1, target=0.01, horizon=100),
        reward=RewardConfig(function=f"{REWARDS}:even_share", num_workers=1),
    )
    sampling = SamplingConfig(num_samples=2, max_new_tokens=4)
    world = {}
    if strategy == "fsdp":
        sampling = SamplingConfig(num_samples=2, max_new_tokens=24)
        world = {"environment": Counting, "episodes": EpisodesConfig(history="split")}
    trainer = make_trainer(
        Path(),
        make_supervised_rollout(sampling) if strategy == "auto" else HFRollout(sampling, sampling, **world),
        ModelCheckpoint(save_top_k=0, save_last=True, every_n_train_steps=1),
        HFCheckpoint(monitor="val/reward", mode="max", save_top_k=2),
        SamplesTable(train_every_n_steps=1),
        strategy=STRATEGIES[strategy](),
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=NUM_STEPS,
        logger=ResumableCSVLogger("runs", version=0),
        log_every_n_steps=1,
        enable_checkpointing=True,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        profiler=None if kill is None else Killer(kill),
    )
    last = last_checkpoint(trainer)
    data = make_prompts(prompts, prompts, shuffle=True, val_batch_size=12)
    trainer.fit(module, datamodule=data, ckpt_path=last and last.path, weights_only=True)


def command(*words: Any) -> None:
    """`verl-fit` with words, the last of which is a `Kill` or None."""
    *words, kill = words
    run_verl_fit(*words, *(() if kill is None else kill.words()))


def at_work_in(folder: Path) -> list[int]:
    """Processes whose working directory is a folder: those of a run, and all that they have started there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            working = os.readlink(entry / "cwd")
        except OSError:  # it has ended
            continue
        if working == str(folder.resolve()):
            found.append(int(entry.name))
    return found


def files_of(run: Path) -> dict[str, bytes]:
    """What a run's folder holds, leftovers of kills too, but for checkpoints, times, and files in which such stand."""
    timed = {"metrics.csv", "config.yaml", "report.html", "run.json"}
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file() and path.name not in timed}
    return {name: TIME.sub(b"", path.read_bytes()) for name, path in files.items() if ".ckpt" not in name}
