"""Preferences to learn from: pairs of responses, or responses with a label, tokenised."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from verl_lightning.data.chat import TokenizedChat, encode, padded, tokenize_chats
from verl_lightning.data.examples import ExampleDataModule, Unsupervised
from verl_lightning.data.files import Row, fingerprint
from verl_lightning.data.image_files import ImagesConfig
from verl_lightning.data.lengths import Overlong
from verl_lightning.data.loader import EvalLoader
from verl_lightning.data.media import refuse_lost, refuse_media
from verl_lightning.data.module import data_parallel_rank_and_size
from verl_lightning.data.preference_rows import PREFERENCE_COLUMNS, Preference, Response, read_preferences
from verl_lightning.data.spans import Conversation
from verl_lightning.options import typed
from verl_lightning.pictures import ImageReader
from verl_lightning.types import PreferenceBatch, TokenBatch, with_lengths


@dataclass(frozen=True, kw_only=True)
class TokenizedPreference:
    """An example of two sequences."""

    name: str
    """Name of its row in error messages."""

    sequences: tuple[TokenizedChat, TokenizedChat]
    """The prompt with the chosen and with the rejected response; or with its own and with another prompt's."""

    is_desirable: bool | None = None
    """Label of the own response; None for pairs."""

    margin: float | None = None
    """Difference of rewards that a pair should have at least; None where the row says nothing."""

    @property
    def teaches(self) -> bool:
        """True if both sequences have a response and differ."""
        one, other = self.sequences
        return one.teaches and other.teaches and one != other


class PreferenceDataset:
    """Tokenised examples of two sequences each.

    Args:
        examples: Tokens and supervision of each example.
        pad_token_id: Token that fills the padding.
        fingerprint: Digest that tells the rows from others; empty if it is not known.
        processor: Processor of a model that reads images; None for a text model.
    """

    def __init__(
        self,
        examples: list[TokenizedPreference],
        *,
        pad_token_id: int,
        fingerprint: str = "",
        processor: ImageReader | None = None,
    ) -> None:
        self.examples = examples
        self.pad_token_id = pad_token_id
        self.fingerprint = fingerprint
        self.processor = processor
        self.ref_log_probs: Float[Tensor, "examples 2"] | None = None
        """Log-probability of each response under the reference, in nats; whoever knows the reference fills it in."""

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.examples)

    def digest(self) -> str:
        """Returns a short text that tells the tokens and images, and what is learnt of them, from others."""
        found = hashlib.blake2b(digest_size=16)
        for example in self.examples:
            for sequence in example.sequences:
                found.update(repr((sequence.ids, sequence.is_supervised)).encode())
                for image in sequence.images:
                    found.update(image.digest.encode())
        return found.hexdigest()

    def share(self, *, batch_size: int, rank: int, world_size: int) -> Iterator[PreferenceBatch]:
        """Yields the examples of one of several ranks: every ``world_size``-th, as many on each.

        Args:
            batch_size: Examples of a batch.
            rank: Index of the rank.
            world_size: Number of ranks that share the examples.
        """
        for fields in EvalLoader(self, batch_size=batch_size, rank=rank, world_size=world_size):
            yield with_lengths([PreferenceBatch(**cast(dict[str, Any], fields))])[0]

    def batch(self, indices: list[int], is_duplicate: list[bool]) -> dict[str, Any]:
        """The fields of a ``PreferenceBatch`` of some examples; nothing is supervised in duplicates."""
        examples = [self.examples[index] for index in indices]
        rows = [sequence for example in examples for sequence in example.sequences]
        skipped = [skip for skip in is_duplicate for _ in range(2)]
        batch: dict[str, Any] = {**padded(rows, skipped, pad_token_id=self.pad_token_id, processor=self.processor)}
        if self.ref_log_probs is not None:
            batch["ref_log_probs"] = self.ref_log_probs[indices].flatten()
        if examples[0].is_desirable is not None:
            labels = torch.tensor([example.is_desirable for example in examples], dtype=torch.bool)
            batch["is_desirable"] = labels.repeat_interleave(2)
        if any(example.margin is not None for example in self.examples):
            margins = torch.tensor([example.margin or 0.0 for example in examples], dtype=torch.float32)
            batch["margins"] = margins.repeat_interleave(2)
        return batch


class PreferenceDataModule(ExampleDataModule):
    """Preferences for `DPOModule`, from JSON Lines, JSON, CSV or parquet files.

    A row has ``chosen`` and ``rejected``, and ``prompt`` unless it is their common beginning. Each may be a list of
    messages with ``role`` and ``content``, of which the assistant's after the prompt are learnt from, rendered by the
    chat template; where one is a list, a text is the user's (``prompt``) or the assistant's. Where all are texts they
    are taken as they are, without a template: the prompt, then the response, then the end token. A row may have
    ``margin``, ``tools`` and ``enable_thinking``.

    For losses without pairs (``KTO``) a row has ``prompt``, ``completion`` and ``label``, true or false; a pair counts
    as two such rows.

    Args:
        train_files: Training preferences; a path or a list of paths, ``.jsonl``, ``.json``, ``.csv`` or ``.parquet``.
        val_files: Preferences of ``validate`` and of validation during ``fit``, likewise.
        test_files: Preferences of ``test``, likewise.
        columns: Names of the files' columns by the names that they get, such as ``{chosen: better, rejected: worse}``.
        batch_size: Examples of a batch of one rank, in training and validation: pairs, or responses with a label. At
            the end of a training epoch, examples that don't fill a batch on each rank are left out; validation leaves
            out none.
        max_length: The most tokens that a prompt with a response may have.
        overlong: Treatment of longer ones, before the first step: ``error`` names one and stops; ``drop`` leaves
            them out and logs how many; ``truncate`` keeps their first tokens and logs how many.
        unsupervised: Treatment of rows that nothing can be learnt from, since a response is empty or cut off, or since
            both are the same: ``error`` names one and stops; ``drop`` leaves them out and logs how many.
        enable_thinking: Value for the chat template of models that have this switch, unless the row says otherwise;
            null leaves it to the template.
        images: Places where images may be, and frames of videos.
        shuffle: True shuffles the training rows anew in each epoch, by the run's seed.

    Raises:
        ValueError: In ``setup``, if a file or row is not as described, or does not fit the module's loss.
    """

    batch_type: ClassVar[type[TokenBatch]] = PreferenceBatch
    known_columns: ClassVar[tuple[str, ...]] = PREFERENCE_COLUMNS

    @typed("data")
    def __init__(
        self,
        train_files: list[str] | str,
        val_files: list[str] | str = (),  # type: ignore[assignment]
        test_files: list[str] | str = (),  # type: ignore[assignment]
        *,
        batch_size: int = 8,
        max_length: int = 2048,
        overlong: Overlong = "error",
        unsupervised: Unsupervised = "error",
        enable_thinking: bool | None = None,
        columns: dict[str, str] | None = None,
        images: ImagesConfig = ImagesConfig(),
        shuffle: bool = True,
    ) -> None:
        super().__init__(
            train_files,
            val_files,
            test_files,
            batch_size=batch_size,
            max_length=max_length,
            overlong=overlong,
            unsupervised=unsupervised,
            enable_thinking=enable_thinking,
            columns=columns,
            images=images,
            shuffle=shuffle,
        )
        self._takes_pairs = True

    @override
    def setup(self, stage: str) -> None:
        # As for the tokenizer, the module in training says what it needs.
        self._takes_pairs = bool(getattr(self._trainer().lightning_module, "takes_pairs", True))
        super().setup(stage)

    @override
    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase) -> PreferenceDataset:
        rows, preferences = read_preferences(files, self.columns)
        if self._takes_pairs and (single := next((p for p in preferences if p.is_desirable is not None), None)):
            raise ValueError(
                f"There is a response with a `label` in {single.name}, but `model.loss` compares pairs. Give it rows"
                " with `chosen` and `rejected`, or choose a loss of single responses, `KTO`."
            )
        chats = self._tokenized([response for p in preferences for response in p.responses], tokenizer)
        left = iter(chats)
        found = [(preference, [next(left) for _ in preference.responses]) for preference in preferences]
        examples = self._pairs(found) if self._takes_pairs else self._singles(found)
        return PreferenceDataset(
            examples,
            pad_token_id=tokenizer.pad_token_id,
            fingerprint=fingerprint(rows, [image.digest for chat in chats for image in chat.images]),
            processor=self.processor,
        )

    def _tokenized(self, responses: list[Response], tokenizer: PreTrainedTokenizerBase) -> list[TokenizedChat]:
        """Tokens of each response with its prompt."""
        chats = iter(
            tokenize_chats(
                [response.row for response in responses if not response.is_plain],
                tokenizer,
                supervise="all",
                enable_thinking=self.enable_thinking,
                processor=self.processor,
                images=self.images,
            )
        )
        plain = iter(tokenize_plain([response.row for response in responses if response.is_plain], tokenizer))
        tokenized = [next(plain if response.is_plain else chats) for response in responses]
        rows = [response.row for response in responses]
        self.check_tokens([chat.ids for chat in tokenized], [row.name for row in rows], tokenizer)
        self.check_images([chat.images for chat in tokenized], [len(chat.ids) for chat in tokenized], rows)
        return tokenized

    def _pairs(self, found: list[tuple[Preference, list[TokenizedChat]]]) -> list[TokenizedPreference]:
        names = [preference.name for preference, _ in found]
        kept = self.fitting([max(len(chat.ids) for chat in chats) for _, chats in found], names)
        pairs = []
        for index in kept:
            preference, (chosen, rejected) = found[index]
            sequences = chosen.cut(self.max_length), rejected.cut(self.max_length)
            pairs.append(TokenizedPreference(name=preference.name, sequences=sequences, margin=preference.margin))
        teaches = [
            all(chat.teaches for chat in pair.sequences) and pair.sequences[0] != pair.sequences[1] for pair in pairs
        ]
        return [pairs[index] for index in self._teaching(teaches, [pair.name for pair in pairs])]

    def _singles(self, found: list[tuple[Preference, list[TokenizedChat]]]) -> list[TokenizedPreference]:
        """Responses with a label, all chosen ones of pairs before the rejected ones, each with another's response."""
        labelled = [(p.name, chats[0], p.is_desirable) for p, chats in found if p.is_desirable is not None]
        pairs = [(p.name, chats) for p, chats in found if p.is_desirable is None]
        singles = [
            *labelled,
            *((f"`chosen` of {name}", chats[0], True) for name, chats in pairs),
            *((f"`rejected` of {name}", chats[1], False) for name, chats in pairs),
        ]
        kept = self.fitting([len(chat.ids) for _, chat, _ in singles], [name for name, _, _ in singles])
        cut = [(name, chat.cut(self.max_length), label) for name, chat, label in (singles[index] for index in kept)]
        kept = self._teaching([chat.teaches for _, chat, _ in cut], [name for name, _, _ in cut])
        rows = [cut[index] for index in kept]
        _, ranks = data_parallel_rank_and_size(self._trainer())
        others = [rows[index][1] for index in others_of(len(rows), self.batch_size * ranks)]
        return [
            TokenizedPreference(
                name=name, sequences=(chat, exchanged(chat, other).cut(self.max_length)), is_desirable=label
            )
            for (name, chat, label), other in zip(rows, others, strict=True)
        ]

    def _teaching(self, teaches: list[bool], names: list[str]) -> list[int]:
        problem = f"they have a response without a token within `max_length: {self.max_length}`"
        return self.teaching(teaches, names, otherwise=f"{problem}, or the same one twice")


def tokenize_plain(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[TokenizedChat]:
    """Tokenises prompts and responses that are texts, one after the other, with the tokens that begin and end a text.

    Args:
        rows: Rows with ``prompt`` and ``completion``.
        tokenizer: Fast tokenizer with an end token.

    Raises:
        ValueError: If the tokenizer has no end token.
    """
    if not rows:
        return []
    end = tokenizer.eos_token
    if end is None:
        raise ValueError(f"The tokenizer has no end token for {rows[0].name}. Set `eos_token` in its config.")
    conversations = []
    for row in rows:
        refuse_media(row, images=True, videos=True, plain=True)
        refuse_lost(row, shows=False)
        prompt, completion = row.values["prompt"], row.values["completion"]
        text = prompt + completion + ("" if completion.endswith(end) else end)
        span = (len(prompt), len(text) if completion else len(prompt))
        conversations.append(Conversation(text=text, spans=[span], leaves_out_thoughts=False))
    begin: list[int] = tokenizer("")["input_ids"][:1]
    begin = begin if begin == [tokenizer.bos_token_id] else []
    return [
        TokenizedChat(ids=begin + chat.ids, is_supervised=[False] * len(begin) + chat.is_supervised)
        for chat in encode(conversations, tokenizer)
    ]


def others_of(count: int, batch_size: int) -> list[int]:
    """For each row another one: the row before it in its run of ``batch_size``, for the first the run's last.

    So the responses of a batch of all ranks, if rows are not shuffled, are also those that its prompts get instead.

    Args:
        count: Number of rows.
        batch_size: Rows of a run.
    """
    others = []
    for row in range(count):
        start = row // batch_size * batch_size
        other = row - 1 if row > start else min(start + batch_size, count) - 1
        others.append(other if other != row else (row - 1) % count)
    return others


def exchanged(chat: TokenizedChat, other: TokenizedChat) -> TokenizedChat:
    """The prompt of one sequence, up to its first supervised token, with the response of another."""
    end, start = chat.is_supervised.index(True), other.is_supervised.index(True)
    return replace(
        chat,
        ids=chat.ids[:end] + other.ids[start:],
        is_supervised=[False] * end + other.is_supervised[start:],
    )
