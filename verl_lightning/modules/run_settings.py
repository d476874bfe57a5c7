"""Settings of the run that wrote a checkpoint, kept in it so that a resumed run can say what it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from typing_extensions import override

from verl_lightning.models.size import ModelRole

SETTINGS_KEY = "told_settings"


def training_settings(roles: Iterable[ModelRole]) -> dict[str, Any]:
    """Settings of how models are trained, by the user's keys: optimizers, types, and what no adapter's shape shows."""
    settings: dict[str, Any] = {}
    for role in roles:
        if role.trainable:
            settings |= {f"{role.key}.optim.{name}": value for name, value in asdict(role.config.optim).items()}
            settings[f"{role.key}.dtype"] = role.config.dtype
            if (lora := role.config.lora) is not None:
                settings |= {f"{role.key}.lora.alpha": lora.alpha, f"{role.key}.lora.dropout": lora.dropout}
    return settings


def tell_changes(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Tells which settings differ from those in a checkpoint; they hold from the first resumed step.

    Args:
        saved: Settings by the user's keys; empty in a checkpoint of an older version.
        ours: Settings of the resumed run.
    """
    was = _older_decay(saved) | dict(saved)
    for key, value in ours.items():
        if key in was and was[key] != value:
            rank_zero_info(f"`{key}`: {was[key]} in the checkpoint, {value} now.")


def _older_decay(saved: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the settings of checkpoints older than `optim.decay_norms_and_biases`: all weights decayed alike."""
    decay = ".optim.weight_decay"
    keys = [key.removesuffix("weight_decay") for key, value in saved.items() if key.endswith(decay) and value]
    return {f"{key}decay_norms_and_biases": True for key in keys}


class KeepPatience(Callback):
    """Has an `EarlyStopping` of a resumed run wait as long as its own settings say; Lightning restores the other's."""

    def __init__(self) -> None:
        self._patience: list[tuple[EarlyStopping, int]] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by a connector
        self._patience = [(each, each.patience) for each in callbacks if isinstance(each, EarlyStopping)]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback, ours in self._patience:
            tell_changes({"EarlyStopping.patience": callback.patience}, {"EarlyStopping.patience": ours})
            callback.patience = ours
