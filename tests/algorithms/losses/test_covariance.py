"""Losses that select tokens by covariance: golden number, which tokens, and how many."""

import math

import torch
from torch.testing import assert_close

from tests.golden import ADVANTAGES, LOG_PROBS, LOSS_MASK, OLD_LOG_PROBS
from verl_lightning.algorithms.losses.clip_cov import clip_cov_loss
from verl_lightning.algorithms.losses.covariance import (
    CovarianceSelection,
    content_noise,
    is_selected,
    select_at_random,
    select_top,
)
from verl_lightning.algorithms.losses.kl_cov import kl_cov_loss
from verl_lightning.functional.masking import masked_mean

IDS = torch.arange(8).view(2, 4)


def kl_cov(selection: CovarianceSelection, selected_by: torch.Tensor) -> torch.Tensor:
    selected = is_selected(selection, selected_by, ADVANTAGES, IDS, LOSS_MASK)
    return kl_cov_loss(LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, selected, LOSS_MASK, coef=0.1)


def test_kl_cov_matches_the_golden_number():
    """verl selects by the present log-probs: the one token of .1 with advantage -1."""
    selection = select_top(LOG_PROBS[LOSS_MASK], ADVANTAGES[LOSS_MASK], fraction=2e-4)

    loss = masked_mean(kl_cov(selection, LOG_PROBS), LOSS_MASK)

    assert_close(loss, torch.tensor(0.091233), atol=1e-5, rtol=0)


def test_differs_from_verl_selecting_by_old_log_probs():
    """Before the update the token of .3 stands out, which the update then left alone: no penalty."""
    selection = select_top(OLD_LOG_PROBS[LOSS_MASK], ADVANTAGES[LOSS_MASK], fraction=2e-4)

    selected = is_selected(selection, OLD_LOG_PROBS, ADVANTAGES, IDS, LOSS_MASK)

    assert selected.nonzero().tolist() == [[1, 3]]
    assert_close(masked_mean(kl_cov(selection, OLD_LOG_PROBS), LOSS_MASK), torch.tensor(0.5 / 7))


def test_kl_cov_penalises_the_shift_of_selected_tokens():
    log_probs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    selected, ones = torch.tensor([[True, False]]), torch.ones(1, 2)

    kl_cov_loss(log_probs, torch.full((1, 2), -2.0), ones, selected, ones.bool(), coef=0.5).sum().backward()

    assert_close(log_probs.grad, torch.tensor([[-math.e + 0.5, -math.e]]))


def test_clip_cov_detaches_selected_tokens_and_keeps_their_value():
    log_probs = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    old, ones = torch.tensor([[-1.1, -1.1, -2.0]]), torch.ones(1, 3)

    loss = clip_cov_loss(
        log_probs, old, ones, torch.tensor([[True, False, False]]), ones.bool(), clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()

    assert_close(loss.detach(), torch.tensor([[-math.exp(0.1), -math.exp(0.1), -1.2]]))
    assert_close(log_probs.grad, torch.tensor([[0.0, -math.exp(0.1), 0.0]]))


def test_random_selection_takes_the_asked_share_from_the_band():
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(2, 100, 100, generator=generator)
    ids = torch.randint(0, 1000, (100, 120), generator=generator)
    mask = torch.ones(100, 100, dtype=torch.bool)

    selection = select_at_random(old.flatten(), advantages.flatten(), low=1.0, high=5.0, fraction=0.02)
    selected = is_selected(selection, old, advantages, ids, mask)

    covariance = ((old - old.mean()) * (advantages - advantages.mean()))[selected]
    assert covariance.min() > 1
    assert covariance.max() < 5
    assert 150 < selected.sum() < 250  # 200 on average, with a standard deviation of 13


def test_no_token_selects_nothing():
    nothing = torch.zeros(0)

    for selection in (
        select_top(nothing, nothing, fraction=0.5),
        select_at_random(nothing, nothing, low=-1.0, high=1.0, fraction=0.5),
    ):
        mask = torch.zeros(2, 4, dtype=torch.bool)
        assert not is_selected(selection, OLD_LOG_PROBS, ADVANTAGES, IDS, mask).any()


def test_noise_is_uniform_and_fixed_by_the_tokens_up_to_it():
    ids = torch.randint(0, 151_936, (64, 256), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(64, 256, dtype=torch.bool)

    noise = content_noise(ids, mask)

    shares = torch.histc(noise, bins=8, min=0, max=1) / noise.numel()
    assert_close(shares, torch.full((8,), 1 / 8), atol=0.01, rtol=0)  # four standard deviations
    assert_close(content_noise(ids[:, :100], mask[:, :100]), noise[:, :100])
    gap = torch.arange(256) % 3 != 1
    spread, spread_mask = torch.zeros(64, 400, dtype=torch.long), torch.zeros(64, 400, dtype=torch.bool)
    where = torch.arange(400)[torch.arange(400) % 3 != 1][:256]
    spread[:, where], spread_mask[:, where] = ids, True
    assert gap.any()
    assert_close(content_noise(spread, spread_mask)[:, where], noise)
