"""Rewards of any size that float32 holds give the same advantages, to scale."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from verl_lightning.algorithms.advantages.gdpo import gdpo_advantages
from verl_lightning.algorithms.advantages.gpg import gpg_advantages
from verl_lightning.algorithms.advantages.grpo import grpo_advantages
from verl_lightning.algorithms.advantages.grpo_passk import grpo_passk_advantages
from verl_lightning.algorithms.advantages.opo import opo_advantages
from verl_lightning.algorithms.advantages.remax import remax_advantages
from verl_lightning.algorithms.advantages.rloo import rloo_advantages
from verl_lightning.functional.masking import masked_mean, masked_variance, whiten
from verl_lightning.functional.value_loss import explained_variance, explained_variance_moments
from verl_lightning.metrics import spread

LARGEST = torch.finfo(torch.float32).max
REWARDS = torch.tensor([1.0, -1.0, 0.5, -0.5, -1.0, 1.0, 1.0, 0.0])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
VALID = torch.ones(8, dtype=torch.bool)
LENGTHS = torch.arange(1, 9)
SCALES = [1e-30, 1e20, 3e38, LARGEST]

OF_SCALE = {
    "dr_grpo": partial(grpo_advantages, normalize_by_std=False),
    "rloo": rloo_advantages,
    "opo": lambda rewards, groups, valid: opo_advantages(rewards, LENGTHS, groups, valid),
    "gpg": partial(gpg_advantages, nonzero_reward_share=0.5),
    "passk": partial(grpo_passk_advantages, normalize_by_std=False),
    "remax": lambda rewards, groups, valid: remax_advantages(
        rewards[:, None], -rewards, torch.ones(8, 1, dtype=torch.bool)
    )[:, 0],
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", OF_SCALE)
def test_advantages_in_units_of_reward_grow_with_them(name, scale):
    """Up to float32's largest number."""
    expected = OF_SCALE[name](REWARDS.double(), GROUPS, VALID) * scale

    actual = OF_SCALE[name](REWARDS * scale, GROUPS, VALID)

    assert actual.dtype == torch.float32
    assert_close(actual / scale, (expected.clamp(-LARGEST, LARGEST) / scale).float())


@pytest.mark.parametrize("scale", SCALES[1:])
@pytest.mark.parametrize(
    "estimate",
    [
        partial(grpo_advantages, normalize_by_std=True),
        partial(grpo_passk_advantages, normalize_by_std=True),
        lambda rewards, groups, valid: gdpo_advantages(
            torch.stack([rewards, -rewards / 2]), torch.tensor([1.0, 0.5]), groups, valid
        ),
    ],
)
def test_advantages_over_the_std_do_not_depend_on_the_scale(estimate, scale):
    expected = estimate(REWARDS * 1e6, GROUPS, VALID)  # beside which the 1e-6 under the line is nothing

    assert_close(estimate(REWARDS * scale, GROUPS, VALID), expected)


@pytest.mark.parametrize("scale", SCALES[1:])
def test_whitening_does_not_depend_on_the_scale(scale):
    assert_close(whiten(REWARDS * scale, VALID), whiten(REWARDS * 1e6, VALID))


def test_means_of_large_numbers_are_finite():
    rewards = torch.tensor([LARGEST, LARGEST, -LARGEST, LARGEST])

    assert_close(masked_mean(rewards, VALID[:4]), torch.tensor(LARGEST / 2))
    assert masked_variance(rewards, VALID[:4]) == LARGEST
    mean = spread("score", rewards)["score/mean"]
    assert float(mean.total / mean.weight) == pytest.approx(LARGEST / 2)


def test_large_returns_are_explained():
    values, returns = torch.tensor([[3e38, -3e38, 3e38]]), torch.tensor([[3e38, -3e38, -3e38]])

    explained = explained_variance(explained_variance_moments(values, returns, torch.ones(1, 3, dtype=torch.bool)))

    errors, total = 36 - 36 / 3, 27 - 9 / 3  # in units of 1e38 squared: returns are off by 0, 0 and 6
    assert float(explained) == pytest.approx(1 - errors / total)
