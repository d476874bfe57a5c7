"""Puts a translation together: our settings, and a line for each key of verl's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from verl_lightning.migrate import ppo, sft
from verl_lightning.migrate.left_out import UNKNOWN_KEY, remark_on
from verl_lightning.migrate.parts import Remark, Setting, VerlConfig, flag, nested
from verl_lightning.migrate.scripts import UNKNOWN

Fate = Literal["translated", "not needed", "not supported"]
FATES: tuple[Fate, ...] = ("not supported", "translated", "not needed")


SFT_KEYS = {"data.max_length", "data.messages_key", "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"}
"""Keys that only verl's SFT trainer has, beside its groups `model`, `optim` and `engine`."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Line of the report on what became of one key."""

    key: str
    """verl's dotted key."""

    value: Any
    """Value of the key."""

    fate: Fate
    """Fate of the key: translated, not needed or not supported."""

    words: str
    """Our settings, or the reason that there are none."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A translated configuration."""

    settings: dict[str, Any]
    """Our settings, nested as in a YAML file."""

    lines: list[Line]
    """A line for each of verl's keys that was given, in their order."""

    origin: str = "verl"
    """Library that the configuration is written for."""

    choices: dict[str, list[str]] = field(default_factory=dict)
    """Keys by the sentences on what was taken for them where a shell decides; no keys where it is the whole run."""

    def count(self, fate: Fate) -> int:
        """Counts the keys of this fate."""
        return sum(line.fate == fate for line in self.lines)


def migrate(given: dict[str, Any], notes: Mapping[str, Sequence[str]] | None = None) -> Migration:
    """Translates what a verl run was given.

    Args:
        given: Values by dotted key, such as `read_verl` makes them.
        notes: Sentences on what was taken where a shell decides, by key; empty for the whole run.

    Raises:
        ValueError: If a value that is needed can't be read, such as a number that only a shell knows.
    """
    known = {key: value for key, value in given.items() if not is_unknown(value)}
    form, translate = (sft, sft.translate_sft) if is_sft(given) else (ppo, ppo.translate_ppo)
    findings = list(translate(VerlConfig(known, form.DEFAULTS)))
    settings = [finding for finding in findings if isinstance(finding, Setting)]
    remarks = [finding for finding in findings if isinstance(finding, Remark)]
    ours = nested({setting.key: setting.value for setting in settings})
    lines = [
        describe(key, value, settings, remarks) if key in known else describe_unknown(key, value, settings)
        for key, value in given.items()
    ]
    return Migration(settings=ours, lines=lines, choices=choices_of(notes or {}, given))


def choices_of(notes: Mapping[str, Sequence[str]], given: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the keys that each sentence concerns, of those that were given in the end."""
    choices: dict[str, list[str]] = {sentence: [] for sentence in notes.get("", ())}
    for key, sentences in notes.items():
        for sentence in sentences if key in given or any(other.startswith(f"{key}.") for other in given) else ():
            choices.setdefault(sentence, []).append(key)
    return choices


def check_is_verls(migration: Migration, file: str | None) -> None:
    """Refuses what is no configuration of verl's.

    Args:
        migration: Translation of it.
        file: File that it comes from; None for a command line.

    Raises:
        ValueError: If nothing is translated, or most of the keys are not known.
    """
    unknown = [line.key for line in migration.lines if line.words == UNKNOWN_KEY]
    if migration.count("translated") and 2 * len(unknown) <= len(migration.lines):
        return
    some = ", ".join(f"`{key}`" for key in unknown[:3]) or "none of its keys makes a setting here"
    what = "The command line" if file is None else f"`{file}`"
    raise ValueError(
        f"{what} is no configuration of verl's: {len(unknown)} of {len(migration.lines)} keys are not verl's ({some})."
        " Nothing was written. Give a Hydra YAML file of verl's, a run script that starts its trainer, or a"
        " configuration of TRL's `SFTConfig` or `GRPOConfig`."
    )


def is_unknown(value: Any) -> bool:
    """Tells whether only a shell knows the value, such as that of `$1`."""
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, str) and UNKNOWN.search(item) is not None for item in items)


def describe_unknown(key: str, value: Any, settings: Iterable[Setting]) -> Line:
    """Makes the line of a key whose value only a shell knows: verl's own value stands for it until it is given."""
    ours = [f"`{flag(setting.key)}`" for setting in settings if key in setting.sources]
    place = f", or set {' and '.join(ours)}" if ours else ""
    words = f"its value is known to the shell only: give `{key}=VALUE` behind the script{place}"
    return Line(key=key, value=value, fate="not supported", words=words)


def is_sft(given: dict[str, Any]) -> bool:
    """Tells whether the keys are those of verl's SFT trainer."""
    roots = {key.partition(".")[0] for key in given}
    told = roots & {"model", "optim", "engine"} or given.keys() & SFT_KEYS
    return not roots & {"actor_rollout_ref", "algorithm", "critic"} and bool(told)


def describe(key: str, value: Any, settings: Iterable[Setting], remarks: Iterable[Remark]) -> Line:
    """Makes the line of one key: first what must be decided, then what was made of it, then why nothing was."""
    said = [remark for remark in remarks if remark.source == key]
    urgent = next((remark for remark in said if remark.needed), None)
    made = [setting for setting in settings if key in setting.sources]
    if urgent is None and made:
        words = ", ".join(f"`{flag(setting.key)}: {short(setting.value)}`" for setting in made)
        notes = dict.fromkeys(setting.note for setting in made if setting.note)
        return Line(key=key, value=value, fate="translated", words="; ".join([words, *notes]))
    remark = urgent or next(iter(said), None) or remark_on(key, value)
    fate: Fate = "not supported" if remark.needed else "not needed"
    return Line(key=key, value=value, fate=fate, words=remark.reason)


def short(value: Any) -> str:
    """Returns a value in one line of YAML, or its classes where it is long."""
    text = str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n...\n").strip()
    return text if len(text) < 100 else "[" + ", ".join(str(item.get("class_path", item)) for item in value) + "]"


def report_text(migration: Migration) -> str:
    """Returns the whole report as Markdown; what a user must decide comes first."""
    parts = [f"# From {migration.origin}\n\n{counts(migration)}.\n"]
    if migration.choices:
        rows = [f"| {note} | {', '.join(f'`{key}`' for key in keys) or 'the whole run'} |".replace("||", "\\|\\|")
                for note, keys in migration.choices.items()]  # fmt: skip
        head = "## Taken where a shell or program decides\n\n"
        head += "Give `NAME=VALUE` behind the script to set one of its variables.\n\n"
        parts.append(f"{head}| what was taken | for |\n|---|---|\n" + "\n".join(rows) + "\n")
    for fate in FATES:
        rows = [row(line) for line in migration.lines if line.fate == fate]
        if rows:
            head = f"## {fate.capitalize()}\n\n| {migration.origin}'s key | value | here |\n|---|---|---|\n"
            parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


def counts(migration: Migration) -> str:
    """Says how many keys there were, and how many of each fate."""
    return f"{len(migration.lines)} keys: " + ", ".join(f"{migration.count(fate)} {fate}" for fate in FATES)


def row(line: Line) -> str:
    """Returns a row of the report's tables."""
    value = " ".join(str(line.value).split()).replace("|", "\\|")
    return f"| `{line.key}` | `{value}` | {line.words} |"


def config_text(migration: Migration) -> str:
    """Returns our configuration as YAML."""
    head = "# Made by `verl-fit migrate`; the report beside it tells of every key.\n"
    return head + str(yaml.safe_dump(migration.settings, sort_keys=False, allow_unicode=True, width=100))
