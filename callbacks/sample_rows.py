"""The rows of a table of responses: what was asked, said and judged, token by token if asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from verl_lightning.callbacks.json_files import to_json
from verl_lightning.episodes import Episode, PastTrajectory
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.judge import RewardResult, ground_truth
from verl_lightning.pictures import thumbnail
from verl_lightning.types import Experience, Rollout

Row = dict[str, Any]
"""A row as JSON has it. Rows of conversations may have ``turns`` too, which the page shows one by one.

A turn has a ``role`` and a ``text``, and may have ``is_trained`` (False for what others said), a ``reward``, the name
of a ``tool``, the ``seconds`` that it took, and the number of its ``trajectory`` where an episode has several. The
tokens of such an episode are those of its last trajectory; ``past`` holds those of the others.
"""


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """Limits of what rows keep."""

    max_characters: int
    """Longest prompt or response; more is cut and marked."""

    max_tokens: int
    """Tokens of a response that are kept one by one; 0 keeps none."""

    def cut(self, text: str) -> str:
        """A text of at most `max_characters`, with a mark where it was longer."""
        if len(text) <= self.max_characters:
            return text
        return f"{text[: self.max_characters]}... ({len(text) - self.max_characters} more characters)"


def make_rows(
    module: PostTrainingModule,
    rollout: Rollout,
    reward_result: RewardResult,
    rows: Sequence[Mapping[str, Any]],
    *,
    step: int,
    count: int,
    limits: RowLimits,
    advantages: Sequence[float] | None = None,
) -> list[Row]:
    """Makes the rows of the first responses of a rollout.

    Args:
        module: Module whose tokenizer made the tokens.
        rollout: Responses.
        reward_result: Their rewards.
        rows: Data rows that ``rollout.prompt_index`` points into.
        step: Finished steps of the policy that answered.
        count: Number of rows.
        limits: Limits of what they keep.
        advantages: Mean advantage of each response; None in a validation.
    """
    rewards, prompts = reward_result.known_rewards, rollout.prompt_index.tolist()
    is_truncated = rollout.is_truncated.tolist()
    found = []
    for index in islice(range(len(rollout)), count):
        row = rows[prompts[index]]
        found.append(
            {
                "step": step,
                "data_source": row["data_source"],
                "prompt": limits.cut(_said(row)),
                "response": limits.cut(reward_result.responses[index]),
                "reward": rewards[index],
                "ground_truth": ground_truth(row),
                "reward_parts": _parts(reward_result, index),
                "is_truncated": is_truncated[index],
                **({} if advantages is None else {"advantage": advantages[index]}),
                **({} if rollout.episodes is None else {"turns": turns_of(rollout.episodes[index], limits)}),
                **_tokens(module, rollout, index, limits.max_tokens),
                **_past_tokens(module, rollout, index, limits.max_tokens),
                **_images(row),
            }
        )
    return found


def turns_of(episode: Episode, limits: RowLimits) -> list[Row]:
    """The messages of an episode: those that it began with, the policy's with their rewards, and what it read.

    The first message that follows a turn of the policy has the time that the environment took for it.

    Args:
        episode: Walk through an environment.
        limits: Limits of what a row keeps.
    """
    turns: list[Row] = []
    trajectories: list[Episode | PastTrajectory] = [*episode.past, episode]
    num_before = 0
    for number, trajectory in enumerate(trajectories, 1):
        seconds = episode.seconds[num_before:]
        own = _turns_of_one(trajectory, seconds, limits)
        turns += own if len(trajectories) == 1 else [{**turn, "trajectory": number} for turn in own]
        num_before += len(trajectory.turn_ends)
    return turns


def _turns_of_one(trajectory: Episode | PastTrajectory, seconds: Sequence[float], limits: RowLimits) -> list[Row]:
    """The messages of one trajectory."""
    roles = [message["role"] for message in trajectory.messages]
    given = roles.count("assistant") - len(trajectory.turn_ends)  # examples among the first messages
    turns: list[Row] = []
    number = -given  # of the policy's turns so far
    for message in trajectory.messages:
        is_own = message["role"] == "assistant"
        turn: Row = {"role": message["role"], "text": limits.cut(_text(message)), "is_trained": is_own and number >= 0}
        if is_own and 0 <= number < len(trajectory.rewards):
            turn["reward"] = trajectory.rewards[number]
        elif not is_own and turns and turns[-1]["is_trained"] and number < len(seconds):
            turn["seconds"] = seconds[number]  # the first one is of the beginning
        if message.get("name"):
            turn["tool"] = message["name"]
        turns.append(turn)
        number += is_own
    return turns


def mean_advantages(experience: Experience) -> list[float]:
    """Mean advantage of the trained tokens of each response, in all trajectories of its episode."""
    mask = experience.response_mask
    rows = torch.stack([(experience.advantages * mask).sum(-1), mask.sum(-1)], dim=-1).tolist()
    sums: dict[int, list[tuple[float, float]]] = {}
    for owner, row in zip(experience.episode_index or range(len(rows)), rows, strict=True):
        sums.setdefault(owner, []).append(row)
    return [sum(total for total, _ in own) / max(1.0, sum(count for _, count in own)) for own in sums.values()]


def _text(message: Mapping[str, Any]) -> str:
    """The content of a message, and the tools that it calls."""
    content = message.get("content") or ""
    said = content if isinstance(content, str) else to_json(content)
    calls = message.get("tool_calls")
    return said if not calls else f"{said}\n{to_json(calls)}".strip()


def _parts(reward_result: RewardResult, index: int) -> dict[str, float]:
    """The finite numbers that the reward function gave a response beside the reward, by name."""
    values = {name: float(column[index]) for name, column in reward_result.components.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _tokens(module: PostTrainingModule, rollout: Rollout, index: int, max_tokens: int) -> Row:
    """The tokens of a response: their texts, ids, log-probs under the engine, and whether they are trained on."""
    if not max_tokens:
        return {}
    width = rollout.response_mask.shape[1]
    length = min(int(rollout.attention_mask[index, -width:].sum()), max_tokens)
    columns = (rollout.response_ids, rollout.response_mask, rollout.rollout_log_probs)
    ids, mask, log_probs = (column[index, :length].tolist() for column in columns)
    return _told_tokens(module, ids, mask, log_probs)


def _past_tokens(module: PostTrainingModule, rollout: Rollout, index: int, max_tokens: int) -> Row:
    """The tokens of an episode's trajectories but the last; nothing where it has one."""
    past = rollout.episodes[index].past if rollout.episodes is not None and max_tokens else []
    n = max_tokens
    told = [_told_tokens(module, each.token_ids[:n], each.is_own[:n], each.log_probs[:n]) for each in past]
    return {"past": told} if told else {}


def _told_tokens(
    module: PostTrainingModule, ids: Sequence[int], mask: Sequence[bool], log_probs: Sequence[float]
) -> Row:
    texts = module.tokenizer.batch_decode([[token] for token in ids])
    told = {"tokens": texts, "token_ids": list(ids), "log_probs": [round(value, 4) for value in log_probs]}
    return told | ({} if all(mask) else {"is_trained": list(mask)})


def _images(row: Mapping[str, Any]) -> Row:
    """Small copies of a prompt's images, for the page; nothing without images."""
    images = row.get("images")
    return {"images": [thumbnail(source) for source in images]} if images else {}


def _said(row: Mapping[str, Any]) -> str:
    """The messages of a prompt."""
    return "\n".join(str(message["content"]) for message in row["prompt"])
