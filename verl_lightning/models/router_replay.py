"""Sends tokens to the experts that an earlier pass over the same tokens chose: router replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_lightning.compat.transformers import top_k_of, top_k_routers
from verl_lightning.metrics import Metric, mean
from verl_lightning.types import TokenBatch

OWN_CHOICE = -1
"""In the place of an expert's number: the router chooses by itself."""

_TOP_K = (torch.topk, Tensor.topk)


@dataclass(frozen=True, kw_only=True)
class ReadTokens:
    """The tokens of a batch in the order in which a model's layers read them."""

    positions: Int[Tensor, " tokens"]
    """Position of each token in the flattened batch."""

    places: Int[Tensor, " tokens"]
    """Position of each token among those that the layers read."""

    total: int
    """Number of tokens that the layers read, padding of their own included."""


class RouterReplay:
    """Records the experts that a mixture's routers choose for each token, and makes them choose the same again.

    A small change of the weights, or other kernels, can send a token to other experts, and its log-prob then jumps. In
    a replayed pass the chosen experts are those of an earlier pass; their weights are computed anew from the router's
    own scores, so the router gets its gradient.

    Args:
        model: The mixture as transformers or Megatron builds it; its routers get hooks.
        model_type: Model type of its ``config.json``, for messages.

    Raises:
        ValueError: If the model has no routers of the usual kind.
    """

    def __init__(self, model: nn.Module, model_type: str) -> None:
        self._routers = top_k_routers(model)
        if not self._routers:
            raise ValueError(
                f"the model type `{model_type}` has no routers that choose experts by `topk`, so there"
                " is nothing to replay: take `model.update.router_replay` out."
            )
        self._given: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        self._mode: _ReplayedTopK | None = None
        self._within = ExitStack()
        self._differing: list[Tensor] = []
        for layer, router in enumerate(self._routers):
            router.register_forward_pre_hook(partial(self._enter, layer))
            router.register_forward_hook(partial(self._leave, layer), always_call=True)

    @contextmanager
    def scoring(self, batch: TokenBatch, read: ReadTokens) -> Iterator[list[Tensor]]:
        """Replay the batch's experts in a forward pass, and in its backward pass, which may compute activations again.

        Args:
            batch: Batch that the model scores within the context.
            read: Its tokens as the layers read them.

        Yields:
            A list. After the context it holds, for a batch without experts that is scored without gradient, the
            experts that were chosen, as `Scores.experts` has them.
        """
        found: list[Tensor] = []
        self._given = None
        if batch.experts is not None:
            self._given = _placed(batch.experts.flatten(0, 1)[read.positions], read.places, read.total)
        elif not torch.is_grad_enabled():
            self._recorded = {}
        try:
            yield found
            if self._recorded is not None:
                chosen = torch.stack([self._recorded[layer] for layer in sorted(self._recorded)], dim=1)
                experts = _placed(chosen[read.places].to(torch.int16), read.positions, batch.input_ids.numel())
                experts = experts.view(*batch.input_ids.shape, *experts.shape[1:])
                found.append(experts.masked_fill(~batch.attention_mask[..., None, None], OWN_CHOICE))
        finally:
            self._recorded = None

    def metrics(self, experts: Int[Tensor, "batch sequence layers chosen"] | None) -> dict[str, Metric]:
        """Return the metrics of the passes since the last call.

        Args:
            experts: Experts that the tokens went to; None leaves out the load.

        Returns:
            The share of replayed routes (a route is one token in one layer) whose router would have chosen others, and
            the load of the busiest expert of a layer over the mean load, as a mean over layers.
        """
        metrics = {}
        if self._differing:
            replayed, differing = torch.stack(self._differing).sum(0)
            metrics["actor/router_replay/changed_routes"] = mean(differing, replayed)
        if experts is not None:
            metrics["actor/experts/max_load"] = mean(self._max_load(experts))
        self._differing = []
        return metrics

    def _max_load(self, experts: Int[Tensor, "batch sequence layers chosen"]) -> Float[Tensor, ""]:
        chosen = experts.permute(2, 0, 1, 3).flatten(1).long() + 1  # 0 for tokens that no expert was recorded for
        num_experts = self._routers[0].weight.shape[0]
        counts = torch.zeros(len(chosen), num_experts + 1, device=chosen.device)
        counts = counts.scatter_add(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))[:, 1:]
        return (counts.amax(1) / counts.mean(1).clamp(min=1e-9)).mean()

    def _enter(self, layer: int, router: nn.Module, *_: Any) -> None:
        given = None if self._given is None else self._given[:, layer].long()
        self._mode = _ReplayedTopK(router, given)
        self._within.enter_context(self._mode)

    def _leave(self, layer: int, *_: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            return
        self._within.close()
        if mode.chosen is not None and self._recorded is not None:
            self._recorded[layer] = mode.chosen
        if mode.differing is not None and torch.is_grad_enabled():
            self._differing.append(mode.differing)


def _placed(chosen: Tensor, places: Tensor, total: int) -> Tensor:
    """Put rows at their places among ``total`` rows, of which the others are `OWN_CHOICE`."""
    return chosen.new_full((total, *chosen.shape[1:]), OWN_CHOICE).index_copy(0, places, chosen)


class _ReplayedTopK(TorchFunctionMode):
    """Gives a router's ``topk`` over its experts the choice that is replayed, with the scores of that choice."""

    def __init__(self, router: Any, given: Int[Tensor, "tokens chosen"] | None) -> None:
        super().__init__()
        self._top_k, self._num_experts, self._given = top_k_of(router), router.weight.shape[0], given
        self.chosen: Tensor | None = None
        self.differing: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return output
        scores, own = args[0], output.indices
        # Others choose among groups of experts.
        if scores.dim() != 2 or scores.shape[-1] != self._num_experts or own.shape[-1] != self._top_k:
            return output
        self.chosen = own if self._given is None else torch.where(self._given >= 0, self._given, own)
        if self._given is None:
            return output
        self.differing = count_differing(own, self._given)
        return torch.return_types.topk((scores.gather(-1, self.chosen), self.chosen))


def count_differing(own: Int[Tensor, "tokens chosen"], given: Int[Tensor, "tokens chosen"]) -> Int[Tensor, " 2"]:
    """Count the tokens whose experts are given, and of these those whose router would choose other ones."""
    is_given: Bool[Tensor, " tokens"] = (given >= 0).all(-1)
    differs = (own.sort(-1).values != given.sort(-1).values).any(-1)
    return torch.stack([is_given.sum(), (is_given & differs).sum()])
