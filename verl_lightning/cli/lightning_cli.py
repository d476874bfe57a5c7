"""LightningCLI as `verl-fit` uses it: its subcommands, groups and callback slots, and where the settings are saved."""

from __future__ import annotations

import os
import pydoc
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

import verl_lightning.data
import verl_lightning.modules  # so that YAML files can name their classes without a module
from verl_lightning.callbacks import ProfilerCallback, ResumeWandb, RolloutCallback, RunReport
from verl_lightning.cli.arguments import SUBCOMMANDS, normalize_arguments
from verl_lightning.cli.deprecation import renamed_flags, renamed_settings
from verl_lightning.cli.errors import did_you_mean, of_trainer
from verl_lightning.cli.parser import Parser, class_parser
from verl_lightning.cli.run_names import choose_run, name_in_wandb, new_name, with_own_logger
from verl_lightning.cli.save_config import LAST, SaveConfig
from verl_lightning.compat.lightning import chosen_version, hide_tips, hide_treespec_warning
from verl_lightning.compat.lightning_cli import OpenCLI
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.ending import ending_of
from verl_lightning.modules.last_checkpoint import last_checkpoint
from verl_lightning.modules.preemption import Preemption
from verl_lightning.modules.run_lock import lock_first
from verl_lightning.needs import (
    is_looked_up,
    missing_accelerator,
    missing_checkpoint,
    missing_strategy,
    no_anew,
    no_data,
    no_gpu,
    no_last_checkpoint,
    strayed_flag,
    wrong_start,
)
from verl_lightning.processes.exit_codes import FINISHED, Ending
from verl_lightning.run_folders import LastCheckpoint, runs_folder
from verl_lightning.run_records import RUNS, version_of
from verl_lightning.strategies import STRATEGIES, register_strategies
from verl_lightning.strategies.checkpoints import NoCheckpointError, format_of, naming_another
from verl_lightning.trainer_numbers import wrong_numbers

CALLBACK_SLOTS: dict[str, type[Callback]] = {"profile": ProfilerCallback, "rollout": RolloutCallback}
"""Callbacks with a key of their own, so that flags can reach into them; they run in this order, before all others."""

TRAINER_DEFAULTS: dict[str, Any] = {
    "default_root_dir": RUNS,
    "logger": {"class_path": "verl_lightning.loggers.ResumableCSVLogger"},
    "log_every_n_steps": 1,  # a step is a whole iteration of rollouts and updates
    "num_sanity_val_steps": 0,  # a validation batch is sampled from the model, which takes long
    "inference_mode": False,  # inference tensors can't enter a later autograd graph, nor be sharded
}
"""Defaults in which `verl-fit` differs from Lightning's Trainer."""

SWITCHES: dict[str, type[Callback]] = {
    "enable_progress_bar": ProgressBar,
    "enable_checkpointing": Checkpoint,
    "logger": LearningRateMonitor,
}
"""Settings of the trainer that turn callbacks off; Lightning refuses to have both."""

STRATEGY_CLASSES = {strategy.__name__: name for name, strategy in STRATEGIES.items()}
"""Short name of each strategy by the name of its class; users may write either."""


class CLI(OpenCLI):
    """Parses a command line or settings, builds their objects, and runs a subcommand.

    Args:
        args: Words after the program's name, or settings as a configuration file has them; by default the words of this
            process. Settings of another subcommand than `fit` have its name under ``subcommand``.
        run: True to run the subcommand; where False, ``model``, ``datamodule`` and ``trainer`` are ready for it.
    """

    def __init__(self, args: Sequence[str] | Mapping[str, Any] | Namespace | None = None, *, run: bool = True) -> None:
        self.runs = run
        self.last: LastCheckpoint | None = None  # what `--ckpt_path last` has found
        words, settings = sys.argv[1:] if args is None else [], None
        if isinstance(args, (Mapping, Namespace)):
            self._command, settings = split_settings(args)
        else:
            words = words if args is None else list(args)
            self._command = words[0] if words and words[0] in SUBCOMMANDS else SUBCOMMANDS[0]
        # Attribute docstrings explain the fields of dataclasses. They cost a second, and only help pages show them.
        set_parsing_settings(docstring_parse_attribute_docstrings=any("help" in word for word in words))
        hide_tips()
        hide_treespec_warning()
        super().__init__(
            args=words if settings is None else settings,
            parser_class=Parser,
            parser_kwargs={
                "prog": "verl-fit",
                self._command: {"usage": f"verl-fit {self._command} --config FILE_OR_NAME [--KEY VALUE ...]"},
            },
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=42,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Returns only the subcommand that is asked for, as building the parser of each takes a while."""
        return {self._command: LightningCLI.subcommands()[self._command]}

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        versions = f"verl-lightning=={verl_lightning.__version__} lightning=={lightning.__version__}"
        return super().init_parser(dump_header=[versions], **kwargs)

    @override
    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        # Unpickling anything else than weights runs code that the checkpoint holds.
        self.reader.set_defaults({"weights_only": True})

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, strategy in STRATEGIES.items():
            parser.add_class_arguments(
                strategy, name, help=f"Settings of the strategy `{name}`; used when it is chosen"
            )
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="Name of the run and of its folder; null makes one of the configuration's name and the time. Of an"
            " evaluation it is the run whose checkpoint `--ckpt_path last` means.",
        )
        parser.add_class_arguments(Preemption, "preemption", help="How a run that is told to stop ends")
        for slot, base in CALLBACK_SLOTS.items():
            parser.add_subclass_arguments(base, slot, fail_untyped=False, required=False, help=slot_help(base))
        assert isinstance(parser, Parser)
        self.reader = parser
        parser.class_groups = {"model": LightningModule, "data": LightningDataModule, **CALLBACK_SLOTS}

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        words, complaints = self._read(parser, args)
        settings = self.config[self.config.subcommand]
        for complaint in (*complaints, *self.reader.find_nulls(settings)):
            parser.error(complaint)
        strategy = settings.trainer.strategy
        if isinstance(strategy, str):
            settings.trainer.strategy = STRATEGY_CLASSES.get(strategy, strategy)
        check_name(parser, settings, "trainer.strategy", ["auto", *StrategyRegistry.available_strategies()])
        check_own_module(parser, settings)
        strategy = settings.trainer.strategy
        if (stray := strayed_flag(words, str(getattr(strategy, "class_path", strategy)))) is not None:
            parser.error(stray)
        check_name(
            parser, settings, "trainer.accelerator", ["auto", "gpu", *ACCELERATOR_REGISTRY.available_accelerators()]
        )
        check_name(parser, settings, "trainer.profiler", ["simple", "advanced", "pytorch", "xla"])
        check_checkpoint(parser, settings.get("ckpt_path"), self._command)
        start = wrong_start(settings.get("seed_everything"), settings.trainer.default_root_dir or ".")
        for complaint in (*start, *wrong_numbers(settings.trainer.as_dict())):
            parser.error(complaint)

    def _read(
        self, parser: LightningArgumentParser, args: Sequence[str] | dict[str, Any]
    ) -> tuple[list[str], Iterator[str]]:
        """Fills ``config``; returns the words of a command line, or complaints about settings that came without one."""
        try:
            if isinstance(args, dict):
                written = renamed_settings(args)
                self.config = parser.parse_object({"subcommand": self._command, self._command: written})
                return [], self.reader.find_stray_groups(written, self.config[self._command])
            words = list(renamed_flags(normalize_arguments(args)))
            self.config = parser.parse_args(words)
        except (FileNotFoundError, ValueError) as error:
            parser.error(str(error))
        return words, iter(())

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = self.built("trainer")
        callbacks = kwargs.pop("callbacks", trainer.get("callbacks")) or []
        own = [self.built(slot) for slot in CALLBACK_SLOTS]
        others = callbacks if isinstance(callbacks, list) else [callbacks]
        check_gpu(trainer.accelerator)
        if trainer.strategy in STRATEGIES:
            kwargs.setdefault("strategy", self.built(trainer.strategy))
        register_strategies(ddp=dict(self.setting("ddp")))  # what `auto` takes for several devices
        callbacks = [c for c in own if c is not None] + without_switched_off(trainer, others)
        if not any(isinstance(callback, Preemption) for callback in callbacks):
            callbacks.append(self.built("preemption"))
        if not any(isinstance(callback, RunReport) for callback in callbacks):
            callbacks.append(RunReport())
        root, name = trainer.default_root_dir or ".", self.setting("name")
        loggers = with_own_logger(kwargs.pop("logger", trainer.logger), root)
        if name is not None and not loggers:
            kwargs.setdefault("default_root_dir", os.path.join(root, name))
        try:
            made = super().instantiate_trainer(callbacks=callbacks, logger=loggers or False, **kwargs)
        except (ImportError, MisconfigurationException, TypeError, ValueError) as error:
            self.parser.error(of_trainer(str(error), trainer.keys()))
        self._tell_of_unused_groups(made)
        self.choose_folder(made)
        return made

    @property
    def goes_on(self) -> bool:
        """True where the run may write to a folder that holds a run."""
        return self.setting("ckpt_path") is not None

    def choose_folder(self, trainer: Trainer) -> None:
        """Finds the run that is gone on with, and its folder, or gives the run a new one."""
        name, logger = self.setting("name"), trainer.logger
        if name is not None:
            first = logger if self._command == "fit" else None
            if (complaint := choose_run(first, name, goes_on=self.goes_on)) is not None:
                self.parser.error(complaint)
        if self.built("ckpt_path") in LAST:
            self._find_last_checkpoint(trainer)
        if isinstance(logger, ResumableCSVLogger):
            configs = self.setting("config") or []
            logger.begin_run(new_name(configs, self.setting("model").class_path, name, self._command))

    def before_fit(self) -> None:
        """Keeps other runs out, and lets a resumed run go on in its W&B run; Lightning opens that before any hook."""
        self._take_folder()
        path = self.built("ckpt_path")
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ResumeWandb) and path is not None:
                callback.continue_from(self.trainer, path)

    def _take_folder(self) -> None:
        """Has the folder locked before any hook writes to it, and shown as the run's name elsewhere."""
        lock_first(self.trainer)
        name_in_wandb(self.trainer)

    before_validate = before_test = _take_folder

    @property
    def ending(self) -> Ending:
        """The reason and exit code with which the run has ended; an evaluation always finishes."""
        return ending_of(self.trainer) if self.subcommand == "fit" else FINISHED

    def _tell_of_unused_groups(self, trainer: Trainer) -> None:
        """Says which settings of other strategies wait for them; a file may well hold those of several."""
        chosen = next((name for name, kind in STRATEGIES.items() if type(trainer.strategy) is kind), "")
        for name in STRATEGIES.keys() - {chosen}:
            group, defaults = self.setting(name), class_parser(STRATEGIES[name]).get_defaults()
            changed = [f"`{name}.{key}`" for key, value in group.items() if value != defaults.get(key)]
            if changed:
                used = chosen or type(trainer.strategy).__name__
                rank_zero_info(f"Not used by the strategy `{used}`: {', '.join(changed)}.")

    def _find_last_checkpoint(self, trainer: Trainer) -> None:
        """Puts the newest run's checkpoint in the place of `last`; training goes on in the folder of that run.

        Raises:
            MisconfigurationException: If there is none, unless `auto` was asked for.
        """
        settings, logger = self.config_init[self.subcommand], trainer.logger
        asked, settings.ckpt_path = settings.ckpt_path, None
        found = last_checkpoint(trainer, self.setting("name"))
        if found is None and asked == "last":
            dirpaths = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
            folders = [folder for folder in (runs_folder(trainer), *dirpaths) if folder is not None]
            raise MisconfigurationException(no_last_checkpoint(folders, self._command))
        if found is None:
            rank_zero_info("`--ckpt_path auto`: no run has a checkpoint yet, so this one begins anew.")
            return
        settings.ckpt_path, self.last = str(found.path), found
        newer = ", ".join(f"`{run}`" for run in found.passed_over)
        note = f" Newer runs have no checkpoint and are passed over: {newer}." if newer else ""
        others = ", ".join(f"`{path}`" for path in found.of_others)
        note += f" Newer checkpoints there are of other runs: {others}." if others else ""
        rank_zero_info(f"`--ckpt_path {asked}` is `{found.path}`.{note}")
        begins_run = self._command == "fit" and chosen_version(logger) is None
        if begins_run and found.run is not None and isinstance(logger, ResumableCSVLogger):
            is_own = found.run.parent == Path(logger.root_dir)  # other loggers have had folders of runs too
            logger.continue_run(version_of(found.run.name) if is_own else None)


def split_settings(args: Mapping[str, Any] | Namespace) -> tuple[str, dict[str, Any]]:
    """Splits settings into the name of their subcommand and the settings of that subcommand.

    Args:
        args: Settings as a configuration file has them, or with the subcommand and its settings below its name.

    Raises:
        ValueError: If there is no such subcommand.
    """
    settings = dict(args.as_dict() if isinstance(args, Namespace) else args)
    command = settings.pop("subcommand", SUBCOMMANDS[0])
    if command not in SUBCOMMANDS:
        raise ValueError(f"there is no subcommand {command!r}. Choose from {', '.join(SUBCOMMANDS)}.")
    own = settings.get(command, settings)
    return command, {key: value for key, value in own.items() if key != "config"}  # files that were read into them


def without_switched_off(trainer: Namespace, callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks that no switch of the trainer turns off, as no flag can take one out of a file's list."""
    off = tuple(kind for key, kind in SWITCHES.items() if trainer.get(key) is False)
    if names := [type(callback).__name__ for callback in callbacks if isinstance(callback, off)]:
        rank_zero_info(f"Switched off: {', '.join(names)}.")
    return [callback for callback in callbacks if not isinstance(callback, off)]


def slot_help(base: type[Callback]) -> str:
    """Says what a callback slot is for, in the words of its base class."""
    first_line = (base.__doc__ or "").strip().splitlines()[0]
    return f"{first_line} null leaves it out."


def check_name(parser: LightningArgumentParser, settings: Namespace, key: str, known: Sequence[str]) -> None:
    """Refuses a name that no registry of Lightning's has, before the Trainer does it with a traceback."""
    name = settings.get(key)
    if isinstance(name, str) and name not in known:
        hint = did_you_mean(name, known) or f" Choose from {', '.join(known[:6])} and so on."
        parser.error(f"`{key}` has no choice {name!r}.{hint}")


def check_own_module(parser: LightningArgumentParser, settings: Namespace) -> None:
    """Refuses a module of ours without data, or under a strategy of Lightning's that can't train it."""
    chosen = pydoc.locate(settings.model.class_path) if settings.get("model") else None
    if not (isinstance(chosen, type) and issubclass(chosen, PostTrainingModule)):
        return
    if settings.get("data") is None and chosen.train_dataloader is PostTrainingModule.train_dataloader:
        parser.error(no_data(chosen.__name__))
    strategy = settings.trainer.strategy
    if isinstance(strategy, str) and (complaint := missing_strategy(strategy, chosen.__name__)) is not None:
        parser.error(complaint)
    accelerator = settings.trainer.accelerator
    if isinstance(accelerator, str) and (complaint := missing_accelerator(accelerator)) is not None:
        parser.error(complaint)


def check_gpu(accelerator: object) -> None:
    """Say what to do where a file asks for GPUs and there are none; Lightning's error is that it found no backend.

    Raises:
        MisconfigurationException: If there are none.
    """
    if accelerator == "gpu" and not (CUDAAccelerator.is_available() or MPSAccelerator.is_available()):
        raise MisconfigurationException(no_gpu())


def check_checkpoint(parser: LightningArgumentParser, path: str | None, command: str) -> None:
    """Refuses a checkpoint that can't be there, before the models are built."""
    if path == "auto" and command != "fit":
        parser.error(no_anew(command))
    if path is None or is_looked_up(path):
        return
    if (complaint := missing_checkpoint(path)) is not None:
        parser.error(complaint)
    try:
        with naming_another(Path(path)):
            format_of(Path(path))
    except NoCheckpointError as error:
        parser.error(f"`--ckpt_path {path}` {error.what}")
    except DamagedFileError as error:
        parser.error(str(error))
