"""Starts processes for tests from one warm fork server: a start costs a tenth of a CPU-second, importing Lightning 20.

The server is made at the first start of a pytest session, imports `PRELOADED`, and does nothing but fork. So a process
begins like one that has just imported these: no tensor was computed, no thread started. It is real otherwise, with a
working directory, environment, output, session and exit code of its own, and signals reach it by its id::

    output = verl_fit("--config", "ppo.yaml", folder=tmp_path)              # the command, to its good end
    with start(run_verl_fit, "--config", "ppo.yaml", folder=tmp_path) as run:
        wait_until(lambda: (tmp_path / "step 3").exists(), run)
        os.kill(run.pid, signal.SIGTERM)
        run.wait(code=75)
    first, second = on_ranks(2, train, tmp_path)                            # what two gloo ranks returned
    ranks = start_ranks(2, run_verl_fit, *words, folder=tmp_path)           # two processes, as torchrun makes them

Functions must be importable by name, arguments picklable. Tests that need other heavy packages say
``preload("megatron.bridge")`` at the top of their ``conftest.py``; what may not be imported before a fork is imported
by the function. What no fork can show, such as the `verl-fit` script itself, needs `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

PRELOADED = [
    "pytest",
    "transformers",
    "verl_lightning.cli.lightning_cli",
    "tests.runs",
    "tests.processes",
    "tests.warm",
]
VERL_FIT = str(Path(sys.executable).with_name("verl-fit"))
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOADED)
_unfinished: set[Process] = set()


def preload(*modules: str) -> None:
    """Lets the server import more modules, where they are installed; to be called before the first start."""
    PRELOADED.extend(modules)
    _CONTEXT.set_forkserver_preload(PRELOADED)


class Process:
    """A process that calls a function; made by `start`. On leaving the context, it and all that it started are gone."""

    def __init__(
        self, call: tuple[Callable[..., Any], Sequence[Any]], folder: Path, output: Path, environment: Mapping[str, str]
    ) -> None:
        self._output = output
        # As bytes: torch would send a tensor as a file that this process must keep open.
        arguments = (pickle.dumps(call), folder, output, dict(environment))
        self._process = _CONTEXT.Process(target=live, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid
        _unfinished.add(self)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """What was written to stdout and stderr, here and by earlier processes with the same output file."""
        return self._output.read_text() if self._output.exists() else ""

    @property
    def sentinel(self) -> int:
        """Becomes ready for `multiprocessing.connection.wait` when the process ends."""
        return self._process.sentinel

    def poll(self) -> int | None:
        """The exit code, negative if a signal ended the process; None while it runs."""
        return self._process.exitcode

    def join(self) -> int:
        """Waits for the end, and gives the exit code as `poll` does."""
        self._process.join()
        _unfinished.discard(self)
        return self._process.exitcode

    def wait(self, *, code: int = 0) -> str:
        """Waits for the end, which must have this exit code; gives the output."""
        self.join()
        assert self.poll() == code, f"exit code {self.poll()}, not {code}:\n{self.output[-5000:]}"
        return self.output

    def kill(self) -> None:
        """SIGKILL for the process and its group, such as reward workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # a process that has just begun leads no group yet
        self._process.join()
        _unfinished.discard(self)


def start(
    function: Callable[..., Any],
    *args: Any,
    folder: Path,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """A new process that calls a function; it ends when the function returns, raises or exits.

    Args:
        function: What it does.
        args: Arguments of the function.
        folder: Working directory, made if it does not exist.
        output: File to which stdout and stderr are appended; ``output.txt`` in the folder by default.
        environment: Variables to add to those of this process.
    """
    output = output or folder / "output.txt"
    for needed in (folder, output.parent):
        needed.mkdir(exist_ok=True, parents=True)
    return Process((function, args), folder, output, os.environ | (environment or {}))


def run_verl_fit(*words: str) -> None:
    """The `verl-fit` script with these words; for `start` and `start_ranks`."""
    from verl_lightning.cli import main

    sys.argv = [VERL_FIT, *words]
    main()


def verl_fit(*words: str, folder: Path, environment: Mapping[str, str] | None = None, code: int = 0) -> str:
    """Output of `verl-fit` with these words, which must end with this exit code."""
    with start(run_verl_fit, *words, folder=folder, environment=environment) as process:
        return process.wait(code=code)


def start_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    folder: Path,
    outputs: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Process]:
    """Processes that call a function as ranks of one run on this machine, as torchrun starts them.

    Args:
        world_size: How many.
        function: What each of them does.
        args: Arguments of the function.
        folder: Working directory of all.
        outputs: Folder for ``rank_0.txt`` and so on; the working directory by default.
        environment: Variables to add to those of this process.
    """
    port = free_port()
    processes = []
    for rank in range(world_size):
        own = (environment or {}) | torchrun_environment(rank, world_size, port)
        output = (outputs or folder) / f"rank_{rank}.txt"
        processes.append(start(function, *args, folder=folder, output=output, environment=own))
    return processes


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)`` returned on each rank of one run; fails as soon as a rank does, with what it said.

    Warnings are errors on the ranks where they are errors here.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        outputs = Path(name)
        call = (outputs, list(warnings.filters), function, args)
        ranks = start_ranks(world_size, _save_result, *call, folder=Path.cwd(), outputs=outputs)
        for process in ranks:
            stack.enter_context(process)
        while running := [process.sentinel for process in ranks if process.poll() is None]:
            wait(running)
            if any(process.poll() for process in ranks):
                break
        codes = [process.poll() for process in ranks]  # None if another one failed first
        said = [f"rank {rank}, exit code {code}:\n{ranks[rank].output[-5000:]}" for rank, code in enumerate(codes)]
        assert codes == [0] * world_size, "\n".join(said)
        return [pickle.loads((outputs / f"rank_{rank}.pickle").read_bytes()) for rank in range(world_size)]


def wait_until(condition: Callable[[], bool], process: Process | None = None) -> None:
    """Waits for a condition while the process, if any, runs; pytest's own limit ends what never comes."""
    while not condition():
        assert process is None or process.poll() is None, process.output[-5000:]
        time.sleep(0.005)


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # Linux gives out those from 32,768 on
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank of a run on this machine."""
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0}
    names = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port} | sizes
    own = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "tests"}
    return own | {name: str(value) for name, value in names.items()}


def _save_result(folder: Path, filters: Sequence[Any], function: Callable[..., Any], args: Sequence[Any]) -> None:
    import torch.distributed as dist

    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        message, module = (getattr(pattern, "pattern", pattern) or "" for pattern in (message, module))
        warnings.filterwarnings(action, message, category, module, line)
    result = function(*args)
    (folder / f"rank_{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def live(call: bytes, folder: Path, output: Path, environment: Mapping[str, str]) -> None:
    """The life of a process, from the fork to what Python does at its end."""
    gc.freeze()  # what was imported stays: no collection of garbage need look through it
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    try:
        function, args = pickle.loads(call)
        function(*args)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        threading._shutdown()  # multiprocessing ends its processes by `os._exit`, without these two
        atexit._run_exitfuncs()


@atexit.register
def _kill_what_a_test_left_behind() -> None:
    # Or multiprocessing would wait for it, without end.
    for process in list(_unfinished):
        process.kill()
