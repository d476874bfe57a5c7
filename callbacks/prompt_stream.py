"""The prompts of a rank in the order of the data, each with what an engine is asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from lightning.pytorch import Trainer

from verl_lightning.rollout.base import Completion, Request
from verl_lightning.types import PromptBatch


class Prompt(NamedTuple):
    """A prompt of the run, which is learnt from once; in this order they come."""

    batch: int
    """Number of the batch in which the loader has it, over all epochs."""

    place: int
    """Position in that batch, over all ranks."""

    epoch: int
    """Epoch of the batch."""

    row: int
    """Position among the loader's rows."""


class Cursor(NamedTuple):
    """A place in the order of the prompts, behind all that were taken."""

    batch: int
    """Number of the next batch."""

    epoch: int
    """Epoch of the next batch."""

    position: int
    """Position of the next batch in the epoch's order."""


class Group:
    """A prompt with the responses to it.

    Args:
        prompt: The prompt.
        kind: Kind of its row, of which each step has its share.
        requests: Requests for all responses.
    """

    def __init__(self, prompt: Prompt, kind: Any, requests: Sequence[Request]) -> None:
        self.prompt = prompt
        self.kind = kind
        self.requests = requests
        self.asked: int | None = None
        """The ``global_step`` of the oldest weights that may have sampled a response; None before it is asked for."""
        self.answer: Future[list[Completion]] | None = None
        """Completion of each request; None before it is asked for, and once its engine has died."""

    @property
    def is_done(self) -> bool:
        """True if all responses are there."""
        return self.answer is not None and self.answer.done()

    def answered(self, asked: int, completions: list[Completion]) -> None:
        """Take responses that are there."""
        self.asked, self.answer = asked, Future()
        self.answer.set_result(completions)

    def forget(self) -> None:
        """Give up all responses; the prompt is asked anew some time."""
        if self.answer is not None:
            self.answer.cancel()
        self.asked = self.answer = None


@runtime_checkable
class OrderedLoader(Protocol):
    """A loader that knows its order before it yields a batch, as `TrainLoader` does."""

    batch_size: int

    def handed_out(self) -> tuple[int, int]:
        """Return the epoch and the position of the batch that was handed out last."""

    def rows_from(self, epoch: int, position: int) -> Iterator[tuple[int, int, list[int]]]:
        """Yield epoch, position of the next, and this rank's rows, of all batches from a position on."""

    def batch_of(self, indices: list[int]) -> PromptBatch:
        """Make the batch of some rows."""

    def kind_of(self, row: Mapping[str, Any]) -> Any:
        """Return the kind of a row."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: what tells the rows and their order from others, among other things."""


def ordered_loader(trainer: Trainer) -> OrderedLoader:
    """Returns the training loader, which was found to be one."""
    return cast(OrderedLoader, trainer.train_dataloader)


def digest_of_order(loader: OrderedLoader) -> str:
    """Returns a text that tells the training rows and their order from others."""
    state = loader.state_dict()
    return ", ".join(f"{name} {state.get(name)}" for name in ("num_rows", "rows", "seed", "mixture"))


class PromptStream:
    """Prompts from a place in the order on, without end.

    Args:
        loader: Loader whose order it is.
        start: Place of the first.
        ask: Function that makes the requests for a batch with a number, all responses to one prompt adjacent.
        own: Function that tells which of so many prompts of this rank's data are asked by this process.
        spacing: Number of ranks that read different rows.
        rank: This one among them.
    """

    def __init__(
        self,
        loader: OrderedLoader,
        start: Cursor,
        *,
        ask: Callable[[PromptBatch, int], Sequence[Request]],
        own: Callable[[int], range],
        rank: int,
        spacing: int,
    ) -> None:
        self.cursor = start
        self._loader = loader
        self._ask = ask
        self._own = own
        self._rank = rank
        self._spacing = spacing
        self._rows = loader.rows_from(start.epoch, start.position)

    def next_batch(self) -> list[Group]:
        """Return this process's prompts of the next batch."""
        epoch, position, indices = next(self._rows)
        number = self.cursor.batch
        self.cursor = Cursor(number + 1, epoch, position)
        places = [self._rank + turn * self._spacing for turn in range(len(indices))]
        prompts = [Prompt(number, place, epoch, row) for place, row in zip(places, indices, strict=True)]
        groups = self.groups_of(prompts)
        return [groups[position] for position in self._own(len(groups))]

    def groups_of(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Make the groups of some prompts."""
        found: list[Group] = []
        for number in dict.fromkeys(prompt.batch for prompt in prompts):
            same = [prompt for prompt in prompts if prompt.batch == number]
            batch = self._loader.batch_of([prompt.row for prompt in same])
            requests = self._ask(batch, number)
            size = len(requests) // len(same)
            found += [
                Group(prompt, self._loader.kind_of(row), requests[turn * size :][:size])
                for turn, (prompt, row) in enumerate(zip(same, batch.rows, strict=True))
            ]
        return found
