"""Rows of preferences in their several layouts: pairs of responses, or responses with a label."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_lightning.data.files import Row, listed_columns, read_rows
from verl_lightning.data.rows import SYSTEM, as_messages, renamed, untrained, with_system
from verl_lightning.data.templates import parse_flag

PREFERENCE_COLUMNS = (
    *("prompt", "chosen", "rejected", "completion", "label", "margin"),
    *("system", "tools", "enable_thinking", "chat_template_kwargs"),
)

PAIR = {
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "chosen": [{"role": "assistant", "content": "4"}],
    "rejected": [{"role": "assistant", "content": "5"}],
}
"""Row that would do, for messages."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response to a prompt."""

    row: Row
    """Row with ``messages``, of which the response alone is trained; or with ``prompt`` and ``completion`` as texts."""

    is_plain: bool
    """True if these are texts that no chat template is to touch."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A row of a preference file."""

    name: str
    """Name of the row in error messages."""

    responses: tuple[Response, ...]
    """The chosen and the rejected response; or one response, which has a label."""

    is_desirable: bool | None
    """Label of a single response; None for pairs."""

    margin: float | None
    """Difference of rewards that a pair should have at least; None where the row says nothing."""


def read_preferences(
    files: str | Sequence[str], columns: Mapping[str, str] | None
) -> tuple[list[Row], list[Preference]]:
    """Reads rows of preferences.

    Args:
        files: Data files whose rows have ``chosen`` and ``rejected``, or ``completion`` and ``label``, as texts or as
            lists of messages; ``prompt`` may be left out of pairs, whose common beginning it is then.
        columns: Names of the files' columns by the names that they get.

    Returns:
        The rows as they were read, and what they say.

    Raises:
        ValueError: If a file or row is not as described.
    """
    rows = [renamed(row, columns) for row in read_rows(files, columns=())]
    return rows, [_preference(row) for row in rows]


def _preference(row: Row) -> Preference:
    has = {name for name, value in row.values.items() if value is not None}
    if {"chosen", "rejected"} <= has:
        return _pair(row)
    if {"prompt", "completion", "label"} <= has:
        response = _response(row, "completion", *_parts(row, ("completion",)))
        label = _label(row.values["label"], f"`label` in {row.name}")
        return Preference(name=row.name, responses=(response,), is_desirable=label, margin=None)
    wanted = "`chosen` and `rejected`, or `prompt`, `completion` and `label`"
    raise ValueError(
        f"Expected {wanted} in {row.name}, which has {listed_columns(row.values)}. Such a row would do:"
        f" {json.dumps(PAIR)}. `data.columns` gives columns other names."
    )


def _pair(row: Row) -> Preference:
    prompt, chosen, rejected = _parts(row, ("chosen", "rejected"))
    responses = _response(row, "chosen", prompt, chosen), _response(row, "rejected", prompt, rejected)
    margin = row.values.get("margin")
    try:
        margin = None if margin is None else float(margin)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Expected a number for `margin` in {row.name}, got {margin!r}.") from error
    return Preference(name=row.name, responses=responses, is_desirable=None, margin=margin)


def _parts(row: Row, names: Sequence[str]) -> Any:
    """The prompt and the responses: all of them texts, or all of them lists of messages."""
    values: list[Any] = [as_messages(row.values.get(name), "") for name in ("prompt", *names)]
    if all(value is None or isinstance(value, str) for value in values):
        if any(row.values.get(name) for name in SYSTEM):
            raise ValueError(
                f"{row.name} has a `system` beside texts, which no chat template touches. Give `prompt` as messages:"
                f" {json.dumps(PAIR['prompt'])}."
            )
        return values if values[0] is not None else _apart(values[1], values[2], is_plain=True)
    prompt, *responses = (
        as_messages(value, role) for value, role in zip(values, ("user", "assistant", "assistant"), strict=False)
    )
    for name, value in zip(names, responses, strict=True):
        if not isinstance(value, list) or not value:
            raise ValueError(f"Expected `{name}` to be a text or a list of messages in {row.name}, got {value!r}.")
    if prompt is None:
        return _apart(*responses, is_plain=False)
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"Expected `prompt` to be a text or a list of messages in {row.name}, got {prompt!r}.")
    # Some files repeat the prompt at the beginning of each response.
    return [prompt, *(said[len(prompt) :] if said[: len(prompt)] == prompt else said for said in responses)]


def _apart(chosen: Any, rejected: Any, *, is_plain: bool) -> list[Any]:
    """The common beginning, which is the prompt, and the rest of each."""
    pairs = zip(chosen, rejected, strict=False)
    end = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    # A space before a response belongs to it: tokens begin with theirs.
    end -= bool(is_plain and end and chosen[end - 1] == " ")
    return [chosen[:end], chosen[end:], rejected[end:]]


def _response(row: Row, name: str, prompt: Any, said: Any) -> Response:
    values, is_plain = dict(row.values), isinstance(said, str)
    if is_plain:
        values |= {"prompt": prompt, "completion": said}
    else:
        values["messages"] = with_system([*map(untrained, prompt), *said], row)
    return Response(row=replace(row, values=values, name=f"`{name}` of {row.name}"), is_plain=is_plain)


def _label(value: Any, name: str) -> bool:
    label = bool(value) if value in (0, 1) else parse_flag(value, name=name)
    if label is None:
        raise ValueError(f"Expected true or false for {name}, got {value!r}.")
    return label
