"""Data parallelism beside the ranks that share a model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from verl_lightning.strategies.base import PostTrainingStrategy


class MegatronGroups(PostTrainingStrategy):
    """Sums and gathers over the ranks that see different data, one of each copy of the model."""

    _model_parallel_group: dist.ProcessGroup | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which share of the data this rank sees, as Lightning asks for it."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    @override
    def data_parallel_size(self) -> int:
        from megatron.core import parallel_state

        return int(parallel_state.get_data_parallel_world_size())

    @property
    @override
    def data_parallel_rank(self) -> int:
        from megatron.core import parallel_state

        return int(parallel_state.get_data_parallel_rank())

    @override
    def sum_over_data_parallel(self, tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed, group=self.data_parallel_group)
        return summed

    @override
    def gather_over_data_parallel(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.data_parallel_size
        dist.all_gather_object(values, value, group=self.data_parallel_group)
        return values

    @property
    @override
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._model_parallel_group

    def start_model_parallel_group(self, timeout: timedelta) -> None:
        """Make the group of the ranks that see this rank's data; Megatron's own leaves contexts out. Collective."""
        data_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(data_ranks, self.data_parallel_rank)
        copies = [[r for r, of in enumerate(data_ranks) if of == data] for data in range(self.data_parallel_size)]
        if len(copies[0]) > 1:
            self._model_parallel_group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                copies, timeout=timeout
            )

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model and see different data."""
        from megatron.core import parallel_state

        group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        return group
