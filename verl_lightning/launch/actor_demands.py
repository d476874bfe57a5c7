"""Settings of a run that the driver must know, read from its command line before anything is built.

Only to refuse early: torch and Lightning take too long to import for that. What this reading misses (a class of the
user's, a bad value) is found when the run reads its settings and starts its actors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_lightning.cli.arguments import normalize_arguments
from verl_lightning.ray.cluster import Demand
from verl_lightning.rewards.config import RewardConfig

REPLICA = Demand(option="rollout.num_replicas", count=1, cpus=1.0)
"""Engines, and CPUs of each, that `RayRollout` asks for by default."""

GRACE = 300.0
"""Seconds that `Preemption` grants by default."""


def actor_demands(words: Sequence[str], num_workers: int) -> list[Demand]:
    """Engines and reward workers that a run starts as Ray actors; the least that it will.

    Args:
        words: The command line of `verl-fit`.
        num_workers: Training processes.

    Raises:
        FileNotFoundError: If a configuration does not exist.
        ValueError: If `--config` has no value.
    """
    settings = dict(_settings(normalize_arguments(words)))
    return [*_engines(settings), *_reward_workers(settings, num_workers)]


def grace_of(words: Sequence[str]) -> float:
    """Seconds in which a run that is told to stop must end.

    Args:
        words: The command line of `verl-fit`.
    """
    grace = dict(_settings(normalize_arguments(words))).get("preemption.grace", GRACE)
    return float(grace) if _are_amounts(grace) else GRACE


def _engines(settings: Mapping[str, Any]) -> Iterator[Demand]:
    for group, kind in (("rollout", "RayRollout"), ("rollout.placement", "RayActors")):
        name = settings.get(f"{group}.class_path")
        if not isinstance(name, str) or name.rpartition(".")[2] != kind:
            continue
        count = settings.get(f"{group}.min_replicas") or settings.get(f"{group}.num_replicas", REPLICA.count)
        cpus = settings.get(f"{group}.cpus_per_replica", REPLICA.cpus)
        gpus = settings.get(f"{group}.gpus_per_replica", REPLICA.gpus)
        if _are_amounts(count, cpus, gpus):
            yield Demand(option=REPLICA.option, count=count, cpus=float(cpus), gpus=float(gpus))


def _reward_workers(settings: Mapping[str, Any], num_workers: int) -> Iterator[Demand]:
    if settings.get("model.reward.backend") != "ray":
        return
    count = settings.get("model.reward.num_workers", RewardConfig.num_workers)
    # Ranks that share a model's work share its reward workers; how many do is not known yet.
    num_pools = num_workers if settings.get("trainer.strategy") == "ddp" else 1
    if _are_amounts(count):
        yield Demand(option="reward.num_workers", count=count * num_pools, cpus=1.0)


def _are_amounts(*values: Any) -> bool:
    return all(isinstance(value, int | float) and value >= 0 for value in values)


def _settings(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of files and flags, in the order in which they count, without `init_args`."""
    position = 1  # behind the subcommand
    while position < len(words):
        name, equals, value = words[position].partition("=")
        follows = words[position + 1 : position + 2]
        if name.startswith("--") and not equals and follows:
            value, position = follows[0], position + 1
        if name == "--config":
            yield from _flat(_read(Path(value).read_text()))
        else:
            yield _short(name.removeprefix("--")), _read(value)
        position += 1


def _read(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _flat(values: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        yield _short(parent), values
        return
    for name, value in values.items():
        yield from _flat(value, f"{parent}.{name}" if parent else str(name))


def _short(key: str) -> str:
    key = ".".join(part for part in key.split(".") if part != "init_args")
    return "rollout.class_path" if key == "rollout" else key
