"""Starts the workers of a test's Ray cluster as forks of a warm process; a fresh one imports for 3 to 10 CPU-seconds.

Ray runs this file instead of its own program that prepares a worker, and the file asks the warm process for a fork,
which is a worker like any other. Clusters that are started without it, such as that of ``examples/ray``, show that
fresh workers find what they need.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SOCKET = "TESTS_WARM_WORKERS"
"""Environment variable with the path at which the warm process listens."""


@contextmanager
def warm_workers(folder: str) -> Iterator[dict[str, str]]:
    """Forks workers as long as it lasts; gives the option that Ray's nodes need for that."""
    from pathlib import Path

    from tests.processes import start, wait_until

    os.environ[SOCKET] = f"{folder}/socket"
    with start(fork_workers, os.environ[SOCKET], folder=Path(folder)) as process:
        wait_until(lambda: "ready" in process.output, process)
        yield {"setup_worker_path": __file__}
    del os.environ[SOCKET]


def fork_workers(path: str) -> None:
    """Forks a worker for each request, without end."""
    import signal

    import pandas  # noqa: F401, Ray Train imports it, and the next one
    import pyarrow.dataset  # noqa: F401

    import verl_lightning.launch.worker
    import verl_lightning.rollout.ray_engines  # noqa: F401

    assert "ray" not in sys.modules  # it reads its worker's environment when it is imported

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Linux buries the dead
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile() as file:
                asked = json.load(file)
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                be_worker(*asked)


def be_worker(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Lives as the process that Ray wanted, and ends."""
    import pickle
    from pathlib import Path

    from tests.processes import live

    code = 1
    try:
        live(pickle.dumps((run_worker, words)), Path(folder), Path(os.devnull), environment)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
    finally:
        os._exit(code)


def run_worker(*words: str) -> None:
    """What Ray's own program does, up to the worker's end; it would start Python anew in between."""
    import runpy

    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers.setup_worker import parser

    own, sys.argv = parser.parse_known_args(words)
    os.environ.update(RuntimeEnvContext.deserialize(own.serialized_runtime_env_context or "{}").env_vars)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as to_fork:
        to_fork.connect(os.environ[SOCKET])
        to_fork.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
