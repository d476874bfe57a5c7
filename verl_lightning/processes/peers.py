"""The processes of a run on one machine watch one another: those that are left when one has died say who, and end.

A collective notices a death late or never: while processes still meet, they wait for one that will not come.
"""

from __future__ import annotations

import os
import select
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from verl_lightning.processes.exit_codes import ExitCode
from verl_lightning.processes.messages import RUN_VARIABLE, began, run_key, say_once

IS_SUPPORTED = hasattr(os, "pidfd_open")
"""True where the system tells of the end of a process; Linux does."""

SURVIVOR_SECONDS = 5.0
"""Seconds that the others may take to end by themselves, such as by the error of a collective, when one has failed."""

ORPHAN_SECONDS = 1.0
"""Seconds that they may take when one was killed, which holds memory and devices that the next run needs."""

_LOOK_SECONDS = 0.2  # between two looks for processes that have joined


class Peers:
    """This process among those of its run on this machine.

    Each has a file in a folder of the run, which it takes away when it leaves in good order. The file of one that has
    ended stays, and tells others how.

    Args:
        folder: Folder of the run; made if need be.
        rank: Rank of this process.
    """

    joined: ClassVar[Peers | None] = None

    def __init__(self, folder: Path, rank: str) -> None:
        self._file = folder / f"rank_{rank}"
        self._seen: set[str] = {self._file.name}
        self.note("")
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def note(self, code: int | str) -> None:
        """Writes down who this is, and with which exit code it ends."""
        self._write(self._file, f"{os.getpid()} {began(os.getpid())} {code}")

    def announce(self, rank: int, pid: int) -> None:
        """Writes down who another process will be."""
        self._write(self._file.with_name(f"rank_{rank}"), f"{pid} {began(pid)}")

    def _write(self, file: Path, text: str) -> None:
        draft = file.with_suffix(f".{os.getpid()}")
        while True:
            file.parent.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # the last process of the run before has just taken the folder away
                draft.write_text(text)
                break
        draft.replace(file)

    def leave(self) -> None:
        """Leaves in good order: takes away this process's file."""
        self._file.unlink(missing_ok=True)
        with suppress(OSError):  # others are there
            self._file.parent.rmdir()

    def _watch(self) -> None:
        poll, peers = select.poll(), dict[int, tuple[Path, int]]()
        while self._file.exists():
            for file, (pid, start) in self.newcomers().items():
                descriptor = open_process(pid, start)
                if descriptor is None:
                    self._lose(file, pid)
                else:
                    peers[descriptor] = file, pid
                    poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(1000 * _LOOK_SECONDS):
                poll.unregister(descriptor)
                os.close(descriptor)
                self._lose(*peers.pop(descriptor))

    def newcomers(self) -> dict[Path, tuple[int, int]]:
        """Finds files that were not there before, each with a process id and the time at which that process began."""
        found = {}
        for file in self._file.parent.glob("rank_*"):
            if "." in file.name or file.name in self._seen:
                continue
            with suppress(FileNotFoundError):  # it has left again
                pid, start = map(int, file.read_text().split()[:2])
                found[file] = pid, start
                self._seen.add(file.name)
        return found

    def _lose(self, file: Path, pid: int) -> None:
        """A process has ended: if it had not left, this one ends too."""
        try:
            noted = file.read_text().split()[2:]
        except FileNotFoundError:
            self._seen.discard(file.name)  # it may join again
            return
        code = int(noted[0]) if noted else None
        say_once(f"verl-fit: {describe_loss(file.name.replace('_', ' '), pid, code)}\n")
        time.sleep(ORPHAN_SECONDS if code is None else SURVIVOR_SECONDS)
        if self._file.exists():
            os._exit(ExitCode.PREEMPTED if code == ExitCode.PREEMPTED else ExitCode.FAILED)


def join() -> None:
    """Joins the other processes of this run on this machine, if there are any; does nothing the second time."""
    key = run_key(os.environ)
    if not IS_SUPPORTED or Peers.joined is not None or key is None or os.environ.get("TORCHELASTIC_RUN_ID") == "ray":
        return  # Ray's workers are watched by Ray
    owner = int(key.partition("-")[0])
    if owner not in (os.getpid(), os.getppid()) and Path(f"/proc/{owner}").exists():
        return  # a process of another program that one of the run has started
    os.environ[RUN_VARIABLE] = key
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK", "0")
    Peers.joined = Peers(Path(tempfile.gettempdir(), f"verl-fit-ranks-{key}"), rank)


def announce(rank: int, pid: int) -> None:
    """Has this process watch one that it has started, even if that dies before it joins.

    Args:
        rank: Rank that the other will join as.
        pid: Its process id.
    """
    if Peers.joined is not None:
        Peers.joined.announce(rank, pid)


def leave() -> None:
    """Leaves in good order: others go on without this process."""
    joined, Peers.joined = Peers.joined, None
    if joined is not None:
        joined.leave()


def fail(code: int = ExitCode.FAILED) -> None:
    """Says that this process ends before its time, and with which exit code."""
    if Peers.joined is not None:
        Peers.joined.note(code)


def describe_loss(rank: str, pid: int, code: int | None) -> str:
    """Says how a process of the run has ended, in the words of those that are left.

    Args:
        rank: Name of the process, such as ``rank 1``.
        pid: Its process id.
        code: Exit code with which it said that it ends; None if it could not say anything.
    """
    if code == ExitCode.PREEMPTED:
        return f"{rank} (process {pid}) was told to stop, and the run ends with it."
    if code is not None:
        return f"{rank} (process {pid}) has failed, and the run ends with it; its message says why."
    return (
        f"{rank} (process {pid}) has died, and the run ends with it. If nothing above says why, the usual cause is"
        " memory: look for the kernel's OOM killer."
    )


def open_process(pid: int, start: int) -> int | None:
    """Opens a descriptor that is ready to read when a process ends; None if it has ended.

    Args:
        pid: Its process id.
        start: Time at which it began, as `began` returns it; another process may have its id by now.
    """
    try:
        descriptor = os.pidfd_open(pid)
        if began(pid) == start:
            return descriptor
        os.close(descriptor)
    except (ProcessLookupError, FileNotFoundError):
        pass
    return None
