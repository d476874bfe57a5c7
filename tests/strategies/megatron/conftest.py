"""Runs of Megatron that several test files look at."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from tests.callbacks.saved_runs import save_run
from tests.processes import preload, start
from tests.runs import make_prompts, make_rollout, make_trainer
from tests.strategies.conformance import Bench, write_inputs
from tests.strategies.megatron.conversions import convert_all
from tests.strategies.megatron.ranks import Runs, launch, run_check
from tests.strategies.megatron.switched import run_fsdp
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.modules.ppo_config import CriticConfig

preload("tests.strategies.megatron.warm", "tests.strategies.megatron.ranks")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, the data, and a checkpoint of two iterations under `auto`."""
    folder = tmp_path_factory.mktemp("checks")
    write_inputs(folder)
    bench = Bench(strategy="auto", devices=1, folder=folder)
    seed_everything(0, verbose=False)
    trainer = make_trainer(folder, make_rollout(), max_steps=2)
    module = bench.ppo(advantage=GAE(), critic=CriticConfig(model=bench.model()))
    trainer.fit(module, datamodule=make_prompts(folder / "prompts.jsonl"))
    trainer.save_checkpoint(folder / "auto.ckpt")
    for saver in ("auto", "fsdp"):
        for kind in ("full", "lora"):
            save_run(folder / "model", folder / "chats.jsonl", folder / f"{saver}-{kind}", kind, saver)
    return folder


@pytest.fixture(scope="session")
def tensor_parallel(folder: Path) -> Runs:
    """Checks on two ranks that share each layer."""
    options, needs = {"tensor_parallel_size": 2}, {"tampered": lambda: runs["resume"]}
    runs = Runs(lambda name: launch(run_check, name, folder, options), needs)
    return runs


@pytest.fixture(scope="session")
def fsdp_commands(folder: Path) -> dict[str, Any]:
    """Runs of `verl-fit --strategy fsdp` by task."""
    results: dict[str, Any] = launch(run_fsdp, folder)
    return results


@pytest.fixture(scope="session")
def pipeline_parallel(folder: Path, tensor_parallel: Runs, request: pytest.FixtureRequest) -> Runs:
    """Checks on two stages, of which some start from what others have left."""
    needs = {
        "reshard": lambda: tensor_parallel["resume"],
        "resume_buckets": lambda: tensor_parallel["resume"],
        "resume_stages": lambda: runs["reshard"],
        "adapters_resharded": lambda: tensor_parallel["saved_runs"],
        "switched": lambda: request.getfixturevalue("fsdp_commands"),
    }
    runs = Runs(lambda name: launch(run_check, name, folder, {"pipeline_parallel_size": 2}), needs)
    return runs


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each kind of model, there and back, in a process that is killed while it saves at last."""
    folder = tmp_path_factory.mktemp("conversions")
    with start(convert_all, folder, folder=folder) as process:
        process.wait(code=-signal.SIGKILL)
    results: dict[str, Any] = torch.load(folder / "results.pt")
    return results
