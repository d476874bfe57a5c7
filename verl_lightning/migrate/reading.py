"""Reads what a verl run was told: a Hydra YAML file or a run script, and dotted overrides."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOTS = (
    "actor_rollout_ref", "algorithm", "async_training", "checkpoint", "critic", "custom_reward_function", "data",
    "distillation", "engine", "global_profiler", "model", "model_engine", "optim", "profiler", "ray_init", "ray_kwargs",
    "reward", "reward_model", "rollout", "sandbox_fusion", "skip", "trainer", "transfer_queue",
    "use_legacy_worker_impl", "ulysses_sequence_parallel_size", "use_remove_padding",
)  # fmt: skip
"""First parts of verl's keys, by which overrides are told from other words of a script."""

OVERRIDE = re.compile(
    rf"(?P<sign>\+{{0,2}}|~)(?P<key>(?:{'|'.join(ROOTS)})(?:@[\w.]+)?(?:\.[\w.@]+)?)(?:=(?P<value>.*))?", re.S
)
ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+)?(\w+)=(?!\()(\"[^\"]*\"|'[^']*'|\S*)", re.M)
VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?::?-(?P<default>[^{}]*))?\}|(?P<plain>\w+))")
REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?(?P<key>\.*[\w.]+)(?:\s*,\s*(?P<default>[^${}]*))?\}")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def read_verl(path: str | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The values that a verl run was given, by dotted key.

    Args:
        path: A YAML file, or a run script (``.sh``) whose overrides are read without running it; None for neither.
        overrides: Dotted overrides in Hydra's form: ``key=value``, ``+key=value``, ``++key=value`` or ``~key``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no mapping, or a word is no override.
    """
    values: dict[str, Any] = {}
    words = list(overrides)
    if path is not None and path.endswith(".sh"):
        words = [*script_overrides(Path(path).read_text(encoding="utf-8")), *words]
    elif path is not None:
        values = read_yaml(path)
    for word in words:
        apply_override(values, word)
    return {key: resolve(values, key) for key in values}


def read_yaml(path: str) -> dict[str, Any]:
    """Leaves of a YAML file by dotted key."""
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` must hold settings, such as `algorithm: {{adv_estimator: grpo}}`, got {content!r}.")
    return flatten(content)


def flatten(group: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Leaves of nested settings by dotted key; a list or an empty group is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in group.items():
        key = f"{parent}{name}"
        leaves |= flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: plain(value)}
    return leaves


def plain(value: Any) -> Any:
    """The value with numbers such as ``1e-6`` as numbers, which YAML 1.1 reads as text."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, str) and NUMBER.fullmatch(value):
        return float(value)
    return value


def apply_override(values: dict[str, Any], word: str) -> None:
    """Changes one value as Hydra would.

    Raises:
        ValueError: If the word is no override of verl's.
    """
    match = OVERRIDE.fullmatch(word)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise ValueError(f"expected an override of verl's, such as `algorithm.adv_estimator=grpo`, got {word!r}.")
    key = match["key"]
    for old in [old for old in values if old == key or old.startswith(f"{key}.")]:
        del values[old]
    if match["sign"] != "~":
        values |= flatten({key: parse_value(match["value"])})


def parse_value(text: str) -> Any:
    """A value as Hydra reads it; what is no YAML is text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def script_overrides(script: str) -> list[str]:
    """Overrides in a shell script, in their order, with the variables that it sets itself filled in.

    The script is not run: of branches, all are read.
    """
    text = re.sub(r"\\\n", " ", "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#")))
    variables: dict[str, str] = {}
    for name, value in ASSIGNMENT.findall(text):
        variables[name] = substitute(value.strip("\"'"), variables)
    words = [word for line in text.splitlines() for word in split_words(substitute(line, variables))]
    names = [word.partition("=")[2] for word in words if word.startswith("--config-name")]
    found = [word for word in words if (match := OVERRIDE.fullmatch(word)) and ("." in match["key"] or match["value"])]
    engine = ["model_engine=megatron"] if any("megatron" in name for name in names) else []
    return [*engine, *(word for word in found if "=" in word or word.startswith("~"))]


def split_words(line: str) -> list[str]:
    """Words of a shell line; parentheses of arrays stand apart."""
    try:
        return shlex.split(re.sub(r"=\(|^\s*\)|\)\s*$", " ", line), comments=True)
    except ValueError:  # a quotation over several lines
        return line.split()


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Text with known shell variables and defaults in their places; others stay as they are written."""

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        return variables.get(name, match["default"] if match["default"] is not None else match[0])

    for _ in range(5):
        text = VARIABLE.sub(value, text)
    return text


def resolve(values: Mapping[str, Any], key: str, depth: int = 8) -> Any:
    """The value at a key with references to other keys followed, as far as they lead to given values."""
    value = values[key]
    if not isinstance(value, str) or "${" not in value or not depth:
        return value
    match = REFERENCE.fullmatch(value.replace("\n", " "))
    if match is None:
        return REFERENCE.sub(lambda found: str(follow(values, key, found, depth)), value)
    return follow(values, key, match, depth)


def follow(values: Mapping[str, Any], key: str, reference: re.Match[str], depth: int) -> Any:
    """What one reference stands for; its own text if that is not known."""
    target = reference["key"]
    if target.startswith("."):
        levels = len(target) - len(target.lstrip("."))
        target = ".".join([*key.split(".")[:-levels], target.lstrip(".")])
    if target in values:
        return resolve(values, target, depth - 1)
    return reference[0] if reference["default"] is None else plain(parse_value(reference["default"]))
