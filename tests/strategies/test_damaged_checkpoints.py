"""Checkpoints that are not as they were written: refused in one sentence that names the file, and a whole one."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from tests.processes import on_ranks
from tests.runs import make_chats, make_sft, make_trainer
from tests.strategies.tampering import flip, flips, saved
from verl_lightning.cli.export import main as export
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.strategies import FSDPStrategy, checkpoints
from verl_lightning.strategies.checkpoint_io import AtomicCheckpointIO
from verl_lightning.strategies.checkpoints import is_whole, newest_whole, read_checkpoint
from verl_lightning.strategies.fsdp.checkpoint import SETTINGS_FILE
from verl_lightning.strategies.sealed_files import check_sealed, load_file
from verl_lightning.strategies.sharded_metadata import CRC_FIELD, read_metadata

STEPS = 3


def save(model: Path, chats: Path, folder: Path) -> None:
    """A checkpoint folder of each of three steps, written by two ranks in the background."""
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    options = {"strategy": FSDPStrategy(async_save=True), "devices": 2, "enable_checkpointing": True}
    make_trainer(folder, saver, **options).fit(make_sft(model), make_chats(chats, batch_size=2))


def resume(model: Path, chats: Path, folder: Path, ranks: int, from_where: list[Path]) -> list[str]:
    """What resuming from damaged checkpoints says, one after the other."""
    said = []
    for checkpoint in from_where:
        trainer = make_trainer(folder, strategy=FSDPStrategy(), devices=ranks)
        with pytest.raises(DamagedFileError) as error:
            trainer.fit(make_sft(model), make_chats(chats, batch_size=2), ckpt_path=checkpoint)
        said.append(str(error.value))
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, chat_file: Path) -> Path:
    """A folder of checkpoint folders."""
    folder = tmp_path_factory.mktemp("whole")
    on_ranks(2, save, tiny_folder, chat_file, folder)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_each_item_has_a_crc(whole: Path) -> None:
    """Also when it is written in the background."""
    for step in range(1, STEPS + 1):
        places = read_metadata(whole / f"step={step}.ckpt" / ".metadata").storage_data.values()
        assert {place.relative_path for place in places} == {"__0_0.distcp", "__1_0.distcp"}
        assert all(len(getattr(place, CRC_FIELD)) == 1 for place in places)
        assert check_sealed(whole / f"step={step}.ckpt" / SETTINGS_FILE).keys() == {".metadata"}


def test_torch_reads_the_folder_too(whole: Path, tmp_path: Path) -> None:
    """What we add to its table of contents does not disturb it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(whole / "step=3.ckpt", tmp_path / "torch.pt")
    assert_close(torch.load(tmp_path / "torch.pt")["state_dict"], read_checkpoint(whole / "step=3.ckpt")["state_dict"])


@pytest.mark.parametrize("name", [SETTINGS_FILE, ".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_a_flipped_byte_anywhere_in_a_folder_is_refused(run: Path, name: str) -> None:
    path, advice = run / "step=3.ckpt" / name, rf"`{run}/step=2\.ckpt`: give that as `ckpt_path`"
    content = path.read_bytes()
    for position in flips(path):
        flip(path, position)
        assert not is_whole(run / "step=3.ckpt"), position
        path.write_bytes(content)
    assert is_whole(run / "step=3.ckpt")
    for position in (0, len(content) // 2):
        flip(path, position)
        with pytest.raises(DamagedFileError, match=rf"^`{path}` [^\n]*{advice}\.$"):
            read_checkpoint(run / "step=3.ckpt")


@pytest.mark.parametrize("name", [SETTINGS_FILE, ".metadata", "__1_0.distcp"])
@pytest.mark.parametrize("harm", ["missing", "truncated", "empty"])
def test_missing_and_truncated_files_of_a_folder_are_named(run: Path, name: str, harm: str) -> None:
    path = run / "step=3.ckpt" / name
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -1 if harm == "truncated" else 0])
    for read in (AtomicCheckpointIO().load_checkpoint, read_checkpoint):
        with pytest.raises(DamagedFileError, match=rf"^`{path}` is [^\n]*step=2\.ckpt`: give that as"):
            read(run / "step=3.ckpt")


@pytest.mark.parametrize("mixes", ["__1_0.distcp", ".metadata", SETTINGS_FILE])
def test_files_of_two_checkpoints_are_not_mixed(run: Path, mixes: str) -> None:
    """As a copy over an older folder leaves them when it is cut short."""
    shutil.copy(run / "step=2.ckpt" / mixes, run / "step=3.ckpt" / mixes)
    with pytest.raises(DamagedFileError, match=r"^`[^`]*step=3\.ckpt/"):
        read_checkpoint(run / "step=3.ckpt")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # without the callback that saves
def test_every_rank_refuses_what_one_of_them_reads(run: Path, tiny_folder: Path, chat_file: Path) -> None:
    """The file of the second rank in one checkpoint, a small one in the other."""
    flip(run / "step=3.ckpt" / "__1_0.distcp", 5000)
    flip(run / "step=2.ckpt" / ".metadata", 100)

    said = on_ranks(2, resume, tiny_folder, chat_file, run, 2, [run / "step=3.ckpt", run / "step=2.ckpt"])
    assert said[0] == said[1]
    advice = f"The newest whole checkpoint beside it is `{run}/step={{}}.ckpt`: give that as `ckpt_path`."
    assert said[0][0].startswith(f"`{run}/step=3.ckpt/__1_0.distcp` is damaged: the CRC of its bytes from ")
    assert said[0][0].endswith(advice.format(1))
    assert said[0][1].startswith(f"`{run}/step=2.ckpt/.metadata` is damaged: ")
    assert said[0][1].endswith(advice.format(1))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of checkpoint files of three steps."""
    for step in range(1, STEPS + 1):
        content = {"state_dict": {"a": torch.rand(1000)}, "global_step": step}
        AtomicCheckpointIO().save_checkpoint(content, tmp_path / f"step={step}.ckpt")
    return tmp_path


def test_a_flipped_byte_anywhere_in_a_file_is_refused(files: Path) -> None:
    path = files / "step=3.ckpt"
    content = path.read_bytes()
    for position in flips(path, 100):
        flip(path, position)
        with pytest.raises(DamagedFileError, match=rf"^`{path}` is [^\n]*{files}/step=2\.ckpt`: give that as"):
            read_checkpoint(path)
        path.write_bytes(content)
    assert read_checkpoint(path)["global_step"] == 3


def test_a_truncated_file_is_refused(files: Path) -> None:
    path = files / "step=3.ckpt"
    content = path.read_bytes()
    for size in [*range(0, len(content), 97), *range(len(content) - 300, len(content))]:
        path.write_bytes(content[:size])
        with pytest.raises(DamagedFileError, match=rf"^`{path}` is "):
            load_file(path)


def test_torch_reads_the_file_too(files: Path) -> None:
    for mmap in (False, True):
        assert torch.load(files / "step=1.ckpt", mmap=mmap)["global_step"] == 1


def test_the_newest_is_that_of_most_steps_which_is_whole(files: Path) -> None:
    """Whatever was copied last; links to the damaged one, and what is no checkpoint, are passed over."""
    (files / "last.ckpt").symlink_to(files / "step=3.ckpt")
    torch.save({"state_dict": {}, "global_step": 9}, files / ".hidden.ckpt")
    torch.save({"weights": 1}, files / "weights.pt")
    (files / "notes.txt").write_text("9")
    (files / "step=1.ckpt").touch()
    assert newest_whole(files / "step=3.ckpt") == files / "step=2.ckpt"
    flip(files / "step=2.ckpt", 300)
    assert newest_whole(files / "step=3.ckpt") == files / "step=1.ckpt"
    flip(files / "step=1.ckpt", 300)
    flip(files / "step=3.ckpt", 300)
    with pytest.raises(DamagedFileError, match=rf"No other whole checkpoint lies in `{files}`\.$"):
        read_checkpoint(files / "step=3.ckpt")


def test_large_folders_are_recommended_by_sizes_and_small_files(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MAX_CHECKED_BYTES", 1000)
    flip(run / "step=2.ckpt" / "__0_0.distcp", 300)
    assert newest_whole(run / "step=3.ckpt") == run / "step=2.ckpt"
    (run / "step=2.ckpt" / "__0_0.distcp").write_bytes(b"short")
    assert newest_whole(run / "step=3.ckpt") == run / "step=1.ckpt"
    flip(run / "step=1.ckpt" / ".metadata", 300)
    assert newest_whole(run / "step=3.ckpt") is None


def old_folder(run: Path) -> Path:
    """Without digests, as older versions wrote it."""
    folder = run / "step=3.ckpt"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        delattr(place, CRC_FIELD)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / SETTINGS_FILE).write_bytes(saved(load_file(folder / SETTINGS_FILE, checks=False)))
    return folder


def test_older_checkpoints_load_with_a_note(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = read_checkpoint(run / "step=3.ckpt")
    torch.save(expected, tmp_path / "old.ckpt")
    assert "no digests" not in caplog.text

    for path, file in ((old_folder(run), SETTINGS_FILE), (tmp_path / "old.ckpt", "old.ckpt")):
        assert_close(read_checkpoint(path)["state_dict"], expected["state_dict"])
        assert f"{file}` holds no digests, as older versions wrote it" in caplog.text


def test_an_older_file_is_compared_with_its_archives_crcs(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(1000)}}, tmp_path / "old.ckpt")
    flip(tmp_path / "old.ckpt", 2000)
    with pytest.raises(DamagedFileError, match=r"is damaged: the CRC of its part `old/data/0` is wrong"):
        read_checkpoint(tmp_path / "old.ckpt")


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "state dict": (lambda path: torch.save({"weight": torch.ones(1)}, path), "holds no `state_dict`"),
    "list": (lambda path: torch.save([1], path), "holds no `state_dict`"),
    "text": (lambda path: path.write_text("hello"), "is not a checkpoint, or not the whole of one"),
    "folder": (lambda path: path.mkdir(), "is not a checkpoint. Give its file or folder"),
    "model": (lambda path: (path.mkdir(), (path / "config.json").touch()), "is a Hugging Face folder"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_checkpoint_is_refused_by_every_reader(tmp_path: Path, other: str) -> None:
    make, says = OTHERS[other]
    make(tmp_path / "it")
    readers = [AtomicCheckpointIO().load_checkpoint, FSDPStrategy().load_checkpoint, read_checkpoint]
    for read in readers:
        with pytest.raises(ValueError, match=says):
            read(tmp_path / "it")
    (tmp_path / "config.yaml").write_text("model: {init_args: {actor: {path: x}}}")
    with pytest.raises(SystemExit):
        export(["--ckpt_path", str(tmp_path / "it"), "--to", "hf", "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("read", [AtomicCheckpointIO().load_checkpoint, FSDPStrategy().load_checkpoint])
def test_nothing_at_all_is_said_so(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(FileNotFoundError, match="`ckpt_path: .*none` does not exist"):
        read(tmp_path / "none")
