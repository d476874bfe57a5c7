"""Metrics that are handed over are those that Lightning would have logged."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from tests.resume.experiment import read_metrics
from tests.runs import Recorder, make_chats, make_sft, make_trainer
from verl_lightning.compat.lightning import update_logged
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.telemetry.step_log import log_step


class Logs(Callback):
    """Logs a number of each step in one of two ways, and counts how often Lightning is asked to."""

    def __init__(self, log):
        self.way, self.asked = log, 0

    def on_train_start(self, trainer, module):
        def count(*words, **options):
            self.asked += 1
            type(module).log(module, *words, **options)

        module.log = count

    def on_train_batch_end(self, trainer, module, *_):
        self.way(module, {"mine": 1.5 * trainer.global_step, "there": torch.tensor(trainer.global_step / 4)})


def log_with_lightning(module, metrics):
    module.log_dict(metrics, batch_size=1)


@pytest.mark.parametrize("log", [log_step, log_with_lightning])
def test_each_step_is_logged_with_its_own_numbers(tmp_path, tiny_folder, chat_file, log):
    """Six steps are an epoch and a half."""
    recorder, logger = Recorder(), ResumableCSVLogger(tmp_path, "", version=0)
    options = {"max_steps": 6, "limit_train_batches": 4, "log_every_n_steps": 1, "logger": logger}
    trainer = make_trainer(tmp_path, Logs(log), recorder, **options)
    trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))

    assert recorder.column("mine") == [1.5, 3.0, 4.5, 6.0, 7.5, 9.0]
    rows = read_metrics(tmp_path / "version_0")
    assert [(float(row["step"]), float(row["mine"]), float(row["there"])) for row in rows] == [
        (step - 1, 1.5 * step, step / 4) for step in range(1, 7)
    ]


def test_lightning_is_asked_in_the_first_batch_of_an_epoch_only(tmp_path, tiny_folder, chat_file):
    """Fails if Lightning moves the private names: then it is asked each time."""
    logs = Logs(log_step)
    trainer = make_trainer(tmp_path, logs, max_steps=6, limit_train_batches=3, log_every_n_steps=50)
    trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))

    assert logs.asked == 2 * (2 + 5)  # of this callback and of the module, in two epochs


class Sums(Callback):
    """Logs ones to be summed over the epoch."""

    def on_train_batch_end(self, trainer, module, *_):
        one = torch.tensor(1.0)
        assert not update_logged(module, "ones", one)
        module.log("ones", one, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)


def test_what_lightning_sums_up_is_left_to_it(tmp_path, tiny_folder, chat_file):
    trainer = make_trainer(tmp_path, Sums(), max_steps=4, limit_train_batches=4)

    trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))

    assert trainer.callback_metrics["ones"] == 4
