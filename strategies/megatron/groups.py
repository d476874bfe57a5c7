"""Data parallelism beside the ranks that share a model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from verl_lightning.strategies.base import DataParallelMixin


class MegatronGroups(DataParallelMixin):
    """Sums and gathers over the ranks that see different data, one of each copy of the model."""

    holds_whole_models = False
    _model_parallel_group: dist.ProcessGroup | None = None

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

    def stop_model_parallel_group(self) -> None:
        """Give it back."""
        if self._model_parallel_group is not None:
            dist.destroy_process_group(self._model_parallel_group)
        self._model_parallel_group = None

    @property
    @override
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model and see different data."""
        from megatron.core import parallel_state

        group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        return group
