"""vLLM inside Ray actors: a whole run agrees with its engine at each step, also after that was killed."""

from __future__ import annotations

import pytest
from lightning.pytorch import seed_everything

from tests.ray.engine_processes import EngineKiller
from tests.rollout.vllm_parts import write_sharp_folder
from tests.runs import Recorder, make_ppo, make_prompts, make_trainer
from verl_lightning.callbacks import RayRollout, VLLMRollout
from verl_lightning.rollout.base import SamplingConfig

pytestmark = [pytest.mark.backend, pytest.mark.filterwarnings("ignore")]  # vLLM warns of many things


def test_engine_and_trainer_agree_at_each_step(joined_cluster, tmp_path, prompt_file):
    seed_everything(0, verbose=False)
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    rollout = RayRollout(VLLMRollout(sampling, sampling, enforce_eager=True))
    recorder, killer = Recorder(), EngineKiller(step=2)
    trainer = make_trainer(tmp_path, rollout, recorder, killer, max_steps=4)

    trainer.fit(make_ppo(write_sharp_folder(tmp_path / "model")), datamodule=make_prompts(prompt_file))

    assert killer.killed is not None
    assert len(recorder.steps) == 4
    assert max(recorder.column("rollout_corr/abs_log_prob_gap")) < 1e-4
