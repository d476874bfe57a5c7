"""Program of each worker of Ray Train: the usual command, told of its rank as torchrun tells it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from typing_extensions import override

from verl_lightning.cli.lightning_cli import CLI
from verl_lightning.faults import is_meant_for_user
from verl_lightning.launch.board import Place
from verl_lightning.launch.reporter import NodeLeavingError, Reporter, newest_checkpoint
from verl_lightning.launch.task import Task
from verl_lightning.modules.preemption import Preempted
from verl_lightning.processes.exit_codes import Ending, ExitCode
from verl_lightning.processes.module_path import follow_module_path
from verl_lightning.ray.actors import ActorsLostError
from verl_lightning.rollout.process import EngineDiedError
from verl_lightning.run_folders import name_of

_MISHAPS = (ActorsLostError, EngineDiedError, NodeLeavingError)


class WorkerCLI(CLI):
    """`verl-fit` in one of Ray's workers.

    Args:
        task: Task of all workers.
        reporter: Callback that tells the driver how far the run is.
        num_nodes: Nodes with workers.
        devices: Workers on each of them.
    """

    def __init__(self, task: Task, reporter: Reporter, *, num_nodes: int, devices: int) -> None:
        self._task = task
        self._reporter = reporter
        self._world = {"num_nodes": num_nodes, "devices": devices}
        super().__init__(restart_words(task))

    @property
    @override
    def goes_on(self) -> bool:
        return self._task.restart_of is not None or super().goes_on

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = super().instantiate_trainer(**kwargs, **self._world)
        trainer.callbacks.insert(0, self._reporter)  # type: ignore[attr-defined]
        return trainer


def train(task: Task) -> None:
    """Runs `verl-fit` in a worker of Ray Train.

    Args:
        task: Task of the worker; the same for all workers.

    Raises:
        MisconfigurationException: If the placement does not suit Lightning, or a node lacks the folder.
    """
    import ray

    context = ray.train.get_context()
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    place = Place(rank=context.get_world_rank(), node=address, pid=os.getpid())
    ray.get(task.board.begin.remote(place))
    reporter = Reporter(task.board)
    try:
        num_nodes, devices = describe_world(address)
        enter_folder(task)
        ending = WorkerCLI(task, reporter, num_nodes=num_nodes, devices=devices).ending
    except Preempted as end:
        if reporter.notice:
            raise NodeLeavingError(f"{reporter.notice}; {end.words}") from None
        ending = Ending(end.words, ExitCode.PREEMPTED)
    except (Exception, SystemExit) as error:
        if is_mistake(error):
            ray.get(task.board.refuse.remote(str(error)))
        raise
    if place.rank == 0:
        ray.get(task.board.keep_ending.remote(ending))


def is_mistake(error: BaseException) -> bool:
    """Tells whether a restart would meet the same error again, so that the user must change something."""
    if isinstance(error, _MISHAPS) or isinstance(error.__cause__, _MISHAPS):
        return False
    return isinstance(error, SystemExit) or is_meant_for_user(error)


def describe_world(address: str) -> tuple[int, int]:
    """Describes Ray's workers to Lightning in torchrun's words.

    Args:
        address: Address of this worker's node.

    Returns:
        The number of nodes, and of workers on each.

    Raises:
        MisconfigurationException: If nodes have different numbers of workers. Collective.
    """
    import ray
    import torch.distributed as dist

    context = ray.train.get_context()
    world_size, here = context.get_world_size(), context.get_local_world_size()
    counts: list[Any] = [None] * world_size
    dist.all_gather_object(counts, (address, here))
    if len({count for _, count in counts}) > 1:
        placed = ", ".join(f"{count} on {node}" for node, count in sorted(set(counts)))
        raise MisconfigurationException(
            f"Ray placed {placed} of the `--num-workers {world_size}`, but Lightning needs the same number on every"
            " node. Ask for a multiple of what one node holds, or set `--cpus-per-worker` so that nodes fill evenly."
        )
    ranks = {"RANK": context.get_world_rank(), "LOCAL_RANK": context.get_local_rank(), "WORLD_SIZE": world_size}
    ranks |= {"LOCAL_WORLD_SIZE": here, "GROUP_RANK": context.get_node_rank()}
    os.environ.update({name: str(value) for name, value in ranks.items()}, TORCHELASTIC_RUN_ID="ray")
    return world_size // here, here


def enter_folder(task: Task) -> None:
    """Makes relative paths and the user's own modules mean the same as for the driver."""
    if not Path(task.folder).is_dir():
        raise MisconfigurationException(
            f"The folder `{task.folder}`, in which `verl-fit ray` was started, is not on this node."
            " Start it in a folder that all nodes share, such as one on NFS."
        )
    os.chdir(task.folder)
    follow_module_path(task.sys_path)


def restart_words(task: Task) -> list[str]:
    """The command line that goes on in the folder of an earlier attempt, from its last checkpoint if there is one."""
    if task.restart_of is None:
        return task.words
    checkpoint, version = newest_checkpoint(task.restart_of), task.restart_of.log_version
    folder = [] if version is None else ["--name", name_of(version)]
    if checkpoint is None:
        return [*task.words, *folder]
    return [*task.words, *folder, "--ckpt_path", str(checkpoint) if version is None else "last"]
