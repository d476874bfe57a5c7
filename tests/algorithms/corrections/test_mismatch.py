"""Importance weights and rejection against hand-made numbers."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.golden import LOSS_MASK, OLD_LOG_PROBS
from verl_lightning.algorithms.corrections.icepop import icepop_weights
from verl_lightning.algorithms.corrections.rejection import keep_sequences, keep_tokens, sequence_max
from verl_lightning.algorithms.corrections.truncated_importance_sampling import truncated_weights
from verl_lightning.functional.masking import sequence_mean, sequence_sum
from verl_lightning.functional.mismatch import (
    effective_sample_size,
    mismatch_k2,
    mismatch_k3,
    mismatch_log_ratio,
    probability_error,
    sequence_importance_weights,
    token_importance_weights,
    weight_moments,
)

ROLLOUT_LOG_PROBS = torch.tensor([[0.5, 0.2, 0.3, 0.2], [0.6, 0.5, 0.8, 0.3]]).log()
LOG_RATIO = mismatch_log_ratio(OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, LOSS_MASK)


def sample_size(weights, mask):
    return effective_sample_size(weight_moments(weights, mask)).float()


def test_truncated_token_weights_match_the_golden_table():
    weights = truncated_weights(token_importance_weights(LOG_RATIO, LOSS_MASK), cap=2.0)

    assert_close(weights, torch.tensor([[1.0, 2, 1, 0], [1, 1, 0.5, 1]]))
    assert_close(sample_size(weights, LOSS_MASK), torch.tensor(0.86873), atol=1e-5, rtol=0)


def test_truncated_sequence_weights_match_the_golden_table():
    weights = truncated_weights(sequence_importance_weights(LOG_RATIO, LOSS_MASK), cap=2.0)

    assert_close(weights, torch.tensor([[2.0, 2, 2, 0], [0.5, 0.5, 0.5, 0.5]]))
    assert_close(sample_size(weights, LOSS_MASK), torch.tensor(0.7033), atol=1e-4, rtol=0)


def test_truncation_and_icepop_match_the_hand_tables():
    assert_close(truncated_weights(torch.tensor([[0.1, 1, 3]]), cap=2.0), torch.tensor([[0.1, 1, 2]]))
    banded = icepop_weights(torch.tensor([[-0.5, 2.5, -0.2]]).exp(), low=0.5, high=5.0)
    assert_close(banded, torch.tensor([[0.6065, 0, 0.8187]]), atol=1e-4, rtol=0)


def test_the_sequence_mask_drops_whole_responses():
    """The responses' ratios are 2 and 1/2; the mask keeps what is at most 1.5."""
    weights = icepop_weights(sequence_importance_weights(LOG_RATIO, LOSS_MASK), low=0.0, high=1.5)

    assert_close(weights, torch.tensor([[0.0, 0, 0, 0], [0.5, 0.5, 0.5, 0.5]]))


def test_impossible_tokens_do_not_make_nan():
    old = torch.tensor([[-1.0, -math.inf, -math.inf, math.nan]])
    rollout = torch.tensor([[-math.inf, -1.0, -math.inf, math.nan]])
    mask = torch.tensor([[True, True, True, False]])

    log_ratio = mismatch_log_ratio(old, rollout, mask)

    assert_close(log_ratio, torch.tensor([[20.0, -20.0, 0.0, 0.0]]))
    weights = sequence_importance_weights(log_ratio, mask)
    assert_close(weights, torch.tensor([[1.0, 1.0, 1.0, 0.0]]))


def test_divergences_match_their_formulas():
    log_ratio = torch.tensor([[0.5, -1.0]])

    assert_close(mismatch_k2(log_ratio), torch.tensor([[0.125, 0.5]]))
    assert_close(mismatch_k3(log_ratio), torch.tensor([[math.exp(0.5) - 1.5, math.exp(-1.0)]]))
    assert_close(probability_error(log_ratio), torch.tensor([[math.exp(0.5), math.e]]))


def test_k3_averages_to_the_divergence_of_engine_and_trainer():
    engine = torch.tensor([[0.3, -0.5, 1.0]]).softmax(-1)
    trainer = torch.tensor([[0.2, -0.1, 0.9]]).softmax(-1)

    mean = (engine * mismatch_k3(trainer.log() - engine.log())).sum()

    assert_close(mean, (engine * (engine / trainer).log()).sum())


def test_tokens_are_rejected_one_by_one():
    """The log-ratios are 0 but for log 2 and -log 2, whose k2 are .24."""
    k2 = mismatch_k2(LOG_RATIO)

    assert_close(keep_tokens(k2, LOSS_MASK, low=0.0, high=0.25), LOSS_MASK)
    kept = keep_tokens(k2, LOSS_MASK, low=0.0, high=0.2)
    assert_close(kept, torch.tensor([[True, False, True, False], [True, True, False, True]]))


@pytest.mark.parametrize(("statistic", "expected"), [(sequence_sum, [False, True]), (sequence_mean, [False, True])])
def test_responses_are_rejected_as_a_whole(statistic, expected):
    """Log-ratios add up to log 2 and log 1/2: only the second is at most 0."""
    kept = keep_sequences(statistic(LOG_RATIO, LOSS_MASK), LOSS_MASK, low=-1.0, high=0.0)

    assert_close(kept, LOSS_MASK & torch.tensor(expected).unsqueeze(-1))


def test_one_bad_token_rejects_its_response():
    worst = sequence_max(mismatch_k3(LOG_RATIO), LOSS_MASK)

    assert_close(worst, torch.tensor([1 - math.log(2), math.log(2) - 0.5]))


def test_nothing_left_gives_an_effective_sample_size_of_zero():
    size = sample_size(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool))

    assert_close(size, torch.tensor(0.0))


def test_the_effective_sample_size_of_two_ranks_is_that_of_their_tokens_together():
    """Weights 1 and 3 on different ranks, each of size 1 by itself: 4**2 / (2 * 10)."""
    ones = torch.ones(1, 1)
    moments = [weight_moments(weight * ones, ones.bool()) for weight in (1, 3)]

    assert_close(effective_sample_size(moments[0] + moments[1]).float(), torch.tensor(0.8))
