"""Messages of the processes of one run, each said once; and the name by which they know that it is one run."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

RUN_VARIABLE = "VERL_FIT_RUN"
"""Tells the processes that Lightning starts to which run they belong, even if the first one has died by then."""

SAID_HERE: set[Path] = set()
"""Marks that this process has made: a notebook that makes the same mistake twice is told twice."""


def say_once(text: str) -> None:
    """Writes to stderr what no other process of this run on this machine has written.

    Args:
        text: Whole lines.
    """
    if not is_said(text):
        sys.stderr.write(text)


def is_said(text: str) -> bool:
    """Tells whether another process of this run on this machine asked for the same text before.

    Whoever asks first makes an empty file, so that no message must pass between processes that may be dying.
    """
    folder = said_in_run(os.environ)
    if folder is None:
        return False
    mark = folder / hashlib.sha256(text.encode()).hexdigest()
    try:
        folder.mkdir(exist_ok=True)
        mark.touch(exist_ok=False)
        SAID_HERE.add(mark)
    except FileExistsError:
        return mark not in SAID_HERE
    except OSError:  # better twice than never
        return False
    return False


def has_another_failed() -> bool:
    """Tells whether another process of this run on this machine has said why it fails."""
    folder = said_in_run(os.environ)
    return folder is not None and folder.is_dir() and bool(set(folder.iterdir()) - SAID_HERE)


def said_in_run(environment: Mapping[str, str]) -> Path | None:
    """The folder for what is said; None for a run of one process, and where the system has no list of processes."""
    key = run_key(environment)
    return None if key is None else Path(tempfile.gettempdir(), f"verl-fit-said-{key}")


def run_key(environment: Mapping[str, str]) -> str | None:
    """Returns a name that a run's processes on this machine share; None for a one-process run, or without ``/proc``.

    It says what they have in common: the process that started them, when that began, their port, and how often
    `torchrun` has started them again.
    """
    if "LOCAL_RANK" not in environment and int(environment.get("SLURM_NTASKS", "1")) == 1:
        return None
    if key := environment.get(RUN_VARIABLE):
        return key
    is_launched = "TORCHELASTIC_RUN_ID" in environment or "SLURM_PROCID" in environment
    is_first = not is_launched and environment.get("LOCAL_RANK", "0") == "0"  # Lightning starts the others from it
    pid = os.getpid() if is_first else os.getppid()
    with suppress(OSError):
        port, restarts = (environment.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
        return f"{pid}-{began(pid)}-{port}-{restarts}"
    return None


def began(pid: int) -> int:
    """Returns the time at which a process began, in ticks of the system's clock since its boot.

    Raises:
        OSError: If there is no such process, or the system does not tell.
    """
    # The 22nd field; the second may hold spaces.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
