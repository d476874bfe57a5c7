from __future__ import annotations

import pytest

from verl_lightning.rewards.exact_match import exact_match


@pytest.mark.parametrize(
    ("response", "ground_truth", "is_truncated", "expected"),
    [
        ("0137", "0137", False, 1),
        (" 0137\n", "0137", False, 1),
        ("0137", " 0137", False, 1),
        ("137", 137, False, 1),
        ("0137", "0137", True, 0),
        ("137", "0137", False, 0),
        ("0137 or so", "0137", False, 0),
        ("", "0137", False, 0),
    ],
)
def test_exact_match_wants_the_answer_and_nothing_else(make_sample, response, ground_truth, is_truncated, expected):
    sample = make_sample(response, ground_truth=ground_truth, is_truncated=is_truncated)

    assert exact_match(sample) == expected
