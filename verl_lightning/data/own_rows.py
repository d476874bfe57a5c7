"""Batches of rows that a loader of the user's yields, such as torch's ``DataLoader`` over a list of rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_lightning.data.chat import ChatDataset, tokenize_chats
from verl_lightning.data.files import Row
from verl_lightning.data.image_files import is_picture
from verl_lightning.data.prompts import PromptDataset, tokenize_prompts
from verl_lightning.data.rows import chat_row, prompt_row
from verl_lightning.pictures import ImageReader, encode_image
from verl_lightning.types import PromptBatch, TokenBatch


def prompt_batch(
    batch: Any, tokenizer: PreTrainedTokenizerBase, *, needs_truth: bool, processor: ImageReader | None = None
) -> PromptBatch:
    """Makes a batch of prompts of rows; samples of a row draw the same numbers wherever the row comes from.

    Args:
        batch: What the loader has yielded: rows as those of a data file, or their columns.
        tokenizer: The policy's tokenizer.
        needs_truth: True where a reward function judges responses, so that each row needs a ``ground_truth``.
        processor: Processor of a model that reads images; None for a text model.

    Raises:
        ValueError: If a row is not as described.
        MisconfigurationException: If these are no rows.
    """
    found = rows_of(batch)
    prompts = [prompt_row(row, needs_truth=needs_truth) for row in named(found)]
    tokenized = tokenize_prompts(prompts, tokenizer, None, processor)
    dataset = PromptDataset(
        [each.row.values for each in tokenized],
        [each.ids for each in tokenized],
        [digest(row) for row in found],
        pad_token_id=tokenizer.pad_token_id,
        shown=[each.shown for each in tokenized],
        processor=processor,
    )
    return dataset.batch(list(range(len(found))), [False] * len(found))


def chat_batch(batch: Any, tokenizer: PreTrainedTokenizerBase, processor: ImageReader | None = None) -> TokenBatch:
    """Makes a batch of conversations of rows; every turn of the assistant is trained.

    Args:
        batch: What the loader has yielded: rows as those of a data file, or their columns.
        tokenizer: The policy's tokenizer.
        processor: Processor of a model that reads images; None for a text model.

    Raises:
        ValueError: If a row is not as described.
        MisconfigurationException: If these are no rows.
    """
    rows = [chat_row(row) for row in named(rows_of(batch))]
    chats = tokenize_chats(rows, tokenizer, supervise="all", enable_thinking=None, processor=processor)
    fields = ChatDataset(chats, pad_token_id=tokenizer.pad_token_id, processor=processor).batch(
        list(range(len(chats))), [False] * len(chats)
    )
    return TokenBatch(**fields)


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """Returns the rows of a batch; of one that torch's default collation has turned into columns, too.

    Raises:
        MisconfigurationException: If these are no rows.
    """
    if isinstance(batch, Mapping) and (sizes := {size_of(column) for column in batch.values()}) and len(sizes) == 1:
        return [{name: element(column, index) for name, column in batch.items()} for index in range(sizes.pop())]
    if isinstance(batch, list | tuple) and batch and all(isinstance(row, Mapping | str) for row in batch):
        return [{"prompt": row} if isinstance(row, str) else dict(row) for row in batch]
    raise MisconfigurationException(
        f"a loader yielded a `{type(batch).__name__}` in the place of rows. Have it yield lists of rows as those of a"
        " data file: `DataLoader(rows, batch_size=8, collate_fn=list)`; or use the data modules of `verl_lightning`."
    )


def size_of(column: Any) -> int:
    """Number of rows of a column that torch's default collation has made."""
    if isinstance(column, Mapping):
        return size_of(next(iter(column.values())))
    if isinstance(column, list | tuple) and isinstance(column[0], Mapping | list | tuple):
        return size_of(column[0])
    return len(column)


def element(column: Any, index: int) -> Any:
    """Value of one row in such a column: lists of rows have become lists of columns, one for each position."""
    if isinstance(column, Mapping):
        return {name: element(inner, index) for name, inner in column.items()}
    if isinstance(column, list | tuple) and isinstance(column[0], Mapping | list | tuple):
        return [element(inner, index) for inner in column]
    return column[index].tolist() if isinstance(column, Tensor) else column[index]


def named(rows: list[dict[str, Any]]) -> list[Row]:
    """Rows with names for messages."""
    return [
        Row(values=row, name=f"row {number} of a loader's batch", file="data")
        for number, row in enumerate(rows, start=1)
    ]


def digest(row: Mapping[str, Any]) -> int:
    """A number that stands for a row's content, from which its samples' seeds follow."""
    text = json.dumps(row, sort_keys=True, default=_as_text).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) >> 1


def _as_text(value: Any) -> str:
    """Returns a text for a value that JSON lacks: of a picture its content, as its own text is its place in memory."""
    return encode_image(value).hex() if is_picture(value) else str(value)
