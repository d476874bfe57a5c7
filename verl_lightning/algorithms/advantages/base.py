"""The interface of advantage estimators: their inputs and outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.functional.masking import sequence_sum
from verl_lightning.options import Method


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Inputs of an advantage estimator: the responses of one rank, whole groups of them."""

    token_rewards: Float[Tensor, "batch response"]
    """The sequence's reward on its last trainable token, less the KL penalty where that is part of the reward."""

    rewards: Float[Tensor, " batch"]
    """Scores of the whole sequences, in units of reward."""

    response_mask: Bool[Tensor, "batch response"]
    """True on the response tokens that are trained on; False on tool output and padding."""

    group_index: Int[Tensor, " batch"]
    """Index of each sequence's group: any integers, equal for the samples of one prompt."""

    is_valid: Bool[Tensor, " batch"]
    """False on sequences without a reward or a trainable token: they are left out and get advantage 0."""

    values: Float[Tensor, "batch response"] | None = None
    """The critic's values, in units of reward, for estimators that need a critic."""

    greedy_rewards: Float[Tensor, " batch"] | None = None
    """Score of the greedy response to each sequence's prompt, for estimators that need one."""

    reward_components: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)
    """The rewards by name that the reward function returned beside the score."""

    log_probs: Float[Tensor, "batch response"] | None = None
    """Log-probs of the response tokens under the policy before this iteration's first update, in nats."""

    sum_squared_probs: Float[Tensor, "batch response"] | None = None
    """``sum(p**2)`` over the vocabulary at each response token, for estimators that need it."""

    importance_weights: Float[Tensor, "batch response"] | None = None
    """Weights of the trainer's policy over the engine's at each response token; None for ones."""

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
    """Outputs of an advantage estimator for each response token."""

    advantages: Float[Tensor, "batch response"]
    """Advantage of each token; 0 where masked and on invalid sequences. Not yet whitened."""

    returns: Float[Tensor, "batch response"] | None = None
    """Targets of the critic's values, in units of reward; None without a critic."""


class AdvantageEstimator(Method, ABC, key="model.advantage"):
    """Turns rewards into the advantage of each response token."""

    needs_critic: ClassVar[bool] = False
    """True if the estimator reads ``values`` and gives ``returns``."""

    needs_groups: ClassVar[bool] = False
    """True if the estimator compares the samples of one prompt, and so needs at least two."""

    needs_greedy: ClassVar[bool] = False
    """True if the estimator reads ``greedy_rewards``."""

    needs_sum_squared_probs: ClassVar[bool] = False
    """True if the estimator reads ``sum_squared_probs``."""

    reads_score: ClassVar[bool] = True
    """True if the estimator reads the score, less penalties, rather than ``reward_components``."""

    whitens: bool = False
    """True if the advantages are to be whitened over the response tokens of all ranks."""

    @abstractmethod
    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Estimates the advantages of one rank's responses."""
