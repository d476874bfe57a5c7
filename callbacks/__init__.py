"""Callbacks: what can be swapped or left out of a run."""

from verl_lightning.callbacks.rollout import HFRollout, RolloutCallback

__all__ = ["HFRollout", "RolloutCallback"]
