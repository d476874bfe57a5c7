"""An iteration's optimizer steps: mini-batches, objectives, roles, in order."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from verl_lightning.algorithms.losses.base import PolicyLoss
from verl_lightning.functional.normalizer import Aggregation
from verl_lightning.metrics import MetricTable, mean, total
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.modules.batch_plan import BatchPlan
from verl_lightning.modules.micro_batches import BatchSplitter, SplitBatch
from verl_lightning.modules.objectives import (
    DistillationTerm,
    Normalizer,
    PolicyObjective,
    SharedObjective,
    ValueObjective,
)
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig
from verl_lightning.modules.teacher_config import TeacherConfig
from verl_lightning.modules.trajectories import episode_sums
from verl_lightning.ranges import named_range
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.types import Experience, with_lengths

Update = Callable[[bool], None]
"""One optimizer step; its argument says whether it moves ``trainer.global_step``."""

Objective = PolicyObjective | SharedObjective | ValueObjective


class Role(NamedTuple):
    """A model in training."""

    model: TokenScorer
    optimizer: LightningOptimizer
    max_grad_norm: float


class MiniBatch(NamedTuple):
    """This rank's share of one optimizer step's responses, and the totals of the whole step."""

    experience: Experience
    normalizer: Normalizer
    distillation: DistillationTerm | None


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Runs all optimizer steps of an iteration: the critic's, then the actor's."""

    contract: PostTrainingStrategy
    """Runs the models."""

    splitter: BatchSplitter
    """Cuts mini-batches into micro-batches."""

    plan: BatchPlan
    """Sizes and numbers of the iteration's batches."""

    roles: Mapping[str, Role]
    """``actor``, and ``critic`` where it is a model of its own."""

    policy_loss: PolicyLoss
    """Loss of each response token."""

    critic_config: CriticConfig | None
    """Options of the value loss."""

    kl: KLConfig | None
    """KL penalty in the loss; None without one."""

    kl_coef: float
    """Current weight of the KL penalty."""

    teacher: TeacherConfig | None
    """Options of the divergence from a teacher; None without one."""

    max_response_length: int
    """The fixed length of ``seq-mean-token-sum-norm``, in tokens."""

    warms_up_critic: bool
    """True if the actor rests in this iteration and the critic learns alone."""

    phase: Callable[[str], AbstractContextManager[None]]
    """Context manager that marks and times a phase."""

    def learn(self, experience: Experience, table: MetricTable) -> None:
        """Takes every optimizer step; only the last one moves ``trainer.global_step``. Collective.

        Args:
            experience: Experience of this rank's responses.
            table: Table that gets the metrics.
        """
        mini_batches = list(self._mini_batches(with_lengths([experience])[0]))
        updates = [*self._critic_updates(mini_batches, table), *self._actor_updates(mini_batches, table)]
        for index, update in enumerate(updates):
            update(index + 1 == len(updates))

    def _mini_batches(self, experience: Experience) -> Iterator[MiniBatch]:
        """Yields mini-batches, which hold the same prompts for any number of ranks."""
        parts = divide(experience, self.plan.mini_batch_sequences_per_rank)
        counts = torch.stack(
            [_count(mask, part.episode_index) for part in parts for mask in (part.response_mask, part.taught_mask)]
        )
        totals = self.contract.sum_over_data_parallel(counts).view(-1, 2, 2)
        for part, (trained, taught) in zip(parts, totals, strict=True):
            term = self._distillation(*taught)
            yield MiniBatch(part, self._normalizer(self.plan.update.aggregation, *trained), term)

    def _distillation(self, num_tokens: Tensor, num_sequences: Tensor) -> DistillationTerm | None:
        if self.teacher is None:
            return None
        normalizer = self._normalizer(self.teacher.aggregation, num_tokens, num_sequences)
        return DistillationTerm(normalizer=normalizer, coef=self.teacher.coef)

    def _normalizer(self, aggregation: Aggregation, num_tokens: Tensor, num_sequences: Tensor) -> Normalizer:
        return Normalizer(
            aggregation=aggregation,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_response_length=self.max_response_length,
        )

    def _actor_updates(self, mini_batches: list[MiniBatch], table: MetricTable) -> Iterator[Update]:
        if self.warms_up_critic:
            return
        splits = self._splits("actor", mini_batches)
        for epoch in range(self.plan.update.epochs):
            for index, (batch, split) in enumerate(zip(mini_batches, splits, strict=True)):
                objective = self._policy_objective(batch, is_first=epoch == index == 0)
                yield partial(self._step, "actor", split.parts, objective, table)

    def _critic_updates(self, mini_batches: list[MiniBatch], table: MetricTable) -> Iterator[Update]:
        if "critic" not in self.roles or self.critic_config is None:
            return
        splits = self._splits("critic", mini_batches)
        for _ in range(self.critic_config.epochs):
            for batch, split in zip(mini_batches, splits, strict=True):
                objective = ValueObjective(normalizer=batch.normalizer, clip=self.critic_config.value_clip)
                yield partial(self._step, "critic", split.parts, objective, table)

    def _splits(self, name: str, mini_batches: list[MiniBatch]) -> list[SplitBatch[Experience]]:
        """Once for all passes over them."""
        return self.splitter.split(self.roles[name].model, [batch.experience for batch in mini_batches])

    def _policy_objective(self, batch: MiniBatch, *, is_first: bool) -> PolicyObjective | SharedObjective:
        policy = PolicyObjective(
            policy_loss=self._loss_for_step(batch.experience),
            normalizer=batch.normalizer,
            kl=self.kl,
            kl_coef=self.kl_coef,
            entropy_coef=self.plan.update.entropy_coef,
            distillation=batch.distillation,
            is_on_policy=is_first and self.plan.update.old_log_probs == "trainer",
        )
        if self.critic_config is None or "critic" in self.roles:
            return policy
        value = ValueObjective(normalizer=batch.normalizer, clip=self.critic_config.value_clip)
        return SharedObjective(policy=policy, value=value, coef=self.critic_config.shared_coef)

    def _loss_for_step(self, experience: Experience) -> PolicyLoss:
        """The policy loss, told of the whole step's tokens where it must compare them."""
        if not self.policy_loss.needs_whole_step:
            return self.policy_loss
        mask = experience.response_mask
        own = torch.stack([experience.old_log_probs[mask], experience.advantages[mask]])
        everyone = torch.cat(self.contract.gather_over_data_parallel(own.cpu()), dim=1).to(own.device)
        return self.policy_loss.for_step(*everyone)

    def _step(
        self, name: str, micro_batches: list[Experience], objective: Objective, table: MetricTable, count: bool
    ) -> None:
        """One optimizer step of one role on its mini-batch."""
        role, update = self.roles[name], self.plan.update
        with self.phase(f"update_{name}"), named_range("mini_batch"):
            with_entropy = name == "actor" and update.entropy_coef != 0
            for metrics in self.contract.forward_backward(
                role.model, micro_batches, objective, with_entropy=with_entropy
            ):
                table.add(metrics)
            norm = self.contract.clip_and_step(role.optimizer, role.max_grad_norm, count=count)
        is_finite, ranks = norm.isfinite(), self.contract.data_parallel_size
        is_empty = objective.normalizer.num_tokens == 0  # on all ranks
        table.add(
            {
                f"{name}/grad_norm": mean(norm.nan_to_num(posinf=0.0), is_finite),
                f"{name}/skipped_updates": total(~is_finite / ranks),
                "train/empty_batches": total(is_empty / ranks),
            }
        )


def divide(experience: Experience, size: int) -> list[Experience]:
    """Divides an experience into parts of as many episodes, with all trajectories of each.

    Args:
        experience: Experience of whole episodes.
        size: Episodes of a part.
    """
    index = experience.episode_index
    if index is None:
        return [experience.select(slice(start, start + size)) for start in range(0, len(experience), size)]
    parts = []
    for start in range(0, index[-1] + 1, size):
        rows = slice(bisect_left(index, start), bisect_left(index, start + size))
        part = dataclasses.replace(experience.select(rows), episode_index=index[rows])
        tokens = episode_sums(part.response_mask.sum(-1), index[rows])
        parts.append(dataclasses.replace(part, episode_tokens=tokens))
    return parts


def _count(mask: Tensor, episode_index: tuple[int, ...] | None) -> Tensor:
    """Counts the tokens that a mask holds, and the episodes with such a token."""
    tokens = mask.sum(-1)
    if episode_index is not None:
        tokens = episode_sums(tokens, episode_index)
        starts = [0, *(row for row in range(1, len(tokens)) if episode_index[row] != episode_index[row - 1])]
        tokens = tokens[starts]
    return torch.stack([mask.sum(), (tokens > 0).sum()])
