"""Prompts to sample responses for, in verl's schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from lightning.fabric.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from verl_lightning.data.files import Row, fingerprint
from verl_lightning.data.image_files import ImageFile, ImagesConfig
from verl_lightning.data.images import expand, messages_and_images, read_images, without_marks
from verl_lightning.data.lengths import Overlong, within_limit
from verl_lightning.data.loader import BatchSource
from verl_lightning.data.media import without_media
from verl_lightning.data.messages import FLAG_KEYS, Message
from verl_lightning.data.mixture import Mixture, MixtureConfig
from verl_lightning.data.module import TokenizedDataModule
from verl_lightning.data.rows import PROMPT_COLUMNS, check_columns, read_prompt_rows
from verl_lightning.data.templates import ChatRenderer
from verl_lightning.data.validation_sets import ValidationSet, check_names
from verl_lightning.options import typed
from verl_lightning.pictures import ImageReader
from verl_lightning.types import PromptBatch, PromptImages

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
        shown: Images of each row; None where no row has any.
        processor: Processor of a model that reads images; None for a text model.
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
        shown: Sequence[ShownImages | None] | None = None,
        processor: ImageReader | None = None,
    ) -> None:
        self.rows = rows
        self.prompt_ids = prompt_ids
        self.row_index = row_index
        self.pad_token_id = pad_token_id
        self.fingerprint = fingerprint
        self.files = files or {}
        self.shown = shown
        self.processor = processor

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
            images=self._images(indices),
        )

    def _images(self, indices: list[int]) -> list[PromptImages | None] | None:
        found = [] if self.shown is None else [self.shown[index] for index in indices]
        if not any(found):
            return None
        assert self.processor is not None
        ids = [self.prompt_ids[index] for index in indices]
        return [
            None if shown is None else shown.read(own, self.processor) for shown, own in zip(found, ids, strict=True)
        ]


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
        images: Places where images may be, and frames of videos.
        shuffle: True shuffles the training prompts anew in each epoch, by the run's seed.
        mixture: Shares of several kinds of prompts, such as those of several files, in each step; null takes prompts as
            they come.
        val_sets: Several sets of validation prompts by name, each with its own environment and sampling, in the place
            of ``val_files``; their metrics are ``val/<name>/...``.

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
        images: ImagesConfig = ImagesConfig(),
        shuffle: bool = True,
        mixture: MixtureConfig | None = None,
        val_sets: dict[str, ValidationSet] | None = None,
    ) -> None:
        super().__init__(train_files, val_files, test_files, images=images, shuffle=shuffle)
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
        if mixture is not None:
            mixture.check_size(prompts_per_step)
        self.mixture = mixture
        if val_sets and val_files:
            raise ValueError(
                "`data.val_files` and `data.val_sets` are both set. Make the files a set, or leave one out."
            )
        self.val_sets = {
            name: ValidationSet(**each) if isinstance(each, dict) else each for name, each in (val_sets or {}).items()
        }
        check_names(self.val_sets)

    @override
    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
        found = read_prompt_rows(files, self.columns, needs_truth=self._needs_truth)
        tokenized = tokenize_prompts(found, tokenizer, self.enable_thinking, self.processor, self.images)
        rows, ids = [each.row for each in tokenized], [each.ids for each in tokenized]
        shown = [each.shown for each in tokenized]
        self.check_images([() if own is None else own.files for own in shown], [len(own) for own in ids], rows)
        self.check_tokens(ids, [row.name for row in rows], tokenizer)
        kept = within_limit(
            [len(row_ids) for row_ids in ids],
            [row.name for row in rows],
            limit=self.max_prompt_length,
            limit_name="max_prompt_length",
            overlong=self.overlong,
        )
        digests = [file.digest for index in kept if (own := shown[index]) is not None for file in own.files]
        return PromptDataset(
            [rows[index].values for index in kept],
            [ids[index][-self.max_prompt_length :] for index in kept],
            kept,
            pad_token_id=tokenizer.pad_token_id,
            fingerprint=fingerprint((found[index] for index in kept), digests),
            files=files_by_source(rows[index] for index in kept),
            shown=[shown[index] for index in kept],
            processor=self.processor,
        )

    @property
    @override
    def val_parts(self) -> dict[str, str | Sequence[str]]:
        return {f"val/{name}": each.files for name, each in self.val_sets.items()} or super().val_parts

    @override
    def setup(self, stage: str) -> None:
        self._needs_truth = getattr(self._trainer().lightning_module, "needs_truth", True)
        super().setup(stage)
        for name, each in self.val_sets.items():
            if each.environment is not None and (loader := self._loaders.get(f"val/{name}")) is not None:
                for row in cast(PromptDataset, loader.source).rows:
                    row["environment"] = each.environment
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
    def mixture_of(self, source: BatchSource[object]) -> Mixture | None:
        if self.mixture is None:
            return None
        assert isinstance(source, PromptDataset)
        return Mixture(self.mixture, [row.get(self.mixture.column) for row in source.rows])

    @override
    def train_batch_size(self, world_size: int) -> int:
        return _share(self.prompts_per_step, world_size, "prompts_per_step")

    @override
    def eval_batch_size(self, world_size: int) -> int:
        return _share(self.val_batch_size, world_size, "val_batch_size")


@dataclass(frozen=True, kw_only=True)
class ShownImages:
    """The images of a prompt before they are read."""

    files: tuple[ImageFile, ...]
    """Images in their order."""

    short_ids: list[int]
    """The prompt's tokens with one placeholder for each image."""

    def read(self, prompt_ids: list[int], processor: ImageReader) -> PromptImages:
        """Returns the images as the model reads them.

        Args:
            prompt_ids: Tokens of the prompt.
            processor: Processor of the model.
        """
        inputs = read_images(self.files, processor)
        assert inputs is not None
        return PromptImages(
            inputs=inputs,
            mm_token_type_ids=processor.token_types(prompt_ids),
            files=[file.data for file in self.files],
            short_ids=self.short_ids,
        )


class TokenizedPrompt(NamedTuple):
    """A checked row, its tokens and its images."""

    row: Row
    ids: list[int]
    shown: ShownImages | None


def tokenize_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    enable_thinking: bool | None,
    processor: ImageReader | None = None,
    images: ImagesConfig = ImagesConfig(),
) -> list[TokenizedPrompt]:
    """Checks rows of prompts, and returns each with its tokens and images.

    Args:
        rows: Rows in the layout of `read_prompt_rows`.
        tokenizer: Tokenizer with a chat template.
        enable_thinking: Value for rows that have none; None leaves it to the template.
        processor: Processor of a model that reads images; None for a text model.
        images: Places where images may be.

    Raises:
        ValueError: If a row is not as described.
    """
    checked = [_checked(row, processor, images) for row in rows]
    texts = [_text(prompt, tokenizer, enable_thinking) for prompt in checked]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    found = []
    for prompt, text, own in zip(checked, texts, ids, strict=True):
        if processor is None or not prompt.files:
            found.append(TokenizedPrompt(prompt.row, own, None))
            continue
        whole, _ = expand(text, prompt.files, processor, name=prompt.row.name)
        shown = ShownImages(files=prompt.files, short_ids=own)
        found.append(TokenizedPrompt(prompt.row, tokenizer(whole, add_special_tokens=False)["input_ids"], shown))
    return found


class _Prompt(NamedTuple):
    """A checked row, its messages and their images."""

    row: Row
    messages: list[Message]
    files: tuple[ImageFile, ...]


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


def _checked(row: Row, processor: ImageReader | None, images: ImagesConfig) -> _Prompt:
    reward_model = row.values["reward_model"]
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise ValueError(
            f"Expected `reward_model` to be an object with `ground_truth` in {row.name}, got {reward_model}."
        )
    if not isinstance(row.values["data_source"], str):
        raise ValueError(f"Expected `data_source` to be a name in {row.name}, got {row.values['data_source']!r}.")
    if not isinstance(row.values.get("extra_info"), dict | None):
        raise ValueError(f"Expected `extra_info` to be an object in {row.name}, got {row.values['extra_info']!r}.")
    prompt, files = messages_and_images(row, "prompt", processor, images)
    for number, message in enumerate(prompt, start=1):
        if flags := FLAG_KEYS & message.keys():
            raise ValueError(
                f"`{min(flags)}` of message {number} of `prompt` in {row.name} means nothing: what is trained is what"
                " the policy answers. Take it out."
            )
    if not files:
        return _Prompt(replace(row, values={**row.values, "prompt": prompt}), prompt, files)
    told = [{**message, "content": without_marks(message["content"])} for message in prompt]
    shown = [file.source for file in files]
    return _Prompt(replace(row, values={**without_media(row.values), "prompt": told, "images": shown}), prompt, files)


def _text(prompt: _Prompt, tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None) -> str:
    renderer = ChatRenderer(tokenizer, prompt.row, enable_thinking=enable_thinking)
    text = renderer.render(prompt.messages, add_generation_prompt=True)
    renderer.check_written(prompt.messages, text, supervised={})
    return text


def _share(size: int, world_size: int, name: str) -> int:
    if size % world_size:
        raise ValueError(
            f"`{name}: {size}` is over all ranks and can't be shared equally by {world_size} of them. Make it a"
            f" multiple of {world_size}."
        )
    return size // world_size
