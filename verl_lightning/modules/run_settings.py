"""Settings of the run that wrote a checkpoint, kept in it so that a resumed run can say what it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from lightning.fabric.utilities import rank_zero_info

from verl_lightning.models.size import ModelRole

SETTINGS_KEY = "told_settings"


def optim_settings(roles: Iterable[ModelRole]) -> dict[str, Any]:
    """Settings of the optimizers by the user's keys."""
    trained = [role for role in roles if role.trainable]
    return {f"{role.key}.optim.{name}": value for role in trained for name, value in asdict(role.config.optim).items()}


def tell_changes(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Say which settings differ from those in a checkpoint; they hold from the first resumed step.

    Args:
        saved: By the user's keys; empty in a checkpoint of an older version.
        ours: Of the resumed run.
    """
    for key, value in ours.items():
        if key in saved and saved[key] != value:
            rank_zero_info(f"`{key}`: {saved[key]} in the checkpoint, {value} now.")
