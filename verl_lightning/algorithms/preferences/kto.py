"""Kahneman-Tversky optimization (KTO): responses that are wanted or not, without pairs."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.preferences.base import ExampleValues, PreferenceLoss, Responses


def kto_loss(
    log_ratios: Float[Tensor, " rows"],
    kl: Float[Tensor, " rows"],
    is_desirable: Bool[Tensor, " rows"],
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Float[Tensor, " rows"]:
    """Loss of a gain or a loss against the KL as the reference point, per response.

    With ``v = beta * (log_ratio - kl)``::

        loss = desirable_weight * (1 - sigmoid(v))       where the response is wanted
        loss = undesirable_weight * (1 - sigmoid(-v))    where it is not

    Args:
        log_ratios: Log-probs of the responses under the policy less those under the reference, in nats.
        kl: KL of policy and reference, estimated on prompts with other prompts' responses, at least 0, in nats.
            Constant.
        is_desirable: True on wanted responses.
        beta: How much a nat counts.
        desirable_weight: Weight of wanted responses.
        undesirable_weight: Weight of unwanted responses.

    Returns:
        The loss of each response.

    References:
        Ethayarajh et al., *KTO: Model Alignment as Prospect Theoretic Optimization*, 2024, eqs. 7 and 8.
        https://arxiv.org/abs/2402.01306
    """
    value = beta * (log_ratios - kl)
    wanted = desirable_weight * (1 - torch.sigmoid(value))
    unwanted = undesirable_weight * (1 - torch.sigmoid(-value))
    return torch.where(is_desirable, wanted, unwanted)


class KTO(PreferenceLoss):
    """Kahneman-Tversky optimization: learns from single responses, each wanted or not; pairs count as two.

    Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306. The KL is estimated in each batch, over all ranks, on the
    batch's prompts with other prompts' responses.

    Args:
        beta: How much a nat of log-ratio counts; the larger, the nearer the policy stays to the reference.
        desirable_weight: Weight of wanted responses. Where there are fewer of one kind, the authors advise weights that
            make the ratio of ``weight * number`` of wanted to unwanted responses 1 to 4/3.
        undesirable_weight: Weight of unwanted responses.
    """

    is_paired: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ("kl",)

    def __init__(self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> None:
        check_positive("beta", beta)
        check_positive("desirable_weight", desirable_weight)
        check_positive("undesirable_weight", undesirable_weight)
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def __call__(self, responses: Responses) -> tuple[ExampleValues, dict[str, ExampleValues]]:
        """The loss of each response, and the KL."""
        assert responses.is_desirable is not None
        assert responses.kl is not None
        loss = kto_loss(
            responses.log_ratios,
            responses.kl,
            responses.is_desirable,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        return loss, {"kl": responses.kl}
