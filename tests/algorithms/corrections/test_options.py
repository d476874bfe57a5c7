"""Corrections for an engine that differs from the trainer: golden tables through the options, and combinations."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from tests.golden import LOSS_MASK, OLD_LOG_PROBS
from verl_lightning.algorithms.corrections.base import correct_rollout
from verl_lightning.algorithms.corrections.icepop import IcePop
from verl_lightning.algorithms.corrections.rejection import Rejection
from verl_lightning.algorithms.corrections.sequence_mask import SequenceMask
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.functional.masking import masked_mean

# Log-ratios: 0, log 2, 0 in the first response; 0, 0, -log 2, 0 in the second.
ROLLOUT_LOG_PROBS = torch.tensor([[0.5, 0.2, 0.3, math.nan], [0.6, 0.5, 0.8, 0.3]]).log()
ALL, NONE = [[1.0, 1, 1, 0], [1, 1, 1, 1]], [[0.0] * 4] * 2


@pytest.mark.parametrize(
    ("correction", "weights", "num_kept"),
    [
        (TruncatedImportanceSampling(), [[1.0, 2, 1, 0], [1, 1, 0.5, 1]], 7),
        (TruncatedImportanceSampling(cap=1.5), [[1.0, 1.5, 1, 0], [1, 1, 0.5, 1]], 7),
        (TruncatedImportanceSampling(level="sequence"), [[2.0, 2, 2, 0], [0.5, 0.5, 0.5, 0.5]], 7),
        (IcePop(low=0.6, high=5.0), [[1.0, 2, 1, 0], [1, 1, 0, 1]], 7),
        (SequenceMask(cap=1.5), [[0.0, 0, 0, 0], [0.5, 0.5, 0.5, 0.5]], 7),
        (Rejection("k1", "token", low=-0.5, high=0.5), [[1.0, 0, 1, 0], [1, 1, 0, 1]], 5),
        (Rejection("k1", "sequence-sum", low=-1.0, high=0.5), [[0.0, 0, 0, 0], [1, 1, 1, 1]], 4),
        (Rejection("k1", "sequence-mean", low=-0.2, high=0.2), [[0.0, 0, 0, 0], [1, 1, 1, 1]], 4),
        (Rejection("k2", "sequence-max", low=0.0, high=0.2), NONE, 0),
        (Rejection("k2", "sequence-max", low=0.0, high=0.3), ALL, 7),
        (Rejection("k3", "sequence-max", low=0.0, high=0.25), [[0.0, 0, 0, 0], [1, 1, 1, 1]], 4),
    ],
)
def test_corrections_match_the_tables(correction, weights, num_kept):
    corrected, _ = correct_rollout([correction], OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, LOSS_MASK)

    assert_close(corrected.weights, torch.tensor(weights))
    assert corrected.response_mask.sum() == num_kept
    assert not (corrected.response_mask & ~LOSS_MASK).any()


def test_corrections_combine():
    """Rejection takes the first response out, and importance sampling weighs the tokens of the second."""
    corrections = [Rejection("k1", "sequence-sum", low=-1.0, high=0.5), TruncatedImportanceSampling()]

    corrected, _ = correct_rollout(corrections, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, LOSS_MASK)

    assert_close(corrected.weights, torch.tensor([[0.0, 0, 0, 0], [1, 1, 0.5, 1]]))
    assert_close(corrected.response_mask, torch.tensor([[False] * 4, [True] * 4]))


def test_no_correction_only_measures():
    corrected, metrics = correct_rollout([], OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, LOSS_MASK)

    assert_close(corrected.weights, LOSS_MASK.float())
    means = {name: masked_mean(values, LOSS_MASK).item() for name, values in metrics.items()}
    assert means == pytest.approx(
        {
            "rollout_corr/abs_log_prob_gap": 2 * math.log(2) / 7,
            "rollout_corr/kl": 0.0,
            "rollout_corr/gen_kl_error": (1 - math.log(2) + math.log(2) - 0.5) / 7,
            "rollout_corr/token_mult_prob_error": 9 / 7,
            "rollout_corr/weight": 1.0,
            "rollout_corr/zero_weight_frac": 0.0,
            "rollout_corr/rejected_frac": 0.0,
        },
        abs=1e-6,
    )


def test_metrics_show_what_a_correction_does():
    _, metrics = correct_rollout(
        [IcePop(low=0.6), Rejection("k1", "token", low=-9.0, high=0.5)], OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, LOSS_MASK
    )

    means = {name: masked_mean(values, LOSS_MASK).item() for name, values in metrics.items()}
    assert means["rollout_corr/zero_weight_frac"] == pytest.approx(2 / 7)
    assert means["rollout_corr/rejected_frac"] == pytest.approx(1 / 7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TruncatedImportanceSampling(cap=0.0), r"`model.corrections.cap` must be above 0"),
        (
            lambda: IcePop(low=2.0, high=1.0),
            r"`model.corrections.low` must be at least 0 and below `high`, got 2",
        ),
        (lambda: Rejection(low=1.0, high=1.0), r"`model.corrections.low` must be below `high`"),
        (lambda: Rejection("k1", "sequence-max"), r"`model.corrections.statistic: k1` .* Use `k2` or `k3`"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
