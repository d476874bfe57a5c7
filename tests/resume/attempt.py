"""One attempt to bring a `verl-fit` run to its end, in a process of its own that starts fast."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import yaml

from tests.runs import REWARDS

NUM_STEPS = 30
CONTEXT = multiprocessing.get_context("forkserver")  # imports once, then forks: a start takes no ten seconds
CONTEXT.set_forkserver_preload(["verl_lightning.lightning_cli"])


def write_settings(path: Path, *, model: Path, prompts: Path) -> None:
    """PPO with a critic and an adaptive KL weight; 16 steps are an epoch."""
    optim = {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 3}
    actor = {"path": str(model), "optim": optim}
    ppo = {
        "actor": actor,
        "critic": {"model": actor},
        "advantage": "GAE",
        "reward": {"function": f"{REWARDS}:even_share", "num_workers": 2},
        "kl": {"coef": 0.1, "target": 0.01, "horizon": 100},
        "update": {"mini_batch_size": 2, "micro_batch_size": 4},
    }
    data = {"train_files": str(prompts), "val_files": str(prompts), "prompts_per_step": 4}
    data |= {"val_batch_size": 32, "max_prompt_length": 32}
    saves = {"save_top_k": 0, "save_last": True, "every_n_train_steps": 1}
    trainer = {
        "accelerator": "cpu",
        "max_steps": NUM_STEPS,
        "check_val_every_n_epoch": None,
        "val_check_interval": 5,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": saves}],
    }
    settings = {
        "seed_everything": 3,
        "trainer": trainer,
        "model": {"class_path": "PPOModule", "init_args": ppo},
        "data": {"class_path": "PromptDataModule", "init_args": data},
        "rollout": {"class_path": "HFRollout", "init_args": {"sampling": {"num_samples": 2, "max_new_tokens": 6}}},
    }
    path.write_text(yaml.safe_dump(settings))


def fit(folder: Path) -> None:
    """`verl-fit --config ../ppo.yaml --ckpt_path auto` in a folder, as the leader of a process group."""
    os.setsid()
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["verl-fit", "--config", "../ppo.yaml", "--ckpt_path", "auto"]
    from verl_lightning.cli import main

    main()


class Attempt:
    """A process that trains; on leaving the context, it and its reward workers are gone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.process: ForkServerProcess = CONTEXT.Process(target=fit, args=(folder,))

    def __enter__(self) -> Attempt:
        self.begin = time.time()
        self.process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.is_alive():
            self.kill()

    def wait_for_training(self) -> None:
        """Until the process has written a checkpoint, or has ended."""
        checkpoint = self.folder / "runs/version_0/checkpoints/last.ckpt"
        while self.process.is_alive() and not (checkpoint.exists() and checkpoint.stat().st_mtime > self.begin):
            time.sleep(0.002)

    def finish(self) -> None:
        """Wait for the end, which must be a good one."""
        self.process.join()
        assert self.process.exitcode == 0, (self.folder / "output.txt").read_text()[-3000:]

    def kill(self) -> None:
        """SIGKILL for the whole group."""
        assert self.process.pid is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def survivors(self) -> list[int]:
        """Processes of the group that still run: reward workers, if anything. Waits some seconds for their end."""
        deadline = time.monotonic() + 10
        while (found := members(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found


def members(group: int | None) -> list[int]:
    """Running processes of a group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, owner = entry.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(owner) == group and state != "Z":
            found.append(int(entry.parent.name))
    return found
