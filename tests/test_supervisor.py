"""A process below supervisors: its exit code, and what is left when its parent or it ends, even as it starts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import verl_lightning
from verl_lightning.processes.supervisor import SupervisedProcess

# Never ends by itself, nor does the process that it starts; each writes a letter into the pipe, and keeps it open.
STUCK = "import os; os.fork() or os.setsid(); os.write(os.open(PIPE, os.O_WRONLY), b'x'); import signal\nsignal.pause()"
PARENT = """
import signal, sys
from verl_lightning.processes.supervisor import SupervisedProcess

SupervisedProcess("timeit", "-n1", "-r1", sys.argv[1])
signal.pause()
"""


@pytest.fixture
def pipe(tmp_path):
    """A path that processes write to, and a file descriptor that reads an end of file once they are gone."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    yield tmp_path / "pipe", reader
    os.close(reader)


def stuck(path: Path) -> list[str]:
    return ["timeit", "-n1", "-r1", STUCK.replace("PIPE", repr(str(path)))]


def wait_for_two(process: subprocess.Popen, path: Path, reader: int) -> None:
    """Until both processes have written; fails if theirs ends before."""
    letters = b""
    os.set_blocking(reader, False)
    writer = os.open(path, os.O_WRONLY)  # else the reader finds an end before they have opened it
    while len(letters) < 2:
        assert process.poll() is None
        with contextlib.suppress(BlockingIOError):
            letters += os.read(reader, 2)
        time.sleep(0.005)
    os.close(writer)
    os.set_blocking(reader, True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of the end of a parent")
def test_nothing_outlives_a_killed_parent(pipe):
    with subprocess.Popen([sys.executable, "-c", PARENT, stuck(pipe[0])[-1]]) as parent:
        wait_for_two(parent, *pipe)
        parent.kill()

    assert os.read(pipe[1], 1) == b""


def test_all_that_a_process_has_started_ends_with_it(pipe):
    process = SupervisedProcess(*stuck(pipe[0]))
    wait_for_two(process.popen, *pipe)
    assert not process.has_ended

    assert process.end() == -signal.SIGTERM
    assert process.end() == -signal.SIGTERM
    assert process.has_ended
    assert os.read(pipe[1], 1) == b""


def test_files_of_the_working_directory_do_not_stand_in_for_pythons_modules(tmp_path):
    (tmp_path / "timeit.py").write_text("raise SystemExit(7)")
    process = SupervisedProcess("timeit", "-n1", "-r1", "import os; os._exit(3)", cwd=tmp_path)

    assert process.end(patience=60.0) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of the end of a parent")
def test_linux_itself_kills_a_process_whose_supervisor_has_ended():
    """So that its death waits for nobody who looks for it."""
    ask = "import ctypes as c; s = c.c_int(); c.CDLL(None).prctl(2, c.byref(s)); import os; os._exit(s.value)"
    process = SupervisedProcess("timeit", "-n1", "-r1", ask)

    assert process.end(patience=60.0) == signal.SIGKILL


def test_no_process_of_a_run_is_started_without_a_supervisor():
    """But Lightning's own launcher, whose ranks watch one another, and programs that are waited for."""
    root = Path(verl_lightning.__file__).parent
    starts = re.compile(r"Popen\(|\.Process\(|os\.fork\(|posix_spawn|os\.spawn|ProcessPoolExecutor")
    rooms = [room for room in root.iterdir() if room.is_dir()]  # some are links, into which `rglob` does not go
    paths = {*root.glob("*.py"), *(path for room in rooms for path in room.rglob("*.py"))}
    files = {path for path in paths if starts.search(path.read_text())}

    assert files == {root / "processes" / "supervisor.py"}


@pytest.mark.parametrize(("way", "code"), [("import os; os._exit(3)", 3), ("signal.raise_signal(9)", -9), ("None", 0)])
def test_an_exit_code_is_that_of_the_process(way, code):
    process = SupervisedProcess("timeit", "-n1", "-r1", f"import signal; {way}", stdout=subprocess.DEVNULL)

    assert process.end(patience=60.0) == code
