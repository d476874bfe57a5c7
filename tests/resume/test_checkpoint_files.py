"""Checkpoint files are whole or not there, and a wrong one is refused in one sentence."""

from __future__ import annotations

import os
import resource

import pytest
import torch
from lightning.pytorch import Trainer

from tests.processes import start
from tests.runs import make_ppo, make_prompts, make_rollout, make_trainer
from tests.tiny import write_tiny_folder
from verl_lightning.models.hf_folder import atomic_folder
from verl_lightning.strategies import FSDPStrategy
from verl_lightning.strategies.checkpoint_io import AtomicCheckpointIO


class Kill:
    """Ends the process while it is pickled, in the middle of `torch.save`."""

    def __reduce__(self):
        os._exit(9)


def write_and_be_killed(path):
    AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(1000), "kill": Kill()}, path)


def test_a_kill_while_writing_leaves_the_previous_file(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(3)}, path)

    with start(write_and_be_killed, path, folder=tmp_path / "process") as writer:
        writer.wait(code=9)

    assert torch.equal(torch.load(path)["weights"], torch.zeros(3))
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["last.ckpt"]  # `ckpt_path: last` finds no half file


def test_a_failing_rename_leaves_the_previous_file(tmp_path, monkeypatch):
    """Until the rename, everything is in a draft."""
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=r"`.*last.ckpt` could not be written \(no more space\)"):
            AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert torch.load(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]  # a full disk is not kept full

    AtomicCheckpointIO().save_checkpoint({"step": 3}, path)

    assert torch.load(path) == {"step": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_file_takes_the_place_of_a_folder(tmp_path):
    """A run that goes on without sharding writes files where it wrote folders."""
    path = tmp_path / "last.ckpt"
    with atomic_folder(path) as folder:
        (folder / "meta.pt").touch()

    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    assert torch.load(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_is_named(tmp_path):
    """torch buries the file system's error under one of its own."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written \(.*File too large\). The one before is whole"):
            AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(10_000)}, tmp_path / "last.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def fail(descriptor):
    raise OSError("no more space")


def test_runs_write_with_it_unless_the_user_chose_another(tmp_path, tiny_folder, prompt_file):
    trainer = make_trainer(tmp_path, make_rollout(), max_steps=1)
    trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))
    assert type(trainer.strategy.checkpoint_io) is AtomicCheckpointIO


@pytest.fixture
def saved(tmp_path, tiny_folder, prompt_file):
    """A checkpoint of one iteration."""
    trainer = make_trainer(tmp_path, make_rollout(), max_steps=1)
    trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


def resume(tmp_path, folder, prompt_file, path) -> Trainer:
    trainer = make_trainer(tmp_path, make_rollout(), max_steps=2)
    trainer.fit(make_ppo(folder), datamodule=make_prompts(prompt_file), ckpt_path=path)
    return trainer


def test_a_checkpoint_of_another_model_is_refused(tmp_path, prompt_file, saved):
    wider = write_tiny_folder(tmp_path / "wider", hidden_size=64)
    with pytest.raises(
        ValueError, match=r"holds another model: weight `actor.* has shape \[\d+, 32\] there and \[\d+, 64\]"
    ):
        resume(tmp_path, wider, prompt_file, saved)


def test_a_checkpoint_of_another_program_is_refused(tmp_path, tiny_folder, prompt_file, saved):
    checkpoint = torch.load(saved)
    del checkpoint["weight_shapes"]
    torch.save(checkpoint, saved)
    with pytest.raises(ValueError, match="not a checkpoint of a verl_lightning module; give one that `fit` wrote"):
        resume(tmp_path, tiny_folder, prompt_file, saved)


def test_sft_is_not_gone_on_with_by_ppo(tmp_path, tiny_folder, prompt_file, saved):
    """Lightning would restore the batches of one and the steps of neither."""
    checkpoint = torch.load(saved)
    assert checkpoint["automatic_optimization"] is False
    torch.save(checkpoint | {"automatic_optimization": True}, saved)
    with pytest.raises(ValueError, match="is of SFT, with whose steps.* a `PPOModule` can't go on. Start from its"):
        resume(tmp_path, tiny_folder, prompt_file, saved)

    (metrics,) = make_trainer(tmp_path, make_rollout()).validate(
        make_ppo(tiny_folder), datamodule=make_prompts(prompt_file, prompt_file), ckpt_path=saved, verbose=False
    )
    assert "val/reward" in metrics


@pytest.mark.parametrize("read", [AtomicCheckpointIO().load_checkpoint, FSDPStrategy().load_checkpoint])
def test_an_older_folder_of_megatrons_is_refused_with_the_way_out(tmp_path, read):
    torch.save({"state_dict": {}}, tmp_path / "megatron_meta.pt")

    with pytest.raises(ValueError, match="in an older layout.*have `HFCheckpoint` write a folder"):
        read(tmp_path)


def test_half_a_checkpoint_is_refused(tmp_path, tiny_folder, prompt_file):
    """As a copy leaves it that was cut short."""
    torch.save({"weights": torch.zeros(100)}, tmp_path / "whole.ckpt")
    (tmp_path / "half.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:900])
    with pytest.raises(ValueError, match=r"half\.ckpt` is not a checkpoint, or not the whole of one"):
        resume(tmp_path, tiny_folder, prompt_file, tmp_path / "half.ckpt")


def test_a_missing_checkpoint_is_an_error(tmp_path, tiny_folder, prompt_file):
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
        resume(tmp_path, tiny_folder, prompt_file, tmp_path / "none.ckpt")


def test_checkpoints_hold_plain_types_only(saved):
    """They load where torch refuses to run code from a file."""
    assert torch.load(saved, weights_only=True)["global_step"] == 1
