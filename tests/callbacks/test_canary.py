"""The canary: how far apart engine and trainer may be, and what it says in a resumed run."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.resume.experiment import Experiment
from tests.rollout.mortal_engine import MortalRollout
from tests.runs import make_ppo, make_trainer
from tests.runs import make_prompts as make_prompt_data
from tests.tiny import write_prompt_file
from verl_lightning.callbacks import vllm_rollout
from verl_lightning.callbacks.canary import Canary, default_limit
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.vllm_config import BesideConfig

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")  # a resumed run's own folder

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class InexactEngine(HFEngine):
    """Its weights are a fiftieth too large."""

    def load_weights(self, weights, version):
        super().load_weights(((name, weight * 1.02) for name, weight in weights), version)


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch):
    monkeypatch.setattr(vllm_rollout, "check_vllm", lambda: None)


def make_rollout(folder, **options):
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    rollout = MortalRollout(sampling, sampling, beside=BesideConfig(), **options)
    rollout.folder = folder
    return rollout


def test_the_limit_follows_the_type_in_which_both_compute():
    limits = [default_limit(dtype, CPU) for dtype in ("float32", "float16", "bfloat16")]

    assert limits == sorted(limits)
    assert default_limit("bfloat16", GPU) == default_limit("bfloat16", CPU) == 0.05
    assert default_limit("float32", CPU) < default_limit("float32", GPU) < 0.05


def test_two_percent_on_every_weight_stop_a_run_in_float32(tmp_path, tiny_folder, prompt_file):
    rollout = make_rollout(tmp_path / "events")
    rollout.engine_class = InexactEngine

    with pytest.raises(
        RuntimeError, match="at step 0, engine and trainer differ by .* `rollout.canary_limit` is 0.0005"
    ):
        make_trainer(tmp_path, rollout).fit(make_ppo(tiny_folder), make_prompt_data(prompt_file))


def test_a_given_limit_counts(tmp_path, tiny_folder, prompt_file):
    rollout = make_rollout(tmp_path / "events", canary_limit=0.1)
    rollout.engine_class = InexactEngine

    make_trainer(tmp_path, rollout, max_steps=1).fit(make_ppo(tiny_folder), make_prompt_data(prompt_file))

    assert 0.0005 < rollout._canary.gap < 0.1


def test_a_resumed_run_measures_the_same(tmp_path, tiny_folder):
    """Its first batch is another one than that from which the canary's prompts were taken."""
    prompts = write_prompt_file(tmp_path / "prompts.jsonl", num_rows=12)

    def make_callbacks():
        shutil.rmtree(tmp_path / "events", ignore_errors=True)
        return [make_rollout(tmp_path / "events")]

    experiment = Experiment(
        folder=tmp_path,
        make_module=lambda: make_ppo(tiny_folder),
        make_data=lambda: make_prompt_data(prompts, shuffle=True),
        make_callbacks=make_callbacks,
        trainer={},
    )
    whole = experiment.run("whole")

    resumed = experiment.resume(2, "early")

    gaps = [[row.get("rollout/canary_gap") for row in run.metrics] for run in (whole, resumed)]
    assert gaps[0] == gaps[1]
    assert None not in gaps[0]


def test_all_ranks_ask_the_prompts_of_the_first():
    told = [[5, 6], [7]]
    trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda own: told))
    batch = SimpleNamespace(prompts=lambda: [[9], [8, 9]])

    requests = Canary(None).requests(trainer, batch, SamplingConfig(num_samples=4, max_new_tokens=99))

    assert [request.prompt_ids for request in requests] == told
    assert {request.sampling.max_new_tokens for request in requests} == {16}
