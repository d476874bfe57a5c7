"""Responses that are sampled while the policy learns from those before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.ppo import PPOModule
from verl_lightning.types import Rollout


class Ahead:
    """A batch whose responses are being sampled in another thread.

    Args:
        batch: The prompts and what belongs to them.
        weights_step: ``global_step`` of the weights that they are sampled with.
        generate: Samples them; may be called again if the engine dies.
    """

    def __init__(self, batch: dict[str, Any], weights_step: int, generate: Callable[[], Rollout]) -> None:
        self.batch = dict(batch)
        self.weights_step = weights_step
        self._generate = generate
        self._thread = ThreadPoolExecutor(1)
        self._future: Future[Rollout] | None = self._thread.submit(generate)

    def take(self) -> Rollout:
        """The responses; if a first call raised, a second one samples anew."""
        future, self._future = self._future, None
        self._thread.shutdown(wait=False)
        return self._generate() if future is None else future.result()

    def settle(self) -> None:
        """Wait until the engine has time for others."""
        if self._future is not None:
            wait([self._future])


def check_overlap(module: PostTrainingModule) -> None:
    """Refuse to overlap where a step's age would go unnoticed.

    Raises:
        MisconfigurationException: If nothing corrects for it, or advantages need greedy responses of the same policy.
    """
    if not isinstance(module, PPOModule):
        raise MisconfigurationException(f"`rollout.overlap` needs a `PPOModule`, not `{type(module).__name__}`.")
    if not module.corrections and module.update.old_log_probs == "trainer":
        raise MisconfigurationException(
            "`rollout.overlap` samples from the policy of one step before, but nothing corrects for that. Add"
            " `corrections` such as `TruncatedImportanceSampling`, or clip against the engine's log-probs with"
            " `update.old_log_probs: engine`."
        )
    if module.needs_greedy_rollout:
        raise MisconfigurationException(
            f"`{type(module.advantage).__name__}` compares with greedy responses of the same policy, which"
            " `rollout.overlap` does not sample. Set it to false."
        )
