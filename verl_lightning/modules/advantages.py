"""Advantage estimators to choose from in YAML: what each needs, its options, and the maths of `functional` it binds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.functional.advantages import gae, grpo_advantages, rloo_advantages
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

    nonzero_reward_share: float | Float[Tensor, ""] = 1.0
    """Share of the valid sequences of all ranks whose score is not 0."""


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
        mask = inputs.response_mask & inputs.is_valid.unsqueeze(-1)
        advantages, returns = gae(inputs.token_rewards, inputs.values, mask, gamma=self.gamma, lam=self.lam)
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
            sequence_returns(inputs), inputs.group_index, inputs.is_valid, normalize_by_std=self.normalize_by_std
        )
        return on_each_token(advantages, inputs)


class RLOO(AdvantageEstimator):
    """REINFORCE leave-one-out: each response's score less the mean score of the other responses to its prompt.

    Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740
    """

    needs_groups = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        return on_each_token(rloo_advantages(sequence_returns(inputs), inputs.group_index, inputs.is_valid), inputs)


def sequence_returns(inputs: AdvantageInputs) -> Float[Tensor, " batch"]:
    """Sum of the token rewards of each response."""
    return sequence_sum(inputs.token_rewards, inputs.response_mask)


def on_each_token(advantages: Float[Tensor, " batch"], inputs: AdvantageInputs) -> AdvantageOutputs:
    """Gives each trainable token of a response the response's advantage."""
    return AdvantageOutputs(advantages=torch.where(inputs.response_mask, advantages.unsqueeze(-1), 0.0))


def _check_in_unit_interval(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be from 0 to 1, got {value}.")
