"""Advantages of turns against numbers worked out by hand, and against GAE and GRPO where a turn is all there is."""

import pytest
import torch
from torch.testing import assert_close

from tests.golden import MASK, REWARDS, VALUES
from verl_lightning.algorithms.advantages.gae import gae
from verl_lightning.algorithms.advantages.grpo import grpo_advantages
from verl_lightning.algorithms.advantages.turn_discount import turn_advantages
from verl_lightning.algorithms.advantages.turn_gae import turn_gae
from verl_lightning.functional.turns import over_turns, turn_ends, turn_numbers, turn_starts

# Two turns of two tokens, with a reply of one token between them; then a turn of one and one of two.
TURNS = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]]).bool()
EARNED = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0], [4.0, 0.0, 0.0, 8.0, 0.0]])
NAN = torch.nan


def test_a_turn_is_a_run_of_the_policys_tokens():
    assert turn_starts(TURNS).int().tolist() == [[1, 0, 0, 1, 0], [1, 0, 1, 0, 0]]
    assert turn_ends(TURNS).int().tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]
    assert turn_numbers(TURNS).tolist() == [[1, 1, 1, 2, 2], [1, 1, 2, 2, 2]]
    assert over_turns(EARNED, TURNS).tolist() == [[0, 0, 0, 0, 0], [4, 0, 0, 0, 0]]


def test_gae_over_turns_is_worked_out_by_hand():
    values = torch.tensor([[0.5, 9.0, NAN, 1.0, 9.0], [2.0, NAN, 3.0, 9.0, NAN]])

    advantages, returns = turn_gae(EARNED, values, TURNS, gamma=0.5, lam=0.5)

    # Last turns: 2 - 1 = 1 and 8 - 3 = 5. First: 1 + .5 * 1 - .5 + .25 * 1 = 1.25 and 4 + .5 * 3 - 2 + .25 * 5 = 4.75.
    assert_close(advantages, torch.tensor([[1.25, 1.25, 0, 1, 1], [4.75, 0, 5, 5, 0]]))
    assert_close(returns, torch.tensor([[1.75, 1.75, 0, 2, 2], [6.75, 0, 8, 8, 0]]))


def test_gae_of_one_turn_is_that_of_its_first_token():
    advantages, _ = turn_gae(REWARDS, VALUES, MASK, gamma=0.9, lam=0.9)

    expected, _ = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=1.0)
    assert_close(advantages[:, 0], expected[:, 0])


def test_turns_are_compared_with_the_same_turn_of_others():
    advantages = turn_advantages(EARNED, TURNS, torch.tensor([7, 7]), gamma=0.5, normalize_by_std=False)

    # From the first turns on: 1 + .5 * 2 = 2 and 4 + .5 * 8 = 8; from the second: 2 and 8.
    assert_close(advantages, torch.tensor([[-3.0, -3, 0, -3, -3], [3, 0, 3, 3, 0]]))


def test_a_turn_that_no_other_episode_has_is_neither_good_nor_bad():
    mask = torch.tensor([[1, 0, 1, 0, 1], [1, 0, 1, 0, 0]]).bool()
    rewards = torch.tensor([[1.0, NAN, 2.0, NAN, 4.0], [0.0, NAN, 1.0, NAN, NAN]]).where(mask, 0.0)

    advantages = turn_advantages(rewards, mask, torch.tensor([0, 0]), gamma=1.0, normalize_by_std=True)

    assert_close(advantages, torch.tensor([[1.0, 0, 1, 0, 0], [-1, 0, -1, 0, 0]]) / 2**0.5, atol=1e-5, rtol=0)


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_one_turn_is_grpo(normalize_by_std):
    groups, valid = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)

    advantages = turn_advantages(REWARDS, MASK, groups, gamma=0.3, normalize_by_std=normalize_by_std)

    expected = grpo_advantages(REWARDS.sum(-1), groups, valid, normalize_by_std=normalize_by_std)
    assert_close(advantages, expected[:, None] * MASK)
