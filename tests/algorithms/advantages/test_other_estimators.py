"""The estimators beside GAE, GRPO and RLOO: golden numbers, edge cases and where we differ from verl on purpose."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.golden import ALL_VALID, GROUPS, MASK, REWARDS, SEQUENCE_REWARDS
from verl_lightning.algorithms.advantages.gdpo import gdpo_advantages
from verl_lightning.algorithms.advantages.gpg import gpg_advantages
from verl_lightning.algorithms.advantages.grpo import grpo_advantages
from verl_lightning.algorithms.advantages.grpo_passk import grpo_passk_advantages
from verl_lightning.algorithms.advantages.opo import opo_advantages
from verl_lightning.algorithms.advantages.remax import remax_advantages
from verl_lightning.functional.masking import whiten
from verl_lightning.functional.returns import discounted_returns


def opo(rewards, groups, valid):
    return opo_advantages(rewards, MASK.sum(-1)[: len(rewards)], groups, valid)


def gpg(rewards, groups, valid):
    return gpg_advantages(rewards, groups, valid, nonzero_reward_share=0.75)


def passk(rewards, groups, valid):
    return grpo_passk_advantages(rewards, groups, valid, normalize_by_std=True)


def gdpo(rewards, groups, valid):
    return gdpo_advantages(torch.stack([rewards, 3 * rewards]), torch.tensor([0.5, 0.25]), groups, valid)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (opo, [0.571429, -0.428571, -1.0, 0.5]),
        (gpg, [0.666667, -0.666667, -1.0, 1.0]),
        (passk, [1.414212, 0.0, 0.0, 1.414212]),
        (gdpo, [0.530330, -0.530330, -0.530330, 0.530330]),  # 3/4 of GRPO's 1 / sqrt(2)
    ],
)
def test_estimators_match_the_golden_table(estimator, expected):
    assert_close(estimator(SEQUENCE_REWARDS, GROUPS, ALL_VALID), torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", [opo, gpg, passk, gdpo])
def test_invalid_samples_and_groups_without_signal_get_exactly_zero(estimator):
    rewards = torch.tensor([1.0, math.nan, 0.7, 0.7])
    valid = torch.tensor([True, False, True, True])

    assert torch.equal(estimator(rewards, torch.tensor([0, 0, 1, 1]), valid), torch.zeros(4))


@pytest.mark.parametrize("estimator", [opo, gpg, passk, gdpo])
def test_a_single_sample_gets_zero(estimator):
    assert torch.equal(estimator(torch.ones(1), torch.zeros(1, dtype=torch.long), ALL_VALID[:1]), torch.zeros(1))


def test_reinforce_plus_plus_matches_the_golden_table():
    advantages = whiten(discounted_returns(REWARDS, MASK, discount=0.9), MASK)

    expected = [
        [-0.000845, 0.122717, 0.260007, 0],
        [-1.112897, -1.112897, -1.112897, -1.112897],
        [-0.49509, -0.426445, 0, 0],
        [0.888797, 1.111208, 1.35833, 1.632911],
    ]
    assert_close(advantages, torch.tensor(expected), atol=1e-5, rtol=0)


def test_discounted_returns_of_three_rewards():
    returns = discounted_returns(torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3, dtype=torch.bool), discount=0.5)

    assert_close(returns, torch.tensor([[2.75, 3.5, 3.0]]))


def test_differs_from_verl_discounting_over_tool_output():
    """Tool output costs no discount: the return is that of the response without it."""
    mask = torch.tensor([[True, False, False, True]])

    returns = discounted_returns(torch.tensor([[0.0, math.nan, 9.0, 1.0]]), mask, discount=0.5)

    assert_close(returns, torch.tensor([[0.5, 0.0, 0.0, 1.0]]))


def test_reinforce_plus_plus_baseline_matches_the_golden_table():
    centred = grpo_advantages(SEQUENCE_REWARDS, GROUPS, ALL_VALID, normalize_by_std=False)

    whitened = whiten(torch.where(MASK, centred.unsqueeze(-1), 0.0), MASK)

    expected = torch.tensor([0.652299, -0.889499, -1.274949, 1.037749]).unsqueeze(-1)
    assert_close(whitened, torch.where(MASK, expected, 0.0), atol=1e-5, rtol=0)


def test_remax_takes_the_greedy_reward_off_the_reward_to_go():
    advantages = remax_advantages(REWARDS, torch.tensor([0.5, 0.5, 0.25, 1.0]), MASK)

    assert_close(advantages[:, 0], torch.tensor([0.5, -0.5, 0.25, 1.0]))
    assert_close(advantages, torch.where(MASK, advantages[:, :1], 0.0))


def test_remax_counts_only_the_rewards_from_a_token_on():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])

    advantages = remax_advantages(rewards, torch.tensor([3.0]), torch.ones(1, 3, dtype=torch.bool))

    assert_close(advantages, torch.tensor([[4.0, 3.0, 1.0]]))


def test_passk_of_two_equal_best_responses_is_zero():
    actual = passk(torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0]), ALL_VALID)

    assert_close(actual, torch.zeros(4))


def test_gpg_without_any_reward_is_zero_and_finite():
    actual = gpg_advantages(torch.zeros(4), GROUPS, ALL_VALID, nonzero_reward_share=torch.tensor(0.0))

    assert_close(actual, torch.zeros(4))


def test_gdpo_leaves_a_response_out_of_a_reward_that_does_not_apply():
    components = torch.tensor([[1.0, 0.0, math.nan], [2.0, 2.0, 5.0]])
    valid = torch.ones(3, dtype=torch.bool)

    actual = gdpo_advantages(components, torch.ones(2), torch.zeros(3, dtype=torch.long), valid)

    second = torch.tensor([-1.0, -1.0, 2.0]) / math.sqrt(3)
    assert_close(actual, torch.tensor([1.0, -1.0, 0.0]) / math.sqrt(2) + second, atol=1e-5, rtol=0)
