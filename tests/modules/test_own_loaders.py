"""A module with what a user has: rows in a loader of torch's, a few messages, and no data module."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from tests.runs import Recorder, make_chats, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from verl_lightning.data.own_rows import rows_of

ROWS = [{"prompt": f"sort {number}", "ground_truth": str(number)} for number in range(3120, 3128)]
CHATS = [
    {"messages": [{"role": "user", "content": f"sort {n}"}, {"role": "assistant", "content": str(n)}]}
    for n in range(3120, 3128)
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The total length of"),
]


def test_ppo_learns_from_rows_and_samples_and_answers(tiny_folder, tmp_path):
    """The rows of the loader give the same steps whether torch has turned them into columns or not."""
    runs = []
    for collate in ({"collate_fn": list}, {}):
        module, recorder = make_ppo(tiny_folder), Recorder()
        trainer = make_trainer(tmp_path, make_rollout(), recorder, max_steps=2)
        trainer.fit(module, DataLoader(ROWS, batch_size=4, **collate), DataLoader(ROWS[:3], batch_size=2, **collate))
        runs.append(recorder.column("critic/score/mean"))
    assert runs[0] == runs[1]
    assert len(recorder.validations) == 1

    predicted = trainer.predict(module, DataLoader([{"prompt": "sort 3120"}, {"prompt": "sort 1"}], batch_size=2))

    said = module.generate("sort 3120", max_new_tokens=6)
    (batch,) = predicted
    assert [row["prompt"][0]["content"] for row in batch] == ["sort 3120", "sort 1"]
    assert all(row.keys() == {"prompt", "response", "is_truncated", "row"} for row in batch)
    assert said == module.generate([{"role": "user", "content": "sort 3120"}], max_new_tokens=6)
    assert isinstance(said, str)


def test_predict_samples_the_files_of_a_data_module(tiny_folder, prompt_file, tmp_path):
    trainer = make_trainer(tmp_path, make_rollout())

    batches = trainer.predict(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file, prompt_file))

    assert sum(map(len, batches)) == 64


def test_sft_learns_from_rows(tiny_folder, tmp_path):
    module = make_sft(tiny_folder)
    before = module.generate("sort 3120", max_new_tokens=4, temperature=1.0, seed=3)
    trainer, recorder = make_trainer(tmp_path, recorder := Recorder(), max_steps=4), recorder

    trainer.fit(module, DataLoader(CHATS, batch_size=4, collate_fn=list))

    assert isinstance(before, str)
    assert recorder.column("train/loss")[-1] < recorder.column("train/loss")[0]


def test_other_batches_are_refused_with_what_would_do(tiny_folder, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"yielded a `list`.*collate_fn=list"):
        make_trainer(tmp_path).fit(make_sft(tiny_folder), DataLoader(torch.zeros(4, 2), collate_fn=lambda rows: rows))


def test_a_fit_without_data_says_what_to_give(tiny_folder, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"`PPOModule` has no `data`.*fit\(module, PromptDataM"):
        make_trainer(tmp_path, make_rollout()).fit(make_ppo(tiny_folder))


def test_columns_of_torchs_collation_become_the_rows_they_were():
    rows = [
        {"prompt": [{"role": "user", "content": text}], "number": n, "tags": ["a", text]}
        for n, text in enumerate(["one", "two", "three"])
    ]
    assert rows_of(next(iter(DataLoader(rows, batch_size=3)))) == rows


def test_a_loader_before_setup_is_told_when_it_comes(prompt_file, chat_file):
    for data in (make_prompts(prompt_file), make_chats(chat_file)):
        with pytest.raises(RuntimeError, match=r"`train_dataloader` comes after `setup`|train_dataloader` comes after"):
            data.train_dataloader()
