"""The tokens that end an assistant's turn under a chat template, found out by rendering short conversations."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from verl_lightning.data.chat_template import OTHER_WORD, RESULT, TEMPLATE_ERRORS, USER, WORD, ChatTemplate, sample_call
from verl_lightning.data.messages import Message

ANSWER: Message = {"role": "assistant", "content": WORD}


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Tokens that end a turn."""

    closing: frozenset[str]
    """Tokens that close a turn; a response ends with them."""

    opening: str | None = None
    """The token that opens the user's next message where the template closes no turn: the model stops at it."""

    opening_tool: str | None = None
    """The token that opens a tool's result, likewise where the template closes no turn."""


class EndFinder:
    """Finds the tokens that end a turn.

    Args:
        template: Chat template; it may close a turn with a token of its own, or leave that to the token that opens the
            next message.
        eos_token: The tokenizer's end-of-sequence token.
    """

    def __init__(self, template: ChatTemplate, eos_token: str | None) -> None:
        self.template = template
        self.eos_token = eos_token
        self._tokens = template.added_tokens
        self._lengths = sorted({len(token) for token in self._tokens}, reverse=True)

    def ends(self) -> Ends:
        """Finds the tokens that end a turn."""
        after_last = self._after(WORD, [USER, ANSWER])
        after_earlier = self._after(WORD, [USER, ANSWER, USER])
        found = (self.last_token(text) for text in (after_last, self.shared(after_last, after_earlier)))
        closing = {token for token in found if token is not None}
        if not closing:
            opening, opening_tool = self.first_token(after_earlier), self._opening_tool()
            return Ends(closing=self._with_eos(set()), opening=opening, opening_tool=opening_tool)
        return Ends(closing=self._with_eos(closing | self._closing_of_calls()))

    def last_token(self, text: str) -> str | None:
        """Returns the added token that a text ends with, white space aside; None if it ends with none."""
        stripped = text.rstrip()
        endings = (stripped[-length:] for length in self._lengths)
        return next((ending for ending in endings if ending in self._tokens), None)

    def shared(self, text: str, other: str) -> str:
        """Returns the common beginning of two texts, shortened so that it cuts no added token."""
        length = len(os.path.commonprefix([text, other]))
        for start in range(max(0, length - max(self._lengths, default=0)), length):
            if any(start + len(self._token_at(one, start)) > length for one in (text, other)):
                return text[:start]
        return text[:length]

    def only_ends(self, text: str, closing: frozenset[str]) -> bool:
        """Tells whether a text is nothing but tokens that close a turn and white space."""
        tokens = "|".join(map(re.escape, sorted(closing, key=len, reverse=True))) or "(?!)"
        return re.fullmatch(rf"(?:{tokens}|\s)*", text) is not None

    def _token_at(self, text: str, start: int) -> str:
        beginnings = (text[start : start + length] for length in self._lengths)
        return next((beginning for beginning in beginnings if beginning in self._tokens), "")

    def _with_eos(self, tokens: set[str]) -> frozenset[str]:
        return frozenset(tokens if self.eos_token is None else {*tokens, self.eos_token})

    def first_token(self, text: str) -> str | None:
        """Returns the added token that a text begins with, white space aside; None if it begins with none."""
        return self._token_at(text.lstrip(), 0) or None

    def _after(self, word: str, messages: list[Message]) -> str:
        try:
            text = self.template.render(messages)
        except TEMPLATE_ERRORS:
            return ""
        return text.rpartition(word)[2]

    def _closing_of_calls(self) -> set[str]:
        """Finds the token that closes a turn with a tool call, unless it only closes a call among others."""
        one, two = (self._after_calls([_call(WORD), *more]) for more in ([], [_call(OTHER_WORD)]))
        last = self.last_token(one)
        if last is None or two.rstrip().removesuffix(last).count(last):
            return set()
        return {last}

    def _after_calls(self, calls: list[dict[str, Any]], *results: Message) -> str:
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
        return self._after(WORD, messages)

    def _opening_tool(self) -> str | None:
        alone = self._after_calls([_call(WORD)])
        followed = self._after_calls([_call(WORD)], RESULT)
        return self.first_token(followed[len(alone) :]) if followed.startswith(alone) else None


@lru_cache(maxsize=16)
def find_ends(template: ChatTemplate, eos_token: str | None) -> tuple[EndFinder, Ends]:
    """Finds the tokens that end a turn under a template, and returns them after their finder; cached."""
    finder = EndFinder(template, eos_token)
    return finder, finder.ends()


def _call(word: str) -> dict[str, Any]:
    return sample_call({"a": word})
