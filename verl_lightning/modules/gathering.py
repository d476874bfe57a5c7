"""Dynamic sampling: groups with signal, gathered over batches until an iteration has enough of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from verl_lightning.faults import RunError
from verl_lightning.modules.iteration_count import IterationCount
from verl_lightning.modules.judge import first_failure, told_failure
from verl_lightning.modules.ppo_config import DynamicSamplingConfig
from verl_lightning.modules.scored_rollout import ScoredRollout, deal_out, join_scored_rollouts

if TYPE_CHECKING:
    from verl_lightning.modules.ppo import PPOModule

GROUPS_KEY = "gathered_groups"
VALIDATED_KEY = "validated_step"


class GatherGroups(Callback):
    """Holds the groups with signal that wait for enough others.

    Args:
        config: Limit on the batches of an iteration.
    """

    def __init__(self, config: DynamicSamplingConfig) -> None:
        self.config = config
        self.batches: list[ScoredRollout] = []
        self._count = IterationCount()

    def add(self, module: PPOModule, scored: ScoredRollout) -> ScoredRollout | None:
        """Take the groups with signal of one more batch. Collective.

        Args:
            module: Module in its training step.
            scored: The batch, on this rank.

        Returns:
            The groups of an iteration; None while there are too few.

        Raises:
            RunError: If an iteration has used up its batches.
        """
        assert module.plan is not None
        needed = module.plan.prompts_per_step // module.plan.data_parallel_size
        self.batches.append(scored.groups_with_signal())
        found = min(module.contract.gather_over_data_parallel(sum(part.num_groups for part in self.batches)))
        if found >= needed:
            joined = join_scored_rollouts(self.batches, pad_token_id=module.tokenizer.pad_token_id)
            self.batches = []
            return joined.groups(range(needed))
        if len(self.batches) >= self.config.max_batches:
            raise RunError(
                f"`model.dynamic_sampling` found {found} of {needed} prompts of a rank with both good and bad"
                f" responses in {len(self.batches)} batches (`model.dynamic_sampling.max_batches`): the task is too"
                " easy or too hard. Choose other prompts, sample more responses to each, or allow more batches."
                f"{told_failure(first_failure(part.reward_result for part in self.batches))}"
            )
        self.end_step(module.trainer)
        return None

    def end_step(self, trainer: Trainer) -> None:
        """Have Lightning count iterations; at the end of each training step."""
        self._count.after_batch(trainer, gathers=bool(self.batches))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.batches, self._count = [], IterationCount()  # not those of a fit before this one

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches = [part.to(pl_module.device) for part in self.batches]
        self._count.start(trainer, gathers=bool(self.batches))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count.stop(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._count.stop(trainer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        module: PPOModule = pl_module  # type: ignore[assignment]
        parts = [part.state_dict() for part in self.batches]
        checkpoint[GROUPS_KEY] = module.contract.gather_over_data_parallel(parts)
        checkpoint[VALIDATED_KEY] = self._count.validated_step

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if GROUPS_KEY not in checkpoint:  # of a run that trained on all groups
            return
        module: PPOModule = pl_module  # type: ignore[assignment]
        self._count.validated_step = checkpoint.get(VALIDATED_KEY, 0)
        self.batches = deal_out(
            checkpoint[GROUPS_KEY],
            rank=module.contract.data_parallel_rank,
            ranks=module.contract.data_parallel_size,
            pad_token_id=module.tokenizer.pad_token_id,
        )
