"""The strategy itself: Lightning's hooks and our contract, on Megatron's pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from verl_lightning.metrics import Metric, MetricTable
from verl_lightning.models.config import ModelConfig, OptimConfig
from verl_lightning.models.router_replay import RouterReplay
from verl_lightning.models.scorer import Head, TokenScorer
from verl_lightning.models.size import ModelSize
from verl_lightning.models.weights import as_type
from verl_lightning.seeding import run_seed
from verl_lightning.strategies.base import LossFn, blank, gradients_unsynced
from verl_lightning.strategies.checkpoints import READER_KEY, naming_another, open_folder, read_checkpoint
from verl_lightning.strategies.host_groups import in_seconds
from verl_lightning.strategies.megatron.checkpoint import load_models, load_optimizer, load_other, save_folder
from verl_lightning.strategies.megatron.config import DataParallelConfig, ParallelSizes, TransformerOptions
from verl_lightning.strategies.megatron.groups import MegatronGroups
from verl_lightning.strategies.megatron.memory import megatron_memory
from verl_lightning.strategies.megatron.model import build_model
from verl_lightning.strategies.megatron.optimizer import MegatronOptimizer, make_megatron_optimizer
from verl_lightning.strategies.megatron.portable import FORMAT, read_settings
from verl_lightning.strategies.megatron.provider import ModelSettings
from verl_lightning.strategies.megatron.runtime import import_megatron, start_model_parallel, stop_model_parallel
from verl_lightning.strategies.megatron.schedule import metrics_on_all_stages, run_schedule, scores_on_all_stages
from verl_lightning.strategies.megatron.scorer import MegatronScorer
from verl_lightning.strategies.megatron.weights import exported_adapter, exported_weights
from verl_lightning.strategies.memory import ModelMemory
from verl_lightning.strategies.process_group import WatchedStrategy
from verl_lightning.types import BatchT, Scores, TokenBatch

LOSS = "megatron/loss"
"""Name under which a micro-batch's loss travels between stages."""


class MegatronPrecision(Precision):
    """Leaves casting to Megatron: weights and activations in bfloat16, the optimizer's weights in float32."""

    precision = "bf16-mixed"


class MegatronStrategy(MegatronGroups, WatchedStrategy, LightningDDPStrategy):
    """Megatron-Core: layers, stages, sequences and experts spread over processes, and data parallelism over the rest.

    ``trainer.precision: bf16-mixed``, or a model's ``dtype: bfloat16``, computes in bfloat16 beside float32 weights of
    the optimizer's.

    Args:
        tensor_parallel_size: Processes that share each layer.
        pipeline_parallel_size: Stages of the stack of layers.
        virtual_pipeline_parallel_size: Pieces of the stack on each stage.
        context_parallel_size: Processes that share each sequence; needs TransformerEngine.
        expert_parallel_size: Processes that share a mixture's experts.
        expert_tensor_parallel_size: Processes that share each expert.
        sequence_parallel: Whether tensor-parallel processes share what lies between their layers too.
        use_distributed_optimizer: True reduce-scatters gradients and shards the optimizer's state over data-parallel
            processes; False all-reduces gradients, and each process holds all of that state.
        ddp: Options for the travel of gradients and weights between data-parallel processes.
        transformer: Options for the computation of layers.
        bridge: Package that maps weights between Hugging Face and Megatron.
        micro_batch_size: Sequences in a forward pass under automatic optimization (SFT); null takes the whole batch.
        timeout: Longest wait for the other processes in a collective operation, in seconds.
        process_group_backend: `nccl`, `gloo` or another one of torch; null takes the device's own.

    Raises:
        ValueError: If a size does not fit.
    """

    _own_precision: Precision | None = None
    distils = False

    image_obstacle = "`trainer.strategy: megatron` passes tokens alone on to its stages. Use `fsdp`, `ddp` or `auto`."

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        virtual_pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        expert_tensor_parallel_size: int = 1,
        sequence_parallel: bool = False,
        use_distributed_optimizer: bool = True,
        ddp: DataParallelConfig = DataParallelConfig(),
        transformer: TransformerOptions = TransformerOptions(),
        bridge: Literal["megatron_bridge", "mbridge"] = "megatron_bridge",
        micro_batch_size: int | None = None,
        timeout: float | timedelta = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        self.timeout = in_seconds(timeout)
        super().__init__(timeout=timedelta(seconds=self.timeout), process_group_backend=process_group_backend)
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"`megatron.micro_batch_size` must be at least 1, got {micro_batch_size}.")
        if sequence_parallel and tensor_parallel_size == 1:
            raise ValueError("`megatron.sequence_parallel` needs `megatron.tensor_parallel_size` above 1.")
        self.sizes = ParallelSizes(
            tensor=tensor_parallel_size,
            pipeline=pipeline_parallel_size,
            virtual_pipeline=virtual_pipeline_parallel_size,
            context=context_parallel_size,
            expert=expert_parallel_size,
            expert_tensor=expert_tensor_parallel_size,
        )
        self.sequence_parallel = sequence_parallel
        self.use_distributed_optimizer = use_distributed_optimizer
        self.ddp_options = ddp
        self.transformer = transformer
        self.bridge = bridge
        self.micro_batch_size = micro_batch_size
        self._trained: list[MegatronScorer] = []

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._own_precision or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and plugin.precision not in ("32-true", "bf16-mixed"):
            raise MisconfigurationException(
                f"`megatron` knows `trainer.precision` 32-true and bf16-mixed, got {plugin.precision}."
            )
        is_mixed = plugin is not None and plugin.precision == "bf16-mixed"
        self._own_precision = MegatronPrecision() if is_mixed else plugin

    @override
    def setup_environment(self) -> None:
        import_megatron()
        self.sizes.check_world(self.num_nodes * self.num_processes)
        super().setup_environment()
        timeout = timedelta(seconds=self.timeout)
        start_model_parallel(self.sizes, seed=run_seed(), timeout=timeout)
        self.start_model_parallel_group(timeout)

    @override
    def configure_ddp(self) -> None:
        """Does nothing: each model is wrapped in Megatron's own when it is made."""

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
            raise MisconfigurationException(
                "`trainer.gradient_clip_algorithm: value` has no effect under `megatron`. Clip by `norm`."
            )
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            return
        # Lightning's would copy the first rank's part of the model to all others.
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.setup_precision_plugin()

    @override
    def make_model(self, config: ModelConfig, head: Head, *, trainable: bool) -> TokenScorer:
        settings = ModelSettings(
            sizes=self.sizes,
            sequence_parallel=self.sequence_parallel,
            transformer=self.transformer,
            is_bf16=self._is_bf16(config),
            device=self.root_device,
        )
        model = build_model(
            config,
            head,
            trainable=trainable,
            settings=settings,
            ddp_options=self.ddp_options,
            use_distributed_optimizer=self.use_distributed_optimizer,
            bridge=self.bridge,
        )
        if trainable:
            self._trained.append(model)
        return model

    @override
    def plan_memory(
        self, size: ModelSize, config: ModelConfig, tokens: int | None, *, accumulates: bool
    ) -> ModelMemory:
        del accumulates
        return megatron_memory(
            size,
            tokens,
            sizes=self.sizes,
            transformer=self.transformer,
            ddp=self.ddp_options,
            optimizer_shards=self.data_parallel_size if self.use_distributed_optimizer else 1,
            is_bf16=self._is_bf16(config),
        )

    @override
    def make_optimizer(self, model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
        chunks = list(cast(MegatronScorer, model).chunks)
        return make_megatron_optimizer(
            chunks,
            config,
            use_distributed_optimizer=self.use_distributed_optimizer,
            is_bf16=cast(Any, chunks[0]).config.bf16,
        )

    @override
    def forward(
        self, model: nn.Module, micro_batches: Sequence[TokenBatch], *, with_entropy: bool = False
    ) -> list[Scores]:
        scorer, was_training = cast(MegatronScorer, model), model.training
        names = scorer.score_names(with_entropy=with_entropy)
        model.eval()
        try:
            with torch.no_grad():
                parts = run_schedule(
                    scorer,
                    self._even(micro_batches),
                    lambda scores, _: (torch.zeros((), device=self.root_device), _stack(scores, names)),
                    with_entropy=with_entropy,
                    forward_only=True,
                )
        finally:
            model.train(was_training)
        scores = scores_on_all_stages(parts[: len(micro_batches)], micro_batches, names, self.root_device)
        if not scorer.recorded_experts:
            return scores
        experts = scorer.recorded_experts[: len(scores)]
        return [replace(each, experts=those) for each, those in zip(scores, experts, strict=True)]

    @override
    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Sequence[BatchT],
        loss_fn: LossFn[BatchT],
        *,
        with_entropy: bool = False,
    ) -> list[Mapping[str, Metric]]:
        results = run_schedule(
            cast(MegatronScorer, model),
            self._even(micro_batches),
            loss_fn,
            with_entropy=with_entropy,
            forward_only=False,
        )
        return metrics_on_all_stages(results[: len(micro_batches)])

    @override
    def train_loss(
        self, model: nn.Module, batch: BatchT, loss_fn: LossFn[BatchT], *, with_entropy: bool = False
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        """Runs the backward pass too, as a schedule must: that of the returned loss does nothing."""
        example = batch.rows_per_example
        size = max(example, (self.micro_batch_size or len(batch)) // example * example)
        micro_batches = [batch.select(slice(start, start + size)) for start in range(0, len(batch), size)]

        def finish(scores: Scores, part: BatchT) -> tuple[Tensor, Mapping[str, Metric]]:
            loss, metrics = loss_fn(scores, part)
            return loss, {**metrics, LOSS: Metric("sum", loss.detach().clone())}

        table = MetricTable()
        for metrics in self.forward_backward(model, micro_batches, finish, with_entropy=with_entropy):
            table.add(metrics)
        merged = dict(table.merged)
        loss = torch.as_tensor(merged.pop(LOSS).total, device=self.root_device)
        return loss.detach().clone().requires_grad_(), merged

    @override
    def prepare_step(self, optimizer: torch.optim.Optimizer, max_norm: float, *, scale: Tensor | float = 1.0) -> Tensor:
        return cast(MegatronOptimizer, optimizer).prepare(max_norm, float(scale))

    @override
    def named_weights(self, model: TokenScorer, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        weights = exported_weights(cast(MegatronScorer, model), merges_adapters=True)
        return ((name, as_type(weight, dtype)) for name, weight in weights)

    @override
    def make_router_replay(self, model: TokenScorer) -> RouterReplay:
        shares = {"pipeline": self.sizes.pipeline, "context": self.sizes.context}
        keys = [f"megatron.{name}_parallel_size" for name, size in shares.items() if size > 1]
        keys += ["megatron.sequence_parallel"] if self.sequence_parallel else []
        if keys:
            raise MisconfigurationException(
                f"`model.update.router_replay` needs ranks that route all tokens through all layers, which `{keys[0]}`"
                " does not give it. Take one of the two out."
            )
        return RouterReplay(cast(MegatronScorer, model).chunks, model.backbone.config.model_type)

    @override
    def adapter_weights(self, model: TokenScorer) -> dict[str, Tensor]:
        return exported_adapter(cast(MegatronScorer, model))

    @override
    @contextmanager
    def no_gradient_sync(self, model: nn.Module) -> Iterator[None]:
        scorer = cast(MegatronScorer, model)
        config: Any = cast(Any, scorer.chunks[0]).config
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
        no_sync, config.no_sync_func = config.no_sync_func, None
        try:
            with ExitStack() as stack:
                for chunk in scorer.chunks:
                    stack.enter_context(cast(Any, chunk).no_sync())
                yield
        finally:
            config.finalize_model_grads_func, config.no_sync_func = finalize, no_sync

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Enter `no_gradient_sync` of all trained models, for each batch but the last of Lightning's accumulation."""
        with gradients_unsynced(self, self._trained):
            yield

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # `save_checkpoint` writes it, in parts

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("`megatron` writes checkpoints of its own and takes no `storage_options`.")
        with_optimizers = "optimizer_states" in checkpoint
        save_folder(
            checkpoint,
            Path(self.broadcast(filepath)),
            roles=self._roles,
            optimizers=cast(list[MegatronOptimizer], self.optimizers) if with_optimizers else [],
            is_writer=self.is_global_zero,
        )

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if not FORMAT.is_at(path):
            return read_checkpoint(path, weights_only=weights_only, mmap=True)
        with naming_another(path):
            settings = read_settings(path, weights_only=weights_only)
        return {**settings, "state_dict": {}, READER_KEY: open_folder(path)}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if (reader := checkpoint.get(READER_KEY)) is not None:
            with naming_another(reader.folder):
                load_models(reader, self._roles)
        else:
            load_other(checkpoint["state_dict"], self._roles)
        for optimizer in cast(list[MegatronOptimizer], self.optimizers):
            optimizer.inner.reload_model_params()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if (reader := checkpoint.get(READER_KEY)) is None:
            rank_zero_warn(
                "`ckpt_path` was written by another strategy: weights, counters and schedules go on, but AdamW starts"
                " anew, as its state has no form that all strategies share."
            )
            return
        pairs = zip(self._roles.items(), cast(list[MegatronOptimizer], self.optimizers), strict=True)
        with naming_another(reader.folder):
            for (role, model), optimizer in pairs:
                load_optimizer(reader, role, model, optimizer)

    @override
    def teardown(self) -> None:
        self._trained.clear()
        super().teardown()
        self.stop_model_parallel_group()
        stop_model_parallel()

    @property
    def _roles(self) -> dict[str, MegatronScorer]:
        assert self.lightning_module is not None
        return {name: m for name, m in self.lightning_module.named_children() if isinstance(m, MegatronScorer)}

    def _is_bf16(self, config: ModelConfig) -> bool:
        return self.precision_plugin.precision == "bf16-mixed" or config.dtype == "bfloat16"

    def _even(self, micro_batches: Sequence[BatchT]) -> Sequence[BatchT]:
        """Add blank micro-batches at the end, where all ranks must have as many or a schedule wants a multiple."""
        count = len(micro_batches)
        if self.sizes.expert > 1:  # ranks with other data hold experts that ours need
            count = self.largest_over_ranks(count)
        if self.sizes.virtual_pipeline > 1:
            count = -(-count // self.sizes.pipeline) * self.sizes.pipeline
        return [*micro_batches, *[blank(micro_batches[0])] * (count - len(micro_batches))]


def _stack(scores: Scores, names: tuple[str, ...]) -> Tensor:
    return torch.stack([getattr(scores, name) for name in names])
