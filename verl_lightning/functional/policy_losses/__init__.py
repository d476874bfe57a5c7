"""Policy losses, one method a file; each returns a value per token, which `token_weights` turns into a loss."""

from verl_lightning.functional.policy_losses.ppo_clip import clip_fractions, ppo_clip_loss
from verl_lightning.functional.policy_losses.ratio import clamped_log_ratio

__all__ = ["clamped_log_ratio", "clip_fractions", "ppo_clip_loss"]
