"""Checkpoints that somebody has made to run a command: no reader runs it, and the error names the file."""

from __future__ import annotations

import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

from tests.processes import on_ranks
from tests.runs import make_chats, make_sft, make_trainer
from tests.strategies.tampering import ENTRY_ATTACKS, METADATA_ATTACKS, Command, replace_entry, replace_metadata, saved
from verl_lightning.callbacks.resume_wandb import saved_callback_state
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.strategies import FSDPStrategy
from verl_lightning.strategies.checkpoint_io import AtomicCheckpointIO
from verl_lightning.strategies.checkpoints import read_checkpoint
from verl_lightning.strategies.fsdp.checkpoint import SETTINGS_FILE

LR = "optimizer_0.param_groups.0.lr"
WEIGHT = "state_dict.actor.backbone.model.norm.weight"


def train(model: Path, chats: Path, folder: Path, resume: str | None = None) -> str:
    """One step of SFT under `fsdp`; or what its error says, where it can't resume."""
    trainer = make_trainer(folder, strategy=FSDPStrategy(), max_steps=1 if resume is None else 2)
    try:
        trainer.fit(make_sft(model), make_chats(chats), ckpt_path=resume)
    except DamagedFileError as error:
        return str(error)
    trainer.save_checkpoint(folder / "good.ckpt")
    return ""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, chat_file: Path) -> Path:
    """A checkpoint folder of `fsdp`."""
    folder = tmp_path_factory.mktemp("good")
    on_ranks(1, train, tiny_folder, chat_file, folder)
    return folder / "good.ckpt"


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    """A copy to be tampered with."""
    return Path(shutil.copytree(good, tmp_path / "bad.ckpt"))


def refusals(checkpoint: Path, file: str) -> list[str]:
    """What readers without Trainer say of a folder."""
    said = []
    for read in (AtomicCheckpointIO().load_checkpoint, read_checkpoint):
        with pytest.raises(DamagedFileError, match=rf"^`{checkpoint}/{file}` .*\.$") as error:
            read(checkpoint)
        said.append(str(error.value))
        assert "\n" not in said[-1]
    return said


def test_torch_itself_would_run_them(checkpoint: Path, tmp_path: Path) -> None:
    """So that what follows tests something."""
    replace_entry(checkpoint, SETTINGS_FILE, LR, saved(Command(tmp_path / "entry")))
    with suppress(TypeError):  # the value is no learning rate
        dcp_to_torch_save(checkpoint, tmp_path / "torch.pt")
    assert (tmp_path / "entry").exists()
    for attack in ("reduce", "within", "getattr", "dotted", "eval"):
        replace_metadata(checkpoint, SETTINGS_FILE, METADATA_ATTACKS[attack](tmp_path / attack))
        with suppress(AttributeError):  # the command returns no table
            FileSystemReader(checkpoint).read_metadata()
        assert (tmp_path / attack).exists()


@pytest.mark.parametrize("attack", METADATA_ATTACKS)
def test_a_table_of_contents_runs_nothing(checkpoint: Path, tmp_path: Path, attack: str) -> None:
    replace_metadata(checkpoint, SETTINGS_FILE, METADATA_ATTACKS[attack](tmp_path / "proof"))

    refusals(checkpoint, r"\.metadata")
    assert not (tmp_path / "proof").exists()
    assert "__setstate__" not in vars(Metadata)


@pytest.mark.parametrize("key", [LR, WEIGHT])
@pytest.mark.parametrize("attack", ENTRY_ATTACKS)
def test_an_entry_runs_nothing(checkpoint: Path, tmp_path: Path, attack: str, key: str) -> None:
    replace_entry(checkpoint, SETTINGS_FILE, key, ENTRY_ATTACKS[attack](tmp_path / "proof"))

    refusals(checkpoint, "__9_0.distcp")
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("value", [1.0, torch.ones(1), torch.ones(1, 1)])
def test_a_weight_that_is_none_is_refused(checkpoint: Path, value: Any) -> None:
    replace_entry(checkpoint, SETTINGS_FILE, WEIGHT, saved(value))
    assert f"where `{WEIGHT}` should be" in refusals(checkpoint, "__9_0.distcp")[0]


def test_the_error_names_what_would_have_run(checkpoint: Path, tmp_path: Path) -> None:
    replace_entry(checkpoint, SETTINGS_FILE, LR, saved(Command(tmp_path / "proof")))
    said = refusals(checkpoint, "__9_0.distcp")[0]
    assert "names `posix.system` in its entries, which no checkpoint of `fit` does" in said


def test_a_table_of_one_rank_is_not_looked_for(checkpoint: Path, tmp_path: Path) -> None:
    """torch falls back to it."""
    (checkpoint / "__0.metadata").write_bytes(pickle.dumps(Command(tmp_path / "proof")))
    (checkpoint / ".metadata").unlink()

    refusals(checkpoint, r"\.metadata")
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", ".metadata"])
def test_files_outside_of_the_folder_are_not_read(checkpoint: Path, name: str) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = name
    replace_metadata(checkpoint, SETTINGS_FILE, pickle.dumps(metadata))

    assert "is no file of a checkpoint" in refusals(checkpoint, r"\.metadata")[0]


def test_settings_run_nothing(checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "callbacks": Command(tmp_path / "proof")}, checkpoint / SETTINGS_FILE)

    assert "holds more than values and tensors (`posix" in refusals(checkpoint, "meta.pt")[0]
    with pytest.raises(DamagedFileError, match=r"meta\.pt"):
        saved_callback_state(checkpoint, "ResumeWandb")
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("old_format", [False, True])
def test_a_file_runs_nothing(tmp_path: Path, old_format: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the environment tells torch to unpickle what it is not told to."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path, content = tmp_path / "bad.ckpt", {"state_dict": Command(tmp_path / "proof")}
    torch.save(content, path, _use_new_zipfile_serialization=not old_format)

    for read in (AtomicCheckpointIO().load_checkpoint, FSDPStrategy().load_checkpoint, read_checkpoint):
        with pytest.raises(DamagedFileError, match=rf"^`{path}` .*\.$"):
            read(path)
    assert not (tmp_path / "proof").exists()


def test_a_remote_file_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning by itself trusts what comes from a web server."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with fsspec.open("memory://bad.ckpt", "wb") as file:
        torch.save({"state_dict": Command(tmp_path / "proof")}, file)

    with pytest.raises(DamagedFileError, match=r"^`memory://bad\.ckpt` holds more than values and tensors"):
        AtomicCheckpointIO().load_checkpoint("memory://bad.ckpt")
    assert not (tmp_path / "proof").exists()


def test_who_trusts_a_file_may_say_so_but_never_of_a_table(checkpoint: Path, tmp_path: Path) -> None:
    """For callbacks that keep objects of their own."""
    torch.save({"state_dict": {}, "callbacks": Path("a")}, tmp_path / "own.ckpt")
    with pytest.raises(DamagedFileError, match=r"you trust the file: `--weights_only false`"):
        read_checkpoint(tmp_path / "own.ckpt")
    assert read_checkpoint(tmp_path / "own.ckpt", weights_only=False)["callbacks"] == Path("a")

    replace_metadata(checkpoint, SETTINGS_FILE, pickle.dumps(Command(tmp_path / "proof")))
    with pytest.raises(DamagedFileError, match=r"\.metadata` names `posix\.system`"):
        read_checkpoint(checkpoint, weights_only=False)
    assert not (tmp_path / "proof").exists()


def try_all(model: Path, chats: Path, folders: list[Path]) -> list[str]:
    """What resuming under `fsdp` says, folder by folder."""
    return [train(model, chats, folder.parent, str(folder)) for folder in folders]


def test_resuming_runs_nothing(good: Path, tiny_folder: Path, chat_file: Path, tmp_path: Path) -> None:
    """In the whole of a resumed run, under `fsdp` and `auto`."""
    table, entry = (Path(shutil.copytree(good, tmp_path / name)) for name in ("table.ckpt", "entry.ckpt"))
    replace_metadata(table, SETTINGS_FILE, pickle.dumps(Command(tmp_path / "proof")))
    replace_entry(entry, SETTINGS_FILE, LR, saved(Command(tmp_path / "proof")))

    (said,) = on_ranks(1, try_all, tiny_folder, chat_file, [table, entry])
    assert said[0].startswith(f"`{table}/.metadata` names `posix.system`")
    assert said[1].startswith(f"`{entry}/__9_0.distcp` names `posix.system`")
    for folder in (table, entry):
        with pytest.raises(DamagedFileError, match=r"names `posix.system`"):
            resume_alone(tiny_folder, chat_file, tmp_path, folder)
    assert not (tmp_path / "proof").exists()


def resume_alone(model: Path, chats: Path, folder: Path, checkpoint: Path) -> Any:
    """Under `auto`."""
    make_trainer(folder, max_steps=2).fit(make_sft(model), make_chats(chats), ckpt_path=checkpoint)
