"""Groups of responses that a process has asked for, and the choice of those that a step learns from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Literal

from verl_lightning.callbacks.prompt_stream import Cursor, Group, Prompt, PromptStream
from verl_lightning.rollout.completions import pack_completions, unpack_completions
from verl_lightning.rollout.process import EngineDiedError

InFlight = Literal["finish", "continue", "abort"]


class RolloutQueue:
    """Groups of this process between the moment at which they are asked for and the step that learns from them.

    A group is due when its responses would be too old for the step after: ``max_staleness`` steps after they were asked
    for. A step takes groups as they finish, the oldest first, but waits for those that are due, and for as many more
    as would otherwise be due together later than there is room for. So a long episode lets others pass until it is due.

    Args:
        max_staleness: Most optimizer steps by which a response may be older than the policy that learns from it.
        ahead: Steps whose groups are asked for beyond the present one's; what is left of the bound is room for long
            episodes.
        begin: Function that has engines begin with some groups, all together.
    """

    def __init__(self, max_staleness: int, ahead: int, begin: Callable[[Sequence[Group]], None]) -> None:
        self.max_staleness = max_staleness
        self.ahead = ahead
        self.groups: list[Group] = []
        """Groups that no step has learnt from, in the order of the data."""
        self.step = 0
        """Present ``global_step``."""
        self.steps: dict[int, int] = {}
        """The ``global_step`` of each version of the weights that is not too old."""
        self.stream: PromptStream | None = None
        """Source of further groups, once training has begun."""
        self.has_new_engine = False
        """True if an engine has taken a dead one's place since the last `settle`, which is thus known of."""
        self._begin = begin
        self._taken: dict[Prompt, Group] = {}  # by the present step

    @property
    def is_busy(self) -> bool:
        """True if responses are on their way."""
        return any(not answer.done() for answer in self._answers())

    def begin_version(self, version: int, step: int) -> None:
        """Note when the engine gets new weights.

        Args:
            version: Number of the weights.
            step: The ``global_step`` that they are of.
        """
        oldest = step - self.max_staleness
        self.step = step
        self.steps = {version: step for version, step in self.steps.items() if step >= oldest} | {version: step}

    def begin_step(self, step: int) -> None:
        """Give up what is too old for a step."""
        self.step, self._taken = step, {}
        for group in self.groups:
            if group.asked is not None and group.asked + self.max_staleness < step:
                group.forget()

    def look_ahead(self, kinds: Sequence[Any], ahead: int | None = None) -> None:
        """Ask for groups of these kinds, and for as many beyond them as are asked for ahead.

        Args:
            kinds: Kind of each group that is wanted next.
            ahead: Number of further steps; None takes that of the queue.
        """
        asked = [group for group in self.groups if group.asked is not None]
        missing = list((Counter(kinds) - Counter(group.kind for group in asked)).elements())
        rest = len(kinds) * (1 + (self.ahead if ahead is None else ahead)) - len(asked) - len(missing)
        for kind in missing:
            self._next({kind}).asked = self.step
        for _ in range(rest):
            self._next().asked = self.step

    def _next(self, kinds: Container[Any] | None = None) -> Group:
        """Return the first group that was not asked for, of these kinds or of any."""
        assert self.stream is not None
        while True:
            for group in self.groups:
                if group.asked is None and (kinds is None or group.kind in kinds):
                    return group
            self.groups += self.stream.next_batch()

    def settle(self, is_enough: Callable[[], bool] | None = None) -> None:
        """Wait until enough of what was asked for is there, or all; where an engine has died, the next call asks anew.

        Args:
            is_enough: Function that tells whether to go on; None waits for all.

        Raises:
            EngineDiedError: If an engine has died.
        """
        self._begin([group for group in self.groups if group.asked is not None and group.answer is None])
        deaths = self._deaths()
        while not deaths and self.is_busy and not (is_enough and is_enough()):
            wait([answer for answer in self._answers() if not answer.done()], return_when=FIRST_COMPLETED)
            deaths = self._deaths()
        is_known, self.has_new_engine = self.has_new_engine, False
        if not deaths:
            return
        wait(self._answers())  # none is left to the dead one
        for group in self.groups:
            if group.answer is not None and death_in(group.answer) is not None:
                group.answer = None
        if not is_known:
            raise deaths[0]
        self.settle(is_enough)

    def choose(self, kinds: Sequence[Any]) -> list[Group] | None:
        """Return the groups of these kinds that are learnt from next, in the order of the data; None if some lack."""
        chosen: list[Group] = []
        for kind, count in Counter(kinds).items():
            asked = [group for group in self.groups if group.kind == kind and group.asked is not None]
            chosen += self._choose(sorted(asked, key=lambda group: (group.asked, group.prompt)), count)
        if len(chosen) < len(kinds) or not all(group.is_done for group in chosen):
            return None
        return sorted(chosen, key=lambda group: group.prompt)

    def _choose(self, groups: list[Group], count: int) -> list[Group]:
        """Return the groups of one kind that are taken next, the oldest first; some may not be done.

        Args:
            groups: Those that were asked for, the oldest first.
            count: Number that this and each later step takes.
        """
        chosen: list[Group] = []
        for later in range(self.max_staleness + 1):
            due = [group for group in groups if (group.asked or 0) + self.max_staleness <= self.step + later]
            too_many = len(due) - later * count - len(chosen)
            open_ones = [group for group in due if group not in chosen]
            chosen += sorted(open_ones, key=lambda group: not group.is_done)[: max(0, too_many)]
        chosen = chosen[:count]
        rest = [group for group in groups if group.is_done and group not in chosen]
        return chosen + rest[: count - len(chosen)]

    def take(self, groups: Sequence[Group]) -> None:
        """Remove groups, from which a step learns."""
        self._taken |= {group.prompt: group for group in groups}
        self.groups = [group for group in self.groups if group.prompt not in self._taken]

    def give_back(self, prompts: Iterable[Prompt]) -> None:
        """Keep those of this process's groups that the present step does not learn from after all."""
        groups = [self._taken[prompt] for prompt in prompts if prompt in self._taken]
        self.groups = sorted([*self.groups, *groups], key=lambda group: group.prompt)

    def state_dict(self) -> dict[str, Any]:
        """All groups as plain values and tensors, with their responses where these are there."""
        done = [group.is_done and group.answer is not None and not group.answer.exception() for group in self.groups]
        found = [
            group.answer.result() if is_done and group.answer is not None else []
            for group, is_done in zip(self.groups, done, strict=True)
        ]
        return {
            "prompts": [list(group.prompt) for group in self.groups],
            "sizes": list(map(len, found)),
            "completions": pack_completions([completion for group in found for completion in group]),
        }

    def catch_up(self, batch: int) -> Cursor:
        """Take prompts up to a batch, at which the stream of another process is; returns the place behind them."""
        assert self.stream is not None
        while self.stream.cursor.batch < batch:
            self.groups += self.stream.next_batch()
        return self.stream.cursor

    def restore(self, states: Sequence[Mapping[str, Any]], lane: int, lanes: int) -> None:
        """Take this process's share of the groups of a checkpoint.

        Args:
            states: State of each process that had groups.
            lane: This process among those that have some now.
            lanes: Number of these processes. If as many saved, each gets its own back; else all are dealt out.
        """
        assert self.stream is not None
        parts = [groups_in(state) for state in states]
        is_alike = len(parts) == lanes
        own = parts[lane] if is_alike else sorted(chain.from_iterable(parts), key=itemgetter(0))[lane::lanes]
        self.groups = self.stream.groups_of([prompt for prompt, _ in own])
        for group, (_, completions) in zip(self.groups, own, strict=True):
            versions = [version for each in completions for version in each.own_versions]
            if completions and all(version in self.steps for version in versions):
                group.answered(min((self.steps[version] for version in versions), default=self.step), completions)

    def _answers(self) -> list[Future[Any]]:
        return [group.answer for group in self.groups if group.answer is not None]

    def _deaths(self) -> list[EngineDiedError]:
        """Deaths of engines for which groups were not finished; raises any other error of theirs."""
        return [death for answer in self._answers() if (death := death_in(answer)) is not None]


def death_in(answer: Future[Any]) -> EngineDiedError | None:
    """The death of an engine that a group was not finished for; None if it is finished or under way.

    Raises:
        Exception: Whatever else it was not finished for.
    """
    error = answer.exception() if answer.done() else None
    if error is None or isinstance(error, EngineDiedError):
        return error
    raise error


def groups_in(state: Mapping[str, Any]) -> list[tuple[Prompt, list[Any]]]:
    """The prompts of a process's state, each with its completions, if there are any."""
    completions = iter(unpack_completions(state["completions"]))
    return [
        (Prompt(*prompt), list(islice(completions, size)))
        for prompt, size in zip(state["prompts"], state["sizes"], strict=True)
    ]
