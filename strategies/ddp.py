"""Data parallelism for several models: each role is wrapped on its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from verl_lightning.compat.lightning import ddp_options
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.scorer import Head, TokenScorer
from verl_lightning.models.size import ModelSize
from verl_lightning.strategies.base import DataParallelMixin, gradients_unsynced
from verl_lightning.strategies.host_groups import in_seconds
from verl_lightning.strategies.memory import ModelMemory, whole_memory
from verl_lightning.strategies.process_group import WatchedStrategy
from verl_lightning.types import Scores, TokenBatch


class DDPStrategy(DataParallelMixin, WatchedStrategy, LightningDDPStrategy):
    """Every process holds whole models and sees its share of the data; gradients are summed over processes.

    Modules of other projects, which never call `make_model`, are wrapped whole as Lightning does.

    Args:
        bucket_cap_mb: Size of the buckets in which gradients are summed while the backward pass goes on, in MiB.
        timeout: Longest wait for the other processes in a collective operation, in seconds.
        process_group_backend: `nccl`, `gloo` or another one of torch; null takes the device's own.
        find_unused_parameters: Look in each pass for trained weights that it leaves out, such as those of a vision
            tower beside text: slower, and an error without it.
        checkpoint_io: Plugin for the trainer's checkpoints; null writes files that are whole or not there.
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        timeout: float | timedelta = 1800.0,
        process_group_backend: str | None = None,
        find_unused_parameters: bool = False,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        self.timeout = in_seconds(timeout)
        super().__init__(
            timeout=timedelta(seconds=self.timeout),
            process_group_backend=process_group_backend,
            checkpoint_io=checkpoint_io,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
        )
        self._roles: dict[nn.Module, DistributedDataParallel | None] = {}

    @override
    def configure_ddp(self) -> None:
        if not self._roles:
            super().configure_ddp()

    @override
    def make_model(self, config: ModelConfig, head: Head, *, trainable: bool) -> TokenScorer:
        model = super().make_model(config, head, trainable=trainable)
        if trainable:
            self._roles[model] = None  # wrapped at its first step, once a checkpoint may have been loaded
        return model

    @override
    def plan_memory(
        self, size: ModelSize, config: ModelConfig, tokens: int | None, *, accumulates: bool
    ) -> ModelMemory:
        del accumulates
        return whole_memory(size, self.compute_types(config), tokens, keeps_gradients=True)

    @override
    def _call(self, model: nn.Module, batch: TokenBatch, with_entropy: bool) -> Scores:
        scores: Scores = self._wrapped(model)(batch, with_entropy=with_entropy)
        return scores

    @property
    @override
    def gradient_divisor(self) -> float:
        return float(self.data_parallel_size)

    @override
    @contextmanager
    def no_gradient_sync(self, model: nn.Module) -> Iterator[None]:
        with self._wrapped(model).no_sync():
            yield

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with gradients_unsynced(self, self._roles) if self._roles else super().block_backward_sync():
            yield

    @override
    def teardown(self) -> None:
        self._roles.clear()
        super().teardown()

    def _wrapped(self, model: nn.Module) -> DistributedDataParallel:
        wrapper = self._roles[model]
        if wrapper is None:
            wrapper = DistributedDataParallel(model, gradient_as_bucket_view=True, **ddp_options(self))
            self._roles[model] = wrapper
        return wrapper
