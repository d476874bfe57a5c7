"""Cases in child processes: a hang and a death say where, and the others are run all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = """
import argparse, json, sys, time
from pathlib import Path
from watched import Diary

def wait_for_nobody():
    time.sleep(600)

def run(case):
    if case["does"] == "hang":
        diary.say("before the hang")
        wait_for_nobody()
    if case["does"] == "die":
        raise RuntimeError("out of luck")
    return case["does"]

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
folder = parser.parse_args().folder
diary = Diary(folder)
diary.work(json.loads((folder / "cases.json").read_text()), run, timeout=3.0)
"""


@pytest.fixture
def watched(monkeypatch):
    """The module, as the benchmarks beside it import it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    import watched

    return watched


def test_a_hang_and_a_death_say_where_and_others_go_on(watched, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    cases = {"first": {"does": "1"}, "stuck": {"does": "hang"}, "dead": {"does": "die"}, "last": {"does": "2"}}

    results = watched.run_cases([sys.executable, str(child)], cases, tmp_path / "work", timeout=3.0)

    assert results["first"]["result"] == "1"
    assert results["last"]["result"] == "2"
    assert "took more than 3 s. rank0" in results["stuck"]["error"]
    assert "after `before the hang` in wait_for_nobody (child.py:" in results["stuck"]["error"]
    assert "out of luck" in results["dead"]["error"]
