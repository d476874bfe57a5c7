"""What the policy reads between its turns: the new messages alone, as the difference of two renderings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from verl_lightning.data.chat_template import KEY, USER, WORD
from verl_lightning.data.ends import ANSWER, find_ends
from verl_lightning.data.files import Row
from verl_lightning.data.messages import Message, clean_messages
from verl_lightning.data.templates import ChatRenderer

History = Literal["refuse", "keep"]

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
            ends.
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
        self.messages: list[Message] = []

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Take the first messages; return the tokens that the policy answers.

        Raises:
            ValueError: If they are no messages, or the template leaves out a part of them.
        """
        self.messages = clean_messages(list(messages), name=f"what `reset` has returned for {self._name}")
        text = self._renderer.render(self.messages, add_generation_prompt=True)
        self._renderer.check_written(self.messages, text, supervised={})
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
        new = clean_messages(list(messages), name=f"what `step` has returned for {self._name}")
        if any(message["role"] == "assistant" for message in new):
            raise ValueError("`step` must return no message of the assistant: that is the policy.")
        text = self._following(new, last)
        self.messages += new
        return self._ids(text)

    def _following(self, new: list[Message], last: str | None) -> str:
        """Return the text that follows the policy's newest turn."""
        said = [_stand_in(message) for message in self.messages]
        before = self._renderer.render(said, add_generation_prompt=False)
        after = self._renderer.render([*said, *new], add_generation_prompt=True)
        finder, ends = find_ends(self._renderer.template, self._tokenizer.eos_token)
        shared = finder.shared(before, after)
        if not finder.only_ends(before[len(shared) :], ends.closing):
            if not self._keeps or WORD not in after or said[-1].get("tool_calls"):
                raise HistoryError(
                    f"The chat template changes what stood before a message of `{new[0]['role']}`: instead of"
                    f" {before[len(shared) :][:40]!r} it then has {after[len(shared) :][:40]!r}."
                )
            shared = after[: after.rindex(WORD) + len(WORD)]
        if (end := finder.last_token(shared)) in ends.closing and end is not None:
            kept = len(shared.rstrip())
            return after[kept if last is not None else kept - len(end) :]
        rest = after[len(shared) :]
        end = finder.first_token(rest)
        is_said = last is not None and (end in ends.closing or end == last)
        return rest.lstrip()[len(end or "") :] if is_said else rest

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def history_complaint(self, role: Literal["user", "tool"]) -> str | None:
        """Say how the template writes earlier turns anew before a reply; None if it leaves them alone.

        Args:
            role: Role of the reply.
        """
        call = {"type": "function", "id": "call12345", "function": {"name": "f", "arguments": {}}}
        calls = {"tool_calls": [call]} if role == "tool" else {}
        reply = USER if role == "user" else {**USER, "role": "tool", "tool_call_id": "call12345", "name": "f"}
        prompt = self._renderer.render([USER], add_generation_prompt=True)
        text = self._renderer.render([USER, {**ANSWER, **calls}, reply], add_generation_prompt=True)
        finder, _ = find_ends(self._renderer.template, self._tokenizer.eos_token)
        if not text.startswith(prompt):
            lost = prompt[len(finder.shared(prompt, text)) :]
            return f"of the prompt that the policy answers, it leaves out {lost!r} once a message of `{role}` follows"
        thinker = {**_THINKER, **calls}
        thought = self._renderer.render([USER, thinker], add_generation_prompt=False)
        later = self._renderer.render([USER, thinker, reply], add_generation_prompt=True)
        if KEY in thought and KEY not in later:
            return f"it leaves out what the assistant thought once a message of `{role}` follows"
        return None


def _stand_in(message: Message) -> Message:
    """Returns a message as it is, and the policy's with a word in the place of what it said."""
    if message["role"] != "assistant":
        return message
    if not (calls := message.get("tool_calls")):
        return ANSWER
    functions = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions}
