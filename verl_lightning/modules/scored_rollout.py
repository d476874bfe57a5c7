"""A rollout with its rewards, and what dynamic sampling does with it: keep groups with signal, join, cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.functional.groups import group_statistics
from verl_lightning.modules.judge import RewardResult, first_failure
from verl_lightning.types import ImageInputs, Rollout


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """Responses with their rewards."""

    rollout: Rollout
    """The responses; those of one prompt are adjacent rows."""

    reward_result: RewardResult
    """Rewards of the responses."""

    @property
    def num_groups(self) -> int:
        """Prompts that were answered."""
        return len(torch.unique(self.rollout.prompt_index))

    def groups_with_signal(self) -> ScoredRollout:
        """The groups whose valid responses do not all have the same reward."""
        rewards, is_valid = self.reward_result.rewards, self.reward_result.is_valid
        group = group_statistics(rewards, self.rollout.prompt_index, is_valid)
        members = self.rollout.prompt_index[group.has_signal]
        return self._select(torch.isin(self.rollout.prompt_index, members).nonzero().squeeze(-1))

    def groups(self, chosen: Sequence[int]) -> ScoredRollout:
        """The groups at these positions, in this order."""
        order = torch.unique_consecutive(self.rollout.prompt_index, return_inverse=True)[1].tolist()
        rows: dict[int, list[int]] = {group: [] for group in order}
        for row, group in enumerate(order):
            rows[group].append(row)
        return self._select(torch.tensor([row for group in chosen for row in rows[group]], dtype=torch.long))

    def with_penalty(self, penalty: Float[Tensor, " batch"]) -> ScoredRollout:
        """The same responses with ``penalty`` added to their rewards."""
        rewards = torch.where(
            self.reward_result.is_valid, self.reward_result.rewards + penalty, self.reward_result.rewards
        )
        return dataclasses.replace(self, reward_result=dataclasses.replace(self.reward_result, rewards=rewards))

    def to(self, device: torch.device) -> ScoredRollout:
        """Returns the same responses on another device."""
        return ScoredRollout(rollout=self.rollout.to(device), reward_result=self.reward_result.to(device))

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings, on the host."""
        host = self.to(torch.device("cpu"))
        return {
            "rollout": _fields(dataclasses.replace(host.rollout, row_lengths=None, episodes=None))
            | _plain_images(host.rollout),
            "verdict": _fields(host.reward_result),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ScoredRollout:
        """Restores, on the host, the rollout that a `state_dict` was taken from."""
        rollout = dict(state["rollout"])
        if rollout.get("images") is not None:
            rollout["images"] = tuple(None if images is None else ImageInputs(**images) for images in rollout["images"])
        return cls(rollout=Rollout(**rollout), reward_result=RewardResult(**state["verdict"]))

    def _select(self, rows: Int[Tensor, " rows"]) -> ScoredRollout:
        reward_result = dataclasses.replace(
            self.reward_result,
            responses=[self.reward_result.responses[row] for row in rows.tolist()],
            rewards=self.reward_result.rewards[rows],
            is_valid=self.reward_result.is_valid[rows],
            components={name: values[rows] for name, values in self.reward_result.components.items()},
            token_rewards=None if self.reward_result.token_rewards is None else self.reward_result.token_rewards[rows],
        )
        return ScoredRollout(rollout=self.rollout.select(rows), reward_result=reward_result)


def join_scored_rollouts(parts: Sequence[ScoredRollout], *, pad_token_id: int) -> ScoredRollout:
    """Several rollouts with their rewards as one, groups kept apart.

    Args:
        parts: At least one, with any widths.
        pad_token_id: Token that fills ``input_ids``.
    """
    return ScoredRollout(
        rollout=join_rollouts([part.rollout for part in parts], pad_token_id=pad_token_id),
        reward_result=_join_results([part.reward_result for part in parts]),
    )


def deal_out(
    saved: Sequence[Sequence[dict[str, Any]]], *, rank: int, ranks: int, pad_token_id: int
) -> list[ScoredRollout]:
    """One rank's share of what all ranks had gathered, batch by batch.

    Args:
        saved: `ScoredRollout.state_dict` of each batch, for each rank of the run that saved.
        rank: Rank whose share is returned.
        ranks: Number of ranks now. If as many saved, each gets its own back; else see `dealt_prompts`.
        pad_token_id: Token that fills ``input_ids``.
    """
    if len(saved) == ranks:
        return [ScoredRollout.from_state_dict(state) for state in saved[rank]]
    batches = [[ScoredRollout.from_state_dict(state) for state in batch] for batch in zip(*saved, strict=True)]
    return [_share(batch, rank=rank, ranks=ranks, pad_token_id=pad_token_id) for batch in batches]


def _share(parts: Sequence[ScoredRollout], *, rank: int, ranks: int, pad_token_id: int) -> ScoredRollout:
    """One rank's share of a batch; the failures of all are counted on the first."""
    own = dealt_prompts([part.num_groups for part in parts], rank=rank, ranks=ranks)
    share = join_scored_rollouts(parts, pad_token_id=pad_token_id).groups(own)
    if rank == 0:
        return share
    return dataclasses.replace(
        share, reward_result=dataclasses.replace(share.reward_result, num_errors=0, num_timeouts=0, num_none=0)
    )


def _plain_images(rollout: Rollout) -> dict[str, Any]:
    """The images of a rollout's rows as plain tensors; nothing without images."""
    if rollout.images is None:
        return {}
    return {"images": [None if images is None else dict(vars(images)) for images in rollout.images]}


def _fields(instance: Rollout | RewardResult) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def _join_results(results: Sequence[RewardResult]) -> RewardResult:
    names = sorted({name for reward_result in results for name in reward_result.components})
    missing = [torch.full_like(reward_result.rewards, torch.nan) for reward_result in results]
    components = {
        name: torch.cat([v.components.get(name, gap) for v, gap in zip(results, missing, strict=True)])
        for name in names
    }
    is_valid: Bool[Tensor, " batch"] = torch.cat([reward_result.is_valid for reward_result in results])
    return RewardResult(
        responses=[response for reward_result in results for response in reward_result.responses],
        rewards=torch.cat([reward_result.rewards for reward_result in results]),
        is_valid=is_valid,
        components=components,
        num_errors=sum(reward_result.num_errors for reward_result in results),
        num_timeouts=sum(reward_result.num_timeouts for reward_result in results),
        num_none=sum(reward_result.num_none for reward_result in results),
        first_failure=first_failure(results),
        token_rewards=_joined_token_rewards([r.token_rewards for r in results if r.token_rewards is not None]),
    )


def _joined_token_rewards(parts: Sequence[Float[Tensor, "_ _"]]) -> Float[Tensor, "batch response"] | None:
    width = max((part.shape[1] for part in parts), default=0)
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts]) if parts else None


def join_rollouts(parts: Sequence[Rollout], *, pad_token_id: int) -> Rollout:
    """Joins rollouts into one: prompts padded on the left, responses on the right, groups kept apart.

    Args:
        parts: Rollouts, at least one, of any widths.
        pad_token_id: Token that fills the padding of ``input_ids``.
    """
    responses = max(part.response_mask.shape[1] for part in parts)
    prompts = max(part.input_ids.shape[1] - part.response_mask.shape[1] for part in parts)
    padded = [_pad(part, prompts, responses, pad_token_id) for part in parts]
    joined: dict[str, Any] = {name: torch.cat([row[name] for row in padded]) for name in padded[0]}
    counts = torch.tensor([int(part.prompt_index.max()) + 1 if len(part) else 0 for part in parts])
    offsets = (counts.cumsum(0) - counts).tolist()
    joined["prompt_index"] = torch.cat(
        [part.prompt_index + offset for part, offset in zip(parts, offsets, strict=True)]
    )
    if all(part.episodes is not None for part in parts):
        joined["episodes"] = tuple(episode for part in parts for episode in part.episodes or ())
    if any(part.images is not None for part in parts):
        joined["images"] = tuple(images for part in parts for images in part.images or [None] * len(part))
        joined["mm_token_type_ids"] = torch.cat([_padded_types(part, prompts, responses) for part in parts])
    return Rollout(temperature=parts[0].temperature, **joined)


def _padded_types(rollout: Rollout, prompts: int, responses: int) -> Int[Tensor, "rows columns"]:
    width, types = rollout.response_mask.shape[1], rollout.mm_token_type_ids
    types = torch.zeros_like(rollout.input_ids) if types is None else types
    return F.pad(types, (prompts - (types.shape[1] - width), responses - width))


def dealt_prompts(counts: Sequence[int], *, rank: int, ranks: int) -> list[int]:
    """Returns the prompts of a joined rollout that are one rank's, where other ranks had sampled its parts.

    Rank ``r`` of ``n`` has every ``n``-th prompt of a batch, so the batch's order is the first prompt of each part, the
    second of each, and so on; dealt out in that order, a mini-batch has the same prompts on any number of ranks.

    Args:
        counts: Prompts of each part.
        rank: Rank whose prompts are returned.
        ranks: Number of ranks that there are now.
    """
    starts = accumulate(counts, initial=0)
    turns = [(turn, start + turn) for start, count in zip(starts, counts, strict=False) for turn in range(count)]
    return [prompt for _, prompt in sorted(turns)][rank::ranks]


def _pad(rollout: Rollout, prompts: int, responses: int, pad_token_id: int) -> dict[str, Tensor]:
    width = rollout.response_mask.shape[1]
    right = (0, responses - width)
    both = (prompts - (rollout.input_ids.shape[1] - width), responses - width)
    return {
        "input_ids": F.pad(rollout.input_ids, both, value=pad_token_id),
        "attention_mask": F.pad(rollout.attention_mask, both, value=False),
        "response_mask": F.pad(rollout.response_mask, right, value=False),
        "rollout_log_probs": F.pad(rollout.rollout_log_probs, right),
        "is_truncated": rollout.is_truncated,
    }
