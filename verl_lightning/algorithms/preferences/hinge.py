"""The hinge loss of sequence likelihood calibration (SLiC), on DPO's rewards."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.preferences.base import ExampleValues, PreferenceLoss, Responses, chosen, rejected


def hinge_loss(
    chosen_log_ratios: Float[Tensor, " pairs"], rejected_log_ratios: Float[Tensor, " pairs"], *, beta: float
) -> Float[Tensor, " pairs"]:
    """Shortfall of the difference of rewards below a margin of 1, per pair.

    Computes::

        loss = max(0, 1 - beta * (chosen_log_ratio - rejected_log_ratio))

    Args:
        chosen_log_ratios: Log-probs of the chosen responses under the policy less those under the reference, in nats.
        rejected_log_ratios: The same of the rejected responses.
        beta: Reciprocal of the margin, in 1/nats.

    Returns:
        The loss of each pair; 1 where policy and reference are equal.

    References:
        Zhao et al., *SLiC-HF*, 2023, eq. 1. https://arxiv.org/abs/2305.10425
        Liu et al., *Statistical Rejection Sampling Improves Preference Optimization*, 2023, sec. 3.3.
        https://arxiv.org/abs/2309.06657
    """
    return torch.relu(1 - beta * (chosen_log_ratios - rejected_log_ratios))


class HingeDPO(PreferenceLoss):
    """The hinge loss of SLiC on DPO's rewards: pairs that are told apart well enough teach nothing more.

    Zhao et al., 2023, https://arxiv.org/abs/2305.10425; Liu et al., 2023, https://arxiv.org/abs/2309.06657.

    Args:
        beta: Reciprocal of the margin at which a pair is told apart well enough, in 1/nats.
    """

    def __init__(self, beta: float = 0.1) -> None:
        check_positive("beta", beta)
        self.beta = beta

    def __call__(self, responses: Responses) -> tuple[ExampleValues, dict[str, ExampleValues]]:
        """The loss of each pair."""
        ratios = responses.log_ratios
        return hinge_loss(chosen(ratios), rejected(ratios), beta=self.beta), {}
