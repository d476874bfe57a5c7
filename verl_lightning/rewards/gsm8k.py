"""Rewards for grade-school maths: the response's final number against the row's."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal

from verl_lightning.rewards.base import RewardSample

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-\u2212])?"  # a minus after a digit, word or bracket subtracts: `10-5` ends in 5
    r"\\?[$€£¥]?"
    r"(?P<inner_sign>(?<=[$€£¥])[-\u2212])?"
    r"(?P<digits>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<denominator>/[0-9]+)?"
)


def gsm8k(sample: RewardSample) -> float:
    """1 if the first number after the last ``####`` equals the ground truth, else 0.

    Only the line that follows the mark is read. Currency signs, thousands commas, markup, units and a final full stop
    don't matter: ``#### 72.``, ``#### $72``, ``#### 72.00`` and ``#### **72** apples`` all give 72.

    Args:
        sample: Its ``ground_truth`` is a number, or text such as ``"1,234"`` or GSM8K's own ``"... #### 1234"``.

    Returns:
        0 or 1.

    Raises:
        ValueError: If the ground truth holds no number.

    References:
        Cobbe et al., *Training Verifiers to Solve Math Word Problems*, 2021. https://arxiv.org/abs/2110.14168
    """
    return float(_marked_number(sample.response) == _true_number(sample))


def gsm8k_flexible(sample: RewardSample) -> float:
    """1 if the last number of the response equals the ground truth, else 0; asks for no ``####``.

    Args:
        sample: Sample as for ``gsm8k``.

    Returns:
        0 or 1.

    Raises:
        ValueError: If the ground truth holds no number.
    """
    return float(_last_number(sample.response) == _true_number(sample))


def _true_number(sample: RewardSample) -> Decimal:
    text = str(sample.ground_truth)
    number = _marked_number(text) if "####" in text else _last_number(text)
    if number is None:
        raise ValueError(f"`ground_truth` must hold a number for the reward `gsm8k`, got {sample.ground_truth!r}.")
    return number


def _marked_number(text: str) -> Decimal | None:
    _, mark, tail = text.rpartition("####")
    if not mark or not tail.strip():
        return None
    match = _NUMBER.search(tail.strip().splitlines()[0])
    return _to_decimal(match) if match else None


def _last_number(text: str) -> Decimal | None:
    matches = deque(_NUMBER.finditer(text), maxlen=1)
    return _to_decimal(matches.pop()) if matches else None


def _to_decimal(match: re.Match[str]) -> Decimal | None:
    if match["denominator"]:
        return None
    # Not `int` or `Fraction`: a policy that repeats a digit for ever would hit Python's limit of 4300 digits.
    number = Decimal(match["digits"].replace(",", ""))
    return number.copy_negate() if match["sign"] or match["inner_sign"] else number
