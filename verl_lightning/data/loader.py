"""Batches of a rank: shuffled, endless and resumable for training, complete and in order for evaluation.

They are plain iterables and not torch's ``DataLoader``: the rows are tokenised in memory, so that workers have nothing
to do, and Lightning replaces neither their sampler (``overfit_batches``) nor their epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from lightning.fabric.utilities import rank_zero_warn

from verl_lightning.data.mixture import Mixture
from verl_lightning.seeding import derive_seed

BatchT = TypeVar("BatchT", covariant=True)


class BatchSource(Protocol[BatchT]):
    """A data set that can make a batch of any of its rows."""

    def __len__(self) -> int:
        """Number of rows."""

    def batch(self, indices: list[int], is_duplicate: list[bool]) -> BatchT:
        """Makes the batch of some rows.

        Args:
            indices: Positions of the rows, in ``[0, len(self))``.
            is_duplicate: True for rows that only fill up a rank's share and must not count.
        """


@dataclass(frozen=True, kw_only=True)
class Start:
    """Position in the training rows from which a run goes on."""

    epoch: int
    """Number of finished epochs."""

    position: int = 0
    """Rows of the epoch's order that are done."""

    note: str = ""
    """Message on what differs from the run that wrote the checkpoint, and what follows; empty if nothing does."""


class TrainLoader:
    """Batches of one rank, epoch after epoch, in an order that depends on the seed and the epoch only.

    A global batch is the next ``batch_size * world_size`` rows of the epoch's order; a rank gets every
    ``world_size``-th of them. Rows at the end of an epoch that don't fill a global batch are not used in that epoch.
    The state is a position in the epoch's order, so that a run can go on with other ranks and batch sizes. It moves
    when a batch is handed out, and the next epoch begins when its first batch is asked for: a checkpoint after the last
    batch of an epoch resumes in the next one. Where the rows or their order are not those of the checkpoint, a position
    means nothing, and an epoch that had begun begins again.

    Args:
        source: The rows.
        batch_size: Rows of a batch of this rank.
        rank: Rank of this process among those that read different rows.
        world_size: Number of the processes that read different rows.
        shuffle: True gives each epoch an order of its own; else each has the order of the rows.
        seed: Seed of the orders.
        limit_batches: Number of batches of an epoch that are used (int), or their share (float), as Lightning's
            ``limit_train_batches``; Lightning cuts the epoch, this loader has to know where.
        mixture: Shares of several kinds of rows in each global batch; None takes rows as they come.

    Raises:
        ValueError: If the rows don't fill one global batch, or those of a kind not its share.
    """

    def __init__(
        self,
        source: BatchSource[object],
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        seed: int,
        limit_batches: int | float = 1.0,
        mixture: Mixture | None = None,
    ) -> None:
        self.source = source
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.global_batch_size = batch_size * world_size
        self.num_batches = len(source) // self.global_batch_size
        if self.num_batches == 0:
            raise ValueError(
                f"A training step takes {self.global_batch_size} rows ({batch_size} on each of {world_size} ranks), but"
                f" the training data has {len(source)}. Add rows, or lower `data.prompts_per_step` (`data.batch_size`"
                " of chats and pairs)."
            )
        is_count = isinstance(limit_batches, int)
        used = min(self.num_batches, limit_batches) if is_count else int(self.num_batches * limit_batches)
        self.used_batches = int(used)
        self.mixture = mixture
        self._end = self.used_batches * self.global_batch_size
        self._epoch = 0
        self._position = 0
        self._resumes = False
        self._found: tuple[Any, list[int]] = (None, [])
        if mixture is not None:
            mixture.check_stages(self.global_batch_size)

    def __len__(self) -> int:
        """Number of batches of a whole epoch."""
        return self.num_batches

    def __iter__(self) -> Iterator[object]:
        """Yields the rest of a restored epoch, or else the next epoch."""
        if self._position > 0 and (self._is_over(self._position) or not self._resumes):
            self._epoch += 1
            self._position = 0
        self._resumes = False
        while not self._is_over(self._position):
            begin = self._position
            self._position += self.global_batch_size
            order = self._order(self._epoch)  # which a curriculum may have changed
            yield self.batch_of(self._own(order, begin))

    def handed_out(self) -> tuple[int, int]:
        """Return the epoch of the batch that was handed out last, and its position in the epoch's order."""
        return self._epoch, self._position - self.global_batch_size

    def rows_from(self, epoch: int, position: int) -> Iterator[tuple[int, int, list[int]]]:
        """Yield this rank's rows of the batches from a position on, without end.

        Each comes with the epoch and the position of the batch behind it.

        Args:
            epoch: Epoch of the first batch.
            position: Position of the first batch in the epoch's order.
        """
        order = self._order(epoch)
        while True:
            if self._is_over(position):
                epoch, position = epoch + 1, 0
                order = self._order(epoch)
            indices = self._own(order, position)
            position += self.global_batch_size
            yield epoch, position, indices

    def batch_of(self, indices: list[int]) -> object:
        """Make the batch of some rows."""
        return self.source.batch(indices, [False] * len(indices))

    def kind_of(self, row: Mapping[str, Any]) -> Any:
        """Return the kind of a row, of which each batch has its share; the same for all rows where none are mixed."""
        return None if self.mixture is None else row.get(self.mixture.config.column)

    @property
    def num_handed_out(self) -> int:
        """Batches of the run so far, the first of which has number 0."""
        return self._epoch * self.used_batches + self._position // self.global_batch_size

    def _own(self, order: list[int], begin: int) -> list[int]:
        """Return this rank's rows of the global batch that begins at a position."""
        return order[begin + self.rank : begin + self.global_batch_size : self.world_size]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch, and the rows, order and batch size that it counts in."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "is_over": self._is_over(self._position),
            "global_batch_size": self.global_batch_size,
            "used_batches": self.used_batches,
            "num_rows": len(self.source),
            "rows": self._fingerprint,
            "seed": self.seed if self.shuffle else None,
            "mixture": self._mixture,
            "joined": [] if self.mixture is None else list(self.mixture.joined),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state, as `start` says."""
        start = self.start(state)
        if self.mixture is not None:
            self.mixture.joined = list(state.get("joined", []))
        self._epoch, self._position = start.epoch, start.position
        self._resumes = True
        if start.note:
            rank_zero_warn(start.note)

    def start(self, state: dict[str, Any]) -> Start:
        """Returns the position from which a saved state lets the run go on with the present rows, order and batch size.

        Args:
            state: State from `state_dict`, of this version or an older one.
        """
        epoch, position = state["epoch"], state["position"]
        change = self._change_of_rows(state) or self._change_of_order(state)
        is_over = state.get("is_over", not change and self._is_over(position))
        if position == 0 or is_over:
            note = f"{change} The next epoch begins with what there is now." if change and position else ""
            return Start(epoch=epoch + bool(position), note=note)
        if change:
            consequence = "The checkpoint's position in the epoch means nothing here, so the epoch begins again."
            return Start(epoch=epoch, note=f"{change} {consequence}")
        change = self._change_of_size(state)
        if self._is_over(position):
            return Start(epoch=epoch + 1, note=f"{change} Fewer are left, so the next epoch begins." if change else "")
        consequence = f"The epoch goes on after the {position} rows that are done."
        return Start(epoch=epoch, position=position, note=f"{change} {consequence}" if change else "")

    def num_done(self, start: Start) -> int:
        """Counts the batches of the epoch that are done: all but those of the present size that are left."""
        return self.used_batches - (self._end - start.position) // self.global_batch_size

    def _is_over(self, position: int) -> bool:
        return position + self.global_batch_size > self._end

    @property
    def _fingerprint(self) -> str:
        """Digest that tells the rows from others; empty if the source has none."""
        return str(getattr(self.source, "fingerprint", ""))

    def _change_of_rows(self, state: dict[str, Any]) -> str:
        if state["num_rows"] != len(self.source):
            return (
                f"The checkpoint was saved with {state['num_rows']} rows of training data, and there are now"
                f" {len(self.source)}."
            )
        saved = state.get("rows")
        if saved and self._fingerprint and saved != self._fingerprint:
            return (
                f"The checkpoint was saved with as many rows of training data as there are now, {len(self.source)}, but"
                f" with others (their digests are {saved} and {self._fingerprint})."
            )
        return ""

    def _change_of_order(self, state: dict[str, Any]) -> str:
        if (mixed := state.get("mixture", "")) != self._mixture:
            there, here = (f"mixed by {mixture}" if mixture else "not mixed" for mixture in (mixed, self._mixture))
            return f"The training rows were {there} when the checkpoint was saved, and are {here} now."
        ours = self.seed if self.shuffle else None
        saved = state.get("seed", ours)
        if saved == ours:
            return ""
        there, here = ("not shuffled" if seed is None else f"shuffled by the seed {seed}" for seed in (saved, ours))
        return f"The training rows were {there} when the checkpoint was saved, and are {here} now."

    def _change_of_size(self, state: dict[str, Any]) -> str:
        saved = state.get("global_batch_size", self.global_batch_size)
        if saved == self.global_batch_size:
            return ""
        return (
            f"A batch over all ranks had {saved} rows when the checkpoint was saved, and has {self.global_batch_size}"
            " now."
        )

    @property
    def _mixture(self) -> str:
        """Shares, batches and their size, on which the order of mixed rows depends; empty where none are mixed."""
        if self.mixture is None:
            return ""
        return f"{self.mixture.description} in {self.used_batches} batches of {self.global_batch_size}"

    def _order(self, epoch: int) -> list[int]:
        """Returns the rows of an epoch in their order; kept until another one is asked for."""
        key = (epoch, () if self.mixture is None else tuple(self.mixture.joined))
        if self._found[0] != key:
            self._found = (key, self._new_order(epoch))
        return self._found[1]

    def _new_order(self, epoch: int) -> list[int]:
        if self.mixture is not None:
            seed = self.seed if self.shuffle else None
            size = self.global_batch_size
            return self.mixture.order(epoch, num_batches=self.used_batches, batch_size=size, seed=seed)
        if not self.shuffle:
            return list(range(len(self.source)))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch, "data order"))
        order: list[int] = torch.randperm(len(self.source), generator=generator).tolist()
        return order


class EvalLoader:
    """Batches of one rank over all rows in their order, none left out; each pass is the same.

    Rows are dealt out to the ranks in turn. When they don't divide, the last ones are filled up with rows from the
    beginning, marked as duplicates, so that all ranks have equally many batches of equal sizes.

    Args:
        source: The rows.
        batch_size: Rows of a batch of this rank; the last batch may have fewer.
        rank: Rank of this process among those that read different rows.
        world_size: Number of the processes that read different rows.
    """

    def __init__(self, source: BatchSource[object], *, batch_size: int, rank: int, world_size: int) -> None:
        self.source = source
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """Number of batches of a pass."""
        rows_per_rank = -(-len(self.source) // self.world_size)
        return -(-rows_per_rank // self.batch_size)

    def __iter__(self) -> Iterator[object]:
        """Yields the batches of one pass."""
        num_rows = len(self.source)
        padded = -(-num_rows // self.world_size) * self.world_size
        positions = range(self.rank, padded, self.world_size)
        for begin in range(0, len(positions), self.batch_size):
            chunk = positions[begin : begin + self.batch_size]
            yield self.source.batch([p % num_rows for p in chunk], [p >= num_rows for p in chunk])
