"""Rewards: what a response is worth, computed in killable worker processes.

Light on purpose, for each worker imports it: the pool is in ``verl_lightning.rewards.pool``.
"""

from verl_lightning.rewards.base import RewardFn, RewardSample

__all__ = ["RewardFn", "RewardSample"]
