"""Fully sharded data parallelism (FSDP2) for several models: each rank holds a part of every weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from typing_extensions import override

from verl_lightning.compat.lightning import OpenModelParallelStrategy
from verl_lightning.compat.torch import LocalAdamW
from verl_lightning.faults import RunError
from verl_lightning.metrics import Metric
from verl_lightning.models.blocks import language_blocks
from verl_lightning.models.build import build_skeleton
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.router_replay import RouterReplay
from verl_lightning.models.scorer import Head, TokenScorer
from verl_lightning.models.size import Compute, ModelSize
from verl_lightning.models.streaming import stream_scorer
from verl_lightning.models.weights import as_type, merged_weights, whole
from verl_lightning.strategies.base import LossFn, blank, gradients_unsynced
from verl_lightning.strategies.checkpoints import (
    READER_KEY,
    naming_another,
    open_folder,
    read_checkpoint,
    read_settings,
)
from verl_lightning.strategies.compiled import compile_block
from verl_lightning.strategies.fsdp.background import BackgroundSaves, check_links, remove_checkpoint
from verl_lightning.strategies.fsdp.checkpoint import (
    FORMAT,
    load_sharded_model,
    load_sharded_optimizer,
    load_whole_model,
    load_whole_optimizer,
    save_sharded,
)
from verl_lightning.strategies.fsdp.groups import FSDPGroups, check_shares, packed_attention
from verl_lightning.strategies.fsdp.shard import (
    free_gathered_weights,
    gradients_kept_local,
    receive_weights,
    shard,
)
from verl_lightning.strategies.host_groups import in_seconds
from verl_lightning.strategies.memory import ModelMemory, sharded_memory
from verl_lightning.strategies.process_group import WatchedStrategy
from verl_lightning.types import BatchT, Scores, TokenBatch


class FSDPStrategy(FSDPGroups, WatchedStrategy, OpenModelParallelStrategy):
    """Every process holds a part of each weight and sees its share of the data; weights are gathered block by block.

    ``trainer.precision: bf16-mixed`` keeps weights in their own type, gathers them in bfloat16, computes under
    autocast, which leaves the sums between layers in float32, and reduces gradients in float32. Checkpoints are folders
    in torch's distributed format, which any number of processes can load.

    Args:
        replicate_size: Copies of the model, each sharded over the other processes (HSDP). Put one in each node to
            keep gathers inside nodes.
        sequence_parallel_size: Ranks that share each sequence: between them its activations, for lengths that one
            device can't hold. They see the same data, and weights are sharded over them as over others. Needs packed
            sequences, and attention heads that it divides.
        reshard_after_forward: Free a block's gathered weights after its forward pass and gather them again for its
            backward pass: less memory, more traffic.
        accumulate_whole: Add up whole gradients over micro-batches and reduce them once: less traffic, but 4 bytes
            of memory for each weight on every device. False reduces them after each micro-batch.
        cpu_offload: Keep weights, gradients and optimizer state in the host's memory, and step there.
        async_save: Write checkpoints while training goes on, from a copy in the host's memory. A checkpoint gets its
            name once it is whole and on the disk, and what it makes needless is deleted after that.
        compile: Compile each block and the log-probs with ``torch.compile``; pays when batches share their shapes.
        timeout: Longest wait for the other processes in a collective operation, in seconds.
        process_group_backend: `nccl`, `gloo` or another one of torch; null takes the device's own.
    """

    adamw = LocalAdamW
    _own_precision: Precision | None = None
    holds_whole_models = False

    def __init__(
        self,
        replicate_size: int = 1,
        sequence_parallel_size: int = 1,
        reshard_after_forward: bool = True,
        accumulate_whole: bool = True,
        cpu_offload: bool = False,
        async_save: bool = False,
        compile: bool = False,
        timeout: float | timedelta = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        for name, size in (("replicate_size", replicate_size), ("sequence_parallel_size", sequence_parallel_size)):
            if size < 1:
                raise ValueError(f"`fsdp.{name}` must be at least 1, got {size}.")
        self.timeout = in_seconds(timeout)
        super().__init__(process_group_backend=process_group_backend, timeout=timedelta(seconds=self.timeout))
        self.replicate_size = replicate_size
        self.sequence_parallel_size = sequence_parallel_size
        if sequence_parallel_size > 1:
            self.image_obstacle = "`fsdp.sequence_parallel_size` shares out packed tokens alone. Set it to 1."
        self.reshard_after_forward = reshard_after_forward
        self.accumulate_whole = accumulate_whole
        self.cpu_offload = cpu_offload
        self.async_save = async_save
        self._saves: BackgroundSaves | None = None
        self.compile = compile
        self._trained: list[TokenScorer] = []
        self._kept_local: set[nn.Module] = set()  # models within `no_gradient_sync`

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._own_precision or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and plugin.precision not in ("32-true", "bf16-mixed"):
            raise MisconfigurationException(
                f"`fsdp` knows `trainer.precision` 32-true and bf16-mixed, got {plugin.precision}. For weights that are"
                " stored in bfloat16, set the model's `dtype: bfloat16`."
            )
        self._own_precision = plugin

    @override
    def setup_environment(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        world = self.num_nodes * self.num_processes
        if environment.creates_processes_externally and environment.world_size() != world:
            raise MisconfigurationException(
                f"{environment.world_size()} processes were launched, but `trainer.devices` ({self.num_processes})"
                f" times `trainer.num_nodes` ({self.num_nodes}) is {world}. Make them equal, or set `devices: auto`."
            )
        self.check_world(world)
        self.set_mesh(data_parallel_size=world, tensor_parallel_size=1)
        super().setup_environment()
        self.start_groups(world)
        if self.async_save:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
            self._saves = BackgroundSaves(group, is_writer=self.is_global_zero)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.async_save:
            check_links(trainer.checkpoint_callbacks)

    @override
    def choose_backend(self, backend: str) -> str:
        # Norms of offloaded gradients are summed where they are: on the host.
        return "cpu:gloo,cuda:nccl" if self.cpu_offload and backend == "nccl" else backend

    @override
    def model_to_device(self) -> None:
        if not self.cpu_offload:
            super().model_to_device()

    @override
    def make_model(self, config: ModelConfig, head: Head, *, trainable: bool) -> TokenScorer:
        if self.sequence_parallel_size > 1:
            config = packed_attention(config)
        source = self._open_on_first_rank(config, head, trainable)
        model = build_skeleton(config, head, trainable=trainable)
        if self.sequence_parallel_size > 1:
            check_shares(model, self.sequence_parallel_size)
            model.sequence_group = self.model_parallel_group
        model.is_compiled = self.compile
        if self._is_mixed:
            model.backbone.get_input_embeddings().register_forward_hook(start_in_float32)
        blocks = language_blocks(model.backbone)  # a rank whose batch has no images gathers no tower's blocks
        if self.compile:
            for block in blocks:
                compile_block(block)
        shard(
            model,
            blocks,
            mesh=self.shard_mesh,
            precision=self._mixed_precision(),
            reshard_after_forward=self.reshard_after_forward,
            cpu_offload=self.cpu_offload,
        )
        receive_weights(model, source, config.path, device=self.root_device, cpu_offload=self.cpu_offload)
        if trainable:
            self._trained.append(model)
        return model

    @override
    def make_router_replay(self, model: TokenScorer) -> RouterReplay:
        for key, is_set in {"compile": self.compile, "sequence_parallel_size": self.sequence_parallel_size > 1}.items():
            if is_set:
                raise MisconfigurationException(
                    f"`model.update.router_replay` reads each router's choice in each pass, which `fsdp.{key}` does not"
                    f" allow. Take `fsdp.{key}` or `model.update.router_replay` out."
                )
        return super().make_router_replay(model)

    @override
    def plan_memory(
        self, size: ModelSize, config: ModelConfig, tokens: int | None, *, accumulates: bool
    ) -> ModelMemory:
        return sharded_memory(
            size,
            self.compute_types(config),
            None if tokens is None else -(-tokens // self.sequence_parallel_size),
            shards=dist.get_world_size() // self.replicate_size,
            keeps_gathered=not self.reshard_after_forward,
            accumulates_whole=self.accumulate_whole and accumulates,
            on_host=self.cpu_offload,
        )

    @override
    def compute_types(self, config: ModelConfig) -> Compute:
        return replace(super().compute_types(config), is_fused=self.compile)

    @override
    def forward(
        self, model: nn.Module, micro_batches: Sequence[TokenBatch], *, with_entropy: bool = False
    ) -> list[Scores]:
        count = self._largest_count(micro_batches)
        padded = [*micro_batches, *[blank(micro_batches[0])] * (count - len(micro_batches))]
        with torch.inference_mode(False):  # what it creates could not be gathered or trained later
            scores = super().forward(model, padded, with_entropy=with_entropy)
        free_gathered_weights(model)
        return scores[: len(micro_batches)]

    @override
    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Sequence[BatchT],
        loss_fn: LossFn[BatchT],
        *,
        with_entropy: bool = False,
    ) -> list[Mapping[str, Metric]]:
        for _ in range(self._largest_count(micro_batches) - len(micro_batches)):
            with self.no_gradient_sync(model):
                self._backward_nothing(model, blank(micro_batches[0]))
        return super().forward_backward(model, micro_batches, loss_fn, with_entropy=with_entropy)

    @override
    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        # Of the local parts, since operations on hundreds of distributed tensors keep the host busy for long.
        own = super().gradient_norm(parameters).float().to(self.root_device)
        squares = own.square()
        dist.all_reduce(squares, group=self.shard_mesh.get_group("shard"))
        return squares.sqrt()

    @override
    def named_weights(self, model: TokenScorer, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        free_gathered_weights(model)
        return ((name, whole(as_type(weight, dtype))) for name, weight in merged_weights(model.backbone))

    @override
    def adapter_weights(self, model: TokenScorer) -> dict[str, Tensor]:
        free_gathered_weights(model)
        return super().adapter_weights(model)

    @override
    @contextmanager
    def no_gradient_sync(self, model: nn.Module) -> Iterator[None]:
        if not self.accumulate_whole or model in self._kept_local:
            yield
            return
        self._kept_local.add(model)
        try:
            with gradients_kept_local(cast(FSDPModule, model), keep_weights=not self.reshard_after_forward):
                yield
        finally:
            self._kept_local.discard(model)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Enter `no_gradient_sync` of all trained models, for each batch but the last of Lightning's accumulation."""
        with gradients_unsynced(self, self._trained):
            yield

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("`fsdp` writes checkpoints of its own and takes no `storage_options`.")
        path = Path(self.broadcast(filepath))
        if self._saves is not None:
            self._saves.start(checkpoint, path)
        else:
            save_sharded(checkpoint, path, is_writer=self.is_global_zero)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self._saves is not None:
            self._saves.remove(Path(filepath))
        else:
            remove_checkpoint(Path(filepath), is_writer=self.is_global_zero)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._saves is not None:
            self._saves.settle()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if self._saves is not None:
            self._saves.wait()
        path = Path(self.broadcast(checkpoint_path))
        if not FORMAT.is_at(path):
            return read_checkpoint(path, weights_only=weights_only, mmap=True)
        # Tensors follow once the module has seen that they fit; see `load_model_state_dict`.
        empty: dict[str, Any] = {"state_dict": {}, "optimizer_states": [], READER_KEY: open_folder(path)}
        return read_settings(path, weights_only=weights_only) | empty

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        if (reader := checkpoint.get(READER_KEY)) is not None:
            with naming_another(reader.folder):
                load_sharded_model(self.model, reader)
        else:
            load_whole_model(self.model, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.model is not None
        for index, optimizer in enumerate(self.optimizers):
            if (reader := checkpoint.get(READER_KEY)) is not None:
                with naming_another(reader.folder):
                    load_sharded_optimizer(self.model, optimizer, index, reader)
            else:
                load_whole_optimizer(self.model, optimizer, checkpoint["optimizer_states"][index])

    @override
    def teardown(self) -> None:
        self._trained.clear()
        saves, self._saves = self._saves, None
        try:
            if saves is not None:
                saves.close()
        finally:
            super().teardown()

    @property
    def _is_mixed(self) -> bool:
        return self.precision_plugin.precision == "bf16-mixed"

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        if self._is_mixed:  # autocast rounds what layers read, and not what blocks pass on
            return MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)

    def _open_on_first_rank(
        self, config: ModelConfig, head: Head, trainable: bool
    ) -> Iterator[dict[str, Tensor]] | None:
        """The model's weights on rank 0, in parts; its failure is everybody's, lest the others wait for weights."""
        source, is_open = None, False
        try:
            if self.is_global_zero:
                source = stream_scorer(config, head, trainable=trainable)
            is_open = True
        finally:
            is_everywhere = self.broadcast(is_open)
        if not is_everywhere:
            raise RunError(f"rank 0 could not load `path: {config.path}`; its message says why.")
        return source

    def _largest_count(self, micro_batches: Sequence[TokenBatch]) -> int:
        """Most micro-batches of any rank: each pass gathers weights from all ranks, so all make as many."""
        count = len(micro_batches)
        return count if self.data_parallel_size == 1 else self.largest_over_ranks(count)  # of one sequence: as many

    def _backward_nothing(self, model: nn.Module, batch: TokenBatch) -> None:
        """Take part in a pass of the other ranks; adds zero to the gradients."""
        with self.precision_plugin.forward_context():
            scores = self._call(model, batch, False)
        parts = [part for part in (scores.log_probs, scores.values) if part is not None]
        loss = sum(torch.where(batch.response_mask, part, 0.0).sum() for part in parts)
        self.backward(cast(Tensor, loss), None)


def start_in_float32(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """A hook of the embedding: what blocks add to its output then stays in float32 too."""
    del module, inputs
    return output.float()
