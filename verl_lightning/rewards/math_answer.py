"""The reward for mathematical answers, compared as expressions by math-verify."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import sympy.core.random  # type: ignore[import-untyped]
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

from verl_lightning.rewards.base import RewardSample

_MAX_SECONDS = 5  # for a parse or a comparison; a whole number, for `signal.alarm`


def math_answer(sample: RewardSample) -> float:
    r"""1 if the response's final answer equals the ground truth as a mathematical expression, else 0.

    The answer is the last ``\boxed{...}``, else the last LaTeX formula or number that math-verify finds. Boxes that
    follow each other closely are one answer, the set of their values: listing guesses doesn't pay.

    Args:
        sample: Its ``ground_truth`` is a number or LaTeX such as ``"\\frac{1}{2}"``, with or without ``$`` or a box.

    An answer that can't be read, or is not compared within 5 seconds, is wrong: no text of a policy's is an error.

    Returns:
        0 or 1.

    Raises:
        ValueError: If the ground truth is no expression.

    References:
        Kydlíček, *Math-Verify*, 2025. https://github.com/huggingface/Math-Verify
    """
    # SymPy tests equality at random points, drawn from a generator of its own.
    sympy.core.random.seed(0)
    truth = _parse_truth(str(sample.ground_truth))
    answers = parse(sample.response, (LatexExtractionConfig(), ExprExtractionConfig()), parsing_timeout=_MAX_SECONDS)
    return float(verify(truth, answers, timeout_seconds=_MAX_SECONDS))


@lru_cache(maxsize=64)
def _parse_truth(text: str) -> list[Any]:
    # Without `$` or a box math-verify doesn't see LaTeX, and would read only the number 2 in `\frac{1}{2}`.
    is_marked = "$" in text or "\\boxed" in text
    marked = text if is_marked else f"\\boxed{{{text}}}"
    truth = list(parse(marked, (LatexExtractionConfig(),), parsing_timeout=_MAX_SECONDS, raise_on_error=True))
    if not truth:
        raise ValueError(f"`ground_truth` must be an expression for the reward `math`, got {text!r}.")
    return truth
