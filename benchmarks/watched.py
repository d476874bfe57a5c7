"""Runs cases one after another in child processes; one that hangs or dies is told of, with the place, and left out.

A child says in a diary what it is about to do, and writes its stacks beside it when a case takes too long. The parent
reads both, ends the child and all its ranks, and starts another one with the cases that are left.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

START = 180.0
"""Longest start of the children, in seconds: imports, first of all."""

GRACE = 3.0
"""Seconds between the children's stacks and their end."""

Case = Mapping[str, Any]


def limit_of(index: int, timeout: float) -> float:
    """Longest that a case may take, in seconds: the other ranks start within the first one.

    Args:
        index: Of the case in its launch.
        timeout: Of a case without a start.
    """
    return timeout + START if index == 0 else timeout


class Diary:
    """What one rank says of itself while it works.

    Args:
        folder: Of all ranks' diaries.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._stacks = self._watch(START)
        self.say("imports")

    def _watch(self, seconds: float) -> IO[str]:
        """Have the stacks of all threads written after some seconds, unless it is called again before."""
        file = (self.folder / f"rank{self.rank}.stacks").open("w")
        faulthandler.dump_traceback_later(seconds, file=file)
        return file

    def say(self, text: str) -> None:
        """Write what is done, or is to be done next."""
        with (self.folder / f"rank{self.rank}.diary").open("a") as file:
            file.write(f"{time.time():.1f} {text}\n")

    def work(self, cases: Mapping[str, Case], run: Callable[[Case], Any], *, timeout: float) -> None:
        """Run each case; the first rank saves what it returns.

        Args:
            cases: By name.
            run: Runs one on this rank, and returns what JSON can hold.
            timeout: Seconds of a case after which stacks are written; see `limit_of`.
        """
        for index, (name, case) in enumerate(cases.items()):
            self._stacks = self._watch(limit_of(index, timeout))
            self.say(f"begin: {name}")
            (self.folder / f"{index}.begun").touch()
            started = time.monotonic()
            result = run(case)
            faulthandler.cancel_dump_traceback_later()
            self.say(f"end: {name}")
            if self.rank == 0:
                draft = self.folder / "draft.json"
                draft.write_text(json.dumps({"result": result, "seconds": round(time.monotonic() - started, 1)}))
                draft.rename(self.folder / f"{index}.json")


def run_cases(
    command: list[str], cases: Mapping[str, Case], folder: Path, *, timeout: float
) -> dict[str, dict[str, Any]]:
    """Of each case ``result`` and ``seconds``, or an ``error`` that says where it stopped.

    Args:
        command: Of a child; ``--folder`` with its ``cases.json`` is added.
        cases: By name.
        folder: For the children's files; diaries and stacks stay in it.
        timeout: Longest case, in seconds.
    """
    results: dict[str, dict[str, Any]] = {}
    for attempt in range(len(cases)):
        left = {name: case for name, case in cases.items() if name not in results}
        if not left:
            break
        place = folder / f"attempt{attempt}"
        place.mkdir(parents=True)
        (place / "cases.json").write_text(json.dumps(left))
        error = _watch([*command, "--folder", str(place)], len(left), place, timeout)
        names = list(left)
        files = [place / f"{index}.json" for index in range(len(names))]
        done = [json.loads(file.read_text()) for file in files if file.exists()]
        results |= dict(zip(names, done, strict=False))
        if len(done) < len(names):
            results[names[len(done)]] = {"error": error or "it ended without a result."}
    return results


def _watch(command: list[str], count: int, folder: Path, timeout: float) -> str | None:
    """What went wrong before all results were there; None if nothing did."""
    with (folder / "output.txt").open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        finished, limit, since = -1, START, time.monotonic()  # of cases; -1 before the first begins
        while child.poll() is None:
            time.sleep(0.2)
            if (folder / ("0.begun" if finished < 0 else f"{finished}.json")).exists():
                finished, since = finished + 1, time.monotonic()
                limit = limit_of(finished, timeout)
            if time.monotonic() - since > limit + GRACE:
                where = culprits(folder)
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return f"took more than {limit:g} s. {where}"
    if child.returncode == 0 and (folder / f"{count - 1}.json").exists():
        return None
    if child.returncode != 0:
        _end_of(child.pid)
    return f"ended with {child.returncode}. {culprits(folder)} {(folder / 'output.txt').read_text()[-1500:]}"


def _end_of(session: int) -> None:
    """End the ranks that a dead first one has left behind, since they hold devices and ports."""
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        return


def culprits(folder: Path) -> str:
    """Where each rank was: what it last said, how long ago, and the innermost calls of its main thread."""
    said = []
    for diary in sorted(folder.glob("rank*.diary")):
        moment, _, text = diary.read_text().splitlines()[-1].partition(" ")
        stacks = diary.with_suffix(".stacks")
        calls = innermost(stacks.read_text()) if stacks.exists() else ""
        said.append(f"{diary.stem}: {time.time() - float(moment):.0f} s after `{text}`{calls and f' in {calls}'}")
    return "; ".join(said) + "." if said else "No rank has said anything: they did not start."


def innermost(stacks: str, *, count: int = 6) -> str:
    """The innermost calls of the main thread, which `faulthandler` writes last.

    Args:
        stacks: What it wrote.
        count: Of calls.
    """
    calls = re.findall(r'File "(.+?)", line (\d+) in (\S+)', stacks.rpartition("Thread ")[2])
    return " < ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in calls[:count])
