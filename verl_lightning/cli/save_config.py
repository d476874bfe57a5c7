"""The settings of a run, saved in its folder and given to its loggers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from verl_lightning.run_folders import run_folder
from verl_lightning.run_records import CONFIG_FILE

LAST = ("last", "auto")
"""Values of `--ckpt_path` that mean the newest run's checkpoint; `auto` begins anew where there is none."""


class SaveConfig(SaveConfigCallback):
    """Saves all settings in the run's folder, beside its checkpoints, and gives them to each logger.

    ``verl-fit --config <folder>/config.yaml`` repeats the run. Settings of an evaluation are saved as
    ``config_validate.yaml`` and ``config_test.yaml``.
    """

    whole: Mapping[str, Any] | None = None
    """Settings of all phases, in the place of those of the one that runs."""

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        config = self.config.clone()
        if config.get("ckpt_path") in LAST:
            config["ckpt_path"] = None  # how the run was resumed is no part of what it is
        config["name"] = None  # a run that repeats it has a folder of its own
        text = (
            self.parser.dump(config, skip_unset=False)
            if self.whole is None
            else yaml.safe_dump(self.whole, sort_keys=False)
        )
        settings = get_loader("yaml")(text)
        for logger in trainer.loggers:  # first: `CSVLogger` warns if there is a file in its folder already
            logger.log_hyperparams(settings)
        folder = run_folder(trainer)
        filesystem = get_filesystem(folder)
        filesystem.makedirs(folder, exist_ok=True)
        name = CONFIG_FILE if stage == "fit" else f"config_{TrainerFn(stage).value}.yaml"
        draft, path = os.path.join(folder, f".{name}.tmp"), os.path.join(folder, name)
        is_resumed = self.config.get("ckpt_path") is not None
        if (
            not (trainer.loggers or is_resumed)
            and filesystem.exists(path)
            and filesystem.cat_file(path).decode() != text
        ):
            rank_zero_warn(
                f"`{path}` is of another run, whose settings these replace: without a logger all runs share a folder."
                " Give each a `trainer.default_root_dir` of its own."
            )
        with filesystem.open(draft, "w") as file:
            file.write(text)
        filesystem.mv(draft, path)  # a kill leaves the settings that were there
