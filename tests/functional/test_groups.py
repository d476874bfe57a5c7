"""Group-relative estimators: golden numbers, groups without signal, and left-out samples."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.golden import ALL_VALID, GROUPS, SEQUENCE_REWARDS
from verl_lightning.algorithms.advantages.grpo import grpo_advantages
from verl_lightning.algorithms.advantages.rloo import rloo_advantages
from verl_lightning.functional.groups import num_groups_without_signal


def grpo(rewards, groups, valid):
    return grpo_advantages(rewards, groups, valid, normalize_by_std=True)


def dr_grpo(rewards, groups, valid):
    return grpo_advantages(rewards, groups, valid, normalize_by_std=False)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (grpo, [0.707106, -0.707106, -0.707106, 0.707106]),
        (dr_grpo, [0.5, -0.5, -0.75, 0.75]),
        (rloo_advantages, [1, -1, -1.5, 1.5]),
    ],
)
def test_estimators_match_the_golden_table(estimator, expected):
    actual = estimator(SEQUENCE_REWARDS, GROUPS, ALL_VALID)

    assert_close(actual, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=0)


def test_rloo_of_groups_of_two_two_and_one():
    groups = torch.tensor([0, 0, 5, 5, 9])

    actual = rloo_advantages(torch.tensor([6.0, 3, 9, 12, 1]), groups, torch.ones(5, dtype=torch.bool))

    assert_close(actual, torch.tensor([3.0, -3, -3, 3, 0]))


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo_advantages])
def test_groups_without_signal_get_exactly_zero(estimator):
    """A group of one, equal rewards, and rewards that differ by float noise teach nothing."""
    rewards = torch.tensor([5.0, 0.3, 0.3, 0.3, 0.3, math.nextafter(0.3, 1.0) + 2e-8])
    groups = torch.tensor([0, 1, 1, 1, 2, 2])

    actual = estimator(rewards, groups, torch.ones(6, dtype=torch.bool))

    assert torch.equal(actual, torch.zeros(6))


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo_advantages])
def test_differs_from_verl_for_a_group_of_one(estimator):
    """verl lets the raw reward through where there is nothing to compare with; here it teaches nothing."""
    assert estimator(torch.tensor([5.0]), torch.tensor([0]), torch.tensor([True])) == 0


def test_differs_from_verl_for_rewards_that_differ_by_float_noise():
    """verl divides noise by its own std, which makes advantages of order 1 out of nothing."""
    rewards = torch.tensor([100.0, math.nextafter(100.0, 101.0) + 1e-5])

    assert (rewards[0] != rewards[1]).item()
    assert not grpo(rewards, torch.tensor([0, 0]), torch.ones(2, dtype=torch.bool)).any()


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo_advantages])
def test_invalid_samples_leave_their_group(estimator):
    rewards, groups = torch.tensor([1.0, math.nan, 3.0, 8.0]), torch.tensor([0, 0, 0, 1])
    valid = torch.tensor([True, False, True, True])

    actual = estimator(rewards, groups, valid)

    alone = estimator(rewards[valid], groups[valid], torch.ones(3, dtype=torch.bool))
    assert_close(actual[valid], alone)
    assert actual[1] == 0


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo_advantages])
def test_the_order_of_the_samples_does_not_matter(estimator):
    order = torch.tensor([2, 0, 3, 1])

    shuffled = estimator(SEQUENCE_REWARDS[order], GROUPS[order], ALL_VALID)

    assert_close(shuffled, estimator(SEQUENCE_REWARDS, GROUPS, ALL_VALID)[order])


def test_small_but_real_differences_are_signal():
    rewards = torch.tensor([0.0, 1e-3])

    actual = grpo(rewards, torch.tensor([0, 0]), torch.ones(2, dtype=torch.bool))

    assert_close(actual, torch.tensor([-0.5, 0.5]) * 1e-3 / (1e-3 / math.sqrt(2) + 1e-6))


def test_groups_without_signal_are_counted():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, math.nan])
    groups = torch.tensor([0, 0, 1, 1, 2, 3])

    counts = num_groups_without_signal(rewards, groups, torch.tensor([True] * 5 + [False]))

    assert [count.item() for count in counts] == [2, 3]
