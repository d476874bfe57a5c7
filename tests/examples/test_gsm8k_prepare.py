from __future__ import annotations

import json

import pytest

from tests.tiny import ROOT, load_script

gsm8k = load_script(ROOT / "examples" / "gsm8k" / "prepare.py")

QUESTION = "Tom has 1,000 eggs and buys 200. How many has he?"
ANSWER = "He has 1000 + 200 = <<1000+200=1200>>1,200 eggs.\n#### 1,200"


def write(path, row):
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("answer", "number"),
    [("a\n#### 72", "72"), ("#### -3", "-3"), ("#### 1,200.", "1200"), ("####5.25", "5.25"), ("1 #### 2", "2")],
)
def test_the_final_number_stands_after_the_mark(answer, number):
    assert gsm8k.final_number(answer) == number


def test_refuses_an_answer_without_final_number():
    with pytest.raises(ValueError, match="Expected a number after `####` in the answer '72'"):
        gsm8k.final_number("72")


def test_the_original_and_verls_schema_give_the_same_rows(tmp_path):
    original = write(tmp_path / "a.jsonl", {"question": QUESTION, "answer": ANSWER})
    (row,) = gsm8k.local_rows(original, split="train")
    verl = write(tmp_path / "b.jsonl", row)

    assert gsm8k.local_rows(verl, split="train") == [row]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert row["prompt"] == [{"role": "user", "content": f"{QUESTION} {gsm8k.INSTRUCTION}"}]


def test_chats_have_the_worked_answer_without_calculator_marks():
    chat = gsm8k.chat_row(gsm8k.prompt_row(QUESTION, ANSWER, split="train", index=0))

    assert chat["messages"][1] == {"role": "assistant", "content": "He has 1000 + 200 = 1,200 eggs.\n#### 1,200"}


def test_names_a_row_without_question(tmp_path):
    with pytest.raises(ValueError, match=r"Expected `question` and `answer`.* in row 1 of `.*a.jsonl`, which has text"):
        gsm8k.local_rows(write(tmp_path / "a.jsonl", {"text": "a"}), split="train")
