"""A tokenizer's chat template: rendered, and given messages in the forms that it was found to take."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from verl_lightning.data.messages import FLAG_KEYS, IMAGE_MARK, THOUGHT_KEYS, Message
from verl_lightning.data.written import Tools, parsed_arguments

# What a template raises on messages that it was not written for: its own refusals, and Python's on other values.
TEMPLATE_ERRORS = (TemplateError, TypeError, AttributeError, LookupError, ValueError)

_GENERATION_MARK = re.compile(r"{%-?\s*generation\s*-?%}")

# Words that no template writes by itself, and that no way of writing texts changes.
WORD, OTHER_WORD, KEY = "zq0qz", "zq00qz", "zq000qz"
USER: Message = {"role": "user", "content": OTHER_WORD}

CALL_ID = "call12345"  # as long as Mistral's template wants it
RESULT: Message = {"role": "tool", "tool_call_id": CALL_ID, "name": "f", "content": OTHER_WORD}


def sample_call(arguments: Any) -> dict[str, Any]:
    """Returns an assistant's call of a tool ``f``, to see what a template makes of it.

    Args:
        arguments: Arguments of the call, as an object or as JSON text.
    """
    return {"type": "function", "id": CALL_ID, "function": {"name": "f", "arguments": arguments}}


class ChatTemplate:
    """A chat template and the special tokens that it is rendered with.

    Templates differ in the form in which they want a text (as a text or as a list of parts), the arguments of a tool
    call (an object or its JSON text), no text beside a tool call (empty, null or no key) and an assistant's thinking
    (three keys). The form that a template takes is found out by rendering short conversations of words that it can't
    know.

    Args:
        text: The template.
        special_tokens: Names and texts of special tokens.
        added_tokens: Texts of all added tokens, which the tokenizer finds in a text before it splits the rest.
        special_texts: Pattern of the texts of special tokens; None where there are none.
    """

    def __init__(
        self,
        text: str,
        special_tokens: dict[str, Any],
        added_tokens: frozenset[str],
        special_texts: re.Pattern[str] | None,
    ) -> None:
        self.text = text
        self.special_tokens = special_tokens
        self.added_tokens = added_tokens
        self.special_texts = special_texts
        self.checked: dict[str, tuple[int, str] | None] = {}

    @property
    def is_marked(self) -> bool:
        """True if the template marks what the assistant says with ``{% generation %}``."""
        return _GENERATION_MARK.search(self.text) is not None

    def reads(self, name: str) -> bool:
        """Tells whether a name stands in the template as a word."""
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None

    def render(self, messages: list[Message], tools: Tools = None, *, prompt: bool = False, **options: Any) -> str:
        """Renders messages as text, each in the form that the template takes.

        Args:
            messages: Messages as ``clean_messages`` returns them.
            tools: Tool schemas.
            prompt: True ends the text with the header of a new assistant turn.
            options: Further variables of the template.
        """
        return self._render([self.formed(message) for message in messages], tools, prompt=prompt, **options)

    def marked_spans(self, messages: list[Message], tools: Tools, **options: Any) -> list[tuple[int, int]]:
        """Returns the character spans that the template marks with ``{% generation %}``."""
        formed = [self.formed(message) for message in messages]
        values: dict[str, Any] = {**self.special_tokens, **options, "tools": tools}
        found: Any = render_jinja_template(
            [formed], chat_template=self.text, return_assistant_tokens_mask=True, **values
        )
        return [(begin, end) for begin, end in found[1][0]]

    def formed(self, message: Message) -> Message:
        """Returns a message in the form that the template takes."""
        formed = {key: value for key, value in message.items() if key not in FLAG_KEYS}
        if calls := formed.get("tool_calls"):
            formed["tool_calls"] = [self._formed_call(call) for call in calls]
        if calls and not formed.get("content") and self._call_forms:
            formed.pop("content", None)
            formed.update(self._no_text)
        elif "content" in formed and IMAGE_MARK in formed["content"]:
            formed["content"] = as_parts(formed["content"])
        elif "content" in formed and self.takes_parts:
            formed["content"] = [{"type": "text", "text": formed["content"]}]
        for key in THOUGHT_KEYS:
            if key in formed and self._thought_keys and key not in self._thought_keys:
                formed.setdefault(self._thought_keys[0], formed.pop(key))
        return formed

    @cached_property
    def takes_parts(self) -> bool:
        """True if the template takes a text only as a list of parts."""
        parts = [{"type": "text", "text": WORD}]
        as_text, as_parts = (self._tried([{"role": "user", "content": content}]) for content in (WORD, parts))
        return WORD not in as_text and WORD in as_parts

    @cached_property
    def _thought_keys(self) -> list[str]:
        return [key for key in THOUGHT_KEYS if self._writes_thought(key)]

    def _writes_thought(self, key: str) -> bool:
        message = self._content({"role": "assistant", "content": OTHER_WORD})
        return WORD in self._tried([self._content(USER), {**message, key: WORD}])

    @cached_property
    def _call_forms(self) -> dict[str, Message]:
        """Message fields for a tool call without text, by the form of arguments that goes with them: object or text."""
        for no_text in ({"content": ""}, {"content": None}, {}):
            texts = {form: self._call_text(no_text, form) for form in ("object", "text")}
            # Where both forms are written, but differently, the text is put between something that it has already.
            if texts["object"] and texts["text"] != texts["object"]:
                del texts["text"]
            if found := {form: no_text for form, text in texts.items() if text}:
                return found
        return {}

    @property
    def _no_text(self) -> Message:
        return next(iter(self._call_forms.values()))

    def _call_text(self, no_text: Message, form: str) -> str:
        arguments: Any = {KEY: WORD} if form == "object" else json.dumps({KEY: WORD})
        calls = [sample_call(arguments)]
        text = self._tried([self._content(USER), {"role": "assistant", **no_text, "tool_calls": calls}])
        # Python's way to write a dict, a text that is encoded twice, and `content: null` as a text are no way to write.
        wrong = (str({KEY: WORD}), f'\\"{KEY}', "None")
        return text if WORD in text and KEY in text and not any(form in text for form in wrong) else ""

    def _formed_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function", call))
        arguments = function.get("arguments")
        if not self._call_forms:
            return call
        if isinstance(arguments, str) and "text" not in self._call_forms:
            parsed = parsed_arguments(arguments)
            function["arguments"] = arguments if parsed is None else parsed
        elif isinstance(arguments, dict) and "object" not in self._call_forms:
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": function} if "function" in call else function

    def _content(self, message: Message) -> Message:
        return {**message, "content": [{"type": "text", "text": message["content"]}]} if self.takes_parts else message

    def _tried(self, messages: list[Message]) -> str:
        try:
            return self._render(messages, None, prompt=False)
        except TEMPLATE_ERRORS:
            return ""

    def _render(self, messages: list[Message], tools: Tools, *, prompt: bool, **options: Any) -> str:
        values: dict[str, Any] = {**self.special_tokens, **options, "tools": tools}
        found: Any = render_jinja_template([messages], chat_template=self.text, add_generation_prompt=prompt, **values)
        return str(found[0][0])


def as_parts(content: str) -> list[dict[str, str]]:
    """Returns a text with `IMAGE_MARK`s as the parts that a template takes: texts and images in turn."""
    texts = content.split(IMAGE_MARK)
    parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return [part for part in parts if part.get("text") != ""]


_found: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, str], ChatTemplate]] = WeakKeyDictionary()


def chat_template(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> ChatTemplate:
    """Returns the template of a tokenizer for messages with or without tools; made once.

    Args:
        tokenizer: Tokenizer with one chat template, or with several by name.
        tools: Tool schemas; some tokenizers have a template of their own for them.
    """
    text = tokenizer.get_chat_template(tools=tools)
    special = dict(tokenizer.special_tokens_map)
    templates, key = _found.setdefault(tokenizer, {}), (text, str(special))
    if key not in templates:
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()}
        templates[key] = ChatTemplate(text, special, frozenset(added), _special_texts(tokenizer))
    return templates[key]


def _special_texts(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Returns the pattern of the texts of special tokens: a tokenizer makes one of such a text wherever it stands."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    texts = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None
