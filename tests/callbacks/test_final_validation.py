"""The last validation outlives its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.callbacks.conftest import EACH_STEP
from tests.resume.experiment import read_metrics
from verl_lightning.callbacks import BaselineValidation, FinalValidation, SamplesTable


class Fails(Callback):
    """Fails in the third iteration."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2:
            raise ValueError("enough")


def test_a_baseline_is_validated_and_logged_before_the_first_step(fit, tmp_path):
    """And no step is counted, nor a checkpoint saved."""
    logger = CSVLogger(tmp_path, "csv")
    saves = ModelCheckpoint(tmp_path, "{step}", monitor="val/reward", save_top_k=-1)
    parts = [BaselineValidation(), SamplesTable(), saves]

    run = fit(*parts, logger=logger, max_steps=2, enable_checkpointing=True, **EACH_STEP)

    rows = [(row["step"], "val/reward" in row) for row in read_metrics(tmp_path / "csv/version_0")]
    assert rows == [("-1", True), ("0", False), ("0", True), ("1", False), ("1", True)]
    assert len(run.recorder.validations) == 3
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"step=1.ckpt", "step=2.ckpt"}
    assert (Path(logger.log_dir) / "samples/step=0.jsonl").exists()


def test_a_run_that_fails_leaves_its_last_validation(fit, tmp_path):
    logger = CSVLogger(tmp_path, "csv")

    with pytest.raises(ValueError, match="enough"):
        fit(FinalValidation(), Fails(), logger=logger, **EACH_STEP)

    kept = json.loads((tmp_path / "csv/version_0/final_validation.json").read_text())
    rows = read_metrics(tmp_path / "csv/version_0")
    second = [row for row in rows if row.get("val/reward")][1]
    assert (kept["step"], kept["ended_by"]) == (2, "ValueError: enough")
    assert kept["metrics"]["val/reward"] == pytest.approx(float(second["val/reward"]))
    assert rows[-1]["final/val/reward"] == second["val/reward"]


def test_a_run_that_ends_well_says_so(fit, tmp_path):
    run = fit(FinalValidation(str(tmp_path / "mine")), **EACH_STEP)

    kept = json.loads((tmp_path / "mine/final_validation.json").read_text())
    assert (kept["step"], kept["ended_by"]) == (3, "finished")
    assert kept["metrics"]["val/reward"] == pytest.approx(run.recorder.validations[-1]["val/reward"])


def test_without_a_validation_there_is_nothing_to_keep(fit, tmp_path):
    fit(FinalValidation(), max_steps=1, limit_val_batches=0)

    assert not list(tmp_path.rglob("final_validation.json"))


def test_a_resumed_run_knows_the_validation_before():
    first, second = FinalValidation(), FinalValidation()
    first._step, first._metrics = 4, {"val/reward": 0.5}

    second.load_state_dict(first.state_dict())

    assert second.state_dict() == {"step": 4, "metrics": {"val/reward": 0.5}}
