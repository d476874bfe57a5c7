"""Every batch size of a run, resolved once: printed at start, wrong combinations refused."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from verl_lightning.modules.ppo_config import UpdateConfig


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Division of one PPO iteration into mini-batches and micro-batches."""

    prompts_per_step: int
    """Prompts of an iteration, over all ranks."""

    num_samples: int
    """Responses to each prompt."""

    data_parallel_size: int
    """Ranks that see different prompts."""

    update: UpdateConfig
    """Sizes and passes of the optimizer steps."""

    max_tokens: int | None = None
    """Longest prompt and response together, in tokens; None where the data module does not say."""

    def __post_init__(self) -> None:
        mini = self.mini_batch_size
        if self.prompts_per_step % mini:
            raise ValueError(
                f"`model.update.mini_batch_size` ({mini} prompts) must divide the prompts of a step"
                f" ({self.prompts_per_step}, `data.prompts_per_step`). Change either of them."
            )
        if mini % self.data_parallel_size:
            raise ValueError(
                f"`model.update.mini_batch_size` ({mini} prompts over all ranks) must be a multiple of the number of"
                f" data-parallel ranks ({self.data_parallel_size}). Change it, or `trainer.devices`."
            )
        budget = self.update.max_tokens
        if budget is not None and self.max_tokens is not None and self.max_tokens > budget:
            raise ValueError(
                f"`model.update.max_tokens_per_micro_batch` ({budget}) is less than one sequence may have"
                f" ({self.max_tokens}: `data.max_prompt_length` and `rollout.sampling.max_new_tokens`). Raise it, or"
                " shorten one of them."
            )

    @property
    def mini_batch_size(self) -> int:
        """Prompts of one optimizer step, over all ranks."""
        return self.update.mini_batch_size or self.prompts_per_step

    @property
    def sequences_per_step(self) -> int:
        """Responses of an iteration, over all ranks."""
        return self.prompts_per_step * self.num_samples

    @property
    def mini_batch_sequences_per_rank(self) -> int:
        """One rank's sequences of an optimizer step."""
        return self.mini_batch_size * self.num_samples // self.data_parallel_size

    @property
    def micro_batches_per_mini_batch(self) -> int | None:
        """Forward and backward passes of an optimizer step on one rank; None where the sequences' lengths decide."""
        if (size := self.update.micro_batch_size) is None:
            return None
        return -(-self.mini_batch_sequences_per_rank // size)

    @property
    def micro_batches(self) -> str:
        """Number and size of the micro-batches of a mini-batch on one rank, for people."""
        if (size := self.update.micro_batch_size) is None:
            return f"as many as lengths need x {self.update.max_tokens} tokens"
        size = min(size, self.mini_batch_sequences_per_rank)
        return f"{self.micro_batches_per_mini_batch} x {size} sequences"

    @property
    def mini_batches_per_epoch(self) -> int:
        """Optimizer steps of one pass over an iteration's responses."""
        return self.prompts_per_step // self.mini_batch_size

    @property
    def optimizer_steps(self) -> int:
        """The policy's optimizer steps of an iteration."""
        return self.mini_batches_per_epoch * self.update.epochs

    def table(self) -> Table:
        """Returns the plan as a table for people."""
        mini, ranks = self.mini_batch_size * self.num_samples, self.data_parallel_size
        rows = {
            "prompts per step, all ranks": self.prompts_per_step,
            "samples per prompt": self.num_samples,
            "sequences per step, all ranks": self.sequences_per_step,
            "data-parallel ranks": ranks,
            "sequences per step and rank": self.sequences_per_step // ranks,
            "sequences per mini-batch, all ranks": mini,
            "sequences per mini-batch and rank": self.mini_batch_sequences_per_rank,
            "micro-batches per mini-batch, of at most": self.micro_batches,
            "optimizer steps per iteration": f"{self.mini_batches_per_epoch} x {self.update.epochs} epochs"
            f" = {self.optimizer_steps}",
            "tokens per sequence, at most": self.max_tokens or "unknown",
        }
        table = Table(title="Batch plan", title_justify="left", show_header=False)
        for name, value in rows.items():
            table.add_row(name, str(value))
        return table
