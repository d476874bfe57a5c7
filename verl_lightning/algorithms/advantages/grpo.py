"""Group-relative advantages (GRPO): a response is judged against the others that answer its prompt."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.functional.groups import group_statistics
from verl_lightning.functional.masking import to_type_of


def grpo_advantages(
    rewards: Float[Tensor, " batch"],
    group_index: Int[Tensor, " batch"],
    valid: Bool[Tensor, " batch"],
    *,
    normalize_by_std: bool,
) -> Float[Tensor, " batch"]:
    """Estimates each response's advantage over its group's mean.

    With the mean and unbiased std over the valid responses of a group::

        A_i = (R_i - mean) / (std + 1e-6)    normalize_by_std, GRPO
        A_i = R_i - mean                     otherwise, Dr. GRPO

    Args:
        rewards: ``R_i`` of the responses, in units of reward. Ignored where not valid.
        group_index: Any integers; equal for the responses to one prompt.
        valid: False on responses to leave out of their group: failed rewards, nothing to train on.
        normalize_by_std: True to divide by the group's std.

    Returns:
        One advantage per response, the same for each of its tokens; exactly 0 where not valid and in groups of one
        response or of equal rewards.

    References:
        Shao et al., *DeepSeekMath*, 2024, sec. 4.1.2. https://arxiv.org/abs/2402.03300
        Liu et al., *Understanding R1-Zero-Like Training*, 2025, sec. 3.2. https://arxiv.org/abs/2503.20783
    """
    group = group_statistics(rewards, group_index, valid)
    advantages = rewards - group.mean
    if normalize_by_std:
        advantages = advantages / (group.std + 1e-6)
    return to_type_of(torch.where(group.has_signal, advantages, 0.0), rewards)


class GRPO(AdvantageEstimator):
    """Group-relative advantages: each response's score less the mean of its prompt's responses, over their std.

    Shao et al., 2024, https://arxiv.org/abs/2402.03300. Without the std it is Dr. GRPO, Liu et al., 2025,
    https://arxiv.org/abs/2503.20783, which also wants ``aggregation: seq-mean-token-sum-norm``.

    Args:
        normalize_by_std: True to divide by the std of the prompt's scores.
    """

    needs_groups = True

    def __init__(self, normalize_by_std: bool = True) -> None:
        self.normalize_by_std = normalize_by_std

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        advantages = grpo_advantages(
            inputs.sequence_returns, inputs.group_index, inputs.is_valid, normalize_by_std=self.normalize_by_std
        )
        return inputs.on_each_token(advantages)
