"""vLLM, in this process and beside it, by the checks that every engine passes."""

from __future__ import annotations

import pytest
import torch

from tests.rollout.conformance import CHECKS, CHECKS_IN_PROCESS, ENDS, Bench
from tests.rollout.vllm_parts import make_vllm_engine, write_sharp_folder
from verl_lightning.rollout.process import ProcessEngine

pytestmark = [pytest.mark.backend, pytest.mark.filterwarnings("ignore")]  # vLLM warns of many things

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sharp_folder(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def in_process(folder):
    engine = make_vllm_engine(folder, eos_token_ids=ENDS, makes_text=True, rereads=True)
    engine.start(CPU)
    yield Bench(folder, engine)
    engine.stop()


@pytest.fixture(scope="module")
def beside(folder):
    engine = ProcessEngine(make_vllm_engine(folder, eos_token_ids=ENDS, makes_text=True, rereads=True).recipe())
    engine.start(CPU)
    yield Bench(folder, engine, lambda: [engine.pid])
    engine.stop()


@pytest.mark.parametrize("check", CHECKS_IN_PROCESS, ids=lambda check: check.__name__)
def test_in_the_training_process(in_process, check):
    check(in_process)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_beside_the_training_process(beside, folder, check):
    if "hung" in check.__name__:
        beside.engine.recipe = make_vllm_engine(folder, deadline=1.0).recipe()
        beside.engine.grace = 1.0
    check(beside)
