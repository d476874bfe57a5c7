"""A whole conversation as text, and the spans in it of the turns to train on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from verl_lightning.data.chat_template import USER, WORD
from verl_lightning.data.ends import ANSWER, find_ends
from verl_lightning.data.messages import Message, is_trained
from verl_lightning.data.templates import ChatRenderer

Supervise = Literal["all", "last"]
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A rendered conversation."""

    text: str
    """Text of the whole conversation."""

    spans: list[Span]
    """First character of each supervised stretch and the one after its last."""

    leaves_out_thoughts: bool
    """True if the template left out what the assistant thought in turns that are not supervised."""


def render_conversation(renderer: ChatRenderer, messages: list[Message], supervise: Supervise) -> Conversation:
    """Renders a conversation and finds the assistant's turns, from after their header to their end token.

    A turn begins where the prompt ends that a model would answer with it: the conversation up to it, with the header of
    a new turn. It ends with the token that ends a response under this template. What the template marks with
    ``{% generation %}``, if it has such marks, is all of it that is trained. A conversation's opening assistant turn
    answers nothing and is not trained, nor are turns whose ``loss_mask`` is 0.

    Args:
        renderer: Renderer of the conversation's row.
        messages: The whole conversation.
        supervise: Assistant turns to train: all, or only the last.

    Raises:
        ValueError: If a wanted turn does not stand in the text as the model would say it, has no end token, or if
            something that was written is not in the text.
    """
    try:
        return _rendered(renderer, messages, supervise)
    except _TurnError as error:
        raise ValueError(f"{error} {_advice(renderer, messages, supervise)}") from error


def _rendered(renderer: ChatRenderer, messages: list[Message], supervise: Supervise) -> Conversation:
    finder = _TurnFinder(renderer, messages)
    turns = {turn: finder.span(turn) for turn in _wanted(renderer, messages, supervise)}
    supervised = {turn: finder.text[start:end] for turn, (start, end) in turns.items()}
    leaves_out_thoughts = renderer.check_written(messages, finder.text, supervised=supervised)
    spans = [span for turn, whole in turns.items() for span in finder.trained(turn, whole)]
    return Conversation(text=finder.text, spans=spans, leaves_out_thoughts=leaves_out_thoughts)


class _TurnError(ValueError):
    """A turn that can't be trained as the model would say it."""


class _TurnFinder:
    """Finds an assistant's turns in the text of the whole conversation."""

    def __init__(self, renderer: ChatRenderer, messages: list[Message]) -> None:
        self.renderer = renderer
        self.messages = messages
        self.text = renderer.render(messages, add_generation_prompt=False)
        self.finder, self.ends = find_ends(renderer.template, renderer.tokenizer.eos_token)
        self.marks = renderer.marked_spans(messages)

    def span(self, turn: int) -> Span:
        """Finds the first character of a turn and the one after its end token."""
        start = self._start(turn)
        return start, self._last_end(turn, start) if turn + 1 == len(self.messages) else self._earlier_end(turn, start)

    def trained(self, turn: int, span: Span) -> list[Span]:
        """Returns the spans of a turn that are trained: the whole turn, or the parts that the template marks."""
        if self.marks is None:
            return [span]
        start, end = span
        marked = [(max(start, a), min(end, b)) for a, b in self.marks if a < end and b > start]
        covered = max((b for _, b in marked), default=start)
        if len(self.text[start:covered].rstrip()) < end - start:
            raise _TurnError(
                f"{self._name(turn)} is marked by the chat template, `{{% generation %}}`, without the token that ends"
                " it, so the model would never learn to stop."
            )
        return marked

    def _name(self, turn: int) -> str:
        return f"The assistant's turn (message {turn + 1} of {len(self.messages)}) in {self.renderer.row_name}"

    def _start(self, turn: int) -> int:
        context = self.messages[:turn]
        for candidate in (self.renderer, self.renderer.with_thinking(None)):
            prompt = candidate.render(context, add_generation_prompt=True)
            if self.text.startswith(prompt):
                header = self._header
                again = header and not prompt.endswith(header) and self.text.startswith(header, len(prompt))
                return len(prompt) + (len(header) if again else 0)
        prompt = self.renderer.render(context, add_generation_prompt=True)
        begun = len(self.finder.shared(prompt, self.renderer.render(context, add_generation_prompt=False)))
        if not self.text.startswith(prompt[:begun]):
            raise self._changed(turn)
        raise _TurnError(
            f"The prompt that the model answers with {self.renderer.name_of(turn, self.messages)} ends in"
            f" {prompt[begun:]!r}, where the text of the whole conversation has"
            f" {self.text[begun:][:40]!r}. So the turn can't be trained as the model would say it."
        )

    @cached_property
    def _header(self) -> str:
        """Text that the template writes at the beginning of an assistant's turn, answered or not."""
        plain = self.renderer.with_thinking(None)
        asked = plain.render([USER], add_generation_prompt=False)
        prompt = plain.render([USER], add_generation_prompt=True)
        answered = plain.render([USER, ANSWER], add_generation_prompt=False)
        return os.path.commonprefix([prompt, answered])[len(self.finder.shared(asked, prompt)) :]

    def _last_end(self, turn: int, start: int) -> int:
        closed = self.text.rstrip()
        if self.finder.last_token(self.text[start:]) in self.ends.closing:
            return len(closed)
        opening = self.ends.opening_tool if self.messages[turn].get("tool_calls") else self.ends.opening
        if opening is None:
            raise self._endless(turn)
        self.text += opening
        return len(self.text)

    def _earlier_end(self, turn: int, start: int) -> int:
        alone = self.renderer.render(self.messages[: turn + 1], add_generation_prompt=False)
        said = alone[start:]
        if not self.text.startswith(alone[:start]) or not said.strip():
            raise self._changed(turn)
        for with_thought in (False, True):
            rest = said.removeprefix(self._empty_thought(turn, start) if with_thought else "")
            here = self.finder.shared(rest, self.text[start:])
            if self.finder.only_ends(rest[len(here) :], self.ends.closing):
                return self._closed(turn, start + len(here))
        raise self._changed(turn)

    def _empty_thought(self, turn: int, start: int) -> str:
        """Returns the empty thought that a reasoning model's template puts before an answer in the last turn alone."""
        text = self.renderer.render([*self.messages[:turn], ANSWER], add_generation_prompt=False)
        return text[start:].partition(WORD)[0]

    def _closed(self, turn: int, end: int) -> int:
        if self.finder.last_token(self.text[:end]) in self.ends.closing:
            return len(self.text[:end].rstrip())
        for opening in (self.ends.opening, self.ends.opening_tool):
            if opening is not None and self.text[end:].lstrip().startswith(opening):
                return self.text.index(opening, end) + len(opening)
        raise self._endless(turn)

    def _changed(self, turn: int) -> _TurnError:
        return _TurnError(
            f"The chat template changes the assistant's turn (message {turn + 1} of {len(self.messages)}) in"
            f" {self.renderer.row_name}, or what stands before it, once it is part of the conversation, so it can't be"
            " trained as the model says it: templates that drop earlier thinking do that."
        )

    def _endless(self, turn: int) -> _TurnError:
        known = ", ".join(sorted(self.ends.closing)) or "none"
        return _TurnError(
            f"{self._name(turn)} ends without a token that ends a response (under this chat template: {known}), so the"
            " model would never learn to stop."
        )


def _wanted(renderer: ChatRenderer, messages: list[Message], supervise: Supervise) -> list[int]:
    turns = [index for index, message in enumerate(messages) if index > 0 and message["role"] == "assistant"]
    wanted = []
    for index, message in enumerate(messages):
        trained = is_trained(message, name=renderer.name_of(index, messages))
        if trained and index in (turns if supervise == "all" else turns[-1:]):
            wanted.append(index)
    return wanted


def _advice(renderer: ChatRenderer, messages: list[Message], supervise: Supervise) -> str:
    """Names the first setting that helps when it is tried on this row; else another template, or to drop such rows."""
    others: list[tuple[str, ChatRenderer, Supervise]] = [
        ("`enable_thinking: false`", renderer.with_thinking(False), supervise),
        ("`supervise: last` to train the last turn only, or give each turn a row that ends with it", renderer, "last"),
        ("`supervise: last` and `enable_thinking: false`", renderer.with_thinking(False), "last"),
    ]
    for setting, other, wanted in others:
        try:
            if _rendered(other, messages, wanted).spans:
                return f"Set {setting}."
        except ValueError:
            continue
    return "Use another template, `chat_template.jinja` in the model's folder, or leave such rows out."
