"""Conversations with replies of plain text; `verl_lightning.environments` has environments that can do more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


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
