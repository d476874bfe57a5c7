from __future__ import annotations

import pytest

from verl_lightning.rewards.response_format import boxed_format, tag_format


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1),
        (" <think></think><answer></answer>\n", 1),
        ("<think>a</think> so <answer>c</answer>", 0),
        ("<think>a</think>", 0),
        ("<think>a</think><answer>c</answer> bye", 0),
    ],
)
def test_tag_format_wants_thoughts_then_an_answer(make_sample, response, expected):
    assert tag_format(make_sample(response)) == expected


def test_tag_format_takes_another_pattern(make_sample):
    assert tag_format(make_sample("Answer: 5"), pattern=r"Answer: \d") == 1
    assert tag_format(make_sample("Answer: five"), pattern=r"Answer: \d") == 0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("so \\boxed{5}", 1),
        ("so \\boxed{\\frac{1}{2}} indeed", 1),
        ("so \\boxed{\\frac{1}{2}", 0),
        ("so \\boxed{ }", 0),
        ("\\boxed{5} or \\boxed{", 0),
        ("so 5", 0),
    ],
)
def test_boxed_format_wants_a_closed_box(make_sample, response, expected):
    assert boxed_format(make_sample(response)) == expected
