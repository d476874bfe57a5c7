"""The critic's loss, clipped pessimistically."""

import math

import torch
from torch.testing import assert_close

from verl_lightning.functional.value_loss import (
    clipped_value_loss,
    explained_variance,
    explained_variance_moments,
    value_clip_indicator,
)

VALUES = torch.tensor([[0.5, 1.5, -1.0, math.nan]])
MASK = torch.tensor([[True, True, True, False]])
OLD, RETURNS = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, 1.0, math.nan]])


def test_value_loss_matches_the_golden_number():
    loss = clipped_value_loss(VALUES, OLD, RETURNS, MASK, clip=0.5)

    assert_close(loss, torch.tensor([[0.125, 0.125, 2.0, 0.0]]))
    assert_close(loss.sum() / MASK.sum(), torch.tensor(0.75))
    assert_close(value_clip_indicator(VALUES, OLD, RETURNS, MASK, clip=0.5), torch.zeros(1, 4))


def test_value_loss_stops_the_gradient_of_a_value_that_went_far_enough():
    values = torch.tensor([[0.8, -0.8, math.nan]], requires_grad=True)
    mask, returns = torch.tensor([[True, True, False]]), torch.tensor([[1.0, 1.0, 1.0]])

    clipped_value_loss(values, torch.zeros(1, 3), returns, mask, clip=0.5).sum().backward()

    assert_close(values.grad, torch.tensor([[0.0, -1.8, 0.0]]))  # (v - R) where the plain error is the larger
    assert_close(
        value_clip_indicator(values, torch.zeros(1, 3), returns, mask, clip=0.5), torch.tensor([[1.0, 0.0, 0.0]])
    )


def test_an_infinite_clip_leaves_the_plain_squared_error():
    loss = clipped_value_loss(VALUES, OLD, RETURNS, MASK, clip=math.inf)

    assert_close(loss, torch.tensor([[0.125, 0.125, 2.0, 0.0]]))


def explained(values, returns, mask):
    return explained_variance(explained_variance_moments(values, returns, mask)).float()


def test_explained_variance_is_one_minus_the_unexplained_share():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, math.nan]]), torch.tensor([[True, True, True, False]])

    assert_close(explained(returns, returns, mask), torch.tensor(1.0))
    assert_close(explained(torch.zeros(1, 4), returns, mask), torch.tensor(0.0))
    assert_close(explained(returns / 2, returns, mask), torch.tensor(0.75))
    assert_close(explained(returns, torch.ones(1, 4), mask), torch.tensor(0.0))


def test_explained_variance_of_two_ranks_is_that_of_their_tokens_together():
    mask = torch.ones(2, 3, dtype=torch.bool)
    returns, values = torch.tensor([[0.0, 0, 0], [6.0, 9, 6]]), torch.tensor([[1.0, 0, -1], [6.0, 6, 6]])
    # Errors -1, 0, 1, 0, 3, 0: mean .5, squares about it 9.5; returns: mean 3.5, squares about it 79.5.
    parts = [explained_variance_moments(values[[r]], returns[[r]], mask[[r]]) for r in range(2)]

    assert_close(explained_variance(parts[0] + parts[1]).float(), torch.tensor(1 - 9.5 / 79.5))
