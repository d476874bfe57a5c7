"""From sampled tokens to rewards: decodes responses and has the reward workers score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_lightning.metrics import Metric, spread, total
from verl_lightning.rewards.base import RewardSample
from verl_lightning.rewards.pool import RewardConfig, make_pool
from verl_lightning.types import Rollout

_OWN_COLUMNS = {"prompt", "data_source", "reward_model", "extra_info"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the reward function said about a rollout's responses."""

    responses: list[str]
    """The responses as text."""

    rewards: Float[Tensor, " batch"]
    """0 where there is none."""

    is_valid: Bool[Tensor, " batch"]
    """False where the reward function failed or nothing can be trained on: such rows count in nothing."""

    components: dict[str, Float[Tensor, " batch"]]
    """The other numbers that the reward function gave; nan where it gave none."""

    num_errors: int
    """Responses whose reward function failed."""

    num_timeouts: int
    """Responses whose reward function took too long."""

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return replace(
            self,
            rewards=self.rewards.to(device),
            is_valid=self.is_valid.to(device),
            components={name: values.to(device) for name, values in self.components.items()},
        )

    def scores(self) -> dict[str, Metric]:
        """Rewards under the names that verl's users know."""
        metrics = spread("critic/score", self.rewards, self.is_valid)
        for name, values in self.components.items():
            metrics |= spread(f"reward/{name}", values, self.is_valid & values.isfinite())
        return metrics

    def failures(self) -> dict[str, Metric]:
        """How many responses got no reward."""
        return {"reward/errors": total(float(self.num_errors)), "reward/timeouts": total(float(self.num_timeouts))}


class Judge:
    """Scores rollouts with a reward function in workers.

    Args:
        config: The reward function and its limits.
        tokenizer: Turns responses into text.
    """

    def __init__(self, config: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pool = make_pool(config)
        self._tokenizer = tokenizer

    def start(self) -> None:
        """Start the workers.

        Raises:
            ValueError: If the reward function does not import.
        """
        self._pool.start()

    def stop(self) -> None:
        """End the workers."""
        self._pool.stop()

    def score(self, rollout: Rollout, rows: Sequence[dict[str, Any]]) -> Verdict:
        """Score every response.

        Args:
            rollout: Sampled responses.
            rows: The prompts' data rows; ``rollout.prompt_index`` points into them.
        """
        responses = self._decode(rollout)
        prompts = [rows[index] for index in rollout.prompt_index.tolist()]
        is_truncated = rollout.is_truncated.tolist()
        results = self._pool.score(
            [
                make_sample(row, response, truncated)
                for row, response, truncated in zip(prompts, responses, is_truncated, strict=True)
            ]
        )
        rewards = _to_tensor(results.rewards, rollout.input_ids.device)
        return Verdict(
            responses=responses,
            rewards=rewards.nan_to_num(),
            is_valid=rewards.isfinite() & rollout.response_mask.any(-1),
            components={name: _to_tensor(values, rewards.device) for name, values in results.components.items()},
            num_errors=results.num_errors,
            num_timeouts=results.num_timeouts,
        )

    def _decode(self, rollout: Rollout) -> list[str]:
        pad = self._tokenizer.pad_token_id
        tokens = rollout.response_ids.masked_fill(~rollout.attention_mask[:, -rollout.response_mask.shape[1] :], pad)
        return self._tokenizer.batch_decode(tokens, skip_special_tokens=True)


def make_sample(row: dict[str, Any], response: str, is_truncated: bool) -> RewardSample:
    """What the reward function sees of a row; unknown columns reach it in ``extra_info``."""
    others = {name: value for name, value in row.items() if name not in _OWN_COLUMNS}
    return RewardSample(
        response=response,
        ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
        data_source=row["data_source"],
        prompt=row["prompt"],
        extra_info=others | (row.get("extra_info") or {}),
        is_truncated=is_truncated,
    )


def _to_tensor(values: Sequence[float | None], device: torch.device) -> Float[Tensor, " batch"]:
    return torch.tensor([float("nan") if value is None else value for value in values], device=device)
