"""Words of the command line, put in order and checked before Lightning and torch are imported."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from verl_lightning.faults import NO_PREDICT

SUBCOMMANDS = ("fit", "validate", "test")
"""Subcommands of Lightning's CLI that `verl-fit` offers; the first is meant when none is given."""

HYDRA = re.compile(r"\+{0,2}(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
"""Pattern of a setting as Hydra takes it, without dashes: `key=value`, `+key=value` or `++key=value`."""

STANDS_ALONE = re.compile(r"-h|--(.+\.)?(help|print_config|print_shtab|print_shtab=.*)")
"""Pattern of a flag that needs no value."""

OTHER_SUBCOMMANDS = ("ray", "slurm", "kubernetes", "migrate", "runs", "evaluate", "doctor")
"""Subcommands that are answered without Lightning's CLI."""


def normalize_arguments(argv: Sequence[str]) -> list[str]:
    """Rewrites the command line into the one order that LightningCLI reads as the user means it.

    No subcommand means `fit`. `--config` files move to the front, so that flags win wherever they stand, and
    `--strategy` becomes `--trainer.strategy`. Applying it twice changes nothing.

    Args:
        argv: Words after the program's name.

    Raises:
        FileNotFoundError: If a configuration is neither a file nor the name of a shipped one.
        ValueError: If a word is no text, a flag has no value, or the first word is neither a flag nor a subcommand.
    """
    for word in argv:
        check_text(word)
    named = bool(argv) and argv[0] in SUBCOMMANDS
    command, rest = (argv[0], argv[1:]) if named else (SUBCOMMANDS[0], argv)
    check_first_word(*rest[:1])
    words = iter(rest)
    configs: list[str] = []
    flags: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("-c", "--config"):
            configs += ["--config", str(find_config(value if equals else next(words, "")))]
        elif name == "--strategy":
            flags.append("--trainer.strategy" + equals + value)
        else:
            flags.append(word)
    check_values(flags)
    return [command, *configs, *flags]


def check_text(word: str) -> None:
    """Refuses a word with bytes that are no text, which YAML could not read and no file could keep.

    Raises:
        ValueError: If there are such bytes.
    """
    try:
        word.encode()
    except UnicodeEncodeError as error:
        shown = word.encode(errors="backslashreplace").decode()
        raise ValueError(f"the word `{shown}` is no text in UTF-8. Rename what it names.") from error


def check_values(flags: Sequence[str]) -> None:
    """Refuses a flag at whose value's place stands another flag, or nothing.

    Raises:
        ValueError: If there is one.
    """
    for flag, value in itertools.zip_longest(flags, flags[1:], fillvalue="--"):
        if flag.startswith("--") and "=" not in flag and value.startswith("--") and not STANDS_ALONE.fullmatch(flag):
            raise ValueError(f"`{flag}` needs a value.")


def check_first_word(word: str = "--") -> None:
    """Refuses a first word that is not a flag.

    Raises:
        ValueError: If it is no flag.
    """
    if word.startswith("-"):
        return
    if HYDRA.fullmatch(word) or word in SUBCOMMANDS:
        raise ValueError(about_stray(word))
    if word.endswith((".yaml", ".yml")) or word in shipped_configs():
        raise ValueError(f"say that `{word}` is a configuration: `--config {word}`.")
    if word == "predict":
        raise ValueError(NO_PREDICT)
    raise ValueError(f"there is no subcommand `{word}`. Choose from {', '.join((*SUBCOMMANDS, *OTHER_SUBCOMMANDS))}.")


def about_stray(word: str) -> str:
    """Says what is wrong with a word that is neither a flag nor the value of one."""
    if word in SUBCOMMANDS:
        return f"the subcommand comes first: `verl-fit {word} ...`."
    if match := HYDRA.fullmatch(word):
        return f"settings begin with two dashes: `--{match['key']} {match['value']}` in the place of `{word}`."
    return f"`{word}` stands where a setting should, such as `--trainer.max_steps 10`."


def find_config(name: str) -> Path:
    """The configuration file with this path, or else the shipped one of this name, with or without `.yaml`.

    Raises:
        FileNotFoundError: If there is neither.
        ValueError: If `name` is empty or a flag.
    """
    if not name or name.startswith("-"):
        raise ValueError(f"`--config` needs a YAML file or the name of a shipped configuration, got {name!r}.")
    if Path(name).is_file():
        return Path(name)
    shipped = shipped_configs()
    stem = name.removesuffix(".yaml")
    if stem in shipped:
        return shipped[stem]
    neighbours = [str(path.with_suffix("")) for path in Path(name).parent.glob("*.yaml")]
    close = difflib.get_close_matches(stem, [*neighbours, *shipped], n=1)
    raise FileNotFoundError(
        f"`--config {name}` is neither a file nor a shipped configuration ({', '.join(shipped) or 'there are none'})."
        + (f" Did you mean `{close[0]}.yaml`?" if close else "")
    )


def shipped_configs() -> dict[str, Path]:
    """Configurations that come with the package: file by name, such as `grpo` or `recipes/dapo`."""
    root = Path(str(files("verl_lightning.configs")))
    return {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.yaml"))}
