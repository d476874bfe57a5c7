"""The commands in `benchmarks/README.md` use flags that the scripts have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"`(benchmarks/\w+\.py[^`]*)`", (ROOT / "benchmarks/README.md").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_plan_is_understood(command):
    script, *words = command.split()
    source = (ROOT / script).read_text()

    flags = [word for word in words if word.startswith("--")]
    assert [flag for flag in flags if f'"{flag.replace("--no-", "--")}"' not in source] == []


def test_every_script_is_in_the_plan():
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {"step_timer.py", "watched.py"}  # no scripts

    assert {Path(command.split()[0]).name for command in COMMANDS} == scripts
