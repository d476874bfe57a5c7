"""PPO's clipped loss: its five regions, dual clip, clip-higher and golden numbers."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.golden import ADVANTAGES, LOG_PROBS, LOSS_MASK, OLD_LOG_PROBS
from verl_lightning.algorithms.losses.ppo_clip import clip_fractions, ppo_clip_loss
from verl_lightning.functional.kl import kl_k1
from verl_lightning.functional.masking import masked_mean


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "expected_grad"),
    [
        (1.0, 1.0, -1.0, -1.0),  # on-policy: the plain policy gradient
        (1.5, 1.0, -1.3, 0.0),  # gain capped at 1 + clip_high
        (0.5, 1.0, -0.5, -0.5),  # below the band but wanted: never clipped
        (1.5, -1.0, 1.5, 1.5),  # above the band and unwanted: never clipped
        (0.5, -1.0, 0.8, 0.0),  # capped at 1 - clip_low
        (10.0, -4.0, 12.0, 0.0),  # far above the band and unwanted: stopped by the dual clip
    ],
)
def test_ppo_clip_loss_takes_the_pessimistic_bound(ratio, advantage, expected_loss, expected_grad):
    """The loss and its gradient follow PPO eq. 7 in each of its five regions, and the dual clip beyond."""
    log_probs = torch.tensor([[ratio]]).log().requires_grad_()
    one, bounds = torch.ones(1, 1), {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}

    loss = ppo_clip_loss(log_probs, 0 * one, advantage * one, one.bool(), **bounds)
    loss.sum().backward()

    assert_close(loss.detach(), expected_loss * one)
    assert_close(log_probs.grad, expected_grad * one)
    clipped, dual_clipped = clip_fractions(log_probs, 0 * one, advantage * one, one.bool(), **bounds)
    assert (clipped + dual_clipped).item() == (expected_grad == 0)
    assert dual_clipped.item() == (ratio == 10)


@pytest.mark.parametrize(("clip_high", "expected"), [(0.2, 0.178571), (0.28, 0.167143)])
def test_ppo_clip_loss_matches_the_golden_numbers(clip_high, expected):
    loss = ppo_clip_loss(
        LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, LOSS_MASK, clip_low=0.2, clip_high=clip_high, dual_clip=3.0
    )

    assert_close(masked_mean(loss, LOSS_MASK), torch.tensor(expected), atol=1e-5, rtol=0)


def test_clip_fraction_and_kl_match_the_golden_numbers():
    clipped, dual_clipped = clip_fractions(
        LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, LOSS_MASK, clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )

    assert_close(masked_mean(clipped, LOSS_MASK), torch.tensor(2 / 7))
    assert_close(masked_mean(dual_clipped, LOSS_MASK), torch.tensor(0.0))
    ppo_kl = masked_mean(kl_k1(OLD_LOG_PROBS, LOG_PROBS, LOSS_MASK), LOSS_MASK)
    assert_close(ppo_kl, torch.tensor(0.172261), atol=1e-5, rtol=0)


def test_an_overflowing_ratio_keeps_loss_and_gradient_finite():
    log_probs = torch.tensor([[0.0, -500.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])

    loss = ppo_clip_loss(
        log_probs, torch.tensor([[-500.0, 0.0, 0.0]]), -torch.ones(1, 3), mask,
        clip_low=0.2, clip_high=0.2, dual_clip=math.inf,
    )  # fmt: skip
    loss.sum().backward()

    assert loss.isfinite().all()
    assert log_probs.grad.isfinite().all()
