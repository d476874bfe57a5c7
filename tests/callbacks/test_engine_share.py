"""The share of a GPU that an engine gets by the memory plan."""

from __future__ import annotations

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.runs import make_ppo, make_prompts, make_rollout, make_trainer
from verl_lightning.callbacks import VLLMRollout
from verl_lightning.callbacks.engine_share import planned_share, share_of
from verl_lightning.callbacks.placement import Beside
from verl_lightning.strategies.memory import ModelMemory
from verl_lightning.telemetry.memory_plan import GIB, EngineMemory, MemoryPlan, memory_plan


def make_plan(activations: int) -> MemoryPlan:
    """One model on a device of 80 GiB: 16 at rest, 4 gathered, 4 of gradients."""
    actor = ModelMemory(
        weights=4 * GIB, gradients=4 * GIB, optimizer=12 * GIB, gathered=4 * GIB, activations=activations * GIB
    )
    return MemoryPlan(models={"actor": actor}, tokens=8192, device="H100", device_bytes=80 * GIB)


@pytest.mark.parametrize(("activations", "sleeps", "share"), [(40, True, 0.68), (40, False, 0.13), (0, False, 0.63)])
def test_an_engine_gets_what_the_trainer_leaves(activations, sleeps, share):
    """While weights are sent 20 of 80 GiB are taken, at the peak 64, or 24; a share of 0.07 is for nobody."""
    assert share_of(make_plan(activations), sleeps=sleeps, weights=GIB) == pytest.approx(share)


def test_an_engine_whose_weights_do_not_fit_is_refused():
    with pytest.raises(MisconfigurationException, match=r"leaves 10.40 GiB of 80.00 .* weights alone take 14.00 GiB"):
        share_of(make_plan(40), sleeps=False, weights=14 * GIB)


def test_a_small_model_leaves_an_engine_the_most(tmp_path, tiny_folder, prompt_file):
    module = make_ppo(tiny_folder)
    make_trainer(tmp_path, make_rollout(), max_steps=1).fit(module, make_prompts(prompt_file))

    assert planned_share(module, dtype="bfloat16", num_devices=1, sleeps=True) == 0.9


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ({"gpu_memory_utilization": 0.5}, (40, 0)),
        ({"gpu_memory_utilization": 0.5, "sleeps": False}, (40, 40)),
        ({"gpu_memory_utilization": 0.5, "placement": Beside()}, (0, 0)),
    ],
)
def test_the_plan_knows_the_engine(tmp_path, tiny_folder, prompt_file, options, memory):
    rollout, module = VLLMRollout(**options), make_ppo(tiny_folder)
    trainer = make_trainer(tmp_path, make_rollout(), max_steps=1)
    trainer.fit(module, make_prompts(prompt_file))
    trainer.callbacks.append(rollout)

    rollout.make_engine(module)

    assert rollout.engine_memory(80) == EngineMemory(*memory)
    plan = memory_plan(module)
    assert plan.engine == rollout.engine_memory(plan.device_bytes)
