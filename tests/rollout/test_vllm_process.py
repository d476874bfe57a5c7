"""An engine beside the trainer: it answers as one inside it does, and may die or hang without harm."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from lightning.pytorch import seed_everything
from transformers import AutoModelForCausalLM

from tests.rollout.asking import sample
from tests.rollout.vllm_parts import make_prompts, make_vllm_engine, weights_of, write_sharp_folder
from tests.runs import Recorder, make_model_config, make_ppo, make_trainer
from tests.runs import make_prompts as make_prompt_data
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.callbacks import VLLMRollout
from verl_lightning.callbacks.placement import Beside
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.process import EngineDiedError, ProcessEngine

pytestmark = [
    pytest.mark.backend,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
GREEDY = SamplingConfig(max_new_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sharp_folder(tmp_path_factory.mktemp("sharp"))


class Killer(VLLMRollout):
    """Kills its engine's process before the responses of each step in ``steps``, once."""

    steps: tuple[int, ...] = ()

    def complete(self, module, requests, hear=None):
        if module.trainer.global_step in self.steps:
            self.steps = tuple(set(self.steps) - {module.trainer.global_step})
            os.kill(self._vllm.pid, signal.SIGKILL)
        return super().complete(module, requests, hear)


def run_beside(tmp_path, folder, prompt_file, *, steps=(), **changes):
    """Metrics of each step of a short run whose engine is killed at some."""
    seed_everything(0, verbose=False)
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    rollout = Killer(sampling, sampling, enforce_eager=True, placement=Beside(**changes))
    rollout.steps = steps
    recorder = Recorder()
    trainer = make_trainer(tmp_path, rollout, recorder)
    trainer.fit(make_ppo(folder), datamodule=make_prompt_data(prompt_file))
    return recorder


def test_a_process_refuses_as_the_engine_does_and_tells_its_death(folder):
    engine = ProcessEngine(make_vllm_engine(folder).recipe())
    engine.start(torch.device("cpu"))
    engine.load_weights(weights_of(AutoModelForCausalLM.from_pretrained(folder)), 1)

    with pytest.raises(ValueError, match=r"a prompt of 60 tokens and a response of 12 don't fit"):
        sample(engine, make_prompts([60]), GREEDY)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="ended with -9"):
        sample(engine, make_prompts(), GREEDY)
    engine.stop()


def test_a_run_goes_on_exactly_when_its_engine_is_killed(tmp_path, folder, prompt_file):
    undisturbed = run_beside(tmp_path, folder, prompt_file)

    disturbed = run_beside(tmp_path, folder, prompt_file, steps=(1,))

    for name in ("critic/score/mean", "actor/grad_norm", "rollout/canary_gap"):
        assert disturbed.column(name) == pytest.approx(undisturbed.column(name), abs=1e-6)
    assert len(disturbed.steps) == 3
    assert max(disturbed.column("rollout/canary_gap")) < 1e-4


def test_a_run_stops_when_engines_keep_dying(tmp_path, folder, prompt_file):
    with pytest.raises(RuntimeError, match=r"engines died 1 times, but `rollout.placement.max_restarts` is 0"):
        run_beside(tmp_path, folder, prompt_file, steps=(0,), max_restarts=0)


def test_overlapped_responses_are_one_step_old_and_corrected(tmp_path, folder, prompt_file):
    seed_everything(0, verbose=False)
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    rollout = VLLMRollout(sampling, sampling, enforce_eager=True, placement=Beside(), max_staleness=1)
    recorder = Recorder()
    module = make_ppo(folder, actor=make_model_config(folder, lr=1e-2), corrections=[TruncatedImportanceSampling()])

    make_trainer(tmp_path, rollout, recorder).fit(module, datamodule=make_prompt_data(prompt_file))

    gaps = recorder.column("rollout_corr/abs_log_prob_gap")
    assert recorder.column("rollout/staleness/mean") == [0.0, 1.0, 1.0]
    assert max(recorder.column("rollout/canary_gap")) < 1e-4
    assert gaps[0] < 1e-4
    assert min(gaps[1:]) > 1e-3
    assert rollout._engine is None
