"""A run that is told to stop saves, ends with its exit code, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from tests.processes import run_verl_fit, start, start_ranks, verl_fit, wait_until
from tests.resume.experiment import assert_same_state, read_metrics
from tests.runs import make_chats, make_sft, make_trainer, run_folders
from verl_lightning.modules.preemption import Preempted, Preemption
from verl_lightning.processes.signals import SAME_SECONDS

# One run, preempted in the rollout of its first step, in the validation after the second, as its callback saves after
# the third, and in the update of the fourth, by SLURM's signal. With each, the step after which it is saved.
TIMES = {
    ("gen", 0, "SIGTERM"): 1,
    ("validation", 2, "SIGTERM"): 2,
    ("save_checkpoint", 3, "SIGTERM"): 3,
    ("update_actor", 3, "SIGUSR1"): 4,
}
FIRST, VALIDATION, SAVE, UPDATE = TIMES
LAYOUTS = {
    "auto": (1, [], [FIRST, VALIDATION, SAVE, UPDATE]),
    "ddp": (2, ["--strategy=ddp"], [VALIDATION, UPDATE]),
    "fsdp": (2, ["--strategy=fsdp", "--fsdp.async_save=true"], [FIRST, SAVE]),
}


@pytest.fixture(autouse=True)
def cancel_timers():
    """Of runs in this process, which they would end once their grace is over."""
    yield
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.cancel()


class TellAt(Callback):
    """Tells its run to stop in the batch of training with an index, or in the validation after it."""

    def __init__(self, moment, batch_idx):
        self.moment = moment
        self.batch_idx = batch_idx

    def tell(self, moment, trainer, batch_idx):
        if (moment, batch_idx) == (self.moment, self.batch_idx):
            [preemption] = [callback for callback in trainer.callbacks if isinstance(callback, Preemption)]
            preemption.tell("a test")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.tell("train", trainer, batch_idx)

    def on_validation_batch_start(self, trainer, *args):
        self.tell("validation", trainer, trainer.fit_loop.batch_idx)


class ForgetSave(Callback):
    """Has the checkpoint of the step before a validation be gone."""

    def on_validation_start(self, trainer, module):
        [saves] = trainer.checkpoint_callbacks
        saves._last_global_step_saved = 0


def run(words, folder, world_size, code):
    """What a run says that must end with an exit code, on its first rank: others leave it the word."""
    if world_size == 1:
        return verl_fit(*words, folder=folder, code=code)
    ranks = start_ranks(world_size, run_verl_fit, *words, "--trainer.devices=2", folder=folder)
    return "".join([rank.wait(code=0 if index else code) for index, rank in enumerate(ranks)])


def signal_at(moment, step=0, name="SIGTERM", rank=0):
    values = {"moment": moment, "step": step, "name": name, "rank": rank}
    return callback("SignalAt", **values)


def callback(kind, /, **values):
    flags = [f"--trainer.callbacks.{key}={value}" for key, value in values.items()]
    return [f"--trainer.callbacks+=tests.endings.parts.{kind}", *flags]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "words", "times"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_that_is_preempted_again_and_again_equals_one_that_is_not(
    tmp_path, settings_file, world_size, words, times
):
    words = ["--config", str(settings_file), "--trainer.max_steps=5", *words]
    run(words, tmp_path / "whole", world_size, 0)

    words += ["--ckpt_path=auto"]
    for moment in times:
        output = run([*words, *signal_at(*moment, rank=world_size - 1)], tmp_path / "parts", world_size, 75)
        assert f"stopped after step {TIMES[moment]}, saved in `" in output
    run(words, tmp_path / "parts", world_size, 0)

    whole, parts = (run_folders(tmp_path / name)[0] for name in ("whole", "parts"))
    assert read_metrics(parts) == read_metrics(whole)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["setup", "fit", "train"])
def test_a_run_that_has_not_begun_ends_at_once(tmp_path, settings_file, moment):
    output = verl_fit("--config", str(settings_file), *signal_at(moment), folder=tmp_path, code=75)

    assert "verl-fit: SIGTERM: the run ends" in output
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("last*"))


@pytest.mark.slow
def test_slurms_warning_saves_after_the_step_and_requeues_nothing(tmp_path, settings_file):
    """Lightning's own handler would save in the middle of it, and call `scontrol`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text("#!/bin/sh\ntouch called\n")
    (tmp_path / "bin/scontrol").chmod(0o755)
    names = {"NTASKS": "1", "JOB_ID": "7", "JOB_NAME": "run", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    slurm = {f"SLURM_{name}": value for name, value in names.items()}
    slurm |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    words = ["--config", str(settings_file), *signal_at("update_actor", step=1, name="SIGUSR1")]

    output = verl_fit(*words, folder=tmp_path, environment=slurm, code=75)

    assert "stopped after step 2, saved in `" in output
    assert not (tmp_path / "called").exists()


@pytest.mark.slow
def test_an_evaluation_ends_at_once(tmp_path, settings_file):
    words = ["validate", "--config", str(settings_file), *signal_at("validation")]

    assert "verl-fit: SIGTERM: the run ends here" in verl_fit(*words, folder=tmp_path, code=75)


@pytest.mark.slow
@pytest.mark.parametrize("deaf", ["false", "true"])
def test_an_iteration_without_end_is_broken_off(tmp_path, settings_file, deaf):
    """Also where its main thread waits inside of a library, and can't run Python."""
    hang = callback("HangAt", moment="update_actor", step=3, deaf=deaf)

    output = verl_fit("--config", str(settings_file), "--preemption.grace=0.1", *hang, folder=tmp_path, code=75)

    assert "the run has not ended within `preemption.grace` = 0.1 s, and is broken off" in output
    assert ("the process is stuck" in output) == (deaf == "true")
    [last] = tmp_path.rglob("last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 3  # what its `ModelCheckpoint` had written


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(tmp_path, settings_file):
    hang = callback("HangAt", moment="update_actor")
    with start(run_verl_fit, "--config", str(settings_file), *hang, folder=tmp_path) as process:
        wait_until(lambda: "the run saves and ends" in process.output, process)  # it has heard the first one
        time.sleep(2 * SAME_SECONDS)
        os.kill(process.pid, signal.SIGUSR1)
        output = process.wait(code=75)

    assert "SIGTERM: the run saves and ends after this iteration, within 300 s" in output
    assert "SIGUSR1, after SIGTERM: the run ends at once" in output


@pytest.mark.parametrize(("options", "told_at"), [({"val_check_interval": 3}, "validation"), ({}, "train")])
def test_a_step_of_several_batches_is_finished(tmp_path, tiny_folder, chat_file, options, told_at):
    """Also where a validation falls between them."""

    def fit(name, *callbacks, **more):
        saves = ModelCheckpoint(tmp_path / name, save_top_k=0, save_last=True, every_n_train_steps=1)
        more |= {"enable_checkpointing": True, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2}
        trainer = make_trainer(tmp_path, saves, *callbacks, **more, **options)
        trainer.fit(make_sft(tiny_folder), make_chats(chat_file, chat_file))

    fit("whole", max_steps=2)
    with pytest.raises(Preempted) as end:
        fit("preempted", TellAt(told_at, 2), max_steps=9)
    assert "stopped after step 2, " in end.value.words

    whole, preempted = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "preempted"))
    for key in ("state_dict", "optimizer_states"):
        assert_same_state(preempted[key], whole[key])


def test_weights_in_training_are_saved_where_a_validation_is_of_averaged_ones(tmp_path, tiny_folder, chat_file):
    def fit(name, *callbacks, **options):
        averages = EMAWeightAveraging(update_every_n_steps=1)
        saves = ModelCheckpoint(tmp_path / name, save_top_k=0, save_last=True, every_n_train_steps=2)
        options |= {"enable_checkpointing": True, "max_steps": 2, "check_val_every_n_epoch": None}
        trainer = make_trainer(tmp_path, averages, saves, *callbacks, val_check_interval=2, **options)
        trainer.fit(make_sft(tiny_folder), make_chats(chat_file, chat_file))

    fit("whole")
    with pytest.raises(Preempted):
        fit("preempted", ForgetSave(), TellAt("validation", 1))

    whole, preempted = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "preempted"))
    for key in ("state_dict", "current_model_state", "loops", "optimizer_states"):
        assert_same_state(preempted[key], whole[key])


def test_a_preempted_run_leaves_another_runs_checkpoint_and_no_timer_and_its_trainer_goes_on(
    tmp_path, tiny_folder, chat_file
):
    """It was told twice, and its callback has a name of its own for what it keeps as a link."""

    class Saves(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "{step}-newest"

    class TellTwice(TellAt):
        def tell(self, *where):
            super().tell(*where)
            super().tell(*where)

    (tmp_path / "step=2-newest.ckpt").write_text("of another run")
    saves = Saves(tmp_path, save_top_k=1, save_last="link", every_n_train_steps=1)
    teller, preemption = TellTwice("train", 1), Preemption(grace=3600.0)
    trainer = make_trainer(tmp_path, saves, teller, preemption, max_steps=4, enable_checkpointing=True)
    with pytest.raises(Preempted) as end:
        trainer.fit(make_sft(tiny_folder), make_chats(chat_file))

    assert (tmp_path / "step=2-newest.ckpt").read_text() == "of another run"
    assert f"stopped after step 2, saved in `{tmp_path / 'step=2-newest-v1.ckpt'}`" in end.value.words
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)

    teller.batch_idx = -1
    trainer.fit(make_sft(tiny_folder), make_chats(chat_file), ckpt_path=saves.last_model_path, weights_only=True)
    assert (trainer.global_step, trainer.received_sigterm) == (4, False)
