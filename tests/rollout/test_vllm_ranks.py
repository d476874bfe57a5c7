"""vLLM in each process of a run with several."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import seed_everything

from tests.processes import on_ranks
from tests.rollout.vllm_parts import write_sharp_folder
from tests.runs import Recorder, make_ppo, make_prompts, make_trainer
from tests.strategies.same_data import SameDataStrategy
from verl_lightning.callbacks import VLLMRollout
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.strategies import STRATEGIES

pytestmark = [
    pytest.mark.backend,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # vLLM warns of many things
]

KINDS = {**STRATEGIES, "same_data": SameDataStrategy}


def train(strategy: str, devices: int, size: int, model: Path, prompts: Path, folder: Path) -> list[dict[str, float]]:
    """Metrics of each of three steps on this rank; as many ranks as ``size`` share an engine."""
    seed_everything(0, verbose=False)
    recorder = Recorder()
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    rollout = VLLMRollout(sampling, sampling, enforce_eager=True, tensor_parallel_size=size)
    options = {"strategy": KINDS[strategy]() if devices > 1 else "auto", "devices": devices}
    trainer = make_trainer(folder, rollout, recorder, **options)
    trainer.fit(make_ppo(model), datamodule=make_prompts(prompts))
    return recorder.steps


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_folder(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, model, prompt_file):
    return train("auto", 1, 1, model, prompt_file, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("strategy", "ranks_an_engine"), [("ddp", 1), ("fsdp", 1), ("fsdp", 2), ("same_data", 2)])
def test_two_ranks_sample_what_one_would(tmp_path, model, prompt_file, one_rank, strategy, ranks_an_engine):
    _, two_ranks = on_ranks(2, train, strategy, 2, ranks_an_engine, model, prompt_file, tmp_path)

    assert len(one_rank) == len(two_ranks) == 3
    for one, two in zip(one_rank, two_ranks, strict=True):
        assert two["critic/score/mean"] == pytest.approx(one["critic/score/mean"], abs=1e-6)
        assert two["rollout/canary_gap"] < 1e-4
