"""What a reward function gets and gives; stdlib only, so that workers start fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


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


class RewardFn(Protocol):
    """What a user brings to judge responses: any callable of one sample.

    Returns a finite number, or a mapping of such numbers with the key ``reward``; the other keys are logged as metrics.
    Should it fail, it must raise: the sample is then left out and counted. ``None`` and ``nan`` count as errors too.
    """

    def __call__(self, sample: RewardSample, /) -> float | Mapping[str, float]:
        """Judges one response."""
        ...
