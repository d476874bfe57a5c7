"""Environments of `rollout.turns`, which reply with text that stands in the conversation as it is."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from verl_lightning.environments.base import Environment, Message, Step
from verl_lightning.rollout.turns import Conversation, TurnsConfig


class Replies(Environment):
    """The environment of one conversation of `rollout.turns`, without rewards of its own.

    Args:
        turns: Environment that replies, and the most turns.
        prompt: Text of the prompt, with the marks of the chat template.
    """

    def __init__(self, turns: TurnsConfig, prompt: str) -> None:
        self._turns = turns
        self._prompt = prompt
        self._responses: tuple[str, ...] = ()
        self._observations: tuple[str, ...] = ()

    @override
    async def step(self, message: Message) -> Step:
        self._responses += (message["content"],)
        if len(self._responses) == self._turns.max_turns:
            return Step(done=True)
        text = self._turns.environment.respond(
            Conversation(prompt=self._prompt, responses=self._responses, observations=self._observations)
        )
        if text is None:
            return Step(done=True)
        self._observations += (text,)
        return Step(text)


class PlainText:
    """A conversation whose prompt is tokens already, and whose replies are tokenised as they are.

    Args:
        tokenizer: Tokenizer of the policy.
        prompt_ids: Tokens of the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self.messages: list[Message] = []

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Take the first messages; return the tokens that the policy answers."""
        self.messages = list(messages)
        return self._prompt_ids

    def add_turn(self, message: Message) -> None:
        """Take what the policy said."""
        self.messages.append(message)

    def add_reply(self, messages: Sequence[Message], last: str | None) -> list[int]:
        """Take a reply; return its tokens, without any that the template would add."""
        del last
        self.messages += messages
        ids: list[int] = self._tokenizer("".join(m["content"] for m in messages), add_special_tokens=False).input_ids
        return ids
