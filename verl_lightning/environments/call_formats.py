"""Formats of tool calls that model families are trained to write, by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_lightning.environments.tool_calls import (
    MalformedCall,
    Reply,
    ToolCall,
    ToolCallFormat,
    call_from_arguments,
    call_from_json,
    loads,
    raw_loads,
    split_thought,
)

Call = ToolCall | MalformedCall


@dataclass(frozen=True)
class MarkedCalls(ToolCallFormat):
    """A format in which each call stands between marks, anywhere in the text."""

    opening: re.Pattern[str]
    """Mark before a call; its group ``name``, if any, is the tool's name."""

    closing: re.Pattern[str]
    """Mark after a call."""

    read: Callable[[str, str], list[Call]]
    """Function from the tool's name, empty if the opening has none, and the text between the marks to calls."""

    wrapping: re.Pattern[str] | None = None
    """Marks around all calls together, which are no content."""

    def parse(self, text: str) -> Reply:
        """Take apart what the policy said; a call without its closing mark is malformed unless all of it is there."""
        thought, rest = split_thought(text)
        content, calls = "", list[Call]()
        while (opened := self.opening.search(rest)) is not None:
            content += rest[: opened.start()]
            name = opened.groupdict().get("name") or ""
            closed = self.closing.search(rest, opened.end())
            calls += self.read(name.strip(), rest[opened.end() : closed.start() if closed else None])
            rest = rest[closed.end() :] if closed else ""
        content += rest
        if self.wrapping is not None:
            content = self.wrapping.sub("", content)
        return Reply(content=content.strip(), thought=thought, calls=tuple(calls))


def _read_json_calls(_: str, body: str) -> list[Call]:
    try:
        value = loads(body)
    except ValueError as error:
        name = re.search(r'"name"\s*:\s*"([^"]*)"', body)
        return [MalformedCall(name=name[1] if name else "", complaint=f"The tool call is not valid JSON: {error}.")]
    return [call_from_json(item) for item in value] if isinstance(value, list) else [call_from_json(value)]


def _read_json_arguments(name: str, body: str) -> list[Call]:
    fenced = re.search(r"```(?:json)?\s*(.*?)\s*```", body, re.DOTALL)
    return [call_from_arguments(name, fenced[1] if fenced else body)]


def _read_pairs(pattern: str) -> Callable[[str, str], list[Call]]:
    """Return a reader of arguments that are written as marked keys and values.

    Args:
        pattern: Regular expression of one argument, with groups ``key`` and ``value``.
    """
    pair = re.compile(pattern, re.DOTALL)

    def read(name: str, body: str) -> list[Call]:
        if not name:
            return _read_json_calls(name, body)
        arguments = {found["key"].strip(): found["value"] for found in pair.finditer(body)}
        if rest := pair.sub("", body).strip():
            return [MalformedCall(name=name, complaint=f"The tool call holds more than arguments: {rest[:80]!r}.")]
        return [ToolCall(name=name, arguments=arguments, has_text_values=True)]

    return read


_GEMMA_TEXT = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_GEMMA_KEY = re.compile(r"(?<=[{,])\s*([A-Za-z_]\w*)\s*:")


def _read_gemma_arguments(name: str, body: str) -> list[Call]:
    """Read an object whose keys have no quotation marks, and whose texts have marks of their own."""
    texts = list[str]()

    def keep(found: re.Match[str]) -> str:
        texts.append(found[1])
        return f'"\x00{len(texts) - 1}"'

    call = call_from_arguments(name, _GEMMA_KEY.sub(r'"\1":', _GEMMA_TEXT.sub(keep, body)))
    if isinstance(call, MalformedCall):
        return [call]
    return [ToolCall(name=name, arguments={key: _put_back(value, texts) for key, value in call.arguments.items()})]


def _put_back(value: Any, texts: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _put_back(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_back(item, texts) for item in value]
    return texts[int(value[1:])] if isinstance(value, str) and value.startswith("\x00") else value


class LlamaCalls(ToolCallFormat):
    """Llama 3: the whole turn is one JSON object, or several with ``;`` between, maybe after ``<|python_tag|>``."""

    _TAG = "<|python_tag|>"
    _ENDS = re.compile(r"\s*(?:<\|(?:eot_id|eom_id)\|>\s*)+$")

    def parse(self, text: str) -> Reply:
        """Take apart what the policy said; a turn that does not begin as a call does is content."""
        thought, rest = split_thought(text)
        rest = self._ENDS.sub("", rest).strip()
        content, tag, tagged = rest.partition(self._TAG)
        body = tagged.strip() if tag else rest
        if not tag and not re.match(r'\{\s*"(?:name|type|function|parameters|arguments)"', body):
            return Reply(content=rest, thought=thought)
        calls = [_read_built_in(body)] if tag and not body.startswith("{") else list(_read_objects(body))
        return Reply(content=content.strip() if tag else "", thought=thought, calls=tuple(calls))


def _read_objects(body: str) -> list[Call]:
    calls = list[Call]()
    while body:
        try:
            value, end = raw_loads(body)
        except ValueError:
            return calls + _read_json_calls("", body)
        calls.append(call_from_json(value))
        body = body[end:].lstrip(" \t\r\n;,")
    return calls


def _read_built_in(body: str) -> Call:
    """Read ``tool.call(key="value")``, as Llama 3.1 calls its own tools."""
    found = re.match(r"(?P<name>\w+)\.call(?P<arguments>\(.*\))$", body, re.DOTALL)
    if found is None:
        return MalformedCall(complaint="After <|python_tag|> there must be a tool call as a JSON object.")
    return _read_python(found["name"] + found["arguments"])[0]


class MistralCalls(ToolCallFormat):
    """Mistral: ``[TOOL_CALLS]`` with a JSON list of calls, or before each name with its arguments."""

    _MARK = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>[^\[]*))?(?:\[ARGS\])?\s*(?=\{)")

    def parse(self, text: str) -> Reply:
        """Take apart what the policy said."""
        thought, rest = split_thought(text)
        content, *bodies = rest.split(self._MARK)
        calls = [call for body in bodies for call in self._read(body.removesuffix("</s>").strip())]
        return Reply(content=content.removesuffix("</s>").strip(), thought=thought, calls=tuple(calls))

    def _read(self, body: str) -> list[Call]:
        if (named := self._NAMED.match(body)) is not None:
            return [call_from_arguments(named["name"], body[named.end() :], named["id"] or "")]
        return _read_json_calls("", body)


class HarmonyCalls(ToolCallFormat):
    """GPT-OSS: messages in channels, of which one with a recipient ``functions.NAME`` is a call."""

    _MESSAGE = re.compile(
        r"(?P<header>.*?)<\|message\|>(?P<body>.*?)(?P<end><\|(?:end|call|return)\|>|(?=<\|start\|>)|$)", re.DOTALL
    )
    _RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")

    def parse(self, text: str) -> Reply:
        """Take apart what the policy said; the channel ``analysis`` is thinking."""
        if "<|message|>" not in text:
            return Reply(content=re.sub(r"<\|[a-z]+\|>", "", text).strip())
        contents, thoughts, calls = list[str](), list[str](), list[Call]()
        for message in self._MESSAGE.finditer(text):
            header, body = message["header"], message["body"].strip()
            if (recipient := self._RECIPIENT.search(header)) is not None:
                calls.append(call_from_arguments(recipient["name"], body))
            else:
                (thoughts if "analysis" in header else contents).append(body)
        return Reply(content="\n".join(contents), thought="\n".join(thoughts), calls=tuple(calls))


class PythonicCalls(ToolCallFormat):
    """Calls written as a Python list, ``[f(x=1), g(y="z")]``: the whole turn, or between marks as LFM2 and Llama 4."""

    _MARKED = re.compile(
        r"<\|(?:tool_call|python)_start\|>(?P<body>.*?)(?:<\|(?:tool_call|python)_end\|>|$)", re.DOTALL
    )
    _END = re.compile(r"\s*(?:<\|[a-z_]+\|>\s*)+$")

    def parse(self, text: str) -> Reply:
        """Take apart what the policy said."""
        thought, rest = split_thought(text)
        if bodies := [found["body"] for found in self._MARKED.finditer(rest)]:
            content = self._END.sub("", self._MARKED.sub("", rest)).strip()
            return Reply(
                content=content, thought=thought, calls=tuple(c for body in bodies for c in _read_python(body))
            )
        rest = self._END.sub("", rest).strip()
        if re.match(r"\[\s*[A-Za-z_][\w.]*\(", rest) is None:
            return Reply(content=rest, thought=thought)
        return Reply(content="", thought=thought, calls=tuple(_read_python(rest)))


def _read_python(body: str) -> list[Call]:
    """Read a call or a list of calls whose arguments are literals; nothing is evaluated but these."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [MalformedCall(complaint=f"The tool call is no valid Python: {getattr(error, 'msg', None) or error}.")]
    return [_read_node(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _read_node(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        return MalformedCall(complaint="A tool call must be written as name(argument=value).")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return MalformedCall(name=name, complaint="Name each argument of a tool call: name(argument=value).")
    try:
        values = {str(keyword.arg): ast.literal_eval(_JSONWords().visit(keyword.value)) for keyword in node.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError):
        return MalformedCall(name=name, complaint="The arguments of a tool call must be literals.")
    return ToolCall(name=name, arguments=values)


class _JSONWords(ast.NodeTransformer):
    """Replaces what JSON calls true, false and null."""

    _VALUES = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(self._VALUES[node.id]), node) if node.id in self._VALUES else node


FORMATS: dict[str, ToolCallFormat] = {
    "hermes": MarkedCalls(re.compile(r"<tool_call>"), re.compile(r"</tool_call>"), _read_json_calls),
    "qwen_xml": MarkedCalls(
        re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]*)>|<tool_call>"),
        re.compile(r"</function>(?:\s*</tool_call>)?|</tool_call>"),
        _read_pairs(r"<parameter=(?P<key>[^>\n]*)>\n?(?P<value>.*?)\n?</parameter>"),
    ),
    "llama": LlamaCalls(),
    "mistral": MistralCalls(),
    "harmony": HarmonyCalls(),
    "pythonic": PythonicCalls(),
    "gemma": MarkedCalls(
        re.compile(r"<\|tool_call>call:(?P<name>[^{<\s]*)"), re.compile(r"<tool_call\|>"), _read_gemma_arguments
    ),
    "glm": MarkedCalls(
        re.compile(r"<tool_call>\s*(?P<name>[^\s<{]*)"),
        re.compile(r"</tool_call>"),
        _read_pairs(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
    ),
    "invoke_xml": MarkedCalls(
        re.compile(r"<(?:\w+:)?invoke name=\"(?P<name>[^\">]*)\">"),
        re.compile(r"</(?:\w+:)?invoke>"),
        _read_pairs(r"<(?:\w+:)?parameter name=\"(?P<key>[^\">]*)\"[^>]*>(?P<value>.*?)</(?:\w+:)?parameter>"),
        re.compile(r"</?(?:\w+:)?(?:tool|function)_calls>"),
    ),
    "deepseek": MarkedCalls(
        re.compile(r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\s<`{]+)(?:<｜tool▁sep｜>)?"),
        re.compile(r"<｜tool▁call▁end｜>"),
        _read_json_arguments,
        re.compile(r"<｜tool▁calls▁(?:begin|end)｜>"),
    ),
    "kimi": MarkedCalls(
        re.compile(
            r"<\|tool_call_begin\|>\s*(?:\S+ )?(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*"
            r"<\|tool_call_argument_begin\|>"
        ),
        re.compile(r"<\|tool_call_end\|>"),
        _read_json_arguments,
        re.compile(r"<\|tool_calls_section_(?:begin|end)\|>"),
    ),
}
"""Formats by name."""
