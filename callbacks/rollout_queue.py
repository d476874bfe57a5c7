"""Batches that are sampled before their step, while the policy learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import islice
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import Trainer

from verl_lightning.faults import RunError
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.rollout.background import Background
from verl_lightning.rollout.base import Completion, Request
from verl_lightning.rollout.completions import pack_completions, unpack_completions
from verl_lightning.rollout.process import EngineDiedError
from verl_lightning.types import PromptBatch

CHECKPOINT_KEY = "rollout_queue"

InFlight = Literal["finish", "continue", "abort"]

Prompt = tuple[int, int]
"""A prompt's epoch and its row of the data files; each is trained on once."""


@runtime_checkable
class OrderedLoader(Protocol):
    """A loader whose batches are known before it yields them, as those of `TrainLoader` are."""

    def upcoming(self) -> Iterator[tuple[int, PromptBatch]]:
        """Yields the epoch and the batch that was handed out last, and then those that will be, without end."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: a text that tells the rows from others, among other things."""


class Ticket:
    """A batch that has its turn later, and the responses of this rank's part of it.

    Args:
        epoch: Epoch of the batch.
        rows: Row of the data files of each of its prompts.
        requests: Requests for all responses to them, prompt after prompt.
        own: Positions among the prompts of those whose responses this rank samples.
    """

    def __init__(self, epoch: int, rows: Sequence[int], requests: Sequence[Request], own: range) -> None:
        self.rows = list(rows)
        self.requests = requests
        size = len(requests) // len(rows)
        self.prompts: list[Prompt] = [(epoch, rows[prompt]) for prompt in own]
        self.groups = [requests[prompt * size :][:size] for prompt in own]
        self.answers: list[Future[list[Completion]] | None] = [None] * len(own)
        """Completions of each group; None before it is asked for, and once its engine has died."""

    @property
    def completions(self) -> list[Completion]:
        """Completions of this rank's part, once they are there."""
        return [completion for answer in self.answers if answer is not None for completion in answer.result()]


class RolloutQueue:
    """The batches of the coming steps, in the order of the data, each asked for as soon as the bound on age allows.

    A response comes from weights that are ``max_staleness`` optimizer steps old at the most when it is learnt from,
    since its batch is not asked for earlier than that. The order is that of the `TrainLoader`, whose position is also
    what of the data is done: a queue that is lost with its process is made anew, and no prompt is lost or comes twice.

    Args:
        max_staleness: The bound, in optimizer steps.
        sample: Function that samples a group of responses.
    """

    def __init__(
        self, max_staleness: int, sample: Callable[[Sequence[Request]], Coroutine[Any, Any, list[Completion]]]
    ) -> None:
        self.max_staleness = max_staleness
        self.background = Background()
        self.tickets: deque[Ticket] = deque()
        self.steps: dict[int, int] = {}
        """The ``global_step`` of each version of the weights that is not too old."""
        self._sample = sample
        self._restored: dict[Prompt, list[Completion]] = {}
        self.has_new_engine = False
        """True if an engine has taken a dead one's place since the last `settle`, which is thus known of."""

    @property
    def is_busy(self) -> bool:
        """True if responses are on their way."""
        return any(not answer.done() for answer in answers_of(self.tickets))

    def begin_version(self, version: int, step: int) -> None:
        """Note when the engine gets new weights.

        Args:
            version: Number of the weights.
            step: The ``global_step`` that they are of.
        """
        oldest = step - self.max_staleness
        self.steps = {version: step for version, step in self.steps.items() if step >= oldest} | {version: step}

    def coming(self, trainer: Trainer) -> Iterable[tuple[int, int, PromptBatch]]:
        """Yields what may be asked for now beside the batches that are: steps ahead, epoch and batch."""
        loader = cast(OrderedLoader, trainer.train_dataloader)
        batches = enumerate(loader.upcoming())
        for ahead, (epoch, batch) in islice(batches, len(self.tickets), self.max_staleness + 1):
            yield ahead, epoch, batch

    def add(self, ticket: Ticket, step: int) -> None:
        """Take one more batch, with what a checkpoint holds of it unless that is too old.

        Args:
            ticket: The batch.
            step: The ``global_step`` at which it is learnt from.
        """
        for number, prompt in enumerate(ticket.prompts):
            found = self._restored.pop(prompt, [])
            steps = [self.steps.get(version, -1) for completion in found for version in completion.own_versions]
            is_young = step - min(steps, default=step) <= self.max_staleness
            if is_young and len(found) == len(ticket.groups[number]):
                ticket.answers[number] = answer = Future[list[Completion]]()
                answer.set_result(found)
        self.tickets.append(ticket)
        if len(self.tickets) > self.max_staleness:  # the rest is of other ranks
            self._restored = {}

    def ask(self) -> None:
        """Have the engine begin with all groups that it was not asked for, together."""
        with self.background.paused():
            for ticket in self.tickets:
                for number, group in enumerate(ticket.groups):
                    if ticket.answers[number] is None:
                        ticket.answers[number] = self.background.submit(self._sample(group))

    def settle(self, tickets: Iterable[Ticket] | None = None) -> None:
        """Wait for this rank's part of some batches, or of all; if an engine has died, the next call asks anew.

        Raises:
            EngineDiedError: If an engine has died.
        """
        self.ask()
        wait(answers_of(self.tickets if tickets is None else tickets))
        deaths = [error for answer in answers_of(self.tickets) if (error := death_in(answer)) is not None]
        is_known, self.has_new_engine = self.has_new_engine, False
        if not deaths:
            return
        wait(answers_of(self.tickets))  # none is left to the dead one
        for ticket in self.tickets:
            ticket.answers = [None if answer is None or death_in(answer) else answer for answer in ticket.answers]
        if not is_known:
            raise deaths[0]
        self.settle(tickets)

    def take(self, rows: Sequence[int]) -> Ticket:
        """Returns the next batch, once it is settled.

        Raises:
            RunError: If it is not the one that the loader yields.
        """
        ticket = self.tickets.popleft()
        if ticket.rows != list(rows):
            raise RunError(
                f"the loader yields rows {list(rows)}, but rows {ticket.rows} were to be next. Please report this."
            )
        return ticket

    def check_age(self, module: PostTrainingModule, completions: Sequence[Completion]) -> dict[str, float]:
        """Returns how old responses of all ranks are that are about to be learnt from, as metrics. Collective.

        Raises:
            RunError: If one is older than the bound.
        """
        step = module.trainer.global_step
        ages = [[step - self.steps[version] for version in each.own_versions] for each in completions]
        mixed = [len(each) for each in ages if len(set(each)) > 1]
        sums = torch.tensor([sum(map(sum, ages)), sum(map(len, ages)), sum(mixed)], dtype=torch.float32)
        total, count, num_mixed = module.contract.sum_over_data_parallel(sums.to(module.device)).tolist()
        oldest = max(module.contract.gather_over_data_parallel(max(map(max, filter(None, ages)), default=0)))
        if oldest > self.max_staleness:
            raise RunError(
                f"a response is {oldest} optimizer steps old at step {step}, but `rollout.max_staleness` is"
                f" {self.max_staleness}. Please report this."
            )
        count = max(count, 1.0)
        return {
            "rollout/staleness/mean": total / count,
            "rollout/staleness/max": float(oldest),
            "rollout/mixed_version_tokens": num_mixed / count,
        }

    def state_dict(self, module: PostTrainingModule) -> dict[str, Any]:
        """Finished groups of all ranks as plain values and tensors, for a checkpoint. Collective."""
        groups = [
            (*prompt, answer.result())
            for ticket in self.tickets
            for prompt, answer in zip(ticket.prompts, ticket.answers, strict=True)
            if answer is not None and answer.done() and answer.exception() is None
        ]
        contract = module.contract
        found = [group for rank in contract.gather_over_model_parallel(groups) for group in rank]
        all_groups = [group for rank in contract.gather_over_data_parallel(found) for group in rank]
        return {
            "prompts": [[epoch, row] for epoch, row, _ in all_groups],
            "sizes": [len(completions) for *_, completions in all_groups],
            "completions": pack_completions([each for *_, completions in all_groups for each in completions]),
            "steps": dict(self.steps),
            "data": digest_of_rows(module.trainer),
        }

    def restore(self, state: Mapping[str, Any], trainer: Trainer) -> None:
        """Take the finished groups of a checkpoint, of whatever ranks, for the batches to come."""
        self.steps = dict(state["steps"])
        if state["data"] != digest_of_rows(trainer):
            rank_zero_warn(
                "The checkpoint holds responses that wait for their step, but to other training rows than there are"
                " now: they are dropped."
            )
            return
        completions = iter(unpack_completions(state["completions"]))
        for (epoch, row), size in zip(state["prompts"], state["sizes"], strict=True):
            self._restored[epoch, row] = list(islice(completions, size))

    def stop(self) -> None:
        """Give up all that is not finished."""
        self.background.stop()


def answers_of(tickets: Iterable[Ticket]) -> list[Future[list[Completion]]]:
    """The answers that were asked for."""
    return [answer for ticket in tickets for answer in ticket.answers if answer is not None]


def death_in(answer: Future[list[Completion]]) -> EngineDiedError | None:
    """The death of an engine that a group was not finished for; None if it is not, or is finished or under way."""
    error = answer.exception() if answer.done() else None
    return error if isinstance(error, EngineDiedError) else None


def digest_of_rows(trainer: Trainer) -> str:
    """Returns a text that tells the training rows from others."""
    loader = cast(OrderedLoader, trainer.train_dataloader)
    return str(loader.state_dict()["rows"])
