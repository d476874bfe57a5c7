"""Tool calls in what the policy says, and the interface of the formats in which models write them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from verl_lightning.data.messages import Message

_THOUGHT = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>\s*", re.DOTALL)
_INVALID = "invalid"  # name of a call that has none: templates must write some name


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    name: str
    """Name of the tool."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments by name."""

    call_id: str = ""
    """Name of the call that the policy gave it; empty where its format has none."""

    has_text_values: bool = False
    """True if the format writes all values as bare text, so that the tool's schema must tell what they are."""


@dataclass(frozen=True, kw_only=True)
class MalformedCall:
    """What was meant as a call of a tool, but can't be read."""

    complaint: str
    """Sentence for the policy that says what is wrong."""

    name: str = ""
    """Name of the tool, as far as it can be read."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the policy said in one turn, taken apart."""

    content: str
    """Text beside thinking and calls."""

    thought: str = ""
    """Text of its thinking."""

    calls: tuple[ToolCall | MalformedCall, ...] = ()
    """Calls in their order."""

    def to_message(self, call_ids: list[str]) -> Message:
        """Return the reply as an assistant's message, as chat templates take it.

        Args:
            call_ids: Name of each call. A malformed one is in the message too, without arguments: templates refuse a
                tool's answer to a message that called none.
        """
        message: Message = {"role": "assistant", "content": self.content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call_id, "function": _function(call)}
                for call, call_id in zip(self.calls, call_ids, strict=True)
            ]
        return message


def _function(call: ToolCall | MalformedCall) -> dict[str, Any]:
    return {"name": call.name or _INVALID, "arguments": call.arguments if isinstance(call, ToolCall) else {}}


class ToolCallFormat(ABC):
    """A way in which models write tool calls; subclass it for a further one."""

    @abstractmethod
    def parse(self, text: str) -> Reply:
        """Take apart what the policy said.

        Args:
            text: One turn with its special tokens, from which tokens that end a turn may have been taken.
        """


def split_thought(text: str) -> tuple[str, str]:
    """Return the thinking at the beginning of a turn and what follows; a turn that stops in it is thinking alone.

    The prompt may hold the opening mark already. What looks like a call inside the thinking is none.
    """
    if (found := _THOUGHT.match(text)) is not None:
        return found["thought"].strip(), text[found.end() :]
    if text.lstrip().startswith("<think>"):
        return text.lstrip().removeprefix("<think>").strip(), ""
    return "", text


def call_from_json(value: Any) -> ToolCall | MalformedCall:
    """Read a call from a JSON object with a name and arguments, under any of the keys that models use for them."""
    if not isinstance(value, dict):
        return MalformedCall(complaint=f"A tool call must be a JSON object, got {json.dumps(value)[:80]}.")
    function = value["function"] if isinstance(value.get("function"), dict) else value
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(complaint='A tool call must have a "name", which is a text.')
    arguments: Any = next((function[key] for key in ("arguments", "parameters") if key in function), {})
    if isinstance(arguments, str):
        return call_from_arguments(name, arguments)
    if not isinstance(arguments, dict):
        return MalformedCall(name=name, complaint='The "arguments" of a tool call must be a JSON object.')
    call_id = value.get("id")
    return ToolCall(name=name, arguments=arguments, call_id=call_id if isinstance(call_id, str) else "")


def call_from_arguments(name: str, text: str, call_id: str = "") -> ToolCall | MalformedCall:
    """Read a call whose arguments are a JSON object; no text at all stands for no arguments.

    Args:
        name: Name of the tool.
        text: The arguments.
        call_id: Name of the call, if the policy gave it one.
    """
    if not text.strip():
        return ToolCall(name=name, call_id=call_id)
    try:
        arguments = loads(text)
    except ValueError as error:
        return MalformedCall(name=name, complaint=f"The arguments of the tool call are not valid JSON: {error}.")
    if not isinstance(arguments, dict):
        return MalformedCall(name=name, complaint="The arguments of a tool call must be a JSON object.")
    return ToolCall(name=name, arguments=arguments, call_id=call_id)


def loads(text: str) -> Any:
    """Read JSON as models write it: texts may hold line breaks.

    Raises:
        ValueError: If it is none, or is nested too deep.
    """
    return _read(text.strip(), is_whole=True)[0]


def raw_loads(text: str) -> tuple[Any, int]:
    """Read the JSON value at the beginning of a text, and return it with the position of its end.

    Raises:
        ValueError: If there is none, or it is nested too deep.
    """
    return _read(text, is_whole=False)


def _read(text: str, *, is_whole: bool) -> tuple[Any, int]:
    decoder = json.JSONDecoder(strict=False)
    try:
        return (decoder.decode(text), len(text)) if is_whole else decoder.raw_decode(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
