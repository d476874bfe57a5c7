"""vLLM speaks for the policy in episodes and to agents, in the training processes, beside them and in Ray actors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import seed_everything

from tests.environments.worlds import Counting
from tests.processes import on_ranks
from tests.rollout.vllm_parts import write_sharp_folder
from tests.runs import Recorder, make_ppo, make_prompts, make_trainer
from verl_lightning.callbacks import Beside, RayActors, VLLMRollout
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.strategies import FSDPStrategy

pytestmark = [
    pytest.mark.backend,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # vLLM warns of many things
]
PLACES = {"inside": lambda: None, "beside": Beside, "in Ray actors": RayActors}


def train(place: str, devices: int, model: Path, prompts: Path, folder: Path) -> list[dict[str, float]]:
    """Metrics of two steps, in which each other prompt is an agent's."""
    seed_everything(0, verbose=False)
    recorder, sampling = Recorder(), SamplingConfig(num_samples=4, max_new_tokens=24)
    environment = {"world": Counting, "agent": {"agent": "tests.environments.agent_functions.two_turns"}}
    rollout = VLLMRollout(sampling, sampling, enforce_eager=True, placement=PLACES[place](), environment=environment)
    options = {"strategy": FSDPStrategy() if devices > 1 else "auto", "devices": devices, "max_steps": 2}
    module = make_ppo(model, reward="environment")
    make_trainer(folder, rollout, recorder, **options).fit(module, datamodule=make_prompts(prompts))
    return recorder.steps


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_folder(tmp_path_factory.mktemp("sharp"))


@pytest.fixture
def prompts(tmp_path, prompt_file):
    rows = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    path = tmp_path / "mixed.jsonl"
    named = [{**row, "environment": ("world", "agent")[number // 2 % 2]} for number, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in named))
    return path


@pytest.mark.parametrize(("place", "devices"), [("inside", 2), ("beside", 1), ("in Ray actors", 1)])
def test_episodes_and_agents_are_played(place, devices, tmp_path, model, prompts):
    steps, *_ = on_ranks(devices, train, place, devices, model, prompts, tmp_path)

    for step in steps:
        assert step["env/world/episodes"] == step["env/agent/episodes"] == 8
        assert step["env/world/errors"] == step["env/agent/errors"] == 0
        assert step["rollout_corr/abs_log_prob_gap"] < 1e-3
        assert step["actor/grad_norm"] > 0
