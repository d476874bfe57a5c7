from __future__ import annotations

import json

import pytest

from tests.data.published import tokenizer_for
from tests.tiny import tiny_tokenizer
from verl_lightning.data import ChatDataModule, PromptDataModule
from verl_lightning.data.preference_rows import read_preferences
from verl_lightning.data.rows import read_chat_rows, read_prompt_rows

ASKED, SAID = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"default": None, "enum": [None, "a"]}}}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def one(read, path, row, columns=None):
    (found,) = read(write(path / "sums.jsonl", row), columns)
    return found.values


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "1+1", "answer": "2"}, {"prompt": "question", "ground_truth": "answer"}),
        ({"prompt": "1+1", "ground_truth": "2"}, None),
        ({"prompt": [ASKED], "ground_truth": "2"}, None),
        ({"prompt": json.dumps([ASKED]), "reward_model": {"ground_truth": "2"}}, None),
        ({"prompt": "1+1", "solution": "2"}, {"ground_truth": "solution"}),
    ],
)
def test_questions_and_answers_are_prompts_of_the_source_that_their_file_names(tmp_path, row, columns):
    values = one(read_prompt_rows, tmp_path, row, columns)

    assert values["prompt"] == [ASKED]
    assert values.items() >= {key: value for key, value in row.items() if key != "prompt"}.items()
    assert values["reward_model"]["ground_truth"] == "2"
    assert values["data_source"] == "sums"


def test_verls_rows_stay_as_they_are(tmp_path):
    info = {"deep": {"null": None, "list": [None, {"a": None}], "é": 1.0}}
    row = {"data_source": "x", "prompt": [ASKED], "reward_model": {"style": "rule", "ground_truth": "2"}, "n": None}
    row |= {"extra_info": info, "tools": [SCHEMA]}

    assert one(read_prompt_rows, tmp_path, row) == row


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "1+1", "completion": "2"}, None),
        ({"prompt": [ASKED], "completion": [SAID]}, None),
        ({"question": "1+1", "answer": "2"}, {"prompt": "question", "completion": "answer"}),
        ({"conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]}, None),
        ({"conversations": [ASKED, SAID]}, None),
        ({"chat": [ASKED, SAID]}, {"messages": "chat"}),
        ({"messages": json.dumps([ASKED, SAID])}, None),
    ],
)
def test_chats_come_in_several_layouts(tmp_path, row, columns):
    assert one(read_chat_rows, tmp_path, row, columns)["messages"] == [ASKED, SAID]


def test_only_the_completion_is_trained(tmp_path):
    row = {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}

    assert one(read_chat_rows, tmp_path, row)["messages"] == [ASKED, {**SAID, "loss_mask": 0}, ASKED, SAID]


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"messages": [SYSTEM, ASKED, SAID]},
        {"prompt": ASKED["content"], "completion": SAID["content"]},
        {"conversations": [{"from": "human", "value": ASKED["content"]}, {"from": "gpt", "value": SAID["content"]}]},
    ],
)
def test_a_column_of_the_system_begins_the_conversation(tmp_path, name, row):
    messages = one(read_chat_rows, tmp_path, {name: "s", **row})["messages"]
    assert [(each["role"], each["content"]) for each in messages] == [
        (each["role"], each["content"]) for each in (SYSTEM, ASKED, SAID)
    ]


def test_a_column_of_the_system_begins_prompts_and_preferences(tmp_path):
    assert one(read_prompt_rows, tmp_path, {"system": "s", "prompt": "a", "ground_truth": "b"})["prompt"] == [
        SYSTEM,
        {"role": "user", "content": "a"},
    ]
    row = {"system": "s", "prompt": [ASKED], "chosen": [SAID], "rejected": [{**SAID, "content": "no"}]}
    (preference,) = read_preferences(write(tmp_path / "a.jsonl", row), None)[1]
    assert [response.row.values["messages"][0] for response in preference.responses] == [SYSTEM, SYSTEM]


def test_variables_of_the_template_are_taken_from_the_row(tmp_path):
    """SmolTalk 2 has them as TRL reads them."""
    tokenizer = tokenizer_for("qwen3")
    row = {"prompt": "a", "ground_truth": "b", "chat_template_kwargs": {"enable_thinking": False, "xml_tools": []}}
    data = PromptDataModule("a", prompts_per_step=1, val_batch_size=1, max_prompt_length=99)

    (ids,) = data.read(write(tmp_path / "a.jsonl", row), tokenizer).prompt_ids

    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    unread = {**row, "chat_template_kwargs": '{"custom_instructions": "Be nice."}'}
    with pytest.raises(ValueError, match="does not read `custom_instructions` of `chat_template_kwargs` in row 1"):
        data.read(write(tmp_path / "b.jsonl", unread), tokenizer)


def test_what_an_answer_of_openais_has_beside_its_text_says_nothing(tmp_path):
    """`annotations: []` and nulls, as `model_dump()` writes them."""
    said = {**SAID, "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    data = ChatDataModule("a", batch_size=1, max_length=1024)
    plain, whole = (
        data.read(write(tmp_path / "a.jsonl", {"messages": [ASKED, message]}), tokenizer_for("qwen3")).chats
        for message in (SAID, said)
    )
    assert plain == whole


def test_calls_and_results_of_share_gpt(tmp_path):
    turns = [
        ("human", "a"),
        ("function_call", '{"name": "f", "arguments": {"a": null}}'),
        ("observation", "b"),
        ("gpt", "c"),
    ]
    row = {"system": "s", "conversations": [{"from": said, "value": value} for said, value in turns]}

    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    assert one(read_chat_rows, tmp_path, row)["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("read", "row", "complaint"),
    [
        (read_prompt_rows, {"problem": "a", "solution": "b"}, "{prompt: problem, ground_truth: solution}`"),
        (read_prompt_rows, {"prompt": "a", "answer": "b"}, "`reward_model` is .* `data.columns: {ground_truth: ans"),
        (read_prompt_rows, {"x": 1}, r'`prompt` is missing in row 1 .* has `x`. Such a row would do: {"prompt": \[{'),
        (read_chat_rows, {"question": "a", "answer": "b"}, "`data.columns: {prompt: question, completion: answer}`"),
        (read_chat_rows, {"x": 1}, r'`messages` is missing in row 1 .* Such a row would do: {"messages": \[{"role"'),
        (read_chat_rows, {"conversations": [{"from": "me", "value": "a"}]}, "Expected turns with `from` .*human.* got"),
        (read_chat_rows, {"conversations": "a"}, "Expected `conversations` to be a list"),
        (read_chat_rows, {"conversations": ["a", "b"]}, "Expected turns with `from` .* got a. This would do"),
        (read_chat_rows, {"dialog": [ASKED, SAID]}, "Set `data.columns: {messages: dialog}`"),
        (read_chat_rows, {"dialog": [{"from": "human", "value": "a"}]}, "`data.columns: {conversations: dialog}`"),
        (read_chat_rows, {"prompt": [ASKED], "response": "a"}, "Set `data.columns: {completion: response}`"),
        (read_chat_rows, {"instruction": "a", "input": "b", "output": "c"}, "`input` would not be read: join it"),
        (read_chat_rows, {"prompt": "a", "chosen": "b", "rejected": "c"}, "which `PreferenceDataModule` reads"),
        (read_prompt_rows, {"messages": [ASKED], "ground_truth": "4"}, "Set `data.columns: {prompt: messages}`"),
        (read_chat_rows, {"system": "s", "messages": [{**SYSTEM, "content": "t"}, SAID]}, "`system` and the first"),
        (read_preferences, {"system": "s", "prompt": "a", "chosen": "b", "rejected": "c"}, "Give `prompt` as messages"),
    ],
)  # fmt: skip
def test_a_refusal_shows_what_would_do(tmp_path, read, row, complaint):
    with pytest.raises(ValueError, match=complaint):
        one(read, tmp_path, row)


def test_refuses_names_of_columns_that_mean_nothing(tmp_path):
    with pytest.raises(ValueError, match="`data.columns` has `promt`, which is no column that is read. Those"):
        PromptDataModule("a", prompts_per_step=1, val_batch_size=1, max_prompt_length=9, columns={"promt": "a"})
    with pytest.raises(ValueError, match="takes `prompt` from the column `b`, which is missing in row 1 .* has `a`"):
        one(read_prompt_rows, tmp_path, {"a": "1"}, {"prompt": "b"})


def test_csv_trains_and_is_sampled_for(tmp_path):
    (tmp_path / "sums.csv").write_text("question,answer\n1+1,2\n2+2,4\n")
    file, tokenizer = str(tmp_path / "sums.csv"), tiny_tokenizer()
    chats = ChatDataModule(file, batch_size=2, max_length=64, columns={"prompt": "question", "completion": "answer"})
    columns = {"prompt": "question", "ground_truth": "answer"}
    prompts = PromptDataModule(file, prompts_per_step=2, val_batch_size=2, max_prompt_length=64, columns=columns)

    assert tokenizer.decode(chats.read(file, tokenizer).chats[1].ids) == "<|user|>2+2<|end|><|assistant|>4<|end|>"
    assert tokenizer.decode(prompts.read(file, tokenizer).prompt_ids[1]) == "<|user|>2+2<|end|><|assistant|>"


def test_schemas_of_tools_reach_the_template_as_they_are(tmp_path):
    tokenizer = tokenizer_for("qwen2_5")
    row = {"messages": [ASKED, SAID], "tools": [SCHEMA]}
    data = ChatDataModule("a", batch_size=1, max_length=1024)

    (chat,) = data.read(write(tmp_path / "a.jsonl", row), tokenizer).chats

    assert json.dumps(SCHEMA) in tokenizer.decode(chat.ids)
