from __future__ import annotations

import pytest

from tests.tiny import tiny_tokenizer
from verl_lightning.data.files import Row
from verl_lightning.data.messages import clean_messages
from verl_lightning.data.templates import ChatRenderer, parse_flag, parse_tools

TOOL = {"type": "function", "function": {"name": "add"}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m['role'] + ':' + m['content'] }}"
    "{% if m['tool_calls'] is defined %}!{% endif %};{% endfor %}{% if enable_thinking is not defined %}unset"
    "{% elif enable_thinking %}think{% else %}answer{% endif %}"
)


def render(row, *, enable_thinking=None):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    renderer = ChatRenderer(tokenizer, Row(values=row, name="row 1"), enable_thinking=enable_thinking)
    return renderer.render([{"role": "user", "content": "a"}], add_generation_prompt=False)


def test_keys_of_a_message_without_a_value_are_none_but_arguments_stay():
    messages = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": None}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}]},
    ]

    assert clean_messages(messages, name="x") == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}]},
    ]


@pytest.mark.parametrize(
    "messages", ["a", [], [{"content": "a"}], [{"role": "user"}], ["a"], {"role": "user", "content": "a"}]
)
def test_refuses_what_is_not_a_list_of_messages(messages):
    with pytest.raises(ValueError, match=r"Expected a list of messages .* in `prompt` in row 1, got"):
        clean_messages(messages, name="`prompt` in row 1")


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content of the type `image_url` in message"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "image", "text": None}]}, "of the type `image` in"),
        ({"content": {"a": 1}}, "Expected text, or a list of text parts, in message 1 of 1 of `messages` in row 1"),
        ({"content": 3}, "got a number"),
        ({"content": "a", "tool_calls": [{"function": {}}]}, "to have a function with a name in message 1 of 1"),
        ({"content": "a", "tool_calls": {"name": "f"}}, "`tool_calls` to be a list in message 1 of 1"),
        ({"content": "a", "tool_calls": [{"name": "f", "arguments": [1]}]}, "`arguments` of a tool call to be an"),
        ({"content": "a", "tool_calls": [{"name": "f", "input": {}}]}, "Nothing is known of `input` in a tool call"),
    ],
)  # fmt: skip
def test_refuses_by_name_what_is_no_text(message, complaint):
    with pytest.raises(ValueError, match=complaint):
        clean_messages([{"role": "user", **message}], name="`messages` in row 1")


def test_text_parts_become_one_text():
    parts = [{"type": "text", "text": "a ", "image": None}, {"text": "b"}, "c"]

    assert clean_messages([{"role": "user", "content": parts}], name="x") == [{"role": "user", "content": "a bc"}]


def test_half_a_character_is_refused_with_its_row():
    renderer = ChatRenderer(tiny_tokenizer(), Row(values={}, name="row 5 of `f`"), enable_thinking=None)

    with pytest.raises(ValueError, match=r"half a character, `\\ud83d`, in row 5 of `f`, after '.*abc'"):
        renderer.render([{"role": "user", "content": "abc\ud83d"}], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("value", "flag"),
    [(True, True), (False, False), (None, None), ("none", None), ("None", None), ("", None), ("false", False),
     ("False", False), ("true", True)],
)  # fmt: skip
def test_a_flag_written_as_text_means_what_it_says(value, flag):
    assert parse_flag(value, name="x") is flag


@pytest.mark.parametrize("value", ["yes", 1, "off"])
def test_refuses_a_flag_that_is_neither_true_nor_false(value):
    with pytest.raises(ValueError, match="Expected true, false or null for `enable_thinking` in row 1"):
        parse_flag(value, name="`enable_thinking` in row 1")


@pytest.mark.parametrize(
    ("value", "tools"),
    [(None, None), ("", None), ("[]", None), ("null", None), ([], None), ('[{"a": null}]', [{"a": None}]),
     ([{"a": 1, "b": None}], [{"a": 1, "b": None}])],
)  # fmt: skip
def test_tools_come_as_a_list_or_as_its_text(value, tools):
    assert parse_tools(value, name="x") == tools


@pytest.mark.parametrize("value", ["[1]", "{", {"a": 1}])
def test_refuses_tools_of_another_form(value):
    with pytest.raises(ValueError, match="Expected a list of tool schemas.* for `tools` in row 1"):
        parse_tools(value, name="`tools` in row 1")


@pytest.mark.parametrize(
    ("own", "option", "text"),
    [(None, None, "unset"), (None, True, "think"), ("none", False, "answer"), ("false", True, "answer"),
     (True, False, "think")],
)  # fmt: skip
def test_the_row_decides_on_thinking_before_the_option(own, option, text):
    assert render({"enable_thinking": own}, enable_thinking=option) == f"user:a;{text}"


def test_tools_reach_the_template():
    assert render({"tools": [TOOL]}).startswith('[{"type": "function"')


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    ],
)
def test_names_the_row_that_the_template_refuses(template, why):
    """A template that wants to reach Python itself too."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    renderer = ChatRenderer(tokenizer, Row(values={}, name="row 7 of `f`"), enable_thinking=None)

    with pytest.raises(ValueError, match=f"can't render the messages in row 7 of `f`: {why}"):
        renderer.render([{"role": "system", "content": "a"}], add_generation_prompt=False)
