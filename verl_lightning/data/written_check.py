"""A check of a chat template on words in place of what was written: which pieces it writes, and as what."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from verl_lightning.data.chat_template import TEMPLATE_ERRORS, ChatTemplate
from verl_lightning.data.messages import Message
from verl_lightning.data.written import Piece, Tools, map_pieces

Complaint = tuple[Piece, str]

_FIRST_NUMBER = 7130001  # numbers that no template writes by itself


class _Marks:
    """Puts a word in place of each text, and a number in place of each number, true, false and null."""

    def __init__(self, *, keep_constants: bool = False) -> None:
        self.pieces: list[Piece] = []
        self.marks: list[Any] = []
        self._keep_constants = keep_constants

    def __call__(self, piece: Piece) -> Any:
        number = len(self.pieces)
        is_constant = piece.value is None or isinstance(piece.value, bool)
        mark = f"zq{number}w" if isinstance(piece.value, str) else _FIRST_NUMBER + number
        self.pieces.append(piece)
        self.marks.append(mark)
        return piece.value if is_constant and self._keep_constants else mark

    @property
    def constants(self) -> list[tuple[str, Any]]:
        """Marks of true, false and null, and their values."""
        pairs = zip(self.marks, self.pieces, strict=True)
        return [(str(mark), p.value) for mark, p in pairs if p.value is None or isinstance(p.value, bool)]


def structural_complaint(
    template: ChatTemplate, messages: list[Message], tools: Tools, options: dict[str, Any], supervised: Collection[int]
) -> Complaint | None:
    """The first piece that a template does not write for conversations of this form, and what it does with it.

    The answer depends only on roles, keys and kinds of values, so it is found once for all rows alike in these.

    Args:
        template: The chat template.
        messages: Messages as ``clean_messages`` returns them.
        tools: Tool schemas.
        options: Further variables of the template.
        supervised: Positions of the turns whose thoughts must be written.
    """
    marks = _Marks()
    marked = map_pieces(messages, tools, marks)
    wanted = sorted(set(supervised))
    form = json.dumps([marked, options, wanted, [value for _, value in marks.constants]])
    if form not in template.checked:
        template.checked[form] = _find(template, (messages, tools), marked, marks, options, wanted)
    found = template.checked[form]
    return None if found is None else (marks.pieces[found[0]], found[1])


def _find(
    template: ChatTemplate,
    written: tuple[list[Message], Tools],
    marked: tuple[list[Message], Tools],
    marks: _Marks,
    options: dict[str, Any],
    supervised: Collection[int],
) -> tuple[int, str] | None:
    try:
        text = template.render(*marked, **options)
    except TEMPLATE_ERRORS:
        return None  # it refuses words, such as a name that is not a date; the real text is looked at in any case
    for number, (piece, mark) in enumerate(zip(marks.pieces, marks.marks, strict=True)):
        is_free = piece.is_thought and piece.message not in supervised
        if str(mark) not in text and not is_free:
            return number, "leaves out"
    for container, number in _containers(marked[0], marks):
        if str(container) != json.dumps(container) and str(container) in text:
            return number, "writes as Python does"
    if not marks.constants:
        return None
    kept = template.render(*map_pieces(*written, _Marks(keep_constants=True)), **options)
    for mark, value in marks.constants:
        text = text.replace(mark, json.dumps(value))
    first = int(marks.constants[0][0]) - _FIRST_NUMBER
    return None if text == kept else (first, "does not write as JSON does")


def _containers(messages: list[Message], marks: _Marks) -> list[tuple[Any, int]]:
    """Lists and objects within arguments of tool calls, and the number of a piece in them."""
    found: list[tuple[Any, int]] = []

    def visit(value: Any) -> None:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for item in inner:
            if isinstance(item, dict | list) and item:
                first = next(iter(item)) if isinstance(item, dict) else item[0]
                found.append((item, marks.marks.index(first) if first in marks.marks else 0))
            visit(item)

    for message in messages:
        for call in message.get("tool_calls", []):
            arguments = call.get("function", call).get("arguments")
            visit(json.loads(arguments) if isinstance(arguments, str) and arguments.startswith("{") else arguments)
    return found
