"""The pieces that somebody wrote into a conversation, all of which a chat template must write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_lightning.data.messages import FLAG_KEYS, IMAGE_MARK, KNOWN_KEYS, THOUGHT_KEYS, Message

Tools = list[dict[str, Any]] | None

_THOUGHTS = (
    re.compile(r"(\s*<(?P<tag>[\w:]+)>)(?P<thought>.*?)(?P<end></(?P=tag)>)(?P<rest>.*)", re.DOTALL),
    re.compile(r"(\s*\[THINK\]|)(?P<thought>.*?)(?P<end>\[/THINK\]|</think>)(?P<rest>.*)", re.DOTALL),
)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A text or value that somebody wrote."""

    value: Any
    """A text, a number, true, false or null."""

    place: str
    """Name in error messages of the piece's place in its message or in ``tools``."""

    message: int | None = None
    """Position of the piece's message; None for a piece of the tools."""

    is_thought: bool = False
    """True on what an assistant thought, which many templates leave out of earlier turns."""

    may_be_json: bool = False
    """True on what a template may write as a JSON text, escapes included."""

    def __str__(self) -> str:
        """Returns the value as JSON writes it, shortened."""
        return f"`{json.dumps(self.value, ensure_ascii=False)[:80]}`"

    def is_in(self, text: str) -> bool:
        """Tells whether a text has the piece, surrounding space aside; True for a value that is no text."""
        if not isinstance(self.value, str):
            return True
        written = self.value.strip()
        forms = [written]
        if self.may_be_json:
            forms += [json.dumps(written, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
        return any(form in text for form in forms)


Visit = Callable[[Piece], Any]


def map_pieces(messages: list[Message], tools: Tools, visit: Visit) -> tuple[list[Message], Tools]:
    """Returns the conversation with each written piece replaced.

    Args:
        messages: Messages as ``clean_messages`` returns them.
        tools: Tool schemas.
        visit: Function that takes a piece and returns the value that stands in its place.
    """
    mapped = [_map_message(index, message, visit) for index, message in enumerate(messages)]
    return mapped, None if tools is None else [_map_schema(tool, "`tools`", visit) for tool in tools]


def pieces_of(messages: list[Message], tools: Tools) -> list[Piece]:
    """Lists all pieces that somebody wrote, in their order; empty texts are none."""
    found: list[Piece] = []

    def collect(piece: Piece) -> Any:
        found.append(piece)
        return piece.value

    map_pieces(messages, tools, collect)
    return found


def split_thought(content: str) -> tuple[str, str, str, str]:
    """Splits content into the text before an assistant's thought, the thought, the tag that ends it, and the rest.

    Joined, the four parts are the content again; the first three are empty if it has no thought.

    A thought is an element that the content begins with, such as ``<think>...</think>``, or all up to ``</think>``.
    """
    for pattern in _THOUGHTS:
        if (found := pattern.fullmatch(content)) is not None:
            return found[1], found["thought"], found["end"], found["rest"]
    return "", "", "", content


def parsed_arguments(arguments: Any) -> dict[str, Any] | None:
    """Returns the arguments of a tool call as an object; None if they are a text that is no JSON object."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments)
    except (json.JSONDecodeError, TypeError):
        return None
    return value if isinstance(value, dict) else None


def _map_message(index: int, message: Message, visit: Visit) -> Message:
    mapped = dict(message)
    for key, value in message.items():
        if key in ("role", "name", "tool_call_id", "tool_calls", *FLAG_KEYS):
            continue
        place = f"`{key}`"
        if key == "content" and message["role"] == "assistant":
            before, thought, end, rest = split_thought(value)
            inner = _text(visit, thought, place=place, message=index, is_thought=True)
            mapped[key] = before + inner + end + _text(visit, rest, place=place, message=index)
        elif key == "content":
            mapped[key] = _text(visit, value, place=place, message=index, may_be_json=message["role"] == "tool")
        elif key in THOUGHT_KEYS:
            mapped[key] = _text(visit, value, place=place, message=index, is_thought=True)
        elif key not in KNOWN_KEYS:
            mapped[key] = _map_json(value, visit, place=place, message=index)
    if "tool_calls" in message:
        calls = enumerate(message["tool_calls"], start=1)
        mapped["tool_calls"] = [_map_call(index, f"tool call {number}", call, visit) for number, call in calls]
    return mapped


def _text(visit: Visit, value: str, **where: Any) -> str:
    parts = value.split(IMAGE_MARK)
    return IMAGE_MARK.join(str(visit(Piece(value=part, **where))) if part.strip() else part for part in parts)


def _map_call(index: int, place: str, call: dict[str, Any], visit: Visit) -> dict[str, Any]:
    function = dict(call.get("function", call))
    function["name"] = visit(Piece(value=function["name"], place=f"the name of {place}", message=index))
    if "arguments" in function:
        arguments = parsed_arguments(function["arguments"])
        where = {"place": f"`arguments` of {place}", "message": index}
        if arguments is None:
            function["arguments"] = _text(visit, function["arguments"], may_be_json=True, **where)
        else:
            mapped = _map_json(arguments, visit, **where)
            is_text = isinstance(function["arguments"], str)
            function["arguments"] = json.dumps(mapped, ensure_ascii=False) if is_text else mapped
    return {**call, "function": function} if "function" in call else {**call, **function}


def _map_json(value: Any, visit: Visit, **where: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(visit(Piece(value=key, may_be_json=True, **where))): _map_json(item, visit, **where)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_map_json(item, visit, **where) for item in value]
    return value if value == "" else visit(Piece(value=value, may_be_json=True, **where))


def _map_schema(value: Any, place: str, visit: Visit) -> Any:
    """Replaces the names and descriptions in a tool schema; templates may put the rest in words of their own."""
    if isinstance(value, list):
        return [_map_schema(item, place, visit) for item in value]
    if not isinstance(value, dict):
        return value
    mapped: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, item in value.items():
        if key in ("name", "description") and isinstance(item, str) and item.strip():
            mapped[key] = visit(Piece(value=item, place=place, may_be_json=True))
        elif key == "properties" and isinstance(item, dict):
            names = {name: str(visit(Piece(value=name, place=place, may_be_json=True))) for name in item}
            mapped[key] = {names[name]: _map_schema(inner, place, visit) for name, inner in item.items()}
        else:
            mapped[key] = _map_schema(item, place, visit)
    if isinstance(value.get("required"), list):
        mapped["required"] = [names.get(name, name) if isinstance(name, str) else name for name in value["required"]]
    return mapped
