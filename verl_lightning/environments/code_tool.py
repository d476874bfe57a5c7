"""A tool that runs Python which the policy wrote, in a process with limits: no sandbox, see docs/security.md."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, SubprocessError, run
from typing import Any

# A user, network, process and mount namespace of its own: no network but an unconnected loopback, no other processes.
_ISOLATION = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]

_NOBODY = 65534  # user and group without rights on Linux


@dataclass(frozen=True, kw_only=True)
class CodeLimits:
    """Limits of a program that the policy wrote."""

    timeout: float = 10.0
    """Most seconds, of wall-clock and of processor time."""

    max_memory: int = 2**30
    """Most bytes of address space of each process."""

    max_processes: int = 32
    """Most processes and threads: of the program where it is isolated, elsewhere of the user together. Linux does not
    count those of root, as which a program runs only where the machine lets it run as nobody else."""

    max_output: int = 20_000
    """Most bytes of output; a program that writes more is ended."""

    max_file: int = 2**24
    """Most bytes of a file that it writes."""

    require_isolation: bool = False
    """True refuses to run where the kernel does not let a program be cut off from the network."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "require_isolation" and not getattr(self, field.name) > 0:
                raise ValueError(f"`CodeLimits.{field.name}` must be positive, got {getattr(self, field.name)}.")
        if self.require_isolation and not can_isolate():
            raise ValueError(
                "`CodeLimits.require_isolation`: this machine lets no process have a network of its own (`unshare"
                " --map-root-user --net` fails). Allow user namespaces, or run the whole training in a container."
            )

    def command(self) -> list[str]:
        """Return the command: isolation if the kernel allows it, limits, then Python without the user's site."""
        limits = {
            resource.RLIMIT_AS: self.max_memory,
            resource.RLIMIT_CPU: round(self.timeout + 1),
            resource.RLIMIT_FSIZE: self.max_file,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_NPROC: self.max_processes,
        }
        setting = f"import os, resource, sys; [resource.setrlimit(k, (v, v)) for k, v in {limits!r}.items()];"
        setting += " os.execv(sys.executable, [sys.executable, '-I', '-B', 'program.py'])"
        limited = [sys.executable, "-I", "-S", "-c", setting]
        return [*_confinement()[0], *limited]


async def python(code: str) -> str:
    """Runs Python code in a new process, and returns what it prints.

    Args:
        code: Program; print what you want to know.
    """
    return await run_python(code, CodeLimits())


def python_tool(limits: CodeLimits) -> Callable[[str], Awaitable[str]]:
    """Return the tool `python` with other limits.

    Args:
        limits: Limits of each program.
    """

    async def limited(code: str) -> str:
        return await run_python(code, limits)

    limited.__name__, limited.__doc__ = python.__name__, python.__doc__
    return limited


async def run_python(code: str, limits: CodeLimits) -> str:
    """Run a program in an empty folder, which is deleted afterwards, and return what it writes.

    Args:
        code: The program.
        limits: Its limits.

    Raises:
        TimeoutError: If it takes too long.
        RuntimeError: If it fails, or writes too much.
    """
    folder = tempfile.mkdtemp(prefix="verl-fit-code-")
    try:
        Path(folder, "program.py").write_text(code, encoding="utf-8", errors="replace")
        if (user := _confinement()[1].get("user")) is not None:
            os.chown(folder, user, user)
        return await _run_in(folder, limits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run_in(folder: str, limits: CodeLimits) -> str:
    process = await asyncio.create_subprocess_exec(
        *limits.command(),
        cwd=folder,
        env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        start_new_session=True,
        **_confinement()[1],
    )
    try:
        async with asyncio.timeout(limits.timeout):
            output = await _read(process, limits.max_output)
            end = await process.wait()
    except TimeoutError:
        raise TimeoutError(f"the code ran longer than {limits.timeout:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if end:
        raise RuntimeError(f"the code ended with exit code {end}\n{output}")
    return output


async def _read(process: asyncio.subprocess.Process, max_output: int) -> str:
    """Reads what a program writes until it has ended.

    Raises:
        RuntimeError: If it writes too much.
    """
    assert process.stdout is not None
    output = bytearray()
    while piece := await process.stdout.read(1 << 16):
        output += piece
        if len(output) > max_output:
            begin = output[: min(500, max_output)].decode("utf-8", errors="replace")
            raise RuntimeError(f"the code wrote more than {max_output} bytes: {begin}...")
    return output.decode("utf-8", errors="replace")


def can_isolate() -> bool:
    """Tell whether the kernel lets a process of this user have a network and process ids of its own."""
    return bool(_confinement()[0])


@cache
def _confinement() -> tuple[list[str], dict[str, Any]]:
    """Return the command that isolates a program, and the user that it runs as: root's programs as nobody."""
    python = [sys.executable, "-I", "-S", "-c", ""]
    users: list[dict[str, Any]] = [{"user": _NOBODY, "group": _NOBODY, "extra_groups": []}] if os.geteuid() == 0 else []
    commands = [_ISOLATION, []] if shutil.which("unshare") is not None else [[]]
    for command, user in product(commands, [*users, {}]):
        with suppress(OSError, SubprocessError):  # a container may lack the right to change users
            tried = run([*command, *python], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, check=False, **user)
            if tried.returncode == 0:
                return command, user
    return [], {}
