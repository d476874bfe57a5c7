"""Each aggregation's weights against hand-made sums, and their independence of the split into micro-batches."""

import typing

import pytest
import torch
from torch.testing import assert_close

from verl_lightning.functional.normalizer import Aggregation, token_weights

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", 7 / 3),
        ("token-sum", 7.0),
        ("seq-mean-token-sum", 3.5),
        ("seq-mean-token-mean", 2.75),
        ("seq-mean-token-sum-norm", 7 / 6),
    ],
)
def test_aggregations_match_the_golden_numbers(aggregation, expected):
    weights = token_weights(MASK, aggregation, num_tokens=3, num_sequences=2, max_response_length=3)

    assert_close((LOSS * weights).sum(), torch.tensor(expected))


@pytest.mark.parametrize("aggregation", typing.get_args(Aggregation))
def test_a_sequence_without_trainable_tokens_counts_in_nothing(aggregation):
    padded = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.bool)])

    weights = token_weights(padded, aggregation, num_tokens=3, num_sequences=2, max_response_length=3)

    expected = token_weights(MASK, aggregation, num_tokens=3, num_sequences=2, max_response_length=3)
    assert_close(weights, torch.cat([expected, torch.zeros(1, 3)]))


@pytest.mark.parametrize("aggregation", typing.get_args(Aggregation))
def test_nothing_to_train_on_gives_finite_zeros(aggregation):
    nothing = torch.zeros(2, 3, dtype=torch.bool)

    weights = token_weights(
        nothing, aggregation, num_tokens=torch.tensor(0), num_sequences=torch.tensor(0), max_response_length=3
    )

    assert_close(weights, torch.zeros(2, 3))


def test_two_uneven_micro_batches_average_over_all_tokens():
    """Losses 1, 2 and 3..7 average to 28 / 7 = 4, never to the mean of means, 3.25."""
    batches = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0, 6.0, 7.0]])]

    total = sum(
        (loss * token_weights(loss > 0, "token-mean", num_tokens=7, num_sequences=2, max_response_length=5)).sum()
        for loss in batches
    )

    assert_close(total, torch.tensor(4.0))
