"""Group-relative advantages of several rewards, each on its own scale."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.functional.advantages.grpo import grpo_advantages
from verl_lightning.functional.masking import to_type_of


def gdpo_advantages(
    reward_components: Float[Tensor, "components batch"],
    weights: Float[Tensor, " components"],
    group_index: Int[Tensor, " batch"],
    valid: Bool[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    """Weighted sum of each reward's own group-relative advantage, so that no reward drowns another.

    Computes::

        A_i = sum(weights_k * grpo_advantages(rewards_k)_i)

    Args:
        reward_components: Several rewards of each response, each in its own unit. Ignored where not valid; ``nan``
            where a reward does not apply, which leaves the response out of that reward's group.
        weights: Of each reward, dimensionless.
        group_index: Any integers; equal for the responses to one prompt.
        valid: False on responses to leave out of their group: failed rewards, nothing to train on.

    Returns:
        One advantage per response, the same for each of its tokens, to be whitened over the tokens of all ranks; a
        reward that is the same for all of a group adds exactly 0 there.

    References:
        Liu et al., *GDPO: Group reward-Decoupled Normalization Policy Optimization*, 2026.
        https://arxiv.org/abs/2601.05242
    """
    parts = [
        grpo_advantages(rewards, group_index, valid & rewards.isfinite(), normalize_by_std=True)
        for rewards in reward_components
    ]
    weighted = weights.unsqueeze(-1).double() * torch.stack(parts)
    return to_type_of(weighted.sum(dim=0), reward_components)
