"""Expands the words of a shell script, and keeps what was taken where only a shell knows."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from verl_lightning.migrate.shell_nodes import Assignment, Expansion, Text, Word

OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right),
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
CASES = {",": lambda text: text[:1].lower() + text[1:], ",,": str.lower,
         "^": lambda text: text[:1].upper() + text[1:], "^^": str.upper}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A text, and how it came about."""

    text: str
    is_known: bool = True
    """False if a part of it is known to a shell only; that part stands there as it is written."""

    notes: tuple[str, ...] = ()
    """Sentences on what was taken for it where a shell decides."""

    parts: tuple[Value, ...] = ()
    """Values of which it was joined; empty for one that was not."""

    def joined(self, other: Value) -> Value:
        """Returns both, one behind the other."""
        notes = tuple(dict.fromkeys((*self.notes, *other.notes)))
        parts = (*(self.parts or (self,)), *(other.parts or (other,)))
        return Value(self.text + other.text, self.is_known and other.is_known, notes, parts)

    def noted(self, notes: Iterable[str]) -> Value:
        """Returns the same text with further notes."""
        more = tuple(notes)
        parts = tuple(part.noted(more) for part in self.parts)
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *more))), parts=parts)

    def split(self) -> list[Value]:
        """Splits the text at blanks; each word has the notes of its own parts. A blank at an end is an empty word."""
        words: list[Value] = [EMPTY]
        for part in self.parts or (self,):
            for piece in re.findall(r"\s+|\S+", part.text):
                if piece.isspace():
                    words.append(EMPTY)
                else:
                    words[-1] = words[-1].joined(Value(piece, part.is_known, part.notes))
        return words


EMPTY = Value("")
KEPT_BLANK = "\ue000"
"""A blank in a part that only a shell knows, at which a word is not split."""


def unknown(source: str, notes: tuple[str, ...] = ()) -> Value:
    """Returns the value of a part that only a shell knows."""
    return Value(re.sub(r"\s+", KEPT_BLANK, source), is_known=False, notes=notes)


@dataclass
class Variables:
    """Variables of a script, each a list of values; most have one."""

    values: dict[str, list[Value]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    control: tuple[str, ...] = ()
    """Notes on the branches in which the script is."""

    def get(self, name: str) -> list[Value] | None:
        """Returns the values of a variable; None if it is not set."""
        if name in self.values:
            return self.values[name]
        return [Value(self.environment[name])] if name in self.environment else None

    def assign(self, assignment: Assignment) -> None:
        """Carries an assignment out."""
        name, old = assignment.name, self.get(assignment.name)
        if assignment.is_array:
            new = [value for word in assignment.values for value in self.expand(word)]
            new = [*(old or []), *new] if assignment.appends else new
        elif assignment.index is not None:
            position = assignment.index if assignment.index.isdigit() else "0"
            new = list(old or [])
            new[int(position) : int(position) + 1] = [self.text(assignment.values[0])]
        else:
            value = self.text(assignment.values[0])
            new = [(old or [EMPTY])[0].joined(value) if assignment.appends else value, *(old or [])[1:]]
        self.set(name, new, is_addition=assignment.appends or assignment.index is not None)

    def set(self, name: str, new: Sequence[Value], *, is_addition: bool = False) -> None:
        """Sets a variable, with the notes on the branches; a second, other value is noted."""
        old = self.values.get(name)
        again: tuple[str, ...] = ()
        if old and not is_addition and old[0].text not in ("", new[0].text if new else ""):
            again = (f"`{name}` is set more than once: its last value is taken, not `{old[0].text}`",)
        self.values[name] = [value.noted((*self.control, *again)) for value in new]

    def note(self, names: Iterable[str], sentence: str) -> None:
        """Notes at variables that a branch which is not taken would have set."""
        for name in names:
            if (values := self.get(name)) is not None:
                self.values[name] = [value.noted((sentence,)) for value in values]

    def text(self, word: Word) -> Value:
        """Expands a word to one value, as in an assignment."""
        return self._joined(word.parts)

    def expand(self, word: Word) -> list[Value]:
        """Expands a word to any number of values."""
        found: list[list[Value]] = []
        for place, part in enumerate(word.parts):
            if isinstance(part, Text):
                found.append([self._plain(part, is_first=place == 0)])
            elif part.quoted:
                found.append([self._joined([part])] if "*" in (part.index, part.name) else self.value(part))
            else:
                found.append([piece for value in self.value(part) for piece in value.split()])
        words: list[Value] = []
        for values in found:
            if words and values:
                words[-1:] = [words[-1].joined(values[0]), *values[1:]]
            else:
                words += values
        is_quoted = any(isinstance(part, Text) and part.quoted or getattr(part, "quoted", False) for part in word.parts)
        return [value for value in words if value.text or (is_quoted and len(words) == 1)]

    def _plain(self, part: Text, *, is_first: bool) -> Value:
        if is_first and not part.quoted and re.match(r"~(/|$)", part.text):
            return (self.get("HOME") or [Value("~")])[0].joined(Value(part.text[1:]))
        return Value(part.text)

    def value(self, part: Expansion) -> list[Value]:
        """Returns what stands in the place of an expansion."""
        if part.kind == "sum":
            return [self._sum(part)]
        if part.kind == "command":
            return [unknown(part.source)]
        if part.name in ("@", "*") and self.get(part.name) is None:
            return []
        found = self._indexed(part)
        if part.prefix == "#" and found is not None:
            return [Value(str(len(found) if part.index in ("@", "*") else len(found[0].text)))]
        if part.prefix:
            return [unknown(part.source)]
        return self._operated(part, found)

    def _indexed(self, part: Expansion) -> list[Value] | None:
        found = self.get(part.name)
        if found is None or part.index in ("@", "*") or part.name in ("@", "*"):
            return found
        index = self.text(Word([Text(part.index or "0", True)])).text
        position = int(index) if index.isdigit() else None
        return found[position : position + 1] or None if position is not None else None

    def _operated(self, part: Expansion, found: list[Value] | None) -> list[Value]:
        kind = part.operator.removeprefix(":")
        is_empty = found is None or (part.operator.startswith(":") and not any(value.text for value in found))
        if kind in ("-", "=") and part.operator:
            if not is_empty:
                return found or []
            default = self._joined(part.argument.parts)
            if found is None and default.text:
                default = default.noted((f"`{part.name}` is not set: its default `{default.text}` is taken",))
            if kind == "=":
                self.values[part.name] = [default]
            return [default]
        if kind == "+":
            return [EMPTY] if is_empty else [self._joined(part.argument.parts)]
        if found is None:
            return [] if part.index in ("@", "*") else [unknown(part.source)]
        if part.operator in ("", "?", ":?"):
            return found
        return [self._changed(part, value) for value in found]

    def _changed(self, part: Expansion, value: Value) -> Value:
        pattern = self._joined(part.argument.parts).text
        if part.operator in CASES:
            return Value(CASES[part.operator](value.text), value.is_known, value.notes)
        if part.operator in ("#", "##", "%", "%%") and value.is_known:
            return Value(stripped(value.text, part.operator, pattern), notes=value.notes)
        if part.operator in ("/", "//") and value.is_known and not re.search(r"[*?\[]", pattern):
            old, _, new = pattern.partition("/")
            return Value(value.text.replace(old, new, -1 if part.operator == "//" else 1), notes=value.notes)
        return unknown(part.source, value.notes)

    def _joined(self, parts: Sequence[Text | Expansion]) -> Value:
        result = EMPTY
        for place, part in enumerate(parts):
            values = [self._plain(part, is_first=place == 0)] if isinstance(part, Text) else self.value(part)
            for position, value in enumerate(values):
                result = result.joined(Value(" ")).joined(value) if position else result.joined(value)
        return result

    def _sum(self, part: Expansion) -> Value:
        text = self._joined(part.argument.parts)
        number, notes = self.number(text.text) if text.is_known else (None, ())
        if number is None:
            return unknown(part.source, text.notes)
        return Value(str(number)).noted((*text.notes, *notes))

    def number(self, text: str) -> tuple[int | None, tuple[str, ...]]:
        """Evaluates a sum of a shell's: whole numbers, variables and `+ - * / % **`, and comparisons.

        Returns:
            Number, None if it is not known, and the notes of the variables in it.
        """
        notes: list[str] = []
        try:
            tree = ast.parse(text.replace("&&", " and ").replace("||", " or ").strip() or "0", mode="eval")
            return self._evaluated(tree.body, notes), tuple(notes)
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
            return None, tuple(notes)

    def _evaluated(self, node: ast.expr, notes: list[str]) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](self._evaluated(node.left, notes), self._evaluated(node.right, notes))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._evaluated(node.operand, notes)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self._evaluated(node.left, notes), self._evaluated(node.comparators[0], notes)
            return int(COMPARISONS[type(node.ops[0])](left, right))
        if isinstance(node, ast.BoolOp):
            values = [bool(self._evaluated(each, notes)) for each in node.values]
            return int(all(values) if isinstance(node.op, ast.And) else any(values))
        if isinstance(node, ast.Name) and (found := self.get(node.id)):
            notes += found[0].notes
            return int(found[0].text)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(f"expected a sum of whole numbers, got `{ast.unparse(node)}`.")


def stripped(text: str, sign: str, pattern: str) -> str:
    """Takes the shortest or the longest beginning or end that matches a pattern off a text."""
    lengths = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
    for length in lengths:
        piece = text[:length] if sign[0] == "#" else text[len(text) - length :]
        if fnmatchcase(piece, pattern):
            return text[length:] if sign[0] == "#" else text[: len(text) - length]
    return text
