"""Advantage estimators, one family a file."""

from verl_lightning.functional.advantages.gae import gae
from verl_lightning.functional.advantages.gdpo import gdpo_advantages
from verl_lightning.functional.advantages.gpg import gpg_advantages
from verl_lightning.functional.advantages.groups import (
    GroupStatistics,
    group_members,
    group_statistics,
    group_sum,
    num_groups_without_signal,
)
from verl_lightning.functional.advantages.grpo import grpo_advantages
from verl_lightning.functional.advantages.grpo_passk import grpo_passk_advantages
from verl_lightning.functional.advantages.opo import opo_advantages
from verl_lightning.functional.advantages.optimal_token_baseline import optimal_token_baseline_advantages
from verl_lightning.functional.advantages.remax import remax_advantages
from verl_lightning.functional.advantages.returns import discounted_returns
from verl_lightning.functional.advantages.rloo import rloo_advantages

__all__ = [
    "GroupStatistics",
    "discounted_returns",
    "gae",
    "gdpo_advantages",
    "gpg_advantages",
    "group_members",
    "group_statistics",
    "group_sum",
    "grpo_advantages",
    "grpo_passk_advantages",
    "num_groups_without_signal",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "remax_advantages",
    "rloo_advantages",
]
