"""Follows a shell script through its branches without running a program, to know which commands it would start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from verl_lightning.migrate.shell_nodes import (
    Case,
    Chain,
    Expansion,
    Function,
    Group,
    If,
    Loop,
    Node,
    Not,
    Simple,
    Word,
)
from verl_lightning.migrate.shell_syntax import Parser
from verl_lightning.migrate.shell_words import KEPT_BLANK, Value, Variables, unknown

COMPARE = {"-eq": int.__eq__, "-ne": int.__ne__, "-lt": int.__lt__, "-le": int.__le__, "-gt": int.__gt__,
           "-ge": int.__ge__}  # fmt: skip
SILENT = ("set", "shift", ":", "echo", "printf", "cd", "source", ".", "ulimit", "trap", "wait", "sleep", "mkdir", "rm")


@dataclass(frozen=True)
class Command:
    """A program that a script would start."""

    words: list[Value]
    notes: tuple[str, ...]
    """Notes on the branches in which the command stands."""


@dataclass(frozen=True)
class Status:
    """What is known of the success of a command: None if nothing is."""

    holds: bool | None
    notes: tuple[str, ...] = ()


class EndError(Exception):
    """The script's end, before its last line."""


class Shell:
    """A shell that starts nothing.

    Args:
        environment: Variables that the script's environment has; all others are taken not to be set.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.commands: list[Command] = []
        self._variables = Variables(environment={"HOME": "~"} | dict(environment))
        self._functions: dict[str, list[Node]] = {}

    def run(self, script: str) -> list[Command]:
        """Follows a script, and returns the commands that it would start.

        Raises:
            ShellSyntaxError: If it can't be parsed.
        """
        with contextlib.suppress(EndError):
            self._block(Parser(script).script())
        return self.commands

    def _block(self, nodes: Sequence[Node]) -> Status:
        status = Status(True)
        for node in nodes:
            status = self._node(node)
        return status

    def _node(self, node: Node) -> Status:
        match node:
            case Simple():
                return self._simple(node)
            case Chain():
                return self._chain(node)
            case Not():
                status = self._node(node.node)
                return Status(None if status.holds is None else not status.holds, status.notes)
            case If():
                self._if(node)
            case Case():
                self._case(node)
            case Loop():
                self._loop(node)
            case Function():
                self._functions[node.name] = node.body
            case Group():
                return self._block(node.body)
        return Status(True)

    def _chain(self, node: Chain) -> Status:
        left = self._node(node.left)
        if left.holds is None and not is_test(node.left):
            left = Status(True)  # a program is taken to succeed
        holds = bool(left.holds)
        if holds == (node.operator == "&&"):
            with_notes = left.notes if is_test(node.left) else ()
            return self._inside(with_notes, [node.right])
        if is_test(node.left) and (left.holds is None or left.notes):
            self._skip([node.right], left, source_of(node.left))
        return left

    def _if(self, node: If) -> None:
        notes: tuple[str, ...] = ()
        for position, (condition, body) in enumerate(node.branches):
            if condition is None:
                self._inside(notes, body)
                return
            source = f"`if {node.sources[position]}`"
            status = self._block(condition)
            holds = status.holds
            if holds is None:
                holds = self._guess([body for _, body in node.branches[position + 1 :]], body)
                word = "holds" if holds else "does not hold"
                status = Status(holds, (f"a shell decides {source}: it is taken that it {word}",))
            elif status.notes:
                status = Status(holds, (*status.notes, f"{source} {'holds' if holds else 'does not hold'}"))
            if holds:
                for _, other in node.branches[position + 1 :]:
                    self._note_skipped(other, status.notes)
                self._inside((*notes, *status.notes), body)
                return
            self._note_skipped(body, status.notes)
            notes = (*notes, *status.notes)

    @staticmethod
    def _guess(others: Sequence[Sequence[Node]], body: Sequence[Node]) -> bool:
        """Guesses whether an unknown condition holds: not, unless the script would end then or has no other way."""
        return any(ends(other) for other in others) and not ends(body)

    def _case(self, node: Case) -> None:
        subject = self._variables.text(node.subject)
        taken, notes = None, subject.notes
        for patterns, body in node.branches:
            texts = [self._variables.text(pattern).text for pattern in patterns]
            fits = any(fnmatchcase(subject.text, text) for text in texts) if subject.is_known else not ends(body)
            if fits and taken is None:
                taken = body
                if not subject.is_known:
                    notes = (*notes, f"a shell decides `case {node.source}`, by `{subject.text}`: the first branch,"
                             f" `{'|'.join(texts)}`, is taken")  # fmt: skip
                    self._settle(node.subject, texts[0], notes)
                elif notes:
                    notes = (*notes, f"of `case {node.source}`, the branch `{'|'.join(texts)}` is taken")
        for _, body in node.branches:
            if body is not taken:
                self._note_skipped(body, notes)
        self._inside(notes, taken or [])

    def _settle(self, subject: Word, text: str, notes: tuple[str, ...]) -> None:
        """Gives a variable that only a shell knows the value by which a branch was taken, for what follows."""
        variable = next(
            (part for part in subject.parts if isinstance(part, Expansion) and part.kind == "parameter"), None
        )
        if variable is not None and sum(isinstance(part, Expansion) for part in subject.parts) == 1:
            self._variables.values[variable.name] = [Value(text, notes=notes)]

    def _loop(self, node: Loop) -> None:
        if not node.name:
            status = self._block(node.condition) if node.condition else Status(None)
            note = "a shell decides how often a loop runs: it is taken to run " + ("once" if status.holds else "never")
            if status.holds:
                self._inside((note,), node.body)
            else:
                self._note_skipped(node.body, (note,))
            return
        values = [value for word in node.words for value in self._variables.expand(word)]
        for value in values:
            others = [each.text for each in values if each is not value]
            sentence = f"a loop gives `{node.name}` several values: `{value.text}`, not `{'`, `'.join(others)}`"
            self._variables.values[node.name] = [value.noted((sentence,) if others else ())]
            self._block(node.body)

    def _inside(self, notes: Sequence[str], body: Sequence[Node]) -> Status:
        """Follows a branch, with notes on why it is taken."""
        before = self._variables.control
        self._variables.control = tuple(dict.fromkeys((*before, *notes)))
        try:
            return self._block(body)
        finally:
            self._variables.control = before

    def _skip(self, body: Sequence[Node], status: Status, source: str) -> None:
        sentence = f"a shell decides `{source}`: it is taken that it does not hold"
        self._note_skipped(body, status.notes if status.holds is not None else (sentence,))

    def _note_skipped(self, body: Sequence[Node], notes: Sequence[str]) -> None:
        """Notes at the variables that a branch would have set why it is not taken."""
        for note in notes:
            self._variables.note(assigned(body), note)

    def _simple(self, node: Simple) -> Status:
        words = [value for word in node.words for value in self._variables.expand(word)]
        name = words[0].text if words else ""
        if not words or name in ("export", "local", "readonly", "declare", "typeset"):
            for assignment in node.assignments:
                self._variables.assign(assignment)
            return Status(True)
        if name in ("exit", "return"):
            raise EndError
        if name in ("[", "test", "[["):
            return Condition(words[1:] if name == "test" else words[1:-1], is_pattern=name == "[[").status()
        if name == "((":
            number, notes = self._variables.number(words[1].text.replace("$", ""))
            return Status(None if number is None else bool(number), notes)
        if name in ("true", "false"):
            return Status(name == "true")
        return self._start(name, words)

    def _start(self, name: str, words: list[Value]) -> Status:
        variables = self._variables.values
        if name in self._functions:
            self._call(self._functions[name], words[1:])
        elif name == "unset":
            for word in words[1:]:
                variables.pop(word.text, None)
        elif name in ("read", "mapfile", "readarray"):
            variables |= {word.text: [unknown(f"${{{word.text}}}")] for word in words[1:]}
        elif name == "eval":
            self._block(Parser(" ".join(word.text for word in words[1:])).script())
        elif name not in SILENT:
            self.commands.append(Command([shown(word) for word in words], self._variables.control))
        return Status(None)

    def _call(self, body: Sequence[Node], arguments: list[Value]) -> None:
        """Follows a function."""
        variables = self._variables.values
        names = ["@", *map(str, range(1, len(arguments) + 1))]
        before = {name: variables.get(name) for name in names}
        variables |= dict(zip(names, [arguments, *([value] for value in arguments)], strict=True))
        with contextlib.suppress(EndError):  # a `return`; an `exit` in a function is as rare as it is final
            self._block(body)
        for name, values in before.items():
            variables.pop(name)
            variables |= {} if values is None else {name: values}


def shown(value: Value) -> Value:
    """Returns a word as a user would read it."""
    texts = [text.replace(KEPT_BLANK, " ") for text in (value.text, *value.notes)]
    return Value(texts[0], value.is_known, tuple(texts[1:]))


class Condition:
    """The words of a test.

    Args:
        words: Words between the brackets.
        is_pattern: True for ``[[``, where the right side of an equation is a pattern.
    """

    def __init__(self, words: Sequence[Value], *, is_pattern: bool) -> None:
        self._words = list(words)
        self._is_pattern = is_pattern

    def status(self) -> Status:
        """Returns whether the test holds, as far as that is known."""
        notes = tuple(dict.fromkeys(note for word in self._words for note in word.notes))
        return Status(self._any(self._words), notes)

    def _any(self, words: list[Value]) -> bool | None:
        for operator, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            texts = [word.text for word in words]
            if operator in texts[1:-1]:
                position = texts.index(operator, 1)
                sides = [self._any(words[:position]), self._any(words[position + 1 :])]
                if decides in sides:
                    return decides
                return None if None in sides else not decides
        if words and words[0].text == "!":
            inner = self._any(words[1:])
            return None if inner is None else not inner
        return self._one(words)

    def _one(self, words: list[Value]) -> bool | None:
        texts = [word.text for word in words]
        if len(words) == 2 and texts[0] in ("-z", "-n"):
            text = words[1]
            return None if not text.is_known else (text.text == "") == (texts[0] == "-z")
        if not all(word.is_known for word in words):
            return None
        if len(words) <= 1:
            return bool(texts and texts[0])
        if len(words) == 2 and texts[0] in ("-z", "-n"):
            return (texts[1] == "") == (texts[0] == "-z")
        if len(words) == 3 and texts[1] in ("=", "==", "!="):
            fits = fnmatchcase(texts[0], texts[2]) if self._is_pattern else texts[0] == texts[2]
            return fits == (texts[1] != "!=")
        if len(words) == 3 and texts[1] in COMPARE and all(t.lstrip("-").isdigit() for t in (texts[0], texts[2])):
            return bool(COMPARE[texts[1]](int(texts[0]), int(texts[2])))
        return None  # a question about files


def is_test(node: Node) -> bool:
    """Tells whether a node is a test, which has no effect but its status."""
    if isinstance(node, Not):
        return is_test(node.node)
    if isinstance(node, Chain):
        return is_test(node.left) and is_test(node.right)
    first = node.words[0].parts if isinstance(node, Simple) and node.words else []
    return "".join(getattr(part, "text", "") for part in first) in ("[", "[[", "test", "((")


def source_of(node: Node) -> str:
    """Returns the text of a test."""
    return node.source if isinstance(node, Simple) else "a condition"


def children(node: Node) -> Iterator[Node]:
    """Yields the nodes within a node."""
    match node:
        case Chain():
            yield from (node.left, node.right)
        case Not():
            yield node.node
        case If():
            for condition, body in node.branches:
                yield from (*(condition or ()), *body)
        case Case():
            for _, body in node.branches:
                yield from body
        case Loop():
            yield from (*node.condition, *node.body)
        case Group():
            yield from node.body


def ends(body: Sequence[Node]) -> bool:
    """Tells whether a branch ends the script."""
    first = [node.words[0].parts for node in body if isinstance(node, Simple) and node.words]
    return any("".join(getattr(part, "text", "") for part in parts) == "exit" for parts in first)


def assigned(body: Sequence[Node]) -> set[str]:
    """Returns the names of the variables that a branch sets."""
    names: set[str] = set()
    for node in body:
        names |= {assignment.name for assignment in node.assignments} if isinstance(node, Simple) else set()
        names |= assigned(list(children(node)))
    return names
