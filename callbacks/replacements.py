"""Goes on with the work of engines when one of them dies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from verl_lightning.faults import RunError
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.rollout.process import EngineDiedError

T = TypeVar("T")


class Replacements:
    """Has the work of engines done anew, on all ranks, when one of them has died.

    An engine may die whenever it is asked something, also while it takes the place of another or gets its weights.

    Args:
        limit: Most deaths of engines, of all ranks together.
        replace: Starts this rank's engine, unless it lives.
        sync_weights: Sends all engines the newest weights; takes part with a dead engine too. Collective.
    """

    def __init__(
        self,
        limit: int,
        *,
        replace: Callable[[PostTrainingModule], None],
        sync_weights: Callable[[PostTrainingModule], None],
    ) -> None:
        self._limit = limit
        self._replace = replace
        self._sync_weights = sync_weights
        self._num_deaths = 0

    def attempt(self, module: PostTrainingModule, work: Callable[[], T]) -> T:
        """Returns what some work of the engine yields, done anew while engines die in it. Collective.

        Args:
            module: Module whose policy the engines sample from.
            work: Function that asks the engine; may be called again. On all ranks, or on none, it is collective.

        Raises:
            RunError: If engines have died more often than they may.
        """
        result, has_died = self._on_all_ranks(module, work)
        while has_died:
            _, has_died = self._on_all_ranks(module, lambda: self._replace(module))
            if not has_died:
                _, has_died = self._on_all_ranks(module, lambda: self._sync_weights(module))
            if not has_died:
                result, has_died = self._on_all_ranks(module, work)
        assert result is not None
        return result[0]

    def _on_all_ranks(self, module: PostTrainingModule, step: Callable[[], T]) -> tuple[tuple[T] | None, bool]:
        """Returns what a step yields here, and whether an engine has died in it on any rank. Collective."""
        result, death = None, None
        try:
            result = (step(),)
        except EngineDiedError as error:
            death = error
            warnings.warn(f"{death} A new one takes its place.", stacklevel=2)
        num_deaths = sum_over_ranks(module, int(death is not None))
        self._num_deaths += num_deaths
        if num_deaths and self._num_deaths > self._limit:
            raise RunError(restarts_message(self._num_deaths, self._limit)) from death
        return result, num_deaths > 0


def sum_over_ranks(module: PostTrainingModule, count: int) -> int:
    """Returns the sum of every rank's count, whether they see the same data or not. Collective."""
    of_others = module.contract.sum_over_data_parallel(torch.tensor(float(count)).to(module.device))
    return sum(module.contract.gather_over_model_parallel(int(of_others)))


def restarts_message(num_deaths: int, limit: int) -> str:
    """Says why a run stops whose engines keep dying."""
    return (
        f"engines died {num_deaths} times, but `rollout.placement.max_restarts` is {limit}. What they wrote stands"
        " above; the usual cause is memory: lower `rollout.gpu_memory_utilization`, or look for the kernel's OOM"
        " killer."
    )
