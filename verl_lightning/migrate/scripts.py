"""Reads what a run script of verl's says, without running it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from verl_lightning.migrate.shell import Command, Shell
from verl_lightning.migrate.shell_words import Value

UNKNOWN = re.compile(r"\$(?:\w|\(|\{[#!]?\w+(?:\[[^\]]*\])?(?:(?::?[-=+?]|,|\^|#|%|/|:)[^{}]*)?\})")
"""A part of a value that a shell would fill in; not a reference of Hydra's, such as ``${data.seed}``."""

CONFIG = re.compile(r"(?:--config-(name|path)|-c([np]))(?:=(.*))?", re.S)
PROCESSES = re.compile(r"--(nproc[_-]per[_-]node|nnodes)(?:=(.*))?", re.S)
PLACES = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
DEFAULTS = (
    ("fully_async_main", "fully_async_ppo_trainer"),
    ("one_step_off_policy.main_ppo", "one_step_off_ppo_trainer"),
)
OWN_TRAINERS = re.compile(r"verl\.(?:trainer|experimental)\.(?!vla\.).*|recipe\.dapo\.main_dapo|\$.*")
"""Modules that train as `verl.trainer.main_ppo` or its SFT trainer do, with options that have keys; or not known."""

ENTRY = re.compile(r"(?:.*[./])?(?:main|run)?_?\w*(?:ppo|sft|trainer)\w*(?:\.py)?$")


@dataclass(frozen=True, kw_only=True)
class Script:
    """Arguments with which a run script starts verl."""

    words: list[Value]
    """Overrides of one command, with the variables that the script sets filled in, and how they came about."""

    config_name: str = ""
    """Hydra's primary file; empty if the script leaves it to verl."""

    default_name: str = ""
    """The primary file that the started module takes by itself, where it is not `ppo_trainer` or the SFT trainer's."""

    config_path: str = ""
    """The folder of that file; empty if the script leaves it to verl."""

    notes: tuple[str, ...] = field(default=())
    """Sentences on what was taken for the whole run where a shell decides."""


def read_script(script: str, environment: Mapping[str, str], is_override: Callable[[str], bool]) -> Script:
    """Reads a shell script by following it: variables, branches, loops, arrays, functions, sums.

    The home folder is written as ``~``; what else only a shell knows stays as it is.

    Args:
        script: Text of the script.
        environment: Variables that its environment has; all others are taken not to be set.
        is_override: Function that tells an override of verl's from other words.

    Raises:
        ShellSyntaxError: If it is no shell script.
    """
    started = [command for command in Shell(environment).run(script) if starts_training(command)]
    commands = [command for command in started if any(is_override(word.text) for word in command.words)]
    if not commands:
        return Script(words=[])
    command = next((c for c in commands if any(ENTRY.fullmatch(word.text) for word in c.words)), commands[0])
    notes = (*command.notes, *foreign(command))
    if len(commands) > 1:
        others = [name_of(other) for other in commands if other is not command]
        notes = (*notes, f"the script starts verl {len(commands)} times: {name_of(command)} is taken, not"
                 f" {', '.join(dict.fromkeys(others))}")  # fmt: skip
    named = dict(flags(command.words, CONFIG))
    return Script(
        words=[*processes(command.words), *(word for word in command.words if is_override(word.text))],
        config_name=(named.get("name") or named.get("n") or Value("")).text.removesuffix(".yaml"),
        default_name=next((name for part, name in DEFAULTS if any(part in word.text for word in command.words)), ""),
        config_path=(named.get("path") or named.get("p") or Value("")).text,
        notes=notes,
    )


def starts_training(command: Command) -> bool:
    """Tells whether a command may start a trainer: verl's generation and evaluation have overrides too."""
    return not any(re.search(r"main_(generation|eval)", word.text) for word in command.words)


def foreign(command: Command) -> Iterator[str]:
    """Yields a sentence on a module that is no trainer of verl's own: its settings tell only half of what it does."""
    texts = [word.text for word in command.words]
    module = next((after for word, after in zip(texts, texts[1:], strict=False) if word == "-m"), "")
    if module and OWN_TRAINERS.fullmatch(module) is None and "torch.distributed" not in module:
        yield f"verl's own trainer, in the place of `{module}`: what that does beside its settings is not carried over"


def name_of(command: Command) -> str:
    """Returns the module or file that a command starts, and the first of its overrides."""
    texts = [word.text for word in command.words]
    module = next((text for text in texts if ENTRY.fullmatch(text)), texts[0])
    return f"`{module} {next((text for text in texts if '=' in text and not text.startswith('-')), '')}`"


def flags(words: Sequence[Value], pattern: re.Pattern[str]) -> Iterator[tuple[str, Value]]:
    """Yields the names and values of flags, which may be one word or two."""
    for position, word in enumerate(words):
        match = pattern.fullmatch(word.text)
        if match is not None:
            *names, value = match.groups()
            name = next(name for name in names if name)
            if value is not None:
                yield name, Value(value, word.is_known, word.notes)
            elif position + 1 < len(words):
                yield name, words[position + 1]


def processes(words: Sequence[Value]) -> Iterator[Value]:
    """Yields what ``torchrun`` is told of machines and GPUs, as overrides."""
    if any("torchrun" in word.text or "torch.distributed" in word.text for word in words):
        for name, value in flags(words, PROCESSES):
            key = PLACES[name.replace("-", "_")]
            yield Value(f"{key}={value.text}", value.is_known, value.notes)
