"""Names of Lightning 2.6 that resuming needs and that Lightning may move."""

from __future__ import annotations

import inspect

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter


def test_lightnings_private_names_are_still_there():
    """`FinishInterruptedStep` reads and calls these, `AgreeOnSigterm` takes the place of the last."""
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    assert isinstance(type(connector).should_update_logs, property)
    assert isinstance(type(connector).metrics, property)
    assert list(inspect.signature(connector.log_metrics).parameters) == ["metrics", "step"]
    assert list(inspect.signature(loop._should_check_val_fx).parameters) == ["data_fetcher"]
    assert trainer.fit_loop._data_fetcher is None
    assert callable(loop.val_loop.run)
    assert loop.val_loop.restarting is False
    assert loop.max_steps == trainer.max_steps == -1
    assert loop.batch_progress.current.ready == loop.batch_progress.current.completed == 0
    assert trainer.current_epoch == trainer.fit_loop.epoch_progress.current.completed
    assert list(inspect.signature(loop._broadcast_sigterm_tensor).parameters) == []
    assert list(inspect.signature(trainer._signal_connector._sigterm_notifier_fn).parameters) == ["signum", "_"]
    assert trainer._signal_connector.received_sigterm is trainer.received_sigterm is False


def test_wandb_loggers_private_names_are_still_there(tmp_path):
    """`continue_run` writes these."""
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    assert logger._id is None
    assert "id" in logger._wandb_init


def test_file_loggers_private_names_are_still_there(tmp_path):
    """`WholeFileWriter` takes the place of two, `chosen_version` reads one, `ResumableCSVLogger` calls another."""
    assert list(inspect.signature(ExperimentWriter._check_log_dir_exists).parameters) == ["self"]
    assert list(inspect.signature(ExperimentWriter._rewrite_with_new_header).parameters) == ["self", "fieldnames"]
    assert CSVLogger(tmp_path)._get_next_version() == 0
    for kind in (CSVLogger, TensorBoardLogger):
        assert kind(tmp_path)._version is None
        assert kind(tmp_path, version=3)._version == 3


def test_the_loops_state_has_the_names_that_are_rewritten():
    """`ResumeEpoch` counts on in it."""
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    state = trainer.fit_loop.state_dict()
    counts = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    assert state["epoch_progress"] == {"total": counts, "current": counts}
    assert state["epoch_loop.batch_progress"] == {"total": counts, "current": counts, "is_last_batch": False}
    assert state["epoch_loop.val_loop.batch_progress"]["total"] == counts
    assert state["state_dict"] == {}
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 0
