"""Messages of a conversation in one normal form, or a refusal that says what is wrong with which of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_lightning.data.images import RowImages

Message = dict[str, Any]

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which data sets and templates keep an assistant's thinking."""

FLAG_KEYS = frozenset({"loss_mask", "weight", "train"})
"""Names under which data sets say whether a turn is trained."""

KNOWN_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", *THOUGHT_KEYS, *FLAG_KEYS}

IMAGE_MARK = "\ufdd0"
"""Character in a message's text at the place of an image; Unicode reserves it for use inside programs."""

_CALL_KEYS = {"id", "type", "index", "function", "name", "arguments"}
_EXAMPLE = '[{"role": "user", "content": "What is 2 + 2?"}]'


def clean_messages(messages: Any, *, name: str, images: RowImages | None = None) -> list[Message]:
    """Returns messages whose content is text and that have no keys without a value.

    Text given as parts becomes one text, with `IMAGE_MARK` for each image. What a tool call's ``arguments`` hold stays
    as it is.

    Args:
        messages: The value of a column.
        name: Name of this value in error messages.
        images: What collects the images of the row, for a model that reads some; None for a text model.

    Raises:
        ValueError: If it is not a list of at least one object that has a ``role``, and ``content`` or ``tool_calls``;
            or if a message holds what is not text.
    """
    is_chat = isinstance(messages, list) and all(isinstance(m, dict) and m.get("role") for m in messages)
    says = ("content", "tool_calls", "function_call")
    if not is_chat or not messages or not all(any(key in m for key in says) for m in messages):
        raise ValueError(
            f"Expected a list of messages with `role` and `content` in {name}, got {str(messages)[:80]!r}."
            f" This would do: {_EXAMPLE}."
        )
    names = [f"message {number} of {len(messages)} of {name}" for number, _ in enumerate(messages, start=1)]
    return [_clean(message, own, images) for message, own in zip(messages, names, strict=True)]


def is_trained(message: Message, *, name: str) -> bool:
    """Tells whether a message's own switch lets it be trained; True where it has none.

    Args:
        message: Message, which may have ``loss_mask``, ``weight`` or ``train``: 0 or 1, true or false.
        name: Name of the message in error messages.

    Raises:
        ValueError: If a switch is anything else, or if two disagree.
    """
    flags = {key: message[key] for key in FLAG_KEYS if message.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                f"Expected `{key}` to be 0 or 1 (or false or true) in {name}, got {value!r}: a turn is trained or not."
            )
    if len({bool(value) for value in flags.values()}) > 1:
        raise ValueError(f"The switches of {name} disagree: {flags}. Keep one of them.")
    return all(flags.values())


def _clean(message: Message, name: str, images: RowImages | None) -> Message:
    if not isinstance(message["role"], str):
        raise ValueError(f"Expected `role` to be a text in {name}, got {message['role']!r}.")
    cleaned = {key: value for key, value in message.items() if value is not None}
    if "function_call" in cleaned:
        raise ValueError(
            f"`function_call` of {name} is an older form of OpenAI's. Write it as `tool_calls`:"
            ' [{"type": "function", "function": {"name": ..., "arguments": ...}}], and its result in the role `tool`.'
        )
    if "content" in message:
        # A tool call often comes with `content: null`, which templates add to text: it means no text.
        is_said = message["role"] == "assistant"
        if is_said and images is not None:
            _check_said(message["content"], name, images)
        cleaned["content"] = _text(message["content"], name, None if is_said else images)
    for key in THOUGHT_KEYS:
        if key in cleaned:
            cleaned[key] = _text(cleaned[key], name)
    calls = cleaned.pop("tool_calls", None)
    if calls:
        cleaned["tool_calls"] = _calls(calls, name)
    return cleaned


def _text(content: Any, name: str, images: RowImages | None = None) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(_part(part, name, images) for part in content)
    if not isinstance(content, str):
        raise ValueError(
            f"Expected text, or a list of text parts, in {name}, got {_kind(content)}. Write it as text, an object or"
            " list as JSON text."
        )
    if images is None:
        return content
    if IMAGE_MARK in content:
        raise ValueError(f"The text of {name} has the character U+FDD0, which is no letter. Take it out.")
    return images.in_text(content)


def _check_said(content: Any, name: str, images: RowImages) -> None:
    """Refuses images among what a model said."""
    parts = content if isinstance(content, list) else []
    if any(isinstance(part, dict) and images.is_media(part) for part in parts):
        raise ValueError(
            f"There is an image in {name}, a turn of the assistant, but models say no images. Show it in a message of"
            " the user, or leave the row out."
        )


def _part(part: Any, name: str, images: RowImages | None) -> str:
    if isinstance(part, str):
        return _text(part, name, images)
    kept = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if kept.keys() <= {"type", "text"} and isinstance(kept.get("text"), str) and kept.get("type", "text") == "text":
        return _text(kept["text"], name, images)
    if images is not None and (mark := images.in_part(kept)) is not None:
        return mark
    kind = kept.get("type") or next(iter(kept), None) or type(part).__name__
    raise ValueError(
        f"There is content of the type `{kind}` in {name}, but only text can be learnt from so far, no images, sound or"
        " video, save images and frames of videos in messages to a model that reads some (docs/vision.md). Leave such"
        ' rows out, or write text parts as {"type": "text", "text": "..."}.'
    )


def _calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"Expected `tool_calls` to be a list in {name}, got {_kind(calls)}.")
    return [_call(call, name) for call in calls]


def _call(call: Any, name: str) -> dict[str, Any]:
    cleaned = {key: value for key, value in call.items() if value is not None} if isinstance(call, dict) else {}
    function = cleaned.get("function", cleaned)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"Expected each of `tool_calls` to have a function with a name in {name}, got {str(call)[:80]}. This would"
            ' do: {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}.'
        )
    if unknown := (cleaned.keys() | function.keys()) - _CALL_KEYS:
        raise ValueError(
            f"Nothing is known of `{sorted(unknown)[0]}` in a tool call of {name}; what is: `id`, `type`, and"
            " `function` with `name` and `arguments`. Take it out."
        )
    function = {key: value for key, value in function.items() if value is not None}
    if not isinstance(function.get("arguments", {}), dict | str):
        raise ValueError(
            f"Expected `arguments` of a tool call to be an object, or an object as JSON text, in {name}, got"
            f" {_kind(function['arguments'])}."
        )
    return {**cleaned, "function": function} if "function" in cleaned else function


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
    }
    return kinds.get(type(value), type(value).__name__)
