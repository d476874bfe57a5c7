"""A run that samples with vLLM, gone on with from a checkpoint."""

from __future__ import annotations

import pytest

from tests.resume.experiment import Experiment, assert_same_state
from tests.rollout.vllm_parts import write_sharp_folder
from tests.runs import make_ppo, make_prompts
from tests.tiny import write_prompt_file
from verl_lightning.callbacks import VLLMRollout
from verl_lightning.rollout.base import SamplingConfig

pytestmark = [
    pytest.mark.backend,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # vLLM warns of many things
]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    model = write_sharp_folder(folder / "model")
    prompts = write_prompt_file(folder / "prompts.jsonl", num_rows=12)
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    return Experiment(
        folder=folder,
        make_module=lambda: make_ppo(model),
        make_data=lambda: make_prompts(prompts, shuffle=True),
        make_callbacks=lambda: [VLLMRollout(sampling, sampling, enforce_eager=True)],
        trainer={},
    )


def test_a_resumed_run_equals_the_uninterrupted_one(experiment):
    whole = experiment.run("whole")

    resumed = experiment.resume(2, "early")

    assert_same_state(resumed.module.state_dict(), whole.module.state_dict())
    assert resumed.metrics == whole.metrics
