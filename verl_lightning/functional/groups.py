"""Statistics of the samples that answer one prompt, for estimators that compare them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RELATIVE_NOISE = 1e-6
"""A group whose rewards differ by less than this share of the largest is constant up to float noise."""


class GroupStatistics(NamedTuple):
    """Statistics of each sample's group, in float64; every field has one entry per sample.

    Squares of float32 numbers overflow above 1.8e19, and sums of them may; those of float64 never do.
    """

    mean: Float[Tensor, " batch"]
    """Mean reward of the sample's group, in units of reward."""

    std: Float[Tensor, " batch"]
    """Unbiased standard deviation, in units of reward; 0 for fewer than two samples."""

    size: Int[Tensor, " batch"]
    """Number of valid samples of the group."""

    has_signal: Bool[Tensor, " batch"]
    """True for valid samples of a group whose rewards differ; everything else gets advantage 0."""


def group_members(
    group_index: Int[Tensor, " batch"], valid: Bool[Tensor, " batch"]
) -> tuple[Bool[Tensor, "groups batch"], Int[Tensor, " batch"]]:
    """Finds the members of each group.

    Args:
        group_index: Any integers; equal for the samples of one group.
        valid: False on samples that belong to no group.

    Returns:
        True where a valid sample belongs to a group, and the row of each sample's group in that table.
    """
    labels, row_of_group = torch.unique(group_index, return_inverse=True)
    return (labels.unsqueeze(-1) == group_index) & valid, row_of_group


def group_sum(
    x: Float[Tensor, " batch"], group_index: Int[Tensor, " batch"], valid: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Sum over the valid samples of each sample's group, in float64.

    Args:
        x: Values of the samples, in any unit. Ignored where not valid.
        group_index: Any integers; equal for the samples of one group.
        valid: False on samples that belong to no group.

    Returns:
        The sum of each sample's group.
    """
    members, row_of_group = group_members(group_index, valid)
    return torch.where(members, x.double(), 0.0).sum(dim=-1)[row_of_group]


def group_statistics(
    rewards: Float[Tensor, " batch"], group_index: Int[Tensor, " batch"], valid: Bool[Tensor, " batch"]
) -> GroupStatistics:
    """Mean, spread and size of each sample's group.

    A table of groups by samples, not a scatter: sums are then the same on every run of a GPU.

    Args:
        rewards: Rewards of the samples, in units of reward. Ignored where not valid.
        group_index: Any integers; equal for the samples of one group. Groups may have any size and order.
        valid: False on samples that belong to no group: failed rewards, nothing to train on.

    Returns:
        The statistics of the valid samples of each sample's group.
    """
    members, row_of_group = group_members(group_index, valid)
    rewards = rewards.double()
    size = members.sum(dim=-1)
    mean = torch.where(members, rewards, 0.0).sum(dim=-1) / size.clamp(min=1)
    squares = torch.where(members, (rewards - mean.unsqueeze(-1)).square(), 0.0).sum(dim=-1)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    spread = _largest(rewards, members) + _largest(-rewards, members)
    scale = torch.where(members, rewards.abs(), 0.0).amax(dim=-1)
    has_signal = (size > 1) & (spread > RELATIVE_NOISE * scale)
    return GroupStatistics(
        mean=mean[row_of_group],
        std=std[row_of_group],
        size=size[row_of_group],
        has_signal=has_signal[row_of_group] & valid,
    )


def num_groups_without_signal(
    rewards: Float[Tensor, " batch"], group_index: Int[Tensor, " batch"], valid: Bool[Tensor, " batch"]
) -> tuple[Int[Tensor, ""], Int[Tensor, ""]]:
    """Counts the groups that teach nothing because their rewards are all alike, and all groups.

    Args:
        rewards: Rewards of the samples, in units of reward. Ignored where not valid.
        group_index: Any integers; equal for the samples of one group.
        valid: False on samples that belong to no group.

    Returns:
        Groups of one sample or of equal rewards, and all groups; a group without a valid sample counts in neither.
    """
    members, _ = group_members(group_index, valid)
    has_signal = group_statistics(rewards, group_index, valid).has_signal
    num_groups = members.any(dim=-1).sum()
    return num_groups - (members & has_signal).any(dim=-1).sum(), num_groups


def _largest(rewards: Float[Tensor, " batch"], members: Bool[Tensor, "groups batch"]) -> Float[Tensor, " groups"]:
    return torch.where(members, rewards, -torch.inf).amax(dim=-1)
