"""Forked processes of tests are as real as those that Python starts anew."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.processes import on_ranks, start, start_ranks, verl_fit, wait_until


def look_around(word):
    atexit.register(sys.stdout.write, "the end\n")
    threads = len(os.listdir("/proc/self/task"))
    sys.stdout.write(f"{word} {Path.cwd()} {os.environ['OWN']} {threads}\n")
    raise SystemExit(7)


def stay(child_file):
    child = subprocess.Popen(["sleep", "1000"])
    child_file.write_text(str(child.pid))
    time.sleep(1000)


def sum_of_ranks(offset):
    dist.init_process_group("gloo")
    values = [None, None]
    dist.all_gather_object(values, dist.get_rank() + offset)
    return sum(values)


def fail_on_rank_1():
    if os.environ["RANK"] == "1":
        warnings.warn("not here", UserWarning, stacklevel=1)
    time.sleep(1000)


def test_a_process_has_a_folder_an_environment_an_output_and_a_code_of_its_own(tmp_path):
    with start(look_around, "hello", folder=tmp_path / "own", environment={"OWN": "x"}) as process:
        output = process.wait(code=7)

    assert output == f"hello {tmp_path / 'own'} x 1\nthe end\n"
    assert "OWN" not in os.environ


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_a_process_by_its_id(tmp_path, number):
    with start(stay, tmp_path / "child", folder=tmp_path) as process:
        wait_until((tmp_path / "child").exists, process)
        os.kill(process.pid, number)
        process.wait(code=-number)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killing_a_process_kills_those_that_it_started(tmp_path):
    with start(stay, tmp_path / "child", folder=tmp_path) as process:
        wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "", process)

    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    wait_until(lambda: not child.exists() or child.read_text().split()[2] == "Z")
    assert process.poll() == -signal.SIGKILL


def test_an_error_is_shown_as_the_process_wants_it(tmp_path):
    output = verl_fit("--config", "none.yaml", folder=tmp_path, code=2)

    assert output.startswith("verl-fit: error: ")
    assert "Traceback" not in output


def test_ranks_find_each_other_and_return_what_they_have():
    assert on_ranks(2, sum_of_ranks, 10) == [21, 21]


def test_a_rank_that_fails_ends_the_others():
    shown = r"(?s)rank 0, exit code None:.*rank 1, exit code 1:.*UserWarning: not here"
    with pytest.raises(AssertionError, match=shown):
        on_ranks(2, fail_on_rank_1)


def test_ranks_write_an_output_each(tmp_path):
    ranks = start_ranks(2, look_around, "rank", folder=tmp_path, environment={"OWN": "y"})

    outputs = [process.wait(code=7) for process in ranks]

    assert outputs == [f"rank {tmp_path} y 1\nthe end\n"] * 2
    assert (tmp_path / "rank_1.txt").read_text() == outputs[1]
