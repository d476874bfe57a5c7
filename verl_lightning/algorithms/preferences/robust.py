"""Robust DPO: the unbiased loss for labels of which a known share is wrong."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.preferences.base import ExampleValues, PreferenceLoss, Responses, chosen, rejected
from verl_lightning.algorithms.preferences.dpo import check_label_smoothing


def robust_dpo_loss(
    chosen_log_ratios: Float[Tensor, " pairs"],
    rejected_log_ratios: Float[Tensor, " pairs"],
    *,
    beta: float,
    label_smoothing: float,
) -> Float[Tensor, " pairs"]:
    """DPO's loss, corrected such that its mean over wrong and right labels is that of right ones, per pair.

    With ``d = beta * (chosen_log_ratio - rejected_log_ratio)`` and ``e = label_smoothing``::

        loss = (-(1 - e) * log(sigmoid(d)) + e * log(sigmoid(-d))) / (1 - 2 * e)

    Args:
        chosen_log_ratios: Log-probs of the chosen responses under the policy less those under the reference, in nats.
        rejected_log_ratios: The same of the rejected responses.
        beta: How much a nat counts.
        label_smoothing: Probability that a label is wrong.

    Returns:
        The loss of each pair, which may be below 0.

    References:
        Chowdhury et al., *Provably Robust DPO*, 2024, eq. 12. https://arxiv.org/abs/2403.00409
    """
    difference = beta * (chosen_log_ratios - rejected_log_ratios)
    clean = -(1 - label_smoothing) * F.logsigmoid(difference)
    flipped = -label_smoothing * F.logsigmoid(-difference)
    return (clean - flipped) / (1 - 2 * label_smoothing)


class RobustDPO(PreferenceLoss):
    """Robust DPO: unbiased where a known share of the preferences is labelled the wrong way round.

    Chowdhury et al., 2024, https://arxiv.org/abs/2403.00409.

    Args:
        beta: How much a nat of log-ratio counts; the larger, the nearer the policy stays to the reference.
        label_smoothing: Probability that a preference is labelled the wrong way round, in ``[0, 0.5)``; 0 is DPO.
    """

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.1) -> None:
        check_positive("beta", beta)
        check_label_smoothing(label_smoothing)
        self.beta = beta
        self.label_smoothing = label_smoothing

    def __call__(self, responses: Responses) -> tuple[ExampleValues, dict[str, ExampleValues]]:
        """The loss of each pair."""
        ratios = responses.log_ratios
        loss = robust_dpo_loss(chosen(ratios), rejected(ratios), beta=self.beta, label_smoothing=self.label_smoothing)
        return loss, {}
