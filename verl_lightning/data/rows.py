"""Rows of several layouts in the one that data modules read, or a refusal that shows what would do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_lightning.data.files import Row, listed_columns, read_rows

_COMMON = ("system", "tools", "enable_thinking", "chat_template_kwargs", "images", "videos")
PROMPT_COLUMNS = ("prompt", "ground_truth", "reward_model", "data_source", "extra_info", *_COMMON)
CHAT_COLUMNS = ("messages", "prompt", "completion", "conversations", *_COMMON)
SYSTEM = ("system", "system_prompt")

_QUESTIONS = ("question", "problem", "instruction", "query", "input")
_ANSWERS = ("answer", "solution", "label", "target", "output", "response", "completion", "ground_truth")
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bot": "assistant", "model": "assistant", "function_call": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip


def check_columns(columns: Mapping[str, str] | None, known: Sequence[str]) -> None:
    """Checks the names of columns that a user gives others.

    Args:
        columns: Names of a file's columns by the names that they get.
        known: The names that mean something.

    Raises:
        ValueError: If a name means nothing.
    """
    for column in columns or {}:
        if column not in known:
            names = ", ".join(f"`{name}`" for name in known)
            raise ValueError(f"`data.columns` has `{column}`, which is no column that is read. Those are {names}.")


def read_prompt_rows(
    files: str | Sequence[str], columns: Mapping[str, str] | None, *, needs_truth: bool = True
) -> list[Row]:
    """Reads rows with ``prompt``, a list of messages, ``reward_model`` with ``ground_truth``, and ``data_source``.

    Args:
        files: Data files; ``prompt`` may be a text, which the user says, ``ground_truth`` a column of its own, and
            ``data_source`` may be missing: it is then the name of the file.
        columns: Names of the files' columns by the names that they get.
        needs_truth: False where a row may do without ``ground_truth``, which is empty then.

    Raises:
        ValueError: If a file or row is not as described.
    """
    rows = (renamed(row, columns) for row in read_rows(files, columns=()))
    return [prompt_row(row, needs_truth=needs_truth) for row in rows]


def read_chat_rows(files: str | Sequence[str], columns: Mapping[str, str] | None) -> list[Row]:
    """Reads rows with ``messages``.

    Args:
        files: Data files; instead of ``messages`` a row may have ``prompt`` and ``completion``, texts or lists of
            messages, of which the completion is trained; or ``conversations`` of ShareGPT, with ``from`` and ``value``.
        columns: Names of the files' columns by the names that they get.

    Raises:
        ValueError: If a file or row is not as described.
    """
    return [chat_row(renamed(row, columns)) for row in read_rows(files, columns=())]


def renamed(row: Row, columns: Mapping[str, str] | None) -> Row:
    """The same row with columns under the names that a user gives them.

    Raises:
        ValueError: If the row lacks one of the user's columns.
    """
    values = dict(row.values)
    for column, name in (columns or {}).items():
        if name not in row.values:
            raise ValueError(
                f"`data.columns` takes `{column}` from the column `{name}`, which is missing in {row.name}, which has"
                f" {listed_columns(row.values)}."
            )
        values[column] = row.values[name]
    return replace(row, values=values)


def prompt_row(row: Row, *, needs_truth: bool) -> Row:
    """Returns a row of prompts in the layout of `read_prompt_rows`.

    Args:
        row: Row of a file or of a loader.
        needs_truth: False where it may do without ``ground_truth``, which is empty then.

    Raises:
        ValueError: If the row is not as described there.
    """
    values = dict(row.values)
    if values.get("prompt") is None:
        raise _missing(row, "prompt", {"prompt": _QUESTIONS, "ground_truth": _ANSWERS})
    values["prompt"] = with_system(as_messages(values["prompt"], "user"), row)
    if values.get("reward_model") is None:
        if values.get("ground_truth") is None and not needs_truth:
            values["ground_truth"] = ""
        if values.get("ground_truth") is None:
            raise _missing(row, "reward_model", {"ground_truth": _ANSWERS})
        values["reward_model"] = {"ground_truth": values["ground_truth"]}
    if values.get("data_source") is None:
        values["data_source"] = Path(row.file).stem
    return replace(row, values=values)


def chat_row(row: Row) -> Row:
    """Returns a row of conversations in the layout of `read_chat_rows`.

    Raises:
        ValueError: If the row is not as described there.
    """
    values = dict(row.values)
    if values.get("messages") is not None:
        values["messages"] = as_messages(values["messages"], "")
    elif values.get("conversations") is not None:
        values["messages"] = _from_share_gpt(values, row.name)
    elif values.get("prompt") is not None and values.get("completion") is not None:
        prompt, completion = as_messages(values["prompt"], "user"), as_messages(values["completion"], "assistant")
        if isinstance(prompt, list) and isinstance(completion, list):
            values["messages"] = [*map(untrained, prompt), *completion]
    if "messages" not in values:
        raise _missing(row, "messages", {"prompt": ("prompt", *_QUESTIONS), "completion": _ANSWERS})
    values["messages"] = with_system(values["messages"], row)
    return replace(row, values=values)


def with_system(messages: Any, row: Row) -> Any:
    """Returns messages after what the row's column ``system`` says, or ``system_prompt``; many data sets have one.

    Raises:
        ValueError: If it is no text, or if the messages begin with something else that the system says.
    """
    name = next((name for name in SYSTEM if row.values.get(name)), None)
    if name is None or not isinstance(messages, list):
        return messages
    said, first = row.values[name], messages[0] if messages else None
    if not isinstance(said, str):
        raise ValueError(f"Expected `{name}` to be a text in {row.name}, got {str(said)[:80]}.")
    if not isinstance(first, dict) or first.get("role") != "system":
        return [{"role": "system", "content": said}, *messages]
    if first.get("content") != said:
        raise ValueError(
            f"The column `{name}` and the first message both are what the system says in {row.name}, and differ. Take"
            " one of them out."
        )
    return messages


def as_messages(value: Any, role: str) -> Any:
    """The messages of a list, of its JSON text, or of a text that a role says; without a role a text stays one."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except json.JSONDecodeError:
            found = None
        if isinstance(found, list) and found and all(isinstance(m, dict) and "role" in m for m in found):
            return found
    return [{"role": role, "content": value}] if role else value


def untrained(message: Any) -> Any:
    """The same message, from which nothing is learnt."""
    is_said = isinstance(message, dict) and message.get("role") == "assistant"
    return {**message, "loss_mask": 0} if is_said else message


def _from_share_gpt(values: dict[str, Any], name: str) -> list[Any]:
    turns = values["conversations"]
    turns = json.loads(turns) if isinstance(turns, str) and turns.lstrip().startswith("[") else turns
    if not isinstance(turns, list):
        raise ValueError(f"Expected `conversations` to be a list in {name}, got {type(turns).__name__}.")
    return [_share_gpt_message(turn, name) for turn in turns]


def _share_gpt_message(turn: Any, name: str) -> Any:
    if isinstance(turn, dict) and "role" in turn:
        return turn
    said, value = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
    if said not in _ROLES or value is None:
        raise ValueError(
            f"Expected turns with `from` ({', '.join(_ROLES)}) and `value` in `conversations` in {name}, got"
            f' {str(turn)[:80]}. This would do: {{"from": "human", "value": "What is 2 + 2?"}}.'
        )
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    if said != "function_call":
        return {"role": _ROLES[said], "content": value, **rest}
    try:
        calls = json.loads(value)
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"Expected a call as JSON text of the `function_call` in {name}, got {value!r}.") from error
    calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
    return {"role": "assistant", "content": "", "tool_calls": calls, **rest}


def _chat_column(has: Mapping[str, Any], column: str) -> dict[str, str] | None:
    """A column with a list of messages under another name, by the name that it should get."""
    for name, value in has.items():
        turn = value[0] if isinstance(value, list) and value else None
        if isinstance(turn, dict) and "content" in turn and "role" in turn:
            return {column: name}
        if isinstance(turn, dict) and "from" in turn and "value" in turn and column == "messages":
            return {"conversations": name}
    return None


def _missing(row: Row, column: str, wanted: Mapping[str, Sequence[str]]) -> ValueError:
    """Says what is missing, and the nearest that would do: columns by other names, or a row."""
    has = {key: value for key, value in row.values.items() if value is not None}
    guess: dict[str, str | None] = {name: next((c for c in cs if c in has), None) for name, cs in wanted.items()}
    text = f"The column `{column}` is missing in {row.name}, which has {listed_columns(row.values)}."
    if not all(guess.values()) and "prompt" in guess and (chat := _chat_column(has, column)) is not None:
        guess = {**{name: found for name, found in guess.items() if name not in ("prompt", "completion")}, **chat}
    if all(guess.values()):
        pairs = ", ".join(f"{name}: {found}" for name, found in guess.items() if name != found)
        rest = next((name for name in ("input", "context") if has.get(name) and name not in guess.values()), None)
        loses = f" `{rest}` would not be read: join it to the prompt." if rest else ""
        return ValueError(f"{text} Set `data.columns: {{{pairs}}}`, if these are what is meant.{loses}")
    if column == "messages" and {"chosen", "rejected"} <= has.keys():
        return ValueError(f"{text} Such rows are preferences, which `PreferenceDataModule` reads.")
    asked, said = ({"role": role, "content": text} for role, text in (("user", "What is 2 + 2?"), ("assistant", "4")))
    example: dict[str, Any] = {"prompt": [asked], "reward_model": {"ground_truth": "4"}}
    if column == "messages":
        example = {"messages": [asked, said]}
    return ValueError(f"{text} Such a row would do: {json.dumps(example)}. `data.columns` gives columns other names.")
