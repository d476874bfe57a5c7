"""The HF engine, in this process, beside it and in Ray actors, by the checks that every engine passes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from tests.rollout.conformance import CHECKS, CHECKS_IN_PROCESS, ENDS, Bench
from tests.rollout.mortal_engine import Fork
from tests.rollout.vllm_parts import PAD
from verl_lightning.models.config import ModelConfig
from verl_lightning.processes.supervisor import SupervisedProcess
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.process import ProcessEngine
from verl_lightning.rollout.worker import Worker

CPU = torch.device("cpu")


class ForkedEngine(ProcessEngine):
    """A `ProcessEngine` whose process is a fork, which starts at once."""

    def _spawn(self, connection: Connection) -> SupervisedProcess:
        return Fork(Worker(connection), self._open)


def make_engine(folder, **options):
    return HFEngine(ModelConfig(path=str(folder)), eos_token_ids=ENDS, pad_token_id=PAD, rereads=True, **options)


@pytest.fixture(scope="module")
def in_process(tiny_folder) -> Iterator[Bench]:
    engine = make_engine(tiny_folder, batch_size=12)
    engine.start(CPU)
    yield Bench(tiny_folder, engine)
    engine.stop()


@pytest.fixture(scope="module")
def beside(tiny_folder) -> Iterator[Bench]:
    engine = ForkedEngine(make_engine(tiny_folder, deadline=1.0).recipe(), grace=60.0)
    engine.start(CPU)
    yield Bench(tiny_folder, engine, lambda: [engine.pid])
    engine.stop()


@pytest.mark.parametrize("check", CHECKS_IN_PROCESS, ids=lambda check: check.__name__)
def test_in_the_training_process(in_process, check):
    check(in_process)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_beside_the_training_process(beside, check):
    if "hung" in check.__name__:
        beside.engine.grace = 1.0
    check(beside)
