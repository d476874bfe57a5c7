"""Conversations of several turns: the policy answers, an environment such as a tool replies, the policy goes on."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from verl_lightning.rollout.base import Prompts, SamplingConfig
from verl_lightning.rollout.completions import Completion, to_rollout
from verl_lightning.seeding import derive_seed
from verl_lightning.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation so far."""

    prompt: str
    """Text of the prompt, with the marks of the chat template."""

    responses: tuple[str, ...]
    """The policy's turns, the newest last, without special tokens."""

    observations: tuple[str, ...]
    """Replies to all of the policy's turns but the newest."""


class Environment(ABC):
    """The policy's partner, such as a tool, a game or a user; the same conversation must get the same reply."""

    @abstractmethod
    def respond(self, conversation: Conversation) -> str | None:
        """Return the next text for the policy, with the chat template's marks around it; None ends the conversation."""


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """Conversations instead of single responses."""

    environment: Environment
    """Environment that replies to the policy; the tokens of its replies are read, but not trained on."""

    max_turns: int = 8
    """Most responses of the policy in a conversation; all turns share ``sampling.max_new_tokens``."""

    def __post_init__(self) -> None:
        if self.max_turns < 2:
            raise ValueError(f"`max_turns` must be at least 2, got {self.max_turns}. Take `turns` out for one.")


class Trajectory:
    """One conversation, as tokens that are never made anew from text.

    Args:
        prompt_ids: Tokens of the prompt.
        seed: Seed of the first response.
        max_tokens: Most tokens of all that follows the prompt.
    """

    def __init__(self, prompt_ids: list[int], seed: int, max_tokens: int) -> None:
        self.prompt_ids = prompt_ids
        self.seed = seed
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.is_own: list[bool] = []
        self.responses: tuple[str, ...] = ()
        self.observations: tuple[str, ...] = ()
        self.is_open = True
        self.is_truncated = False

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self.max_tokens - len(self.token_ids)

    def add_response(self, token_ids: list[int], log_probs: list[float], *, is_truncated: bool) -> None:
        """Add the policy's turn, as far as there is room; one without an end ends the conversation."""
        self.is_truncated = is_truncated or len(token_ids) > self.room
        self.is_open = not self.is_truncated
        self._append(token_ids[: self.room], log_probs[: self.room], is_own=True)

    def add_observation(self, text: str | None, token_ids: list[int]) -> None:
        """Add the reply, or end the conversation if there is none or no room for an answer to it."""
        self.is_open = text is not None and len(token_ids) < self.room
        self.is_truncated = text is not None and not self.is_open
        if text is not None and self.is_open:
            self.observations += (text,)
            self._append(token_ids, [0.0] * len(token_ids), is_own=False)

    def _append(self, token_ids: list[int], log_probs: list[float], *, is_own: bool) -> None:
        self.is_own += [is_own] * len(token_ids)
        self.token_ids += token_ids
        self.log_probs += log_probs

    def to_completion(self) -> Completion:
        """Return the conversation as an engine's answer."""
        return Completion(self.token_ids, self.log_probs, self.is_truncated, self.is_own)


def play(
    ask: Callable[[Prompts, SamplingConfig], Rollout],
    prompts: Prompts,
    sampling: SamplingConfig,
    turns: TurnsConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """Sample ``sampling.num_samples`` conversations that begin with each prompt.

    Args:
        ask: Function that samples one response to each of some prompts.
        prompts: Beginnings of the conversations.
        sampling: Settings of each turn; ``max_new_tokens`` bounds all turns and replies of a conversation together.
        turns: Environment that replies, and the most turns.
        tokenizer: Tokenizer of the policy.

    Returns:
        Conversations whose ``response_mask`` is True on the policy's own tokens alone.
    """
    pairs = zip(prompts.tokens(), prompts.seeds, strict=True)
    trajectories = [Trajectory(ids, seed, sampling.max_new_tokens) for ids, seeds in pairs for seed in seeds]
    for turn in range(turns.max_turns):
        if turn > 0:
            _reply(trajectories, turns.environment, tokenizer)
        if not (going_on := [trajectory for trajectory in trajectories if trajectory.is_open]):
            break
        room = max(trajectory.room for trajectory in going_on)
        single = dataclasses.replace(sampling, num_samples=1, max_new_tokens=room)
        _record(going_on, ask(_prompts_of(going_on, turn, prompts.prompt_ids.device), single), tokenizer)
    completions = [trajectory.to_completion() for trajectory in trajectories]
    return to_rollout(prompts, sampling, completions, pad_token_id=int(tokenizer.pad_token_id))


def _prompts_of(trajectories: Sequence[Trajectory], turn: int, device: torch.device) -> Prompts:
    """Return all that was said as prompts, left-padded."""
    tokens = [trajectory.prompt_ids + trajectory.token_ids for trajectory in trajectories]
    seeds = [
        [trajectory.seed if turn == 0 else derive_seed("turn", trajectory.seed, turn)] for trajectory in trajectories
    ]
    return Prompts.from_tokens(tokens, seeds).to(device)


def _record(trajectories: Sequence[Trajectory], rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add each trajectory's next turn."""
    for trajectory, ids, log_probs, mask, is_truncated in zip(
        trajectories,
        rollout.response_ids,
        rollout.rollout_log_probs,
        rollout.response_mask,
        rollout.is_truncated.tolist(),
        strict=True,
    ):
        trajectory.responses += (str(tokenizer.decode(ids[mask], skip_special_tokens=True)),)
        trajectory.add_response(ids[mask].tolist(), log_probs[mask].tolist(), is_truncated=is_truncated)


def _reply(trajectories: Sequence[Trajectory], environment: Environment, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the environment answer each open trajectory."""
    for trajectory in trajectories:
        if trajectory.is_open:
            prompt = str(tokenizer.decode(trajectory.prompt_ids))
            text = environment.respond(
                Conversation(prompt=prompt, responses=trajectory.responses, observations=trajectory.observations)
            )
            trajectory.add_observation(
                text, [] if text is None else tokenizer(text, add_special_tokens=False).input_ids
            )
