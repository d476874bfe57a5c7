"""Models that several files of this folder use."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    """A reward model of transformers' with a head of random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("reward") / "model", tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
