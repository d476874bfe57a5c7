"""One row's conversation as text by a tokenizer's chat template: all that was written, or a refusal."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from verl_lightning.data.chat_template import TEMPLATE_ERRORS, ChatTemplate, chat_template
from verl_lightning.data.files import Row
from verl_lightning.data.messages import KNOWN_KEYS, Message
from verl_lightning.data.written import Tools, pieces_of
from verl_lightning.data.written_check import structural_complaint

_EMPTY: tuple[Any, ...] = ("", [], {})
"""Values that say nothing: an answer of OpenAI's has ``annotations: []``."""

_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "chat_template"})


class ChatRenderer:
    """Renders one row's messages with that row's ``tools`` and ``enable_thinking``.

    Args:
        tokenizer: Tokenizer whose chat template is used.
        row: Row of the conversation. Its columns ``tools`` (a list of JSON schemas, or that list as a JSON string),
            ``enable_thinking`` and ``chat_template_kwargs`` (further variables of the template) may be absent.
        enable_thinking: Value for the template where the row has no ``enable_thinking``; None leaves it to the
            template.

    Raises:
        ValueError: If one of these columns is of another kind.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        row: Row,
        *,
        enable_thinking: bool | None,
    ) -> None:
        own = parse_flag(row.values.get("enable_thinking"), name=f"`enable_thinking` in {row.name}")
        self._variables = parse_variables(
            row.values.get("chat_template_kwargs"), name=f"`chat_template_kwargs` in {row.name}"
        )
        own = self._variables.pop("enable_thinking", None) if own is None else own
        self.tokenizer = tokenizer
        self.row_name = row.name
        self.tools = parse_tools(row.values.get("tools"), name=f"`tools` in {row.name}")
        self.enable_thinking = enable_thinking if own is None else own

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's template for this row."""
        return chat_template(self.tokenizer, self.tools)

    def with_thinking(self, enable_thinking: bool | None) -> Self:
        """Returns a copy with another ``enable_thinking``; None leaves it to the template."""
        other = copy.copy(self)
        other.enable_thinking = enable_thinking
        return other

    def options(self) -> dict[str, Any]:
        """Returns the variables of the template besides messages and tools."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return self._variables | thinking

    def render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """Renders some messages as text.

        Args:
            messages: Messages as ``clean_messages`` returns them.
            add_generation_prompt: True ends the text with the header of a new assistant turn.

        Raises:
            ValueError: If the template refuses the messages, or if the text can't be tokenised.
        """
        try:
            text = self.template.render(messages, self.tools, prompt=add_generation_prompt, **self.options())
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"The chat template can't render the messages in {self.row_name}: {error}") from error
        if (found := re.search("[\ud800-\udfff]", text)) is not None:
            raise ValueError(
                f"There is half a character, `\\u{ord(found[0]):x}`, in {self.row_name}, after"
                f" {text[: found.start()][-40:]!r}: a pair was cut, or the file is damaged. Correct the text."
            )
        return text

    def marked_spans(self, messages: list[Message]) -> list[tuple[int, int]] | None:
        """Returns the character spans that the template marks with ``{% generation %}``; None if it has no marks."""
        if not self.template.is_marked:
            return None
        return self.template.marked_spans(messages, self.tools, **self.options())

    def check_written(self, messages: list[Message], text: str, *, supervised: Mapping[int, str]) -> bool:
        """Checks that a text has all that the messages and tools of this row say.

        What an assistant thought in turns that are not supervised may be left out: many templates do that, in training
        as in use.

        Args:
            messages: The whole conversation.
            text: Text that was rendered of the conversation.
            supervised: The text of each supervised turn by its position; it must have all of that message.

        Returns:
            True if thoughts of turns that are not supervised were left out.

        Raises:
            ValueError: If something else was left out or is written as Python writes it.
        """
        self._check_keys(messages)
        for key, value in self._variables.items():
            if value not in _EMPTY and not self.template.reads(key):
                raise ValueError(
                    f"The chat template does not read `{key}` of `chat_template_kwargs` in {self.row_name}. Take it"
                    " out."
                )
        complaint = structural_complaint(self.template, messages, self.tools, self.options(), supervised.keys())
        lost = []
        if complaint is None:
            pieces = pieces_of(messages, self.tools)
            lost = [p for p in pieces if not p.is_in(text if p.message is None else supervised.get(p.message, text))]
            unfit = [piece for piece in lost if not piece.is_thought or piece.message in supervised]
            complaint = (unfit[0], "leaves out or changes") if unfit else None
        if complaint is not None:
            piece, does = complaint
            place = self.row_name if piece.message is None else self.name_of(piece.message, messages)
            raise ValueError(
                f"The chat template {does} {piece}, {piece.place} in {place}, so the model would not see what was"
                " written. Correct the row, leave it out, or use another template: `chat_template.jinja` in the model's"
                " folder."
            )
        return bool(lost)

    def _check_keys(self, messages: list[Message]) -> None:
        for index, message in enumerate(messages):
            for key in message.keys() - KNOWN_KEYS:
                if message[key] not in _EMPTY and not self.template.reads(key):
                    raise ValueError(
                        f"Nothing is known of `{key}` in {self.name_of(index, messages)}, nor does the chat template"
                        " read it. Take it out; known are `role`, `content`, `name`, `tool_calls`,"
                        " `tool_call_id`, `reasoning_content`, `thinking`, `reasoning`, and `loss_mask`, `weight` or"
                        " `train`."
                    )

    def name_of(self, index: int, messages: list[Message]) -> str:
        """Returns the name of a message in error messages."""
        return f"message {index + 1} of {len(messages)} in {self.row_name}"


def parse_flag(value: Any, *, name: str) -> bool | None:
    """Reads a bool that may have been written as text: ``"false"`` is False, ``"none"`` and ``""`` are None.

    Raises:
        ValueError: If it is anything else; a text is never true just because it is not empty.
    """
    if value is None or isinstance(value, bool):
        return value
    flags = {"true": True, "false": False, "none": None, "null": None, "": None}
    if not isinstance(value, str) or value.strip().lower() not in flags:
        raise ValueError(f"Expected true, false or null for {name}, got {value!r}.")
    return flags[value.strip().lower()]


def parse_variables(value: Any, *, name: str) -> dict[str, Any]:
    """Reads variables of a template from an object or from its JSON text; those that are null are none.

    Raises:
        ValueError: If it is neither, or if it has what a run says itself.
    """
    found = _parsed(value)
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"Expected an object, or an object as JSON text, for {name}, got {value!r}.")
    variables = {key: item for key, item in (found or {}).items() if item is not None}
    if own := _OWN_VARIABLES & variables.keys():
        raise ValueError(f"`{min(own)}` has no place in {name}: it follows from the row. Take it out.")
    if "enable_thinking" in variables:
        variables["enable_thinking"] = parse_flag(variables["enable_thinking"], name=f"`enable_thinking` of {name}")
    return variables


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value or "null") if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def parse_tools(value: Any, *, name: str) -> Tools:
    """Reads tool schemas from a list or from its JSON text, as they are; None where there are none.

    Raises:
        ValueError: If it is neither.
    """
    tools = _parsed(value)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"Expected a list of tool schemas, or that list as JSON text, for {name}, got {value!r}.")
    return tools
