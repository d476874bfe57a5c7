"""Batches that are sampled ahead of their step, and the parts of a batch that ranks with the same data sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.ppo import PPOModule
from verl_lightning.rollout.base import Completion, Request, SamplingConfig
from verl_lightning.rollout.completions import pack_completions, unpack_completions
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.types import PromptBatch

CHECKPOINT_KEY = "rollout_ahead"


class Ticket:
    """A batch that has its turn later, and whose responses are sampled in another thread until then.

    Args:
        batch: The prompts and what belongs to them.
        requests: Requests for all responses to it.
        weights_step: ``global_step`` of the weights that they are sampled with.
        sample: Function that samples this rank's part of them; may be called again if the engine dies. None for a batch
            whose completions are known.
    """

    def __init__(
        self,
        batch: PromptBatch,
        requests: Sequence[Request],
        weights_step: int,
        sample: Callable[[], list[Completion]] | None,
    ) -> None:
        self.batch = batch
        self.requests = requests
        self.weights_step = weights_step
        self.completions: Sequence[Completion] | None = None
        """Completion of each request, once all ranks have put their parts together."""
        self._sample = sample
        self._part: list[Completion] | None = None
        self._future: Future[list[Completion]] | None = None
        if sample is not None:
            thread = ThreadPoolExecutor(1)
            self._future = thread.submit(sample)
            thread.shutdown(wait=False)

    def result(self, current_step: int) -> list[Completion]:
        """This rank's part, waited for; if a first call raised, a second one samples anew.

        Args:
            current_step: ``global_step`` of the weights that the engine has if it samples anew.
        """
        assert self._sample is not None
        future, self._future = self._future, None
        if future is not None:
            self._part = future.result()
        elif self._part is None:
            self.weights_step = current_step
            self._part = self._sample()
        return self._part

    def settle(self) -> None:
        """Wait until the engine has time for others."""
        if self._future is not None:
            wait([self._future])

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, once the completions are known."""
        assert self.completions is not None
        return {
            "row_index": self.batch.row_index.tolist(),
            "weights_step": self.weights_step,
            "completions": pack_completions(self.completions),
        }


def restored(
    saved: Sequence[dict[str, Any]], make_requests: Callable[[PromptBatch], list[Request]], module: PostTrainingModule
) -> Ticket | None:
    """This rank's share of the batches that all ranks of a run had sampled ahead; None if its prompts are gone.

    Args:
        saved: `Ticket.state_dict` of each rank of that run.
        make_requests: Function that makes the requests for a batch.
        module: Module in this run, whose number of ranks may be another.
    """
    contract = module.contract
    loader: Any = module.trainer.train_dataloader
    # Rank `r` of `n` had every `n`-th prompt of the global batch, from the `r`-th on.
    indices = [index for group in zip(*(each["row_index"] for each in saved), strict=True) for index in group]
    positions = {index: position for position, index in enumerate(loader.source.row_index)}
    if missing := [index for index in indices if index not in positions]:
        rank_zero_warn(
            f"The checkpoint has responses to row {missing[0]} of the training data, which is not there now: the first"
            " batch is sampled twice instead."
        )
        return None
    own = slice(contract.data_parallel_rank, None, contract.data_parallel_size)
    rows = [positions[index] for index in indices[own]]
    batch = module.trainer.strategy.batch_to_device(loader.source.batch(rows, [False] * len(rows)))
    ticket = Ticket(batch, make_requests(batch), saved[0]["weights_step"], None)
    groups = [_groups(each) for each in saved]
    dealt = [group for turn in zip(*groups, strict=True) for group in turn][own]
    ticket.completions = [completion for group in dealt for completion in group]
    return ticket


def _groups(saved: dict[str, Any]) -> list[list[Completion]]:
    """The completions of one rank, by prompt."""
    completions = unpack_completions(saved["completions"])
    size = len(completions) // len(saved["row_index"])
    return [completions[start : start + size] for start in range(0, len(completions), size)]


def own_part(
    requests: Sequence[Request], sampling: SamplingConfig, contract: PostTrainingStrategy
) -> Sequence[Request]:
    """Returns the requests that this rank asks, whole groups: all, unless others have the same data."""
    size = sampling.num_samples * -(-len(requests) // (sampling.num_samples * contract.model_parallel_size))
    return requests[size * contract.model_parallel_rank :][:size]


def join_parts(part: list[Completion], contract: PostTrainingStrategy) -> list[Completion]:
    """Returns the completions of all requests, of which each rank with the same data has a part. Collective."""
    if contract.model_parallel_size == 1:
        return part
    return [completion for each in contract.gather_over_model_parallel(part) for completion in each]


def check_staleness(module: LightningModule) -> None:
    """Refuse to sample ahead where a step's age would go unnoticed.

    Raises:
        MisconfigurationException: If nothing corrects for it, or advantages need greedy responses of the same policy.
    """
    if not isinstance(module, PPOModule):
        raise MisconfigurationException(
            f"`rollout.max_staleness: 1` needs a `PPOModule`, not `{type(module).__name__}`."
        )
    if not module.corrections and module.update.old_log_probs == "trainer":
        raise MisconfigurationException(
            "`rollout.max_staleness: 1` samples from the policy of one step before, but nothing corrects for that. Add"
            " `model.corrections` such as `TruncatedImportanceSampling`, or clip against the engine's log-probs with"
            " `model.update.old_log_probs: engine`."
        )
    if module.needs_greedy_rollout:
        raise MisconfigurationException(
            f"`{type(module.advantage).__name__}` compares with greedy responses of the same policy, which"
            " `rollout.max_staleness: 1` does not sample. Set it to 0."
        )
