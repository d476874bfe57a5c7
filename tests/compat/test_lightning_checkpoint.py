"""Private names of `ModelCheckpoint` mean what we take them for."""

from __future__ import annotations

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.compat.test_lightning import parameters_of
from verl_lightning.compat.lightning_checkpoint import has_saved_last, saves_by_time


def test_checkpoint_callbacks_save_and_remove_by_these_methods(tmp_path):
    signatures = {
        "_save_checkpoint": ["self", "trainer", "filepath"],
        "_save_topk_checkpoint": ["self", "trainer", "monitor_candidates"],
        "_remove_checkpoint": ["self", "trainer", "filepath"],
        "_find_last_checkpoints": ["self", "trainer"],
        "_save_last_checkpoint": ["self", "trainer", "monitor_candidates"],
        "_monitor_candidates": ["self", "trainer"],
    }
    for name, parameters in signatures.items():
        assert parameters_of(getattr(ModelCheckpoint, name)) == parameters
    assert {"_last_global_step_saved", "_last_checkpoint_saved"} <= vars(ModelCheckpoint()).keys()
    assert not saves_by_time(ModelCheckpoint())
    assert not has_saved_last(ModelCheckpoint(), 0)


def test_saves_by_the_clock_take_these_steps():
    signatures = {
        "_monitor_candidates": ["self", "trainer"],
        "_should_skip_saving_checkpoint": ["self", "trainer"],
        "_save_last_checkpoint": ["self", "trainer", "monitor_candidates"],
    }
    for name, parameters in signatures.items():
        assert parameters_of(getattr(ModelCheckpoint, name)) == parameters
    names = {"_train_time_interval", "_last_time_checked", "_defer_save_until_validation"}
    assert names <= vars(ModelCheckpoint()).keys()
