"""Where the assistant's turns lie in the text of a whole conversation."""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedTokenizerBase

from verl_lightning.data.templates import ChatRenderer, Message

Supervise = Literal["all", "last"]
Span = tuple[int, int]

_PLACEHOLDER = "\ue000"  # a private-use character: no template writes it


def assistant_spans(renderer: ChatRenderer, messages: list[Message], whole: str, supervise: Supervise) -> list[Span]:
    """Character spans of the assistant turns that answer something, from after their header to their end token.

    If the template marks what the assistant says with ``{% generation %}``, the marks are the spans. Else the turns are
    found by rendering the conversation up to each of them and checking that this is how the whole text begins; what the
    template writes after the end token (a line feed) then belongs to no span, and a conversation's opening assistant
    turn, which answers nothing, has none.

    Args:
        renderer: Of the conversation's row.
        messages: The whole conversation.
        whole: Its text, without generation prompt.
        supervise: Whether all turns are wanted or only the last.

    Raises:
        ValueError: If the whole text has a wanted turn not as it was when it was the last.
    """
    marked = renderer.marked_spans(messages)
    if marked is not None:
        return marked if supervise == "all" else marked[-1:]
    turns = [index for index, message in enumerate(messages) if index > 0 and message["role"] == "assistant"]
    wanted = turns if supervise == "all" else turns[-1:]
    return [_span(renderer, messages, whole, turn) for turn in wanted]


def _span(renderer: ChatRenderer, messages: list[Message], whole: str, turn: int) -> Span:
    start = _start(renderer, messages[:turn], whole)
    text = "" if start is None else _turn_text(renderer, messages, whole, turn, start)
    if start is None or not text:
        raise ValueError(
            f"The chat template changes the assistant's turn (message {turn + 1} of {len(messages)}) in"
            f" {renderer.row_name} once it is part of the conversation, so it can't be trained as the model says it:"
            " templates that drop earlier thinking do that. Set `supervise: last` to train the last turn only, or give"
            " each turn a row that ends with it."
        )
    return start, start + len(_without_tail(text, renderer.tokenizer))


def _turn_text(renderer: ChatRenderer, messages: list[Message], whole: str, turn: int, start: int) -> str:
    """A turn's text if it stands in the whole text from ``start`` on, else nothing."""
    if turn + 1 == len(messages):
        return whole[start:]
    alone = renderer.render(messages[: turn + 1], add_generation_prompt=False)
    if whole.startswith(alone):
        return alone[start:]
    # Templates of reasoning models write an empty thought before an answer without one, but only in the last turn.
    text = alone[start:].removeprefix(_template_prefix(renderer, messages[:turn], start))
    return text if alone.startswith(whole[:start]) and whole.startswith(text, start) else ""


def _start(renderer: ChatRenderer, context: list[Message], whole: str) -> int | None:
    for candidate in (renderer, renderer.without_thinking_flag()):
        prompt = candidate.render(context, add_generation_prompt=True)
        if whole.startswith(prompt):
            return len(prompt)
    return None


def _template_prefix(renderer: ChatRenderer, context: list[Message], start: int) -> str:
    reply = {"role": "assistant", "content": _PLACEHOLDER}
    return renderer.render([*context, reply], add_generation_prompt=False)[start:].partition(_PLACEHOLDER)[0]


def _without_tail(turn: str, tokenizer: PreTrainedTokenizerBase) -> str:
    stripped = turn.rstrip()
    return stripped if stripped.endswith(tuple(tokenizer.all_special_tokens)) else turn
