"""Reads what a run script of verl's says, without running it."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

VALUE = r"\"[^\"]*\"|'[^']*'|\$\(\(.*\)\)|(?:\$\{[^{}]*\}|\S)*"
ASSIGNMENT = re.compile(rf"^\s*(?:export\s+|local\s+)?(\w+)=(?!\()({VALUE})|\$\{{(\w+):?=([^{{}}]*)\}}", re.M)
VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?::?[-=](?P<default>[^{}]*))?\}|(?P<plain>\w+))")
UNKNOWN = re.compile(r"\$(?:\w|\(|\{\w+(?::?[-=][^{}]*)?\})")
CONFIG = re.compile(r"(?:--config-(name|path)|-c([np]))[= ]+(\S+)")
PROCESSES = re.compile(r"--(nproc[_-]per[_-]node|nnodes)[= ]+(\S+)")
PLACES = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, kw_only=True)
class Script:
    """Arguments with which a run script starts verl."""

    words: list[str]
    """Words of all of its commands, with the variables that it sets itself filled in."""

    config_name: str
    """Hydra's primary file; empty if the script leaves it to verl."""

    config_path: str
    """The folder of that file; empty if the script leaves it to verl."""


def read_script(script: str) -> Script:
    """Reads a shell script: variables and their defaults, sums, arrays, continued lines.

    Of branches, all are read. The home folder is written as ``~``; what else only a shell knows stays as it is.
    """
    lines = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    text = re.sub(r"\\\n", " ", lines)
    variables = {"HOME": "~"}
    for name, value, other, default in ASSIGNMENT.findall(text):
        if name:
            variables[name] = substitute(value.strip("\"'"), variables)
        else:
            variables.setdefault(other, substitute(default, variables))
    filled = [substitute(line, variables) for line in text.splitlines()]
    words = [word for line in filled for word in split_words(line)]
    named = {kind or letter.replace("n", "name").replace("p", "path"): value.strip("\"'")
             for line in filled for kind, letter, value in CONFIG.findall(line)}  # fmt: skip
    return Script(
        words=[*processes(filled), *words],
        config_name=named.get("name", "").removesuffix(".yaml"),
        config_path=named.get("path", ""),
    )


def processes(lines: list[str]) -> Iterator[str]:
    """Yields what ``torchrun`` is told of machines and GPUs, as overrides."""
    for line in lines:
        if "torchrun" in line or "torch.distributed.run" in line:
            for flag, value in PROCESSES.findall(line):
                yield f"{PLACES[flag.replace('-', '_')]}={value}"


def split_words(line: str) -> list[str]:
    """Splits a shell line into words; parentheses of arrays stand apart."""
    try:
        return shlex.split(re.sub(r"\+?=\(|^\s*\)|\)\s*$", " ", line), comments=True)
    except ValueError:  # a quotation over several lines
        return line.split()


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Fills known shell variables, defaults and sums into a text; others stay as they are written."""

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        return variables.get(name, match["default"] if match["default"] is not None else match[0])

    for _ in range(5):
        text = VARIABLE.sub(value, text)
    return fill_sums(text, variables)


def fill_sums(text: str, variables: Mapping[str, str]) -> str:
    """Fills the values of ``$((...))`` into a text, where all of their variables are whole numbers."""
    start = text.find("$((")
    while start >= 0:
        depth, end = 0, start + 1
        while end < len(text) and (depth := depth + {"(": 1, ")": -1}.get(text[end], 0)):
            end += 1
        try:
            number = evaluate(ast.parse(text[start + 3 : end - 1].strip(), mode="eval").body, variables)
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
            return text
        text = f"{text[:start]}{number}{text[end + 1 :]}"
        start = text.find("$((")
    return text


def evaluate(node: ast.expr, variables: Mapping[str, str]) -> int:
    """Evaluates a sum of a shell's.

    Raises:
        ValueError: If the sum has something else than whole numbers, variables and `+ - * / %`.
        KeyError: If a variable or an operation is not known.
    """
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](evaluate(node.left, variables), evaluate(node.right, variables))
    if isinstance(node, ast.Name):
        return int(variables[node.id])
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(f"expected a sum of whole numbers, got `{ast.unparse(node)}`.")
