"""LightningModules: what is learnt, and how."""

from verl_lightning.modules.dpo import DPOModule
from verl_lightning.modules.ppo import PPOModule
from verl_lightning.modules.reward_model import RewardModule
from verl_lightning.modules.sft import SFTModule

__all__ = ["DPOModule", "PPOModule", "RewardModule", "SFTModule"]
