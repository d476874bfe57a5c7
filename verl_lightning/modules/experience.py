"""From a scored rollout to what PPO learns from: log-probs, values, advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.algorithms.corrections.base import Corrected, RolloutCorrection, correct_rollout
from verl_lightning.functional.groups import num_groups_without_signal
from verl_lightning.functional.kl import KL_ESTIMATORS
from verl_lightning.functional.masking import masked_sum, standardize, to_type_of
from verl_lightning.functional.mismatch import effective_sample_size, weight_moments
from verl_lightning.functional.rewards import place_sequence_rewards, subtract_kl
from verl_lightning.functional.value_loss import explained_variance, explained_variance_moments
from verl_lightning.metrics import Metric, masked_mean, mean, spread, total
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.modules.judge import RewardResult
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.modules.ppo_config import KLConfig
from verl_lightning.modules.trajectories import Trajectories, trajectories_of
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.types import Experience, Rollout, Scores, with_lengths

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """Scores of the rollout's tokens by the models of an iteration: see `Scores`."""

    log_probs: Float[Tensor, "batch response"]
    ref_log_probs: Float[Tensor, "batch response"] | None
    values: Float[Tensor, "batch response"] | None
    entropy: Float[Tensor, "batch response"] | None
    sum_squared_probs: Float[Tensor, "batch response"] | None
    experts: Int[Tensor, "batch sequence layers chosen"] | None

    def joined(self, trajectories: Trajectories) -> _Scored:
        """Returns the scores of trajectories as those of their episodes, without experts."""
        columns = {name: value for name, value in vars(self).items() if name != "experts" and value is not None}
        return dataclasses.replace(
            self, experts=None, **{name: trajectories.joined(value) for name, value in columns.items()}
        )


@dataclass(frozen=True, kw_only=True)
class ExperienceMaker:
    """Scores a rollout with the models of this iteration and estimates advantages."""

    contract: PostTrainingStrategy
    """Runs the models."""

    actor: TokenScorer
    """The policy."""

    critic: TokenScorer | None
    """The value model; None without one, or when the actor has the value head."""

    reference: TokenScorer | None
    """The frozen reference; None when it is the actor without its adapters."""

    advantage: AdvantageEstimator
    """Estimator of the advantages."""

    kl: KLConfig | None
    """Options of the KL penalty; None when no reference is asked."""

    splitter: BatchSplitter
    """Cuts what is scored at once on a rank."""

    corrections: Sequence[RolloutCorrection]
    """Corrections for the difference between the engine's policy and the trainer's; empty leaves it alone."""

    old_log_probs: Literal["trainer", "engine"]
    """Source of the log-probs that the ratios compare with."""

    mask_truncated: bool
    """True if truncated responses are left out of training."""

    phase: Phase
    """Context manager that marks and times a phase."""

    pad_token_id: int
    """Token that fills padding."""

    def make(
        self, rollout: Rollout, reward_result: RewardResult, greedy: RewardResult | None, kl_coef: float
    ) -> tuple[Experience, dict[str, Metric]]:
        """Makes the experience and its metrics. Collective.

        Args:
            rollout: Sampled responses.
            reward_result: Rewards of the responses.
            greedy: Rewards of greedy responses to the same prompts, for estimators that need them.
            kl_coef: Current weight of the KL penalty.
        """
        is_valid = reward_result.is_valid
        if greedy is not None:  # nothing to compare with where the greedy response got no reward
            is_valid = is_valid & greedy.is_valid[rollout.prompt_index]
        trajectories = trajectories_of(rollout, pad_token_id=self.pad_token_id)
        rows = with_lengths([trajectories.rows])[0]
        mask = trajectories.joined(rows.response_mask) & is_valid[:, None]
        of_rows = self._scored(rows)
        scored = of_rows.joined(trajectories)
        with self.phase("adv"):
            of_turns = trajectories.joined_rewards(reward_result.token_rewards)
            placed = placed_rewards(reward_result.rewards, of_turns, mask)
            token_rewards, metrics = self._token_rewards(placed, scored, mask, kl_coef)
            sampled = trajectories.joined(rows.rollout_log_probs)
            corrected, mismatch = correct_rollout(self.corrections, scored.log_probs, sampled, mask)
            outputs = self.advantage(
                AdvantageInputs(
                    token_rewards=token_rewards,
                    rewards=reward_result.rewards,
                    response_mask=mask,
                    group_index=rollout.prompt_index,
                    is_valid=is_valid,
                    values=scored.values,
                    greedy_rewards=None if greedy is None else greedy.rewards[rollout.prompt_index],
                    reward_components=reward_result.components,
                    log_probs=scored.log_probs,
                    sum_squared_probs=scored.sum_squared_probs,
                    importance_weights=corrected.weights if self.corrections else None,
                    nonzero_reward_share=self._nonzero_share(reward_result.rewards, is_valid),
                )
            )
            experience = self._experience(
                dataclasses.replace(trajectories, rows=rows), of_rows, outputs, mask, corrected
            )
            metrics |= self._mismatch(mismatch, corrected, mask)
            trained = trajectories.joined(experience.response_mask).any(-1)
            metrics |= spread("critic/rewards", token_rewards.sum(-1), trained)
            metrics["train/excluded_sequences"] = total((~trained).sum())
            metrics |= experience_metrics(experience, rows)
            metrics |= self._explained_variance(experience)
            if self.advantage.needs_groups:
                silent, groups = num_groups_without_signal(reward_result.rewards, rollout.prompt_index, is_valid)
                metrics["train/frac_zero_std"] = mean(silent, groups)
        return experience, metrics

    def _scored(self, rollout: Rollout) -> _Scored:
        """Scores the rollout with each model."""
        policy = self._policy_scores(rollout)
        assert policy.log_probs is not None
        with self.phase("ref"):
            ref_log_probs = self._reference_log_probs(rollout)
        with self.phase("values"):
            values = policy.values if self.critic is None else self._score(self.critic, rollout).values
        return _Scored(
            log_probs=policy.log_probs,
            ref_log_probs=ref_log_probs,
            values=values,
            entropy=policy.entropy,
            sum_squared_probs=policy.sum_squared_probs,
            experts=policy.experts,
        )

    def _token_rewards(
        self, token_rewards: Tensor, scored: _Scored, mask: Tensor, kl_coef: float
    ) -> tuple[Float[Tensor, "batch response"], dict[str, Metric]]:
        """Takes the KL penalty from the rewards of tokens where it is a part of them; with metrics."""
        metrics = {} if scored.entropy is None else {"actor/entropy": masked_mean(scored.entropy, mask)}
        if self.kl is not None and scored.ref_log_probs is not None:
            kl = KL_ESTIMATORS[self.kl.estimator](scored.log_probs, scored.ref_log_probs, mask)
            metrics["actor/ref_kl"] = masked_mean(kl, mask)
            if self.kl.place == "reward":
                token_rewards = subtract_kl(token_rewards, kl, mask, coef=kl_coef)
        return token_rewards, metrics

    def _experience(
        self, trajectories: Trajectories, scored: _Scored, outputs: AdvantageOutputs, mask: Tensor, corrected: Corrected
    ) -> Experience:
        """Joins each trajectory with its tokens' scores, advantages and loss weights."""
        rollout, parted = trajectories.rows, trajectories.parted
        trained = parted(corrected.response_mask)
        if self.mask_truncated:
            trained = trained & ~rollout.is_truncated[:, None]
        advantages = self._whiten(outputs.advantages, mask) if self.advantage.whitens else outputs.advantages
        return Experience(
            input_ids=rollout.input_ids,
            attention_mask=rollout.attention_mask,
            response_mask=trained,
            temperature=rollout.temperature,
            images=rollout.images,
            mm_token_type_ids=rollout.mm_token_type_ids,
            rollout_log_probs=rollout.rollout_log_probs,
            old_log_probs=scored.log_probs,
            advantages=parted(advantages),
            loss_weights=parted(corrected.weights) if self.corrections else None,
            ref_log_probs=scored.ref_log_probs,
            values=scored.values,
            returns=None if outputs.returns is None else parted(outputs.returns),
            experts=scored.experts,
            rows_vary=rollout.rows_vary,
            episode_index=trajectories.episode_index,
        )

    def _mismatch(self, of_tokens: dict[str, Tensor], corrected: Corrected, mask: Tensor) -> dict[str, Metric]:
        """Mismatch of engine and trainer, over all ranks; empty where the trainer has not scored the responses."""
        if self.old_log_probs == "engine":
            return {}
        moments = self.contract.sum_over_data_parallel(weight_moments(corrected.weights, mask))
        size = mean(effective_sample_size(moments), moments[0] > 0)  # the same on every rank
        metrics = {name: masked_mean(values, mask) for name, values in of_tokens.items()}
        return metrics | {"rollout_corr/effective_sample_size": size}

    def _explained_variance(self, experience: Experience) -> dict[str, Metric]:
        """Share of the returns' variance that the values explain, over all ranks, as a metric; empty without values."""
        if experience.values is None or experience.returns is None:
            return {}
        moments = explained_variance_moments(experience.values, experience.returns, experience.response_mask)
        explained = explained_variance(self.contract.sum_over_data_parallel(moments))
        return {"critic/vf_explained_var": mean(explained)}  # the same on every rank

    def _score(self, model: TokenScorer, rollout: Rollout, *, with_entropy: bool = False) -> Scores:
        (split,) = self.splitter.split(model, [rollout])
        return split.join(self.contract.forward(model, split.parts, with_entropy=with_entropy))

    def _policy_scores(self, rollout: Rollout) -> Scores:
        """Scores by the policy, or the engine's log-probs alone."""
        if self.old_log_probs == "engine":
            return Scores(log_probs=rollout.rollout_log_probs)
        with self.phase("old_log_prob"):
            return self._score(self.actor, rollout, with_entropy=True)

    def _nonzero_share(self, rewards: Tensor, is_valid: Tensor) -> Tensor:
        """Share of the valid responses of all ranks whose reward is not 0."""
        counts = torch.stack([(is_valid & (rewards != 0)).sum(), is_valid.sum()])
        nonzero, valid = self.contract.sum_over_data_parallel(counts)
        share: Tensor = nonzero / valid.clamp(min=1)
        return share

    def _reference_log_probs(self, rollout: Rollout) -> Tensor | None:
        if self.kl is None:
            return None
        if self.reference is not None:
            return self._score(self.reference, rollout).log_probs
        with self.actor.without_adapters():
            return self._score(self.actor, rollout).log_probs

    def _whiten(self, advantages: Tensor, mask: Tensor) -> Float[Tensor, "batch response"]:
        """Whitens the advantages over the tokens of all ranks."""
        reduce, like = self.contract.sum_over_data_parallel, advantages
        advantages = torch.where(mask, advantages, 0.0).double()  # float32 squares and sums may overflow
        count = reduce(mask.sum())
        center = reduce(masked_sum(advantages, mask)) / count.clamp(min=1)
        squares = reduce(masked_sum((advantages - center).square(), mask))
        variance = squares / (count - 1).clamp(min=1)
        centered = torch.where(mask, advantages - center, 0.0)
        standardized = standardize(advantages, mask, mean=center, variance=variance)
        return to_type_of(torch.where(count < 2, centered, standardized), like)


def placed_rewards(
    rewards: Float[Tensor, " batch"],
    of_turns: Float[Tensor, "batch response"] | None,
    mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Reward of each token: those of turns at the turn's end, what the whole response got at its last token."""
    if of_turns is None:
        return place_sequence_rewards(rewards, mask)
    of_turns = torch.where(mask, of_turns, 0.0)
    return of_turns + place_sequence_rewards(rewards - of_turns.sum(-1), mask)


def experience_metrics(experience: Experience, rollout: Rollout) -> dict[str, Metric]:
    """Metrics of an iteration's trajectories, under the names that verl's users know."""
    mask = experience.response_mask
    width = rollout.response_mask.shape[1]
    response_lengths = rollout.attention_mask[:, -width:].sum(-1)
    metrics = (
        spread("critic/advantages", experience.advantages, mask)
        | spread("response_length", response_lengths)
        | spread("prompt_length", rollout.attention_mask[:, :-width].sum(-1))
    )
    metrics["response_length/clip_ratio"] = mean(rollout.is_truncated.sum(), float(len(rollout)))
    metrics |= spread("global_seqlen", rollout.attention_mask.sum()[None])
    metrics["perf/total_num_tokens"] = total(rollout.attention_mask.sum())
    if experience.returns is not None and experience.values is not None:
        metrics |= spread("critic/returns", experience.returns, mask) | spread("critic/values", experience.values, mask)
    return metrics
