"""Lets the processes of one machine meet on its loopback interface, and ends those left when one has died."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from typing_extensions import override

from verl_lightning.compat.lightning import OpenLauncher, OwnLauncherStrategy, process_group_backend
from verl_lightning.processes import loopback, peers
from verl_lightning.processes.exit_codes import ExitCode

_LISTENED_ON: set[int] = set()
"""Ports on which this process has made a store."""

LINGER_SECONDS = 10.0
"""Seconds that processes may go on after the one that has started them is done."""


class Launcher(OpenLauncher):
    """Starts the other processes of this machine as Lightning does, and ends after them."""

    @override
    def before_start(self) -> None:
        os.environ.update({"LOCAL_RANK": "0", "MASTER_PORT": str(self.cluster_environment.main_port)})
        peers.join()  # first, so that the others find out if this process dies before they do

    @override
    def after_start(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for local_rank, process in enumerate(processes, start=1):
            peers.announce(local_rank, process.pid)
        atexit.register(outlive, processes)


class WatchedStrategy(OwnLauncherStrategy):
    """Has processes of one machine meet on its loopback interface, and end when one of them has died."""

    launcher_kind = Launcher if peers.IS_SUPPORTED else None
    timeout: float

    @override
    def setup_environment(self) -> None:
        peers.join()
        if self.num_nodes == 1 and not dist.is_initialized():
            self._make_process_group()
        super().setup_environment()

    def _make_process_group(self) -> None:
        """Makes the group in Lightning's place, which finds it then. Collective.

        Torch would listen on all interfaces.
        """
        strategy: Any = self
        environment = strategy.cluster_environment
        loopback.use_for("GLOO", "NCCL")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return  # torchrun has made the store
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        strategy.set_world_ranks()
        meet_on_loopback(
            process_group_backend(self),
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            port=environment.main_port,
            timeout=timedelta(seconds=self.timeout),
            device=self.root_device,
        )

    @override
    def teardown(self) -> None:
        super().teardown()
        module = self.lightning_module
        if module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED:
            peers.fail(exit_code(sys.exc_info()[1]))
        else:
            peers.leave()


def outlive(processes: list[subprocess.Popen[bytes]]) -> None:
    """Waits until some processes have ended, and ends those that have not after a while."""
    deadline = time.monotonic() + LINGER_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()


def meet_on_loopback(
    backend: str, *, rank: int, world_size: int, port: int, timeout: timedelta, device: torch.device
) -> None:
    """Makes the process group of processes on one machine, which listen on its loopback interface alone. Collective.

    Args:
        backend: Backend of the group, such as ``gloo``.
        rank: Rank of this process.
        world_size: Number of processes.
        port: Port on which the first process listens.
        timeout: Longest time for the meeting, and for each collective.
        device: Device on which this process computes.
    """
    loopback.use_for("GLOO", "NCCL")
    os.environ.update({"MASTER_ADDR": loopback.ADDRESS, "MASTER_PORT": str(port)})
    listener: dict[str, Any] = {}
    if rank == 0:
        try:
            listener["master_listen_fd"] = socket.create_server((loopback.ADDRESS, port), backlog=2048).detach()
        except OSError as error:
            # A store of an earlier run of this process is kept by models that are still there. Torch shares it.
            if error.errno != errno.EADDRINUSE or port not in _LISTENED_ON:
                raise
        _LISTENED_ON.add(port)
    make_store: Any = vars(dist)["TCPStore"]  # which torch does not export for type checkers
    store = make_store(loopback.ADDRESS, port, world_size, rank == 0, timeout, multi_tenant=True, **listener)
    own_device = None if device.type == "cpu" else device
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=own_device
    )
    if "nccl" in backend:
        atexit.register(_leave_group)  # as Lightning does: torch warns of groups that are left


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def exit_code(error: BaseException | None) -> int:
    """Returns the exit code of a process that ends by an error."""
    code = error.code if isinstance(error, SystemExit) else None
    return code if isinstance(code, int) else ExitCode.FAILED
