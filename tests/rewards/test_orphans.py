from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PARENT = """
import signal, sys
from verl_lightning.rewards import RewardSample
from verl_lightning.rewards.pool import RewardConfig, RewardPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it
function, response = sys.argv[1:]
pool = RewardPool(RewardConfig(function=function))
pool.start()
sample = RewardSample(
    response=response, ground_truth="", data_source="", prompt=[], extra_info={}, is_truncated=False
)
pool.score([sample] * 2)
"""


def start_parent_with_stuck_workers(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    function = f"{Path(__file__).with_name('reward_functions.py')}:spin_and_tell"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, function, str(folder / "pids")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: (folder / "pids").exists() and (folder / "pids").read_text().count("\n") == 2)
    return parent, [int(pid) for pid in (folder / "pids").read_text().split()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a stuck worker with its parent")
def test_stuck_workers_do_not_outlive_a_killed_parent(tmp_path):
    parent, workers = start_parent_with_stuck_workers(tmp_path)
    assert all(is_running(pid) for pid in workers)

    parent.kill()
    parent.communicate()

    wait_until(lambda: not any(is_running(pid) for pid in workers))


def test_an_interrupt_shows_the_parents_traceback_only(tmp_path):
    """Ctrl-C in a terminal goes to the whole process group."""
    parent, workers = start_parent_with_stuck_workers(tmp_path)

    os.killpg(parent.pid, signal.SIGINT)
    _, stderr = parent.communicate()

    assert stderr.count("Traceback (most recent call last)") == 1
    assert stderr.endswith("KeyboardInterrupt\n")
    assert not any(is_running(pid) for pid in workers)


def test_an_idle_worker_leaves_when_its_pipe_closes():
    worker = subprocess.Popen(
        [sys.executable, "-m", "verl_lightning.rewards.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    worker.communicate()

    assert worker.returncode == 0
