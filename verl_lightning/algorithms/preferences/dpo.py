"""Direct preference optimization (DPO), and its conservative form (cDPO) for labels that may be wrong."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.preferences.base import (
    ExampleValues,
    PreferenceLoss,
    Responses,
    chosen,
    rejected,
)


def dpo_loss(
    chosen_log_ratios: Float[Tensor, " pairs"],
    rejected_log_ratios: Float[Tensor, " pairs"],
    *,
    beta: float,
    label_smoothing: float,
) -> Float[Tensor, " pairs"]:
    """Negative log-likelihood of the preference under the model of Bradley and Terry, per pair.

    With ``d = beta * (chosen_log_ratio - rejected_log_ratio)``::

        loss = -(1 - label_smoothing) * log(sigmoid(d)) - label_smoothing * log(sigmoid(-d))

    Args:
        chosen_log_ratios: Log-probs of the chosen responses under the policy less those under the reference, in nats.
        rejected_log_ratios: The same of the rejected responses.
        beta: How much a nat counts; the larger, the nearer the policy stays to the reference.
        label_smoothing: Probability that a label is wrong; 0 is DPO, above it is cDPO.

    Returns:
        The loss of each pair; log 2 where policy and reference are equal.

    References:
        Rafailov et al., *Direct Preference Optimization*, 2023, eq. 7. https://arxiv.org/abs/2305.18290
        Mitchell, *A note on DPO with noisy preferences*, 2023, eq. 3. https://ericmitchell.ai/cdpo.pdf
    """
    difference = beta * (chosen_log_ratios - rejected_log_ratios)
    return -(1 - label_smoothing) * F.logsigmoid(difference) - label_smoothing * F.logsigmoid(-difference)


class DPO(PreferenceLoss):
    """Direct preference optimization: the log-sigmoid of the difference of rewards; with ``label_smoothing`` cDPO.

    Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; Mitchell, 2023, https://ericmitchell.ai/cdpo.pdf.

    Args:
        beta: How much a nat of log-ratio counts; the larger, the nearer the policy stays to the reference.
        label_smoothing: Probability that a preference is labelled the wrong way round, in ``[0, 0.5)``.
    """

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        check_positive("beta", beta)
        check_label_smoothing(label_smoothing)
        self.beta = beta
        self.label_smoothing = label_smoothing

    def __call__(self, responses: Responses) -> tuple[ExampleValues, dict[str, ExampleValues]]:
        """The loss of each pair."""
        ratios = responses.log_ratios
        loss = dpo_loss(chosen(ratios), rejected(ratios), beta=self.beta, label_smoothing=self.label_smoothing)
        return loss, {}


def check_label_smoothing(value: float) -> None:
    """Refuses a probability at which labels say nothing, or the opposite.

    Raises:
        ValueError: Unless ``0 <= value < 0.5``.
    """
    if not 0 <= value < 0.5:
        raise ValueError(f"`label_smoothing` must be from 0 to below 0.5, got {value}.")
