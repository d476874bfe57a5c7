"""Samples with replicas of another rollout's engine in Ray actors."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from verl_lightning.callbacks.rollout import RolloutCallback, sends_adapters
from verl_lightning.callbacks.vllm_rollout import VLLMRollout
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.ray.cluster import Demand
from verl_lightning.rollout.ray_engines import Caller, RayEngines


class RayRollout(RolloutCallback):
    """Samples with engines that Ray places anywhere in the cluster, beside the trainer.

    All training processes share the replicas, of which there may be more or fewer: each request goes to the one with
    the fewest tokens outstanding. Ray replaces those that die; nothing is lost, and responses are the same as without
    Ray.

    Args:
        rollout: Callback whose engine and sampling settings are used, such as a `HFRollout` or a `VLLMRollout`.
        num_replicas: Engines of the whole run.
        gpus_per_replica: GPUs of each engine, 0 or 1.
        cpus_per_replica: CPUs that each reserves.
        max_staleness: Most optimizer steps by which responses may be older than the policy that learns from them, 0
            or 1: each batch is then sampled while the policy learns from the one before.

    Raises:
        ValueError: If a number is out of its range, or an option of the other rollout doesn't apply to replicas.
        MisconfigurationException: In ``setup``, if adapters are to be sent alone, or nothing corrects for their age.
    """

    def __init__(
        self,
        rollout: RolloutCallback,
        num_replicas: int = 1,
        gpus_per_replica: int = 0,
        cpus_per_replica: float = 1.0,
        max_staleness: int = 0,
    ) -> None:
        super().__init__(rollout.sampling, rollout.val_sampling, rollout.turns, max_staleness)
        if num_replicas < 1:
            raise ValueError(f"`rollout.num_replicas` must be at least 1, got {num_replicas}.")
        if gpus_per_replica not in (0, 1):
            raise ValueError(f"`rollout.gpus_per_replica` must be 0 or 1, got {gpus_per_replica}.")
        if cpus_per_replica <= 0:
            raise ValueError(f"`rollout.cpus_per_replica` must be positive, got {cpus_per_replica}.")
        if isinstance(rollout, VLLMRollout):
            check_alone(rollout)
        self.rollout = rollout
        self.demand = Demand(
            option="rollout.num_replicas", count=num_replicas, cpus=cpus_per_replica, gpus=float(gpus_per_replica)
        )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(self.rollout, VLLMRollout):
            self.rollout.check_speculation(torch.device("cuda" if self.demand.gpus else "cpu"))
        super().setup(trainer, pl_module, stage)

    @override
    def make_engine(self, module: PostTrainingModule) -> RayEngines:
        if sends_adapters(module):
            raise MisconfigurationException(
                "`lora.merge_for_rollout: false` sends adapters alone, which `RayRollout` can't. Set it to true."
            )
        engine = self.rollout.make_engine(module)
        trainer = module.trainer
        caller = Caller(rank=trainer.global_rank, broadcast=trainer.strategy.broadcast)
        return RayEngines(engine, self.demand, caller=caller)

    @override
    def weights_type(self, module: PostTrainingModule) -> torch.dtype | None:
        return self.rollout.weights_type(module)

    @override
    def sync_weights(self, module: PostTrainingModule) -> None:
        strategy = module.trainer.strategy
        strategy.barrier()  # others may not have their answers from the old weights yet
        super().sync_weights(module)
        strategy.barrier()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        trainer.strategy.barrier()  # the first process may end the replicas next

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.barrier()

    @override
    def _abandon(self) -> None:
        assert self._engine is not None
        self._engine.stop()


def check_alone(rollout: VLLMRollout) -> None:
    """Refuse options that place engines, which Ray does here.

    Raises:
        ValueError: If there is one.
    """
    if rollout.beside is not None:
        raise ValueError(
            "`rollout.rollout.beside` runs engines in processes of one machine, which `RayRollout` does not need: its"
            " replicas are beside the trainer already. Leave `beside` out; `rollout.max_staleness: 1` samples ahead."
        )
    if rollout.tensor_parallel_size > 1:
        raise ValueError(
            f"`rollout.rollout.tensor_parallel_size` is {rollout.tensor_parallel_size}, but each replica of"
            " `RayRollout` has one GPU. Set it to 1, or sample with `VLLMRollout` on the training GPUs."
        )
