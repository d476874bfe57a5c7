"""Reads what a verl run was told: a Hydra YAML file or a run script, and dotted overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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

OWN_PRIMARIES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""verl's own primary files."""

OVERRIDE = re.compile(
    rf"(?P<sign>\+{{0,2}}|~)(?P<key>(?:{'|'.join(ROOTS)})(?:@[\w.]+)?(?:\.[\w.@]+)?)(?:=(?P<value>.*))?", re.S
)
CHOICE = re.compile(r"[\w@/]+=\w+")
REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?(?P<key>\.*[\w.]+)(?:\s*,\s*(?P<default>[^${}]*))?\}")


def read_verl(path: str | None, overrides: Iterable[str]) -> dict[str, Any]:
    """Reads the values that a verl run was given, by dotted key.

    Args:
        path: A YAML file, composed from its `defaults`, or a run script (``.sh``), which is read and not run; None for
            neither.
        overrides: Dotted overrides in Hydra's form: ``key=value``, ``+key=value``, ``++key=value`` or ``~key``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no mapping, or a word is no override.
    """
    values: dict[str, Any] = {}
    words, config = list(overrides), path
    if path is not None and path.endswith(".sh"):
        script = read_script(Path(path).read_text(encoding="utf-8"))
        words = [*(word for word in script.words if is_override(word)), *words]
        config = find_primary(script, Path(path).parent)
        values = {} if config is not None else own_primary(script.config_name)
    choices: dict[str, str] = {}
    if config is not None:
        if "defaults" in read(Path(config))[0]:
            choices = dict(word.split("=", 1) for word in words if CHOICE.fullmatch(word))
        values = compose(Path(config), choices) | choices
    for word in words:
        if word.partition("=")[0] in choices:
            continue  # it has chosen a file
        apply_override(values, word)
    return {key: resolve(values, key) for key in values}


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
        return {"model_engine": "megatron"} if "megatron" in name else {}
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
    """Parses a value as Hydra reads it; what is no YAML is text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


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
