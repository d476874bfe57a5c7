"""Conversations of several turns: the policy answers, an environment such as a tool replies, the policy goes on."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from verl_lightning.rollout.base import Completion, Request
from verl_lightning.seeding import derive_seed


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
        request: Request for the first response; its ``max_new_tokens`` is the room of all that follows the prompt.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.is_own: list[bool] = []
        self.responses: tuple[str, ...] = ()
        self.observations: tuple[str, ...] = ()
        self.is_open = True
        self.is_truncated = False
        self._version = 0

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self.request.sampling.max_new_tokens - len(self.token_ids)

    @property
    def next_request(self) -> Request:
        """Request for the policy's next turn, after all that was said."""
        turn = len(self.responses)
        return dataclasses.replace(
            self.request,
            prompt_ids=self.request.prompt_ids + self.token_ids,
            sampling=dataclasses.replace(self.request.sampling, max_new_tokens=self.room),
            seed=self.request.seed if turn == 0 else derive_seed("turn", self.request.seed, turn),
        )

    def add_response(self, completion: Completion, text: str) -> None:
        """Add the policy's turn; one without an end ends the conversation."""
        self.responses += (text,)
        self.is_truncated = completion.is_truncated
        self.is_open = not self.is_truncated
        self._version = completion.weights_version
        self._append(completion.token_ids, completion.log_probs, is_own=True)

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
        return Completion(self.token_ids, self.log_probs, self.is_truncated, self._version, self.is_own)


async def converse(
    generate: Callable[[Request], Awaitable[Completion]],
    request: Request,
    turns: TurnsConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Completion:
    """Sample one conversation.

    Args:
        generate: Function that samples a response.
        request: Request for the first response; its ``max_new_tokens`` bounds all turns and replies together.
        turns: Environment that replies, and the most turns.
        tokenizer: Tokenizer of the policy.

    Returns:
        All that was said, of which the policy's tokens alone are its own.
    """
    trajectory, prompt = Trajectory(request), str(tokenizer.decode(request.prompt_ids))
    for turn in range(turns.max_turns):
        if turn > 0:
            conversation = Conversation(
                prompt=prompt, responses=trajectory.responses, observations=trajectory.observations
            )
            text = turns.environment.respond(conversation)
            reply = [] if text is None else tokenizer(text, add_special_tokens=False).input_ids
            trajectory.add_observation(text, reply)
        if not trajectory.is_open:
            break
        completion = await generate(trajectory.next_request)
        trajectory.add_response(completion, str(tokenizer.decode(completion.token_ids, skip_special_tokens=True)))
    return trajectory.to_completion()
