"""Learning-rate schedules over ``trainer.global_step``."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl_lightning.models.config import OptimConfig

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


def make_schedule(optimizer: Optimizer, config: OptimConfig, max_steps: int) -> LambdaLR:
    """Linear warm-up, then the decay of ``config.schedule`` down to ``min_lr_ratio`` at ``max_steps``.

    Args:
        optimizer: Whose learning rate is scheduled.
        config: Shape of the schedule.
        max_steps: ``trainer.max_steps``; -1 when the run has no such end.

    Raises:
        ValueError: If a decay has no end to reach.
    """
    if config.schedule != "constant" and max_steps <= config.warmup_steps:
        raise ValueError(
            f"`optim.schedule: {config.schedule}` ends at `trainer.max_steps`, which must be above"
            f" `optim.warmup_steps` ({config.warmup_steps}), got {max_steps}. Set it, or use `constant`."
        )
    decay = DECAYS[config.schedule]

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * decay(progress)

    return LambdaLR(optimizer, factor)
