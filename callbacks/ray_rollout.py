"""Samples with replicas of another rollout's engine in Ray actors."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from verl_lightning.callbacks.rollout import RolloutCallback, sends_adapters
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.ray.cluster import Demand
from verl_lightning.rollout.process import ProcessEngine
from verl_lightning.rollout.ray_engines import RayEngines


class RayRollout(RolloutCallback):
    """Samples with engines that Ray places anywhere in the cluster, beside the trainer.

    Each training process has replicas of its own, which share out its prompts. Ray replaces those that die; nothing
    is lost, and responses are the same as without Ray.

    Args:
        rollout: Whose engine and sampling settings are used, such as a `HFRollout` or a `VLLMRollout`.
        num_replicas: Engines of each training process.
        gpus_per_replica: GPUs of each engine, 0 or 1.
        cpus_per_replica: CPUs that each reserves.

    Raises:
        ValueError: If a number is out of its range.
        MisconfigurationException: In ``setup``, if the other rollout's options don't apply to replicas.
    """

    def __init__(
        self,
        rollout: RolloutCallback,
        num_replicas: int = 1,
        gpus_per_replica: int = 0,
        cpus_per_replica: float = 1.0,
    ) -> None:
        super().__init__(rollout.sampling, rollout.val_sampling, rollout.turns)
        if num_replicas < 1:
            raise ValueError(f"`rollout.num_replicas` must be at least 1, got {num_replicas}.")
        if gpus_per_replica not in (0, 1):
            raise ValueError(f"`rollout.gpus_per_replica` must be 0 or 1, got {gpus_per_replica}.")
        if cpus_per_replica <= 0:
            raise ValueError(f"`rollout.cpus_per_replica` must be positive, got {cpus_per_replica}.")
        self.rollout = rollout
        self.demand = Demand(
            option="rollout.num_replicas", count=num_replicas, cpus=cpus_per_replica, gpus=float(gpus_per_replica)
        )

    @override
    def make_engine(self, module: PostTrainingModule) -> RayEngines:
        if sends_adapters(module):
            raise MisconfigurationException(
                "`lora.merge_for_rollout: false` sends adapters alone, which `RayRollout` can't. Set it to true."
            )
        engine = self.rollout.make_engine(module)
        if isinstance(engine, ProcessEngine):
            raise MisconfigurationException(
                "`rollout.rollout.beside` runs engines in processes of one machine, which `RayRollout` does not need:"
                " its replicas are beside the trainer already. Leave `beside` out."
            )
        return RayEngines(engine, self.demand, pad_token_id=module.tokenizer.pad_token_id)
