"""Private names and work-arounds of lightning>=2.6.4,<2.7; those of its command line are in `lightning_cli`."""

from __future__ import annotations

import logging
import subprocess
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor, nn
from typing_extensions import override

TIPS = ("litlogger", "litmodels", "that has Tensor Cores")
"""Words of tips to install Lightning's other products, and to compute float32 in less, for which no run has a key."""


def hide_tips() -> None:
    """Keep Lightning from giving tips that say nothing of the run."""
    for package in ("fabric", "pytorch"):
        logging.getLogger(f"lightning.{package}.utilities.rank_zero").addFilter(is_no_tip)


def is_no_tip(record: logging.LogRecord) -> bool:
    """Tell what Lightning says of a run from a tip."""
    return not any(words in record.getMessage() for words in TIPS)


def hide_treespec_warning() -> None:
    """Hide what torch 2.13 says of a class that Lightning uses."""
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec")


def hide_training_warnings() -> None:
    """Hide what Lightning says of all modules that train as ours do, and what does not hold for ours."""
    # At every save, that manual optimization saves a state from before the update: ours is over when `training_step`
    # returns.
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    # Metrics of an evaluation are the same on all ranks before they are logged.
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\('(val|test|timing_s|perf)\b")
    # The modules make batches of a user's rows, and leave those of a data module as they are.
    warnings.filterwarnings("ignore", message="You have overridden `on_before_batch_transfer` in")


def hide_accumulation_warning() -> None:
    """Hide what `GradientAccumulationScheduler` says to modules that expect its effect on hooks of optimizer steps."""
    warnings.filterwarnings("ignore", message="When using `Trainer.accumulate_grad_batches != 1.` and overriding")


def hide_averaging_warnings() -> None:
    """Hide that models must not be sharded, as none is, and that an evaluation loads no weights in training."""
    warnings.filterwarnings("ignore", message="You're using the WeightAveraging callback with a model that overrides")
    warnings.filterwarnings("ignore", message="You're using the WeightAveraging callback, but loading a checkpoint")


def log_under_step(trainer: Trainer, step: int) -> None:
    """Have loggers count from this number of optimizer steps; Lightning counts batches in which there was one."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def validate_now(trainer: Trainer) -> None:
    """Validate in the midst of training, between two batches."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    trainer.validating = True
    loop.restarting = False  # else it would skip the batches of its last pass
    loop.run()
    trainer.training = True


def is_within_validation(loops: dict[str, Any]) -> bool:
    """Tell whether the loops were saved in the middle of a validation, which Lightning then finishes first."""
    batches = loops["epoch_loop.val_loop.batch_progress"]["total"]
    return bool(batches["ready"] == batches["started"] == batches["completed"] + 1 == batches["processed"] + 1)


def count_from(loops: dict[str, Any], *, epoch: int, num_done: int) -> None:
    """Set the loops' saved counters to those of a checkpoint that was saved by a callback at the end of a batch.

    Args:
        loops: State of the loops of `fit`; changed in place.
        epoch: Finished epochs.
        num_done: Batches of the epoch that are done.
    """
    begun = epoch + (num_done > 0)
    for progress in loops["epoch_progress"].values():
        progress.update(ready=begun, started=begun, processed=epoch, completed=epoch)
    batches = loops["epoch_loop.batch_progress"]
    for progress, count in ((batches["total"], batches["total"]["ready"]), (batches["current"], num_done)):
        progress.update(ready=count, started=count, processed=count, completed=count - 1)
    batches["is_last_batch"] = False


def is_within_step(trainer: Trainer) -> bool:
    """Tell whether a batch of training has begun, and not ended with its logging and validation."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return trainer.training and trainer.fit_loop._data_fetcher is not None and progress.ready != progress.completed


def is_accumulating(trainer: Trainer) -> bool:
    """Tell whether the batch in training, or the newest one, was not followed by a step of the optimizer."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def metrics_to_log(trainer: Trainer) -> dict[str, float]:
    """Get the metrics that Lightning is going to send to loggers at the end of the batch; empty if none."""
    connector = trainer._logger_connector
    is_logged = connector.should_update_logs or trainer.fast_dev_run  # type: ignore[attr-defined]
    return {name: float(value) for name, value in connector.metrics["log"].items()} if is_logged else {}


def send_metrics(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Send metrics to all loggers, with epoch and step, as Lightning does at the end of a batch."""
    trainer._logger_connector.log_metrics(metrics)


def validates_next(trainer: Trainer) -> bool:
    """Tell whether a validation follows the batch in training."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None  # it is within a batch
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def update_logged(module: LightningModule, name: str, value: Tensor) -> bool:
    """Give Lightning the next value of a metric that it knows; False where it must be asked to ``log``.

    Its ``log`` copies the whole description of a metric at each call. Not in the first batch of a loop, in which
    Lightning resets what it knows, nor for what it sums up over an epoch.

    Args:
        module: Module whose hook is running.
        name: Name of the metric.
        value: A floating point number.
    """
    results = module.trainer._results
    key = f"{module._current_fx_name}.{name}"
    if results is None or module.trainer._logger_connector._first_loop_iter is not False or key not in results:
        return False
    if results[key].meta.on_epoch or results.dataloader_idx is not None:
        return False
    results.update_metrics(key, value, 1)
    return True


def replace_signals(trainer: Trainer, listen: Callable[[], Callable[[], None]]) -> None:
    """Take the place of Lightning's handling of signals.

    Its handler of SIGTERM begins a collective wherever the signal finds a process, in the middle of training's; that of
    SIGUSR1 under SLURM saves in the middle of a step; and before each batch the host asks the devices of all ranks.

    Args:
        trainer: Before it registers handlers.
        listen: Registers others, and returns what takes them back.
    """
    connector = trainer._signal_connector
    tear_down = connector.teardown

    def start() -> None:
        connector.received_sigterm = False
        undo = listen()

        def stop() -> None:
            undo()
            tear_down()

        connector.teardown = stop  # type: ignore[method-assign]

    connector.register_signal_handlers = start  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def restore_signals(trainer: Trainer) -> None:
    """Take back `replace_signals`."""
    for owner in (trainer._signal_connector, trainer.fit_loop.epoch_loop):
        for name in ("register_signal_handlers", "teardown", "_broadcast_sigterm_tensor"):
            vars(owner).pop(name, None)  # over the methods of their classes


def note_sigterm(trainer: Trainer) -> None:
    """Have `Trainer.received_sigterm` be true."""
    trainer._signal_connector.received_sigterm = True


def average_of(averaging: WeightAveraging) -> nn.Module | None:
    """The copy of the module that holds averaged weights; None before a fit."""
    average = averaging._average_model
    return None if average is None else average.module


def restart_averaging(averaging: WeightAveraging) -> None:
    """Have a callback average from the first step of a fit, whatever an earlier fit has counted."""
    averaging._latest_update_step = 0


def forget_average(averaging: WeightAveraging) -> None:
    """Have an evaluation take a checkpoint's averaged weights, as if there had been no fit."""
    averaging._average_model = None


def swap_average(averaging: WeightAveraging, module: LightningModule) -> None:
    """Exchange the weights of a module and their average."""
    averaging._swap_models(module)


def is_compiled(module: LightningModule) -> bool:
    """Tell whether ``torch.compile`` has replaced a module's steps."""
    return module._compiler_ctx is not None


def has_training_data(trainer: Trainer) -> bool:
    """Tell whether a fit that begins was given loaders, or a module or data module that makes them."""
    return trainer.fit_loop._data_source.is_defined()


def last_checkpoints(trainer: Trainer) -> list[Path]:
    """The files that ``ckpt_path: last`` chooses among."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return [Path(path) for callback in callbacks for path in callback._find_last_checkpoints(trainer)]


class FolderCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that writes something else than checkpoints: it can't be resumed from."""

    def write(self, trainer: Trainer, path: Path) -> None:
        """Write a folder. Collective."""
        raise NotImplementedError

    def remove(self, path: Path) -> None:
        """Remove a folder that was written."""
        raise NotImplementedError

    def refuse_monitor(self, metrics: Collection[str]) -> None:
        """Raise, since ``monitor`` is not among the metrics though a validation has logged its own."""
        raise NotImplementedError

    @override
    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        try:
            super()._save_topk_checkpoint(trainer, monitor_candidates)
        except MisconfigurationException:  # Lightning's calls each such callback a `ModelCheckpoint`
            if self.monitor not in monitor_candidates:
                self.refuse_monitor(monitor_candidates)
            raise

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.write(trainer, Path(filepath))
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath

    @override
    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.is_global_zero:
            self.remove(Path(filepath))

    @override
    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        return set()


def start_method(strategy: ParallelStrategy) -> str:
    """Get how a strategy starts processes: ``popen`` runs the script anew, ``fork`` and ``spawn`` run a function."""
    return str(strategy._start_method) if isinstance(strategy, DDPStrategy) else "popen"


def chosen_version(logger: Logger | None) -> int | str | None:
    """The run that the user has chosen for a logger; None where it begins a new one.

    Asking loggers of files for their version makes them choose one.
    """
    version = logger.version if isinstance(logger, WandbLogger) else getattr(logger, "_version", None)
    return version if isinstance(version, int | str) else None


def choose_version(logger: CSVLogger, version: int | str | None) -> None:
    """Have a logger log into the folder of this run."""
    logger._version = version


def choose_folder(logger: CSVLogger, folder: str) -> None:
    """Have a logger that has not logged yet make the folders of its runs in this one."""
    logger._root_dir = logger._save_dir = folder


def next_version(logger: CSVLogger) -> int:
    """The number after those of the runs beside which a logger begins a new one."""
    return logger._get_next_version()


def name_wandb_run(logger: WandbLogger, name: str) -> None:
    """Give a run that has not begun a name to show, unless it has one."""
    logger._wandb_init["name"] = logger._wandb_init["name"] or name


def leave_out_anonymous(logger: WandbLogger) -> None:
    """Keep a logger from passing on an option that W&B has given up, and warns of, where the user has not set it."""
    if logger._wandb_init.get("anonymous", "") is None:
        del logger._wandb_init["anonymous"]


def continue_wandb_run(logger: WandbLogger, run_id: str) -> None:
    """Make a logger that has not logged yet go on with an earlier run, whose id only its constructor takes."""
    logger._wandb_init |= {"id": run_id, "resume": "allow"}
    logger._id = run_id


class OwnWriterLogger(CSVLogger):
    """A `CSVLogger` with a writer of its own."""

    def make_writer(self) -> ExperimentWriter:
        """Called before the first metrics are logged, on the first rank."""
        raise NotImplementedError

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if not isinstance(self._experiment, ExperimentWriter):
            self._experiment = self.make_writer()
        return self._experiment


class KeepingWriter(ExperimentWriter):
    """A writer that leaves the metrics in its folder, which Lightning's deletes."""

    def rewrite(self, names: list[str]) -> None:
        """Write the rows that are there anew with more columns."""
        raise NotImplementedError

    @override
    def _check_log_dir_exists(self) -> None:
        """Does nothing: Lightning's deletes the metrics that are there."""

    @override
    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self.rewrite(fieldnames)


def ddp_options(strategy: DDPStrategy) -> dict[str, Any]:
    """Arguments of `DistributedDataParallel` that a strategy was made with."""
    return dict(strategy._ddp_kwargs)


def process_group_backend(strategy: ParallelStrategy) -> str:
    """The backends of torch's process groups that a strategy has chosen, such as ``gloo``."""
    known: Any = strategy  # those for several processes have it, each for itself
    return str(known._get_process_group_backend())


class OpenLauncher(_SubprocessScriptLauncher):
    """A launcher that tells its subclass when it starts the other processes of this machine.

    It does not watch them: Lightning kills this process, without a word, some seconds after one has ended in any way.
    """

    def before_start(self) -> None:
        """Called in the process that starts the others."""

    def after_start(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """Called with the others, by their local ranks from 1 on."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        del trainer
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self.before_start()
            self._call_children_scripts()
            self.after_start(self.procs)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class OwnLauncherStrategy(ParallelStrategy):
    """A strategy with a launcher of its own, if any, where Lightning would start this script once a device."""

    launcher_kind: type[OpenLauncher] | None
    num_nodes: int
    num_processes: int

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self.launcher_kind is not None and type(self._launcher) is _SubprocessScriptLauncher:
            assert self.cluster_environment is not None
            self._launcher = self.launcher_kind(self.cluster_environment, self.num_processes, self.num_nodes)


class OpenModelParallelStrategy(ModelParallelStrategy):
    """A `ModelParallelStrategy` that lets its subclasses decide what it keeps to itself."""

    def set_mesh(self, *, data_parallel_size: int, tensor_parallel_size: int) -> None:
        """Say how many ranks are in each group once that is known, before `setup_environment`."""
        self._data_parallel_size, self._tensor_parallel_size = data_parallel_size, tensor_parallel_size

    def choose_backend(self, backend: str) -> str:
        """The backends of torch's process groups, from the one that Lightning has chosen for the device."""
        return backend

    @override
    def _get_process_group_backend(self) -> str:
        return self.choose_backend(super()._get_process_group_backend())
