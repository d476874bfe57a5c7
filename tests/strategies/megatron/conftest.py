"""Runs of Megatron that several test files look at, each in one launch of two processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from tests.callbacks.saved_runs import save_run
from tests.processes import on_ranks
from tests.runs import make_prompts, make_rollout, make_trainer
from tests.strategies.conformance import Bench, write_inputs
from tests.strategies.megatron.switched import run_fsdp
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.modules.ppo_config import CriticConfig

HERE = Path(__file__).parent


def run(script: str, folder: Path, *words: Any, code: int = 0) -> Any:
    """What a script saved; it runs in processes of its own, since pretending CUDA can't be taken back."""
    out = folder / "results.pt"
    out.unlink(missing_ok=True)
    command = [sys.executable, HERE / script, "--folder", folder, "--out", out, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            returned = process.wait(timeout=800)
        finally:
            with contextlib.suppress(ProcessLookupError):  # Megatron's writers outlive a process that is killed
                os.killpg(process.pid, signal.SIGKILL)
    assert returned == code, (folder / "output.txt").read_text()[-5000:]
    return torch.load(out)


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
def tensor_parallel(folder: Path) -> dict[str, Any]:
    """All checks on two ranks that share each layer."""
    checks = ("resume", "tampered", "validate", "collectives", "lora", "export", "load_auto")
    checks += ("saved_runs", "recomputed_adapters", "loaded_runs", "refusals", "changed_settings")
    results: dict[str, Any] = run("run_checks.py", folder, "--options", '{"tensor_parallel_size": 2}', *checks)
    return results


@pytest.fixture(scope="session")
def fsdp_commands(folder: Path) -> dict[str, Any]:
    """Runs of `verl-fit --strategy fsdp` by task."""
    results: dict[str, Any] = on_ranks(2, run_fsdp, folder)[0]
    return results


@pytest.fixture(scope="session")
def pipeline_parallel(folder: Path, tensor_parallel: Any, fsdp_commands: Any) -> dict[str, Any]:
    """The tensor-parallel run's checkpoint on two stages, and more that starts from what others have left."""
    options = json.dumps({"pipeline_parallel_size": 2})
    checks = ("reshard", "resume_stages", "resume_buckets", "resume_shifted", "validate", "adapters_resharded")
    checks += ("learn", "replicas_features", "switched")
    results: dict[str, Any] = run("run_checks.py", folder, "--options", options, *checks)
    return results


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each kind of model, there and back, in a process that is killed while it saves at last."""
    folder = tmp_path_factory.mktemp("conversions")
    results: dict[str, Any] = run("run_conversions.py", folder, code=-signal.SIGKILL)
    return results
