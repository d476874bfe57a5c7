"""Preference losses: numbers computed by hand, their gradients, and options that are refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch.testing import assert_close

from verl_lightning.algorithms.preferences import METHODS
from verl_lightning.algorithms.preferences.base import Responses
from verl_lightning.algorithms.preferences.dpo import DPO
from verl_lightning.algorithms.preferences.hinge import HingeDPO
from verl_lightning.algorithms.preferences.ipo import IPO
from verl_lightning.algorithms.preferences.kto import KTO
from verl_lightning.algorithms.preferences.orpo import ORPO, log_odds
from verl_lightning.algorithms.preferences.robust import RobustDPO
from verl_lightning.algorithms.preferences.simpo import SimPO

PAIR = [-1.0, -2.0]  # log-probs of the chosen and of the rejected response
REFERENCE = [-1.5, -1.0]  # log-ratios .5 and -1: with beta .5 the rewards differ by .75


def responses(log_probs=PAIR, reference=REFERENCE, lengths=(2, 4), **rest) -> Responses:
    return Responses(
        log_probs=torch.tensor(log_probs, requires_grad=True),
        ref_log_probs=torch.tensor(reference),
        lengths=torch.tensor(lengths),
        **rest,
    )


def softplus(x: float) -> float:
    """``-log(sigmoid(-x))``."""
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("loss", "expected", "by_chosen", "by_rejected"),
    [
        (DPO(beta=0.5), softplus(-0.75), -0.5 * sigmoid(-0.75), 0.5 * sigmoid(-0.75)),
        (
            DPO(beta=0.5, label_smoothing=0.1),
            0.9 * softplus(-0.75) + 0.1 * softplus(0.75),
            -0.5 * (0.9 * sigmoid(-0.75) - 0.1 * sigmoid(0.75)),
            0.5 * (0.9 * sigmoid(-0.75) - 0.1 * sigmoid(0.75)),
        ),
        (
            RobustDPO(beta=0.5, label_smoothing=0.1),
            (0.9 * softplus(-0.75) - 0.1 * softplus(0.75)) / 0.8,
            -0.5 * (0.9 * sigmoid(-0.75) + 0.1 * sigmoid(0.75)) / 0.8,
            0.5 * (0.9 * sigmoid(-0.75) + 0.1 * sigmoid(0.75)) / 0.8,
        ),
        (HingeDPO(beta=0.5), 0.25, -0.5, 0.5),
        (HingeDPO(beta=1.0), 0.0, 0.0, 0.0),  # told apart by 1.5
        (IPO(beta=0.5), 0.25, 2 * -0.5 / 2, -2 * -0.5 / 4),  # mean ratios .25 and -.25, half a nat from the margin of 1
        (SimPO(beta=2.0, gamma=1.0), softplus(1.0), -2.0 * sigmoid(1.0) / 2, 2.0 * sigmoid(1.0) / 4),  # equal means
    ],
)
def test_pair_losses_and_gradients_are_those_computed_by_hand(loss, expected, by_chosen, by_rejected):
    given = responses()

    (value,), metrics = loss(given)
    value.backward()

    assert_close(value.detach(), torch.tensor(expected))
    assert_close(given.log_probs.grad, torch.tensor([by_chosen, by_rejected]))
    assert metrics == {}


@pytest.mark.parametrize(
    ("loss", "expected"), [(DPO(), 0.693147), (RobustDPO(), 0.693147), (HingeDPO(), 1.0), (IPO(beta=0.5), 1.0)]
)
def test_where_policy_and_reference_are_equal_a_loss_is_its_constant(loss, expected):
    (value,), _ = loss(responses(reference=PAIR))
    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_orpo_is_sft_and_the_odds_ratio():
    """Mean probabilities 1/2 and 1/4: odds 1 and 1/3, a ratio of 3."""
    given = responses([2 * math.log(0.5), 4 * math.log(0.25)])

    (value,), metrics = ORPO(beta=0.1)(given)

    odds = math.log(4 / 3)  # -log(sigmoid(log 3))
    assert value.item() == pytest.approx(math.log(2) + 0.1 * odds, rel=1e-6)
    assert {name: round(part.item(), 5) for name, part in metrics.items()} == {
        "nll_loss": 0.69315,
        "log_odds_chosen": 1.09861,
        "log_odds_ratio": -0.28768,
    }


@pytest.mark.parametrize("probability", [1e-6, 0.1, 0.4, 0.49999, 0.50001, 0.9, 0.999])
def test_log_odds_keep_their_digits_and_their_gradient(probability):
    log_prob = torch.tensor([math.log(probability)], requires_grad=True)
    odds = log_odds(log_prob)
    odds.sum().backward()
    assert odds.item() == pytest.approx(math.log(probability / (1 - probability)), rel=2e-4, abs=1e-5)
    assert log_prob.grad.item() == pytest.approx(1 / (1 - probability), rel=1e-3)


def test_a_certain_response_has_finite_odds():
    log_prob = torch.zeros(1, requires_grad=True)
    log_odds(log_prob).sum().backward()
    assert log_prob.grad.isfinite().all()


def test_kto_weighs_gains_and_losses_against_the_kl():
    given = responses(is_desirable=torch.tensor([True, False]), kl=torch.tensor([0.2, 0.2]))

    values, metrics = KTO(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)(given)
    values.sum().backward()

    gain, loss = sigmoid(0.5 * (0.5 - 0.2)), sigmoid(0.5 * (0.2 + 1.0))
    assert_close(values.detach(), torch.tensor([2 * (1 - gain), 3 * (1 - loss)]))
    assert_close(given.log_probs.grad, torch.tensor([-2 * 0.5 * gain * (1 - gain), 3 * 0.5 * loss * (1 - loss)]))
    assert_close(metrics["kl"], torch.tensor([0.2, 0.2]))


def test_rewards_are_what_a_loss_compares():
    assert_close(DPO(beta=0.5).rewards(responses()).detach(), torch.tensor([0.25, -0.5]))
    assert_close(SimPO(beta=2.0).rewards(responses()).detach(), torch.tensor([-1.0, -1.0]))


@pytest.mark.parametrize("method", METHODS.values())
def test_options_out_of_range_are_refused_by_name(method):
    for name in inspect.signature(method).parameters:
        with pytest.raises(ValueError, match=f"`model.loss.{name}` must"):
            method(**{name: -0.1})


@pytest.mark.parametrize("method", [DPO, RobustDPO])
def test_labels_that_say_nothing_are_refused(method):
    with pytest.raises(ValueError, match=r"`model.loss.label_smoothing` must be from 0 to below 0.5, got 0.5"):
        method(label_smoothing=0.5)
