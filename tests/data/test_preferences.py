"""Preference rows of every layout become the same tokens, or are refused with a reason."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.runs import make_dpo, make_pairs, make_trainer
from tests.tiny import tiny_tokenizer
from verl_lightning.algorithms.preferences.kto import KTO
from verl_lightning.data.preferences import others_of
from verl_lightning.types import PreferenceBatch

USER = {"role": "user", "content": "sort 31"}
GOOD, BAD = {"role": "assistant", "content": "13"}, {"role": "assistant", "content": "31"}
PROMPT = "<|user|>sort 31<|end|><|assistant|>"


class Pairs(LightningModule):
    """Stands for a module that learns from pairs, or from single responses."""

    def __init__(self, takes_pairs=True):
        super().__init__()
        self.tokenizer, self.takes_pairs = tiny_tokenizer(), takes_pairs


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, *rows, takes_pairs=True, **options):
    data = make_pairs(write(path / "rows.jsonl", *rows), **options)
    trainer = make_trainer(path)
    trainer.strategy.connect(Pairs(takes_pairs))
    data.trainer = trainer
    data.setup("fit")
    return data.sources["train"]


def texts(dataset):
    """Each sequence as the text of its prompt and of what is learnt."""
    tokenizer = tiny_tokenizer()
    parts = []
    for example in dataset.examples:
        for chat in example.sequences:
            said = [token for token, is_said in zip(chat.ids, chat.is_supervised, strict=True) if is_said]
            parts.append((tokenizer.decode(chat.ids[: len(chat.ids) - len(said)]), tokenizer.decode(said)))
    return parts


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},  # TRL's, and that of our data
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},  # implicit prompt
        {"prompt": "sort 31", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # prompt repeated
        {"prompt": [USER], "chosen": "13", "rejected": "31"},
        {"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
    ],
)
def test_conversational_rows_of_any_layout_are_the_same_pair(tmp_path, row):
    chosen, rejected = texts(read(tmp_path, *[row] * 4))[:2]
    assert chosen == (PROMPT, "13<|end|>")
    assert rejected == (PROMPT, "31<|end|>")


@pytest.mark.parametrize(
    ("row", "prompt", "chosen"),
    [
        ({"prompt": "1 2", "chosen": " 3", "rejected": " 4"}, "1 2", " 3"),
        ({"chosen": "1 2 3", "rejected": "1 2 4"}, "1 2", " 3"),  # the space is the response's, as in TRL
        ({"prompt": "1 2", "chosen": " 3<|end|>", "rejected": " 4"}, "1 2", " 3"),  # one end token is enough
    ],
)
def test_plain_texts_are_taken_as_they_are(tmp_path, row, prompt, chosen):
    assert texts(read(tmp_path, *[row] * 4))[0] == (prompt, f"{chosen}<|end|>")


def test_assistant_turns_of_the_prompt_are_not_learnt(tmp_path):
    """Those after it are, each for itself: the user between them is not."""
    turns = [USER, GOOD, USER]
    row = {"prompt": turns, "chosen": [GOOD, USER, GOOD], "rejected": [BAD]}
    (chosen, _) = read(tmp_path, *[row] * 4).examples[0].sequences
    said = [token for token, is_said in zip(chosen.ids, chosen.is_supervised, strict=True) if is_said]
    assert tiny_tokenizer().decode(said) == "13<|end|>13<|end|>"


def test_columns_may_have_other_names(tmp_path):
    row = {"question": "sort 31", "better": [GOOD], "worse": [BAD]}
    columns = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    assert texts(read(tmp_path, *[row] * 4, columns=columns))[0] == (PROMPT, "13<|end|>")


def test_single_responses_come_with_another_prompts_response(tmp_path):
    """The second sequence of an example is its prompt with the response before it in the batch."""
    rows = [
        {"prompt": f"sort {digit}1", "completion": [{"role": "assistant", "content": digit}], "label": digit < "4"}
        for digit in "23456"
    ]
    dataset = read(tmp_path, *rows, takes_pairs=False, batch_size=2)
    own, others = texts(dataset)[0::2], texts(dataset)[1::2]
    assert [said for _, said in own] == [f"{digit}<|end|>" for digit in "23456"]
    assert [said for _, said in others] == [f"{digit}<|end|>" for digit in "32545"]
    assert [prompt for prompt, _ in others] == [prompt for prompt, _ in own]
    assert [example.is_desirable for example in dataset.examples] == [True, True, False, False, False]


def test_others_are_never_the_same_row():
    for count in range(2, 8):
        for size in range(1, 9):
            others = others_of(count, size)
            assert all(other != row for row, other in enumerate(others)), (count, size)


def test_pairs_count_as_two_single_responses(tmp_path):
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    dataset = read(tmp_path, *[row] * 4, takes_pairs=False)
    assert [example.is_desirable for example in dataset.examples] == [True] * 4 + [False] * 4


def test_a_batch_has_two_rows_an_example(tmp_path):
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "margin": 0.5}
    dataset = read(tmp_path, *[row] * 4)
    dataset.ref_log_probs = torch.arange(8.0).view(4, 2)
    batch = PreferenceBatch(**dataset.batch([2, 0], [False, True]))
    assert batch.ref_log_probs.tolist() == [4.0, 5.0, 0.0, 1.0]
    assert batch.margins.tolist() == [0.5] * 4
    assert batch.response_mask.any(-1).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": "b"}, r"Expected `chosen` and `rejected`, or .* has `prompt`, `answer`. Such a row"),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, r"nothing to learn from in row 1 .*the same one twice"),
        ({"prompt": "1", "chosen": "", "rejected": "2"}, r"nothing to learn from in row 1 .*without a token"),
        ({"prompt": "1", "chosen": "2", "rejected": "3", "margin": "x"}, r"Expected a number for `margin` in row 1"),
        ({"prompt": "1", "chosen": 2, "rejected": "3"}, r"Expected `chosen` to be a text or a list of messages"),
        ({"prompt": "1", "completion": "2", "label": True}, r"`label` in row 1 .*choose a loss of single responses"),
        ({"prompt": "1", "completion": "2", "label": "good"}, r"Expected true, false or null for `label` in row 1"),
        ({"prompt": "1", "chosen": "2", "rejected": "3" * 80}, r"There are 82 tokens in row 1 .*over `max_length: 64`"),
    ],
)
def test_rows_that_say_no_preference_are_refused(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, *[row] * 4)


def test_rows_that_teach_nothing_may_be_dropped(tmp_path, caplog):
    same, good = ({"prompt": "1", "chosen": "2", "rejected": other} for other in "23")
    assert len(read(tmp_path, *[same] * 2, *[good] * 4, unsupervised="drop")) == 4
    assert "Dropped 2 of 6 rows" in caplog.text


def test_long_responses_may_be_cut(tmp_path):
    row = {"prompt": "12", "chosen": "3" * 9, "rejected": "4" * 2}
    chosen, rejected = texts(read(tmp_path, *[row] * 4, max_length=6, overlong="truncate"))[:2]
    assert (chosen, rejected) == (("12", "3333"), ("12", "44<|end|>"))


def test_data_of_another_kind_is_refused(tmp_path, tiny_folder, chat_file):
    from tests.runs import make_chats

    with pytest.raises(Exception, match="learns from preferences, but `data` is a `ChatDataModule`"):
        make_trainer(tmp_path).fit(make_dpo(tiny_folder, loss=KTO()), datamodule=make_chats(chat_file))
