"""Rewards for the form of a response, whatever it answers."""

from __future__ import annotations

import re

from verl_lightning.rewards.base import RewardSample

THINK_THEN_ANSWER = r"<think>.*?</think>\s*<answer>.*?</answer>"


def tag_format(sample: RewardSample, *, pattern: str = THINK_THEN_ANSWER) -> float:
    """1 if the whole response, up to white space around it, matches the pattern, else 0.

    Args:
        sample: Only its ``response`` counts.
        pattern: Regular expression, in which ``.`` also matches a line's end.

    Returns:
        0 or 1.

    References:
        DeepSeek-AI, *DeepSeek-R1*, 2025, sec. 2.2.2. https://arxiv.org/abs/2501.12948
    """
    return float(re.fullmatch(pattern, sample.response.strip(), re.DOTALL) is not None)


def boxed_format(sample: RewardSample) -> float:
    r"""1 if the response's last ``\boxed{...}`` is closed and not empty, else 0.

    Args:
        sample: Only its ``response`` counts.

    Returns:
        0 or 1.
    """
    _, mark, tail = sample.response.rpartition("\\boxed{")
    if not mark:
        return 0.0
    depth = 1
    for position, character in enumerate(tail):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return float(bool(tail[:position].strip()))
    return 0.0
