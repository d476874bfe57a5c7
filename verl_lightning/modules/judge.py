"""From sampled tokens to rewards: decodes responses and has the reward workers score them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_lightning.episodes import Episode
from verl_lightning.functional.groups import RELATIVE_NOISE
from verl_lightning.metrics import Metric, spread, total
from verl_lightning.rewards.base import RewardSample
from verl_lightning.rewards.config import RewardConfig
from verl_lightning.rewards.loading import OF_ENVIRONMENTS
from verl_lightning.rewards.pool import RewardPool, make_pool
from verl_lightning.rewards.scoring import RewardResults
from verl_lightning.rewards.trial import trial_note, trial_responses, trial_warning
from verl_lightning.rollout.base import Completion
from verl_lightning.types import Rollout

_LARGEST_USEFUL = 1e15  # rewards; the square of what a gradient makes of it still fits into float32
_SMALLEST_USEFUL = 1e-5  # the largest reward of a batch; estimators divide by a group's spread plus 1e-6
_ROUNDING = 1e-12  # relative differences below it come from float64's own rounding
_OWN_COLUMNS = {"prompt", "data_source", "reward_model", "extra_info"}


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Rewards that the reward function gave to a rollout's responses."""

    responses: list[str]
    """The responses as text."""

    rewards: Float[Tensor, " batch"]
    """Reward of each response; 0 where there is none."""

    is_valid: Bool[Tensor, " batch"]
    """False where the reward function failed or nothing can be trained on: such rows count in nothing."""

    components: dict[str, Float[Tensor, " batch"]]
    """The other numbers that the reward function gave; nan where it gave none."""

    num_errors: int
    """Responses whose reward function failed."""

    num_timeouts: int
    """Responses whose reward function took too long."""

    num_none: int = 0
    """Responses for which the reward function returned None: it has no reward for them."""

    first_failure: str | None = None
    """Traceback or message of the first response whose reward function failed or took too long; None if none has."""

    token_rewards: Float[Tensor, "batch response"] | None = None
    """The part of the rewards that environments gave, at the last token of the turn that earned it; None without
    environments."""

    @property
    def known_rewards(self) -> list[float | None]:
        """The rewards as plain numbers; None where there is none."""
        known = zip(self.rewards.tolist(), self.is_valid.tolist(), strict=True)
        return [reward if is_valid else None for reward, is_valid in known]

    def to(self, device: torch.device) -> Self:
        """Returns the same result on another device."""
        return replace(
            self,
            rewards=self.rewards.to(device),
            is_valid=self.is_valid.to(device),
            components={name: values.to(device) for name, values in self.components.items()},
            token_rewards=None if self.token_rewards is None else self.token_rewards.to(device),
        )

    def select(self, rows: Int[Tensor, " rows"]) -> Self:
        """Returns the result of some of the responses; whoever selects counts failures by himself."""
        tokens = self.token_rewards
        return replace(
            self,
            responses=[self.responses[row] for row in rows.tolist()],
            rewards=self.rewards[rows],
            is_valid=self.is_valid[rows],
            components={name: values[rows] for name, values in self.components.items()},
            token_rewards=None if tokens is None else tokens[rows],
        )

    def scores(self) -> dict[str, Metric]:
        """Rewards under the names that verl's users know."""
        metrics = spread("critic/score", self.rewards, self.is_valid)
        for name, values in self.components.items():
            metrics |= spread(f"reward/{name}", values, self.is_valid & values.isfinite())
        return metrics

    def failures(self) -> dict[str, Metric]:
        """Counts the responses that got no reward, by cause."""
        counts = {"errors": self.num_errors, "timeouts": self.num_timeouts, "none": self.num_none}
        return {f"reward/{name}": total(float(count)) for name, count in counts.items()}


def first_failure(results: Iterable[RewardResult]) -> str | None:
    """Returns the first failure of several results; None if there is none."""
    return next((result.first_failure for result in results if result.first_failure), None)


def told_failure(failure: str | None) -> str:
    """Returns the end of a message about failures, with the first of them; nothing if it is not known."""
    return f" The first failure:\n{failure}" if failure else ""


class EarlyScores:
    """Scores of a batch whose responses come one by one: each is scored while others are still sampled.

    A function that judges all responses to a prompt at once gets them when the last is there.

    Args:
        pool: Workers that score.
        rows: The prompts' data rows.
        num_samples: Number of responses to each.
        texts: Function that turns tokens into text.
    """

    def __init__(
        self,
        pool: RewardPool,
        rows: Sequence[dict[str, Any]],
        num_samples: int,
        texts: Callable[[list[list[int]]], list[str]],
    ) -> None:
        self._pool = pool
        self._rows = rows
        self._num_samples = num_samples
        self._texts = texts
        self._size = num_samples if pool.is_batched else 1  # of a unit
        self._samples: dict[int, RewardSample] = {}
        self._batch = pool.begin([self._size] * (len(rows) * num_samples // self._size))

    def __call__(self, position: int, completion: Completion) -> None:
        """Takes a response by its position in the batch."""
        row = self._rows[position // self._num_samples]
        [text] = self._texts([completion.token_ids])
        self._samples[position] = make_sample(row, text, completion.is_truncated, completion.token_ids)
        first = position // self._size * self._size
        unit = [self._samples[each] for each in range(first, first + self._size) if each in self._samples]
        if len(unit) == self._size:
            self._pool.offer(self._batch, first // self._size, unit)

    def is_of(self, rows: Sequence[dict[str, Any]], num_responses: int) -> bool:
        """Tells whether these are the responses to some rows, all of them."""
        return self._rows is rows and len(self._samples) == num_responses == len(rows) * self._num_samples

    def finish(self) -> tuple[list[str], RewardResults]:
        """Waits for the scores that are missing; returns the responses as text, and all scores."""
        results = self._pool.finish(self._batch)
        return [self._samples[position].response for position in range(len(self._samples))], results

    def give_up(self) -> None:
        """Frees the workers from responses that nobody asks for any more."""
        self._pool.give_up(self._batch)


class Judge:
    """Scores rollouts with a reward function in workers.

    Args:
        config: The reward function and its limits.
        tokenizer: Turns responses into text.
    """

    def __init__(self, config: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        is_silent = config.function == OF_ENVIRONMENTS or not config.parts
        self._pool = None if is_silent else make_pool(config)
        self._tokenizer = tokenizer
        self._has_warned = False
        self._early: EarlyScores | None = None

    def start(self) -> None:
        """Starts the workers.

        Raises:
            ValueError: If the reward function does not import.
        """
        if self._pool is not None:
            self._pool.start()

    def stop(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.stop()

    def try_out(self, rows: Sequence[dict[str, Any]]) -> None:
        """Has the reward function judge made-up responses to each row, and tells what rewards they got.

        Raises:
            ValueError: If it has a fault that no response is to blame for, such as a wrong signature or return type.
        """
        if self._pool is None:
            return
        notes: set[str | None] = set()
        for row in rows:
            responses = trial_responses(ground_truth(row))
            tokens = self._tokenizer(responses, add_special_tokens=False)["input_ids"]
            samples = [make_sample(row, text, False, ids) for text, ids in zip(responses, tokens, strict=True)]
            results = self._pool.score(samples, max_error_share=1.0)
            if (warning := trial_warning(self._config, row["data_source"], responses, results)) is not None:
                rank_zero_warn(warning)
            notes.add(trial_note(self._config, results))
        for note in sorted(note for note in notes if note is not None):
            rank_zero_info(note)

    def begin(self, rows: Sequence[dict[str, Any]], num_samples: int) -> EarlyScores | None:
        """Begins to score responses while others are still sampled; `score` waits for the rest.

        Args:
            rows: The prompts' data rows.
            num_samples: Number of responses to each.

        Returns:
            Listener to tell of each response as soon as it is finished; None where workers take whole batches only, as
            Ray's do.
        """
        if not isinstance(self._pool, RewardPool):
            return None
        if self._early is not None:  # of a batch whose engine died
            self._early.give_up()
        self._early = EarlyScores(self._pool, rows, num_samples, self._texts)
        return self._early

    def _texts(self, tokens: list[list[int]]) -> list[str]:
        skips = self._config.skip_special_tokens
        texts: list[str] = self._tokenizer.batch_decode(tokens, skip_special_tokens=skips)
        return texts

    def score(self, rollout: Rollout, rows: Sequence[dict[str, Any]]) -> RewardResult:
        """Scores every response: what its environment gave it, and what the reward function gives.

        Args:
            rollout: Sampled responses.
            rows: The prompts' data rows; ``rollout.prompt_index`` points into them.
        """
        early, self._early = self._early, None
        if early is not None and early.is_of(rows, len(rollout)):
            responses, results = early.finish()
        else:
            if early is not None:
                early.give_up()
            responses, results = self._score_all(rollout, rows)
        if self._pool is not None:
            self._warn_of_scale(results.rewards, rollout.prompt_index.tolist())
        rewards = _to_tensor(results.rewards, rollout.input_ids.device)
        scored = RewardResult(
            responses=responses,
            rewards=rewards.nan_to_num(),
            is_valid=rewards.isfinite() & rollout.response_mask.any(-1),
            components={name: _to_tensor(values, rewards.device) for name, values in results.components.items()},
            num_errors=results.num_errors,
            num_timeouts=results.num_timeouts,
            num_none=results.num_none,
            first_failure=results.first_traceback,
        )
        return scored if rollout.episodes is None else with_episodes(scored, rollout.episodes, rollout.response_mask)

    def _score_all(self, rollout: Rollout, rows: Sequence[dict[str, Any]]) -> tuple[list[str], RewardResults]:
        tokens = response_tokens(rollout)
        responses = self._texts(tokens)
        if self._pool is None:
            return responses, RewardResults(rewards=[0.0] * len(rollout), components={})
        prompts = [rows[index] for index in rollout.prompt_index.tolist()]
        told = zip(prompts, responses, rollout.is_truncated.tolist(), tokens, strict=True)
        return responses, self._pool.score([make_sample(*each) for each in told])

    def _warn_of_scale(self, rewards: Sequence[float | None], prompts: Sequence[int]) -> None:
        """Warns once of rewards whose differences get lost."""
        if not self._has_warned and (warning := scale_warning(rewards, prompts)) is not None:
            self._has_warned = True
            rank_zero_warn(f"The reward {self._config.label} {warning}")


def with_episodes(
    result: RewardResult, episodes: Sequence[Episode], response_mask: Bool[Tensor, "batch response"]
) -> RewardResult:
    """Adds what environments gave to the rewards of a reward function; episodes that failed have none.

    Args:
        result: Rewards of the reward function.
        episodes: Episode of each response.
        response_mask: True on the policy's own tokens.
    """
    given = torch.zeros(response_mask.shape)
    for row, episode in enumerate(episodes):
        for end, reward in zip(episode.turn_ends, episode.rewards, strict=False):  # a turn that failed has none
            given[row, end - 1] += reward
    token_rewards = given.to(response_mask.device)
    before = torch.tensor([sum(sum(each.rewards) for each in episode.past) for episode in episodes])
    errors = [episode.error for episode in episodes]
    failed = torch.tensor([bool(error) for error in errors], device=response_mask.device)
    num_timeouts = sum(episode.is_timeout for episode in episodes)
    return replace(
        result,
        rewards=result.rewards + token_rewards.sum(-1) + before.to(result.rewards),
        is_valid=result.is_valid & ~failed,
        num_errors=result.num_errors + sum(map(bool, errors)) - num_timeouts,
        num_timeouts=result.num_timeouts + num_timeouts,
        first_failure=next(filter(None, [result.first_failure, *errors]), None),
        token_rewards=token_rewards,
    )


def unjudged(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> RewardResult:
    """Makes the result of a rollout that nobody judges: reward 0 for every response."""
    return RewardResult(
        responses=response_texts(rollout, tokenizer, skip_special_tokens=True),
        rewards=torch.zeros(len(rollout), device=rollout.input_ids.device),
        is_valid=rollout.response_mask.any(-1),
        components={},
        num_errors=0,
        num_timeouts=0,
    )


def response_texts(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool) -> list[str]:
    """Returns each response as text, without padding."""
    texts: list[str] = tokenizer.batch_decode(response_tokens(rollout), skip_special_tokens=skip_special_tokens)
    return texts


def response_tokens(rollout: Rollout) -> list[list[int]]:
    """Returns the tokens of each response, without padding."""
    lengths = rollout.attention_mask[:, -rollout.response_mask.shape[1] :].sum(-1).tolist()
    return [ids[:length] for ids, length in zip(rollout.response_ids.tolist(), lengths, strict=True)]


def scale_warning(rewards: Sequence[float | None], prompts: Sequence[int]) -> str | None:
    """Tells what is wrong with the scale of rewards; None if nothing is.

    Args:
        rewards: Rewards as the function returned them; None where there is none.
        prompts: Index of the prompt that each response answers.
    """
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for reward, prompt in zip(rewards, prompts, strict=True):
        if reward is not None:
            groups[prompt].append(reward)
    largest = max((abs(reward) for group in groups.values() for reward in group), default=0.0)
    if largest > _LARGEST_USEFUL:
        return (
            f"returned a number as large as {largest:g}. Differences between such rewards get lost, and gradients may"
            " overflow float32: updates are skipped then. Return numbers nearer to 1."
        )
    if 0 < largest < _SMALLEST_USEFUL:
        return (
            f"returned nothing larger than {largest:g}. Differences between such rewards get lost, and hardly anything"
            " is learnt from them. Return numbers nearer to 1."
        )
    blurred = [group for group in groups.values() if _ROUNDING < _relative_spread(group) <= RELATIVE_NOISE]
    if blurred:
        return (
            f"returned almost the same for the responses to a prompt, such as {min(blurred[0])!r} and"
            f" {max(blurred[0])!r}, in {len(blurred)} of {len(groups)} prompts. Rewards that differ by less than a"
            " millionth count as equal, and nothing is learnt from them. Take off what they have in common."
        )
    return None


def _relative_spread(rewards: Sequence[float]) -> float:
    return (max(rewards) - min(rewards)) / max(max(map(abs, rewards)), sys.float_info.min)


def ground_truth(row: Mapping[str, Any]) -> Any:
    """Returns the right answer to a row's prompt; None if the row has none."""
    return (row.get("reward_model") or {}).get("ground_truth")


def make_sample(row: dict[str, Any], response: str, is_truncated: bool, token_ids: list[int]) -> RewardSample:
    """Makes the reward function's input from a row and a response; unknown columns go into ``extra_info``."""
    others = {name: value for name, value in row.items() if name not in _OWN_COLUMNS}
    return RewardSample(
        response=response,
        ground_truth=ground_truth(row),
        data_source=row["data_source"],
        prompt=row["prompt"],
        extra_info=others | (row.get("extra_info") or {}),
        is_truncated=is_truncated,
        token_ids=token_ids,
    )


def _to_tensor(values: Sequence[float | None], device: torch.device) -> Float[Tensor, " batch"]:
    return torch.tensor([float("nan") if value is None else value for value in values], device=device)
