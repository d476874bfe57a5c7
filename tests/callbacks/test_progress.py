"""The progress bar that names phases."""

from __future__ import annotations

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.callbacks.conftest import EACH_STEP
from verl_lightning.callbacks import PhaseProgressBar, progress


class Watcher(Callback):
    """Reads the bars' descriptions as each phase begins; listens after the bar."""

    def __init__(self, bar):
        self.bar = bar
        self.training, self.validation = [], []

    def on_phase_start(self, module, phase):
        if module.trainer.training:
            self.training.append(self.bar.train_progress_bar.desc.removesuffix(": "))
        else:
            self.validation.append(self.bar.val_progress_bar.desc.removesuffix(": "))


def test_in_a_pipe_each_step_is_one_line(fit, capsys):
    fit(PhaseProgressBar(), enable_progress_bar=True, max_steps=3, val_check_interval=2, check_val_every_n_epoch=None)

    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.startswith(("step ", "validation "))]
    assert [line.partition(":")[0] for line in lines] == ["step 1/3", "step 2/3", "validation after step 2", "step 3/3"]
    assert all("reward=" in line for line in lines)
    assert "tokens/s=" in lines[0]
    assert "\r" not in output
    assert "Memory plan of each device" in output  # Lightning's bars, where they are not drawn, swallow what is printed


def test_the_bar_shows_phases_reward_and_speed(fit, capsys, monkeypatch):
    monkeypatch.setattr(progress, "is_live", lambda: True)
    bar = PhaseProgressBar()
    watcher = Watcher(bar)

    fit(bar, watcher, enable_progress_bar=True, max_steps=2, limit_val_batches=1, **EACH_STEP)

    first, second = watcher.training[: len(watcher.training) // 2], watcher.training[len(watcher.training) // 2 :]
    names = ["weight sync", "rollout", "reward", "log-probs", "values", "advantages", "critic update", "actor update"]
    assert [name for name in dict.fromkeys(first) if "reference" not in name and "metrics" not in name] == [
        f"Step 0 {name}" for name in names
    ]
    assert "Step 1 rollout" in second
    assert "Validation rollout" in watcher.validation
    assert "Validation reward" in watcher.validation
    output = "".join(capsys.readouterr())
    assert "reward=" in output
    assert "tokens/s=" in output
    assert "v_num" not in output


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_the_bar_of_a_resumed_run_knows_its_end(fit, tmp_path, monkeypatch):
    """Of an epoch of 16 batches, two of which are done."""
    monkeypatch.setattr(progress, "is_live", lambda: True)
    saves = {"enable_checkpointing": True, "enable_progress_bar": True}
    fit(ModelCheckpoint(tmp_path, "x", every_n_train_steps=1), PhaseProgressBar(), max_steps=2, **saves)
    bar = PhaseProgressBar(leave=True)

    fit(bar, ModelCheckpoint(tmp_path, "x"), max_steps=3, ckpt_path=tmp_path / "x.ckpt", **saves)

    assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (3, 3)


class SavesEarly(Callback):
    """Saves a checkpoint before there is a bar, as `BatchSizeFinder` does."""

    def __init__(self, path):
        self.path = path

    def on_fit_start(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_may_be_saved_before_the_bar_is_there(fit, tmp_path):
    saves = SavesEarly(tmp_path / "early.ckpt")

    fit(PhaseProgressBar(), saves, enable_progress_bar=True, max_steps=1)

    assert saves.path.exists()


def test_a_bar_that_is_off_lets_training_go_on(fit):
    assert fit(PhaseProgressBar(refresh_rate=0), enable_progress_bar=True, max_steps=1).trainer.global_step == 1
