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


def test_math_gives_up_loudly_on_what_takes_for_ever(make_sample, monkeypatch):
    """By math-verify's own default the answer would be called wrong."""
    monkeypatch.setattr("verl_lightning.rewards.math_answer._MAX_SECONDS", 1)

    with pytest.raises(TimeoutError, match="math-verify gave up on the response that ends in"):
        math_answer(make_sample("\\boxed{9^{9^{9^9}}}", ground_truth="5"))


def test_math_counts_what_sympy_cannot_read_as_error(make_sample, start_pool):
    samples = [make_sample("\\boxed{5}", ground_truth="5"), make_sample("9" * 6000, ground_truth="5")]

    results = start_pool("math", max_error_share=0.5).score(samples)

    assert results.rewards == [1.0, None]
    assert results.num_errors == 1
    assert "SympifyError" in results.first_traceback
