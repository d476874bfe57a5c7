"""Learning-rate schedules over ``trainer.global_step``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from verl_lightning.compat.torch import move_schedule
from verl_lightning.models.config import OptimConfig

SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
"""Settings of AdamW that the user gives, by their names in an optimizer's groups of parameters."""

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


class ConfiguredSchedule(LambdaLR):
    """Takes nothing but its position from a checkpoint, and gives its optimizer this run's settings back.

    Lightning restores optimizers, then their schedules, both with the settings of the run that wrote the checkpoint:
    AdamW's groups hold its learning rate, betas, eps and weight decay, and torch's schedules its peak learning rates.

    Args:
        optimizer: Optimizer whose learning rate is scheduled; it has the settings of the run.
        factor: Share of the peak learning rate by step.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        super().__init__(optimizer, factor)
        self._settings = [{name: group[name] for name in SETTINGS if name in group} for group in optimizer.param_groups]

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        del state["_settings"]
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        peaks = zip(self.base_lrs, self.lr_lambdas, strict=True)
        rates = [peak * factor(state_dict["last_epoch"]) for peak, factor in peaks]
        move_schedule(self, state_dict, rates)
        for group, settings, lr in zip(self.optimizer.param_groups, self._settings, rates, strict=True):
            group.update(settings | {"lr": lr})


def make_schedule(optimizer: Optimizer, config: OptimConfig, max_steps: int, key: str) -> ConfiguredSchedule:
    """Linear warm-up, then the decay of ``config.schedule`` down to ``min_lr_ratio`` at ``max_steps``.

    Args:
        optimizer: Optimizer whose learning rate is scheduled.
        config: Shape of the schedule.
        max_steps: ``trainer.max_steps``; -1 when the run has no such end.
        key: Key of ``config`` in the user's settings, such as ``model.actor.optim``.

    Raises:
        ValueError: If a decay has no end to reach.
    """
    if config.schedule != "constant" and max_steps <= config.warmup_steps:
        raise ValueError(
            f"`{key}.schedule: {config.schedule}` ends at `trainer.max_steps`, which must be above"
            f" `{key}.warmup_steps` ({config.warmup_steps}), got {max_steps}. Set it, or use `constant`."
        )
    decay = DECAYS[config.schedule]

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * decay(progress)

    return ConfiguredSchedule(optimizer, factor)
