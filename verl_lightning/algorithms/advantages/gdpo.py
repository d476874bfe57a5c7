"""GDPO: several rewards, each with its own group-relative advantage."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.algorithms.advantages.grpo import grpo_advantages
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


class GDPO(AdvantageEstimator):
    """Several rewards at once: the weighted sum of each one's own GRPO advantage, whitened over the batch.

    Reads the named values that the reward function returns beside ``reward``, not the score itself: neither a KL
    penalty in the reward nor one for length would reach it. Liu et al., 2026, https://arxiv.org/abs/2601.05242

    Args:
        weights: Weight of each named reward, such as ``{correct: 1.0, format: 0.5}``.
    """

    needs_groups = True
    reads_score = False
    whitens = True

    def __init__(self, weights: dict[str, float]) -> None:
        if not weights:
            raise ValueError("`weights` must name at least one of the values that the reward function returns.")
        self.weights = weights

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        if missing := self.weights.keys() - inputs.reward_components.keys():
            raise ValueError(
                f"`weights` of `GDPO` names {sorted(missing)}, but the reward function returned only"
                f" {sorted(inputs.reward_components)} beside `reward`. Return them, or take them out of `weights`."
            )
        components = torch.stack([inputs.reward_components[name] for name in self.weights]).float()
        weights = components.new_tensor(list(self.weights.values()))
        return inputs.on_each_token(gdpo_advantages(components, weights, inputs.group_index, inputs.is_valid))
