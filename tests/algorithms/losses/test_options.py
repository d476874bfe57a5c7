"""The policy losses that YAML names: golden numbers through the options, metrics, and what they refuse."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close

from tests.golden import ADVANTAGES, LOG_PROBS, LOSS_MASK, OLD_LOG_PROBS
from verl_lightning.algorithms.losses.base import PolicyLoss
from verl_lightning.algorithms.losses.cispo import CISPO
from verl_lightning.algorithms.losses.clip_cov import ClipCov
from verl_lightning.algorithms.losses.dppo import DPPOKL, DPPOTV
from verl_lightning.algorithms.losses.dro import DRO
from verl_lightning.algorithms.losses.geo_mean import GeoMean
from verl_lightning.algorithms.losses.gspo import GSPO
from verl_lightning.algorithms.losses.kl_cov import KLCov
from verl_lightning.algorithms.losses.ppo_clip import PPOClip
from verl_lightning.algorithms.losses.reinforce import Reinforce
from verl_lightning.algorithms.losses.sapo import SAPO
from verl_lightning.algorithms.losses.vespo import VESPO
from verl_lightning.functional.masking import masked_mean
from verl_lightning.types import Experience

BATCH = Experience(
    input_ids=torch.arange(12).view(2, 6),
    attention_mask=torch.ones(2, 6, dtype=torch.bool),
    response_mask=LOSS_MASK,
    rollout_log_probs=OLD_LOG_PROBS,
    old_log_probs=OLD_LOG_PROBS,
    advantages=ADVANTAGES,
)
STEP = (OLD_LOG_PROBS[LOSS_MASK], ADVANTAGES[LOSS_MASK])
# With its loss under "token-mean" and its clip fraction; hand-made where MATH.md has none.
LOSSES: list[tuple[PolicyLoss, float, float | None]] = [
    (PPOClip(), 0.178571, 2 / 7),
    (PPOClip(clip_high=0.28), 0.167143, 2 / 7),
    (GSPO(clip_low=0.2, clip_high=0.2), 0.038315, 4 / 7),
    (Reinforce(), -0.225524, None),
    (CISPO(), -0.198602, 2 / 7),  # of four clipped weights those whose advantage has the clip's sign
    (DRO(beta=0.1), -0.208951, None),
    (KLCov(coef=0.1).for_step(*STEP), 0.5 / 7, None),  # the penalised token has not moved
    (ClipCov().for_step(*STEP), 0.178571, 2 / 7),
    (GeoMean(clip_low=1.0, clip_high=0.34), 0.054839, 1 / 7),
]


@pytest.mark.parametrize(("loss", "expected", "clip_fraction"), LOSSES)
def test_losses_and_metrics_match_the_golden_numbers(loss, expected, clip_fraction):
    token_losses, metrics = loss(LOG_PROBS, BATCH)

    assert_close(masked_mean(token_losses, LOSS_MASK), torch.tensor(expected), atol=1e-5, rtol=0)
    assert_close(masked_mean(metrics["actor/ppo_kl"], LOSS_MASK), torch.tensor(0.172261), atol=1e-5, rtol=0)
    assert ("actor/pg_clipfrac" in metrics) == (clip_fraction is not None)
    if clip_fraction is not None:
        assert_close(masked_mean(metrics["actor/pg_clipfrac"], LOSS_MASK), torch.tensor(clip_fraction))


EVERY_LOSS: list[PolicyLoss] = [
    PPOClip(),
    GSPO(),
    GeoMean(),
    CISPO(),
    Reinforce(),
    SAPO(),
    VESPO(),
    DRO(),
    DPPOTV(),
    DPPOKL(),
    ClipCov(),
    KLCov(),
]


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=lambda loss: type(loss).__name__)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss):
    """Before the first update all ratios are 1, nothing is clipped, and nothing has moved."""
    log_probs = OLD_LOG_PROBS.clone().requires_grad_()
    weight = torch.full_like(log_probs, 1 / 7)

    token_losses, metrics = loss.for_step(*STEP)(log_probs, BATCH)
    (token_losses * weight).sum().backward()

    spared = metrics.get("actor/cov_frac", torch.zeros(2, 4)).bool() & torch.tensor(isinstance(loss, ClipCov))
    expected = torch.where(LOSS_MASK & ~spared, -ADVANTAGES / 7, 0.0)
    assert_close(log_probs.grad, expected)
    assert_close(metrics["actor/ppo_kl"], torch.zeros(2, 4))
    for name in metrics.keys() & {"actor/pg_clipfrac", "actor/pg_clipfrac_lower"}:
        assert not metrics[name].any()


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=lambda loss: type(loss).__name__)
def test_nan_behind_the_mask_changes_neither_loss_nor_metrics(loss):
    def spoil(x: torch.Tensor) -> torch.Tensor:
        return torch.where(LOSS_MASK, x, math.nan)

    spoilt = dataclasses.replace(BATCH, old_log_probs=spoil(OLD_LOG_PROBS), advantages=spoil(ADVANTAGES))
    bound = loss.for_step(*STEP)

    actual, expected = bound(spoil(LOG_PROBS), spoilt), bound(LOG_PROBS, BATCH)

    assert_close(actual, expected)


def test_metrics_carry_no_gradient():
    for loss in EVERY_LOSS:
        _, metrics = loss.for_step(*STEP)(LOG_PROBS.clone().requires_grad_(), BATCH)
        assert not any(values.requires_grad for values in metrics.values())


def test_the_trust_regions_report_what_they_drop():
    """Of the three that move by more than .15, one good token rises, one bad one falls, and one bad one rises."""
    _, metrics = DPPOTV(bound_low=0.15, bound_high=0.15)(LOG_PROBS, BATCH)

    expected = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0]])  # a bad token that rises is free to fall
    assert_close(metrics["actor/pg_clipfrac"], expected)


@pytest.mark.parametrize("loss", [DPPOTV(bound_high=1.0, max_ratio=1.2), DPPOKL(bound_high=9.0, max_ratio=1.2)])
def test_the_trust_regions_cap_the_ratio(loss):
    token_losses, _ = loss(LOG_PROBS, BATCH)

    assert_close(token_losses[0, 0], torch.tensor(-1.2 * math.log(0.7)))  # a ratio of 1.4 under advantage 1


def test_for_step_leaves_the_configured_loss_alone():
    """A selection belongs to its optimizer step and never leaks into the next."""
    loss = KLCov()

    assert loss.for_step(*STEP) is not loss
    with pytest.raises(RuntimeError, match=r"Call `for_step\(old_log_probs, advantages\)`"):
        loss(LOG_PROBS, BATCH)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOClip(clip_low=1.0), r"`model.policy_loss.clip_low` must be from 0 to below 1, got 1\.0"),
        (lambda: PPOClip(clip_high=-0.1), r"`model.policy_loss.clip_high` must not be negative, got -0\.1"),
        (
            lambda: PPOClip(dual_clip=1.0),
            r"`model.policy_loss.dual_clip` must be above 1, got 1\.0; `\.inf` turns",
        ),
        (lambda: CISPO(clip_low=1.1), r"`model.policy_loss.clip_low` must be from 0 to 1, got 1\.1"),
        (lambda: GeoMean(clip_low=-1.0), r"`model.policy_loss.clip_low` must not be negative"),
        (lambda: SAPO(temperature_positive=0.0), r"`model.policy_loss.temperature_positive` must be above 0"),
        (lambda: VESPO(decay_negative=0.0), r"`model.policy_loss.decay_negative` must be above 0"),
        (lambda: DRO(beta=-1.0), r"`model.policy_loss.beta` must not be negative"),
        (lambda: DPPOTV(max_ratio=1.0), r"`model.policy_loss.max_ratio` must be above 1"),
        (lambda: DPPOKL(bound_high=-1.0), r"`model.policy_loss.bound_high` must not be negative"),
        (lambda: ClipCov(covariance_low=5.0), r"`model.policy_loss.covariance_low` must be below `covariance_high`"),
        (lambda: KLCov(fraction=0.0), r"`model.policy_loss.fraction` must be above 0 and at most 1"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
