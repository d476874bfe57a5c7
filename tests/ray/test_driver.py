"""What `verl-fit ray` makes of the ways in which a group of workers can end."""

from __future__ import annotations

import signal
import sys

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from verl_lightning.launch import driver
from verl_lightning.launch.board import Place, RunFolder, make_board
from verl_lightning.launch.driver import describe_failure, fit_once
from verl_lightning.launch.reporter import NodeLeavingError
from verl_lightning.launch.task import Task
from verl_lightning.launch.worker import is_mistake, restart_words
from verl_lightning.ray.actors import ActorsLostError
from verl_lightning.ray.cluster import Demand
from verl_lightning.rollout.process import EngineDiedError

starts_ray = pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")


class ConnectsError(Exception):
    """A cluster would have been joined or started."""


@pytest.mark.parametrize(
    ("options", "words", "said"),
    [
        ([], ["--trainer.max_step=3"], "`trainer.max_step` is not a setting of `verl-fit`. Did you mean"),
        ([], ["--model.actor.path=/no/model"], "`model.actor`: no model could be loaded from `path: /no/model`"),
        (["--address=10.0.0.1:1"], ["--trainer.max_step=3"], "`trainer.max_step` is not a setting"),
        (["--address=10.0.0.1:1"], ["--model.actor.path=/no/model"], None),  # its nodes may have one there
    ],
)
def test_what_can_not_run_starts_no_cluster(monkeypatch, capsys, options, words, said):
    def connect(address):
        raise ConnectsError

    monkeypatch.setattr(driver, "connect", connect)
    monkeypatch.setattr("verl_lightning.ray.local.running_address", lambda *_: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SystemExit if said else ConnectsError):
        driver.main(["--num-workers=1", *options, "--config=grpo", "--trainer.accelerator=cpu", *words])
    assert not said or capsys.readouterr().err.startswith(f"verl-fit ray: {said}")


@pytest.fixture(scope="module")
def board(joined_cluster):
    """Of a run with two workers, which have got different ways."""
    import ray

    board = make_board()
    for rank in range(2):
        board.begin.remote(Place(rank=rank, node=f"10.0.0.{rank}", pid=100 + rank))
    board.enter.remote(1, 7, "update_actor")
    yield board
    ray.kill(board)


@pytest.mark.slow
@starts_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_workers_without_room_are_given_up(board, monkeypatch, tmp_path):
    from ray.train import ControllerError

    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "0.5")
    task = Task(words=[], folder=str(tmp_path), sys_path=[], board=board)
    on_interrupt = signal.getsignal(signal.SIGINT)

    with pytest.raises(ControllerError) as given_up:
        fit_once(task, Demand(option="--num-workers", count=3, cpus=5.0))

    assert "timed out after 0.5 seconds waiting for 3 workers" in describe_failure(given_up.value, board)
    assert signal.getsignal(signal.SIGINT) == on_interrupt


@pytest.mark.slow
@starts_ray
def test_boards_live_where_their_driver_does(board):
    import ray

    boards = [board, make_board()]  # on any node, unless told where
    homes = ray.get([each.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for each in boards])

    assert homes == [ray.get_runtime_context().get_node_id()] * 2


@pytest.mark.slow
@starts_ray
def test_failures_name_worker_node_and_phase(board):
    from ray.train import PreemptionError, PreemptionInfo, WorkerGroupError

    died = WorkerGroupError("two", {1: RuntimeError("a\nlost"), 0: KeyError()})
    leaves = PreemptionError(PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"node": [1]}))
    first, second = "rank 0 on node 10.0.0.0 (process 100), setting up: ", "rank 1 on node 10.0.0.1 (process 101), "

    lines = describe_failure(died, board).splitlines()

    assert lines == ["workers failed:", f"  {first}KeyError", f"  {second}in phase `update_actor` of step 7: lost"]
    assert second in describe_failure(leaves, board)
    assert first not in describe_failure(leaves, board)


@pytest.mark.parametrize("kind", [ActorsLostError, EngineDiedError, NodeLeavingError])
def test_a_run_is_not_given_up_for_what_nobody_can_help(kind):
    error = MisconfigurationException("what a user is told")
    assert is_mistake(error)

    error.__cause__ = kind("gone")

    assert not is_mistake(error)


@pytest.mark.parametrize(
    ("version", "saves", "expected"),
    [
        ("grpo-1", True, ["--name", "grpo-1", "--ckpt_path", "last"]),
        (3, False, ["--name", "version_3"]),
        (None, True, ["--ckpt_path", "{folder}/last.ckpt"]),
        (None, False, []),
    ],
)
def test_another_attempt_goes_on_in_the_folder_of_the_one_before(tmp_path, version, saves, expected):
    if saves:
        (tmp_path / "last.ckpt").touch()
    left = RunFolder(log_version=version, checkpoint_folders=(str(tmp_path),))
    task = Task(words=["--config", "grpo"], folder="", sys_path=[], board=None, restart_of=left)

    assert restart_words(task) == ["--config", "grpo", *(word.format(folder=tmp_path) for word in expected)]
