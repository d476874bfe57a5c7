from __future__ import annotations

import pytest

from verl_lightning.rewards.math_answer import math_answer


@pytest.mark.parametrize(
    ("response", "ground_truth", "expected"),
    [
        ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1),
        ("so \\boxed{0.5}", "$\\frac{1}{2}$", 1),
        ("the answer is 1/2", "\\boxed{\\frac12}", 1),
        ("the answer is 2", "\\frac12", 0),
        ("\\boxed{x^2-1}", "(x-1)(x+1)", 1),
        ("\\boxed{x^2+1}", "(x-1)(x+1)", 0),
        ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1),
        ("\\boxed{(2,1)}", "(1,2)", 0),
        ("\\boxed{4}. That forgets the last one, so it must be one more than I had found: \\boxed{5}", 5, 1),
        ("\\boxed{4} or \\boxed{5}", 5, 0),
        ("\\boxed{4} or \\boxed{5}", "\\{4,5\\}", 1),
        ("1234", "1,234", 1),
        ("no answer", "5", 0),
        ("\\boxed{\\frac{1}{", "5", 0),
        ("", "5", 0),
    ],
)
def test_math_compares_expressions(make_sample, response, ground_truth, expected):
    assert math_answer(make_sample(response, ground_truth=ground_truth)) == expected


def test_math_refuses_a_ground_truth_without_expression(make_sample):
    with pytest.raises(ValueError, match="`ground_truth` must be an expression"):
        math_answer(make_sample("5", ground_truth=""))


@pytest.mark.parametrize(
    "response",
    [
        "9" * 6000,  # SymPy prints no number so long
        "\\boxed{9^{9^{9^9}}}",  # takes for ever
        "\\boxed{\u0665}",  # another script's 5, which breaks SymPy's parser
        "the answer is \u0664\u0662 / \uff15",
        "\\boxed{" * 400 + "5" + "}" * 400,
        "\\boxed{\ud800}",
        "1/0 = \\boxed{\\frac{1}{0}}",
    ],
)
def test_no_text_of_a_policy_is_an_error_of_math(make_sample, monkeypatch, response):
    monkeypatch.setattr("verl_lightning.rewards.math_answer._MAX_SECONDS", 1)

    assert math_answer(make_sample(response, ground_truth="72")) == 0.0
