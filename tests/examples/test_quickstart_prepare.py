from __future__ import annotations

import json

import torch

from tests.tiny import quickstart, tiny_model, tiny_tokenizer


def test_tokenizer_has_one_token_a_character_and_a_mark():
    tokenizer = tiny_tokenizer()

    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sort 10"}], add_generation_prompt=True, return_dict=False
    )

    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", *"sort 10", "<|end|>", "<|assistant|>"]
    assert tokenizer.decode(ids) == "<|user|>sort 10<|end|><|assistant|>"


def test_model_has_the_size_of_the_quick_start_and_leaves_the_global_random_state():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)

    model = quickstart.build_model(tiny_tokenizer())

    assert 340_000 < model.num_parameters() < 342_000
    assert torch.equal(torch.rand(1), expected)


def test_model_depends_on_the_seed_only():
    first, again, other = (tiny_model(seed=seed).model.embed_tokens.weight for seed in (3, 3, 4))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_data_holds_out_a_tenth_and_answers_with_sorted_digits(tmp_path):
    quickstart.write_data(tmp_path)
    texts = [(tmp_path / name).read_text() for name in ("train.jsonl", "test.jsonl", "sft.jsonl")]
    train, test, sft = ([json.loads(line) for line in text.splitlines()] for text in texts)

    questions = [{row["prompt"][0]["content"] for row in rows} for rows in (train, test)]
    assert len(questions[0]) + len(questions[1]) == 10_000
    assert not questions[0] & questions[1]
    assert 900 < len(questions[1]) < 1100
    assert {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in train}["sort 7301"] == "0137"
    assert sft[0]["messages"][0] == train[0]["prompt"][0]
