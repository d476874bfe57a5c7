"""Under every published template, the tokens of an episode are those that were said, and the text is the template's."""

from __future__ import annotations

import random
import re

import pytest

from tests.data.published import published, tokenizer_for
from verl_lightning.data.chat_template import chat_template
from verl_lightning.data.ends import find_ends
from verl_lightning.environments.chat import Chat

WORDS = ("alpha", "Beta", "12", "x=1", "(so)", "straße", "北京", "don't", "{a: 1}", "<b>", "a\\n")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "Any"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Does it", "parameters": PARAMETERS}}]
REFUSALS = re.compile(r"can't render the messages|leaves out `|leaves out or changes")  # of tools, before an episode
REWRITING = re.compile(  # templates that can't train by episodes unless the policy reads what it said
    r"deepseek|nemotron|glm4moe|lfm2_2_5|qwen3$|qwen3_[56]_(no)?think$|qwen3_6$|kimi_like|mistral_like"
)


def chat_for(name, *, tools, history="refuse"):
    values = {"tools": TOOLS} if tools else {}
    return Chat(tokenizer_for(name), values, name="row 1", enable_thinking=None, history=history)


class Speaker:
    """Has a random chat, in which the policy says what the template would write for it, and then its end."""

    def __init__(self, name, seed, *, tools):
        self.random, self.tools = random.Random(seed), tools
        self.tokenizer, self.chat = tokenizer_for(name), chat_for(name, tools=tools)
        self.template = chat_template(self.tokenizer, TOOLS if tools else None)
        _, self.ends = find_ends(self.template, self.tokenizer.eos_token)
        self.whole, self.said = [{"role": "user", "content": self.words()}], []
        self.ids = self.chat.begin(self.whole)

    def words(self):
        return " ".join(self.random.choice(WORDS) for _ in range(self.random.randint(1, 6)))

    def reply(self):
        role = {"role": "tool", "tool_call_id": "call12345", "name": "f"} if self.tools else {"role": "user"}
        return {**role, "content": self.words()}

    def render(self, *messages, prompt=False):
        return self.template.render([*self.whole, *messages], TOOLS if self.tools else None, prompt=prompt)

    def speak(self):
        call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        calls = {"content": "", "tool_calls": [call]}
        message = {"role": "assistant", **(calls if self.tools else {"content": self.words()})}
        prompt = self.tokenizer.decode(self.ids)
        written = self.render(message, self.reply())
        assert written.startswith(prompt)
        marks = self.ends.closing | ({self.ends.opening_tool if self.tools else self.ends.opening} - {None})
        ends = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        found = ends.search(written, len(prompt))
        ids = self.tokenizer(written[len(prompt) : found.start()], add_special_tokens=False)["input_ids"]
        self.said.append((len(self.ids), [*ids, self.tokenizer.convert_tokens_to_ids(found[0])]))
        self.ids = self.ids + self.said[-1][1]
        self.chat.add_turn(message)
        self.whole.append(message)
        return found[0]

    def hear(self, last):
        reply = self.reply()
        self.ids = self.ids + self.chat.add_reply([reply], last)
        self.whole.append(reply)


def is_refused(name, *, tools):
    """Whether a template takes no tools, or is known to write earlier turns anew."""
    chat = chat_for(name, tools=tools)
    try:
        chat.begin([{"role": "user", "content": "Hello"}])
        complaint = chat.history_complaint("tool" if tools else "user")
    except ValueError as error:
        return tools and REFUSALS.search(str(error)) is not None
    return complaint is not None and REWRITING.match(name) is not None


@pytest.mark.parametrize("tools", [False, True], ids=["users", "tools"])
@pytest.mark.parametrize("name", published())
def test_no_token_is_made_again(name, tools, chats_per_template):
    if is_refused(name, tools=tools) or (name.startswith("gptoss") and not tools):  # see below
        return
    for seed in range(chats_per_template):
        speaker = Speaker(name, seed, tools=tools)
        for _ in range(speaker.random.randint(1, 3)):
            speaker.hear(speaker.speak())
        assert speaker.tokenizer.decode(speaker.ids) == speaker.render(prompt=True)
        assert all(speaker.ids[start : start + len(said)] == said for start, said in speaker.said)


@pytest.mark.parametrize("name", [name for name in published() if REWRITING.match(name)])
def test_a_template_that_writes_history_anew_is_recognised_and_can_be_kept(name):
    assert chat_for(name, tools=False).history_complaint("user") or chat_for(name, tools=True).history_complaint("tool")
    chat, tokenizer = chat_for(name, tools=False, history="keep"), tokenizer_for(name)
    _, ends = find_ends(chat_template(tokenizer, None), tokenizer.eos_token)
    chat.begin([{"role": "user", "content": "One"}])
    chat.add_turn({"role": "assistant", "content": "<think>\nSo\n</think>\n\nTwo"})

    reply = tokenizer.decode(chat.add_reply([{"role": "user", "content": "Three"}], max(ends.closing)))

    assert reply.count("Three") == 1
    assert "One" not in reply
    assert "Two" not in reply
    assert not any(reply.lstrip().startswith(end) for end in ends.closing)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gptoss"])
def test_what_others_say_makes_no_special_token(name):
    """A tool's output that spells the end of a turn is text."""
    chat, tokenizer = chat_for(name, tools=False), tokenizer_for(name)
    special = sorted(tokenizer.all_special_tokens, key=len)
    chat.begin([{"role": "user", "content": "One"}])
    other = chat_for(name, tools=False)
    other.begin([{"role": "user", "content": "One"}])
    for each in (chat, other):
        each.add_turn({"role": "assistant", "content": "Two"})

    spelt = chat.add_reply([{"role": "user", "content": f"Three{''.join(special)}"}], None)

    plain = other.add_reply([{"role": "user", "content": "Three"}], None)
    ids = set(tokenizer.all_special_ids)
    assert [token for token in spelt if token in ids] == [token for token in plain if token in ids]
    assert all(f"{text[0]} {text[1:]}" in tokenizer.decode(spelt) for text in special)


def test_a_turn_that_another_token_ends_is_closed_by_the_template():
    """As one that stopped at a text of `sampling.stop`."""
    chat, tokenizer = chat_for("qwen2_5", tools=False), tokenizer_for("qwen2_5")
    chat.begin([{"role": "user", "content": "One"}])
    chat.add_turn({"role": "assistant", "content": "Two"})

    reply = tokenizer.decode(chat.add_reply([{"role": "user", "content": "Three"}], None))

    assert reply == "<|im_end|>\n<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_may_close_earlier_turns_with_another_token():
    """What stands there is the token that the policy ended its turn with."""
    chat, tokenizer = chat_for("gptoss", tools=False), tokenizer_for("gptoss")
    chat.begin([{"role": "user", "content": "One"}])
    chat.add_turn({"role": "assistant", "content": "Two"})

    reply = tokenizer.decode(chat.add_reply([{"role": "user", "content": "Three"}], "<|return|>"))

    assert reply == "<|start|>user<|message|>Three<|end|><|start|>assistant"


def test_what_a_template_rewrites_in_a_later_turn_is_told():
    chat = chat_for("qwen3_5_nothink", tools=False)
    chat.begin([{"role": "user", "content": "One"}])
    chat.add_turn({"role": "assistant", "content": "Two"})

    with pytest.raises(ValueError, match=r"writes what the policy has read anew once a message of `user` follows"):
        chat.add_reply([{"role": "user", "content": "Three"}], "<|im_end|>")
