"""The groups that each step learns from: asked for ahead, and judged at once where only some are learnt from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, cycle, islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from lightning.fabric.utilities import rank_zero_warn

from verl_lightning.callbacks.prompt_stream import Cursor, Group, Prompt, PromptStream, digest_of_order, ordered_loader
from verl_lightning.callbacks.rollout_queue import RolloutQueue
from verl_lightning.callbacks.rollout_requests import batch_rollout, join_parts
from verl_lightning.faults import RunError
from verl_lightning.modules.dynamic_sampling import DynamicSampling
from verl_lightning.modules.judge import RewardResult
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.rollout.background import Background
from verl_lightning.rollout.base import Completion, Request, SamplingConfig
from verl_lightning.rollout.completions import Listener
from verl_lightning.types import PromptBatch, Rollout

T = TypeVar("T")

CHECKPOINT_KEY = "rollout_queue"


class Sampler(Protocol):
    """A rollout callback, which has the engine."""

    sampling: SamplingConfig

    def attempt(self, module: SamplingModule, work: Callable[[], T]) -> T:
        """Do some work of the engine and return its result; where engines may die, it is done anew. Collective."""

    def requests_of(
        self, module: SamplingModule, batch: PromptBatch, sampling: SamplingConfig, purpose: str, turn: int
    ) -> Sequence[Request]:
        """Return what the engine is asked for a batch."""

    def complete(
        self, module: SamplingModule, requests: Sequence[Request], hear: Listener | None = None
    ) -> list[Completion]:
        """Ask the engine and wait for the answers."""

    def ask(self, requests: Sequence[Request]) -> Any:
        """Ask the engine, as a coroutine."""

    def check_errors(self, completions: Sequence[Completion]) -> None:
        """Refuse answers of which too many failed."""


class Finished(NamedTuple):
    """A group with its responses, as other processes get it too."""

    prompt: Prompt
    """The prompt."""

    asked: int
    """The ``global_step`` of the oldest weights that may have sampled a response."""

    kind: Any
    """Kind of its row."""

    requests: Sequence[Request]
    """Requests for the responses."""

    completions: list[Completion]
    """The responses."""


class GroupSupply:
    """Gives each step the groups that it learns from, in batches of whole prompts.

    Ranks that share the data have the same groups, of which each asks its part.

    Args:
        sampler: Rollout callback that has the engine.
        module: Module in training.
        max_staleness: Most optimizer steps by which a response may be older than the policy that learns from it.
        keeps_order: True if responses are waited for when weights change, so that steps take groups in order.
    """

    def __init__(self, sampler: Sampler, module: SamplingModule, max_staleness: int, *, keeps_order: bool) -> None:
        self.background = Background() if max_staleness else None
        """Thread in which engines sample while the policy learns; None where they don't."""
        # In any order, what is asked for ahead leaves room within the bound for those that take long.
        ahead = max_staleness if keeps_order else (max_staleness + 1) // 2
        self.queue = RolloutQueue(max_staleness, ahead, self._begin)
        self._sampler = sampler
        self._module = module
        self._loader = ordered_loader(module.trainer)
        self._asked_rows: list[dict[str, Any]] = []  # that are judged while others are sampled

    def batch(self, batch: PromptBatch) -> Rollout:
        """Return the responses that a step learns from, to the prompts of its batch or to others, which it then has.

        Collective.
        """
        queue = self.queue
        if queue.stream is None:
            self._start(Cursor(self._module.trainer.fit_loop.epoch_loop.total_batch_idx, *self._loader.handed_out()))
        queue.begin_step(self._module.trainer.global_step)
        kinds = [self._loader.kind_of(row) for row in batch.rows]
        if not queue.groups:  # what is first asked is sampled by itself, as it is without a queue
            with self._module.phase("gen"):
                queue.look_ahead([kinds[place] for place in self._own(len(kinds))], ahead=0)
                self._sampler.attempt(self._module, queue.settle)
        chosen, rewards = self._module.dynamic_sampling, list[RewardResult]()
        if chosen is None:
            found = self._next(kinds)
        else:
            found, rewards = self._with_signal(kinds, chosen)
        self._exchange(batch, [each.prompt.row for each in found])
        completions = [completion for each in found for completion in each.completions]
        for name, value in self._ages(completions).items():
            self._module.log(name, value, batch_size=1)
        rollout = self._rollout(found)
        if chosen is not None:
            chosen.hand_over(rollout, rewards)
        return rollout

    def _start(self, cursor: Cursor) -> None:
        contract, module = self._module.contract, self._module
        sampler = self._sampler
        self.queue.stream = PromptStream(
            self._loader,
            cursor,
            ask=lambda batch, number: sampler.requests_of(module, batch, sampler.sampling, "train", number),
            own=self._own,
            rank=contract.data_parallel_rank,
            spacing=contract.data_parallel_size,
        )

    def _begin(self, groups: Sequence[Group]) -> None:
        """Have the engine begin with some groups, or answer them where it does not work beside."""
        if self.background is not None:
            with self.background.paused() if groups else nullcontext():
                for group in groups:
                    group.answer = self.background.submit(self._sampler.ask(group.requests))
            return
        requests = [request for group in groups for request in group.requests]
        answers = iter(self._sampler.complete(self._module, requests, self._judge_early(groups)))
        for group in groups:
            group.answered(self.queue.step, list(islice(answers, len(group.requests))))

    def _judge_early(self, groups: Sequence[Group]) -> Listener | None:
        """Have responses judged while others are sampled, where that is known to be all that is judged next."""
        if self._module.dynamic_sampling is None or not groups:
            return None
        asked = self._loader.batch_of([group.prompt.row for group in groups])
        self._asked_rows = asked.rows
        return self._module.begin_judging(asked, self._sampler.sampling.num_samples)

    def _next(self, kinds: Sequence[Any]) -> list[Finished]:
        """Wait for groups of these kinds; return those of all processes with the same data, in order. Collective."""
        queue, contract = self.queue, self._module.contract
        own = [kinds[place] for place in self._own(len(kinds))]
        with self._module.phase("gen"):
            queue.look_ahead(own)
            self._sampler.attempt(self._module, lambda: queue.settle(lambda: queue.choose(own) is not None))
        groups = queue.choose(own)
        assert groups is not None, "fewer groups were asked for than are chosen"
        queue.take(groups)
        finished = [
            Finished(group.prompt, group.asked or 0, group.kind, group.requests, group.answer.result())
            for group in groups
            if group.answer is not None
        ]
        self._sampler.check_errors([completion for each in finished for completion in each.completions])
        return sorted(join_parts(finished, contract), key=lambda each: each.prompt)

    def _with_signal(
        self, kinds: Sequence[Any], sampling: DynamicSampling
    ) -> tuple[list[Finished], list[RewardResult]]:
        """Return groups with signal of these kinds and their rewards, asking until there are enough. Collective.

        All ranks ask as many at once, so that they judge together. Those that are left over stay in the queue.
        """
        kept: list[tuple[Finished, RewardResult]] = []
        limit, judged = sampling.config.max_batches * len(kinds), 0
        while True:
            missing = list((Counter(kinds) - Counter(each.kind for each, _ in kept)).elements())
            everyone = self._module.contract.gather_over_data_parallel((len(missing), len(kept)))
            most, num_kept = max(missing for missing, _ in everyone), sum(kept for _, kept in everyone)
            if most == 0:
                break
            if judged >= limit:
                raise RunError(sampling.too_few_message(len(kinds) - most, len(kinds)))
            share = num_kept / (judged * len(everyone)) if num_kept else 1 / len(kinds)
            count = min(len(kinds), -int(-most // share), limit - judged)
            found = self._next(list(islice(chain(missing, cycle(kinds)), count)))
            judged += count
            kept += [(each, part) for each, part in zip(found, self._judge(found, sampling), strict=True) if part]
        kept.sort(key=lambda pair: (pair[0].asked, pair[0].prompt))
        wanted = Counter(kinds)
        chosen: list[tuple[Finished, RewardResult]] = []
        for pair in kept:
            wanted.subtract([pair[0].kind])
            chosen += [pair] if wanted[pair[0].kind] >= 0 else []
        taken = {each.prompt for each, _ in chosen}
        self.queue.give_back(each.prompt for each, _ in kept if each.prompt not in taken)
        chosen.sort(key=lambda pair: pair[0].prompt)
        return [each for each, _ in chosen], [result for _, result in chosen]

    def _judge(self, found: Sequence[Finished], sampling: DynamicSampling) -> list[RewardResult | None]:
        """Return the rewards of each group that has signal. Collective."""
        rollout = self._rollout(found)
        rows = self._loader.batch_of([each.prompt.row for each in found]).rows
        rows = self._asked_rows if rows == self._asked_rows else rows  # that very list began to be judged
        with self._module.phase("reward"):
            result = self._module.judged(rollout, rows)
        return sampling.sift(result, rollout.prompt_index)

    def _exchange(self, batch: PromptBatch, indices: list[int]) -> None:
        """Give a step's batch the prompts that it learns from, where they are not its own."""
        others = self._loader.batch_of(indices)
        if others.row_index.tolist() == batch.row_index.tolist():
            return
        for name, value in vars(others.to(self._module.device)).items():
            setattr(batch, name, value)

    def _rollout(self, found: Sequence[Finished]) -> Rollout:
        requests = [request for each in found for request in each.requests]
        completions = [completion for each in found for completion in each.completions]
        return batch_rollout(self._module, requests, completions, self._sampler.sampling)

    def _ages(self, completions: Sequence[Completion]) -> dict[str, float]:
        """Return how old responses of all ranks are that are about to be learnt from, as metrics. Collective.

        Raises:
            RunError: If one is older than the bound.
        """
        contract, queue = self._module.contract, self.queue
        ages = [[queue.step - queue.steps[version] for version in each.own_versions] for each in completions]
        mixed = [len(each) for each in ages if len(set(each)) > 1]
        sums = torch.tensor([sum(map(sum, ages)), sum(map(len, ages)), sum(mixed)], dtype=torch.float32)
        total, count, num_mixed = contract.sum_over_data_parallel(sums.to(self._module.device)).tolist()
        oldest = max(contract.gather_over_data_parallel(max(map(max, filter(None, ages)), default=0)))
        if oldest > queue.max_staleness:
            raise RunError(
                f"a response is {oldest} optimizer steps old at step {queue.step}, but `rollout.max_staleness` is"
                f" {queue.max_staleness}. Please report this."
            )
        count = max(count, 1.0)
        return {
            "rollout/staleness/mean": total / count,
            "rollout/staleness/max": float(oldest),
            "rollout/mixed_version_tokens": num_mixed / count,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: groups of all ranks, and the place behind them in the data. Collective."""
        contract, queue = self._module.contract, self.queue
        if queue.stream is None:
            return {}
        batches = contract.gather_over_model_parallel(queue.stream.cursor.batch)
        cursor = queue.catch_up(max(contract.gather_over_data_parallel(max(batches))))
        own = contract.gather_over_model_parallel(queue.state_dict())[: self._lanes]
        return {
            "groups": [state for rank in contract.gather_over_data_parallel(own) for state in rank],
            "cursor": list(cursor),
            "steps": dict(queue.steps),
            "data": digest_of_order(self._loader),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the groups of a checkpoint, of whatever ranks, and go on behind them."""
        contract, queue = self._module.contract, self.queue
        queue.steps = dict(state["steps"])
        if state["data"] != digest_of_order(self._loader):
            rank_zero_warn(
                "The checkpoint holds prompts and responses that wait for their step, but of other training rows, or in"
                " another order, than there are now: they are dropped."
            )
            return
        self._start(Cursor(*state["cursor"]))
        if contract.model_parallel_rank < self._lanes:
            lane = contract.data_parallel_rank * self._lanes + contract.model_parallel_rank
            queue.restore(state["groups"], lane, contract.data_parallel_size * self._lanes)

    @property
    def _lanes(self) -> int:
        """Number of the ranks with the same data that ask for some of the prompts of each step."""
        size, ranks = self._loader.batch_size, self._module.contract.model_parallel_size
        return -(-size // -(-size // ranks))

    def _own(self, count: int) -> range:
        """Return which of so many prompts this rank asks for: only ranks that have some of each step's ever do."""
        size = -(-count // self._lanes)
        return range(count)[size * self._module.contract.model_parallel_rank :][:size]

    def stop(self) -> None:
        """Give up all that is not finished."""
        if self.background is not None:
            self.background.stop()
