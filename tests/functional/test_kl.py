"""KL estimators against hand-made numbers and an exact expectation over three tokens."""

import math

import pytest
import torch
from torch.testing import assert_close

from verl_lightning.functional import kl

LOG_PROBS = torch.tensor([[-1.0, -2.0, -30.0]])
REF_LOG_PROBS = torch.tensor([[-1.5, -1.0, -1.0]])
ALL = torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (kl.kl_k1, [0.5, -1, -29]),
        (kl.kl_abs, [0.5, 1, 29]),
        (kl.kl_k2, [0.125, 0.5, 420.5]),
        (kl.kl_k3, [math.exp(-0.5) - 0.5, math.e - 2, 10]),
    ],
)
def test_estimators_match_their_formulas(estimator, expected):
    assert_close(estimator(LOG_PROBS, REF_LOG_PROBS, ALL), torch.tensor([expected]))


def test_k3_of_one_token_against_three_references():
    actual = kl.kl_k3(torch.full((1, 3), -1.0), torch.tensor([[0.0, -2.0, -15.0]]), ALL)

    assert_close(actual, torch.tensor([[math.e - 2, math.exp(-1.0), 10.0]]))


def test_k3_survives_a_reference_that_is_out_of_range():
    log_probs = torch.tensor([[-200.0, 0.0, -1.0]], requires_grad=True)

    value = kl.kl_k3(log_probs, torch.tensor([[0.0, -200.0, -1.0]]), ALL)
    value.sum().backward()

    assert_close(value.detach(), torch.tensor([[10.0, 10.0, 0.0]]))
    assert_close(log_probs.grad, torch.zeros(1, 3))


def expected_value_and_gradient(estimator) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of an estimator and of its gradient over tokens drawn from softmax(.3, -.5, 1)."""
    logits = torch.tensor([[0.3, -0.5, 1.0]], requires_grad=True)
    log_probs = logits.log_softmax(dim=-1)
    ref_log_probs = torch.tensor([[1.0, 0.2, -0.4]]).log_softmax(dim=-1)
    mean = (log_probs.exp().detach() * estimator(log_probs, ref_log_probs, ALL)).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (kl.kl_k1, [0.0, 0.0, 0.0]),
        (kl.kl_k3, [-0.30089, -0.13520, 0.43609]),
        (kl.kl_k2, [-0.35261, -0.15844, 0.51105]),
        (kl.straight_through(kl.kl_k1), [-0.35261, -0.15844, 0.51105]),
        (kl.straight_through(kl.kl_k3), [-0.35261, -0.15844, 0.51105]),
        (kl.straight_through(kl.kl_abs), [-0.35261, -0.15844, 0.51105]),
    ],
)
def test_only_the_k2_gradient_is_the_gradient_of_the_kl(estimator, expected):
    _, gradient = expected_value_and_gradient(estimator)

    assert_close(gradient, torch.tensor([expected]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "estimator", [kl.kl_k1, kl.kl_k3, kl.straight_through(kl.kl_k1), kl.straight_through(kl.kl_k3)]
)
def test_unbiased_estimators_average_to_the_kl(estimator):
    value, _ = expected_value_and_gradient(estimator)

    assert_close(value, torch.tensor(0.50720), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in dir(kl) if name.startswith("kl_")])
def test_nan_behind_the_mask_changes_nothing(name):
    mask = torch.tensor([[True, False, True]])
    log_probs = LOG_PROBS.masked_fill(~mask, math.nan).requires_grad_()

    value = getattr(kl, name)(log_probs, REF_LOG_PROBS, mask)
    value.sum().backward()

    clean = getattr(kl, name)(LOG_PROBS, REF_LOG_PROBS, ALL)
    assert_close(value.detach(), torch.where(mask, clean, 0.0))
    assert log_probs.grad[0, 1] == 0
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("coef", "measured", "num_samples", "horizon", "expected"),
    [
        (0.001, 0.2, 1024, 10000, 0.00102048),
        (0.2, 0.2, 10, 100, 0.204),
        (0.2, 0.0, 10, 100, 0.196),
        (0.2, 0.11, 10, 100, 0.202),
    ],
)
def test_adaptive_coefficient_moves_towards_its_target(coef, measured, num_samples, horizon, expected):
    actual = kl.adaptive_kl_coef(coef, measured, target=0.1, num_samples=num_samples, horizon=horizon)

    assert actual == pytest.approx(expected, rel=1e-6)
