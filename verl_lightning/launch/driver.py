"""The process that starts a run on Ray: checks the placement, watches, and starts the workers again."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from verl_lightning.launch.actor_demands import actor_demands
from verl_lightning.launch.board import make_board
from verl_lightning.launch.options import LaunchOptions, parse_launch
from verl_lightning.launch.task import Task
from verl_lightning.ray.cluster import Demand, PlacementError, connect, nodes, require

if TYPE_CHECKING:
    from ray.train import WorkerGroupError

_END_SECONDS = 60.0  # until the engines and reward workers of a dead group have given back what they held


def main(argv: Sequence[str]) -> None:
    """Runs ``verl-fit ray``.

    Args:
        argv: Words after ``ray``.
    """
    try:
        import ray

        options, words = parse_launch(argv)
        connect(options.address)
        demand = options.demand(sum(node.resources.get("GPU", 0.0) for node in nodes()))
        demands = [demand, *actor_demands(words, options.num_workers)]
        require(*demands, wait=options.wait)
    except (ValueError, FileNotFoundError, ConnectionError, PlacementError) as error:
        fail(str(error), code=2)
    except ModuleNotFoundError as error:
        fail(f"it needs Ray ({error}): pip install 'verl-lightning[ray]'.", code=2)
    try:
        run(options, demands, words)
    finally:
        ray.shutdown()


def run(options: LaunchOptions, demands: Sequence[Demand], words: list[str]) -> None:
    """Trains until the end, starting again from the last checkpoint when workers die.

    Args:
        options: Among them how often to start again.
        demands: What the workers need, then their actors.
        words: The command line of `verl-fit`.
    """
    import ray
    from ray.train import WorkerGroupError

    board = make_board()
    signal.signal(signal.SIGTERM, lambda *_: board.stop.remote("SIGTERM"))
    task = Task(words=words, folder=os.getcwd(), sys_path=[os.getcwd(), *sys.path], board=board)
    for attempt in range(options.max_restarts + 1):
        try:
            fit_once(task, demands[0])
            break
        except WorkerGroupError as error:
            say(describe_failure(error, board))
            check_restart(board, attempt, options, demands)
            task = dataclasses.replace(task, restart_of=ray.get(board.folder.remote()))
    if saved := ray.get(board.saved.remote()):
        fail(f"{saved}. Go on with the same command and `--ckpt_path last`.", code=128 + signal.SIGTERM)


def fit_once(task: Task, demand: Demand) -> None:
    """One group of workers, from its start to its end.

    Args:
        task: What they do.
        demand: What each needs.

    Raises:
        WorkerGroupError: If one of them fails or dies.
    """
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="nccl" if demand.gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=demand.count, use_gpu=demand.gpus > 0, resources_per_worker=demand.bundle
        ),
        run_config=RunConfig(storage_path=os.path.join(task.folder, "runs", ".ray")),
    )
    try:
        trainer.fit()
    except SystemExit:  # Ray's answer to Ctrl-C, with the exit code of a success
        raise SystemExit(128 + signal.SIGINT) from None


def train_on_worker(config: dict[str, Any]) -> None:
    """What Ray Train calls in each worker."""
    from verl_lightning.launch.worker import train  # late: it imports Lightning, which the driver does without

    train(config["task"])


def check_restart(board: Any, attempt: int, options: LaunchOptions, demands: Sequence[Demand]) -> None:
    """Ends the driver if the workers must not or can't be started once more."""
    import ray

    if refusal := ray.get(board.refusal.remote()):
        fail(refusal, code=1)
    if reason := ray.get(board.stop_reason.remote()):
        fail(f"a worker died after {reason}, before it had saved. Go on from the last checkpoint.", code=1)
    if attempt == options.max_restarts:
        fail(f"workers died again after {attempt} restarts (`--max-restarts {options.max_restarts}`).", code=1)
    try:
        require(*demands, wait=options.wait, patience=_END_SECONDS)
    except PlacementError as error:
        fail(f"can't start again: {error} Or let it wait for new nodes: `--wait SECONDS`.", code=1)
    say(f"starting all workers again from the last checkpoint (restart {attempt + 1} of {options.max_restarts})")


def describe_failure(error: WorkerGroupError, board: Any) -> str:
    """Which workers failed, where, in which phase, and how."""
    import ray

    lines = []
    for rank, failure in sorted(error.worker_failures.items()):
        last_line = (str(failure).strip().splitlines() or [type(failure).__name__])[-1]
        lines.append(f"  {ray.get(board.describe.remote(rank))}: {last_line}")
    return "\n".join(["workers failed:", *lines])


def say(message: str) -> None:
    """Shows the user a message of the driver."""
    sys.stderr.write(f"verl-fit ray: {message}\n")


def fail(message: str, *, code: int) -> NoReturn:
    """Ends the driver with a message."""
    say(message)
    raise SystemExit(code)
