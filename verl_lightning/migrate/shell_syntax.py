"""Parses shell scripts as far as run scripts need it; runs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

from verl_lightning.migrate.shell_nodes import (
    Assignment,
    Case,
    Chain,
    Expansion,
    Function,
    Group,
    If,
    Loop,
    Node,
    Not,
    ShellSyntaxError,
    Simple,
    Text,
    Word,
)
from verl_lightning.migrate.shell_quotes import closing, parse_part

BLANK = " \t"
META = " \t\n;&|<>()"
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
REDIRECTION = re.compile(r"(?:&>>?|\d*(?:<<<|<<-?|>>|>&|<&|>\||<>|<|>))")
FUNCTION = re.compile(r"(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\s*\)\s*|function\s+([A-Za-z_][\w-]*)\s+")
DECLARERS = ("export", "local", "readonly", "declare", "typeset")


class Parser:
    """A script that is being parsed.

    Args:
        text: The script.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._here_documents: list[str] = []

    def script(self) -> list[Node]:
        """Parses the whole text.

        Raises:
            ShellSyntaxError: If it is no shell script.
        """
        nodes = self._block(())
        if self._at < len(self._text):
            raise self._error("a command")
        return nodes

    def _block(self, ends: tuple[str, ...]) -> list[Node]:
        nodes: list[Node] = []
        while True:
            self._skip_separators()
            if self._at >= len(self._text) or self._peek() in ends or self._text.startswith((")", ";;"), self._at):
                return nodes
            start = self._at
            nodes.append(self._and_or())
            if self._at == start:
                raise self._error("a command")

    def _and_or(self) -> Node:
        node = self._pipeline()
        while (operator := self._text[self._at : self._at + 2]) in ("&&", "||"):
            self._at += 2
            self._skip_separators(";")
            node = Chain(node, operator, self._pipeline())
        return node

    def _pipeline(self) -> Node:
        self._skip_blanks()
        if self._peek() == "!":
            self._at += 1
            return Not(self._pipeline())
        nodes = [self._command()]
        self._skip_blanks()
        while self._text.startswith("|", self._at) and not self._text.startswith("||", self._at):
            self._at += 2 if self._text.startswith("|&", self._at) else 1
            self._skip_separators(";")
            nodes.append(self._command())
            self._skip_blanks()
        return nodes[0] if len(nodes) == 1 else Group(nodes)

    def _command(self) -> Node:
        self._skip_blanks()
        parsers: dict[str, Callable[[], Node]] = {
            "if": self._if, "case": self._case, "for": self._for, "while": self._while, "until": self._while,
            "{": self._braces, "[[": self._test,
        }  # fmt: skip
        node: Node
        if (parse := parsers.get(self._peek())) is not None:
            node = parse()
        elif self._text.startswith("((", self._at):
            node = self._arithmetic()
        elif self._text.startswith("(", self._at):
            self._at += 1
            node = Group(self._block(()))
            self._expect(")")
        elif (match := FUNCTION.match(self._text, self._at)) is not None:
            self._at = match.end()
            self._skip_separators()
            node = Function(match[1] or match[2], [self._command()])
        else:
            return self._simple()
        while self._redirection():
            pass
        return node

    def _if(self) -> If:
        branches: list[tuple[list[Node] | None, list[Node]]] = []
        sources = []
        while (word := self._take_peeked()) in ("if", "elif"):
            start = self._at
            condition = self._block(("then",))
            sources.append(" ".join(self._text[start : self._at].split()).rstrip("; "))
            self._expect("then")
            branches.append((condition, self._block(("elif", "else", "fi"))))
        if word == "else":
            branches.append((None, self._block(("fi",))))
            word = self._take_peeked()
        if word != "fi":
            raise self._error("`fi`")
        return If(branches, sources)

    def _case(self) -> Case:
        self._expect("case")
        self._skip_blanks()
        start = self._at
        subject = self._word()
        source = self._text[start : self._at]
        self._skip_separators()
        self._expect("in")
        branches: list[tuple[list[Word], list[Node]]] = []
        while True:
            self._skip_separators()
            if self._peek() == "esac":
                self._expect("esac")
                return Case(subject, branches, source)
            if self._text.startswith("(", self._at):
                self._at += 1
            patterns = [self._pattern()]
            while self._text.startswith("|", self._at):
                self._at += 1
                patterns.append(self._pattern())
            self._expect(")")
            branches.append((patterns, self._block(("esac",))))
            self._at += 2 if self._text.startswith(";;", self._at) else 0

    def _pattern(self) -> Word:
        self._skip_blanks()
        word = self._word()
        self._skip_blanks()
        return word

    def _for(self) -> Loop:
        self._expect("for")
        self._skip_blanks()
        words: list[Word] = []
        if self._text.startswith("((", self._at):
            self._arithmetic()
            name = ""
        else:
            name = self._take_peeked()
            self._skip_separators("")
            if self._peek() == "in":
                self._expect("in")
                while not self._at_end():
                    words.append(self._word())
        self._skip_separators()
        self._expect("do")
        body = self._block(("done",))
        self._expect("done")
        return Loop(name, words, [], body)

    def _while(self) -> Loop:
        self._take_peeked()
        condition = self._block(("do",))
        self._expect("do")
        body = self._block(("done",))
        self._expect("done")
        return Loop("", [], condition, body)

    def _braces(self) -> Group:
        self._expect("{")
        body = self._block(("}",))
        self._expect("}")
        return Group(body)

    def _test(self) -> Simple:
        """Parses ``[[ ... ]]``, in which `&&`, `<` and parentheses are words."""
        start = self._at
        words = []
        while True:
            self._skip_separators("")
            if self._text.startswith(("&&", "||"), self._at):
                words.append(Word([Text(self._text[self._at : self._at + 2], quoted=False)]))
                self._at += 2
            elif self._at < len(self._text) and self._text[self._at] in "()<>":
                words.append(Word([Text(self._text[self._at], quoted=False)]))
                self._at += 1
            elif self._at >= len(self._text):
                raise self._error("`]]`")
            else:
                words.append(self._word())
            if words[-1] == Word([Text("]]", quoted=False)]):
                return Simple([], words, self._text[start : self._at])

    def _arithmetic(self) -> Simple:
        start = self._at
        self._at = closing(self._text, self._at, "(", ")")
        source = self._text[start : self._at]
        return Simple([], [Word([Text("((", quoted=False)]), Word([Text(source[2:-2], quoted=True)])], source)

    def _simple(self) -> Simple:
        start = self._at
        assignments: list[Assignment] = []
        words: list[Word] = []
        while not self._at_end():
            match = ASSIGNMENT.match(self._text, self._at)
            declares = bool(words) and words[0].parts[:1] and getattr(words[0].parts[0], "text", "") in DECLARERS
            if match is not None and (declares or not words):
                assignments.append(self._assignment(match))
            elif not self._redirection():
                words.append(self._word())
        return Simple(assignments, words, self._text[start : self._at].strip())

    def _assignment(self, match: re.Match[str]) -> Assignment:
        self._at = match.end()
        if not self._text.startswith("(", self._at):
            empty = self._at >= len(self._text) or self._text[self._at] in META
            values = [Word([])] if empty else [self._word()]
            return Assignment(match[1], match[2], bool(match[3]), values, False)
        self._at += 1
        values = []
        while True:
            self._skip_separators("")
            if self._at >= len(self._text):
                raise self._error("`)`")
            if self._text[self._at] == ")":
                self._at += 1
                return Assignment(match[1], match[2], bool(match[3]), values, True)
            values.append(self._word())

    def _redirection(self) -> bool:
        """Skips a redirection, if one stands here."""
        self._skip_blanks()
        match = REDIRECTION.match(self._text, self._at)
        if match is None or self._text.startswith(("<(", ">("), self._at):
            return False
        self._at = match.end()
        self._skip_blanks()
        start = self._at
        if not self._at_end():
            self._word()
        if match[0].startswith("<<") and match[0] != "<<<":
            self._here_documents.append(self._text[start : self._at].strip("'\"\\"))
        return True

    def _word(self) -> Word:
        parts: list[Text | Expansion] = []
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in META:
            found, self._at = parse_part(self._text, self._at)
            parts += found
        if self._text.startswith(("<(", ">("), self._at) and self._at == start:
            self._at = closing(self._text, self._at + 1, "(", ")")
            parts.append(Expansion("command", f"$({self._text[start + 2 : self._at]}", quoted=False))
        if self._at == start:
            raise self._error("a word")
        return Word(parts)

    def _at_end(self) -> bool:
        """True at the end of a command."""
        self._skip_blanks()
        if self._at >= len(self._text) or self._text[self._at] in "\n;|)":
            return True
        return self._text[self._at] == "&" and not self._text.startswith("&>", self._at)

    def _skip_blanks(self) -> None:
        while self._at < len(self._text):
            if self._text[self._at] in BLANK:
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._text[self._at] == "#" and (self._at == 0 or self._text[self._at - 1] in META):
                self._at = (self._text.find("\n", self._at) + len(self._text) + 1) % (len(self._text) + 1)
            else:
                return

    def _skip_separators(self, also: str = ";&") -> None:
        while True:
            self._skip_blanks()
            if self._at >= len(self._text) or self._text.startswith((";;", "&&"), self._at):
                return
            if self._text[self._at] == "\n":
                self._at += 1
                self._skip_here_documents()
            elif self._text[self._at] in also:
                self._at += 1
            else:
                return

    def _skip_here_documents(self) -> None:
        for delimiter in self._here_documents:
            match = re.compile(rf"^\t*{re.escape(delimiter)}$", re.M).search(self._text, self._at)
            self._at = len(self._text) if match is None else match.end()
        self._here_documents = []

    def _peek(self) -> str:
        match = re.compile(r"[^\s;&|<>()]+").match(self._text, self._at)
        return match[0] if match else ""

    def _take_peeked(self) -> str:
        self._skip_separators()
        word = self._peek()
        self._at += len(word)
        return word

    def _expect(self, text: str) -> None:
        self._skip_separators()
        if not self._text.startswith(text, self._at):
            raise self._error(f"`{text}`")
        self._at += len(text)

    def _error(self, expected: str) -> ShellSyntaxError:
        line = self._text.count("\n", 0, self._at) + 1
        return ShellSyntaxError(f"expected {expected} in line {line} of the script, got"
                                f" {self._text[self._at : self._at + 20]!r}.")  # fmt: skip
