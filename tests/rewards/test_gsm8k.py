from __future__ import annotations

import pytest

from verl_lightning.rewards.gsm8k import gsm8k, gsm8k_flexible


@pytest.mark.parametrize(
    ("response", "ground_truth", "expected"),
    [
        ("6 * 12 = 72\n#### 72", "72", 1),
        ("####72", "72", 1),
        ("####\n72", "72", 1),
        ("#### 72.", "72", 1),
        ("#### $72", "72", 1),
        ("#### \\$72.00", "72", 1),
        ("#### 72 apples in 3 bags", "72", 1),
        ("#### **72**", "72", 1),
        ("#### \\boxed{72}", "72", 1),
        ("#### The answer is 72", "72", 1),
        ("#### 72%", "72", 1),
        ("#### 1,234", "1234", 1),
        ("#### 1234", "1,234", 1),
        ("#### 1,234,567.50", "1234567.5", 1),
        ("#### -5", "-5", 1),
        ("#### \u22125", "-5", 1),
        ("#### -$5", "-5", 1),
        ("#### $-5", "-5", 1),
        ("#### .5", "0.5", 1),
        ("#### 72", 72, 1),
        ("#### 72", 72.0, 1),
        ("#### 72", "so 2 * 36 = 72\n#### 72", 1),
        ("#### 71 #### 72", "72", 1),
        ("#### 72 #### 71", "72", 0),
        ("#### 5", "-5", 0),
        ("#### 720", "72", 0),
        ("#### 72.5", "72", 0),
        ("#### 72/5", "72", 0),
        ("#### seventy-two\n72", "72", 0),
        ("The answer is 72", "72", 0),
        ("72 ####", "72", 0),
        ("", "72", 0),
        ("#### " + "7" * 10_000, "72", 0),
    ],
)
def test_gsm8k_reads_the_number_after_the_last_mark(make_sample, response, ground_truth, expected):
    assert gsm8k(make_sample(response, ground_truth=ground_truth)) == expected


@pytest.mark.parametrize(
    ("response", "ground_truth", "expected"),
    [
        ("She has 72 apples.", "72", 1),
        ("#### 71, or rather 72", "72", 1),
        ("10-5=5", "5", 1),
        ("It ends at 10-5", "5", 1),
        ("It ends at x = -5", "-5", 1),
        ("That makes $1,234.", "1,234", 1),
        ("She has 72 apples in 3 bags.", "72", 0),
        ("none", "72", 0),
    ],
)
def test_gsm8k_flexible_reads_the_last_number(make_sample, response, ground_truth, expected):
    assert gsm8k_flexible(make_sample(response, ground_truth=ground_truth)) == expected


@pytest.mark.parametrize("reward", [gsm8k, gsm8k_flexible])
@pytest.mark.parametrize("ground_truth", ["", "seventy-two", None])
def test_gsm8k_refuses_a_ground_truth_without_number(make_sample, reward, ground_truth):
    with pytest.raises(ValueError, match="`ground_truth` must hold a number"):
        reward(make_sample("no number", ground_truth=ground_truth))
