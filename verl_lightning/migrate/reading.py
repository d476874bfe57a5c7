"""Reads what a verl run was told: a Hydra YAML file or a run script, and dotted overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_lightning.migrate.composing import compose, flatten, plain, read
from verl_lightning.migrate.scripts import Script, read_script

ROOTS = (
    "actor_rollout_ref", "algorithm", "async_training", "checkpoint", "critic", "custom_reward_function", "data",
    "distillation", "engine", "global_profiler", "model", "model_engine", "optim", "profiler", "ray_init", "ray_kwargs",
    "reward", "reward_model", "rollout", "sandbox_fusion", "skip", "trainer", "transfer_queue",
    "use_legacy_worker_impl", "ulysses_sequence_parallel_size", "use_remove_padding",
)  # fmt: skip
"""First parts of verl's keys, by which overrides are told from other words of a script."""

BYPASS = {"algorithm.rollout_correction.bypass_mode": True}
OWN_PRIMARIES: dict[str, dict[str, Any]] = {
    "ppo_trainer": {},
    "ppo_megatron_trainer": {},
    "sft_trainer": {},
    "sft_trainer_engine": {},
    "fully_async_ppo_trainer": BYPASS,
    "fully_async_ppo_megatron_trainer": BYPASS,
    "one_step_off_ppo_trainer": BYPASS | {"actor_rollout_ref.rollout.free_cache_engine": False},
    "one_step_off_ppo_megatron_trainer": BYPASS | {"actor_rollout_ref.rollout.free_cache_engine": False},
}
"""verl's own primary files, and what they set beside its defaults."""

OWN_CHOICES = {"model_engine=veomni": {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"}}
"""Values that verl's files for an engine set beside its defaults."""

OVERRIDE = re.compile(
    rf"(?P<sign>\+{{0,2}}|~)(?P<key>(?:{'|'.join(ROOTS)})(?:@[\w.]+)?(?:\.[\w.@]+)?)(?:=(?P<value>.*))?", re.S
)
VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.S)
CHOICE = re.compile(r"[\w@/]+=\w+")
REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?(?P<key>\.*[\w.]+)(?:\s*,\s*(?P<default>[^${}]*))?\}")


@dataclass(frozen=True)
class Run:
    """What a run of verl's was given."""

    given: dict[str, Any]
    """Values by dotted key."""

    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Sentences on what was taken where a shell decides, by the key that they concern; empty for all keys."""


def read_verl(path: str | None, overrides: Iterable[str]) -> dict[str, Any]:
    """Reads the values that a verl run was given, by dotted key: see `read_run`."""
    return read_run(path, overrides).given


def read_run(path: str | None, overrides: Iterable[str]) -> Run:
    """Reads what a verl run was given.

    Args:
        path: A YAML file, composed from its `defaults`, or a run script (``.sh``), which is read and not run; None for
            neither.
        overrides: Dotted overrides in Hydra's form: ``key=value``, ``+key=value``, ``++key=value`` or ``~key``; and
            variables of a script's environment, ``NAME=value``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no mapping, or a word is no override.
    """
    values: dict[str, Any] = {}
    words, config = list(overrides), path
    notes: dict[str, tuple[str, ...]] = {}
    if path is not None and path.endswith(".sh"):
        environment = dict(word.split("=", 1) for word in words if is_variable(word))
        script = read_script(Path(path).read_text(encoding="utf-8"), environment, is_override)
        words = [*(word.text for word in script.words), *(word for word in words if not is_variable(word))]
        notes = {key_of(word.text): word.notes for word in script.words} | {"": script.notes}
        config = find_primary(script, Path(path).parent)
        name = script.config_name or script.default_name
        values = {} if config is not None or not script.words else own_primary(name)
    choices: dict[str, str] = {}
    if config is not None:
        if "defaults" in read(Path(config))[0]:
            choices = dict(word.split("=", 1) for word in words if CHOICE.fullmatch(word))
        values = compose(Path(config), choices) | choices
    values |= {key: value for word in words for key, value in OWN_CHOICES.get(word, {}).items()}
    for word in words:
        if word.partition("=")[0] in choices:
            continue  # it has chosen a file
        apply_override(values, word)
    return Run({key: resolve(values, key) for key in values}, {key: told for key, told in notes.items() if told})


def is_variable(word: str) -> bool:
    """Tells whether a word is a variable of a script's environment, such as ``NNODES=2``."""
    return VARIABLE.fullmatch(word) is not None and OVERRIDE.fullmatch(word) is None


def key_of(word: str) -> str:
    """Returns the key of an override."""
    return word.partition("=")[0].lstrip("+~")


def is_override(word: str) -> bool:
    """Tells whether a word of a script is an override of verl's."""
    match = OVERRIDE.fullmatch(word)
    if match is None:
        return False
    return word.startswith("~") or ("=" in word and bool("." in match["key"] or match["value"]))


def find_primary(script: Script, folder: Path) -> str | None:
    """Finds Hydra's primary file of a run script, where it lies below the script's folder or the working directory."""
    if not script.config_name:
        return None
    inner = script.config_path.rpartition("}")[2].rpartition("$")[2].lstrip("/")
    places = [script.config_path, inner, inner.partition("/")[2]]
    found = (base / place / f"{script.config_name}.yaml" for base in (folder, Path()) for place in places)
    return next((str(path) for path in found if path.is_file()), None)


def own_primary(name: str) -> dict[str, Any]:
    """Returns what the name of a missing primary file says by itself; verl's own values stand for its own files."""
    if not name or name in OWN_PRIMARIES:
        return ({"model_engine": "megatron"} if "megatron" in name else {}) | OWN_PRIMARIES.get(name, {})
    return {f"defaults.{name}": name}


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
    """Parses a value as Hydra reads it: ``[a,b]``, ``{a:1,b:2}`` and what YAML has; what is neither is text."""
    inner = text.strip()
    if inner[:1] == "[" and inner[-1:] == "]":
        return [parse_value(item) for item in split_items(inner[1:-1])]
    if inner[:1] == "{" and inner[-1:] == "}":
        pairs = [item.partition(":") for item in split_items(inner[1:-1])]
        return {str(parse_value(name)): parse_value(value) for name, _, value in pairs}
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict | list) else value


def split_items(text: str) -> list[str]:
    """Splits the inside of brackets at its commas; those in further brackets and in quotation marks don't count."""
    items, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += 0 if quote else (character in "[{(") - (character in "]})")
        if character == "," and not depth and not quote:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items if item.strip()]


def resolve(values: Mapping[str, Any], key: str, depth: int = 8) -> Any:
    """Returns the value at a key with references to other keys followed, as far as they lead to given values."""
    value = values[key]
    if not isinstance(value, str) or "${" not in value or not depth:
        return value
    match = REFERENCE.fullmatch(value.replace("\n", " "))
    if match is None:
        return REFERENCE.sub(lambda found: str(follow(values, key, found, depth)), value)
    return follow(values, key, match, depth)


def follow(values: Mapping[str, Any], key: str, reference: re.Match[str], depth: int) -> Any:
    """Returns the value that one reference stands for; its own text if that is not known."""
    target = reference["key"]
    if target.startswith("."):
        levels = len(target) - len(target.lstrip("."))
        target = ".".join([*key.split(".")[:-levels], target.lstrip(".")])
    if target in values:
        return resolve(values, target, depth - 1)
    return reference[0] if reference["default"] is None else plain(parse_value(reference["default"]))
