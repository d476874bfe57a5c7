from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_until

PARENT = """
import os, signal, sys
from verl_lightning.rewards import RewardSample
from verl_lightning.rewards.pool import RewardConfig, RewardPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it
function, response, end = sys.argv[1:]
pool = RewardPool(RewardConfig(function=function))
pool.start()
sample = RewardSample(
    response=response, ground_truth="", data_source="", prompt=[], extra_info={}, is_truncated=False
)
pool.score([sample] * 2)
if end == "stop":
    pool.stop()
elif end == "raise":
    raise RuntimeError
else:
    os.kill(os.getpid(), int(end))
"""


def start_parent(function: str, pids: Path, end: str) -> subprocess.Popen[str]:
    """A process that judges two samples, whose function writes process ids to a file, and ends as told."""
    name = f"{Path(__file__).with_name('reward_functions.py')}:{function}"
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, name, str(pids), end], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def start_parent_with_stuck_workers(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    parent = start_parent("spin_and_tell", folder / "pids", "stop")
    wait_until(lambda: (folder / "pids").exists() and (folder / "pids").read_text().count("\n") == 2)
    return parent, read_pids(folder / "pids")


def read_pids(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a supervisor what its descendants leave behind")
@pytest.mark.parametrize("end", ["stop", "raise", signal.SIGTERM, signal.SIGKILL])
def test_processes_that_rewards_started_end_with_the_run(tmp_path, end):
    parent = start_parent("start_processes", tmp_path / "pids", end if isinstance(end, str) else str(int(end)))

    parent.communicate()

    started = read_pids(tmp_path / "pids")
    assert len(started) == 8
    if end == "stop":
        assert not any(is_running(pid) for pid in started)
    wait_until(lambda: not any(is_running(pid) for pid in started))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a supervisor what its descendants leave behind")
@pytest.mark.parametrize("end", ["spin", "end", "kill_the_supervisor"])
def test_processes_of_a_lost_worker_end_with_it(tmp_path, make_sample, start_pool, set_clock, end):
    pool, pids = start_pool(f"reward_functions.py:start_processes_and_{end}", max_error_share=1.0), tmp_path / "pids"
    set_clock(lambda: 1000.0 if pids.exists() and pids.read_text().count("\n") == 4 else 0.0)

    results = pool.score([make_sample(str(pids))])

    assert results.rewards == [None]
    started = read_pids(pids)
    assert len(started) == 4
    assert not any(is_running(pid) for pid in started)


def test_an_idle_worker_leaves_when_its_pipe_closes():
    worker = subprocess.Popen(
        [sys.executable, "-m", "verl_lightning.rewards.worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    worker.communicate()

    assert worker.returncode == 0
