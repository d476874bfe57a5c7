"""Checkpoints that are written while training goes on: of the moment they were asked for, whole, and never too few."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.testing import assert_close

from tests.processes import on_ranks
from tests.runs import Recorder, make_chats, make_sft, make_trainer
from verl_lightning.strategies import FSDPStrategy
from verl_lightning.strategies.fsdp import background
from verl_lightning.strategies.fsdp.background import BackgroundSaves, check_links
from verl_lightning.strategies.fsdp.checkpoint import read_whole
from verl_lightning.strategies.sharded_io import DigestingWriter


class HeldWriter(DigestingWriter):
    """Writes when it is let, or fails."""

    let = threading.Event()
    fails = False

    def write_data(self, *arguments: Any) -> Any:
        assert self.let.wait(60)
        if self.fails and dist.get_rank() == 1:
            raise OSError("the disk is full")
        return super().write_data(*arguments)


def start_saves() -> BackgroundSaves:
    """With a writer that is held."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    background.DigestingWriter = HeldWriter  # type: ignore[attr-defined]
    return BackgroundSaves(dist.new_group(backend="gloo"), is_writer=dist.get_rank() == 0)


def save(saves: BackgroundSaves, path: Path, weight: torch.Tensor) -> None:
    """Begin a checkpoint of one weight, and change it as soon as that is allowed."""
    HeldWriter.let.clear()
    counts = [int(weight[0])]
    saves.start({"state_dict": {"weight": weight}, "counts": counts}, path)
    weight += 1
    counts.append(0)


def keep_then_delete(folder: Path) -> list[list[str]]:
    """Names of checkpoints while a second one is written in favour of the first, after it, and after one that fails."""
    saves, weight, seen = start_saves(), torch.ones(2), []

    def look() -> None:
        dist.barrier()
        seen.append(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))
        dist.barrier()

    for name, outdated in (("a", None), ("b", "a"), ("c", "b")):
        HeldWriter.fails = name == "c"
        save(saves, folder / name, weight)
        if outdated is not None:
            saves.remove(folder / outdated)
            look()
        HeldWriter.let.set()
        if name != "c":
            saves.wait()
    with pytest.raises(BaseException, match="the disk is full"):  # torch's is no `Exception`
        saves.wait()
    look()
    saves.close()
    return seen


def test_what_is_outdated_goes_once_the_new_one_is_durable(tmp_path: Path) -> None:
    """Of the checkpoints a, b and c, each makes the one before needless; c fails, so b stays."""
    first, second = on_ranks(2, keep_then_delete, tmp_path)

    assert first == second == [["a"], ["b"], ["b"]]
    whole = read_whole(tmp_path / "b", weights_only=True)
    assert whole["counts"] == [2]
    assert_close(whole["state_dict"]["weight"], torch.full((2,), 2.0))  # before it was changed
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def save_then_die(path: Path) -> None:
    """Be killed while the second checkpoint is written to the place of the first."""
    saves, weight = start_saves(), torch.ones(2)
    save(saves, path, weight)
    HeldWriter.let.set()
    saves.wait()
    save(saves, path, weight)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_writing_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code -9"):
        on_ranks(1, save_then_die, tmp_path / "last.ckpt")

    assert_close(read_whole(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["weight"], torch.ones(2))


class Terminator(Callback):
    """Has the run end after the step that begins, whose checkpoint is written a second later at the soonest."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.strategy._saves.wait()
            HeldWriter.let.clear()
            threading.Timer(1.0, HeldWriter.let.set).start()
            signal.raise_signal(signal.SIGTERM)


def train(folder: Path, chats: Path, path: Path, stops_at: int | None, resume: str | None) -> Any:
    """Losses, final weights and the names of the checkpoints of three steps, the last alone."""
    start_saves()
    HeldWriter.let.set()
    recorder = Recorder()
    saver = ModelCheckpoint(path, "{step}", save_top_k=1, every_n_train_steps=1)
    callbacks = [recorder, saver] + ([] if stops_at is None else [Terminator(stops_at)])
    trainer = make_trainer(
        path, *callbacks, devices=2, strategy=FSDPStrategy(async_save=True), enable_checkpointing=True
    )
    module = make_sft(folder)
    with nullcontext() if stops_at is None else pytest.raises(SIGTERMException):
        trainer.fit(module, make_chats(chats, batch_size=2), ckpt_path=resume)
    weights = {} if stops_at is not None else dict(module.contract.named_weights(module.policy))
    return recorder.column("train/loss"), weights, sorted(file.name for file in path.iterdir())


@pytest.mark.slow
def test_a_run_that_is_told_to_end_finishes_its_checkpoint_and_goes_on_exactly(
    tiny_folder: Path, chat_file: Path, tmp_path: Path
) -> None:
    losses, weights, names = on_ranks(2, train, tiny_folder, chat_file, tmp_path / "whole", None, None)[0]
    _, _, cut = on_ranks(2, train, tiny_folder, chat_file, tmp_path / "cut", 1, None)[0]
    checkpoint = str(tmp_path / "cut" / "step=2.ckpt")
    rest, resumed, _ = on_ranks(2, train, tiny_folder, chat_file, tmp_path / "cut", None, checkpoint)[0]

    assert names == ["step=3.ckpt"]
    assert cut == ["last.ckpt", "step=2.ckpt"]
    assert rest == losses[2:]
    assert_close(resumed, weights, rtol=0, atol=0)


def test_links_to_unwritten_checkpoints_are_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match="links to a checkpoint that `fsdp.async_save` is still writing"
    ):
        check_links([ModelCheckpoint(save_last="link")])
    check_links([ModelCheckpoint(save_last=True)])
