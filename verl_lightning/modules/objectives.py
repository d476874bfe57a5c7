"""The losses of one optimizer step, ready for a strategy: normalised by the whole step's totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_lightning.algorithms.losses.base import PolicyLoss
from verl_lightning.functional.kl import KL_ESTIMATORS
from verl_lightning.functional.normalizer import Aggregation, token_weights
from verl_lightning.functional.value_loss import clipped_value_loss, value_clip_indicator
from verl_lightning.metrics import Metric, masked_mean, mean
from verl_lightning.modules.ppo_config import KLConfig
from verl_lightning.types import Experience, Scores


@dataclass(frozen=True, kw_only=True)
class Normalizer:
    """Turns token losses into this micro-batch's share of the loss of a whole optimizer step."""

    aggregation: Aggregation
    """Aggregation of token losses into one number."""

    num_tokens: Tensor
    """Response tokens of the step on all ranks."""

    num_sequences: Tensor
    """Sequences with a response token of the step on all ranks."""

    max_response_length: int
    """The fixed length of ``seq-mean-token-sum-norm``, in tokens."""

    def __call__(self, losses: Tensor, response_mask: Tensor, episode_tokens: Tensor | None = None) -> Tensor:
        """The share; shares add up to the loss.

        Args:
            losses: Losses of tokens.
            response_mask: True on the tokens that count.
            episode_tokens: See `Experience.episode_tokens`.
        """
        weights = token_weights(
            response_mask,
            self.aggregation,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
            max_response_length=self.max_response_length,
            sequence_tokens=episode_tokens,
        )
        return (torch.where(response_mask, losses, 0.0) * weights).sum()

    def metric(self, share: Tensor, response_mask: Tensor) -> Metric:
        """The loss itself, as a mean over optimizer steps: the weights of a step's shares add up to 1."""
        return mean(share.detach(), response_mask.sum() / self.num_tokens.clamp(min=1))


@dataclass(frozen=True, kw_only=True)
class DistillationTerm:
    """Divergence from a teacher."""

    normalizer: Normalizer
    """Totals of the optimizer step's tokens that have a teacher."""

    coef: float
    """Weight beside the policy loss."""

    def __call__(self, scores: Scores, batch: Experience) -> tuple[Tensor, Mapping[str, Metric]]:
        """This micro-batch's share of the loss."""
        assert scores.divergence is not None
        mask = batch.taught_mask
        share = self.normalizer(scores.divergence, mask, batch.episode_tokens)
        return self.coef * share, {"actor/distillation_loss": self.normalizer.metric(share, mask)}


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """Policy loss, KL penalty, entropy bonus and divergence from a teacher."""

    policy_loss: PolicyLoss
    """Loss of each response token."""

    normalizer: Normalizer
    """Totals of the optimizer step."""

    kl: KLConfig | None
    """KL penalty in the loss; None without one."""

    kl_coef: float
    """Current weight of the KL penalty."""

    entropy_coef: float
    """Weight of the entropy bonus."""

    is_on_policy: bool
    """True if the policy has not been updated since the responses were scored: its ratios must be 1."""

    distillation: DistillationTerm | None = None
    """Divergence from a teacher; None without one."""

    def __call__(self, scores: Scores, batch: Experience) -> tuple[Tensor, Mapping[str, Metric]]:
        """This micro-batch's share of the loss."""
        assert scores.log_probs is not None
        mask = batch.response_mask
        losses, token_metrics = self.policy_loss(scores.log_probs, batch)
        if batch.loss_weights is not None:
            losses = losses * batch.loss_weights
        share = self.normalizer(losses, mask, batch.episode_tokens)
        metrics = {name: masked_mean(values, mask) for name, values in token_metrics.items()}
        metrics["actor/pg_loss"] = self.normalizer.metric(share, mask)
        if self.is_on_policy:
            ratio = torch.where(mask, scores.log_probs.detach() - batch.old_log_probs, 0.0).exp()
            metrics["actor/on_policy_ratio_error"] = Metric("max", (ratio - 1).abs().max())
        if self.kl is not None and batch.ref_log_probs is not None:
            kl = KL_ESTIMATORS[self.kl.estimator](scores.log_probs, batch.ref_log_probs, mask)
            kl_share = self.normalizer(kl, mask, batch.episode_tokens)
            metrics["actor/kl_loss"] = self.normalizer.metric(kl_share, mask)
            share = share + self.kl_coef * kl_share
        if self.entropy_coef:
            assert scores.entropy is not None
            share = share - self.entropy_coef * self.normalizer(scores.entropy, mask, batch.episode_tokens)
        if self.distillation is not None:
            distilled, told = self.distillation(scores, batch)
            share, metrics = share + distilled, {**metrics, **told}
        return share, metrics


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """Clipped squared error of the critic."""

    normalizer: Normalizer
    """Totals of the optimizer step."""

    clip: float
    """How far a value may move from its old one, in units of reward."""

    def __call__(self, scores: Scores, batch: Experience) -> tuple[Tensor, Mapping[str, Metric]]:
        """This micro-batch's share of the loss."""
        assert scores.values is not None
        assert batch.values is not None
        assert batch.returns is not None
        inputs = (scores.values, batch.values, batch.returns, batch.response_mask)
        losses = clipped_value_loss(*inputs, clip=self.clip)
        share = self.normalizer(losses, batch.response_mask, batch.episode_tokens)
        return share, {
            "critic/vf_loss": self.normalizer.metric(share, batch.response_mask),
            "critic/vf_clipfrac": masked_mean(value_clip_indicator(*inputs, clip=self.clip), batch.response_mask),
            "critic/vpred_mean": masked_mean(scores.values, batch.response_mask),
        }


@dataclass(frozen=True, kw_only=True)
class SharedObjective:
    """Both losses of a policy with a value head on its trunk."""

    policy: PolicyObjective
    """Loss of the policy head."""

    value: ValueObjective
    """Loss of the value head."""

    coef: float
    """Weight of the value loss."""

    @property
    def normalizer(self) -> Normalizer:
        """Totals of the step, which both share."""
        return self.policy.normalizer

    def __call__(self, scores: Scores, batch: Experience) -> tuple[Tensor, Mapping[str, Metric]]:
        """This micro-batch's share of the loss."""
        policy_share, policy_metrics = self.policy(scores, batch)
        value_share, value_metrics = self.value(scores, batch)
        return policy_share + self.coef * value_share, {**policy_metrics, **value_metrics}
