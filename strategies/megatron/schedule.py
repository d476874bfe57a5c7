"""Runs micro-batches through Megatron's schedules, and brings the last stage's results to every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_lightning.metrics import Metric
from verl_lightning.ranges import named_range
from verl_lightning.strategies.megatron.scorer import MegatronScorer, ScoreTokens
from verl_lightning.strategies.megatron.tokens import ModelTokens, model_tokens
from verl_lightning.types import Scores, TokenBatch

Finish = Callable[[Scores, Any], tuple[Tensor, Any]]
"""From a micro-batch's scores and itself to its loss and a result."""


def run_schedule(
    model: MegatronScorer,
    micro_batches: Sequence[TokenBatch],
    finish: Finish,
    *,
    with_entropy: bool,
    forward_only: bool,
) -> list[Any]:
    """Score micro-batches, and unless ``forward_only`` add up their gradients. Collective over the model's ranks.

    Losses are neither divided nor averaged.

    Args:
        model: Model with its pieces.
        micro_batches: Micro-batches in order; every rank of the model has the same.
        finish: Function from scores and a micro-batch to its loss and result; called on the last stage alone.
        with_entropy: Score the entropy too.
        forward_only: Leave gradients out.

    Returns:
        What ``finish`` returned beside each loss; nothing on other stages than the last.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    names = model.score_names(with_entropy=with_entropy)
    work = [(batch, model_tokens(batch, slicing=model.slicing, packs=model.packs)) for batch in micro_batches]

    def forward_step(items: Iterator[tuple[TokenBatch, ModelTokens]], chunk: Any) -> tuple[Tensor, Any]:
        batch, tokens = next(items)
        scorer = ScoreTokens(model=model, tokens=tokens, temperature=batch.temperature, with_entropy=with_entropy)
        with named_range("micro_batch"), _replaying(model, batch, tokens):
            output = chunk(
                tokens.input_ids, tokens.position_ids, None, packed_seq_params=tokens.packed, output_processor=scorer
            )
        return output, partial(_finish, finish=finish, names=names, batch=batch)

    model.recorded_experts.clear()
    is_single = len(model.chunks) == 1
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(work) if is_single else [iter(work) for _ in model.chunks],
        model=list(model.chunks),
        num_microbatches=len(work),
        seq_length=work[0][1].input_ids.shape[1],
        micro_batch_size=work[0][1].input_ids.shape[0],
        forward_only=forward_only,
    )
    return results


@contextmanager
def _replaying(model: MegatronScorer, batch: TokenBatch, tokens: ModelTokens) -> Iterator[None]:
    """Replay or record the experts of a micro-batch, where the module has asked for it."""
    if model.router_replay is None:
        yield
        return
    with model.router_replay.scoring(batch, tokens.read_from(batch)) as recorded:
        yield
    model.recorded_experts += recorded


def _finish(output: Tensor, *, finish: Finish, names: tuple[str, ...], batch: TokenBatch) -> tuple[Tensor, Tensor, Any]:
    """Return the loss, a count of tokens and the result, as Megatron wants them where it divides nothing."""
    loss, result = finish(Scores(**dict(zip(names, output, strict=True))), batch)
    # A copy: the schedule may change the loss in place, and metrics may share its memory.
    return loss.clone(), torch.zeros((), dtype=torch.int, device=output.device), result


def scores_on_all_stages(
    parts: Sequence[Tensor], micro_batches: Sequence[TokenBatch], names: tuple[str, ...], device: torch.device
) -> list[Scores]:
    """Send the last stage's scores to every stage. Collective over the pipeline.

    Args:
        parts: Scores of each micro-batch, stacked by kind, on the last stage.
        micro_batches: Micro-batches that were scored, which say the shapes.
        names: Names of the kinds.
        device: Device of the scores.
    """
    shapes = [(len(names), *batch.response_mask.shape) for batch in micro_batches]
    if stages() > 1:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.cat([part.flatten() for part in parts]) if parts else torch.empty(sum(sizes), device=device)
        dist.broadcast(flat, _last_rank(), group=_pipeline_group())
        parts = [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
    return [Scores(**dict(zip(names, part, strict=True))) for part in parts]


def metrics_on_all_stages(results: list[Mapping[str, Metric]]) -> list[Mapping[str, Metric]]:
    """The last stage's metrics on every stage. Collective over the pipeline."""
    if stages() == 1:
        return results
    plain = [{name: Metric(m.kind, float(m.total), float(m.weight)) for name, m in part.items()} for part in results]
    box: list[Any] = [plain]
    dist.broadcast_object_list(box, _last_rank(), group=_pipeline_group())
    return list(box[0])


def stages() -> int:
    """Stages of the pipeline."""
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_world_size())


def _last_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_last_rank())


def _pipeline_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
    return group
