from __future__ import annotations

import json
import logging

import pyarrow
import pytest
import torch
from pyarrow import parquet

from tests.data.recorder import Recorder, make_trainer
from tests.tiny import tiny_tokenizer
from verl_lightning.data import ChatDataModule
from verl_lightning.data.chat import tokenize_chats, tokens_in_spans
from verl_lightning.data.files import Row
from verl_lightning.types import TokenBatch

# Shows a thought in the last turn only, an empty one if there is none, as templates of reasoning models do.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% set thought, _, rest = m['content'].rpartition('</t>')[0], '', m['content'].split('</t>')[-1] %}"
    "{% if m['role'] == 'assistant' and loop.last %}<t>{{ thought.removeprefix('<t>') }}</t>{% endif %}"
    "{{ rest }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<t></t>{% endif %}{% endif %}"
)
TOOL_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if 'tool_calls' in m %}"
    "{% for call in m['tool_calls'] %}"
    "{{ call['function']['name'] }}({{ call['function'].get('arguments', '') }}){% endfor %}{% endif %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)


def chat(*contents):
    """Turns of user and assistant, beginning with the user."""
    return [{"role": "assistant" if turn % 2 else "user", "content": content} for turn, content in enumerate(contents)]


def supervised_texts(messages, *, template=None, supervise="all", tokenizer=None, **columns):
    """The stretches of supervised text of a conversation."""
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    row = Row(values={"messages": messages, **columns}, name="row 1")
    (tokens,) = tokenize_chats([row], tokenizer, supervise=supervise, enable_thinking=None)
    pieces = [token if keep else "\0" for token, keep in zip(
        tokenizer.convert_ids_to_tokens(tokens.ids), tokens.is_supervised, strict=True)]  # fmt: skip
    return [text for text in "".join(pieces).split("\0") if text]


def write_jsonl(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return str(path)


def fit_once(file, **options):
    module = Recorder()
    data = ChatDataModule(file, file, **{"batch_size": 2, "max_length": 64, "shuffle": False, **options})
    make_trainer(max_steps=1).fit(module, datamodule=data)
    return module


def test_every_assistant_turn_is_supervised_with_its_end_token():
    assert supervised_texts(chat("Hi", "Hello", "Bye", "Ciao")) == ["Hello<|end|>", "Ciao<|end|>"]


def test_only_the_last_turn_is_supervised_on_demand():
    assert supervised_texts(chat("Hi", "Hello", "Bye", "Ciao"), supervise="last") == ["Ciao<|end|>"]


def test_the_end_token_is_supervised_where_it_also_pads():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token

    assert supervised_texts(chat("Hi", "Hello"), tokenizer=tokenizer) == ["Hello<|end|>"]


def test_text_that_the_user_says_first_is_not_mistaken_for_the_answer():
    assert supervised_texts(chat("say no", "no", "no", "no")) == ["no<|end|>", "no<|end|>"]


def test_tool_calls_are_supervised_and_tool_results_are_not():
    messages = [
        *chat("Add 1 and 2"),
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3", "tool_calls": None},
    ]

    texts = supervised_texts(messages, template="{{ tools | tojson }}" + TOOL_TEMPLATE, tools='[{"type": "function"}]')

    assert texts == ["add()<|end|>", "It is 3<|end|>"]


def test_parquet_and_jsonl_teach_the_same(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *chat("Add"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3"},
    ]
    rows = [{"messages": messages, "tools": "[]"}, {"messages": chat("1", "2"), "tools": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    data = ChatDataModule("a", batch_size=2, max_length=256)

    from_parquet = data.read(str(tmp_path / "a.parquet"), tokenizer).chats
    from_jsonl = data.read(write_jsonl(tmp_path / "a.jsonl", [row["messages"] for row in rows]), tokenizer).chats

    assert from_parquet == from_jsonl


def test_an_opening_assistant_turn_answers_nothing():
    messages = [{"role": "assistant", "content": "Welcome"}, *chat("Hi", "Hello")]

    assert supervised_texts(messages) == ["Hello<|end|>"]


def test_a_line_feed_after_the_end_token_is_not_supervised():
    template = tiny_tokenizer().chat_template.replace("<|end|>", "<|end|>\n")

    assert supervised_texts(chat("Hi", "Hello\n"), template=template) == ["Hello\n<|end|>"]


def test_marks_of_the_template_decide():
    texts = supervised_texts(chat("Hi", "Hello", "Bye", "Ciao"), template=MARKED_TEMPLATE)

    assert texts == ["Hello<|end|>", "Ciao<|end|>"]
    assert supervised_texts(chat("a", "b", "c", "d"), template=MARKED_TEMPLATE, supervise="last") == ["d<|end|>"]


def test_an_empty_thought_that_only_the_last_turn_has_does_not_disturb():
    texts = supervised_texts(chat("Hi", "Hello", "Bye", "Ciao"), template=THINKING_TEMPLATE)

    assert texts == ["Hello<|end|>", "<t></t>Ciao<|end|>"]


@pytest.mark.parametrize(("key", "value"), [("loss_mask", 0), ("weight", 0.0), ("train", False)])
def test_a_turn_that_is_switched_off_is_not_supervised(key, value):
    messages = chat("Hi", "Hello", "Bye", "Ciao")
    messages[1][key] = value
    messages[3][key] = 1 if key != "train" else True

    assert supervised_texts(messages) == ["Ciao<|end|>"]
    messages[3][key] = value
    assert supervised_texts(messages, supervise="last") == []


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"weight": 0.5}, "Expected `weight` to be 0 or 1 .* in message 2 of 2 in row 1, got 0.5"),
        ({"loss_mask": "no"}, "Expected `loss_mask` to be 0 or 1"),
        ({"loss_mask": 0, "weight": 1}, "The switches of message 2 of 2 in row 1 disagree"),
        ({"mask": 0}, "Nothing is known of `mask` in message 2 of 2 in row 1.*Take it out"),
    ],
)
def test_refuses_switches_that_it_does_not_know(keys, complaint):
    messages = chat("Hi", "Hello")
    messages[1].update(keys)

    with pytest.raises(ValueError, match=complaint):
        supervised_texts(messages)


def test_refuses_a_turn_without_an_end_token():
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += PROMPT.replace("<|assistant|>", "assistant:")

    with pytest.raises(ValueError, match=r"\(message 2 of 2\) in row 1 ends without a token that ends a response"):
        supervised_texts(chat("Hi", "Hello"), template=template)


def test_the_token_that_opens_the_next_message_ends_a_turn_that_nothing_closes():
    template = tiny_tokenizer().chat_template.replace("<|end|>", "")

    assert supervised_texts(chat("a", "b", "c", "d"), template=template) == ["b<|user|>", "d<|user|>"]


@pytest.mark.parametrize(
    ("messages", "lost"),
    [
        ([*chat("a", "b"), {"role": "tool", "content": "12"}, *chat("c", "d")], '"12"`, `content` in message 3 of 5'),
        ([*chat("a"), {"role": "assistant", "tool_calls": [{"name": "f"}]}], '"f"`, the name of tool call 1'),
        ([*chat("a"), {"role": "assistant", "content": "b", "reasoning_content": "hm"}], '"hm"`, `reasoning_content`'),
    ],
)  # fmt: skip
def test_refuses_what_the_template_leaves_out(messages, lost):
    template = tiny_tokenizer().chat_template.replace(
        "{% for message in messages %}", "{% for message in messages if message['role'] != 'tool' %}"
    )

    with pytest.raises(ValueError, match=f"The chat template leaves out `{lost}"):
        supervised_texts(messages, template=template)


def test_a_token_over_the_border_of_a_turn_is_split_there():
    """As a model would say it: its turn begins after the prompt's last token."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([":H"])
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
    template += PROMPT.replace("<|assistant|>", "assistant:")

    assert supervised_texts(chat("Hi", "Hello"), template=template, tokenizer=tokenizer) == ["Hello<|end|>"]


def test_a_thought_that_the_prompt_holds_is_not_supervised():
    texts = supervised_texts(chat("a", "b", "c", "d"), template=THINKING_TEMPLATE, enable_thinking="false")

    assert texts == ["b<|end|>", "d<|end|>"]


def test_refuses_a_turn_whose_thought_the_template_drops():
    messages = chat("a", "<t>hm</t>b", "c", "<t>so</t>d")

    with pytest.raises(
        ValueError, match=r"changes the assistant's turn \(message 2 of 4\) in row 1.*`supervise: last`"
    ):
        supervised_texts(messages, template=THINKING_TEMPLATE)

    assert supervised_texts(messages, template=THINKING_TEMPLATE, supervise="last") == ["<t>so</t>d<|end|>"]


def test_tokens_belong_to_the_span_they_begin_in():
    offsets = [(0, 2), (2, 2), (2, 5), (5, 6), (5, 6), (6, 9)]  # the second is empty; two are bytes of one character

    assert tokens_in_spans(offsets, [(1, 2), (2, 6)]) == [False, False, True, True, True, False]


def test_a_batch_is_padded_on_the_right_and_its_response_is_all_but_the_first_token(tmp_path):
    batch = fit_once(write_jsonl(tmp_path / "a.jsonl", [chat("1", "23"), chat("4", "5")])).train_batches[0]

    assert isinstance(batch, TokenBatch)
    assert tiny_tokenizer().batch_decode(batch.input_ids) == [
        "<|user|>1<|end|><|assistant|>23<|end|>",
        "<|user|>4<|end|><|assistant|>5<|end|><|pad|>",
    ]
    assert torch.equal(batch.attention_mask, torch.tensor([[True] * 7, [True] * 6 + [False]]))
    assert torch.equal(
        batch.response_mask, torch.tensor([[False] * 3 + [True] * 3, [False] * 3 + [True] * 2 + [False]])
    )


def test_batches_reach_the_module_in_half_precision(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [chat("1", "2"), chat("3", "4")])
    module = Recorder()

    make_trainer(max_steps=1, precision="bf16-true").fit(
        module, datamodule=ChatDataModule(file, batch_size=2, max_length=64)
    )

    assert isinstance(module.train_batches[0], TokenBatch)


def test_validation_counts_each_row_once_on_every_number_of_ranks(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [chat("1", "2"), chat("3", "45"), chat("6", "789")])
    dataset = ChatDataModule(file, batch_size=2, max_length=64).read(file, tiny_tokenizer())

    batch = dataset.batch([2, 0], [False, True])

    assert batch["response_mask"].sum(1).tolist() == [4, 0]


def test_a_chat_over_the_limit_stops_the_run(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [chat("1", "2"), chat("1", "2345")])

    with pytest.raises(ValueError, match=r"9 tokens in row 2 of `.*a.jsonl`, over `max_length: 8`, and 1 of 2 rows"):
        fit_once(file, max_length=8)


def test_truncating_keeps_the_first_tokens(tmp_path):
    batch = fit_once(
        write_jsonl(tmp_path / "a.jsonl", [chat("1", "2"), chat("1", "2345")]), max_length=6, overlong="truncate"
    ).train_batches[0]

    assert tiny_tokenizer().decode(batch.input_ids[1]) == "<|user|>1<|end|><|assistant|>23"


@pytest.mark.parametrize("second", [chat("1"), chat("long question", "2")])
def test_names_the_row_that_teaches_nothing(tmp_path, second):
    file = write_jsonl(tmp_path / "a.jsonl", [chat("1", "2"), second, chat("3", "4")])

    with pytest.raises(ValueError, match=r"nothing to learn from in row 2 of `.*a.jsonl`, and in 1 of 3 rows"):
        fit_once(file, max_length=8, overlong="truncate")


def test_rows_that_teach_nothing_are_left_out_on_demand(tmp_path, caplog):
    file = write_jsonl(tmp_path / "a.jsonl", [chat("1"), chat("1", "2"), chat("3", "4")])

    with caplog.at_level(logging.INFO):
        batch = fit_once(file, unsupervised="drop").train_batches[0]

    assert "Dropped 1 of 3 rows, in which nothing is supervised." in caplog.text
    assert batch.response_mask.any(1).all()


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("max_length", 1)])
def test_refuses_sizes_that_leave_nothing(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be at least {value + 1}, got {value}"):
        ChatDataModule("a.jsonl", **{"batch_size": 2, "max_length": 64, name: value})
