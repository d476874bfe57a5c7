"""Advantage estimators to choose from in YAML: what each needs, its options, and the maths of `functional` it binds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.functional.advantages import (
    discounted_returns,
    gae,
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    grpo_passk_advantages,
    opo_advantages,
    optimal_token_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from verl_lightning.functional.masking import sequence_sum


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may look at: the responses of one rank, whole groups of them."""

    token_rewards: Float[Tensor, "batch response"]
    """The sequence's reward on its last trainable token, less the KL penalty where that is part of the reward."""

    rewards: Float[Tensor, " batch"]
    """Scores of the whole sequences, in units of reward."""

    response_mask: Bool[Tensor, "batch response"]
    """True on the response tokens that are trained on; False on tool output and padding."""

    group_index: Int[Tensor, " batch"]
    """Equal for the samples of one prompt."""

    is_valid: Bool[Tensor, " batch"]
    """False on sequences without a reward or a trainable token: they are left out and get advantage 0."""

    values: Float[Tensor, "batch response"] | None = None
    """The critic's values, in units of reward, for estimators that need a critic."""

    greedy_rewards: Float[Tensor, " batch"] | None = None
    """Score of the greedy response to each sequence's prompt, for estimators that need one."""

    reward_components: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)
    """The rewards by name that the reward function returned beside the score."""

    log_probs: Float[Tensor, "batch response"] | None = None
    """Of the response tokens under the policy before this iteration's first update, in nats."""

    sum_squared_probs: Float[Tensor, "batch response"] | None = None
    """``sum(p**2)`` over the vocabulary at each response token, for estimators that need it."""

    importance_weights: Float[Tensor, "batch response"] | None = None
    """Of the trainer's policy over the engine's at each response token; None for ones."""

    nonzero_reward_share: float | Float[Tensor, ""] = 1.0
    """Share of the valid sequences of all ranks whose score is not 0."""

    @property
    def valid_mask(self) -> Bool[Tensor, "batch response"]:
        """The response mask without invalid sequences."""
        return self.response_mask & self.is_valid.unsqueeze(-1)

    @property
    def sequence_returns(self) -> Float[Tensor, " batch"]:
        """Sum of the token rewards of each response: its score, less the KL penalty where that is part of it."""
        return sequence_sum(self.token_rewards, self.response_mask)

    def on_each_token(self, advantages: Float[Tensor, " batch"]) -> AdvantageOutputs:
        """Gives each trainable token of a response the response's advantage."""
        return AdvantageOutputs(advantages=torch.where(self.valid_mask, advantages.unsqueeze(-1), 0.0))


@dataclass(frozen=True, kw_only=True)
class AdvantageOutputs:
    """What an estimator says about each response token."""

    advantages: Float[Tensor, "batch response"]
    """How much better than expected the token was; 0 where masked and on invalid sequences. Not yet whitened."""

    returns: Float[Tensor, "batch response"] | None = None
    """What the critic learns to predict, in units of reward; None without a critic."""


class AdvantageEstimator(ABC):
    """Turns rewards into the advantage of each response token."""

    needs_critic: ClassVar[bool] = False
    """Whether it reads ``values`` and gives ``returns``."""

    needs_groups: ClassVar[bool] = False
    """Whether it compares the samples of one prompt, and so needs at least two."""

    needs_greedy: ClassVar[bool] = False
    """Whether it reads ``greedy_rewards``."""

    needs_sum_squared_probs: ClassVar[bool] = False
    """Whether it reads ``sum_squared_probs``."""

    reads_score: ClassVar[bool] = True
    """Whether it reads the score, less penalties, rather than ``reward_components``."""

    whitens: bool = False
    """Whether the advantages are to be whitened over the response tokens of all ranks."""

    @abstractmethod
    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Estimates the advantages of one rank's responses."""


class GAE(AdvantageEstimator):
    """Generalized advantage estimation: PPO's estimator, with a critic that predicts the return before each token.

    Schulman et al., 2015, https://arxiv.org/abs/1506.02438

    Args:
        gamma: Discount per response token, in ``[0, 1]``.
        lam: From 0, which trusts the critic for all but the next reward, to 1, which trusts only rewards.
        whiten: Give the advantages of a batch mean 0 and variance 1.
    """

    needs_critic = True

    def __init__(self, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> None:
        _check_in_unit_interval("gamma", gamma)
        _check_in_unit_interval("lam", lam)
        self.gamma = gamma
        self.lam = lam
        self.whitens = whiten

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Advantages and returns of the trainable tokens."""
        assert inputs.values is not None  # `needs_critic`
        advantages, returns = gae(
            inputs.token_rewards, inputs.values, inputs.valid_mask, gamma=self.gamma, lam=self.lam
        )
        return AdvantageOutputs(advantages=advantages, returns=returns)


class GRPO(AdvantageEstimator):
    """Group-relative advantages: each response's score less the mean of its prompt's responses, over their std.

    Shao et al., 2024, https://arxiv.org/abs/2402.03300. Without the std it is Dr. GRPO, Liu et al., 2025,
    https://arxiv.org/abs/2503.20783, which also wants ``aggregation: seq-mean-token-sum-norm``.

    Args:
        normalize_by_std: Divide by the std of the prompt's scores.
    """

    needs_groups = True

    def __init__(self, normalize_by_std: bool = True) -> None:
        self.normalize_by_std = normalize_by_std

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        advantages = grpo_advantages(
            inputs.sequence_returns, inputs.group_index, inputs.is_valid, normalize_by_std=self.normalize_by_std
        )
        return inputs.on_each_token(advantages)


class RLOO(AdvantageEstimator):
    """REINFORCE leave-one-out: each response's score less the mean score of the other responses to its prompt.

    Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740
    """

    needs_groups = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        return inputs.on_each_token(rloo_advantages(inputs.sequence_returns, inputs.group_index, inputs.is_valid))


class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++: the discounted reward from each token on, whitened over the batch; no critic and no groups.

    Hu et al., 2025, https://arxiv.org/abs/2501.03262

    Args:
        gamma: Discount per response token, in ``[0, 1]``.
    """

    whitens = True

    def __init__(self, gamma: float = 1.0) -> None:
        _check_in_unit_interval("gamma", gamma)
        self.gamma = gamma

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """The return of each trainable token."""
        return AdvantageOutputs(
            advantages=discounted_returns(inputs.token_rewards, inputs.valid_mask, discount=self.gamma)
        )


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """REINFORCE++ with the mean score of the prompt's responses as baseline, whitened over the batch.

    Whitening shifts and scales all advantages alike, so that responses of a prompt without signal don't stay at 0.

    Hu et al., 2025, https://arxiv.org/abs/2501.03262
    """

    needs_groups = True
    whitens = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        advantages = grpo_advantages(
            inputs.sequence_returns, inputs.group_index, inputs.is_valid, normalize_by_std=False
        )
        return inputs.on_each_token(advantages)


class ReMax(AdvantageEstimator):
    """ReMax: the reward from each token on, less the score of the greedy response to the prompt.

    Li et al., 2023, https://arxiv.org/abs/2310.10505
    """

    needs_greedy = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """The advantage of each trainable token; 0 where the greedy response has no score."""
        assert inputs.greedy_rewards is not None  # `needs_greedy`
        mask = inputs.valid_mask & inputs.greedy_rewards.isfinite().unsqueeze(-1)
        return AdvantageOutputs(advantages=remax_advantages(inputs.token_rewards, inputs.greedy_rewards, mask))


class OPO(AdvantageEstimator):
    """On-policy optimization: each response's score less its prompt's mean, in which long responses weigh more.

    Hao et al., 2025, https://arxiv.org/abs/2505.23585
    """

    needs_groups = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        lengths = inputs.response_mask.sum(dim=-1)
        return inputs.on_each_token(
            opo_advantages(inputs.sequence_returns, lengths, inputs.group_index, inputs.is_valid)
        )


class GPG(AdvantageEstimator):
    """Group policy gradient: Dr. GRPO's advantage, over the share of responses whose score is not 0.

    Chu et al., 2025, https://arxiv.org/abs/2504.02546, with ``policy_loss: Reinforce``.
    """

    needs_groups = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        advantages = gpg_advantages(
            inputs.sequence_returns,
            inputs.group_index,
            inputs.is_valid,
            nonzero_reward_share=inputs.nonzero_reward_share,
        )
        return inputs.on_each_token(advantages)


class GRPOPassK(AdvantageEstimator):
    """Pass@k form of GRPO: only a prompt's best response learns, by how much it beats the second best.

    Tang et al., 2025, https://arxiv.org/abs/2503.19595

    Args:
        normalize_by_std: Divide by the std of the prompt's scores.
    """

    needs_groups = True

    def __init__(self, normalize_by_std: bool = True) -> None:
        self.normalize_by_std = normalize_by_std

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        advantages = grpo_passk_advantages(
            inputs.sequence_returns, inputs.group_index, inputs.is_valid, normalize_by_std=self.normalize_by_std
        )
        return inputs.on_each_token(advantages)


class GDPO(AdvantageEstimator):
    """Several rewards at once: the weighted sum of each one's own GRPO advantage, whitened over the batch.

    Reads the named values that the reward function returns beside ``reward``, not the score itself: neither a KL
    penalty in the reward nor one for length would reach it. Liu et al., 2026, https://arxiv.org/abs/2601.05242

    Args:
        weights: Weight of each named reward, such as ``{correct: 1.0, format: 0.5}``.
    """

    needs_groups = True
    reads_score = False
    whitens = True

    def __init__(self, weights: dict[str, float]) -> None:
        if not weights:
            raise ValueError("`weights` must name at least one of the values that the reward function returns.")
        self.weights = weights

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        if missing := self.weights.keys() - inputs.reward_components.keys():
            raise ValueError(
                f"`weights` of `GDPO` names {sorted(missing)}, but the reward function returned only"
                f" {sorted(inputs.reward_components)} beside `reward`. Return them, or take them out of `weights`."
            )
        components = torch.stack([inputs.reward_components[name] for name in self.weights]).float()
        weights = components.new_tensor(list(self.weights.values()))
        return inputs.on_each_token(gdpo_advantages(components, weights, inputs.group_index, inputs.is_valid))


class OptimalTokenBaseline(AdvantageEstimator):
    """A baseline for each token of a prompt's responses that weighs them by the noise of their gradients so far.

    *Optimal Token Baseline*, 2026, https://arxiv.org/abs/2602.07078
    """

    needs_groups = True
    needs_sum_squared_probs = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """The advantage of each trainable token."""
        assert inputs.log_probs is not None
        assert inputs.sum_squared_probs is not None  # `needs_sum_squared_probs`
        weights = inputs.importance_weights
        advantages = optimal_token_baseline_advantages(
            inputs.token_rewards,
            inputs.log_probs,
            inputs.sum_squared_probs,
            torch.ones_like(inputs.log_probs) if weights is None else weights,
            inputs.response_mask,
            inputs.group_index,
            inputs.is_valid,
        )
        return AdvantageOutputs(advantages=advantages)


def _check_in_unit_interval(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be from 0 to 1, got {value}.")
