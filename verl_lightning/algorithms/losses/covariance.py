"""Selection of tokens whose advantage goes with their log-probability, shared by the losses that spare them.

The tokens are selected before the optimizer step, from the whole step's tokens: their means, threshold and number are
then the same for each micro-batch, so that the loss doesn't depend on how the step is split.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from verl_lightning.algorithms.losses.base import PolicyLoss
from verl_lightning.types import Experience


class CovarianceSelection(NamedTuple):
    """Rule that selects the tokens a covariance loss treats differently, made from the whole optimizer step."""

    mean_log_prob: Float[Tensor, ""]
    """Mean log-prob of the response tokens of the step, in nats."""

    mean_advantage: Float[Tensor, ""]
    """Mean advantage of the same tokens, in units of reward."""

    low: Float[Tensor, ""]
    """Least covariance that is selected, in nats times units of reward."""

    high: Float[Tensor, ""]
    """Covariance at which selection ends, not selected itself; in the same unit."""

    probability: Float[Tensor, ""]
    """Share of the tokens from ``low`` to ``high`` that are selected, at random."""


def select_top(
    old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"], *, fraction: float
) -> CovarianceSelection:
    """Selects the tokens of highest covariance.

    A token's part of the covariance that lowers the entropy is::

        (old_log_probs_t - mean(old_log_probs)) * (A_t - mean(A))

    Args:
        old_log_probs: Of the response tokens of the whole optimizer step on all ranks, in nats.
        advantages: ``A_t`` of the same tokens, in units of reward.
        fraction: Share of the tokens to take, in ``(0, 1]``; at least one is taken.

    Returns:
        The selection, for `is_selected`.

    References:
        Cui et al., *The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models*, 2025, sec. 4.
        https://arxiv.org/abs/2505.22617
    """
    mean_log_prob, mean_advantage = _mean(old_log_probs), _mean(advantages)
    covariance = (old_log_probs - mean_log_prob) * (advantages - mean_advantage)
    infinity = covariance.new_full((), torch.inf)
    largest = torch.cat([infinity[None], covariance.topk(_count(covariance, fraction)).values])
    return CovarianceSelection(mean_log_prob, mean_advantage, largest[-1], infinity, torch.ones_like(infinity))


def select_at_random(
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    low: float,
    high: float,
    fraction: float,
) -> CovarianceSelection:
    """Selects some of the tokens whose covariance lies in a band, at random.

    Args:
        old_log_probs: Of the response tokens of the whole optimizer step on all ranks, in nats.
        advantages: Advantages of the same tokens, in units of reward.
        low: The least covariance (see `select_top`) that may be selected, in nats times units of reward.
        high: Covariance at which selection ends, in the same unit.
        fraction: Share of all the tokens to take on average, in ``(0, 1]``; at least one is taken.

    Returns:
        The selection, for `is_selected`.

    References:
        Cui et al., *The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models*, 2025, sec. 4.
        https://arxiv.org/abs/2505.22617
    """
    mean_log_prob, mean_advantage = _mean(old_log_probs), _mean(advantages)
    covariance = (old_log_probs - mean_log_prob) * (advantages - mean_advantage)
    num_candidates = ((covariance >= low) & (covariance < high)).sum()
    probability = _count(covariance, fraction) / num_candidates.clamp(min=1)
    bounds = covariance.new_tensor([low, high])
    return CovarianceSelection(mean_log_prob, mean_advantage, bounds[0], bounds[1], probability.clamp(max=1))


def is_selected(
    selection: CovarianceSelection,
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    input_ids: Int[Tensor, "batch sequence"],
    response_mask: Bool[Tensor, "batch response"],
) -> Bool[Tensor, "batch response"]:
    """Marks the tokens of a micro-batch that the whole step's selection takes.

    Args:
        selection: Selection of the whole optimizer step.
        old_log_probs: Of the response tokens, in nats, as the selection saw them.
        advantages: Advantages of the response tokens, in units of reward.
        input_ids: Prompt and response tokens, which seed the random choice.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        True on the selected response tokens.
    """
    covariance = (old_log_probs - selection.mean_log_prob) * (advantages - selection.mean_advantage)
    is_in_band = (covariance >= selection.low) & (covariance < selection.high)
    return response_mask & is_in_band & (content_noise(input_ids, response_mask) < selection.probability)


def content_noise(
    input_ids: Int[Tensor, "batch sequence"], response_mask: Bool[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """A uniform random number for each response token, fixed by the response's tokens up to it and by nothing else.

    A selection by it is the same for any split into micro-batches and ranks, any padding and order of the sequences.

    Args:
        input_ids: Prompt and response tokens; the response is the last columns.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        In ``[0, 1)``; 1 where masked, so that no probability selects it.
    """
    response_ids = input_ids[:, -response_mask.shape[1] :]
    hashed = torch.where(response_mask, response_ids * 2654435761 + 97, 0).cumsum(dim=-1)
    for shift, factor in ((15, 73244475), (16, 73244475), (16, 1)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & 0xFFFFFFFF
    return torch.where(response_mask, hashed.double() / 2**32, 1.0).float()


class CovarianceLoss(PolicyLoss):
    """A loss that selects tokens by covariance, once for each optimizer step.

    The covariance is taken from the log-probabilities of before the first update, not of now: those are known for the
    whole optimizer step before its first micro-batch, so that the selection can't depend on micro-batches.
    """

    fraction: float
    needs_whole_step = True
    _selection: CovarianceSelection | None = None

    def select(
        self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
    ) -> CovarianceSelection:
        """Makes the selection from the response tokens of the whole step."""
        raise NotImplementedError

    @override
    def for_step(self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> PolicyLoss:
        bound = copy.copy(self)
        bound._selection = self.select(old_log_probs, advantages)
        return bound

    def is_selected(self, batch: Experience) -> Bool[Tensor, "batch response"]:
        """Marks the tokens of this micro-batch that were selected for the step."""
        if self._selection is None:
            raise RuntimeError(
                f"`{type(self).__name__}` chooses among the tokens of a whole optimizer step, and was called before it"
                " saw them. Call `for_step(old_log_probs, advantages)` and use the loss that it returns."
            )
        return is_selected(self._selection, batch.old_log_probs, batch.advantages, batch.input_ids, batch.response_mask)


def _mean(x: Float[Tensor, " tokens"]) -> Float[Tensor, ""]:
    return x.sum() / max(1, len(x))


def _count(x: Float[Tensor, " tokens"], fraction: float) -> int:
    return min(len(x), max(1, int(fraction * len(x))))
