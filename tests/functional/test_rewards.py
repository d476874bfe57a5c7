"""Rewards land on the last trainable token."""

import math

import torch
from torch.testing import assert_close

from verl_lightning.functional.rewards import overlong_penalty, place_sequence_rewards, subtract_kl


def test_the_reward_lands_on_the_last_trainable_token():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()

    placed = place_sequence_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)

    assert_close(placed, torch.tensor([[0.0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 4]]))


def test_a_nan_reward_of_an_empty_response_goes_nowhere():
    placed = place_sequence_rewards(torch.tensor([math.nan]), torch.zeros(1, 3, dtype=torch.bool))

    assert_close(placed, torch.zeros(1, 3))


def test_overlong_penalty_grows_over_the_buffer():
    lengths = torch.tensor([10, 80, 90, 100, 120])

    penalty = overlong_penalty(lengths, max_length=100, buffer_length=20, factor=0.5)

    assert_close(penalty, torch.tensor([0.0, 0.0, -0.25, -0.5, -0.5]))


def test_kl_is_taken_off_each_trainable_token():
    rewards, kl = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[2.0, -1.0, math.nan]])

    actual = subtract_kl(rewards, kl, torch.tensor([[True, True, False]]), coef=0.1)

    assert_close(actual, torch.tensor([[-0.2, 1.1, 0.0]]))
