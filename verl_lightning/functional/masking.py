"""Sums, means and whitening over the positions that a mask marks; whatever lies outside the mask is never read."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def to_type_of(values: Float[Tensor, "*shape"], like: Tensor) -> Float[Tensor, "*shape"]:
    """Rounds numbers to another tensor's type, and those beyond its range to its largest."""
    limits = torch.finfo(like.dtype)
    return values.clamp(limits.min, limits.max).to(like.dtype)


def masked_sum(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum of ``x`` where ``mask`` is True; ``nan`` outside the mask changes nothing.

    Args:
        x: Values in any unit.
        mask: True on what counts.

    Returns:
        ``sum(x * mask)``; 0 for an empty mask.
    """
    return torch.where(mask, x, 0.0).sum()


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Mean of ``x`` where ``mask`` is True, 0 for an empty mask.

    Computes::

        masked_sum(x, mask) / max(count(mask), 1)

    Args:
        x: Values in any unit.
        mask: True on what counts.

    Returns:
        The mean, in the unit of ``x``.
    """
    return to_type_of(masked_sum(x.double(), mask) / mask.sum().clamp(min=1), x)


def masked_variance(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Unbiased variance of ``x`` where ``mask`` is True, 0 for fewer than two values.

    Computes::

        masked_sum((x - masked_mean(x, mask)) ** 2, mask) / max(count(mask) - 1, 1)

    Args:
        x: Values in any unit.
        mask: True on what counts.

    Returns:
        The variance, in the squared unit of ``x``.
    """
    # Mask before the square: its gradient at nan is nan, even if the mask comes after.
    inside = torch.where(mask, x, 0.0).double()
    deviation = inside - masked_mean(inside, mask)
    return to_type_of(masked_sum(deviation.square(), mask) / (mask.sum() - 1).clamp(min=1), x)


def sequence_sum(x: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"]) -> Float[Tensor, " batch"]:
    """Sum of each row of ``x`` where ``mask`` is True.

    Args:
        x: Values in any unit.
        mask: True on what counts.

    Returns:
        One sum per row; 0 for a row without a True.
    """
    return torch.where(mask, x, 0.0).sum(dim=-1)


def sequence_mean(x: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"]) -> Float[Tensor, " batch"]:
    """Mean of each row of ``x`` where ``mask`` is True.

    Args:
        x: Values in any unit.
        mask: True on what counts.

    Returns:
        One mean per row; 0 for a row without a True.
    """
    return sequence_sum(x, mask) / mask.sum(dim=-1).clamp(min=1)


def standardize(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    mean: float | Float[Tensor, ""],
    variance: float | Float[Tensor, ""],
) -> Float[Tensor, "*shape"]:
    """Shifts and scales ``x`` by moments that the caller may have gathered over all ranks.

    Computes::

        (x - mean) / sqrt(variance + 1e-8)

    Args:
        x: Values in any unit.
        mask: True on what counts.
        mean: In the unit of ``x``.
        variance: In the squared unit of ``x``.

    Returns:
        Dimensionless values where ``mask`` is True, 0 elsewhere.
    """
    scale = torch.rsqrt(torch.as_tensor(variance, dtype=torch.float64, device=x.device) + 1e-8)
    return to_type_of(torch.where(mask, (torch.where(mask, x, 0.0) - mean) * scale, 0.0), x)


def whiten(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Gives the masked values mean 0 and unbiased variance 1; with fewer than two values, only the mean is taken off.

    Args:
        x: Values in any unit.
        mask: True on what counts.

    Returns:
        Dimensionless values where ``mask`` is True, 0 elsewhere.
    """
    inside = torch.where(mask, x, 0.0).double()
    mean = masked_mean(inside, mask)
    standardized = standardize(inside, mask, mean=mean, variance=masked_variance(inside, mask))
    return to_type_of(torch.where(mask.sum() > 1, standardized, torch.where(mask, inside - mean, 0.0)), x)
