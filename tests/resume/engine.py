"""An engine beside the trainer, without vLLM: it samples as `HFEngine` does, in a process below real supervisors."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

from tests.rollout.mortal_engine import Fork
from verl_lightning.callbacks import VLLMRollout, vllm_rollout
from verl_lightning.models.config import ModelConfig
from verl_lightning.processes.supervisor import SupervisedProcess, supervise
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.process import ProcessEngine
from verl_lightning.rollout.vllm_config import BesideConfig, VLLMConfig
from verl_lightning.rollout.worker import Worker


class SupervisedWorker(Worker):
    """Serves as the last of three processes, whose supervisors end it with the trainer."""

    def run(self) -> None:
        supervise(os.getppid())
        super().run()

    def _make_engine(self, config: VLLMConfig) -> Any:
        model = ModelConfig(path=config.path)
        return HFEngine(model, eos_token_ids=config.eos_token_ids, pad_token_id=config.pad_token_id)


class SupervisedEngine(ProcessEngine):
    """A `ProcessEngine` whose process is a fork, which starts at once."""

    def _spawn(self, connection: Connection) -> SupervisedProcess:
        return Fork(SupervisedWorker(connection), self._open)


class SupervisedRollout(VLLMRollout):
    """Samples with it. Not for pytest's own process: it does away with the search for vLLM."""

    def make_engine(self, module: Any) -> Any:
        return SupervisedEngine(super().make_engine(module).config)


def make_supervised_rollout(sampling: SamplingConfig) -> SupervisedRollout:
    """A callback that asks for no vLLM."""
    vllm_rollout.check_vllm = lambda: None
    return SupervisedRollout(sampling, sampling, beside=BesideConfig())
