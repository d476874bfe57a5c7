"""Tables of what the policy says at each validation."""

from __future__ import annotations

import json

import pytest

from tests.callbacks.conftest import EACH_STEP
from verl_lightning.callbacks import SamplesTable


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_validation_writes_a_table_of_the_same_prompts(fit, tmp_path, prompt_file):
    """More rows than a validation batch of 4, fewer than there are."""
    fit(SamplesTable(num_rows=6), max_steps=2, **EACH_STEP)

    tables = [read(tmp_path / f"samples/step={step}.jsonl") for step in (1, 2)]
    questions = [row["prompt"][-1]["content"] for row in read(prompt_file)[:6]]
    for step, table in zip((1, 2), tables, strict=True):
        assert [row["step"] for row in table] == [step] * 6
        assert [row["prompt"].splitlines()[-1] for row in table] == questions
        assert {row["data_source"] for row in table} == {"sort4"}


def test_a_row_holds_the_response_and_its_reward(fit, tmp_path):
    fit(SamplesTable(num_rows=64), max_steps=1, **EACH_STEP)

    for row in read(tmp_path / "samples/step=1.jsonl"):
        characters = [ord(character) % 2 == 0 for character in row["response"]]
        assert row["reward"] == pytest.approx(sum(characters) / max(1, len(characters)))


def test_long_texts_are_cut_and_say_so(fit, tmp_path):
    fit(SamplesTable(num_rows=1, max_characters=3, folder=str(tmp_path / "mine")), max_steps=1, **EACH_STEP)

    (row,) = read(tmp_path / "mine/step=1.jsonl")
    assert row["prompt"][3:].startswith("... (")
    assert row["prompt"].endswith(" more characters)")


def test_the_sanity_check_writes_no_table(fit, tmp_path):
    fit(SamplesTable(), max_steps=1, num_sanity_val_steps=1)

    assert not (tmp_path / "samples").exists()


def test_a_table_without_rows_is_refused():
    with pytest.raises(ValueError, match="`num_rows` must be at least 1, got 0"):
        SamplesTable(num_rows=0)
