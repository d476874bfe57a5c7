"""The process that starts a run on Ray: checks the placement, watches, and starts the workers again."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from verl_lightning.cli.arguments import normalize_arguments
from verl_lightning.cli.phase_settings import refuse_phases, split_phases
from verl_lightning.cli.preflight import check_settings
from verl_lightning.launch.actor_demands import actor_demands, grace_of
from verl_lightning.launch.board import make_board
from verl_lightning.launch.options import LaunchOptions, parse_launch
from verl_lightning.launch.process_group import torch_config
from verl_lightning.launch.task import Task
from verl_lightning.processes.exit_codes import ExitCode
from verl_lightning.processes.signals import LAST_SECONDS, SAME_SECONDS, EndSoon, end_after, end_now, listen
from verl_lightning.ray.cluster import Demand, PlacementError, connect, is_alone, nodes, require
from verl_lightning.ray.local import own_handler

if TYPE_CHECKING:
    from ray.train import TrainingFailedError

_END_SECONDS = 60.0  # until the engines and reward workers of a dead group have given back what they held


def main(argv: Sequence[str]) -> None:
    """Runs ``verl-fit ray``.

    Args:
        argv: Words after ``ray``.
    """
    stop_listening = listen(EndSoon())
    try:
        import ray

        options, words = parse_launch(argv)
        sys.path.append(os.getcwd())
        arguments = normalize_arguments(words)
        refuse_phases(split_phases(arguments))
        check_settings(arguments, is_here=is_alone(options.address))
        actors = actor_demands(words, options.num_workers)
        connect(options.address)
        demands = [options.demand(sum(node.resources.get("GPU", 0.0) for node in nodes())), *actors]
        require(*demands, wait=options.wait)
    except (ValueError, FileNotFoundError, ConnectionError, PlacementError) as error:
        fail(str(error), code=ExitCode.USAGE)
    except ModuleNotFoundError as error:
        fail(f"it needs Ray ({error}): pip install 'verl-lightning[ray]'.", code=ExitCode.USAGE)
    try:
        run(options, demands, words)
    finally:
        stop_listening()
        ray.shutdown()


class StopsWorkers:
    """Passes on what tells the driver to stop; a second signal ends it at once, and so does a run without end.

    Args:
        board: The run's `Board`.
        grace: Seconds in which the workers must have ended.
    """

    def __init__(self, board: Any, grace: float) -> None:
        self._board = board
        self._grace = grace
        self._since: float | None = None

    def hear(self, signum: signal.Signals) -> None:
        """Asks the workers to stop, and ends the driver at a later second signal; called in a thread of its own."""
        if self._since is None:
            self._since = time.monotonic()
            self._board.stop.remote(signum.name)
            # Workers that are late break off by themselves first, and tell.
            end_after(
                self._grace + 2 * LAST_SECONDS, "the workers have not ended in time. Go on from the last checkpoint."
            )
        elif time.monotonic() - self._since > SAME_SECONDS:
            end_now(f"{signum.name}: the run ends at once. Go on from the last checkpoint.")

    def meet(self, signum: signal.Signals) -> None:
        """Does nothing: the main thread waits for the workers."""


def run(options: LaunchOptions, demands: Sequence[Demand], words: list[str]) -> None:
    """Trains until the end, starting again from the last checkpoint when workers die.

    Args:
        options: Options of `verl-fit ray`, among them how often to start again.
        demands: Demand of the workers, then those of their actors.
        words: The command line of `verl-fit`.
    """
    import ray
    from ray.train import TrainingFailedError

    board = make_board()
    listen(StopsWorkers(board, grace_of(words)))
    task = Task(words=words, folder=os.getcwd(), sys_path=[os.getcwd(), *sys.path], board=board)
    for attempt in range(options.max_restarts + 1):
        try:
            fit_once(task, demands[0])
            break
        except TrainingFailedError as error:
            say(describe_failure(error, board))
            check_restart(board, attempt, options, demands)
            task = dataclasses.replace(task, restart_of=ray.get(board.folder.remote()))
    ending = ray.get(board.ending.remote())
    if ending is not None and ending.code:
        fail(ending.words, code=ending.code)


def fit_once(task: Task, demand: Demand) -> None:
    """Runs one group of workers, from its start to its end.

    Args:
        task: Task of every worker.
        demand: Number of workers, and the resources of each.

    Raises:
        TrainingFailedError: If one of them fails or dies, its node is taken away, or there is no room for them.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # Ray itself would start workers again, without the checkpoint and without end, when a node goes or has no room.
    never = FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0)  # type: ignore[call-arg]
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"task": task},
        torch_config=torch_config("nccl" if demand.gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=demand.count, use_gpu=demand.gpus > 0, resources_per_worker=demand.bundle
        ),
        run_config=RunConfig(storage_path=os.path.join(task.folder, "runs", ".ray"), failure_config=never),
    )
    with own_handler(signal.SIGINT):
        try:
            trainer.fit()
        except SystemExit:  # Ray's answer to Ctrl-C, with the exit code of a success
            raise SystemExit(ExitCode.INTERRUPTED) from None


def train_on_worker(config: dict[str, Any]) -> None:
    """Runs the task in a worker; called by Ray Train in each one."""
    from verl_lightning.launch.worker import train  # late: it imports Lightning, which the driver does without

    train(config["task"])


def check_restart(board: Any, attempt: int, options: LaunchOptions, demands: Sequence[Demand]) -> None:
    """Ends the driver if the workers must not or can't be started once more."""
    import ray

    if refusal := ray.get(board.refusal.remote()):
        fail(refusal, code=ExitCode.FAILED)
    if reason := ray.get(board.stop_reason.remote()):
        fail(
            f"the workers ended after {reason}, before they had saved. Go on from the last checkpoint.",
            code=ExitCode.PREEMPTED,
        )
    if attempt == options.max_restarts:
        again = f"workers died again after {attempt} restarts (`--max-restarts {options.max_restarts}`)."
        fail(again, code=ExitCode.FAILED)
    try:
        require(*demands, wait=options.wait, patience=_END_SECONDS)
    except PlacementError as error:
        fail(f"can't start again: {error} Or let it wait for new nodes: `--wait SECONDS`.", code=ExitCode.FAILED)
    say(f"starting all workers again from the last checkpoint (restart {attempt + 1} of {options.max_restarts})")


def describe_failure(error: TrainingFailedError, board: Any) -> str:
    """Says which workers failed, where, in which phase, and how."""
    import ray

    failures = failures_by_rank(error)
    if not failures:
        return f"the workers were ended: {last_line(error)}"
    places = ray.get([board.describe.remote(rank) for rank in failures])
    lines = [f"  {place}: {last_line(failure)}" for place, failure in zip(places, failures.values(), strict=True)]
    return "\n".join(["workers failed:", *lines])


def failures_by_rank(error: TrainingFailedError) -> dict[int, Exception]:
    """Returns the error of each failed worker by its rank, in order of ranks; empty if Ray's own part failed."""
    from ray.train import PreemptionError, WorkerGroupError

    if isinstance(error, PreemptionError):
        return dict.fromkeys(sorted(error.preemption_info.preempted_ranks), error)
    return dict(sorted(error.worker_failures.items())) if isinstance(error, WorkerGroupError) else {}


def last_line(error: Exception) -> str:
    """Returns the last line of an error's message, which says most; the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def say(message: str) -> None:
    """Shows the user a message of the driver."""
    sys.stderr.write(f"verl-fit ray: {message}\n")


def fail(message: str, *, code: ExitCode) -> NoReturn:
    """Ends the driver with a message."""
    say(message)
    raise SystemExit(code)
