"""Code that the policy wrote meets its limits."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from verl_lightning.environments.code_tool import (
    CodeLimits,
    _confinement,
    can_isolate,
    python,
    python_tool,
    run_python,
)
from verl_lightning.environments.tools import tool_schema

isolated = pytest.mark.skipif(not can_isolate(), reason="the kernel lets no process have namespaces of its own")


def told(code, **limits):
    return asyncio.run(run_python(code, CodeLimits(**limits)))


def test_code_says_what_it_prints():
    assert told("print(2 + 3)") == "5\n"
    assert told("import os; print(sorted(os.listdir()), os.environ.get('HF_TOKEN'))") == "['program.py'] None\n"
    assert tool_schema(python) == tool_schema(python_tool(CodeLimits(timeout=2)))


@pytest.mark.parametrize(
    ("code", "limits", "error", "complaint"),
    [
        ("1 / 0", {}, RuntimeError, "exit code 1.*ZeroDivisionError"),
        ("while True: pass", {"timeout": 0.5}, TimeoutError, "longer than 0.5 s"),
        ("while True: print('x' * 1000)", {"max_output": 5000}, RuntimeError, "more than 5000 bytes"),
        ("x = bytearray(2**30)", {"max_memory": 2**29}, RuntimeError, "MemoryError"),
        ("open('f', 'wb').write(bytes(2**20))", {"max_file": 2**16}, RuntimeError, "exit code"),
    ],
)
def test_code_that_breaks_a_limit_is_ended(code, limits, error, complaint):
    with pytest.raises(error, match=f"(?s){complaint}"):
        told(code, **limits)


FORKS = """
import os, time
count = 0
try:
    for _ in range(50):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except BlockingIOError:
    print(count)
"""


@isolated
def test_code_has_no_more_processes_than_it_may(monkeypatch, request):
    """Root's would not be counted: they run as nobody, where nobody may read Python's files."""
    monkeypatch.setattr(sys, "executable", shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable)
    _confinement.cache_clear()
    request.addfinalizer(_confinement.cache_clear)
    if os.geteuid() == 0 and not _confinement()[1]:
        pytest.skip("nobody may not run Python here")

    assert int(told(FORKS, max_processes=8)) < 8


@isolated
def test_isolated_code_has_no_network_and_sees_no_process():
    connect = "import socket; socket.create_connection(('127.0.0.1', 1), 1)"
    with pytest.raises(RuntimeError, match="Network is unreachable|Connection refused"):
        told(connect)
    assert told("import os, socket; print([n for _, n in socket.if_nameindex()])") == "['lo']\n"
    assert told("import os; print(len([p for p in os.listdir('/proc') if p.isdecimal()]))") == "1\n"


@isolated
def test_what_code_starts_ends_with_it(tmp_path):
    told("import subprocess, sys; subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)")

    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
    assert b"sleep\x00600\x00" not in commands


def test_wrong_limits_are_refused():
    with pytest.raises(ValueError, match="`CodeLimits.timeout` must be positive, got 0"):
        CodeLimits(timeout=0)
