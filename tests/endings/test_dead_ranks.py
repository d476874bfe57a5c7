"""When a process of a run is killed, the others say which, and end; whatever they do at the time."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.endings.test_preemption import signal_at
from tests.processes import run_verl_fit, start, start_ranks, wait_until
from verl_lightning.processes import peers
from verl_lightning.processes.messages import run_key

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of the end of a process"),
]
MEET = "verl_lightning.strategies.process_group.meet_on_loopback"
MAKE_GROUPS = "torch.distributed.new_group"


def run_until(rank, name, *words):
    """`verl-fit`, but a rank kills itself where it would call a function."""
    if os.environ["RANK"] == str(rank):
        module, _, function = name.rpartition(".")
        __import__(module)
        setattr(sys.modules[module], function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    run_verl_fit(*words)


def assert_survivor_names(victim, ranks):
    pids = [rank.pid for rank in ranks]
    output = ranks[1 - victim].wait(code=1)
    assert f"verl-fit: rank {victim} (process {pids[victim]}) has died, and the run ends with it" in output
    ranks[victim].wait(code=-signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "victim", "function"),
    [("ddp", 0, MEET), ("ddp", 1, MEET), ("fsdp", 0, MEET), ("fsdp", 1, MAKE_GROUPS)],
)
def test_a_death_while_ranks_meet(tmp_path, settings_file, strategy, victim, function):
    words = ["--config", str(settings_file), f"--strategy={strategy}", "--trainer.devices=2", "--fsdp.async_save=true"]

    ranks = start_ranks(2, run_until, victim, function, *words[: 4 if strategy == "ddp" else 5], folder=tmp_path)

    assert_survivor_names(victim, ranks)


@pytest.mark.parametrize(
    ("strategy", "victim", "moment", "step"),
    [
        ("ddp", 1, "setup", 0),
        ("ddp", 0, "validation", 2),
        ("ddp", 1, "save_checkpoint", 3),
        ("fsdp", 1, "gen", 1),
        ("fsdp", 0, "update_actor", 1),
    ],
)
def test_a_death_in_a_run(tmp_path, settings_file, strategy, victim, moment, step):
    words = ["--config", str(settings_file), f"--strategy={strategy}", "--trainer.devices=2"]

    ranks = start_ranks(2, run_verl_fit, *words, *signal_at(moment, step, "SIGKILL", rank=victim), folder=tmp_path)

    assert_survivor_names(victim, ranks)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_of_a_process_that_lightning_starts(tmp_path, settings_file, victim):
    """The second process has hardly begun to import anything by then."""
    words = ["--config", str(settings_file), "--strategy=ddp", "--trainer.devices=2"]
    with start(run_verl_fit, *words, folder=tmp_path) as first:
        wait_until(lambda: second_of(first) is not None, first)
        second = second_of(first)
        (psutil.Process(first.pid), second)[victim].kill()
        dead = (first.pid, second.pid)[victim]
        wait_until(lambda: f"rank {victim} (process {dead}) has died" in first.output)
        first.wait(code=-signal.SIGKILL if victim == 0 else 1)
        wait_until(lambda: not second.is_running() or second.status() == psutil.STATUS_ZOMBIE)


def second_of(process):
    """What `verl-fit` has started as its second process; it is not one of the rewards'."""
    for child in psutil.Process(process.pid).children():
        if child.environ().get("LOCAL_RANK") == "1" and "verl-fit" in child.cmdline()[1]:
            return child
    return None


def test_a_run_of_several_processes_leaves_nothing_in_the_temporary_folder(tmp_path, settings_file):
    words = ["--config", str(settings_file), "--strategy=ddp", "--trainer.devices=2", "--trainer.max_steps=1"]
    (tmp_path / "tmp").mkdir()

    for rank in start_ranks(2, run_verl_fit, *words, folder=tmp_path, environment={"TMPDIR": str(tmp_path / "tmp")}):
        rank.wait()

    assert not list((tmp_path / "tmp").glob("verl-fit-ranks*"))


def test_ports_of_one_machine_are_on_its_loopback_interface(tmp_path, settings_file):
    words = ["--config", str(settings_file), "--strategy=fsdp", "--trainer.devices=2", "--fsdp.async_save=true"]
    hang = ["--trainer.callbacks+=tests.endings.parts.HangAt", "--trainer.callbacks.moment=update_actor"]

    ranks = start_ranks(2, run_verl_fit, *words, *hang, folder=tmp_path)
    wait_until((tmp_path / "hangs").exists, ranks[0])
    listening = [
        connection.laddr.ip
        for rank in ranks
        for connection in psutil.Process(rank.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    for rank in ranks:
        rank.kill()

    assert len(listening) >= 3  # torch's store, and gloo on each rank
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize(
    ("code", "words"), [(None, "has died"), (75, "was told to stop"), (1, "has failed.*its message says why")]
)
def test_others_say_how_a_process_has_ended(code, words):
    assert re.search(rf"^rank 3 \(process 17\) {words}", peers.describe_loss("rank 3", 17, code))


def test_processes_that_torchrun_starts_again_are_another_run():
    """Those that have died left their files."""
    first = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}

    assert run_key(first) == run_key(first | {"LOCAL_RANK": "1"})
    assert run_key(first) != run_key(first | {"TORCHELASTIC_RESTART_COUNT": "1"})


def test_a_process_that_joins_and_leaves_at_once_is_no_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / "rank_1"])  # it has left since
    joined = peers.Peers(tmp_path / "run", "0")

    assert joined.newcomers() == {}
    joined.leave()


def test_a_folder_that_another_process_takes_away_is_made_again(tmp_path, monkeypatch):
    """It is the last of the run before, and leaves as this one begins the next run."""
    make, taken = Path.mkdir, []

    def make_and_lose(folder, *args, **kwargs):
        make(folder, *args, **kwargs)
        if not taken:
            folder.rmdir()
            taken.append(folder)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    joined = peers.Peers(tmp_path / "run", "0")

    assert [file.name for file in (tmp_path / "run").iterdir()] == ["rank_0"]
    joined.leave()
    assert taken == [tmp_path / "run"]
