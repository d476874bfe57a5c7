"""Reward functions as users write them, good and bad; loaded by file path."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def number(sample):
    """The response as a number; the process id as a component."""
    return {"reward": float(sample.response), "pid": os.getpid()}


def slow_number(sample):
    time.sleep(0.02)
    return number(sample)


def scaled(sample, *, scale, offset=0.0):
    return scale * float(sample.response) + offset


def partial_components(sample):
    return {"reward": 1.0, "length": 3.0} if sample.response == "long" else {"reward": 0.0}


def interrupt():
    """What Ctrl-C raises; a signal would do nothing in a shell that ignores it."""
    raise KeyboardInterrupt


def misbehave(sample):
    """Does what the response says; else 1."""
    actions = {
        "raise": lambda: {}["absent key"],
        "none": lambda: None,
        "nan": lambda: float("nan"),
        "infinite": lambda: float("inf"),
        "text": lambda: "1.0",
        "no reward key": lambda: {"score": 1.0},
        "nan component": lambda: {"reward": 1.0, "length": float("nan")},
        "leave": lambda: sys.exit(0),
        "interrupt": interrupt,
        "loop": spin,
        "sleep": lambda: time.sleep(1e9),
        "exit": lambda: os._exit(3),
        "segfault": lambda: ctypes.string_at(0),
    }
    return actions.get(sample.response, lambda: 1.0)()


def spin():
    while True:
        pass


def spin_and_tell(sample):
    """Writes its process id to the file named by the response, then never comes back."""
    with open(sample.response, "a") as file:
        file.write(f"{os.getpid()}\n")
    spin()


def hang_in_child(sample):
    """Has a child process hold the pipe named by the response open for ever."""
    subprocess.run(["sh", "-c", 'exec 3>"$0"; printf started >&3; sleep 1000', sample.response], check=True)


def sees(sample):
    """1 if it has the environment variable that the response names."""
    return sample.response in os.environ


def environments(sample):
    """How many of its child, itself and its two supervisors have it."""
    parents = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    found = [Path(f"/proc/{pid}/environ").read_text() for pid in ("self", os.getppid(), parents)]
    found.append(subprocess.check_output(["env"], text=True))
    return sum(f"{sample.response}=sesame" in text for text in found)


def takes_key(sample, key, others=()):
    return key == "sesame" and others == [{"header": "sesame"}, "${MINE} as text", 3]


def count_completions(completions, **columns):
    """How many it gets at once, and the place of each."""
    if any(message[0]["content"] == "die" for message in completions):
        os._exit(3)
    return [{"reward": len(completions), "place": place} for place in range(len(completions))]


def start_processes(sample):
    """Leaves a child, one in a session of its own, an orphan and its forked twin, and tells their process ids."""
    nowhere = subprocess.DEVNULL
    own = [subprocess.Popen(["sleep", "1000"], start_new_session=leads, stderr=nowhere) for leads in (False, True)]
    orphan = "trap '' TERM HUP; setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    pids = [process.pid for process in own] + [int(subprocess.check_output(["sh", "-c", orphan]))]
    if (twin := os.fork()) == 0:
        os.setsid()
        os.close(2)
        time.sleep(1000)
    with open(sample.response, "a") as file:
        file.write("".join(f"{pid}\n" for pid in [*pids, twin]))
    return 1.0


def start_processes_and_spin(sample):
    start_processes(sample)
    spin()


def start_processes_and_end(sample):
    start_processes(sample)
    os.kill(os.getpid(), signal.SIGKILL)


def start_processes_and_kill_the_supervisor(sample):
    start_processes(sample)
    os.kill(os.getppid(), signal.SIGKILL)
    spin()


def noisy(sample):
    print('{"reward": 99}')  # noqa: T201
    os.write(1, b'{"reward": 98}\n')
    subprocess.run(["echo", '{"reward": 97}'], check=True)
    return float(sys.stdin.read() == "")


def loaded_torch(sample):
    return float("torch" in sys.modules)


def ground_truth_length(sample):
    return float(len(sample.ground_truth))


_open: list[asyncio.Event] = []
_most = [0]


async def meet(sample):
    """Comes back once as many calls are open as the ground truth says, with the most that were open so far."""
    event = asyncio.Event()
    _open.append(event)
    _most.append(len(_open))
    if len(_open) >= sample.ground_truth:
        for each in _open:
            each.set()
    await event.wait()
    _open.remove(event)
    return {"reward": max(_most), "pid": os.getpid()}


async def misbehave_async(sample):
    """As `misbehave`; waits for ever, or holds up the other calls."""
    if sample.response == "wait":
        await asyncio.Event().wait()
    if sample.response == "hold up":
        time.sleep(1e9)
    return misbehave(sample)


class Judge:
    """A class where a function is needed."""

    def __init__(self, sample):
        pass
