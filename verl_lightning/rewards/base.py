"""The sample that a reward function gets, and the function's protocol; stdlib only, so that workers start fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

ANY_RESPONSE = "I do not know the answer."
"""One of the two responses on which a reward function is tried before models are loaded."""


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One response and all that is known about its prompt.

    It reaches the reward function through JSON: ``ground_truth`` and ``extra_info`` hold plain JSON types there.
    """

    response: str
    """The response as text, without special tokens."""

    ground_truth: Any
    """The row's ``reward_model.ground_truth``."""

    data_source: str
    """The row's ``data_source``, such as ``openai/gsm8k``."""

    prompt: list[dict[str, Any]]
    """The row's chat messages, each with ``role`` and ``content``."""

    extra_info: dict[str, Any]
    """The row's ``extra_info`` and its unknown columns."""

    is_truncated: bool
    """True if the response stopped at the length limit, without an end token."""

    token_ids: list[int] = field(default_factory=list)
    """Tokens of the response, its end token included."""


class RewardFn(Protocol):
    """A user's function that judges responses: any callable of one sample, or of keywords as in ``signatures.py``.

    Returns a finite number, or a mapping with one under the key ``reward``; other numbers in it are logged as metrics.
    None for a reward means that there is none, and leaves the sample out. Should it fail, it must raise: the sample is
    then left out and counted as an error, as one with ``nan`` is.
    """

    def __call__(self, sample: RewardSample, /) -> float | Mapping[str, Any] | None:
        """Judges one response."""
        ...
