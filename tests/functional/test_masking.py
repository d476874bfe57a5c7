"""Masked reductions never read what the mask hides."""

import math

import torch
from torch.testing import assert_close

from verl_lightning.functional.masking import (
    masked_mean,
    masked_sum,
    masked_variance,
    sequence_mean,
    standardize,
    whiten,
)

X = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.nan, math.nan]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_reductions_read_only_the_mask():
    assert_close(masked_sum(X, MASK), torch.tensor(9.0))
    assert_close(masked_mean(X, MASK), torch.tensor(3.0))
    assert_close(masked_variance(X, MASK), torch.tensor(7.0))  # (4 + 1 + 9) / 2
    assert_close(sequence_mean(X, MASK), torch.tensor([1.5, 6.0]))


def test_reductions_of_an_empty_mask_are_zero_with_zero_gradients():
    x = torch.tensor([[math.nan, 1.0]], requires_grad=True)
    nothing = torch.zeros(1, 2, dtype=torch.bool)

    total = masked_mean(x, nothing) + masked_variance(x, nothing) + sequence_mean(x, nothing).sum()
    (total + whiten(x, nothing).sum()).backward()

    assert_close(total.detach(), torch.tensor(0.0))
    assert_close(x.grad, torch.zeros(1, 2))


def test_whiten_gives_mean_zero_and_unbiased_variance_one():
    whitened = whiten(X, MASK)

    assert_close(whitened, torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) / math.sqrt(7.0 + 1e-8))


def test_whiten_only_centres_a_single_value():
    only_one = torch.tensor([[False, True, False], [False, False, False]])

    assert_close(whiten(X, only_one), torch.zeros(2, 3))


def test_standardize_takes_moments_of_the_whole_step():
    """Two ranks that share their moments get what one process would."""
    mean, variance = masked_mean(X, MASK), masked_variance(X, MASK)

    halves = [standardize(X[i : i + 1], MASK[i : i + 1], mean=mean, variance=variance) for i in range(2)]

    assert_close(torch.cat(halves), whiten(X, MASK))
