"""Parses what stands in the words of a shell script: quotations and expansions."""

from __future__ import annotations

import re

from verl_lightning.migrate.shell_nodes import Expansion, ShellSyntaxError, Text, Word

PLAIN = re.compile(r"[^\s;&|<>()\\'\"$`]+|[\s;&|<>()]")
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.S)
OPERATOR = re.compile(r":?[-=+?]|,,?|\^\^?|##?|%%?|//?|:|@", re.S)


def parse_quoted(text: str) -> list[Text | Expansion]:
    """Parses what stands in double quotes."""
    parts: list[Text | Expansion] = []
    at = 0
    while at < len(text):
        if text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
            parts += [] if text[at + 1] == "\n" else [Text(text[at + 1], quoted=True)]
            at += 2
        elif text[at] in "$`":
            part, at = expansion(text, at, quoted=True)
            parts.append(part)
        else:
            parts.append(Text(text[at], quoted=True))
            at += 1
    return parts


def parse_argument(text: str, *, quoted: bool) -> Word:
    """Parses the word behind ``:-`` and the like, in which blanks stand for themselves."""
    if quoted:
        return Word(parse_quoted(text.replace('"', "") if text.startswith('"') else text))
    parts: list[Text | Expansion] = []
    at = 0
    while at < len(text):
        found, at = parse_part(text, at)
        parts += found
    return Word(parts)


def parse_part(text: str, at: int) -> tuple[list[Text | Expansion], int]:
    """Parses a part of a word: what is quoted, expanded or plain.

    Returns:
        Its parts, and the place behind it.
    """
    character = text[at]
    if character == "\\":
        escaped = text[at + 1 : at + 2]
        return ([] if escaped == "\n" else [Text(escaped, quoted=True)]), at + 2
    if character == "'":
        if (end := text.find("'", at + 1)) < 0:
            raise ShellSyntaxError("expected a closing `'` at the end of the script.")
        return [Text(text[at + 1 : end], quoted=True)], end + 1
    if character == '"':
        end = quote_end(text, at)
        return [Text("", quoted=True), *parse_quoted(text[at + 1 : end - 1])], end
    if character in "$`":
        part, end = expansion(text, at, quoted=False)
        return [part], end
    match = PLAIN.match(text, at)
    assert match is not None
    return [Text(match[0], quoted=False)], match.end()


def expansion(text: str, at: int, *, quoted: bool) -> tuple[Text | Expansion, int]:
    """Parses what a ``$`` or a backtick begins.

    Returns:
        Expansion, and the place behind it.
    """
    if text[at] == "`":
        end = text.find("`", at + 1)
        end = len(text) if end < 0 else end
        return Expansion("command", f"$({text[at + 1 : end]})", quoted), end + 1
    if text.startswith("$((", at):
        end = closing(text, at + 1, "(", ")")
        return Expansion("sum", text[at:end], quoted, argument=Word(parse_quoted(text[at + 3 : end - 2]))), end
    if text.startswith("$(", at):
        end = closing(text, at + 1, "(", ")")
        return Expansion("command", text[at:end], quoted), end
    if text.startswith("${", at):
        end = closing(text, at + 1, "{", "}")
        return braced(text[at:end], quoted=quoted), end
    match = NAME.match(text, at + 1)
    if match is None:
        return Text("$", quoted=True), at + 1
    return Expansion("parameter", match[0] and text[at : match.end()], quoted, name=match[0]), match.end()


def braced(source: str, *, quoted: bool) -> Expansion:
    """Parses ``${...}``."""
    match = PARAMETER.fullmatch(source[2:-1])
    if match is None:
        return Expansion("command", source, quoted)
    operator = OPERATOR.match(match[4])
    text = match[4][operator.end() :] if operator else ""
    argument, sign = parse_argument(text, quoted=quoted), operator[0] if operator else ""
    return Expansion(
        "parameter", source, quoted, name=match[2], prefix=match[1], index=match[3], operator=sign, argument=argument
    )


def closing(text: str, at: int, left: str, right: str) -> int:
    """Finds the place behind the bracket that closes the one at a place; quoted ones don't count."""
    depth = 0
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "'" and right == ")":
            at = max(at, text.find("'", at + 1))
        elif character == '"':
            at = quote_end(text, at) - 1
        depth += (character == left) - (character == right)
        at += 1
        if depth == 0:
            return at
    raise ShellSyntaxError(f"expected `{right}` after {text[:40]!r}.")


def quote_end(text: str, at: int) -> int:
    """Finds the place behind the double quotation that begins at a place."""
    at += 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == '"':
            return at + 1
        elif text.startswith(("${", "$("), at):
            at = closing(text, at + 1, text[at + 1], "}" if text[at + 1] == "{" else ")") - 1
        at += 1
    raise ShellSyntaxError("expected a closing quotation mark at the end of the script.")
