"""The folder of a run that `verl-fit` starts: its name, and the logger that writes into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, WandbLogger

from verl_lightning.compat.lightning import chosen_version, leave_out_anonymous, name_wandb_run
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.run_folders import name_of
from verl_lightning.run_records import CONFIG_FILE, RECORD_FILE, stem_of, timed_name, version_of, wrong_name


def with_own_logger(loggers: Logger | Sequence[Logger] | bool | None, root: str) -> list[Logger]:
    """Returns the loggers of a run, the one whose folder is the run's first; none where the user wants none.

    Args:
        loggers: Setting ``trainer.logger``.
        root: Folder of all runs; one that is not local leaves the logger's own.
    """
    if loggers is False:
        return []
    given = [loggers] if isinstance(loggers, Logger) else list(loggers) if isinstance(loggers, Sequence) else []
    own = next((logger for logger in given if isinstance(logger, ResumableCSVLogger)), None) or ResumableCSVLogger()
    if "://" not in root:
        own.keep_in(root)
    return [own, *(logger for logger in given if logger is not own)]


def choose_run(logger: Logger | None, name: str, *, goes_on: bool) -> str | None:
    """Has a logger write into the folder of a name; returns why it can't, None if it can.

    Args:
        logger: First logger; None where the folder of all runs has the name already.
        name: Name that the user has given.
        goes_on: True where the folder may hold a run, which this one goes on with.
    """
    if (complaint := wrong_name(name)) is not None or not isinstance(logger, ResumableCSVLogger):
        return complaint
    version, folder = chosen_version(logger), Path(logger.root_dir, name)
    if version not in (None, version_of(name)):
        return f"`--name {name}` and the logger's `version: {version}` both name the run. Leave one of them out."
    if not goes_on and any((folder / file).exists() for file in (CONFIG_FILE, RECORD_FILE)):
        return (
            f"`--name {name}`: there is a run of this name, `{folder}`. Choose another name, or go on with it:"
            " `--ckpt_path last`, or `auto` where it may have saved nothing."
        )
    logger.continue_run(version_of(name))
    return None


def new_name(configs: Sequence[object], model: str, name: str | None, command: str) -> str:
    """Makes the name of a run, or of an evaluation, that has a folder of its own.

    Args:
        configs: Configuration files in their order.
        model: Path of the module's class, in whose name the run stands where there is no file.
        name: Name of the run that is evaluated; None where the user gave none.
        command: Subcommand.
    """
    own = model.rpartition(".")[2].removesuffix("Module").lower()
    stem = name or (stem_of(Path(str(configs[0]))) if configs else own)
    return timed_name(stem if command == "fit" else f"{stem}-{command}")


def name_in_wandb(trainer: Trainer) -> None:
    """Shows a run in Weights & Biases under the name of its folder, unless the user has chosen one."""
    logger = trainer.logger
    for other in trainer.loggers:
        if isinstance(other, WandbLogger):
            leave_out_anonymous(other)
            if isinstance(logger, ResumableCSVLogger) and trainer.is_global_zero:
                name_wandb_run(other, name_of(logger.version))
