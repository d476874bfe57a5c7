"""Plans the share of a GPU's memory that a rollout engine gets when the user sets none."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from verl_lightning.models.build import build_skeleton
from verl_lightning.models.size import model_size
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.telemetry.memory_plan import MemoryPlan, amount, memory_plan

MOST = 0.9
"""Share of a GPU for an engine that has it alone, and the most that a plan lends; activations' peaks need the rest."""


def planned_share(module: PostTrainingModule, *, dtype: str, num_devices: int, sleeps: bool) -> float:
    """Returns the share of a training device's memory for an engine on it, by the run's memory plan.

    Args:
        module: Module in its run.
        dtype: Name of the type of the engine's weights.
        num_devices: Number of devices that share one engine.
        sleeps: True if the engine gives its memory back while the policy learns.
    """
    width = getattr(torch, dtype).itemsize
    size = model_size(build_skeleton(module.policy_config, "policy", trainable=False))
    return share_of(memory_plan(module), sleeps=sleeps, weights=size.weights * width // num_devices)


def share_of(plan: MemoryPlan, *, sleeps: bool, weights: int) -> float:
    """Returns the share that a plan leaves for an engine, in ``(0, 0.9]``.

    Args:
        plan: Memory plan of a device, without an engine.
        sleeps: True if the engine gives its memory back while the policy learns.
        weights: Bytes of the engine's weights on the device.

    Raises:
        MisconfigurationException: If not even the weights fit.
    """
    share = min(MOST, plan.engine_share(sleeps=sleeps))
    if share * plan.device_bytes <= weights:
        raise MisconfigurationException(
            f"the memory plan leaves {amount(int(share * plan.device_bytes))} of {amount(plan.device_bytes)} for the"
            f" rollout engine, whose weights alone take {amount(weights)}. Raise `rollout.tensor_parallel_size`, run"
            " engines `beside` the trainer, shard the models over more devices (`trainer.strategy: fsdp`), or set"
            " `rollout.gpu_memory_utilization` if the plan is wrong."
        )
    return share
