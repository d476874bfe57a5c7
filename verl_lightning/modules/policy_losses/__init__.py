"""Policy losses to choose from in YAML: their options, and the maths of `functional` that they bind."""

from verl_lightning.modules.policy_losses.base import LossAndMetrics, PolicyLoss
from verl_lightning.modules.policy_losses.clipped import CISPO, GSPO, GeoMean, PPOClip
from verl_lightning.modules.policy_losses.covariance import ClipCov, KLCov
from verl_lightning.modules.policy_losses.gated import DPPOKL, DPPOTV, DRO, SAPO, VESPO, GPGLoss, Reinforce

__all__ = [
    "CISPO",
    "DPPOKL",
    "DPPOTV",
    "DRO",
    "GSPO",
    "SAPO",
    "VESPO",
    "ClipCov",
    "GPGLoss",
    "GeoMean",
    "KLCov",
    "LossAndMetrics",
    "PPOClip",
    "PolicyLoss",
    "Reinforce",
]
