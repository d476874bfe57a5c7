"""Simple preference optimization (SimPO): mean log-probs as rewards, a margin, and no reference."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_not_negative, check_positive
from verl_lightning.algorithms.preferences.base import ExampleValues, PreferenceLoss, Responses, chosen, rejected


def simpo_loss(
    chosen_log_probs: Float[Tensor, " pairs"],
    rejected_log_probs: Float[Tensor, " pairs"],
    *,
    beta: float,
    gamma: float,
) -> Float[Tensor, " pairs"]:
    """Negative log-likelihood of a preference by a margin, with mean log-probs as rewards, per pair.

    Computes::

        loss = -log(sigmoid(beta * (chosen_log_prob - rejected_log_prob) - gamma))

    Args:
        chosen_log_probs: Mean log-probs of the chosen responses under the policy, in nats a token.
        rejected_log_probs: The same of the rejected responses.
        beta: How much a nat a token counts.
        gamma: The margin, in units of reward.

    Returns:
        The loss of each pair.

    References:
        Meng et al., *SimPO*, 2024, eq. 6. https://arxiv.org/abs/2405.14734
    """
    return -F.logsigmoid(beta * (chosen_log_probs - rejected_log_probs) - gamma)


class SimPO(PreferenceLoss):
    """Simple preference optimization: mean log-probs as rewards, told apart by a margin; needs no reference.

    Meng et al., 2024, https://arxiv.org/abs/2405.14734.

    Args:
        beta: How much a nat a token of log-prob counts.
        gamma: The margin by which the chosen response is to be better, in units of reward.
    """

    needs_reference: ClassVar[bool] = False

    def __init__(self, beta: float = 2.0, gamma: float = 1.0) -> None:
        check_positive("beta", beta)
        check_not_negative("gamma", gamma)
        self.beta = beta
        self.gamma = gamma

    def __call__(self, responses: Responses) -> tuple[ExampleValues, dict[str, ExampleValues]]:
        """The loss of each pair."""
        means = responses.mean_log_probs
        return simpo_loss(chosen(means), rejected(means), beta=self.beta, gamma=self.gamma), {}
