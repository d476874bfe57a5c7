"""Samples with replicas of another rollout's engine in Ray actors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from verl_lightning.callbacks.placement import RayActors
from verl_lightning.callbacks.rollout import RolloutCallback
from verl_lightning.callbacks.rollout_queue import InFlight
from verl_lightning.callbacks.vllm_rollout import VLLMRollout
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.rollout.base import Engine


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
        max_staleness: Most optimizer steps by which a token may be older than the policy that learns from it. Batches
            are sampled so many steps ahead, while the policy learns; see `docs/async.md`.
        min_replicas: Engines with which a run begins; the others join whenever the cluster has room for them. Null
            waits for all.
        in_flight: Treatment of responses that are on their way when new weights come; see `HFRollout`.

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
        min_replicas: int | None = None,
        in_flight: InFlight = "finish",
    ) -> None:
        if rollout.placement is not None:
            raise ValueError(
                "`rollout.rollout.placement` and `RayRollout` both place engines. Take one of them out; `RayRollout` is"
                " `placement: RayActors` of the other rollout."
            )
        if rollout.max_staleness:
            raise ValueError(
                "`rollout.rollout.max_staleness` is an option of `RayRollout`: set `rollout.max_staleness`."
            )
        if isinstance(rollout, VLLMRollout):
            check_alone(rollout)
        placement = RayActors(
            num_replicas=num_replicas,
            gpus_per_replica=gpus_per_replica,
            cpus_per_replica=cpus_per_replica,
            min_replicas=min_replicas,
        )
        super().__init__(
            rollout.sampling,
            rollout.val_sampling,
            rollout.turns,
            max_staleness,
            placement,
            environment=rollout.environment,
            episodes=rollout.episodes,
            in_flight=in_flight,
        )
        self.rollout = rollout
        self._actors = rollout.placement = placement
        rollout.in_flight = in_flight
        # `HFRollout` samples no canary in the training process, where its engine is not now.
        self._canary = rollout._canary or self._canary

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(self.rollout, VLLMRollout):
            self.rollout.check_speculation(self._actors.device())
        super().setup(trainer, pl_module, stage)

    @override
    def make_engine(self, module: PostTrainingModule) -> Engine:
        return self.rollout.make_engine(module)

    @override
    def weights_type(self, module: PostTrainingModule) -> torch.dtype | None:
        return self.rollout.weights_type(module)

    @override
    def _weights(self, module: PostTrainingModule) -> Iterable[tuple[str, Tensor]]:
        return self.rollout._weights(module)


def check_alone(rollout: VLLMRollout) -> None:
    """Refuse options that place engines, which Ray does here.

    Raises:
        ValueError: If there is one.
    """
    if rollout.tensor_parallel_size > 1:
        raise ValueError(
            f"`rollout.rollout.tensor_parallel_size` is {rollout.tensor_parallel_size}, but each replica of"
            " `RayRollout` has one GPU. Set it to 1, or sample with `VLLMRollout` on the training GPUs."
        )
