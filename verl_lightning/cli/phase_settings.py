"""Splits a command line with `phases` into a command line for each of them, before torch is imported."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_lightning.cli.arguments import find_config
from verl_lightning.cli.preflight.words import read_file
from verl_lightning.faults import closest
from verl_lightning.run_records import NAME

KEY = "phases"

REFERENCE = re.compile(r"(?P<before>|.+=)phase:(?P<name>[\w.-]*)")
"""Pattern of a value, or of a flag with its value, that stands for the model of an earlier phase."""


@dataclass(frozen=True, kw_only=True)
class PhaseSettings:
    """The settings of one phase, as files and flags that follow one another."""

    name: str
    """Name of the phase."""

    files: Sequence[tuple[Path, Any]]
    """Path, whose last two parts are for messages and names, and settings of each file, in their order."""

    flags: Sequence[str]
    """Words of the command line."""

    @contextmanager
    def words(self, models: Mapping[str, str] | None = None) -> Iterator[list[str]]:
        """Lends the command line of a fit of this phase alone; its files are there as long.

        Args:
            models: Folder of each finished phase's model, which take the places of their names; None leaves these.
        """
        with tempfile.TemporaryDirectory(prefix="verl-fit-") as folder:
            words = ["fit"]
            for index, (path, settings) in enumerate(self.files):
                file = Path(folder, str(index), path.absolute().parent.name, path.name)
                file.parent.mkdir(parents=True)
                text = yaml.safe_dump(replaced(settings, models or {}), sort_keys=False, allow_unicode=True)
                file.write_text(text, encoding="utf-8")
                words += ["--config", str(file)]
            yield [*words, *(str(replaced(flag, models or {})) for flag in self.flags)]

    @property
    def needs(self) -> set[str]:
        """Names of the phases from whose models this one begins."""
        values = [*self.flags, *(value for _, settings in self.files for value in leaves(settings))]
        return {match["name"] for value in values if (match := REFERENCE.fullmatch(str(value)))}


def split_phases(words: Sequence[str]) -> list[PhaseSettings] | None:
    """Splits a command line; None where it has no phases.

    Args:
        words: Words after the program's name, as `normalize_arguments` gives them.

    Raises:
        ValueError: If the phases don't fit one another, or are for something else than `fit`.
    """
    configs, flags = configs_and_flags(words[1:])
    known = {path: read_file(path) for path in configs if f"{KEY}:" in path.read_text(encoding="utf-8")}
    parts = {path: settings[KEY] for path, settings in known.items() if KEY in settings}
    if not parts:
        return None
    if words[0] != "fit":
        raise ValueError(
            f"`{KEY}` are for `fit`. To evaluate the model of one of them, give `{words[0]}` the settings of that phase"
            " alone, with its model in the run's folder as `model.actor.path`."
        )
    for path, part in parts.items():
        check_shape(path, part)
    all_files = [(path, known[path] if path in known else read_file(path)) for path in configs]
    shared = [(path, {key: value for key, value in file.items() if key != KEY}) for path, file in all_files]
    phases = [
        PhaseSettings(
            name=name,
            files=[*shared, *(file for path, part in parts.items() for file in files_of(path, name, part.get(name)))],
            flags=list(flags_of(name, flags)),
        )
        for name in dict.fromkeys(name for part in parts.values() for name in part)
    ]
    check_flags(flags, phases)
    check_references(phases)
    return phases


def refuse_phases(phases: Sequence[PhaseSettings] | None) -> None:
    """Refuses phases where Ray starts the processes.

    Raises:
        ValueError: If there are any.
    """
    if phases is not None:
        raise ValueError(
            f"`{KEY}`: `verl-fit ray` trains one configuration so far. Run `{KEY}` without it, by torchrun or SLURM on"
            " several machines, or each phase by itself."
        )


def configs_and_flags(words: Sequence[str]) -> tuple[list[Path], list[list[str]]]:
    """Configuration files, and flags, each with the word that follows it as its value, if any."""
    configs, flags, rest = list[Path](), list[list[str]](), list(words)
    while rest:
        word = rest.pop(0)
        if word == "--config":
            configs.append(Path(rest.pop(0)))
        elif word.startswith("--") or not flags:
            flags.append([word])
        else:
            flags[-1].append(word)
    return configs, flags


def check_shape(path: Path, part: object) -> None:
    """Refuses anything else than settings by the names of phases.

    Raises:
        ValueError: If it is something else.
    """
    if not isinstance(part, dict) or len(part) == 0:
        raise ValueError(f"in `{path}`: `{KEY}` must hold the settings of each phase below its name, got {part!r}.")
    for name, settings in part.items():
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise ValueError(
                f"in `{path}`: `{KEY}.{name}` is no name of a phase: expected a letter, then letters, digits, `.`, `_`"
                " or `-`."
            )
        if not isinstance(settings, dict):
            raise ValueError(f"in `{path}`: `{KEY}.{name}` must be settings, such as `trainer`, got {settings!r}.")


def files_of(path: Path, name: str, settings: Mapping[str, Any] | None) -> Iterator[tuple[Path, Any]]:
    """The settings of a phase in a file, behind the configurations that its ``config`` names; none if it has none."""
    if settings is None:
        return
    named = settings.get("config") or []
    for config in [named] if isinstance(named, str) else named:
        try:
            found = find_config(str(config))
            inner = read_file(found)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"in `{path}`: `{KEY}.{name}.config`: {error}") from error
        if KEY in inner:
            raise ValueError(f"in `{path}`: `{KEY}.{name}.config`: `{config}` has `{KEY}` of its own.")
        yield found, inner
    yield (
        path.with_name(f"{KEY}.{name} of {path.name}"),
        {key: value for key, value in settings.items() if key != "config"},
    )


def flags_of(name: str, flags: Sequence[Sequence[str]]) -> Iterator[str]:
    """Flags of a phase: those of all, and its own, whose keys begin with its name."""
    own = f"--{KEY}.{name}."
    for flag in flags:
        if not flag[0].startswith(f"--{KEY}"):
            yield from flag
    for flag in flags:
        if flag[0].startswith(own):
            yield from (f"--{flag[0].removeprefix(own)}", *flag[1:])


def check_flags(flags: Sequence[Sequence[str]], phases: Sequence[PhaseSettings]) -> None:
    """Refuses flags of no phase, and those that mean one phase and don't say which.

    Raises:
        ValueError: If there is one.
    """
    names = [phase.name for phase in phases]
    for word, *_ in flags:
        flag = word.partition("=")[0].removeprefix("--")
        if flag.startswith(KEY) and not any(flag.startswith(f"{KEY}.{name}.") for name in names):
            given = flag.removeprefix(KEY).removeprefix(".").partition(".")[0]
            raise ValueError(
                f"`--{flag}` is an option of no phase.{closest(given, names)} There are"
                f" {', '.join(f'`--{KEY}.{name}.`' for name in names)}."
            )
        if flag == "print_config":
            raise ValueError(f"`--{flag}` shows the settings of one phase: say `--{KEY}.{names[0]}.{flag}`.")


def check_references(phases: Sequence[PhaseSettings]) -> None:
    """Refuses a phase that begins from none that is over by then, and one whose model none begins from.

    Raises:
        ValueError: If there is one.
    """
    earlier: list[str] = []
    for phase in phases:
        if wrong := sorted(phase.needs - set(earlier)):
            known = f"Earlier ones are {', '.join(f'`phase:{name}`' for name in earlier)}." if earlier else ""
            raise ValueError(
                f"`{KEY}.{phase.name}`: `phase:{wrong[0]}` is no earlier phase.{closest(wrong[0], earlier)} {known}"
            )
        earlier.append(phase.name)
    for index, phase in enumerate(phases[:-1]):
        if not any(phase.name in later.needs for later in phases[index + 1 :]):
            raise ValueError(
                f"`{KEY}.{phase.name}` ends in a model from which no later phase begins. Write where it goes, such as"
                f" `{KEY}.{phases[index + 1].name}.model.init_args.actor.path: phase:{phase.name}`, or leave the phase"
                " out."
            )


def replaced(value: Any, models: Mapping[str, str]) -> Any:
    """Puts the folders of models in the places of the phases' names in settings."""
    if isinstance(value, dict):
        return {key: replaced(inner, models) for key, inner in value.items()}
    if isinstance(value, list):
        return [replaced(inner, models) for inner in value]
    match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return f"{match['before']}{models[match['name']]}" if match and match["name"] in models else value


def leaves(value: Any) -> Iterator[Any]:
    """All values within nested settings."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value
