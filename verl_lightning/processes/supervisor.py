"""Processes above a worker that see to it that nothing which it starts outlives it, nor it its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of the same
_KILL_SECONDS = 1.0  # for processes that don't end at once; those that still don't are left to the kernel
_END_SECONDS = 3.0  # a supervisor takes one at the most, unless user code has stopped it


class SupervisedProcess:
    """A module in a process of its own, below supervisors that end it with its parent, and all that it starts with it.

    Made by `exec`, not `fork`: the parent may hold CUDA contexts and threads. Ctrl-C is for the parent alone.

    Args:
        module: Module that it runs, such as ``verl_lightning.rewards.worker``.
        arguments: Command line of the module.
        options: Options of `subprocess.Popen`.
    """

    def __init__(self, module: str, *arguments: str, **options: Any) -> None:
        # -P: else files of the working directory would stand in for all modules of the same name.
        command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), module, *arguments]
        self.popen: subprocess.Popen[bytes] = subprocess.Popen(command, start_new_session=True, **options)

    @property
    def has_ended(self) -> bool:
        """True once the process and all that it has started have ended."""
        return self.popen.poll() is not None

    def begin_end(self) -> None:
        """Has the process killed, and all that it has started; does not wait."""
        self.popen.terminate()

    def end(self, patience: float = 0.0) -> int:
        """Ends the process and all that it has started; may be called twice.

        Args:
            patience: Seconds in which it may end by itself.

        Returns:
            The exit code; that of a signal is negative.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(patience)
        self.begin_end()
        try:
            code = self.popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            code = self.popen.wait()
        with contextlib.suppress(ValueError):  # above 128 it may be that of a signal, as in a shell
            code = -signal.Signals(code - 128)
        return code


def main() -> None:
    """Runs the module of a `SupervisedProcess`, which may take long to import what it needs."""
    parent_pid, module, *arguments = sys.argv[1:]
    supervise(int(parent_pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def supervise(parent_pid: int) -> None:
    """Splits this process in three, and returns in the last one only: the worker, which may run user code.

    The two above it are supervisors. Linux gives them whatever their descendants leave behind, sessions of their own
    included. Each kills all that descends from it when its child has ended, when it gets SIGTERM and when its parent is
    gone, and ends with its child's exit code; 128 and the signal's number for a child that a signal ended. There are
    two so that one may be killed, by user code or by Ray, which kills the children of an actor that it ends.

    Must be called before this process has threads. Elsewhere than on Linux what has left the worker's process group is
    not found, and a worker that is not idle outlives a killed parent.

    Args:
        parent_pid: Process id of this process's parent. If that has gone already, this process ends now.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have left it ignored: children would leave no status
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    _end_with_parent(parent_pid, signal.SIGTERM)
    for signal_of_death in (signal.SIGTERM, signal.SIGKILL):
        _prctl(_SET_CHILD_SUBREAPER, 1)
        supervisor = os.getpid()
        if child := os.fork():
            os._exit(_guard(child))
        _end_with_parent(supervisor, signal_of_death)
    os.setpgid(0, 0)  # user code that signals its own group must not hit the supervisors
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})


def _guard(child: int) -> int:
    """Waits for the child's end or for SIGTERM, then ends what is left; gives the exit code."""
    code = None
    while code is None and signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGCHLD:
        code = _reap().get(child)
    deadline = time.monotonic() + _KILL_SECONDS
    _kill(os.killpg, child)
    while (left := _descendants()) and time.monotonic() < deadline:
        for pid in left:
            _kill(os.kill, pid)
        _reap()
        time.sleep(0.002)
    return 128 + signal.SIGTERM if code is None else code


def _reap() -> dict[int, int]:
    """Exit codes of the children that have ended, adopted ones included."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            codes[ended[0]] = code if code >= 0 else 128 - code
    return codes


def _kill(send: Callable[[int, int], None], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, signal.SIGKILL)


def _descendants() -> list[int]:
    """Process ids of all that descend from this process."""
    children = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
    found, todo = [], [os.getpid()]
    while todo:
        own = children[todo.pop()]
        found += own
        todo += own
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Each process of this machine and its parent."""
    if sys.platform != "linux":
        with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
            lines = [line.split() for line in ps.communicate()[0].splitlines()]
        yield from ((int(pid), int(parent)) for pid, parent in lines if int(pid) != ps.pid)
        return
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb") as file:
            yield int(name), int(file.read().rpartition(b")")[2].split()[1])


def _end_with_parent(parent: int, by: signal.Signals) -> None:
    """Has Linux send this process a signal when the parent's thread that started it ends, even by SIGKILL."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, by)
    if os.getppid() != parent:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main()
