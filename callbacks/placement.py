"""Places where a rollout's engines run: in processes beside the training processes, or in Ray actors."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.ray.cluster import Demand
from verl_lightning.rollout.base import Engine
from verl_lightning.rollout.process import ProcessEngine
from verl_lightning.rollout.ray_engines import Caller, RayEngines
from verl_lightning.rollout.stepping import SteppingEngine
from verl_lightning.rollout.vllm import VLLMEngine
from verl_lightning.rollout.weight_transfer import Transfer, choose_transfer


class Placement(ABC):
    """A place where the engines of a rollout run, other than the training processes."""

    max_restarts: int | None = None
    """Most deaths of engines that the callback makes good for; None where others do."""

    takes_adapters = False
    """True if engines that take adapters do so at this place."""

    @abstractmethod
    def place(self, engine: SteppingEngine, module: PostTrainingModule) -> Engine:
        """Return an engine of this kind at its place, not started."""

    @abstractmethod
    def gpu(self, trainer: Trainer) -> int | None:
        """Return the index of the engine's GPU, if it is one that the training process sees."""

    @abstractmethod
    def device(self) -> torch.device:
        """Return the kind of device on which engines run."""

    @contextmanager
    def alone(self, trainer: Trainer) -> Iterator[None]:
        """Have the engines to oneself, where several training processes share them. Collective."""
        yield

    def leave(self, trainer: Trainer) -> None:  # noqa: B027
        """Wait for those who still ask, since the engines may end next. Collective."""

    @abstractmethod
    def abandon(self, engine: Any) -> None:
        """Have an engine drop what it samples, so that nobody waits for it; it is stopped next."""


@dataclass(frozen=True, kw_only=True)
class Beside(Placement):
    """Engines in processes of their own, one for each training process."""

    gpus: list[int] = field(default_factory=list)
    """GPU of each local rank's engine, as an index among those that the trainer sees; empty runs engines on the CPU. An
    engine on its trainer's own GPU never sleeps."""

    transfer: Transfer | Literal["auto"] = "auto"
    """Route of weights to the engines: ``nccl`` from GPU to GPU, ``ipc`` within a GPU that trainer and engine share,
    ``host`` through the host's memory; ``auto`` is the first that can."""

    max_restarts: int = 3
    """Most replacements of dead engines in a run before it stops."""

    takes_adapters = True

    def __post_init__(self) -> None:
        if len(set(self.gpus)) < len(self.gpus) or any(gpu < 0 for gpu in self.gpus):
            raise ValueError(f"`gpus` must name a GPU of its own for each local rank, got {self.gpus}.")
        if self.max_restarts < 0:
            raise ValueError(f"`max_restarts` must not be negative, got {self.max_restarts}.")

    def place(self, engine: SteppingEngine, module: PostTrainingModule) -> ProcessEngine:
        """Return a process that runs such an engine.

        Raises:
            MisconfigurationException: If weights can't reach it so, or this process has or sees no such GPU.
        """
        gpu = self.gpu(module.trainer)
        check_visible(gpu, torch.cuda.device_count())
        transfer: Transfer = "host"
        if isinstance(engine, VLLMEngine) and engine.config.lora_rank is None:
            transfer = choose_transfer(self.transfer, trainer_gpu=trainer_gpu(module.trainer), engine_gpu=gpu)
            engine = VLLMEngine(dataclasses.replace(engine.config, transfer=transfer))
        elif self.transfer not in ("auto", "host"):
            raise MisconfigurationException(
                f"`rollout.placement.transfer: {self.transfer}` is for whole weights into vLLM: adapters are files, and"
                " `HFRollout` takes weights from the host. Set it to `auto`."
            )
        return ProcessEngine(engine.recipe(), gpu=gpu, transfer=transfer)

    def gpu(self, trainer: Trainer) -> int | None:
        """Return the index of the GPU of this process's engine, None where no GPUs are named.

        Raises:
            MisconfigurationException: If GPUs are named, but none for this process.
        """
        if not self.gpus:
            return None
        if trainer.local_rank >= len(self.gpus):
            raise MisconfigurationException(
                f"`rollout.placement.gpus` names {len(self.gpus)} GPUs, but this node has a training process with local"
                f" rank {trainer.local_rank}. Name one for each."
            )
        return self.gpus[trainer.local_rank]

    def device(self) -> torch.device:
        """Return the kind of device on which engines run."""
        return torch.device("cuda" if self.gpus else "cpu")

    def abandon(self, engine: ProcessEngine) -> None:
        """Kill the engine's process."""
        engine.kill()


@dataclass(frozen=True, kw_only=True)
class RayActors(Placement):
    """Replicas of an engine in Ray actors anywhere in the cluster, which all training processes share."""

    num_replicas: int = 1
    """Engines of the whole run."""

    gpus_per_replica: int = 0
    """GPUs of each engine, 0 or 1."""

    cpus_per_replica: float = 1.0
    """CPUs that each reserves."""

    min_replicas: int | None = None
    """Engines with which a run begins; the others join whenever the cluster has room for them. Null waits for all."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"`num_replicas` must be at least 1, got {self.num_replicas}.")
        if self.min_replicas is not None and not 1 <= self.min_replicas <= self.num_replicas:
            raise ValueError(
                f"`min_replicas` must lie between 1 and `num_replicas` ({self.num_replicas}), got {self.min_replicas}."
            )
        if self.gpus_per_replica not in (0, 1):
            raise ValueError(f"`gpus_per_replica` must be 0 or 1, got {self.gpus_per_replica}.")
        if self.cpus_per_replica <= 0:
            raise ValueError(f"`cpus_per_replica` must be positive, got {self.cpus_per_replica}.")

    def place(self, engine: SteppingEngine, module: PostTrainingModule) -> RayEngines:
        """Return the replicas."""
        gpus, count = float(self.gpus_per_replica), self.num_replicas
        demand = Demand(option="rollout.num_replicas", count=count, cpus=self.cpus_per_replica, gpus=gpus)
        trainer = module.trainer
        caller = Caller(rank=trainer.global_rank, broadcast=trainer.strategy.broadcast)
        return RayEngines(engine, demand, caller=caller, at_least=self.min_replicas)

    def gpu(self, trainer: Trainer) -> None:
        """Return None: Ray gives the replicas GPUs of their own."""
        del trainer

    def device(self) -> torch.device:
        """Return the kind of device on which engines run."""
        return torch.device("cuda" if self.gpus_per_replica else "cpu")

    @contextmanager
    def alone(self, trainer: Trainer) -> Iterator[None]:
        """Have the engines to oneself: others may not have their answers from the old weights yet. Collective."""
        trainer.strategy.barrier()
        yield
        trainer.strategy.barrier()

    def leave(self, trainer: Trainer) -> None:
        """Wait for all: the first process may end the replicas next. Collective."""
        trainer.strategy.barrier()

    def abandon(self, engine: RayEngines) -> None:
        """End the replicas."""
        engine.stop()


def trainer_gpu(trainer: Trainer) -> int | None:
    """Returns the index of this process's GPU, None on a CPU."""
    device = trainer.strategy.root_device
    return device.index if device.type == "cuda" else None


def check_visible(gpu: int | None, count: int) -> None:
    """Refuses an engine's GPU that this process can't see.

    Args:
        gpu: Index of the GPU, None for none.
        count: Number of GPUs that the process sees.

    Raises:
        MisconfigurationException: If there is no such GPU.
    """
    if gpu is not None and gpu >= count:
        raise MisconfigurationException(
            f"`rollout.placement.gpus` names GPU {gpu}, but this process sees {count} GPUs, counted from 0. Name"
            " others, or have `CUDA_VISIBLE_DEVICES` list those of the engines too."
        )
