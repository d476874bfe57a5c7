"""Parts of a parsed shell script."""

from __future__ import annotations

from dataclasses import dataclass, field


class ShellSyntaxError(ValueError):
    """A text that is no shell script."""


@dataclass(frozen=True)
class Text:
    """Characters that stand for themselves."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Expansion:
    """Characters whose place something else takes: ``$X``, ``${X:-1}``, ``$((X + 1))`` or ``$(date)``."""

    kind: str
    """``parameter``, ``sum`` or ``command``."""

    source: str
    """Text as it is written."""

    quoted: bool
    name: str = ""
    prefix: str = ""
    index: str | None = None
    operator: str = ""
    argument: Word = field(default_factory=lambda: Word([]))


@dataclass(frozen=True)
class Word:
    """A word before it is expanded."""

    parts: list[Text | Expansion]


@dataclass(frozen=True)
class Assignment:
    """An assignment of a word, or of words to an array."""

    name: str
    index: str | None
    appends: bool
    values: list[Word]
    is_array: bool


@dataclass(frozen=True)
class Simple:
    """A command with its words, behind assignments."""

    assignments: list[Assignment]
    words: list[Word]
    source: str


@dataclass(frozen=True)
class Chain:
    """Two commands with ``&&`` or ``||`` between them."""

    left: Node
    operator: str
    right: Node


@dataclass(frozen=True)
class Not:
    """A command whose status is turned round."""

    node: Node


@dataclass(frozen=True)
class If:
    """Branches with their conditions; the last one may have none."""

    branches: list[tuple[list[Node] | None, list[Node]]]
    sources: list[str]


@dataclass(frozen=True)
class Case:
    """Branches by patterns."""

    subject: Word
    branches: list[tuple[list[Word], list[Node]]]
    source: str


@dataclass(frozen=True)
class Loop:
    """A ``for`` over words, or a ``while`` with neither name nor words."""

    name: str
    words: list[Word]
    condition: list[Node]
    body: list[Node]


@dataclass(frozen=True)
class Function:
    """A definition."""

    name: str
    body: list[Node]


@dataclass(frozen=True)
class Group:
    """Commands in braces or parentheses, or in a pipeline."""

    body: list[Node]


Node = Simple | Chain | Not | If | Case | Loop | Function | Group
