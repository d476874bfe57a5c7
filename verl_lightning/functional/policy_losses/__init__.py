"""Policy losses, one method a file; each returns a value per token, which `token_weights` turns into a loss."""

from verl_lightning.functional.policy_losses.cispo import cispo_loss, weight_clip_indicator
from verl_lightning.functional.policy_losses.covariance import (
    CovarianceSelection,
    clip_cov_loss,
    content_noise,
    is_selected,
    kl_cov_loss,
    select_at_random,
    select_top,
)
from verl_lightning.functional.policy_losses.dppo import dppo_loss, inside_binary_kl, inside_total_variation
from verl_lightning.functional.policy_losses.dro import dro_loss
from verl_lightning.functional.policy_losses.geo_mean import geo_mean_loss
from verl_lightning.functional.policy_losses.gspo import gspo_loss, sequence_log_ratio
from verl_lightning.functional.policy_losses.ppo_clip import clip_fractions, ppo_clip_loss
from verl_lightning.functional.policy_losses.ratio import clamped_log_ratio
from verl_lightning.functional.policy_losses.reinforce import reinforce_loss
from verl_lightning.functional.policy_losses.sapo import sapo_loss
from verl_lightning.functional.policy_losses.vespo import vespo_loss

__all__ = [
    "CovarianceSelection",
    "cispo_loss",
    "clamped_log_ratio",
    "clip_cov_loss",
    "clip_fractions",
    "content_noise",
    "dppo_loss",
    "dro_loss",
    "geo_mean_loss",
    "gspo_loss",
    "inside_binary_kl",
    "inside_total_variation",
    "is_selected",
    "kl_cov_loss",
    "ppo_clip_loss",
    "reinforce_loss",
    "sapo_loss",
    "select_at_random",
    "select_top",
    "sequence_log_ratio",
    "vespo_loss",
    "weight_clip_indicator",
]
