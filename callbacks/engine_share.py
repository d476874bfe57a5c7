"""How much of a GPU a rollout engine gets when nobody says it."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from verl_lightning.models.scorer import build_skeleton
from verl_lightning.models.size import model_size
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.telemetry.memory_plan import MemoryPlan, amount, memory_plan

MOST = 0.9
"""Of a GPU that an engine has for itself, and the most that it is ever lent; the rest is for its activations' peaks."""


def planned_share(module: PostTrainingModule, *, dtype: str, num_devices: int, sleeps: bool) -> float:
    """The share of a training device's memory for an engine on it, by the run's memory plan.

    Args:
        module: In its run.
        dtype: Type of the engine's weights.
        num_devices: How many devices share one engine.
        sleeps: Whether it gives its memory back while the policy learns.
    """
    width = getattr(torch, dtype).itemsize
    size = model_size(build_skeleton(module.policy_config, "policy", trainable=False))
    return share_of(memory_plan(module), sleeps=sleeps, weights=size.weights * width // num_devices)


def share_of(plan: MemoryPlan, *, sleeps: bool, weights: int) -> float:
    """The share that a plan leaves for an engine, in ``(0, 0.9]``.

    Args:
        plan: Of a device, without an engine.
        sleeps: Whether the engine gives its memory back while the policy learns.
        weights: Bytes of the engine's weights on the device.

    Raises:
        MisconfigurationException: If not even these fit.
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
