"""Odds ratio preference optimization (ORPO): SFT on the chosen response, and a penalty on the rejected one's odds."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.preferences.base import ExampleValues, PreferenceLoss, Responses, chosen, rejected

LARGEST = -1e-6
"""Largest mean log-prob, in nats: at 0 the odds are infinite."""


def log_odds(log_probs: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Logarithm of the odds ``p / (1 - p)``.

    Args:
        log_probs: Logarithms of probabilities, below 0; those above -1e-6 count as that.

    Returns:
        In nats.
    """
    log_probs = log_probs.clamp(max=LARGEST)
    # Two forms of `log(1 - exp(x))`, each where the other loses digits.
    is_small = log_probs < -0.6931
    complement = torch.where(
        is_small,
        torch.log1p(-torch.where(is_small, log_probs, -1.0).exp()),
        torch.log(-torch.expm1(torch.where(is_small, -0.5, log_probs))),
    )
    return log_probs - complement


def orpo_loss(
    chosen_log_probs: Float[Tensor, " pairs"], rejected_log_probs: Float[Tensor, " pairs"], *, beta: float
) -> Float[Tensor, " pairs"]:
    """SFT's loss of the chosen response, and the log-sigmoid of the log odds ratio, per pair.

    Computes::

        loss = -chosen_log_prob - beta * log(sigmoid(log_odds(chosen_log_prob) - log_odds(rejected_log_prob)))

    Args:
        chosen_log_probs: Mean log-probs of the chosen responses under the policy, in nats a token.
        rejected_log_probs: The same of the rejected responses.
        beta: Weight of the odds ratio, the paper's lambda.

    Returns:
        The loss of each pair.

    References:
        Hong et al., *ORPO*, 2024, eqs. 6 and 7. https://arxiv.org/abs/2403.07691
    """
    ratio = log_odds(chosen_log_probs) - log_odds(rejected_log_probs)
    return -chosen_log_probs - beta * F.logsigmoid(ratio)


class ORPO(PreferenceLoss):
    """Odds ratio preference optimization: SFT on chosen responses that also lowers the odds of rejected ones.

    Hong et al., 2024, https://arxiv.org/abs/2403.07691. It needs no reference and no SFT before it. The loss of SFT is
    each response's mean over its tokens; those of the prompt are not trained.

    Args:
        beta: Weight of the odds ratio, the paper's lambda.
    """

    needs_reference: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ("nll_loss", "log_odds_chosen", "log_odds_ratio")

    def __init__(self, beta: float = 0.1) -> None:
        check_positive("beta", beta)
        self.beta = beta

    def __call__(self, responses: Responses) -> tuple[ExampleValues, dict[str, ExampleValues]]:
        """The loss of each pair, and its parts."""
        means = responses.mean_log_probs
        odds = log_odds(means.detach())
        ratio = chosen(odds) - rejected(odds)
        parts = {
            "nll_loss": -chosen(means.detach()),
            "log_odds_chosen": ratio,
            "log_odds_ratio": F.logsigmoid(ratio),
        }
        return orpo_loss(chosen(means), rejected(means), beta=self.beta), parts
