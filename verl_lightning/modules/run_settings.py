"""Settings of the run that wrote a checkpoint, kept in it so that a resumed run can say what it changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lightning.fabric.utilities import rank_zero_info

from verl_lightning.models.size import ModelRole

OPTIM_KEY = "optim_settings"


def optim_settings(roles: Iterable[ModelRole]) -> dict[str, dict[str, Any]]:
    """What a checkpoint keeps of the optimizers' settings, by role."""
    return {role.name: asdict(role.config.optim) for role in roles if role.trainable}


def tell_changed_settings(roles: Iterable[ModelRole], saved: dict[str, dict[str, Any]]) -> None:
    """Say which settings of the optimizers differ from those in a checkpoint; they hold from the first resumed step.

    Args:
        roles: Models of the resumed run.
        saved: From `optim_settings`; empty in a checkpoint of an older version.
    """
    roles = [role for role in roles if role.name in saved]
    for role, now in zip(roles, optim_settings(roles).values(), strict=True):
        then = now | saved[role.name]
        for name, value in now.items():
            if value != then[name]:
                rank_zero_info(f"`{role.key}.optim.{name}`: {then[name]} in the checkpoint, {value} now.")
