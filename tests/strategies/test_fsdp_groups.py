"""Which ranks `fsdp` lets share what, and the models and sizes that it refuses to share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.models.packed_models import make_backbone
from tests.processes import on_ranks
from tests.runs import make_model_config, make_sft, make_trainer
from verl_lightning.models.attention import VARLEN
from verl_lightning.models.build import decide_packing
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.strategies import FSDPStrategy
from verl_lightning.strategies.fsdp.groups import check_shares, packed_attention


def groups(folder: Path, path: Path) -> dict[str, Any]:
    """Of four ranks: two copies of the model, in each of which two ranks share their sequences."""
    strategy = FSDPStrategy(replicate_size=2, sequence_parallel_size=2)
    module = make_sft(folder)
    module.trainer = make_trainer(path, devices=4, strategy=strategy)
    strategy.connect(module)
    strategy.setup_environment()
    return {
        "data": strategy.distributed_sampler_kwargs,
        "sequence": dist.get_process_group_ranks(strategy.model_parallel_group),
        "same work": strategy.gather_over_data_parallel(dist.get_rank()),
        "shard": dist.get_process_group_ranks(strategy.shard_mesh.get_group("shard")),
    }


def test_neighbours_share_sequences_within_a_copy(tiny_folder, tmp_path):
    found = on_ranks(4, groups, tiny_folder, tmp_path)

    assert [each["data"] for each in found] == [{"num_replicas": 2, "rank": rank} for rank in (0, 0, 1, 1)]
    assert [each["sequence"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["same work"] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each["shard"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicate_size": 3}, r"`fsdp.replicate_size` \(3\) must divide the number of processes \(8\)"),
        ({"sequence_parallel_size": 3}, r"`fsdp.sequence_parallel_size` \(3\) must divide .*\(8: `trainer.devices`"),
        ({"replicate_size": 4, "sequence_parallel_size": 4}, r"of a copy of the model \(2:"),
    ],
)
def test_sizes_that_do_not_divide_the_processes_are_refused(options, message):
    with pytest.raises(MisconfigurationException, match=message):
        FSDPStrategy(**options).check_world(8)


def test_sharing_takes_the_attention_that_can(tiny_folder):
    config = make_model_config(tiny_folder)
    assert packed_attention(config) == dataclasses.replace(config, attn_implementation=VARLEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_implementation": "sdpa"}, "the model's is sdpa. Set it to `auto` or `varlen`"),
        ({"packing": "never"}, "the model has `packing: never`. Set it to `auto` or `always`"),
    ],
)
def test_options_that_rule_sharing_out_are_refused(changes, message, tiny_folder):
    with pytest.raises(MisconfigurationException, match=message):
        packed_attention(make_model_config(tiny_folder, **changes))


@pytest.mark.parametrize(
    ("model_type", "size", "message"),
    [
        ("qwen3", 3, r"\(3\) must divide the attention heads of `Qwen3ForCausalLM` \(4\), and .* key heads \(2\)"),
        ("gemma2", 2, "`Gemma2ForCausalLM` is not packed: the `varlen` kernel cannot cap attention logits"),
        ("gemma", 2, "`GemmaForCausalLM` is not packed: it was not tested; set `packing: always` to try it"),
    ],
)
def test_models_whose_sequences_cannot_be_shared_are_refused(model_type, size, message):
    backbone = make_backbone(model_type, VARLEN)
    model = TokenScorer(backbone, None, "policy", packs=decide_packing(backbone, "auto"))
    with pytest.raises(MisconfigurationException, match=message):
        check_shares(model, size)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 2), (4, 2, 4), (4, 1, 4), (8, 4, 2)])
def test_key_heads_may_be_fewer_than_ranks(heads, key_heads, size):
    backbone = make_backbone("llama", VARLEN, num_attention_heads=heads, num_key_value_heads=key_heads)
    check_shares(TokenScorer(backbone, None, "policy", packs=True), size)
