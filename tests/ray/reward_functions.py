"""Reward functions for the tests of Ray's actors; loaded by file path in other processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def picky(sample):
    """The response's number; fails on the multiples of ten."""
    number = int(sample.response)
    if number % 10 == 0:
        raise RuntimeError("a round number")
    return {"reward": number, "digits": len(sample.response)}


def kills_its_actor_once(sample, marker):
    """The response's number; the first to come to 7 kills the Ray actor, which is the parent of this process."""
    if sample.response == "7" and not Path(marker).exists():
        Path(marker).write_text(str(os.getppid()))
        os.kill(os.getppid(), signal.SIGKILL)
    return int(sample.response)
