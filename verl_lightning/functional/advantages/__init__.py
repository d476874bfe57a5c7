"""Advantage estimators, one family a file."""

from verl_lightning.functional.advantages.gae import gae
from verl_lightning.functional.advantages.groups import (
    GroupStatistics,
    group_members,
    group_statistics,
    num_groups_without_signal,
)
from verl_lightning.functional.advantages.grpo import grpo_advantages
from verl_lightning.functional.advantages.returns import discounted_returns
from verl_lightning.functional.advantages.rloo import rloo_advantages

__all__ = [
    "GroupStatistics",
    "discounted_returns",
    "gae",
    "group_members",
    "group_statistics",
    "grpo_advantages",
    "num_groups_without_signal",
    "rloo_advantages",
]
