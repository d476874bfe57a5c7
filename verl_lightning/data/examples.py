"""The common base of data modules whose rows are tokenised examples with a mask of what is learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from lightning.fabric.utilities import rank_zero_info
from typing_extensions import override

from verl_lightning.data.image_files import ImagesConfig
from verl_lightning.data.lengths import Overlong, within_limit
from verl_lightning.data.module import TokenizedDataModule
from verl_lightning.data.rows import check_columns
from verl_lightning.types import TokenBatch, with_lengths

Unsupervised = Literal["error", "drop"]


class ExampleDataModule(TokenizedDataModule):
    """Examples in batches of a fixed number on each rank; see the subclasses for the options."""

    batch_type: ClassVar[type[TokenBatch]] = TokenBatch
    """Class of the batches that the module in training gets."""

    known_columns: ClassVar[tuple[str, ...]]
    """Columns that are read."""

    def __init__(
        self,
        train_files: str | Sequence[str],
        val_files: str | Sequence[str],
        test_files: str | Sequence[str],
        *,
        batch_size: int,
        max_length: int,
        overlong: Overlong,
        unsupervised: Unsupervised,
        enable_thinking: bool | None,
        columns: dict[str, str] | None,
        images: ImagesConfig,
        shuffle: bool,
    ) -> None:
        super().__init__(train_files, val_files, test_files, images=images, shuffle=shuffle)
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        if max_length < 2:
            raise ValueError(f"`max_length` must be at least 2, got {max_length}.")
        check_columns(columns, self.known_columns)
        self.columns = columns
        self.batch_size = batch_size
        self.max_length = max_length
        self.overlong = overlong
        self.unsupervised = unsupervised
        self.enable_thinking = enable_thinking

    @override
    def train_batch_size(self, world_size: int) -> int:
        return self.batch_size

    @override
    def eval_batch_size(self, world_size: int) -> int:
        return self.batch_size

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> TokenBatch:
        tokens = batch if isinstance(batch, TokenBatch) else self.batch_type(**batch)
        return with_lengths([tokens])[0]  # while they can be read at once

    def fitting(self, lengths: Sequence[int], names: Sequence[str]) -> list[int]:
        """Returns the positions of the examples that are kept, given their lengths in tokens, as `overlong` says."""
        return within_limit(lengths, names, limit=self.max_length, limit_name="max_length", overlong=self.overlong)

    def teaching(self, teaches: Sequence[bool], names: Sequence[str], *, otherwise: str) -> list[int]:
        """Returns the positions of the examples that something can be learnt from.

        Args:
            teaches: True for those examples.
            names: Name of each example, for messages.
            otherwise: What is wrong with the others, as a sentence's part that begins with "they".

        Raises:
            ValueError: If there are others and `unsupervised` is ``error``, or if there are no examples.
        """
        kept = [index for index, says in enumerate(teaches) if says]
        if (count := len(teaches) - len(kept)) == 0:
            return kept
        first = names[teaches.index(False)]
        if self.unsupervised == "error" or not kept:
            raise ValueError(
                f"There is nothing to learn from in {first}, and in {count} of {len(teaches)} rows: {otherwise}."
                ' Correct them, or set `unsupervised` to "drop".'
            )
        rank_zero_info(f"Dropped {count} of {len(teaches)} rows, in which nothing is supervised.")
        return kept
