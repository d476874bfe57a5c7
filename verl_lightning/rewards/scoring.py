"""One batch of samples on its way through the workers, and its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from verl_lightning.rewards.base import RewardSample
from verl_lightning.rewards.wire import encode_samples

_MAX_CHUNK = 16  # units: enough to hide the pipe's latency behind the cheapest function


@dataclass(frozen=True, kw_only=True)
class RewardResults:
    """The rewards of a batch, in its order."""

    rewards: list[float | None]
    """One reward a sample; None where there is none: leave such samples out."""

    components: dict[str, list[float | None]]
    """The other numbers of functions that return mappings; None where a sample has none by that name."""

    num_errors: int = 0
    """Samples whose function raised, returned no number that fits, or took its process down."""

    num_timeouts: int = 0
    """Samples whose function ran out of time."""

    num_none: int = 0
    """Samples whose function returned None: it has no reward for them."""

    num_unjudged: int = 0
    """Samples that no function has seen, as too many others had failed."""

    first_traceback: str | None = None
    """Traceback or message of the first sample that failed or ran out of time; None if none has."""

    first_mistake: str | None = None
    """Traceback of the first sample that failed by a fault which no response is to blame for; None if none has."""

    unlogged: tuple[str, ...] = ()
    """Names of returned values that are no numbers and are not logged."""


def units_of(samples: Sequence[RewardSample], *, is_batched: bool) -> list[list[RewardSample]]:
    """Divides samples into units, each of them judged by one call.

    Args:
        samples: Samples of a batch in their order.
        is_batched: True for a function of lists: a call judges the samples in a row that are of the same data row, as
            far as the function is told of it: prompts about images are often the same. Else each has its own.
    """
    if not is_batched:
        return [[sample] for sample in samples]
    return [list(unit) for _, unit in groupby(samples, lambda each: (each.prompt, each.ground_truth, each.extra_info))]


class ScoringBatch:
    """Keeps which samples are still to come, which wait, which have an answer and which failed.

    Args:
        sizes: Number of samples of each unit, which one call judges; `put` brings the samples.
        num_workers: Number of workers among which the units are shared out.
    """

    def __init__(self, sizes: Sequence[int], *, num_workers: int) -> None:
        self.requests: dict[int, bytes] = {}
        self.sizes = list(sizes)
        self.num_samples = sum(self.sizes)
        self._starts = list(accumulate(self.sizes, initial=0))
        self._num_workers = num_workers
        self._waiting: deque[int] = deque()
        self._suspects: set[int] = set()
        self._answers: dict[int, Mapping[str, Any]] = {}  # by the sample's position, as the following
        self._errors: dict[int, str] = {}
        self._mistakes: dict[int, str] = {}
        self._timeouts: dict[int, str] = {}

    def put(self, unit: int, samples: Sequence[RewardSample]) -> None:
        """Brings the samples of a unit, which waits for a worker from now on.

        Raises:
            TypeError: If a sample holds a value that JSON can't express.
        """
        self.requests[unit] = encode_samples(samples)
        self._waiting.append(unit)

    @property
    def num_failures(self) -> int:
        """Samples that will have no reward, though their function should have given one."""
        return len(self._errors) + len(self._timeouts)

    @property
    def num_judged(self) -> int:
        """Samples with an answer or a failure."""
        return len(self._answers) + self.num_failures

    @property
    def is_done(self) -> bool:
        """True if no sample is without an answer or a failure."""
        return self.num_judged == self.num_samples

    def take(self) -> list[int]:
        """Takes the next units for one idle worker: fewer as the end nears, so that all end together."""
        fair_share = len(self._waiting) // (2 * self._num_workers)
        num_taken = min(len(self._waiting), max(1, min(fair_share, _MAX_CHUNK)))
        return [self._waiting.popleft() for _ in range(num_taken)]

    def take_to_wait_for(self, held: Sequence[int], *, room: int) -> list[int]:
        """Takes the next units for a worker whose functions mostly wait: its whole share at once, as far as it fits.

        Args:
            held: Units that the worker has in hand.
            room: Number of further units that it may have in hand.
        """
        if self._waiting and self._waiting[0] in self._suspects:
            return [] if held else [self._waiting.popleft()]
        share = -(-len(self.sizes) // self._num_workers)
        count = 0 if self._suspects.intersection(held) else min(room, share, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    def put_back_suspects(self, units: Iterable[int]) -> None:
        """Returns units over one of which a worker was lost; each of them is judged again, by itself."""
        self._suspects |= set(units)
        self.put_back(units)

    def put_back(self, units: Iterable[int]) -> None:
        """Returns units that a lost worker never came to."""
        self._waiting.extendleft(units)

    def record_answer(self, unit: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Notes what a worker answered, sample by sample."""
        for position, answer in zip(self._positions(unit), answers, strict=True):
            if "timeout" in answer:
                self.record_timeout(unit, answer["timeout"], [position])
            elif "error" not in answer:
                self._answers[position] = answer
            else:
                self._errors[position] = answer["error"]
                self._mistakes |= {position: answer["error"]} if answer["is_mistake"] else {}

    def record_loss(self, unit: int, how: str) -> None:
        """Notes a unit whose worker was lost over it."""
        self._errors |= dict.fromkeys(self._positions(unit), f"{how} while it scored {self._name(unit)}.")

    def record_timeout(self, unit: int, seconds: float, positions: Iterable[int] | None = None) -> None:
        """Notes a unit whose function was stopped, or samples of it."""
        what = f"The worker was stopped after {seconds:g} seconds of scoring {self._name(unit)}."
        self._timeouts |= dict.fromkeys(self._positions(unit) if positions is None else positions, what)

    def results(self) -> RewardResults:
        """Returns the results of the samples so far."""
        positions = range(self.num_samples)
        answers = [self._answers[i] for i in positions if i in self._answers]
        names = dict.fromkeys(name for answer in answers for name in answer["components"])
        components = {i: answer["components"] for i, answer in self._answers.items()}
        rewards = [self._answers[i]["reward"] if i in self._answers else None for i in positions]
        return RewardResults(
            rewards=rewards,
            components={name: [components.get(i, {}).get(name) for i in positions] for name in names},
            num_errors=len(self._errors),
            num_timeouts=len(self._timeouts),
            num_none=sum(answer["reward"] is None for answer in answers),
            num_unjudged=self.num_samples - self.num_judged,
            first_traceback=_first(self._errors | self._timeouts),
            first_mistake=_first(self._mistakes),
            unlogged=tuple(dict.fromkeys(name for answer in answers for name in answer["unlogged"])),
        )

    def _positions(self, unit: int) -> range:
        return range(self._starts[unit], self._starts[unit] + self.sizes[unit])

    def _name(self, unit: int) -> str:
        positions = self._positions(unit)
        return f"sample {positions[0]}" if len(positions) == 1 else f"samples {positions[0]} to {positions[-1]}"


def _first(events: Mapping[int, str]) -> str | None:
    return events[min(events)] if events else None
