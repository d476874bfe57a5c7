"""Rewards of a rollout's responses, and the two together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from verl_lightning.modules.judge import RewardResult
from verl_lightning.types import Rollout


def join_results(parts: Sequence[RewardResult], width: int) -> RewardResult:
    """Joins the results of several parts of a rollout; the failures are those of the first.

    Args:
        parts: Results, at least one.
        width: Response columns of the rollout.
    """
    names = sorted({name for part in parts for name in part.components})
    missing = [torch.full_like(part.rewards, torch.nan) for part in parts]
    tokens = [F.pad(part.token_rewards, (0, width))[:, :width] for part in parts if part.token_rewards is not None]
    return replace(
        parts[0],
        responses=[response for part in parts for response in part.responses],
        rewards=torch.cat([part.rewards for part in parts]),
        is_valid=torch.cat([part.is_valid for part in parts]),
        components={
            name: torch.cat([part.components.get(name, gap) for part, gap in zip(parts, missing, strict=True)])
            for name in names
        },
        token_rewards=torch.cat(tokens) if tokens else None,
    )


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """Responses with their rewards."""

    rollout: Rollout
    """The responses; those of one prompt are adjacent rows."""

    reward_result: RewardResult
    """Rewards of the responses."""

    def with_penalty(self, penalty: Float[Tensor, " batch"]) -> ScoredRollout:
        """The same responses with ``penalty`` added to their rewards."""
        rewards = torch.where(
            self.reward_result.is_valid, self.reward_result.rewards + penalty, self.reward_result.rewards
        )
        return replace(self, reward_result=replace(self.reward_result, rewards=rewards))
