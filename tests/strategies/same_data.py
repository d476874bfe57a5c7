"""Ranks that see the same data, as under model parallelism, where each could do without the others."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from verl_lightning.strategies import DDPStrategy


class SameDataStrategy(DDPStrategy):
    """All ranks see the same data and hold the same model; the mean of equal gradients is each of them."""

    data_parallel_size = 1
    data_parallel_rank = 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @property
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def sum_over_data_parallel(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def gather_over_data_parallel(self, value: Any) -> list[Any]:
        return [value]
