"""Prompts to sample responses for, in verl's schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from verl_lightning.data.files import Row, fingerprint
from verl_lightning.data.lengths import Overlong, within_limit
from verl_lightning.data.messages import FLAG_KEYS, clean_messages
from verl_lightning.data.module import TokenizedDataModule
from verl_lightning.data.rows import PROMPT_COLUMNS, check_columns, read_prompt_rows
from verl_lightning.data.templates import ChatRenderer
from verl_lightning.options import typed
from verl_lightning.types import PromptBatch

_MAX_SOURCES = 16  # of which rows are shown


class PromptDataset:
    """Tokenised prompts.

    Args:
        rows: Columns of each row.
        prompt_ids: Tokens of each row.
        row_index: Position of each row in the data files.
        pad_token_id: Token that fills the padding.
        fingerprint: Digest that tells the rows from others; empty if it is not known.
        files: Paths of the files of each data source.
    """

    def __init__(
        self,
        rows: list[dict[str, Any]],
        prompt_ids: list[list[int]],
        row_index: list[int],
        *,
        pad_token_id: int,
        fingerprint: str = "",
        files: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.rows = rows
        self.prompt_ids = prompt_ids
        self.row_index = row_index
        self.pad_token_id = pad_token_id
        self.fingerprint = fingerprint
        self.files = files or {}

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.rows)

    def batch(self, indices: list[int], is_duplicate: list[bool]) -> PromptBatch:
        """The batch of some rows, padded to the longest of them."""
        lengths = torch.tensor([len(self.prompt_ids[index]) for index in indices])
        width = int(lengths.max())
        prompt_ids = torch.full((len(indices), width), self.pad_token_id)
        for row, index in enumerate(indices):
            prompt_ids[row, width - len(self.prompt_ids[index]) :] = torch.tensor(self.prompt_ids[index])
        return PromptBatch(
            prompt_ids=prompt_ids,
            prompt_mask=torch.arange(width) >= (width - lengths)[:, None],
            row_index=torch.tensor([self.row_index[index] for index in indices]),
            is_duplicate=torch.tensor(is_duplicate),
            rows=[self.rows[index] for index in indices],
        )


class PromptDataModule(TokenizedDataModule):
    """Prompts for PPO and its kin, from JSON Lines, JSON, CSV or parquet files in verl's schema.

    A row has the columns ``prompt`` (a list of messages, or a text that the user says) and ``reward_model`` (an object
    with ``ground_truth``) or ``ground_truth``, without which it may be where environments alone give rewards. It may
    have ``data_source`` (a name; without it, that of the file), ``extra_info`` and any other column, all of which reach
    the reward function or environment, and ``tools`` and ``enable_thinking``, which reach the chat template. A loader
    yields ``PromptBatch``es.

    At the end of an epoch, prompts that don't fill a whole step are left out; validation leaves out none.

    Args:
        train_files: Training prompts; a path or a list of paths, ``.jsonl``, ``.json``, ``.csv`` or
            ``.parquet``.
        val_files: Prompts of ``validate`` and of validation during ``fit``, likewise.
        test_files: Prompts of ``test``, likewise.
        columns: Names of the files' columns by the names that they get, such as ``{prompt: question, ground_truth:
            answer}``.
        prompts_per_step: Prompts of one training step, over all ranks.
        val_batch_size: Prompts of one validation or test batch, over all ranks.
        max_prompt_length: The most tokens that a prompt may have, the chat template's included.
        overlong: Treatment of longer prompts, before the first step: ``error`` names one and stops; ``drop`` leaves
            them out, of training and validation, and logs how many; ``truncate`` keeps their last tokens and logs how
            many.
        enable_thinking: Value for the chat template of models that have this switch, unless the row says otherwise;
            null leaves it to the template.
        shuffle: True shuffles the training prompts anew in each epoch, by the run's seed.

    Raises:
        ValueError: In ``setup``, if a file or row is not as described, or if the ranks can't share a batch equally.
    """

    @typed("data")
    def __init__(
        self,
        train_files: list[str] | str,
        val_files: list[str] | str = (),  # type: ignore[assignment]
        test_files: list[str] | str = (),  # type: ignore[assignment]
        *,
        prompts_per_step: int,
        val_batch_size: int = 64,
        max_prompt_length: int = 1024,
        overlong: Overlong = "error",
        enable_thinking: bool | None = None,
        columns: dict[str, str] | None = None,
        shuffle: bool = True,
    ) -> None:
        super().__init__(train_files, val_files, test_files, shuffle=shuffle)
        for name, value in (
            ("prompts_per_step", prompts_per_step),
            ("val_batch_size", val_batch_size),
            ("max_prompt_length", max_prompt_length),
        ):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        check_columns(columns, PROMPT_COLUMNS)
        self.columns = columns
        self.prompts_per_step = prompts_per_step
        self.val_batch_size = val_batch_size
        self.max_prompt_length = max_prompt_length
        self.overlong = overlong
        self.enable_thinking = enable_thinking
        self._needs_truth = True

    @override
    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
        found = read_prompt_rows(files, self.columns, needs_truth=self._needs_truth)
        tokenized = tokenize_prompts(found, tokenizer, self.enable_thinking)
        rows, ids = [row for row, _ in tokenized], [row_ids for _, row_ids in tokenized]
        self.check_tokens(ids, [row.name for row in rows], tokenizer)
        kept = within_limit(
            [len(row_ids) for row_ids in ids],
            [row.name for row in rows],
            limit=self.max_prompt_length,
            limit_name="max_prompt_length",
            overlong=self.overlong,
        )
        return PromptDataset(
            [rows[index].values for index in kept],
            [ids[index][-self.max_prompt_length :] for index in kept],
            kept,
            pad_token_id=tokenizer.pad_token_id,
            fingerprint=fingerprint(found[index] for index in kept),
            files=files_by_source(rows[index] for index in kept),
        )

    @override
    def setup(self, stage: str) -> None:
        self._needs_truth = getattr(self._trainer().lightning_module, "needs_truth", True)
        super().setup(stage)
        for name in ("val", "test"):
            source = getattr(self._loaders.get(name), "source", None)
            if isinstance(source, PromptDataset):
                tell_shared_sources(source.files)

    def first_rows(self) -> list[dict[str, Any]]:
        """The first row of each data source, of at most 16 of them; after ``setup``."""
        found: dict[str, dict[str, Any]] = {}
        for loader in self._loaders.values():
            rows = loader.source.rows if isinstance(loader.source, PromptDataset) else []
            for row in rows:
                found.setdefault(row["data_source"], row)
        return list(found.values())[:_MAX_SOURCES]

    @override
    def train_batch_size(self, world_size: int) -> int:
        return _share(self.prompts_per_step, world_size, "prompts_per_step")

    @override
    def eval_batch_size(self, world_size: int) -> int:
        return _share(self.val_batch_size, world_size, "val_batch_size")


def tokenize_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None
) -> list[tuple[Row, list[int]]]:
    """Checks rows of prompts, and returns each with its tokens.

    Args:
        rows: Rows in the layout of `read_prompt_rows`.
        tokenizer: Tokenizer with a chat template.
        enable_thinking: Value for rows that have none; None leaves it to the template.

    Raises:
        ValueError: If a row is not as described.
    """
    checked = [_checked(row) for row in rows]
    texts = [_text(row, tokenizer, enable_thinking) for row in checked]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return list(zip(checked, ids, strict=True))


def files_by_source(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Paths of the files that have rows of each data source."""
    files: dict[str, dict[str, None]] = {}
    for row in rows:
        files.setdefault(row.values["data_source"], {})[row.file] = None
    return {source: list(paths) for source, paths in files.items()}


def tell_shared_sources(files: Mapping[str, Sequence[str]]) -> None:
    """Warn where rows of several files will be one metric, since metrics are told apart by data source."""
    for source, paths in files.items():
        if len(paths) > 1:
            rank_zero_warn(
                f"Rows of {' and '.join(f'`{path}`' for path in paths)} have the data source `{source}`, so their"
                " rewards are one metric. To tell them apart, give the rows of each file a `data_source` of their own."
            )


def _checked(row: Row) -> Row:
    reward_model = row.values["reward_model"]
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise ValueError(
            f"Expected `reward_model` to be an object with `ground_truth` in {row.name}, got {reward_model}."
        )
    if not isinstance(row.values["data_source"], str):
        raise ValueError(f"Expected `data_source` to be a name in {row.name}, got {row.values['data_source']!r}.")
    if not isinstance(row.values.get("extra_info"), dict | None):
        raise ValueError(f"Expected `extra_info` to be an object in {row.name}, got {row.values['extra_info']!r}.")
    prompt = clean_messages(row.values["prompt"], name=f"`prompt` in {row.name}")
    for number, message in enumerate(prompt, start=1):
        if flags := FLAG_KEYS & message.keys():
            raise ValueError(
                f"`{min(flags)}` of message {number} of `prompt` in {row.name} means nothing: what is trained is what"
                " the policy answers. Take it out."
            )
    return replace(row, values={**row.values, "prompt": prompt})


def _text(row: Row, tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None) -> str:
    renderer, prompt = ChatRenderer(tokenizer, row, enable_thinking=enable_thinking), row.values["prompt"]
    text = renderer.render(prompt, add_generation_prompt=True)
    renderer.check_written(prompt, text, supervised={})
    return text


def _share(size: int, world_size: int, name: str) -> int:
    if size % world_size:
        raise ValueError(
            f"`{name}: {size}` is over all ranks and can't be shared equally by {world_size} of them. Make it a"
            f" multiple of {world_size}."
        )
    return size // world_size
