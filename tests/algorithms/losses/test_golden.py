"""Every policy loss against the golden table and hand-made numbers."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.golden import ADVANTAGES, LOG_PROBS, LOSS_MASK, OLD_LOG_PROBS
from verl_lightning.algorithms.losses.cispo import cispo_loss, clipped_weights
from verl_lightning.algorithms.losses.dppo import dppo_loss, inside_binary_kl, inside_total_variation
from verl_lightning.algorithms.losses.dro import dro_loss
from verl_lightning.algorithms.losses.geo_mean import geo_mean_loss
from verl_lightning.algorithms.losses.gspo import gspo_loss, sequence_log_ratio
from verl_lightning.algorithms.losses.reinforce import reinforce_loss
from verl_lightning.algorithms.losses.sapo import sapo_loss
from verl_lightning.algorithms.losses.vespo import vespo_loss
from verl_lightning.functional.masking import masked_mean
from verl_lightning.functional.normalizer import token_weights

GOLDEN = (LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, LOSS_MASK)
ONES = torch.ones(1, 3, dtype=torch.bool)
# Ratios .5, 1 and 1.5 with advantages 1, -1 and 2: the hand table of other projects.
HAND = (torch.tensor([[0.5, 1.0, 1.5]]).log() - 1, torch.full((1, 3), -1.0), torch.tensor([[1.0, -1.0, 2.0]]), ONES)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


@pytest.mark.parametrize(
    ("token_losses", "expected"),
    [
        (gspo_loss(*GOLDEN, clip_low=0.2, clip_high=0.2), 0.038315),
        (reinforce_loss(LOG_PROBS, ADVANTAGES, LOSS_MASK), -0.225524),
        (cispo_loss(*GOLDEN, clip_low=0.2, clip_high=0.2), -0.198602),
        (dro_loss(*GOLDEN, beta=0.1), -0.208951),
    ],
)
def test_token_mean_matches_the_golden_numbers(token_losses, expected):
    assert_close(masked_mean(token_losses, LOSS_MASK), torch.tensor(expected), atol=1e-5, rtol=0)


def test_sapo_matches_the_golden_number():
    loss = sapo_loss(*GOLDEN, temperature_positive=1.0, temperature_negative=1.05)
    weights = token_weights(LOSS_MASK, "seq-mean-token-mean", num_tokens=7, num_sequences=2, max_response_length=4)

    assert_close((loss * weights).sum(), torch.tensor(-0.108684), atol=1e-5, rtol=0)


def test_cispo_matches_the_hand_table():
    log_probs = torch.tensor([[-1.69315, -1.0, -0.59453]])

    loss = cispo_loss(log_probs, *HAND[1:], clip_low=0.2, clip_high=0.2)

    assert_close(loss, torch.tensor([[1.35452, -1.0, 1.42687]]), atol=1e-5, rtol=0)
    clipped = clipped_weights(*HAND, clip_low=0.2, clip_high=0.2)
    assert_close(clipped, torch.tensor([[0.0, 0.0, 1.0]]))  # the first is good, and below the band
    assert_close(clipped_weights(*HAND[:2], -HAND[2], ONES, clip_low=0.2, clip_high=0.2)[0, 0], torch.tensor(1.0))


def test_cispo_gives_the_gradient_of_clipped_tokens_too():
    log_probs = leaf(HAND[0])

    cispo_loss(log_probs, *HAND[1:], clip_low=0.2, clip_high=0.2).sum().backward()

    assert_close(log_probs.grad, torch.tensor([[-0.8, 1.0, -2.4]]))


def test_gspo_matches_the_hand_table():
    log_ratio = sequence_log_ratio(*HAND[:2], ONES)

    assert_close(log_ratio.exp(), torch.full((1, 3), 0.75 ** (1 / 3)))
    loss = gspo_loss(*HAND, clip_low=0.2, clip_high=0.2)
    assert_close(loss.mean(), torch.tensor(-0.6057), atol=1e-4, rtol=0)  # the table has four digits


def test_gspo_and_geo_mean_have_the_gradient_of_the_sequence_loss():
    """With "seq-mean-token-mean", the per-token form is the loss of the geometric mean of the ratios."""
    old, mask = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[True, True, False]])
    start, advantages = torch.tensor([[-0.9, -2.05, 7.0]]), torch.full((1, 3), -2.0)
    reference = leaf(start)
    expected = 2.0 * (reference - old)[:, :2].mean().exp()
    (expected_grad,) = torch.autograd.grad(expected, reference)

    for loss in (gspo_loss, geo_mean_loss):
        log_probs = leaf(start)
        actual = loss(log_probs, old, advantages, mask, clip_low=0.2, clip_high=0.2).sum() / 2
        actual.backward()
        assert_close(actual.detach(), expected.detach())
        assert_close(log_probs.grad, expected_grad)


@pytest.mark.parametrize(
    ("advantage", "clipped_sum", "expected_grad"),
    [(1.0, 0.4 - 1.0, [0.0, 1.0]), (-1.0, 1.0 - 0.3, [1.0, 0.0])],
)
def test_geo_mean_clips_the_side_that_overshoots(advantage, clipped_sum, expected_grad):
    log_probs, advantages = leaf(torch.tensor([[1.0, -1.0]])), torch.full((1, 2), advantage)

    loss = geo_mean_loss(log_probs, torch.zeros(1, 2), advantages, ONES[:, :2], clip_low=0.3, clip_high=0.4)
    loss.sum().backward()

    ratio = math.exp(clipped_sum / 2)
    assert_close(loss.detach(), torch.full((1, 2), -advantage * ratio))
    assert_close(log_probs.grad, -advantage * ratio * torch.tensor([expected_grad]))


def test_sapo_on_policy_is_the_plain_policy_gradient():
    log_probs = leaf(HAND[1])

    loss = sapo_loss(log_probs, *HAND[1:], temperature_positive=2.0, temperature_negative=3.0)
    loss.sum().backward()

    assert_close(loss.detach(), -HAND[2] * torch.tensor([[1.0, 2 / 3, 1.0]]))  # 4 / tau * 1 / 2
    assert_close(log_probs.grad, -HAND[2])


def test_vespo_weight_is_one_on_policy_and_fades_with_the_ratio_of_the_response():
    log_probs, old = leaf(torch.tensor([[-1.0, -1.0]])), torch.tensor([[-1.5, -1.0]])
    options = {"power_positive": 2.0, "decay_positive": 3.0, "power_negative": 3.0, "decay_negative": 2.0}

    vespo_loss(log_probs, old, torch.ones(1, 2), ONES[:, :2], **options).sum().backward()

    ratio = math.exp(0.5)
    assert_close(log_probs.grad, torch.full((1, 2), -(ratio**2) * math.exp(3 * (1 - ratio))))
    loss = vespo_loss(old, old, -torch.ones(1, 2), ONES[:, :2], **options)
    assert_close(loss, old)


@pytest.mark.parametrize(
    ("before", "now", "advantage", "is_inside"),
    [
        (0.5, 0.6, 1.0, True),
        (0.5, 0.7, 1.0, False),  # won more than .15
        (0.5, 0.3, 1.0, True),  # lost, though good
        (0.5, 0.3, -1.0, False),  # lost more than .15
        (0.001, 0.1, 1.0, True),  # a ratio of 100, but little probability
    ],
)
def test_dppo_tv_bounds_the_change_of_probability(before, now, advantage, is_inside):
    log_probs, old = leaf(torch.tensor([[now]]).log()), torch.tensor([[before]]).log()
    one = torch.ones(1, 1)

    inside = inside_total_variation(log_probs, old, advantage * one, one.bool(), bound_low=0.15, bound_high=0.15)
    loss = dppo_loss(log_probs, old, advantage * one, inside, max_ratio=20.0)
    loss.sum().backward()

    ratio = min(now / before, 20.0)
    assert_close(loss.detach(), -advantage * ratio * math.log(now) * is_inside * one)
    assert_close(log_probs.grad, -advantage * ratio * is_inside * one)


@pytest.mark.parametrize(
    ("before", "now", "advantage", "is_inside"),
    [
        (0.99, 0.75, -1.0, False),  # .99 log(.99/.75) + .01 log(.01/.25) = .2427
        (0.99, 0.75, 1.0, True),  # moving back
        (0.5, 0.6, 1.0, True),  # .5 log(.5/.6) + .5 log(.5/.4) = .0204
        (0.5, 0.7, 1.0, False),  # .5 log(.5/.7) + .5 log(.5/.3) = .0872
        (0.5, 1.0, 1.0, False),  # certain: finite, and outside
    ],
)
def test_dppo_kl_bounds_the_binary_divergence(before, now, advantage, is_inside):
    log_probs, old = torch.tensor([[now]]).log(), torch.tensor([[before]]).log()
    one = torch.ones(1, 1)

    inside = inside_binary_kl(log_probs, old, advantage * one, one.bool(), bound_low=0.05, bound_high=0.05)

    assert inside.item() == is_inside


def test_dro_pulls_back_to_the_old_policy():
    log_probs = leaf(torch.tensor([[-1.0]]))
    one = torch.ones(1, 1)

    dro_loss(log_probs, torch.tensor([[-1.5]]), one, one.bool(), beta=0.4).sum().backward()

    assert_close(log_probs.grad, (-1 + 0.4 * 0.5) * one)
