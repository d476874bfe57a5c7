"""Messages to text by a tokenizer's chat template, with what the columns of a row say about it."""

from __future__ import annotations

import copy
import json
import re
from typing import Any, Self

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from verl_lightning.data.files import Row

Message = dict[str, Any]

_GENERATION_MARK = re.compile(r"{%-?\s*generation\s*-?%}")


class ChatRenderer:
    """Renders one row's messages with that row's ``tools`` and ``enable_thinking``.

    Args:
        tokenizer: Its chat template is used.
        row: Columns ``tools`` (a list of JSON schemas, or that list as a JSON string) and ``enable_thinking`` may be
            absent.
        enable_thinking: What the template gets where the row has no ``enable_thinking``; None leaves it to the
            template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, row: Row, *, enable_thinking: bool | None) -> None:
        own = parse_flag(row.values.get("enable_thinking"), name=f"`enable_thinking` in {row.name}")
        self.tokenizer = tokenizer
        self.row_name = row.name
        self.tools = parse_tools(row.values.get("tools"), name=f"`tools` in {row.name}")
        self.enable_thinking = enable_thinking if own is None else own

    def without_thinking_flag(self) -> Self:
        """The same, but with ``enable_thinking`` left to the template."""
        other = copy.copy(self)
        other.enable_thinking = None
        return other

    def options(self) -> dict[str, Any]:
        """Keyword arguments for ``apply_chat_template``."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {"tools": self.tools, **thinking}

    def render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """The text of some messages.

        Args:
            messages: As ``clean_messages`` returns them.
            add_generation_prompt: Whether the text ends with the header of a new assistant turn.

        Raises:
            ValueError: If the template refuses the messages.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self.options()
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"The chat template can't render the messages in {self.row_name}: {error}") from error
        return str(text)

    def marked_spans(self, messages: list[Message]) -> list[tuple[int, int]] | None:
        """Character spans that the template marks with ``{% generation %}``; None if it has no such marks."""
        template = self.tokenizer.get_chat_template(tools=self.tools)
        if not _GENERATION_MARK.search(template):
            return None
        values: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.options()}
        rendered: Any = render_jinja_template(
            [messages], chat_template=template, return_assistant_tokens_mask=True, **values
        )
        _, spans = rendered
        return [(begin, end) for begin, end in spans[0]]


def clean_messages(messages: Any, *, name: str) -> list[Message]:
    """Messages without the None values that Arrow adds to give each message the same keys.

    Args:
        messages: The value of a column.
        name: What error messages call it.

    Raises:
        ValueError: If it is not a list of at least one object that has a ``role``, and ``content`` or ``tool_calls``.
    """
    is_chat = isinstance(messages, list) and all(isinstance(m, dict) and m.get("role") for m in messages)
    if not is_chat or not messages or not all("content" in m or m.get("tool_calls") for m in messages):
        raise ValueError(
            f"Expected a list of messages with `role` and `content` in {name}, got {str(messages)[:80]!r}."
        )
    return [_clean_message(message) for message in messages]


def _clean_message(message: Message) -> Message:
    # A tool call often comes with `content: null`, which templates add to text: it means no text.
    cleaned: Message = drop_none(message)
    return cleaned if "content" in cleaned or "content" not in message else {**cleaned, "content": ""}


def drop_none(value: Any) -> Any:
    """The same JSON value without the keys whose value is None, at any depth."""
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    return [drop_none(item) for item in value] if isinstance(value, list) else value


def parse_flag(value: Any, *, name: str) -> bool | None:
    """A bool that may have been written as text: ``"false"`` is False, ``"none"`` and ``""`` are None.

    Raises:
        ValueError: If it is anything else; a text is never true just because it is not empty.
    """
    if value is None or isinstance(value, bool):
        return value
    flags = {"true": True, "false": False, "none": None, "null": None, "": None}
    if not isinstance(value, str) or value.strip().lower() not in flags:
        raise ValueError(f"Expected true, false or null for {name}, got {value!r}.")
    return flags[value.strip().lower()]


def parse_tools(value: Any, *, name: str) -> list[dict[str, Any]] | None:
    """Tool schemas from a list or from its JSON text; None where there are none.

    Raises:
        ValueError: If it is neither.
    """
    try:
        tools = json.loads(value or "null") if isinstance(value, str) else drop_none(value)
    except json.JSONDecodeError:
        tools = value
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"Expected a list of tool schemas, or that list as JSON text, for {name}, got {value!r}.")
    return tools
