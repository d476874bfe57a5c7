"""What is written in a row stands in the text that each published template makes of it, or the row is refused."""

from __future__ import annotations

import json
import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.data.published import TWIN, originals, published, tokenizer_for
from verl_lightning.data.chat import tokenize_chats
from verl_lightning.data.files import Row

REFUSALS = re.compile(
    r"can't render the messages|leaves out or changes|leaves out `|does not write as JSON does|writes as Python does"
    r"|changes the assistant's turn|The prompt that the model answers|ends without a token that ends a response"
    r"|is marked by the chat template"
)
NOT_PLAIN = ("deepseek", "nemotron")  # the prompt ends in a thought's tag, which a turn without thought lacks
ENDS = {  # tokens that end a response, by the beginning of a template's name
    "cohere": ["<|END_OF_TURN_TOKEN|>"], "deepseek": ["<｜end▁of▁sentence｜>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "diffusion_gemma": ["<turn|>", "<|tool_response>"], "gemma": ["<end_of_turn>"], "idefics": ["<end_of_utterance>"],
    "glm4moe": ["<|user|>", "<|observation|>"], "gptoss": ["<|return|>", "<|call|>"], "llama": ["<|eot_id|>"],
    "llava": ["</s>"], "minimax": ["[e~["], "mistral": ["</s>"], "muse": ["<|eot|>"],
    "phi3": ["<|end|>", "<|endoftext|>"], "smolvlm": ["<end_of_utterance>"], "": ["<|im_end|>"],
}  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": CITY}}]


def user(content):
    return {"role": "user", "content": content}


def reply(content, *arguments, **keys):
    calls = [
        {"id": f"call1234{n}", "type": "function", "function": {"name": "weather", "arguments": given}}
        for n, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, **keys, **({"tool_calls": calls} if calls else {})}


def tool_chat(*arguments, content=""):
    results = [
        {"role": "tool", "tool_call_id": f"call1234{n}", "content": f"{n}2 degrees"} for n in range(len(arguments))
    ]
    return [user("Weather?"), reply(content, *arguments), *results, reply("It is warm")]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


CHATS = {
    "plain": [user("Hello there"), reply("General Kenobi")],
    "system": [{"role": "system", "content": "Be terse"}, user("Hello there"), reply("General Kenobi")],
    "turns": [user("Name one"), reply("Alpha"), user("Another"), reply("Beta"), user("More"), reply("Gamma delta")],
    "spaced": [user("  Hi \n"), reply("\n\n Yes \n")],
    "parts": [user(parts("Look ", "here")), reply(parts("I ", "do"))],
    "thought": [user("Why?"), reply("Because", reasoning_content="Let me ponder")],
    "thought in content": [user("Why?"), reply("<think>\nLet me ponder\n</think>\n\nBecause")],
    "thoughts": [user("Why?"), reply("So", reasoning_content="Ponder"), user("How?"), reply("Thus", thinking="Muse")],
    "call": tool_chat({"city": "Paris"}),
    "call beside null": tool_chat({"city": "Paris"}, content=None),
    "call beside text": tool_chat({"city": "Paris"}, content="Let me look"),
    "two calls": tool_chat({"city": "Paris"}, {"city": "Rome"}),
    "nested": tool_chat({"city": "Zürich 北京", "near": {"country": "CH", "of": ["a b", {"x": 1.5}]}}),
    "null and true": tool_chat({"city": None, "flag": True, "list": [False, None]}),
    "no arguments": tool_chat({}),
    "arguments as text": tool_chat('{"city":"Paris"}'),
    "call at the end": [user("Weather?"), reply("", {"city": "Paris"})],
    "quotes": tool_chat({"city": 'the "old" town\\'}),
    "nothing asked": [user(""), reply("Yes?")],
    "nothing said": [user("Say nothing"), reply("")],
}  # fmt: skip


def tokenized(tokenizer, chat, supervise="all"):
    tools = TOOLS if any("tool_calls" in message for message in chat) else None
    row = Row(values={"messages": chat, "tools": tools}, name="row 1")
    (tokens,) = tokenize_chats([row], tokenizer, supervise=supervise, enable_thinking=None)
    return tokens


def stretches(tokenizer, tokens):
    """The text of each supervised stretch."""
    runs: list[list[int]] = [[]]
    for token, keep in zip(tokens.ids, tokens.is_supervised, strict=True):
        runs[-1].append(token) if keep else runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def texts_of(value):
    """All texts and keys within a JSON value, in any order."""
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *texts_of(item))]
    if isinstance(value, list):
        return [text for item in value for text in texts_of(item)]
    return [value] if isinstance(value, str) else []


def written_in(message):
    """The texts of a message that must stand in the text."""
    content = message["content"] or ""
    texts = [content if isinstance(content, str) else "".join(part["text"] for part in content)]
    texts = re.split("</?think>", texts[0]) + [message.get("reasoning_content", ""), message.get("thinking", "")]
    for call in message.get("tool_calls", []):
        given = call["function"]["arguments"]
        texts += texts_of(json.loads(given) if isinstance(given, str) else given)
    return [text.strip() for text in texts if text.strip()]


def has(text, written):
    return written in text or json.dumps(written, ensure_ascii=False)[1:-1] in text


def ends_of(name):
    return next(ends for family, ends in ENDS.items() if name.startswith(family))


def check(name, chat, supervise):
    tokenizer = tokenizer_for(name)
    tokens = tokenized(tokenizer, chat, supervise)
    text, supervised = tokenizer.decode(tokens.ids), stretches(tokenizer, tokens)
    turns = [message for message in chat if message["role"] == "assistant"]
    turns = turns if supervise == "all" else turns[-1:]
    assert len(supervised) == len(turns)
    assert not re.search(r"\bNone\b|\bTrue\b|\bFalse\b|\{'", text)
    assert all(stretch.endswith(tuple(ends_of(name))) for stretch in supervised), supervised
    assert not any("assistant\n" in stretch or "<|turn>model" in stretch for stretch in supervised), supervised
    for turn, stretch in zip(turns, supervised, strict=True):
        assert all(has(stretch, written) for written in written_in(turn)), stretch
    for message in chat:
        if message["role"] != "assistant":
            assert all(has(text, written) for written in written_in(message)), text


def is_refused(name, chat, supervise):
    """Checks what was made of a conversation, or else the reason."""
    try:
        check(name, chat, supervise)
    except ValueError as error:
        reason = str(error)
    else:
        return False
    assert REFUSALS.search(reason), reason
    return True


@pytest.mark.parametrize("name", originals())
def test_a_template_writes_what_was_written_and_supervises_turns_with_their_end(name):
    refused = {(kind, way) for kind in CHATS for way in ("all", "last") if is_refused(name, CHATS[kind], way)}

    if name.startswith(NOT_PLAIN):
        assert ("plain", "all") in refused
    else:
        plain = ("plain", "spaced", "parts", "nothing asked", "nothing said")
        assert not refused & {(kind, "all") for kind in plain}
        assert ("turns", "last") not in refused


def marked_by_twin(name, chat):
    """What TRL's twin of a template marks, rendered by transformers alone; adjacent marks are one."""
    tokenizer = tokenizer_for(name + TWIN)
    texts, spans = render_jinja_template(
        [chat], chat_template=tokenizer.chat_template, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
    )
    marked = "".join(
        character if any(begin <= index < end for begin, end in spans[0]) else "\0"
        for index, character in enumerate(texts[0])
    )
    return [stretch.strip() for stretch in marked.split("\0") if stretch.strip()]


@pytest.mark.parametrize("name", [name for name in originals() if name + TWIN in published()])
def test_what_is_supervised_is_what_the_marked_twin_marks(name):
    """Templates with a thought in the prompt aside: their twins mark it."""
    as_parts = name in ("idefics3", "llava_next", "smolvlm")
    tokenizer = tokenizer_for(name)
    for kind in ("plain", "turns"):
        chat = (
            [{**message, "content": parts(message["content"])} for message in CHATS[kind]] if as_parts else CHATS[kind]
        )
        try:
            ours = [stretch.strip() for stretch in stretches(tokenizer, tokenized(tokenizer, chat))]
        except ValueError:
            continue
        twins = marked_by_twin(name, chat)
        assert len(ours) == len(twins)
        assert all(twin.endswith(own) or own.startswith("</think>") for own, twin in zip(ours, twins, strict=True))


@pytest.mark.parametrize("name", [name for name in published() if name.endswith(TWIN)])
def test_a_marked_template_supervises_what_it_marks_without_headers(name):
    for kind in ("plain", "turns", "call"):
        for supervise in ("all", "last"):
            is_refused(name, CHATS[kind], supervise)
