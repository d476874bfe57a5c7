"""How many tokens a pass takes where the memory plan chooses them."""

from __future__ import annotations

import pytest

from tests.runs import make_ppo, make_prompts, make_rollout, make_trainer
from verl_lightning.modules.pass_size import planned_tokens
from verl_lightning.modules.ppo_config import UpdateConfig
from verl_lightning.telemetry.memory_plan import ModelSizes


@pytest.fixture
def module(tmp_path, tiny_folder, prompt_file):
    """A module after a step with passes sized by the plan."""
    module = make_ppo(tiny_folder, update=UpdateConfig(mini_batch_size=2))
    make_trainer(tmp_path, make_rollout(), max_steps=1).fit(module, make_prompts(prompt_file))
    return module


def test_a_pass_takes_what_the_plan_leaves_and_at_least_the_longest_sequence(module, monkeypatch):
    assert module.tokens_per_pass == module.plan.update.max_tokens == 4096  # all that a CPU gains from
    memory = ModelSizes.of(module).memory
    resting, working = memory(1)["actor"].resting, memory(2000)["actor"].working

    def tokens_with(device_bytes):
        device = ("a device", device_bytes)
        monkeypatch.setattr("verl_lightning.telemetry.memory_plan.device_memory", lambda *_, **__: device)
        return planned_tokens(module)

    tokens = tokens_with(int((resting + 2 * working) / 0.93) + 100)  # half of what is left holds 2000 tokens
    assert 1500 <= tokens <= 2000
    assert memory(tokens)["actor"].working <= working
    assert tokens_with(resting) == module.max_tokens


def test_a_number_of_sequences_or_tokens_goes_before_the_plan():
    assert not UpdateConfig(micro_batch_size=4).sizes_by_plan
    assert not UpdateConfig(max_tokens_per_micro_batch=400).sizes_by_plan
    assert UpdateConfig(max_tokens_per_micro_batch=None).sizes_by_plan
