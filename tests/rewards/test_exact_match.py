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
        ("", "", False, 0),
        (" \n", "", False, 0),
        ("", None, False, 0),
    ],
)
def test_exact_match_wants_the_answer_and_nothing_else(make_sample, response, ground_truth, is_truncated, expected):
    sample = make_sample(response, ground_truth=ground_truth, is_truncated=is_truncated)

    assert exact_match(sample) == expected


@pytest.mark.parametrize("ground_truth", ["", " ", None])
def test_exact_match_needs_a_ground_truth(make_sample, ground_truth):
    with pytest.raises(ValueError, match="`ground_truth` must be a text for the reward `exact_match`, got"):
        exact_match(make_sample("None", ground_truth=ground_truth))
