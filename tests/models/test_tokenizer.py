from __future__ import annotations

import pytest

from tests.tiny import tiny_tokenizer
from verl_lightning.models.tokenizer import load_tokenizer


def save_changed(folder, **changes):
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return folder


def test_pads_on_the_left_whatever_the_folder_says(tmp_path):
    tokenizer = load_tokenizer(save_changed(tmp_path, padding_side="right"))

    ids = tokenizer(["7", "731"], padding=True)["input_ids"]

    assert ids[0] == [tokenizer.pad_token_id] * 2 + tokenizer.convert_tokens_to_ids(["7"])


def test_pads_with_the_end_token_where_there_is_no_pad_token(tmp_path):
    tokenizer = load_tokenizer(save_changed(tmp_path, pad_token=None))

    assert tokenizer.pad_token == tokenizer.eos_token == "<|end|>"


def test_pad_token_may_be_the_end_token(tmp_path):
    tokenizer = load_tokenizer(save_changed(tmp_path, pad_token="<|end|>"))

    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_refuses_a_tokenizer_without_chat_template(tmp_path):
    with pytest.raises(ValueError, match=r"has no chat template.*`chat_template.jinja`"):
        load_tokenizer(save_changed(tmp_path, chat_template=None))


def test_refuses_a_tokenizer_that_can_neither_pad_nor_end(tmp_path):
    with pytest.raises(ValueError, match="neither a pad token nor an end-of-sequence token"):
        load_tokenizer(save_changed(tmp_path, pad_token=None, eos_token=None))


def test_names_a_path_that_does_not_exist(tmp_path):
    missing = tmp_path / "nowhere" / "model"

    with pytest.raises(ValueError, match=rf"`path: {missing}` \(there is no such folder, looked from"):
        load_tokenizer(missing)


def test_names_a_folder_without_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="is a folder without a tokenizer"):
        load_tokenizer(tmp_path)
