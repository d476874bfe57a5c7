"""Messages that the policy reads between its turns: the new messages alone, as the difference of two renderings."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from verl_lightning.data.chat_template import KEY, RESULT, USER, WORD, sample_call
from verl_lightning.data.ends import ANSWER, find_ends
from verl_lightning.data.files import Row
from verl_lightning.data.messages import Message, clean_messages
from verl_lightning.data.templates import ChatRenderer

History = Literal["refuse", "split", "keep"]

_THINKER: Message = {"role": "assistant", "content": f"<think>\n{KEY}\n</think>\n\n{WORD}"}


class HistoryError(ValueError):
    """A template that writes what was said before anew, so that its tokens are not those of the policy."""


class Chat:
    """A chat whose new messages are rendered one after another.

    What the policy said stays as it was sampled. Both renderings have a word in its place, so that the difference
    depends on nothing that a template makes of it.

    Args:
        tokenizer: Tokenizer with a chat template.
        values: Columns of the data row; ``tools`` and ``enable_thinking`` reach the template.
        name: Name of the row in messages.
        enable_thinking: Value for rows that have none; None leaves it to the template.
        history: Treatment of templates that write earlier turns anew: the chat goes on with what was said (``keep``) or
            raises an error, after which it may `begin_anew`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        values: dict[str, Any],
        *,
        name: str,
        enable_thinking: bool | None,
        history: History,
    ) -> None:
        self._renderer = ChatRenderer(
            tokenizer, Row(values=values, name=name, file=name), enable_thinking=enable_thinking
        )
        self._tokenizer = tokenizer
        self._keeps = history == "keep"
        self._name = name
        self._shown = ""
        self.messages: list[Message] = []

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Take the first messages; return the tokens that the policy answers.

        Raises:
            ValueError: If they are no messages, or the template leaves out a part of them.
        """
        self.messages = self._clean(messages, f"what `reset` has returned for {self._name}")
        text = self._renderer.render(self.messages, add_generation_prompt=True)
        self._renderer.check_written(self.messages, text, supervised={})
        shown = [_stand_in(message) for message in self.messages]
        self._shown = self._renderer.render(shown, add_generation_prompt=True)
        return self._ids(text)

    def add_turn(self, message: Message) -> None:
        """Take what the policy said."""
        self.messages.append(message)

    def add_reply(self, messages: Sequence[Message], last: str | None) -> list[int]:
        """Take new messages; return the tokens that follow the policy's turn.

        Args:
            messages: Messages of others than the assistant, at least one.
            last: Text of the token with which the policy ended its turn; None if it is none that ends one.

        Raises:
            ValueError: If they are no messages, or the template can't render them.
            HistoryError: If the template writes what was said before anew.
        """
        new = self._clean(messages, f"what `step` has returned for {self._name}")
        if any(message["role"] == "assistant" for message in new):
            raise ValueError("`step` must return no message of the assistant: that is the policy.")
        if not self._keeps and self._drops_thoughts(new):
            raise HistoryError(
                f"The chat template leaves out what the policy thought once a message of `{new[0]['role']}` follows."
            )
        text = self._following(new, last)
        self.messages += new
        return self._ids(text)

    def begin_anew(self, messages: Sequence[Message]) -> list[int]:
        """Take new messages; return all tokens of the conversation as the template writes it now."""
        return self.begin([*self.messages, *messages])

    def _clean(self, messages: Sequence[Message], name: str) -> list[Message]:
        """Return messages in which no text of others spells a special token, such as one that ends a turn."""
        marks, cleaned = self._renderer.template.special_texts, clean_messages(list(messages), name=name)
        if marks is None:
            return cleaned
        return [
            message
            if message["role"] == "assistant" or "content" not in message
            else {**message, "content": marks.sub(_broken, message["content"])}
            for message in cleaned
        ]

    def _drops_thoughts(self, new: list[Message]) -> bool:
        """Tell whether the template leaves out thoughts of the policy once new messages follow."""
        thinking = [message["role"] == "assistant" and "</think>" in message["content"] for message in self.messages]
        if not any(thinking):
            return False
        said = [
            {**message, **_THINKER} if thinks else _stand_in(message)
            for message, thinks in zip(self.messages, thinking, strict=True)
        ]
        text = self._renderer.render([*said, *new], add_generation_prompt=True)
        return bool(text.count(KEY) < sum(thinking))

    def _following(self, new: list[Message], last: str | None) -> str:
        """Return the text that follows the policy's newest turn."""
        said = [_stand_in(message) for message in self.messages]
        after = self._renderer.render([*said, *new], add_generation_prompt=True)
        if not self._keeps and not after.startswith(self._shown):
            lost = self._shown[len(os.path.commonprefix([self._shown, after])) :]
            raise HistoryError(
                f"The chat template writes what the policy has read anew once a message of `{new[0]['role']}` follows:"
                f" {lost[:80]!r} is no longer there."
            )
        other = self._renderer.render([*said, {**new[0], "content": WORD}, *new[1:]], add_generation_prompt=True)
        self._shown = after
        return after[self._turn_end(os.path.commonprefix([after, other]), last) :]

    def _turn_end(self, shared: str, last: str | None) -> int:
        """Return the length of a text up to what follows the policy's newest turn.

        Args:
            shared: The conversation up to somewhere in the next message.
            last: Text of the token with which the policy ended its turn.
        """
        finder, ends = find_ends(self._renderer.template, self._tokenizer.eos_token)
        end, token = max(((shared.rfind(token), token) for token in ends.closing), default=(-1, ""))
        if end > shared.rfind(WORD):
            return end if last is None else end + len(token)
        for opening in (ends.opening_tool, ends.opening):  # where the next message's first token ends a turn
            if opening is not None and (end := shared.rfind(opening)) > shared.rfind(WORD):
                return end + len(opening) if opening == last else end
        if WORD not in shared:
            raise HistoryError("The chat template ends an assistant's turn with a tool call by no token.")
        end = shared.rindex(WORD) + len(WORD)
        # A template that closes only the newest turn with a token that ends a response closes others with another.
        closes = self._renderer.render([USER, ANSWER], add_generation_prompt=False).rpartition(WORD)[2].strip()
        earlier = finder.first_token(shared[end:]) if closes and last is not None else None
        return shared.index(earlier, end) + len(earlier) if earlier is not None else end

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def history_complaint(self, role: Literal["user", "tool"]) -> str | None:
        """Say how the template writes earlier turns anew before a reply; None if it leaves them alone.

        Args:
            role: Role of the reply.
        """
        calls = {"tool_calls": [sample_call({})]} if role == "tool" else {}
        reply = USER if role == "user" else RESULT
        prompt = self._renderer.render([USER], add_generation_prompt=True)
        text = self._renderer.render([USER, {**ANSWER, **calls}, reply], add_generation_prompt=True)
        if not text.startswith(prompt):
            lost = prompt[len(os.path.commonprefix([prompt, text])) :]
            return f"of what the policy has read, {lost[:80]!r} is not there once a message of `{role}` follows"
        thinker = {**_THINKER, **calls}
        thought = self._renderer.render([USER, thinker], add_generation_prompt=False)
        later = self._renderer.render([USER, thinker, reply], add_generation_prompt=True)
        if KEY in thought and KEY not in later:
            return f"it leaves out what the assistant thought once a message of `{role}` follows"
        return None


def _broken(found: re.Match[str]) -> str:
    """Returns the text of a special token with a space in it."""
    return f"{found[0][0]} {found[0][1:]}"


def _stand_in(message: Message) -> Message:
    """Returns a message as it is, and the policy's with a word in the place of what it said."""
    if message["role"] != "assistant":
        return message
    if not (calls := message.get("tool_calls")):
        return ANSWER
    functions = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions}
