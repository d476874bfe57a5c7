"""GAE against golden tables, a slow loop and the gap that tool output leaves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.golden import MASK, REWARDS, VALUES
from verl_lightning.algorithms.advantages.gae import gae
from verl_lightning.functional.masking import whiten


def test_gae_matches_the_golden_table():
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.99, lam=0.95)

    expected_advantages = [
        [0.636686, 0.534299, 0.427488, 0],
        [-0.906475, -0.702276, -1.299739, -1.116316],
        [-0.932989, -0.92334, 0, 0],
        [0.574657, 0.893077, 1.22959, 1.58534],
    ]
    expected_returns = [
        [0.908407, 0.95535, 1, 0],
        [0.008739, 0.014555, 0.00495, 0],
        [0.495, 0.5, 0, 0],
        [1.776263, 1.841269, 1.91565, 2],
    ]
    assert_close(whiten(advantages, MASK), torch.tensor(expected_advantages), atol=1e-5, rtol=0)
    assert_close(returns, torch.tensor(expected_returns), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"), [(1.0, 1.0, [6, 5, 3]), (0.5, 1.0, [2.75, 3.5, 3]), (1.0, 0.5, [3.625, 4.25, 3])]
)
def test_returns_of_three_rewards(gamma, lam, expected):
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 1.0, 1.5]])

    _, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=gamma, lam=lam)

    assert_close(returns, torch.tensor([expected], dtype=torch.float32))


def test_lambda_zero_is_the_one_step_error():
    rewards, values = torch.tensor([[0.0, 0.0, 5.0]]), torch.tensor([[1.0, 2.0, 3.0]])

    advantages, _ = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=0.0)

    assert_close(advantages, torch.tensor([[1.0, 1.0, 2.0]]))


def test_gae_bootstraps_past_masked_tokens():
    """Tool output in the middle changes nothing, whatever its value and reward are."""
    mask = torch.tensor([[True, True, False, True, True]])
    rewards = torch.tensor([[0.0, 0.0, math.nan, 0.0, 1.0]])
    values = torch.tensor([[0.1, 0.2, math.nan, 0.4, 0.5]])

    with_gap = gae(rewards, values, mask, gamma=0.99, lam=0.95)
    gapless = gae(rewards[mask][None], values[mask][None], torch.ones(1, 4, dtype=torch.bool), gamma=0.99, lam=0.95)

    for actual, expected in zip(with_gap, gapless, strict=True):
        assert_close(actual[mask][None], expected)
        assert_close(actual[~mask], torch.zeros(1))


def test_a_row_without_trainable_tokens_is_zero():
    nan = torch.full((1, 3), math.nan)

    advantages, returns = gae(nan, nan, torch.zeros(1, 3, dtype=torch.bool), gamma=1.0, lam=1.0)

    assert_close((advantages, returns), (torch.zeros(1, 3), torch.zeros(1, 3)))


@given(mask=st.lists(st.booleans(), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_gae_is_a_loop_over_the_trainable_tokens(mask, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 1, len(mask), generator=generator)
    advantage, next_value, expected = 0.0, 0.0, [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[0, t].item() + 0.9 * next_value - values[0, t].item()
            advantage, next_value = delta + 0.9 * 0.8 * advantage, values[0, t].item()
            expected[t] = advantage

    actual, _ = gae(rewards, values, torch.tensor([mask]), gamma=0.9, lam=0.8)

    assert_close(actual, torch.tensor([expected]))
