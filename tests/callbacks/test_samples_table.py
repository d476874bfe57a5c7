"""Tables of what the policy says at each validation."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.callbacks.conftest import EACH_STEP
from tests.runs import make_chats, make_prompts, make_reward, make_rollout, make_sft, make_trainer
from verl_lightning.callbacks import SamplesTable, samples_page
from verl_lightning.callbacks.json_files import write_whole
from verl_lightning.callbacks.sample_rows import RowLimits, turns_of
from verl_lightning.callbacks.samples_page import read_table, write_page
from verl_lightning.episodes import Episode


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


def test_a_row_holds_the_response_and_what_it_is_judged_by(fit, tmp_path, prompt_file):
    reward = make_reward("parts_of_even_share")
    tokenizer = fit(SamplesTable(num_rows=64), max_steps=1, reward=reward, **EACH_STEP).module.tokenizer

    truths = [row["reward_model"]["ground_truth"] for row in read(prompt_file)]
    rows = read(tmp_path / "samples/step=1.jsonl")
    assert [row["ground_truth"] for row in rows] == truths[: len(rows)]
    for row in rows:
        characters = [ord(character) % 2 == 0 for character in row["response"]]
        assert row["reward"] == pytest.approx(sum(characters) / max(1, len(characters)))
        assert row["reward_parts"] == {"length": len(row["response"])}
        assert row["is_truncated"] == (tokenizer.eos_token_id not in row["token_ids"])
        assert tokenizer.batch_decode([[token] for token in row["token_ids"]]) == row["tokens"]
        assert 1 <= len(row["log_probs"]) == len(row["tokens"]) <= 6
        assert all(log_prob <= 0 for log_prob in row["log_probs"])


def test_an_episode_is_told_turn_by_turn():
    """With an example among its first messages, which the policy has not said."""
    said = [("user", "an example"), ("assistant", "shown"), ("user", "2 + 2?"), ("assistant", "add"), ("tool", "4")]
    messages = [{"role": role, "content": text} for role, text in [*said, ("assistant", "four")]]
    messages[4]["name"] = "calculator"
    messages[3]["tool_calls"] = [{"function": {"name": "calculator"}}]
    episode = Episode(
        environment="sums", messages=messages, turn_ends=[3, 9], rewards=[0.0, 1.0], metrics={}, seconds=[0.1, 0.2, 0.3]
    )

    turns = turns_of(episode, RowLimits(max_characters=100, max_tokens=0))

    assert [turn["is_trained"] for turn in turns] == [False, False, False, True, False, True]
    assert [turn.get("reward") for turn in turns] == [None, None, None, 0.0, None, 1.0]
    assert [(turn["tool"], turn["seconds"]) for turn in turns if "seconds" in turn] == [("calculator", 0.2)]
    assert turns[3]["text"] == 'add\n[{"function": {"name": "calculator"}}]'


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


def test_training_tables_hold_advantages(fit, tmp_path, prompt_file):
    """Every second step; four samples to each prompt in the file's order."""
    run = fit(SamplesTable(num_rows=5, train_every_n_steps=2), max_steps=4)

    assert {path.name for path in (tmp_path / "samples").glob("train*")} == {"train_step=2.jsonl", "train_step=4.jsonl"}
    rows = read(tmp_path / "samples/train_step=2.jsonl")
    question = read(prompt_file)[4]["prompt"][-1]["content"]
    assert [row["prompt"].splitlines()[-1] for row in rows[:4]] == [question] * 4
    assert {row["data_source"] for row in rows} == {"sort4"}
    assert len({row["advantage"] for row in rows}) > 1
    assert run.trainer.global_step == 4


def test_a_training_row_tells_the_mean_advantage_of_its_tokens(fit, tmp_path):
    class Keeps(Callback):
        def on_experience(self, module, scored, experience, rows):
            row, mask = experience.advantages[0].tolist(), experience.response_mask[0].tolist()
            kept = [value for value, counts in zip(row, mask, strict=True) if counts]
            self.mean = sum(kept) / len(kept)

    keeps = Keeps()
    fit(SamplesTable(train_every_n_steps=1), keeps, max_steps=1)

    assert read(tmp_path / "samples/train_step=1.jsonl")[0]["advantage"] == pytest.approx(keeps.mean)


def test_the_page_holds_the_newest_tables(fit, tmp_path, monkeypatch):
    monkeypatch.setattr(samples_page, "TABLES_WITH_TOKENS", 2)
    fit(SamplesTable(num_rows=2, train_every_n_steps=1, max_tables=3, max_tokens=2), max_steps=2, **EACH_STEP)

    page = (tmp_path / "samples/index.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [table["name"] for table in data] == ["step 1, validation", "step 2, training", "step 2, validation"]
    assert [len(table["rows"]) for table in data] == [2, 2, 2]
    assert [len(table["rows"][0].get("tokens", "none")) for table in data] == [4, 2, 2]


def test_a_response_cannot_leave_its_script(tmp_path):
    row = {"step": 1, "data_source": "x", "prompt": "p", "response": "</script><b>\u2028", "reward": 1.0}
    (tmp_path / "step=1.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")

    page = write_page(tmp_path, max_tables=1).read_text(encoding="utf-8")

    assert page.count("</script>") == 2
    assert "<b>" not in page


def test_numbers_that_json_lacks_do_not_blank_the_page(tmp_path):
    """As tables of older versions hold them."""
    row = {"step": 1, "prompt": "p", "response": "r", "reward": math.nan, "advantage": -math.inf}
    (tmp_path / "step=1.jsonl").write_text(json.dumps(row) + "\n")

    page = write_page(tmp_path, max_tables=1).read_text()

    assert '"reward": null, "advantage": null' in page
    assert "NaN" not in page.partition('id="data">')[2].partition("</script>")[0]


def test_responses_without_a_reward_have_none_in_the_table(fit, tmp_path):
    reward = make_reward("none_on_even")
    fit(SamplesTable(num_rows=16, train_every_n_steps=1), max_steps=1, reward=reward, **EACH_STEP)

    for name in ("train_step=1", "step=1"):
        rows = read(tmp_path / f"samples/{name}.jsonl")
        is_even = [bool(row["response"]) and ord(row["response"][0]) % 2 == 0 for row in rows]
        assert [row["reward"] is None for row in rows] == is_even
        assert 0 < sum(is_even) < len(rows)


def test_a_kill_while_writing_leaves_the_table_before(tmp_path, monkeypatch):
    """A torn table would end each later run in the folder."""
    file = tmp_path / "step=1.jsonl"
    write_whole(file, '{"step": 1}\n')
    monkeypatch.setattr(Path, "replace", None)  # it never comes to that

    with pytest.raises(TypeError):
        write_whole(file, '{"step"')

    assert read_table(file) == [{"step": 1}]
    assert list(tmp_path.glob("*step=*.jsonl")) == [file]


def test_modules_without_responses_are_refused(tmp_path, tiny_folder, chat_file):
    trainer = make_trainer(tmp_path, SamplesTable())
    with pytest.raises(MisconfigurationException, match="`SamplesTable` shows responses.* `SFTModule` has none"):
        trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))


@pytest.mark.parametrize("options", [{"train_every_n_steps": -1}, {"max_tables": 0}, {"max_tokens": -1}])
def test_sizes_without_sense_are_refused(options):
    with pytest.raises(ValueError, match="`train_every_n_steps` and `max_tokens` must not be negative"):
        SamplesTable(**options)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_an_evaluation_tells_the_step_of_its_checkpoint(fit, tmp_path, prompt_file):
    """Its trainer counts none."""
    save = ModelCheckpoint(tmp_path, "x", every_n_train_steps=1)
    run = fit(save, max_steps=2, enable_checkpointing=True)

    trainer = make_trainer(tmp_path, make_rollout(), SamplesTable(num_rows=1))
    trainer.validate(run.module, make_prompts(prompt_file, prompt_file), ckpt_path=tmp_path / "x.ckpt")

    assert read(tmp_path / "samples/step=2.jsonl")[0]["step"] == 2
