"""Tool calls are read in the format of the policy's family, and what can't be read is said in a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.published import published, tokenizer_for
from tests.tiny import tiny_tokenizer
from verl_lightning.data.chat_template import chat_template
from verl_lightning.environments.call_formats import FORMATS
from verl_lightning.environments.format_choice import ResponseTemplate, choose_format, recognise
from verl_lightning.environments.tool_calls import MalformedCall, ToolCall

FAMILIES = {
    "deepseekv3": "deepseek", "gemma4": "gemma", "gemma4_v5": "gemma", "glm4moe": "glm", "gptoss": "harmony",
    "lfm2_2_5": "pythonic", "llama3_1": "llama", "llama3_2": "llama", "nemotron_3_nano": "qwen_xml",
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_5_think": "qwen_xml", "qwen3_8": "qwen_xml", "qwen3_vl": "hermes",
    "kimi_like": "kimi", "minimax_like": "invoke_xml", "mistral_like": "mistral", "qwen_coder_like": "qwen_xml",
    "muse_glimmer": "invoke_xml", "phi3": None, "gemma": None, "smolvlm": None,
}  # fmt: skip

ADD = ToolCall(name="add", arguments={"a": 1, "b": 2})
TEXTS = ToolCall(name="add", arguments={"a": "1", "b": "2"}, has_text_values=True)
JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
READ = [
    ("hermes", f"<tool_call>\n{JSON}\n</tool_call>", "", [ADD]),
    ("hermes", f"<think>\nmaybe <tool_call>{JSON}</tool_call>\n</think>\n\nSo:\n<tool_call>{JSON}", "So:", [ADD]),
    ("hermes", f"opened before: {JSON}</think><tool_call>{JSON}</tool_call><tool_call>{JSON}", "", [ADD, ADD]),
    ("hermes", f"<think>it stops <tool_call>{JSON}</tool_call>", "", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [ADD]),
    ("hermes", "no call <b>here</b>", "no call <b>here</b>", []),
    (
        "qwen_xml",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [TEXTS],
    ),
    ("qwen_xml", "ok <function=add><parameter=a>1</parameter><parameter=b>2</parameter></function>", "ok", [TEXTS]),
    ("qwen_xml", f"<tool_call>{JSON}</tool_call>", "", [ADD]),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', "", [ADD]),
    ("llama", f'<|python_tag|>{JSON}; {{"type": "function", "name": "add", "parameters": {{"a": 1, "b": 2}}}}', "",
     [ADD, ADD]),
    ("llama", "<|python_tag|>add.call(a=1, b=2)<|eom_id|>", "", [ADD]),
    ("llama", '{"answer": 3}', '{"answer": 3}', []),
    ("mistral", f"Sure.[TOOL_CALLS] [{JSON[:-1]}, \"id\": \"abcdefghi\"}}]</s>", "Sure.",
     [ToolCall(name="add", arguments={"a": 1, "b": 2}, call_id="abcdefghi")]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add{"a": 1, "b": 2}', "", [ADD, ADD]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": 2}', "",
     [ToolCall(name="add", arguments={"a": 1, "b": 2}, call_id="123456789")]),
    (
        "harmony",
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
        "",
        [ADD],
    ),
    ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>', "", [ADD]),
    ("harmony", "<|channel|>final<|message|>3<|return|>", "3", []),
    ("pythonic", "[add(a=1, b=2), add(a=1, b=2)]", "", [ADD, ADD]),
    ("pythonic", "I add.<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|><|im_end|>", "I add.", [ADD]),
    ("pythonic", "[f(x=[1, {'k': true}], y=null)]", "",
     [ToolCall(name="f", arguments={"x": [1, {"k": True}], "y": None})]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("gemma", '<|tool_call>call:f{x:<|"|>a, b: "c"<|"|>,y:[1,2]}<tool_call|>', "",
     [ToolCall(name="f", arguments={"x": 'a, b: "c"', "y": [1, 2]})]),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
     "<arg_value>2</arg_value>\n</tool_call>", "", [TEXTS]),
]  # fmt: skip

MALFORMED = [
    ("hermes", "<tool_call>add(1, 2)</tool_call>", "", "not valid JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "add", "not valid JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "", 'must have a "name"'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", "must be a JSON object"),
    ("hermes", "<tool_call>" + 100_000 * "[" + "</tool_call>", "", "nested too deep|not valid JSON"),
    ("qwen_xml", "<tool_call>add</tool_call>", "", "not valid JSON"),
    ("qwen_xml", "<tool_call><function=add>a=1</function></tool_call>", "add", "more than arguments: 'a=1'"),
    ("llama", '{"name": "add", "parameters": {"a": ', "add", "not valid JSON"),
    ("llama", "<|python_tag|>print(1)", "", "must be a tool call as a JSON object"),
    ("mistral", "[TOOL_CALLS] add", "", "not valid JSON"),
    ("harmony", " to=functions.add<|channel|>commentary json<|message|>{a}<|call|>", "add", "not valid JSON"),
    ("pythonic", "[add(1, 2)]", "add", "Name each argument"),
    ("pythonic", "[add(a=open('x'))]", "add", "must be literals"),
    ("pythonic", "[add(a=1]", "", "no valid Python"),
    ("glm", "<tool_call>{}</tool_call>", "", 'must have a "name"'),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), READ)
def test_a_call_is_read_as_its_family_writes_it(name, text, content, calls):
    reply = FORMATS[name].parse(text)

    assert list(reply.calls) == calls
    assert reply.content == content


@pytest.mark.parametrize(("name", "text", "tool", "complaint"), MALFORMED)
def test_what_does_not_parse_is_said_in_a_sentence(name, text, tool, complaint):
    (call,) = FORMATS[name].parse(text).calls

    assert isinstance(call, MalformedCall)
    assert call.name == tool
    assert any(words in call.complaint for words in complaint.split("|"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([text for _, text, *_ in READ + MALFORMED if len(text) < 1000] + list('{}[]()<>|":,a1'))),
    st.data(),
)
def test_no_text_makes_a_format_fail(pieces, data):
    text = "".join(piece[data.draw(st.integers(0, 5)) :] for piece in pieces)

    for form in FORMATS.values():
        form.parse(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_template_tells_its_format(name):
    assert recognise(tokenizer_for(name)) == FAMILIES[name]


def test_a_reply_is_a_message_that_its_template_takes():
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
    for name in filter(FAMILIES.get, published()):
        template = chat_template(tokenizer_for(name), [tool])
        texts = FORMATS[FAMILIES[name]], [text for form, text, *_ in READ + MALFORMED if form == FAMILIES[name]]
        for text in texts[1]:
            reply = texts[0].parse(text)
            ids = [f"call{n:05d}" for n in range(len(reply.calls))]
            answers = [{"role": "tool", "tool_call_id": i, "name": "add", "content": "3"} for i in ids]
            if len(ids) == 1:
                template.render([{"role": "user", "content": "1+2"}, reply.to_message(ids), *answers], prompt=True)


def test_the_format_can_be_named_given_or_the_tokenizers_own():
    tokenizer = tiny_tokenizer()
    assert choose_format(tokenizer, "pythonic") is FORMATS["pythonic"]
    assert choose_format(tokenizer, FORMATS["glm"]) is FORMATS["glm"]
    with pytest.raises(ValueError, match="Set `tool_calls` to one of hermes, qwen_xml"):
        choose_format(tokenizer)
    with pytest.raises(ValueError, match="`tool_calls: hermse` is unknown"):
        choose_format(tokenizer, "hermse")

    transform = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
    call = {"open": "((", "close": "))", "content": "json", "repeats": True, "transform": transform}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"}, "start_anchor": "A:", "fields": {"tool_calls": call, "content": {}},
    }  # fmt: skip
    form = choose_format(tokenizer)

    assert isinstance(form, ResponseTemplate)
    assert form.parse(f"Well (({JSON}))").calls == (ADD,)
    assert isinstance(form.parse("((1 + ))").calls[0], MalformedCall)
