"""LightningModules: what is learnt, and how."""

from verl_lightning.modules.ppo import PPOModule
from verl_lightning.modules.sft import SFTModule

__all__ = ["PPOModule", "SFTModule"]
