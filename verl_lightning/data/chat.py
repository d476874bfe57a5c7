"""Conversations to learn from, with a mask of what the assistant said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NotRequired, TypedDict

import torch
from jaxtyping import Bool, Int
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from verl_lightning.data.examples import ExampleDataModule, Unsupervised
from verl_lightning.data.files import Row, fingerprint
from verl_lightning.data.image_files import ImageFile, ImagesConfig
from verl_lightning.data.images import expand, messages_and_images, read_images
from verl_lightning.data.lengths import Overlong
from verl_lightning.data.rows import CHAT_COLUMNS, read_chat_rows
from verl_lightning.data.spans import Conversation, Span, Supervise, render_conversation
from verl_lightning.data.templates import ChatRenderer
from verl_lightning.options import typed
from verl_lightning.pictures import ImageReader
from verl_lightning.types import ImageInputs


@dataclass(frozen=True, kw_only=True)
class TokenizedChat:
    """A conversation's tokens."""

    ids: list[int]
    """Token ids of the whole conversation."""

    is_supervised: list[bool]
    """True on tokens that the assistant said, the end token of its turn included."""

    images: tuple[ImageFile, ...] = ()
    """Images that stand in the conversation."""

    @property
    def teaches(self) -> bool:
        """True if a token is supervised that another one comes before."""
        return any(self.is_supervised[1:])

    def cut(self, length: int) -> TokenizedChat:
        """Returns the first tokens, at most ``length``."""
        return replace(self, ids=self.ids[:length], is_supervised=self.is_supervised[:length])


class ChatTensors(TypedDict):
    """The fields of a ``TokenBatch``."""

    input_ids: Int[Tensor, "batch sequence"]
    attention_mask: Bool[Tensor, "batch sequence"]
    response_mask: Bool[Tensor, "batch response"]
    images: NotRequired[tuple[ImageInputs | None, ...]]
    mm_token_type_ids: NotRequired[Int[Tensor, "batch sequence"]]


class ChatDataset:
    """Tokenised conversations.

    Args:
        chats: Tokens and supervision of each row.
        pad_token_id: Token that fills the padding.
        fingerprint: Digest that tells the rows from others; empty if it is not known.
        processor: Processor of a model that reads images; None for a text model.
    """

    def __init__(
        self,
        chats: list[TokenizedChat],
        *,
        pad_token_id: int,
        fingerprint: str = "",
        processor: ImageReader | None = None,
    ) -> None:
        self.chats = chats
        self.pad_token_id = pad_token_id
        self.fingerprint = fingerprint
        self.processor = processor

    def __len__(self) -> int:
        """Number of conversations."""
        return len(self.chats)

    def batch(self, indices: list[int], is_duplicate: list[bool]) -> ChatTensors:
        """The batch of some rows, padded on the right to the longest of them; nothing is supervised in duplicates."""
        chats = [self.chats[index] for index in indices]
        return padded(chats, is_duplicate, pad_token_id=self.pad_token_id, processor=self.processor)


def padded(
    chats: Sequence[TokenizedChat],
    is_duplicate: Sequence[bool],
    *,
    pad_token_id: int,
    processor: ImageReader | None = None,
) -> ChatTensors:
    """Sequences padded on the right to the longest of them.

    Args:
        chats: Tokens and supervision of each row.
        is_duplicate: True for rows in which nothing is to be supervised.
        pad_token_id: Token that fills the padding.
        processor: Processor of a model that reads images; None for a text model.
    """
    lengths = torch.tensor([len(chat.ids) for chat in chats])
    width = int(lengths.max())
    input_ids = torch.full((len(chats), width), pad_token_id)
    is_supervised = torch.zeros(len(chats), width, dtype=torch.bool)
    for row, (chat, counts_not) in enumerate(zip(chats, is_duplicate, strict=True)):
        input_ids[row, : len(chat.ids)] = torch.tensor(chat.ids)
        is_supervised[row, : len(chat.ids)] = torch.tensor(chat.is_supervised) & (not counts_not)
    tensors = ChatTensors(
        input_ids=input_ids,
        attention_mask=torch.arange(width) < lengths[:, None],
        response_mask=is_supervised[:, 1:],
    )
    if processor is not None and any(chat.images for chat in chats):
        tensors["images"] = tuple(read_images(chat.images, processor) for chat in chats)
        shows = torch.tensor([bool(chat.images) for chat in chats])
        tensors["mm_token_type_ids"] = ((input_ids == processor.image_token_id) & shows[:, None]).long()
    return tensors


class ChatDataModule(ExampleDataModule):
    """Conversations for SFT, from JSON Lines, JSON, CSV or parquet files.

    A row has the column ``messages``: a list of messages with ``role`` and ``content``, any number of turns, calls of
    tools and their results included. It may have ``tools`` (a list of JSON schemas, or that list as JSON text) and
    ``enable_thinking``, which reach the chat template. ``loss_mask: 0`` in an assistant's message (or ``weight: 0``, or
    ``train: false``) leaves that turn out of training. Instead of ``messages`` a row may have ``prompt`` and
    ``completion`` (texts, or lists of messages; the completion is trained), or ``conversations`` as of ShareGPT.

    The conversation is rendered and tokenised as a whole. A turn is supervised from the token after the prompt that a
    model would answer with it to the token that ends a response; where the chat template marks it with
    ``{% generation %}``, as far as it is marked. All that was written stands in the text, save thoughts that the
    template leaves out of earlier turns that are not trained; a row of which this is not so is refused.

    The module in training gets each batch as a ``TokenBatch`` whose response is all columns but the first. The loaders
    themselves yield dicts of its fields, since Lightning's half-precision plugins can't convert a frozen dataclass.

    Args:
        train_files: Training conversations; a path or a list of paths, ``.jsonl``, ``.json``, ``.csv`` or
            ``.parquet``.
        val_files: Conversations of ``validate`` and of validation during ``fit``, likewise.
        test_files: Conversations of ``test``, likewise.
        columns: Names of the files' columns by the names that they get, such as ``{prompt: question, completion:
            answer}``.
        batch_size: Sequences of a batch of one rank, in training and validation. At the end of a training epoch, rows
            that don't fill a batch on each rank are left out; validation leaves out none.
        max_length: The most tokens that a conversation may have.
        overlong: Treatment of longer ones, before the first step: ``error`` names one and stops; ``drop`` leaves
            them out and logs how many; ``truncate`` keeps their first tokens and logs how many.
        unsupervised: Treatment of rows in which the assistant says nothing, or nothing that is left after
            truncation: ``error`` names one and stops; ``drop`` leaves them out and logs how many.
        supervise: Assistant turns to train: ``all``, or only the ``last`` of each conversation.
        enable_thinking: Value for the chat template of models that have this switch, unless the row says otherwise;
            null leaves it to the template.
        images: Places where images may be, and frames of videos.
        shuffle: True shuffles the training rows anew in each epoch, by the run's seed.

    Raises:
        ValueError: In ``setup``, if a file or row is not as described, or if the template changes a wanted turn once
            other turns follow it.
    """

    known_columns: ClassVar[tuple[str, ...]] = CHAT_COLUMNS

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
        supervise: Supervise = "all",
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
        self.supervise = supervise

    @override
    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase) -> ChatDataset:
        rows = read_chat_rows(files, self.columns)
        chats = tokenize_chats(
            rows,
            tokenizer,
            supervise=self.supervise,
            enable_thinking=self.enable_thinking,
            processor=self.processor,
            images=self.images,
        )
        self.check_tokens([chat.ids for chat in chats], [row.name for row in rows], tokenizer)
        self.check_images([chat.images for chat in chats], [len(chat.ids) for chat in chats], rows)
        kept = self.fitting([len(chat.ids) for chat in chats], [row.name for row in rows])
        cut = [chats[index].cut(self.max_length) for index in kept]
        teaching = self.teaching(
            [chat.teaches for chat in cut],
            [rows[index].name for index in kept],
            otherwise=f"they have no token of an assistant's answer within `max_length: {self.max_length}`",
        )
        found = fingerprint(
            (rows[index] for index in kept), [image.digest for index in kept for image in chats[index].images]
        )
        return ChatDataset(
            [cut[index] for index in teaching],
            pad_token_id=tokenizer.pad_token_id,
            fingerprint=found,
            processor=self.processor,
        )


def tokenize_chats(
    rows: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    supervise: Supervise,
    enable_thinking: bool | None,
    processor: ImageReader | None = None,
    images: ImagesConfig = ImagesConfig(),
) -> list[TokenizedChat]:
    """Renders and tokenises whole conversations and marks what the assistant said.

    Args:
        rows: Rows with the column ``messages``.
        tokenizer: Fast tokenizer with a chat template.
        supervise: Assistant turns to mark: all, or only the last.
        enable_thinking: Value for rows that have none; None leaves it to the template.
        processor: Processor of a model that reads images; None for a text model.
        images: Places where images may be.

    Raises:
        ValueError: If the tokenizer can't tell where its tokens lie in the text, or a row can't be rendered.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"`{type(tokenizer).__name__}` can't tell where its tokens lie in the text, which the mask of the"
            " assistant's turns needs. Use a tokenizer with a `tokenizer.json` file."
        )
    conversations, shown = [], []
    for row in rows:
        renderer = ChatRenderer(tokenizer, row, enable_thinking=enable_thinking)
        messages, files = messages_and_images(row, "messages", processor, images)
        conversations.append(render_conversation(renderer, messages, supervise))
        shown.append(files)
    if thoughtless := sum(conversation.leaves_out_thoughts for conversation in conversations):
        rank_zero_info(
            f"The chat template leaves out what the assistant thought in earlier turns, which are not trained, of"
            f" {thoughtless} of {len(rows)} rows."
        )
    if processor is not None:
        found = zip(conversations, shown, rows, strict=True)
        conversations = [_expanded(conversation, files, processor, row.name) for conversation, files, row in found]
    chats = encode(conversations, tokenizer)
    return [replace(chat, images=files) if files else chat for chat, files in zip(chats, shown, strict=True)]


def _expanded(
    conversation: Conversation, files: tuple[ImageFile, ...], processor: ImageReader, name: str
) -> Conversation:
    text, spans = expand(conversation.text, files, processor, spans=conversation.spans, name=name)
    return replace(conversation, text=text, spans=spans)


def encode(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[TokenizedChat]:
    """Tokenises rendered texts and marks their supervised spans.

    Args:
        conversations: Texts with the spans to mark.
        tokenizer: Fast tokenizer, which adds no tokens of its own.
    """
    if not conversations:
        return []  # tokenizers take at least one text
    texts = [conversation.text for conversation in conversations]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    return [
        _tokenized(conversation, tokenizer, ids, offsets)
        for conversation, ids, offsets in zip(
            conversations, encoded["input_ids"], encoded["offset_mapping"], strict=True
        )
    ]


def _tokenized(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, ids: list[int], offsets: list[Span]
) -> TokenizedChat:
    borders = sorted({border for span in conversation.spans for border in span} - {0, len(conversation.text)})
    if not any(begin < border < end for begin, end in offsets for border in borders):
        return TokenizedChat(ids=ids, is_supervised=tokens_in_spans(offsets, conversation.spans))
    # A token reaches over a turn's border, but a model begins its turn after the prompt's last token.
    starts, ends = [0, *borders], [*borders, len(conversation.text)]
    pieces = [conversation.text[start:end] for start, end in zip(starts, ends, strict=True)]
    encoded = tokenizer(pieces, add_special_tokens=False)["input_ids"]
    supervised = [any(first <= start < last for first, last in conversation.spans) for start in starts]
    return TokenizedChat(
        ids=[token for piece in encoded for token in piece],
        is_supervised=[keep for piece, keep in zip(encoded, supervised, strict=True) for _ in piece],
    )


def tokens_in_spans(offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Tells for each token whether it begins within one of the spans; False for a token without characters.

    Args:
        offsets: First character of each token and the one after its last.
        spans: First character of each span and the one after its last.
    """
    return [end > begin and any(first <= begin < last for first, last in spans) for begin, end in offsets]
