"""Choice of the format in which a policy writes tool calls: named by the user, or that of its chat template."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from verl_lightning.data.chat_template import KEY, OTHER_WORD, TEMPLATE_ERRORS, USER, WORD, chat_template, sample_call
from verl_lightning.environments.call_formats import FORMATS
from verl_lightning.environments.tool_calls import MalformedCall, Reply, ToolCall, ToolCallFormat, call_from_json

_PROBE = ToolCall(name="f", arguments={KEY: WORD})

_HINTS = {
    "qwen_xml": r"<function=",
    "glm": r"<arg_key>",
    "hermes": r"<tool_call>",
    "mistral": r"\[TOOL_CALLS\]",
    "gemma": r"<\|tool_call>call:",
    "harmony": r"<\|channel\|>.*functions",
    "deepseek": r"<｜tool▁call▁begin｜>",
    "kimi": r"<\|tool_call_begin\|>",
    "invoke_xml": r"<(\w+:)?invoke name=",
    "llama": r"<\|python_tag\|>|\"parameters\": dictionary of argument name",
    "pythonic": r"<\|(tool_call|python)_start\|>|\[func_name1\(",
}
"""Texts by which a template that can't write calls, but tells the policy how to, is known; tried in this order."""


class ResponseTemplate(ToolCallFormat):
    """The format that a tokenizer's own ``response_template`` describes, read by transformers.

    Args:
        tokenizer: Tokenizer with a ``response_template``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def parse(self, text: str) -> Reply:
        """Take apart what the policy said; transformers does not say which of several calls it can't read."""
        try:
            message = self._tokenizer.parse_response(text, prefix="")
        except ValueError as error:
            return Reply(content="", calls=(MalformedCall(complaint=f"The reply can't be read: {error}"),))
        thought = message.get("reasoning_content") or message.get("thinking") or ""
        calls = tuple(call_from_json(call) for call in message.get("tool_calls") or [])
        return Reply(content=message.get("content") or "", thought=thought, calls=calls)


def choose_format(tokenizer: PreTrainedTokenizerBase, given: str | ToolCallFormat = "auto") -> ToolCallFormat:
    """Return the format in which a policy writes tool calls.

    Args:
        tokenizer: Tokenizer of the policy.
        given: A format, the name of one in `FORMATS`, or ``auto``: the one that reads a call as the chat template
            writes it; else the one that the template's text tells of; else the tokenizer's ``response_template``.

    Raises:
        ValueError: If there is no format by that name, or the template tells of none.
    """
    if isinstance(given, ToolCallFormat):
        return given
    if given != "auto":
        if given not in FORMATS:
            raise ValueError(f"`tool_calls: {given}` is unknown. Choose one of auto, {', '.join(FORMATS)}.")
        return FORMATS[given]
    if (name := recognise(tokenizer)) is not None:
        return FORMATS[name]
    if getattr(tokenizer, "response_template", None) is not None:
        return ResponseTemplate(tokenizer)
    raise ValueError(
        "The policy's chat template does not say in which format it calls tools. Set `tool_calls` to one of"
        f" {', '.join(FORMATS)}, or to a `ToolCallFormat` of your own."
    )


def recognise(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the name of the format that a tokenizer's chat template writes or tells of; None if it does neither."""
    if not tokenizer.chat_template:
        return None
    template = chat_template(tokenizer, [])
    written = _written_call(tokenizer)
    for name, form in FORMATS.items():
        if [_bare(call) for call in form.parse(written).calls if isinstance(call, ToolCall)] == [_PROBE]:
            return name
    return next((name for name, hint in _HINTS.items() if re.search(hint, template.text, re.DOTALL)), None)


def _bare(call: ToolCall) -> ToolCall:
    return ToolCall(name=call.name, arguments=call.arguments)


def _written_call(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the template writes for an assistant that calls a tool; empty if it writes no call."""
    template = chat_template(tokenizer, [])
    call = sample_call(dict(_PROBE.arguments))
    try:
        prompt = template.render([USER], prompt=True)
        whole = template.render([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except TEMPLATE_ERRORS:
        return ""
    common = next(
        (n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )
    # Where the prompt holds more than the history does, as an opened thinking, what follows the user's words is taken.
    written = whole[len(prompt) :] if common == len(prompt) else whole.rpartition(OTHER_WORD)[2]
    return written if WORD in written else ""
