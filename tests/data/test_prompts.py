from __future__ import annotations

import json
import logging

import pyarrow
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the back end `fake`
from lightning.fabric.utilities.exceptions import MisconfigurationException
from pyarrow import parquet

from tests.data.recorder import Recorder, make_trainer
from tests.tiny import quickstart, tiny_tokenizer
from verl_lightning.data import PromptDataModule
from verl_lightning.data.module import data_parallel_rank_and_size
from verl_lightning.strategies.ddp import DDPStrategy


def make_row(content, **columns):
    return {**quickstart.prompt_row(content, split="train", index=0), **columns}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_data(files, *, val_files=(), **options):
    sizes = {"prompts_per_step": 2, "val_batch_size": 2, "max_prompt_length": 64}
    return PromptDataModule(files, val_files, **{**sizes, **options})


def fit_once(data, **options):
    module = Recorder()
    make_trainer(max_steps=1, **options).fit(module, datamodule=data)
    return module


def test_a_batch_is_padded_on_the_left_and_keeps_its_rows(tmp_path):
    rows = [make_row("sort 7301", extra=[1, None]), make_row("1")]
    tokenizer = tiny_tokenizer()

    batch = fit_once(make_data(write_jsonl(tmp_path / "a.jsonl", rows), shuffle=False)).train_batches[0]

    assert tokenizer.batch_decode(batch.prompt_ids) == [
        "<|user|>sort 7301<|end|><|assistant|>",
        "<|pad|>" * 8 + "<|user|>1<|end|><|assistant|>",
    ]
    assert torch.equal(batch.prompt_mask, torch.tensor([[True] * 12, [False] * 8 + [True] * 4]))
    assert batch.row_index.tolist() == [0, 1]
    assert batch.is_duplicate.tolist() == [False, False]
    assert batch.rows == rows


def test_the_mask_does_not_depend_on_token_values(tmp_path):
    data = make_data(write_jsonl(tmp_path / "a.jsonl", [make_row("1"), make_row("12")]), shuffle=False)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token

    batch = data.read(data.train_files, tokenizer).batch([0, 1], [False, False])

    assert batch.prompt_mask.sum(1).tolist() == [4, 5]
    assert (batch.prompt_ids == tokenizer.eos_token_id).sum().item() == 3  # an end token each, and one of padding


def test_parquet_rows_are_those_of_jsonl_without_what_arrow_added(tmp_path):
    first = make_row("1")
    second = make_row("2", prompt=[{"role": "user", "content": "2", "name": "x"}])
    parquet.write_table(pyarrow.Table.from_pylist([first, second]), tmp_path / "a.parquet")

    rows = fit_once(make_data(str(tmp_path / "a.parquet"), shuffle=False)).train_batches[0].rows

    assert rows == [first, second]


def test_validation_and_test_see_each_row_once(tmp_path):
    train = write_jsonl(tmp_path / "a.jsonl", [make_row(str(n)) for n in range(3)])
    val = write_jsonl(tmp_path / "b.jsonl", [make_row(str(n)) for n in range(5)])
    data = PromptDataModule(train, val, val, prompts_per_step=2, val_batch_size=2, max_prompt_length=64)

    for run in ("validate", "test"):
        module = Recorder()
        getattr(make_trainer(), run)(module, datamodule=data, verbose=False)
        assert [batch.row_index.tolist() for batch in module.val_batches] == [[0, 1], [2, 3], [4]]


def test_without_validation_files_nothing_is_validated(tmp_path):
    module = fit_once(make_data(write_jsonl(tmp_path / "a.jsonl", [make_row("1"), make_row("2")])))

    assert len(module.train_batches) == 1
    assert module.val_batches == []


def test_files_that_become_one_metric_are_told(tmp_path):
    files = [write_jsonl(tmp_path / name, [make_row("ab", data_source=source)]) for name, source in SOURCES.items()]
    with pytest.warns(UserWarning, match=r"a\.jsonl` and `.*c\.jsonl` have the data source `x`, so .* one metric"):
        make_trainer().validate(Recorder(), make_data((), val_files=files))


SOURCES = {"a.jsonl": "x", "b.jsonl": "y", "c.jsonl": "x"}


def test_a_prompt_over_the_limit_stops_the_run_and_says_what_to_do(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [make_row("1"), make_row("123456")])

    with pytest.raises(
        ValueError,
        match=r"9 tokens in row 2 of `.*a.jsonl`, over `max_prompt_length: 8`, and 1 of 2 .*`overlong` to \"drop\"",
    ):
        fit_once(make_data(file, max_prompt_length=8))


def test_a_prompt_may_be_as_long_as_the_limit(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [make_row("1"), make_row("123456")])

    assert fit_once(make_data(file, max_prompt_length=9)).train_batches[0].prompt_ids.shape == (2, 9)


def test_dropping_leaves_long_prompts_out_and_says_how_many(tmp_path, caplog):
    rows = [make_row("1"), make_row("123456"), make_row("2")]
    data = make_data(write_jsonl(tmp_path / "a.jsonl", rows), max_prompt_length=8, overlong="drop", shuffle=False)

    with caplog.at_level(logging.INFO):
        module = fit_once(data)

    assert "Dropped 1 of 3 rows, which have over 8 tokens." in caplog.text
    assert module.train_rows == [[0, 2]]


def test_truncating_keeps_the_last_tokens_and_says_how_many(tmp_path, caplog):
    rows = [make_row("1"), make_row("123456")]
    data = make_data(write_jsonl(tmp_path / "a.jsonl", rows), max_prompt_length=5, overlong="truncate", shuffle=False)

    with caplog.at_level(logging.INFO):
        batch = fit_once(data).train_batches[0]

    assert "Truncated 1 of 2 rows" in caplog.text
    assert tiny_tokenizer().decode(batch.prompt_ids[1]) == "456<|end|><|assistant|>"


def test_refuses_to_drop_everything(tmp_path):
    with pytest.raises(ValueError, match="All 1 rows have over `max_prompt_length: 3` tokens; none is left"):
        fit_once(make_data(write_jsonl(tmp_path / "a.jsonl", [make_row("1")]), max_prompt_length=3, overlong="drop"))


def test_refuses_a_row_without_ground_truth(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [make_row("1", reward_model={"style": "rule"})])

    with pytest.raises(ValueError, match=r"Expected `reward_model` to be an object with `ground_truth` in row 1 of"):
        fit_once(make_data(file))


@pytest.mark.parametrize(("column", "value"), [("extra_info", "a text"), ("data_source", ["a", "b"])])
def test_refuses_a_column_of_another_kind_before_anything_is_sampled(tmp_path, column, value):
    file = write_jsonl(tmp_path / "a.jsonl", [make_row("1", **{column: value})])

    with pytest.raises(ValueError, match=rf"Expected `{column}` to be .* in row 1 of"):
        fit_once(make_data(file))


def test_refuses_a_prompt_that_the_template_does_not_write(tmp_path):
    thought = {"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    prompt = [{"role": "user", "content": "1"}, thought, {"role": "user", "content": "2"}]
    file = write_jsonl(tmp_path / "a.jsonl", [make_row("1", prompt=prompt)])

    with pytest.raises(ValueError, match=r'leaves out `"f"`, the name of tool call 1 in message 2 of 3 in row 1 of'):
        fit_once(make_data(file))


def test_a_switch_of_a_message_means_nothing_in_a_prompt(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [make_row("1", prompt=[{"role": "user", "content": "1", "loss_mask": 0}])])

    with pytest.raises(ValueError, match=r"`loss_mask` of message 1 of `prompt` in row 1 of .* means nothing"):
        fit_once(make_data(file))


def test_refuses_a_batch_that_the_ranks_cannot_share():
    data = make_data("a.jsonl", prompts_per_step=6, val_batch_size=4)

    assert data.train_batch_size(2) == 3
    with pytest.raises(
        ValueError, match=r"`prompts_per_step: 6` is over all ranks .* 4 of them. Make it a multiple of 4"
    ):
        data.train_batch_size(4)
    with pytest.raises(ValueError, match="`val_batch_size: 4` is over all ranks"):
        data.eval_batch_size(3)


@pytest.mark.parametrize("name", ["prompts_per_step", "val_batch_size", "max_prompt_length"])
def test_refuses_sizes_below_one(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        make_data("a.jsonl", **{name: 0})


def test_refuses_a_token_that_the_model_has_no_embedding_of(tmp_path):
    module, file = Recorder(), write_jsonl(tmp_path / "a.jsonl", [make_row("1"), make_row("1<new>")])
    module.num_embeddings = len(module.tokenizer)
    module.tokenizer.add_tokens(["<new>"])

    with pytest.raises(ValueError, match=r"The token '<new>' in row 2 of .* the model has embeddings of \d+ tokens"):
        make_trainer(max_steps=1).fit(module, datamodule=make_data(file))


def test_refuses_a_module_without_tokenizer(prompt_file):
    module = Recorder()
    module.tokenizer = None

    with pytest.raises(MisconfigurationException, match="`Recorder` has no attribute `tokenizer`"):
        make_trainer(max_steps=1).fit(module, datamodule=make_data(str(prompt_file)))


def test_setup_needs_a_trainer():
    with pytest.raises(RuntimeError, match=r"`PromptDataModule.setup` needs the `Trainer`"):
        make_data("a.jsonl").setup("fit")


def test_ranks_come_from_the_strategy():
    assert data_parallel_rank_and_size(make_trainer()) == (0, 1)
    dist.init_process_group("fake", rank=1, world_size=2, store=dist.HashStore())
    try:
        assert data_parallel_rank_and_size(make_trainer(strategy=DDPStrategy(), devices=2)) == (1, 2)
    finally:
        dist.destroy_process_group()
