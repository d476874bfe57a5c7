"""Two runs never write to one folder at once, and a run that is gone keeps nobody out."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import sys
from contextlib import contextmanager

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.processes import on_ranks
from tests.runs import make_chats, make_sft, make_trainer
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.modules.run_lock import FolderInUseError, FolderLock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")
FORK = multiprocessing.get_context("fork")


def hold(folder, ready):
    """Locks a folder, starts a process, and waits to be killed."""
    FolderLock(folder)
    child = os.fork()
    if child:
        ready.send(child)
    signal.pause()


@contextmanager
def held(folder):
    """Has another process hold a folder; gives its id. It is killed at the end, and leaves one that it had started."""
    receive, send = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=hold, args=(folder, send))
    holder.start()
    child = receive.recv()
    try:
        yield holder.pid
    finally:
        holder.kill()
        holder.join()
        try:
            FolderLock(folder).release()  # although the other one lives
        finally:
            os.kill(child, signal.SIGKILL)


def train(tmp_path, tiny_folder, chat_file, *callbacks, **options):
    """One step of SFT."""
    options = {"max_steps": 1, "enable_checkpointing": bool(callbacks), "log_every_n_steps": 1} | options
    trainer = make_trainer(tmp_path, *callbacks, **options)
    trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))


def test_the_holder_of_a_folder_is_named(tmp_path):
    with held(tmp_path / "run") as pid:
        expected = rf"`.*/run` is in use by another run: process {pid} on `{socket.gethostname()}` since \d{{4}}-"
        with pytest.raises(FolderInUseError, match=expected):
            FolderLock(tmp_path / "run")


@pytest.mark.parametrize(
    "what",
    [
        lambda path: {"logger": ResumableCSVLogger(str(path), version="held")},
        lambda path: {"callbacks": [ModelCheckpoint(path / "held")]},
        lambda path: {"callbacks": [HFCheckpoint(str(path / "held"))]},
        lambda path: {"callbacks": [ModelCheckpoint(path / "other/../held")]},
    ],
)
def test_a_run_is_refused_where_another_one_writes(tmp_path, tiny_folder, chat_file, what):
    """A new run too, to whom somebody has given the same folder."""
    options = what(tmp_path)
    callbacks = options.pop("callbacks", [])
    with (
        held(tmp_path / "held"),
        pytest.raises(FolderInUseError, match=r"Wait for its end, or stop it\. To train beside it, leave out"),
    ):
        train(tmp_path, tiny_folder, chat_file, *callbacks, **options)
    assert not list(tmp_path.rglob(".*lock"))

    train(tmp_path, tiny_folder, chat_file, *callbacks, **options)

    assert not list(tmp_path.rglob(".*lock"))


def test_runs_without_a_logger_share_no_checkpoints(tmp_path, tiny_folder, chat_file):
    with held(tmp_path / "checkpoints"), pytest.raises(FolderInUseError):
        train(tmp_path, tiny_folder, chat_file, ModelCheckpoint())


def test_a_run_that_writes_nothing_locks_nothing(tmp_path, tiny_folder, chat_file):
    with held(tmp_path), held(tmp_path / "checkpoints"):
        train(tmp_path, tiny_folder, chat_file)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_of(tmp_path, tiny_folder, chat_file, monkeypatch, number):
    """Some mounts of NFS and Lustre."""

    def fail(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.warns(UserWarning, match="can't be locked .* see to it that none writes there"):
        train(tmp_path, tiny_folder, chat_file, ModelCheckpoint(tmp_path / "saved"))
    assert list((tmp_path / "saved").glob("*.ckpt"))


def two_ranks(tmp_path, tiny_folder, chat_file):
    """What a rank of a run is told."""
    saver = ModelCheckpoint(tmp_path / "saved")
    try:
        train(tmp_path, tiny_folder, chat_file, saver, devices=2, strategy="ddp")
    except FolderInUseError as error:
        return str(error)
    return None


def test_ranks_hold_a_folder_together_or_fail_together(tmp_path, tiny_folder, chat_file):
    with held(tmp_path / "saved") as pid:
        told = on_ranks(2, two_ranks, tmp_path, tiny_folder, chat_file)
    assert [f"process {pid} on" in message for message in told] == [True, True]

    assert on_ranks(2, two_ranks, tmp_path, tiny_folder, chat_file) == [None, None]
