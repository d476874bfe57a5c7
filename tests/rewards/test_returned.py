"""What counts as a reward, and what is said of everything else."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from verl_lightning.rewards.returned import RewardMistakeError, check_reward

LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (-LARGEST, -LARGEST),
        (Fraction(1, 2), 0.5),
        (Decimal("0.1"), 0.1),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([2], dtype=torch.bfloat16), 2.0),
        (None, None),
        ({"reward": None}, None),
    ],
)
def test_numbers_of_all_kinds_are_rewards(returned, reward):
    checked = check_reward(returned)

    assert checked == {"reward": reward, "components": {}, "unlogged": []}
    assert type(checked["reward"]) is type(reward)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (math.nan, "`reward` = nan"),
        (-math.inf, "`reward` = -inf"),
        (3.5e38, "`reward` = 3.5e+38"),
        (-1e300, "`reward` = -1e+300"),
        (10**39, f"`reward` = {10**39}"),
        (-(10**400), f"`reward` = -1{'0' * 198}..."),
        pytest.param(10**5000, "`reward` = a `int` that is too long to print", id="5000 digits"),
        (torch.tensor(math.nan), "`reward` = tensor(nan)"),
        ({"reward": 1.0, "length": math.nan}, "`length` = nan"),
        ({"reward": 1.0, "length": 10**400}, "`length` = 1000"),
    ],
)
def test_numbers_that_do_not_fit_are_errors(returned, shown):
    message = f"must return finite numbers of at most 3.4e38, the largest of float32, got {shown}"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_reward(returned)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ("1.0", "a number or None, got `reward` = '1.0'."),
        (1j, "a number or None, got `reward` = 1j."),
        ([1.0], "a number or None, got `reward` = [1.0]."),
        (torch.zeros(2), "a number or None, got `reward` = tensor([0., 0.])."),
        (np.zeros(2), "a number or None, got `reward` = array([0., 0.])."),
        ((n for n in "a"), "a number or None, got `reward` = <generator object"),
        ({"reward": "1"}, "a number or None, got `reward` = '1'."),
        ({"reward": {"score": 1.0}}, "a number or None, got `reward` = {'score': 1.0}."),
        ({"score": 1.0}, "must have the key `reward`, got ['score']."),
        ({}, "must have the key `reward`, got []."),
    ],
)
def test_what_is_no_reward_is_a_mistake(returned, shown):
    with pytest.raises(RewardMistakeError, match=re.escape(shown)):
        check_reward(returned)


def test_other_values_of_a_mapping_are_numbers_or_named():
    others = {"length": np.int64(3), "passed": True, "why": "units", "parts": {"a": 1.0}, "rank": None, 7: 1.0}

    checked = check_reward({"reward": 1.0} | others)

    assert checked["components"] == {"length": 3.0, "passed": 1.0, "7": 1.0}
    assert checked["unlogged"] == ["why", "parts"]
