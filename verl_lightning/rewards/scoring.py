"""One batch of samples on its way through the workers, and what comes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_CHUNK = 16  # samples: enough to hide the pipe's latency behind the cheapest function


@dataclass(frozen=True, kw_only=True)
class RewardResults:
    """The rewards of a batch, in its order."""

    rewards: list[float | None]
    """One reward a sample; None where the function failed or ran out of time: leave such samples out."""

    components: dict[str, list[float | None]]
    """The other numbers of functions that return mappings; None where a sample has none by that name."""

    num_errors: int
    """Samples whose function raised, returned no finite number, or took its process down."""

    num_timeouts: int
    """Samples whose function ran out of time."""

    first_traceback: str | None
    """What happened to the first sample without a reward; None if all have one."""


class ScoringBatch:
    """Keeps who waits, who has an answer and who failed.

    Args:
        lines: The samples, encoded.
        num_workers: Among which they are shared out.
    """

    def __init__(self, lines: Sequence[bytes], *, num_workers: int) -> None:
        self.lines = lines
        self._num_workers = num_workers
        self._waiting = deque(range(len(lines)))
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._errors: dict[int, str] = {}
        self._timeouts: dict[int, str] = {}

    @property
    def num_failures(self) -> int:
        """Samples that will have no reward."""
        return len(self._errors) + len(self._timeouts)

    @property
    def is_done(self) -> bool:
        """True if no sample is without an answer or a failure."""
        return len(self._answers) + self.num_failures == len(self.lines)

    def take(self) -> list[int]:
        """Takes the next samples for one idle worker: fewer as the end nears, so that all end together."""
        fair_share = len(self._waiting) // (2 * self._num_workers)
        num_taken = min(len(self._waiting), max(1, min(fair_share, _MAX_CHUNK)))
        return [self._waiting.popleft() for _ in range(num_taken)]

    def put_back(self, positions: Iterable[int]) -> None:
        """Returns samples that a lost worker never came to."""
        self._waiting.extendleft(positions)

    def record_answer(self, position: int, answer: Mapping[str, Any]) -> None:
        """Notes what a worker answered."""
        if "error" in answer:
            self._errors[position] = answer["error"]
        else:
            self._answers[position] = answer

    def record_death(self, position: int, how: str) -> None:
        """Notes a sample whose function took its process down."""
        self._errors[position] = f"The worker's process ended ({how}) while it scored sample {position}."

    def record_timeout(self, position: int, seconds: float) -> None:
        """Notes a sample whose function was stopped."""
        self._timeouts[position] = f"Sample {position} was stopped after {seconds:g} seconds."

    def results(self) -> RewardResults:
        """What has come of the samples so far."""
        positions = range(len(self.lines))
        names = dict.fromkeys(name for i in positions if i in self._answers for name in self._answers[i]["components"])
        components = {i: answer["components"] for i, answer in self._answers.items()}
        failures = self._errors | self._timeouts
        return RewardResults(
            rewards=[self._answers[i]["reward"] if i in self._answers else None for i in positions],
            components={name: [components.get(i, {}).get(name) for i in positions] for name in names},
            num_errors=len(self._errors),
            num_timeouts=len(self._timeouts),
            first_traceback=failures[min(failures)] if failures else None,
        )
