"""The loss of reward models: how likely a reward makes the preference that people stated."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def bradley_terry_loss(
    chosen_rewards: Float[Tensor, " pairs"],
    rejected_rewards: Float[Tensor, " pairs"],
    margins: Float[Tensor, " pairs"] | float = 0.0,
    *,
    center_coef: float = 0.0,
) -> Float[Tensor, " pairs"]:
    """Negative log-likelihood of the preference under the model of Bradley and Terry, per pair.

    Computes::

        loss = -log(sigmoid(chosen - rejected - margin)) + center_coef * (chosen + rejected)**2

    Args:
        chosen_rewards: Rewards of the chosen responses.
        rejected_rewards: Rewards of the rejected responses.
        margins: Differences that the rewards should have at least.
        center_coef: Weight of the square that draws rewards to a mean of 0, which the likelihood leaves open.

    Returns:
        The loss of each pair.

    References:
        Ouyang et al., *Training language models to follow instructions with human feedback*, 2022, eq. 1.
        https://arxiv.org/abs/2203.02155
        Touvron et al., *Llama 2*, 2023, eq. 2 (margins). https://arxiv.org/abs/2307.09288
        Eisenstein et al., *Helping or Herding?*, 2023, eq. 2 (centring). https://arxiv.org/abs/2312.09244
    """
    likelihood = F.logsigmoid(chosen_rewards - rejected_rewards - margins)
    return -likelihood + center_coef * (chosen_rewards + rejected_rewards).square()
