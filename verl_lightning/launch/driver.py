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
    from ray.train import TrainingFailedError

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
    from ray.train import TrainingFailedError

    board = make_board()
    signal.signal(signal.SIGTERM, lambda *_: board.stop.remote("SIGTERM"))
    task = Task(words=words, folder=os.getcwd(), sys_path=[os.getcwd(), *sys.path], board=board)
    for attempt in range(options.max_restarts + 1):
        try:
            fit_once(task, demands[0])
            break
        except TrainingFailedError as error:
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
        TrainingFailedError: If one of them fails or dies, its node is taken away, or there is no room for them.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # Ray itself would start workers again, without the checkpoint and without end, when a node goes or has no room.
    never = FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0)  # type: ignore[call-arg]
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="nccl" if demand.gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=demand.count, use_gpu=demand.gpus > 0, resources_per_worker=demand.bundle
        ),
        run_config=RunConfig(storage_path=os.path.join(task.folder, "runs", ".ray"), failure_config=never),
    )
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit()
    except SystemExit:  # Ray's answer to Ctrl-C, with the exit code of a success
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGINT, on_interrupt)  # Ray's handler asks workers that are gone


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


def describe_failure(error: TrainingFailedError, board: Any) -> str:
    """Which workers failed, where, in which phase, and how."""
    import ray

    failures = failures_by_rank(error)
    if not failures:
        return f"the workers were ended: {last_line(error)}"
    places = ray.get([board.describe.remote(rank) for rank in failures])
    lines = [f"  {place}: {last_line(failure)}" for place, failure in zip(places, failures.values(), strict=True)]
    return "\n".join(["workers failed:", *lines])


def failures_by_rank(error: TrainingFailedError) -> dict[int, Exception]:
    """What went wrong in which workers, in the order of their ranks; nothing if Ray's own part failed."""
    from ray.train import PreemptionError, WorkerGroupError

    if isinstance(error, PreemptionError):
        return dict.fromkeys(sorted(error.preemption_info.preempted_ranks), error)
    return dict(sorted(error.worker_failures.items())) if isinstance(error, WorkerGroupError) else {}


def last_line(error: Exception) -> str:
    """The end of an error's message, which says most; its name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def say(message: str) -> None:
    """Shows the user a message of the driver."""
    sys.stderr.write(f"verl-fit ray: {message}\n")


def fail(message: str, *, code: int) -> NoReturn:
    """Ends the driver with a message."""
    say(message)
    raise SystemExit(code)
