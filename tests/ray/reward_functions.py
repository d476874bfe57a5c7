"""Reward functions for the tests of Ray's actors; loaded by file path in other processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil


def picky(sample):
    """The response's number; fails on the multiples of ten."""
    number = int(sample.response)
    if number % 10 == 0:
        raise RuntimeError("a round number")
    return {"reward": number, "digits": len(sample.response)}


def kills_its_actor_once(sample, marker):
    """The response's number; the first to come to 7 kills the Ray actor, which is above the two supervisors."""
    if sample.response == "7" and not Path(marker).exists():
        actor = psutil.Process().parents()[2].pid
        Path(marker).write_text(str(actor))
        os.kill(actor, signal.SIGKILL)
    return int(sample.response)
