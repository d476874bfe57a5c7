"""Private names of Lightning that `compat.lightning` uses are where it looks for them."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from lightning.fabric.accelerators import cuda
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from verl_lightning.compat import lightning as compat


def parameters_of(function: Any) -> list[str]:
    """Names of a function's or method's parameters."""
    return list(inspect.signature(function).parameters)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")


def test_the_version_is_the_one_that_was_read():
    assert importlib.metadata.version("lightning").startswith("2.6.")


def test_what_is_left_of_a_step_is_known(trainer):
    """`FinishInterruptedStep` asks for it."""
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    assert isinstance(type(connector).should_update_logs, property)
    assert isinstance(type(connector).metrics, property)
    assert parameters_of(connector.log_metrics) == ["metrics", "step"]
    assert parameters_of(loop._should_check_val_fx) == ["data_fetcher"]
    assert not compat.is_accumulating(trainer)
    assert trainer.fit_loop._data_fetcher is None
    assert callable(loop.val_loop.run)
    assert loop.val_loop.restarting is False
    assert loop.max_steps == trainer.max_steps == -1
    assert loop.batch_progress.current.ready == loop.batch_progress.current.completed == 0
    assert trainer.current_epoch == trainer.fit_loop.epoch_progress.current.completed


def test_steps_are_logged_under_a_number(trainer):
    loop = trainer.fit_loop.epoch_loop
    assert loop._batches_that_stepped == 0
    assert loop.total_batch_idx == loop.batch_idx == -1


def test_the_loops_state_has_the_names_that_are_rewritten(trainer):
    """`ResumeEpoch` counts on in it."""
    state = trainer.fit_loop.state_dict()
    counts = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    assert state["epoch_progress"] == {"total": counts, "current": counts}
    assert state["epoch_loop.batch_progress"] == {"total": counts, "current": counts, "is_last_batch": False}
    assert state["epoch_loop.val_loop.batch_progress"]["total"] == counts
    assert state["state_dict"] == {}


def test_signals_are_heard_by_ours_and_then_by_lightnings_again(trainer):
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    own = [connector.register_signal_handlers, connector.teardown, loop._broadcast_sigterm_tensor]
    assert [parameters_of(function) for function in own] == [[], [], []]
    assert connector.received_sigterm is trainer.received_sigterm is False
    calls = []

    compat.replace_signals(trainer, lambda: calls.append("listen") or (lambda: calls.append("undo")))
    connector.register_signal_handlers()
    loop._broadcast_sigterm_tensor()
    connector.teardown()

    assert calls == ["listen", "undo"]
    compat.restore_signals(trainer)
    assert [connector.register_signal_handlers, connector.teardown, loop._broadcast_sigterm_tensor] == own


def test_counts_of_a_validation_that_is_broken_off_are_known(trainer):
    """`Preemption` takes them back."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    assert (
        vars(progress.total).keys() == vars(progress.current).keys() == {"ready", "started", "processed", "completed"}
    )


def test_processes_are_started_as_lightning_starts_them():
    """`OpenLauncher` leaves out who kills the first one when another has ended."""
    source = inspect.getsource(compat._SubprocessScriptLauncher.launch)
    assert "_launch_process_observer(self.procs)" in source
    assert parameters_of(compat._SubprocessScriptLauncher._call_children_scripts) == ["self"]
    assert parameters_of(compat._set_num_threads_if_needed) == ["num_processes"]
    for kind in (DDPStrategy, ModelParallelStrategy):
        assert parameters_of(kind._configure_launcher) == ["self"]
        assert parameters_of(kind._get_process_group_backend) == ["self"]
        assert parameters_of(kind.set_world_ranks) == ["self"]


def test_averages_are_reached():
    averaging = WeightAveraging()
    assert averaging._average_model is compat.average_of(averaging) is None
    assert averaging._latest_update_step == 0
    assert parameters_of(averaging._swap_models) == ["pl_module"]


def test_a_compiled_module_is_known():
    module = LightningModule()
    assert not compat.is_compiled(module)
    module._compiler_ctx = {"compiler": "dynamo"}  # as `Trainer.fit` does with what `torch.compile` returns
    assert compat.is_compiled(module)


def test_tips_are_known():
    text = Path(cuda.__file__).read_text()
    assert compat.TIPS[-1] in text
    assert all(not compat.is_no_tip(logging.makeLogRecord({"msg": f"a {tip}"})) for tip in compat.TIPS)


def test_a_fit_without_loaders_is_known(trainer):
    assert isinstance(type(trainer.fit_loop._data_source).is_defined, FunctionType)


def test_a_wandb_loggers_run_is_chosen(tmp_path):
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    assert logger._wandb_init["anonymous"] is None
    compat.leave_out_anonymous(logger)
    assert "anonymous" not in logger._wandb_init
    assert logger._id is None
    assert "id" in logger._wandb_init
    compat.name_wandb_run(logger, "shown")
    compat.name_wandb_run(logger, "too late")
    assert logger._wandb_init["name"] == "shown"
    compat.continue_wandb_run(logger, "earlier")
    assert logger.version == compat.chosen_version(logger) == "earlier"


def test_a_file_loggers_run_is_chosen(tmp_path):
    assert parameters_of(ExperimentWriter._check_log_dir_exists) == ["self"]
    assert parameters_of(ExperimentWriter._rewrite_with_new_header) == ["self", "fieldnames"]
    assert CSVLogger(tmp_path)._experiment is None
    moved = CSVLogger(tmp_path / "elsewhere")
    (tmp_path / "lightning_logs/version_3").mkdir(parents=True)
    compat.choose_folder(moved, str(tmp_path))
    assert compat.next_version(moved) == 4
    assert moved.root_dir == str(tmp_path / "lightning_logs")
    assert compat.next_version(CSVLogger(tmp_path / "empty")) == 0
    for kind in (CSVLogger, TensorBoardLogger):
        assert compat.chosen_version(kind(tmp_path)) is None
        assert compat.chosen_version(kind(tmp_path, version=3)) == 3


def test_strategies_keep_their_settings_here():
    assert compat.ddp_options(DDPStrategy(bucket_cap_mb=7)) == {"bucket_cap_mb": 7}
    assert parameters_of(ModelParallelStrategy._get_process_group_backend) == ["self"]
    assert {"_data_parallel_size", "_tensor_parallel_size"} <= vars(ModelParallelStrategy()).keys()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("callbacks.model_checkpoint", "Using ModelCheckpoint with manual optimization"),
        ("trainer.connectors.logger_connector.result", "It is recommended to use `self.log("),
        ("callbacks.gradient_accumulation_scheduler", "When using `Trainer(accumulate_grad_batches != 1)` and over"),
        ("callbacks.weight_averaging", "You're using the WeightAveraging callback with a model that overrides"),
        ("callbacks.weight_averaging", "You're using the WeightAveraging callback, but loading a checkpoint"),
        ("trainer.connectors.logger_connector.logger_connector", "try installing [litlogger]"),
        ("trainer.connectors.callback_connector", "try installing [litmodels]"),
        ("utilities._pytree", "LeafSpec()"),
    ],
)
def test_what_is_hidden_is_still_said(module, words):
    """What Lightning says no longer needs no filter."""
    assert words in inspect.getsource(importlib.import_module(f"lightning.pytorch.{module}"))
