"""Episodes of several trajectories: a row of each for the models, and a row an episode for what judges them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from verl_lightning.episodes import PastTrajectory
from verl_lightning.rollout.completions import padded
from verl_lightning.types import Rollout, send


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """The trajectories of a rollout, which models score one by one.

    Rewards, advantages and corrections are of episodes: in a joined row an episode's trajectories stand one after
    another in their order, with a column between them that holds no token. A history that is written anew is so a step
    of the environment like any other.
    """

    rows: Rollout
    """All trajectories, those of an episode one after another."""

    episode_index: tuple[int, ...] | None = None
    """Response of the rollout that each row is of; None where each row is one by itself, and joined rows are rows."""

    places: Int[Tensor, "rows response"] | None = None
    """Place of each column in the joined rows, one after another; behind their end for columns that are padding."""

    past_rewards: Float[Tensor, "rows response"] | None = None
    """Rewards of turns in all trajectories but the last ones, in whose rows it is 0."""

    width: int = 0
    """Columns of the joined rows."""

    def joined(self, values: Tensor) -> Tensor:
        """Returns values of the rows' response columns as those of the joined rows."""
        if self.places is None or self.episode_index is None:
            return values
        size = (self.episode_index[-1] + 1) * self.width
        whole = values.new_zeros(size + 1).scatter(0, self.places.flatten(), values.flatten())
        return whole[:size].view(-1, self.width)

    def parted(self, values: Tensor) -> Tensor:
        """Returns values of the joined rows' columns as those of the rows, 0 on padding."""
        if self.places is None:
            return values
        return F.pad(values.flatten(), (0, 1))[self.places]

    def joined_rewards(self, of_last: Float[Tensor, "batch response"] | None) -> Tensor | None:
        """Returns the rewards of turns in the joined rows.

        Args:
            of_last: Rewards of turns in each episode's last trajectory; None where turns have none.
        """
        if self.past_rewards is None or of_last is None:
            return of_last
        rewards = self.past_rewards.to(of_last.dtype)
        rewards[_last_rows(self.episode_index)] = F.pad(of_last, (0, rewards.shape[1] - of_last.shape[1]))
        return self.joined(rewards)


def trajectories_of(rollout: Rollout, *, pad_token_id: int) -> Trajectories:
    """Takes a rollout's episodes apart into trajectories.

    Args:
        rollout: Responses, of which each is the last trajectory of its episode.
        pad_token_id: Token that fills the padding.
    """
    episodes = rollout.episodes or ()
    varied = dataclasses.replace(rollout, rows_vary=bool(episodes))
    past = [(index, each) for index, episode in enumerate(episodes) for each in episode.past]
    if not past:
        return Trajectories(rows=varied)
    before = Rollout(
        **padded([each.prompt_ids for _, each in past], [each for _, each in past], pad_token_id),
        temperature=rollout.temperature,
        prompt_index=torch.zeros(len(past), dtype=torch.long),
    ).to(rollout.input_ids.device)
    both = _stacked(rollout, before, pad_token_id=pad_token_id)
    owners = [*range(len(episodes)), *(index for index, _ in past)]
    # Stable, and past trajectories first: of two rows of an episode, that with the smaller key.
    order = sorted(range(len(owners)), key=lambda row: (owners[row], row < len(episodes)))
    episode_index = tuple(owners[row] for row in order)
    device = rollout.input_ids.device
    rows = both.select(send(torch.tensor(order), device))
    prompts = rollout.prompt_index[send(torch.tensor(episode_index), device)]
    rows = dataclasses.replace(rows, prompt_index=prompts, rows_vary=True)
    told: list[PastTrajectory | None] = [None if row < len(episodes) else past[row - len(episodes)][1] for row in order]
    places, width = _places(told, episode_index, rollout.response_mask.shape[1], rows.response_mask.shape[1])
    return Trajectories(
        rows=rows,
        episode_index=episode_index,
        places=send(places, device),
        past_rewards=send(_past_rewards(told, rows.response_mask.shape[1]), device),
        width=width,
    )


def _stacked(first: Rollout, second: Rollout, *, pad_token_id: int) -> Rollout:
    """Returns the rows of two rollouts without their episodes, padded to the wider one."""
    responses = max(part.response_mask.shape[1] for part in (first, second))
    prompts = max(part.input_ids.shape[1] - part.response_mask.shape[1] for part in (first, second))
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for part in (first, second):
        width = part.response_mask.shape[1]
        right, both = (0, responses - width), (prompts - (part.input_ids.shape[1] - width), responses - width)
        columns["input_ids"].append(F.pad(part.input_ids, both, value=pad_token_id))
        columns["attention_mask"].append(F.pad(part.attention_mask, both, value=False))
        columns["response_mask"].append(F.pad(part.response_mask, right, value=False))
        columns["rollout_log_probs"].append(F.pad(part.rollout_log_probs, right))
        columns["is_truncated"].append(part.is_truncated)
        columns["prompt_index"].append(part.prompt_index)
    stacked: dict[str, Any] = {name: torch.cat(parts) for name, parts in columns.items()}
    return Rollout(temperature=first.temperature, **stacked)


def longest_lengths(rollout: Rollout) -> Int[Tensor, " batch"]:
    """Returns the policy's own tokens in each response, of an episode's trajectories those in the longest."""
    lengths = rollout.response_mask.sum(-1)
    if not any(episode.past for episode in rollout.episodes or ()):
        return lengths
    past = [max((sum(each.is_own) for each in episode.past), default=0) for episode in rollout.episodes or ()]
    return torch.maximum(lengths, send(torch.tensor(past), lengths.device))


def _places(
    rows: list[PastTrajectory | None], episode_index: tuple[int, ...], last_width: int, row_width: int
) -> tuple[Int[Tensor, "rows response"], int]:
    """Returns `Trajectories.places`, and the columns of the joined rows.

    Args:
        rows: Each row's trajectory; None for an episode's last one.
        episode_index: Episode of each row.
        last_width: Columns of the last trajectories.
        row_width: Columns of all rows.
    """
    starts, lengths, start = list[int](), list[int](), 0
    for row in rows:
        starts.append(start)
        lengths.append(last_width if row is None else len(row.token_ids))
        start = 0 if row is None else start + lengths[-1] + 1
    width = max(map(sum, zip(starts, lengths, strict=True)))
    columns = torch.arange(row_width)
    begins = torch.tensor([index * width + start for index, start in zip(episode_index, starts, strict=True)])
    is_real = columns < torch.tensor(lengths)[:, None]
    return torch.where(is_real, begins[:, None] + columns, (episode_index[-1] + 1) * width), width


def _past_rewards(rows: list[PastTrajectory | None], width: int) -> Float[Tensor, "rows response"]:
    rewards = torch.zeros(len(rows), width)
    for number, row in enumerate(rows):
        if row is not None:
            for end, reward in zip(row.turn_ends, row.rewards, strict=False):
                rewards[number, end - 1] += reward
    return rewards


def _last_rows(episode_index: tuple[int, ...] | None) -> list[int]:
    """Returns the row of each episode's last trajectory."""
    assert episode_index is not None
    return sorted({episode: row for row, episode in enumerate(episode_index)}.values())


def episode_sums(values: Int[Tensor, " rows"], episode_index: tuple[int, ...]) -> Int[Tensor, " rows"]:
    """Returns the sum over the rows of each row's episode.

    Args:
        values: Numbers of rows.
        episode_index: Episode of each row, in rising order.
    """
    numbers = [episode - episode_index[0] for episode in episode_index]
    owners = send(torch.tensor(numbers), values.device)
    sums = values.new_zeros(numbers[-1] + 1).scatter_add(0, owners, values)
    return sums[owners]
