"""A run of phases that is killed on either side of a border goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from tests.phases.three_phases import KILLS, Kill, Killed, run_phases, whole_and_killed
from tests.processes import on_ranks
from tests.resume.experiment import assert_same_state
from tests.runs import make_chats, make_sft, make_trainer
from verl_lightning import Phases
from verl_lightning.callbacks.run_phase import read_progress


class Remote(Logger):
    """Stands for a service that keeps what it is told, as Weights & Biases does."""

    name, version = "remote", "1"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def log_metrics(self, metrics, step=None):
        self.steps.append(step)

    def log_hyperparams(self, params): ...


@pytest.fixture(scope="module")
def files(tmp_path_factory, chat_file, pair_file, prompt_file):
    return tmp_path_factory.mktemp("phases"), {"chats": chat_file, "pairs": pair_file, "prompts": prompt_file}


@pytest.fixture(scope="module")
def whole(files, tiny_folder):
    (folder, data), remote = files, Remote()
    return *run_phases(folder / "whole", tiny_folder, data, loggers=[remote]), remote


CASES = [pytest.param(kill, marks=pytest.mark.slow if kill.startswith(("within", "as")) else []) for kill in KILLS]


@pytest.mark.parametrize("kill", CASES)
def test_a_run_killed_beside_a_border_ends_like_the_whole_one(files, tiny_folder, whole, kill):
    folder, data = files
    with pytest.raises(Killed):
        run_phases(folder / kill, tiny_folder, data, KILLS[kill])

    module, metrics = run_phases(folder / kill, tiny_folder, data)

    expected, rows, _ = whole
    assert_same_state(module.state_dict(), expected.state_dict())
    assert metrics == rows
    assert [int(row["step"]) for row in metrics] == list(range(7))


def test_a_phase_that_a_callback_had_stopped_trains_no_further(files, tiny_folder, tmp_path):
    """Its checkpoint is that of the validation after which it was stopped."""
    chats = files[1]["chats"]

    def fit(*callbacks):
        saves = ModelCheckpoint(save_top_k=0, save_last=True, save_on_train_epoch_end=False)
        stops = EarlyStopping("val/loss", stopping_threshold=99.0)
        checks = {"max_steps": 6, "val_check_interval": 2, "check_val_every_n_epoch": None, "limit_val_batches": 1}
        checks |= {"log_every_n_steps": 1, "enable_checkpointing": True}
        trainer = make_trainer(tmp_path, saves, stops, *callbacks, **checks)
        Phases(tmp_path / "run").fit("sft", trainer, make_sft(tiny_folder), datamodule=make_chats(chats, chats))

    with pytest.raises(Killed):
        fit(Kill("on_train_end", 2))
    fit()

    (done,) = read_progress(tmp_path / "run")
    assert (done.steps, done.ended_by) == (2, "stopped by EarlyStopping")


@pytest.mark.parametrize(
    ("name", "trainer", "message"),
    [
        ("s/t", {}, "`s/t` is no name of a phase"),
        ("sft", {"logger": CSVLogger(".", "own")}, "`CSVLogger` of its own, but phases share their loggers"),
        ("sft", {"fast_dev_run": True}, "`trainer.fast_dev_run` writes no model"),
    ],
)
def test_what_no_phase_can_be_is_refused(tiny_folder, tmp_path, files, name, trainer, message):
    with pytest.raises((ValueError, MisconfigurationException), match=message):
        Phases(tmp_path / "run").fit(
            name, make_trainer(tmp_path, **trainer), make_sft(tiny_folder), datamodule=make_chats(files[1]["chats"])
        )


def test_all_loggers_count_the_steps_of_all_phases(whole):
    *_, remote = whole
    assert remote.steps == list(range(7))


@pytest.mark.slow
def test_all_phases_and_what_goes_on_with_them_are_one_run_of_wandb(files, tiny_folder, tmp_path):
    folder, data = files
    ids = []
    for kill in (KILLS["as the last begins"], None):
        logger = WandbLogger(save_dir=tmp_path, offline=True)
        with pytest.raises(Killed) if kill else nullcontext():
            run_phases(tmp_path / "run", tiny_folder, data, kill, [logger])
        ids.append(logger.experiment.id)
        logger.experiment.finish()

    assert ids[0] == ids[1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_go_on_like_the_whole_run(files, tiny_folder, tmp_path, strategy):
    (whole, killed), _ = on_ranks(2, whole_and_killed, tmp_path, tiny_folder, files[1], strategy, 2)

    assert len(whole) == 7
    assert killed == whole
    models = [(tmp_path / name / "phases/grpo/model/model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert models[0] == models[1]
