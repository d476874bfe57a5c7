"""The one contract between algorithm and hardware: the operations that our modules ask of a Lightning strategy.

A module hands over whole mini-batches of micro-batches, since a pipeline schedule must own the loop over them.
The defaults fit any stock Lightning strategy of one process; see `as_contract`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from verl_lightning.compat.lightning import start_method
from verl_lightning.compat.torch import forget_gradient_scale, set_gradient_scale
from verl_lightning.metrics import Metric
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig, OptimConfig
from verl_lightning.models.lora import adapter_weights
from verl_lightning.models.router_replay import RouterReplay
from verl_lightning.models.scorer import Head, TokenScorer
from verl_lightning.models.size import Compute, ModelSize
from verl_lightning.models.weights import as_type, merged_weights, whole
from verl_lightning.ranges import named_range
from verl_lightning.strategies.host_groups import host_group
from verl_lightning.strategies.memory import ModelMemory, whole_memory
from verl_lightning.strategies.weight_decay import make_groups, part_state
from verl_lightning.types import BatchT, Scores, TokenBatch

LossFn = Callable[[Scores, BatchT], tuple[Tensor, Mapping[str, Metric]]]
"""From a model's scores and the micro-batch to a loss that is already divided by the totals of the whole optimizer
step over all ranks (so that micro-batches and ranks are summed, never averaged), and its metrics."""


class PostTrainingStrategy:
    """Mix-in with the operations that differ between back ends; none of them knows an algorithm.

    Those marked *collective* must be called by every rank, in the same order.
    """

    adamw: type[torch.optim.AdamW] = torch.optim.AdamW
    """Class of the AdamW that `make_optimizer` makes."""

    holds_whole_models = True
    """True where each rank has all weights of the models."""

    distils = True
    """True where models can tell their distributions, and compare with those of others."""

    image_obstacle: str | None = None
    """Reason why models can't be given images, as the end of a sentence; None if they can."""

    lightning_module: LightningModule | None
    precision_plugin: Precision
    root_device: torch.device

    def make_model(self, config: ModelConfig, head: Head, *, trainable: bool) -> TokenScorer:
        """Build one role's model and spread it over the devices. Collective; called in ``configure_model``.

        Args:
            config: Options of the model and of its training.
            head: Kind of scores that the model gives: those of a policy, of a critic, or both.
            trainable: False freezes every weight.
        """
        return build_scorer(config, head, trainable=trainable).to(self.root_device)

    def make_router_replay(self, model: TokenScorer) -> RouterReplay:
        """Prepare a mixture of experts from `make_model` so that choices of its routers can be replayed.

        Raises:
            ValueError: If the model has no such routers.
            MisconfigurationException: If the strategy can't replay them.
        """
        return RouterReplay(model.backbone, model.backbone.config.model_type)

    def make_optimizer(self, model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
        """AdamW over the trainable weights of a model, as Lightning wants it from ``configure_optimizers``."""
        groups = make_groups(model, config)
        optimizer = self.adamw(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        optimizer.register_load_state_dict_pre_hook(lambda own, state: {**part_state(own, model, state)})
        optimizer.register_step_post_hook(forget_gradient_scale)
        return optimizer

    def forward(
        self, model: nn.Module, micro_batches: Sequence[TokenBatch], *, with_entropy: bool = False
    ) -> list[Scores]:
        """Scores without gradient, in evaluation mode; the same on every rank of a model-parallel group. Collective."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.precision_plugin.forward_context():
                return [self._score(model, batch, with_entropy) for batch in micro_batches]
        finally:
            model.train(was_training)

    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Sequence[BatchT],
        loss_fn: LossFn[BatchT],
        *,
        with_entropy: bool = False,
    ) -> list[Mapping[str, Metric]]:
        """Add the gradient of one mini-batch, summed over its micro-batches and over ranks. Collective.

        Args:
            model: Model from `make_model`.
            micro_batches: This rank's share of the mini-batch; at least one, the numbers may differ between ranks.
            loss_fn: Gives each micro-batch's normalised loss and metrics.
            with_entropy: Score the entropy too, with its gradient.

        Returns:
            Each micro-batch's metrics.
        """
        metrics = []
        for index, batch in enumerate(micro_batches):
            is_last = index + 1 == len(micro_batches)
            with named_range("micro_batch"), nullcontext() if is_last else self.no_gradient_sync(model):
                loss, parts = self.train_loss(model, batch, loss_fn, with_entropy=with_entropy)
                cast(Strategy, self).backward(loss, None)
            metrics.append(parts)
        return metrics

    def train_loss(
        self, model: nn.Module, batch: BatchT, loss_fn: LossFn[BatchT], *, with_entropy: bool = False
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        """The loss of one batch with its graph, for whoever calls ``backward`` next: Lightning, under SFT."""
        with self.precision_plugin.forward_context():
            loss, metrics = loss_fn(self._call(model, batch, with_entropy), batch)
        return loss * self.gradient_divisor, metrics

    def clip_and_step(self, optimizer: LightningOptimizer, max_norm: float, *, count: bool) -> Tensor:
        """Clip the gradients to a global norm, step the optimizer, clear the gradients. Collective.

        A gradient that is not finite changes nothing, nor does one of zeros, which nothing was learnt from: weight
        decay and momentum rest too. The returned norm tells.

        Args:
            optimizer: Optimizer from ``LightningModule.optimizers()``.
            max_norm: Largest global norm; 0 does not clip.
            count: True if this step moves ``trainer.global_step``: one does in each iteration.

        Returns:
            The norm before clipping, over all ranks.
        """
        norm = self.prepare_step(optimizer.optimizer, max_norm)
        if count:
            optimizer.step()
        else:
            cast(Strategy, self).optimizer_step(optimizer.optimizer, closure=lambda: None)
        optimizer.zero_grad()
        return norm

    def prepare_step(self, optimizer: torch.optim.Optimizer, max_norm: float, *, scale: Tensor | float = 1.0) -> Tensor:
        """Have the next step scale and clip its gradients, or change nothing, as `clip_and_step` says. Collective.

        Nothing is read back from the device, so the host runs ahead, and no pass over the gradients is made: the
        fused optimizer does both while it steps.

        Args:
            optimizer: Optimizer from `make_optimizer`.
            max_norm: Largest global norm after scaling; 0 does not clip.
            scale: Factor on the gradients, above 0.

        Returns:
            The norm after scaling and before clipping, over all ranks.
        """
        norm = self.gradient_norm(with_gradient(optimizer)) * scale
        shrink = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        set_gradient_scale(optimizer, factor=shrink * scale, skips=~norm.isfinite() | (norm == 0))
        return norm

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Global 2-norm of the gradients over all ranks. Collective. Here: of this rank's parts of them."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in gradients])

    def named_weights(self, model: TokenScorer, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and whole weights, one at a time, adapters merged in; a value head is left out.

        Collective: every rank must exhaust the iterator.

        Args:
            model: Model with the weights.
            dtype: Type to which they are rounded before ranks send one another their parts; None leaves their own.
        """
        return ((name, as_type(weight, dtype)) for name, weight in merged_weights(model.backbone))

    def output_head(self, model: TokenScorer) -> Tensor:
        """Return the whole weight of a policy's output head, without gradient. Collective."""
        head: nn.Linear = model.backbone.get_output_embeddings()  # type: ignore[no-untyped-call]
        return whole(head.weight.detach()).to(self.root_device)

    def adapter_weights(self, model: TokenScorer) -> dict[str, Tensor]:
        """Return the weights that LoRA trains, whole, under the names of a PEFT adapter file. Collective."""
        return adapter_weights(model.backbone)

    def plan_memory(
        self, size: ModelSize, config: ModelConfig, tokens: int | None, *, accumulates: bool
    ) -> ModelMemory:
        """Estimate the memory that a model will take on one device, before it is built.

        Args:
            size: Size of the whole model.
            config: Options of the model and of its training.
            tokens: Tokens of the largest forward and backward pass, None where not known.
            accumulates: True if an optimizer step has several such passes.
        """
        del accumulates
        return whole_memory(size, self.compute_types(config), tokens, keeps_gradients=False)

    def compute_types(self, config: ModelConfig) -> Compute:
        """Return the types in which a model computes. Here: as Lightning's precision plugins have it."""
        stored, precision = 2 if config.dtype == "bfloat16" else 4, str(self.precision_plugin.precision)
        if precision.endswith("-mixed"):
            return Compute(width=2, stream_width=4)
        width = 2 if "16" in precision else stored
        return Compute(width=width, stream_width=width)

    def no_gradient_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes add up gradients on this rank only."""
        return nullcontext()

    @property
    def gradient_divisor(self) -> float:
        """Divisor of gradients in the back end; losses are multiplied by it, since ours are normalised already."""
        return 1.0

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different data."""
        return 1

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank among those that see different data."""
        return 0

    def sum_over_data_parallel(self, tensor: Tensor) -> Tensor:
        """The sum of every data-parallel rank's tensor, which is left as it was. Collective."""
        return tensor

    def gather_over_data_parallel(self, value: Any) -> list[Any]:
        """Every data-parallel rank's value, by rank; small picklable objects only. Collective."""
        return [value]

    @property
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that see this rank's data, each with a part of the model or of the sequences; None if it is alone.

        Whatever they learn from must be the same on each of them.
        """
        return None

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that see this rank's data, itself among them."""
        group = self.model_parallel_group
        return 1 if group is None else group.size()

    @property
    def model_parallel_rank(self) -> int:
        """Index of this rank among those that see its data."""
        group = self.model_parallel_group
        return 0 if group is None else group.rank()

    def gather_over_model_parallel(self, value: Any) -> list[Any]:
        """The value of each rank that sees this rank's data, by rank; picklable, tensors on the CPU. Collective."""
        return [value]

    def largest_over_ranks(self, number: int) -> int:
        """The largest number of any rank, of all there are. Collective; waits for other hosts, for no device."""
        return number

    def _score(self, model: nn.Module, batch: TokenBatch, with_entropy: bool) -> Scores:
        with named_range("micro_batch"):
            return cast(Scores, model(batch, with_entropy=with_entropy))

    def _call(self, model: nn.Module, batch: TokenBatch, with_entropy: bool) -> Scores:
        """The training forward pass."""
        return cast(Scores, model(batch, with_entropy=with_entropy))


def with_gradient(optimizer: torch.optim.Optimizer | LightningOptimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@contextmanager
def gradients_unsynced(strategy: PostTrainingStrategy, models: Iterable[nn.Module]) -> Iterator[None]:
    """Enter `no_gradient_sync` of several models, as for each batch but the last of Lightning's accumulation."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(strategy.no_gradient_sync(model))
        yield


def blank(batch: BatchT) -> BatchT:
    """Return one example of a batch, made such that nothing is learnt from it."""
    row = batch.select(slice(0, batch.rows_per_example))
    lengths = row.row_lengths and tuple(length._replace(scored=0) for length in row.row_lengths)
    return replace(row, response_mask=torch.zeros_like(row.response_mask), row_lengths=lengths)


class DataParallelMixin(PostTrainingStrategy):
    """Data-parallel arithmetic over a process group."""

    timeout: float

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """This rank and those that do the same work on other data; None is the world."""
        return None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the `DistributedSampler` by which Lightning gives this rank its share of the data."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    @override
    def data_parallel_size(self) -> int:
        return dist.get_world_size(self.data_parallel_group)

    @property
    @override
    def data_parallel_rank(self) -> int:
        return dist.get_rank(self.data_parallel_group)

    @override
    def sum_over_data_parallel(self, tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed, group=self.data_parallel_group)
        return summed

    @override
    def gather_over_data_parallel(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.data_parallel_size
        dist.all_gather_object(values, value, group=host_group(self.data_parallel_group, self.timeout))
        return values

    @override
    def gather_over_model_parallel(self, value: Any) -> list[Any]:
        values: list[Any] = [value] * self.model_parallel_size
        if (group := self.model_parallel_group) is not None:
            dist.all_gather_object(values, value, group=host_group(group, self.timeout))
        return values

    @override
    def largest_over_ranks(self, number: int) -> int:
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=host_group(None, self.timeout))
        return int(largest)


class _StockStrategy(PostTrainingStrategy):
    """Lends the defaults to a Lightning strategy that knows nothing of them."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def as_contract(strategy: Strategy) -> PostTrainingStrategy:
    """The strategy itself if it offers the contract, else the defaults around it.

    Raises:
        MisconfigurationException: If a stock strategy of several processes is given: its wrapping of the whole module
            does not fit several models that are trained in turn.
    """
    if isinstance(strategy, PostTrainingStrategy):
        return strategy
    if isinstance(strategy, ParallelStrategy):
        start = start_method(strategy)
        if start != "popen":  # `ddp_fork`, which Lightning chooses for several devices in a notebook, or `ddp_spawn`
            raise MisconfigurationException(
                f"`trainer.strategy` is `ddp_{start}`, whose processes end with the models that they build and leave"
                " none in this one. In a notebook use one device (`Trainer(devices=1)`); for several write a script"
                " with `Trainer(strategy='ddp')`, or use `verl-fit`."
            )
        raise MisconfigurationException(
            f"`trainer.strategy` is Lightning's own `{type(strategy).__name__}`, which wraps the whole module at once"
            " and cannot train several models in turn. Use `ddp` (ours takes its place) or `auto`."
        )
    return _StockStrategy(strategy)
