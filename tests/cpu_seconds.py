"""Prints the CPU-seconds of a command and of all processes that it starts: ``python tests/cpu_seconds.py make run``.

It counts in a control group of its own where it may make one, which needs root. Else it adds up the processes that are
waited for, adopting those whose parents end before them: what Ray's workers take is missing then.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GROUPS = {"/sys/fs/cgroup/cpuacct": "cpuacct.usage", "/sys/fs/cgroup": "cpu.stat"}
"""Where groups are made, of version 1 and of version 2, and the file that tells what they took."""


def make_group() -> tuple[Path, str] | None:
    """A new control group and the name of its file; None if there can't be one."""
    for parent, usage in GROUPS.items():
        group = Path(parent, f"cpu_seconds_{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / usage).exists():
            return group, usage
        group.rmdir()
    return None


def seconds_of(usage: str) -> float:
    """From the text of a group's file: nanoseconds, or lines of which the first has microseconds."""
    return int(usage.split()[1]) / 1e6 if usage.startswith("usage_usec") else int(usage) / 1e9


def main() -> int:
    """Run the command; its exit code."""
    group = make_group()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    enter = (lambda: (group[0] / "cgroup.procs").write_text(str(os.getpid()))) if group else None
    command = subprocess.Popen(sys.argv[1:], preexec_fn=enter)
    code = command.wait()
    try:
        while True:
            os.wait()  # for daemons, and servers that notice late that they are not needed any more
    except ChildProcessError:
        pass
    if group:
        seconds = seconds_of((group[0] / group[1]).read_text())
        group[0].rmdir()
    else:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = used.ru_utime + used.ru_stime
    counted = "CPU-seconds" if group else "CPU-seconds of processes that were waited for"
    sys.stderr.write(f"{seconds:.0f} {counted}: {' '.join(sys.argv[1:])}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
