"""Responses that are sampled while the policy learns from those before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from verl_lightning.callbacks.rollout import RolloutCallback
from verl_lightning.callbacks.shared_rollout import own_part, part_of
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.ppo import PPOModule
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.joining import dealt_prompts, join_rollouts, select_prompts
from verl_lightning.rollout.turns import TurnsConfig
from verl_lightning.types import PromptBatch, Rollout

T = TypeVar("T")

CHECKPOINT_KEY = "rollout_ahead"


class Prefetch:
    """A batch whose responses are being sampled in another thread.

    Args:
        batch: The prompts and what belongs to them.
        weights_step: ``global_step`` of the weights that they are sampled with.
        generate: Samples them; may be called again if the engine dies.
    """

    def __init__(self, batch: PromptBatch, weights_step: int, generate: Callable[[], Rollout]) -> None:
        self.batch = batch
        self.weights_step = weights_step
        self._generate = generate
        self._rollout: Rollout | None = None
        thread = ThreadPoolExecutor(1)
        self._future: Future[Rollout] | None = thread.submit(generate)
        thread.shutdown(wait=False)

    def result(self, current_step: int) -> Rollout:
        """The responses, waited for; if a first call raised, a second one samples anew.

        Args:
            current_step: ``global_step`` of the weights that the engine has if it samples anew.
        """
        future, self._future = self._future, None
        if future is not None:
            self._rollout = future.result()
        elif self._rollout is None:
            self.weights_step = current_step
            self._rollout = self._generate()
        return self._rollout

    def settle(self) -> None:
        """Wait until the engine has time for others."""
        if self._future is not None:
            wait([self._future])


class OneStepOffRollout(RolloutCallback):
    """A rollout callback that can sample each batch while the policy learns from the one before.

    Responses then come from the policy of one step ago; their age is logged as ``rollout/staleness``. The first batch
    is sampled twice, for the first two steps. A checkpoint holds the responses that wait for their step, since the
    weights that they were sampled with are gone; a resumed run equals the uninterrupted one.

    Args:
        sampling: Settings by which training responses are sampled.
        val_sampling: Settings by which validation and test responses are sampled.
        turns: Sample conversations with an environment, such as a tool; null samples single responses.
        overlap: Whether it does; else each batch is sampled when its step begins.

    Raises:
        ValueError: If conversations are to overlap.
        MisconfigurationException: In ``setup``, if nothing corrects for the age of the responses.
    """

    def __init__(
        self,
        sampling: SamplingConfig = SamplingConfig(),
        val_sampling: SamplingConfig = SamplingConfig(),
        turns: TurnsConfig | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        super().__init__(sampling, val_sampling, turns)
        if overlap and turns is not None:
            raise ValueError("`rollout.overlap` samples single responses. Set it to false, or take `turns` out.")
        self.overlap = overlap
        self._prefetch: Prefetch | None = None
        self._saved: list[dict[str, Any]] = []  # of each rank, until training starts

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._prefetch = None
        if self.overlap and stage == "fit":
            check_overlap(pl_module)
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PostTrainingModule)  # checked in `setup`
        if self.overlap and self._saved:
            self._prefetch = restored(self._saved, trainer, pl_module)
        self._saved = []

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        if not self.overlap:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            return
        assert isinstance(pl_module, PostTrainingModule)  # checked in `setup`
        self._swap(trainer, pl_module, batch, batch_idx)

    def _swap(self, trainer: Trainer, module: PostTrainingModule, batch: PromptBatch, batch_idx: int) -> None:
        """Begin to sample this batch, and put in its place the one that was sampled meanwhile."""
        prefetch, asked, purpose, age = self._prefetch, dataclasses.replace(batch), "train", 0
        if prefetch is None:
            super().on_train_batch_start(trainer, module, batch, batch_idx)
            purpose = "ahead"  # the same prompts once more, with other noise
        else:
            with module.phase("gen"):
                rollout = self._take(module, prefetch)
            age = trainer.global_step - prefetch.weights_step
            self._sync(trainer, module, batch)
            batch.take_over(dataclasses.replace(prefetch.batch, rollout=rollout))
        module.log("rollout/staleness", float(age), batch_size=1)
        prompts = self._prompts(trainer, asked, self.sampling, purpose)
        engine, own = self._engine, own_part(prompts, module.contract)
        assert engine is not None
        self._prefetch = Prefetch(asked, trainer.global_step, lambda: engine.generate(own, self.sampling))

    def _take(self, module: PostTrainingModule, prefetch: Prefetch) -> Rollout:
        """Wait for the responses of all ranks with this rank's data, and return them. Collective."""
        part = self._attempt(module, lambda: prefetch.result(module.trainer.global_step))
        return self._join(module, part, len(prefetch.batch))

    def _attempt(self, module: PostTrainingModule, work: Callable[[], T]) -> T:
        """Do some work of the engine and return its result; where engines may die, it is done anew. Collective."""
        return work()

    @override
    def _sample(
        self, trainer: Trainer, module: LightningModule, batch: PromptBatch, sampling: SamplingConfig, purpose: str
    ) -> Rollout:
        if self._prefetch is not None:
            self._prefetch.settle()
        return super()._sample(trainer, module, batch, sampling, purpose)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        prefetch = self._prefetch
        if prefetch is None:
            return
        assert isinstance(pl_module, PostTrainingModule)  # checked in `setup`
        rollout = self._take(pl_module, prefetch).to(torch.device("cpu"))
        fields = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}
        state = {
            "row_index": prefetch.batch.row_index.tolist(),
            "weights_step": prefetch.weights_step,
            "rollout": fields | {"row_lengths": None},
        }
        checkpoint[CHECKPOINT_KEY] = pl_module.contract.gather_over_data_parallel(state)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(CHECKPOINT_KEY, [])

    def _abandon(self) -> None:
        """Have the engine drop what it samples, so that nobody waits for it."""

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._prefetch is not None:
            self._abandon()
            self._prefetch.settle()
            self._prefetch = None
        super().teardown(trainer, pl_module, stage)


def restored(saved: Sequence[dict[str, Any]], trainer: Trainer, module: PostTrainingModule) -> Prefetch | None:
    """This rank's share of the batches that all ranks of a run had sampled ahead; None if its prompts are gone.

    Args:
        saved: State that each rank of that run saved.
        trainer: Trainer of this run, with its training data.
        module: Module in this run, whose number of ranks may be another.
    """
    contract = module.contract
    rank, ranks = contract.data_parallel_rank, contract.data_parallel_size
    # Rank `r` of `n` had every `n`-th prompt of the global batch, from the `r`-th on.
    indices = [index for group in zip(*(each["row_index"] for each in saved), strict=True) for index in group]
    loader: Any = trainer.train_dataloader
    positions = {index: position for position, index in enumerate(loader.source.row_index)}
    if missing := [index for index in indices if index not in positions]:
        rank_zero_warn(
            f"The checkpoint has responses to row {missing[0]} of the training data, which is not there now: the first"
            " batch is sampled twice instead."
        )
        return None
    own = indices[rank::ranks]
    batch = trainer.strategy.batch_to_device(
        loader.source.batch([positions[index] for index in own], [False] * len(own))
    )
    rollout = deal_out(saved, rank=rank, ranks=ranks, pad_token_id=module.tokenizer.pad_token_id)
    part = part_of(rollout, contract)
    return Prefetch(batch, saved[0]["weights_step"], lambda: part.to(module.device))


def deal_out(saved: Sequence[dict[str, Any]], *, rank: int, ranks: int, pad_token_id: int) -> Rollout:
    """The responses to one rank's prompts.

    Args:
        saved: State of each rank of the run that saved, with its ``rollout``.
        rank: Rank whose share is returned.
        ranks: Number of ranks now. If it is the number then, each gets its own back.
        pad_token_id: Token that fills ``input_ids`` where the ranks then had other lengths.
    """
    parts = [Rollout(**each["rollout"]) for each in saved]
    if len(parts) == ranks:
        return parts[rank]
    joined = join_rollouts(parts, pad_token_id=pad_token_id)
    own = dealt_prompts([len(each["row_index"]) for each in saved], rank=rank, ranks=ranks)
    return select_prompts(joined, torch.tensor(own))


def check_overlap(module: LightningModule) -> None:
    """Refuse to overlap where a step's age would go unnoticed.

    Raises:
        MisconfigurationException: If nothing corrects for it, or advantages need greedy responses of the same policy.
    """
    if not isinstance(module, PPOModule):
        raise MisconfigurationException(f"`rollout.overlap` needs a `PPOModule`, not `{type(module).__name__}`.")
    if not module.corrections and module.update.old_log_probs == "trainer":
        raise MisconfigurationException(
            "`rollout.overlap` samples from the policy of one step before, but nothing corrects for that. Add"
            " `model.corrections` such as `TruncatedImportanceSampling`, or clip against the engine's log-probs with"
            " `model.update.old_log_probs: engine`."
        )
    if module.needs_greedy_rollout:
        raise MisconfigurationException(
            f"`{type(module.advantage).__name__}` compares with greedy responses of the same policy, which"
            " `rollout.overlap` does not sample. Set it to false."
        )
