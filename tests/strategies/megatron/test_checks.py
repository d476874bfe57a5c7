"""Checkpoints, exports, adapters and collectives of Megatron on two processes; weights there and back on one."""

from __future__ import annotations

import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.runs import make_chats, make_sft, make_trainer
from tests.strategies.conformance import Bench
from tests.tolerances import assert_near
from verl_lightning.models.fingerprint import base_fingerprint

pytestmark = pytest.mark.backend

MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
BRIDGES = ("megatron_bridge", "mbridge")
KINDS = [f"{model}-{tied} by {bridge}" for model in MODELS for tied in ("tied", "untied") for bridge in BRIDGES]


def read_base(folder: Path) -> PreTrainedModel:
    """The model that all runs start from."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    return model


def test_a_resumed_run_is_the_same_to_the_last_bit(tensor_parallel):
    """Weights of actor and critic, the value head, and what was measured; AdamW and schedules with them."""
    whole, rest = tensor_parallel["resume"]["whole"], tensor_parallel["resume"]["rest"]
    assert_close(rest["weights"], whole["weights"], rtol=0, atol=0)
    names = ("actor/pg_loss", "actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/lr")
    for ours, theirs in zip(rest["steps"], whole["steps"][2:], strict=True):
        assert [ours[name] for name in names] == [theirs[name] for name in names]


@pytest.mark.parametrize("distributed", [True, False])
def test_a_resumed_run_trains_with_its_own_settings(tensor_parallel, distributed):
    """Megatron's optimizers take their settings from a checkpoint, and find no group of other rates in it."""
    told = tensor_parallel["changed_settings"][distributed]
    changed = {"betas": (0.5, 0.7), "eps": 1e-3, "lr": 5e-3}
    assert told["groups"] == [{**changed, "weight_decay": decay} for decay in (0.5, 0.0)]  # none of norms


@pytest.mark.parametrize("distributed", [True, False])
def test_an_older_checkpoint_of_one_group_goes_on(tensor_parallel, distributed):
    found = tensor_parallel["older_groups"][distributed]
    assert_near(found["rest"], found["whole"])


def test_a_checkpoint_goes_on_in_another_layout(tensor_parallel, pipeline_parallel):
    """From two ranks that share layers to two stages, with the optimizer's state."""
    whole = tensor_parallel["resume"]["whole"]["weights"]
    assert_near(pipeline_parallel["reshard"]["weights"], whole)


def test_a_run_on_stages_is_resumed_to_the_last_bit(pipeline_parallel):
    """With a tied embedding on both, whose copy has a bucket of its own in the buffer of the last one's weights."""
    whole, rest = pipeline_parallel["reshard"], pipeline_parallel["resume_stages"]
    assert_close(rest["weights"], whole["weights"], rtol=0, atol=0)
    assert rest["steps"][-1]["actor/grad_norm"] == whole["steps"][-1]["actor/grad_norm"]


def test_a_run_of_many_buckets_is_resumed_to_the_last_bit(pipeline_parallel):
    whole, rest = (pipeline_parallel["resume_buckets"][name] for name in ("whole", "rest"))
    assert_close(rest["weights"], whole["weights"], rtol=0, atol=0)


def test_a_state_in_another_order_is_refused(pipeline_parallel):
    """As Megatron-Core 0.19 saves it: where this fails, it saves it in order, and `keep_buckets_apart` can go."""
    assert "AdamW's own weights in `ckpt_path` are not those of the model" in pipeline_parallel["resume_shifted"]


def test_weights_of_another_strategys_checkpoint_are_taken(folder, tensor_parallel):
    state = torch.load(folder / "auto.ckpt")["state_dict"]
    taken = tensor_parallel["load_auto"]["weights"]
    assert torch.equal(taken.pop("critic.value_head"), state["critic.value_head.weight"])
    for name, weight in taken.items():
        role, _, rest = name.partition(".")
        assert torch.equal(weight, state[f"{role}.backbone.{rest}"]), name
    assert any("AdamW starts anew" in message for message in tensor_parallel["load_auto"]["warnings"])
    assert tensor_parallel["load_auto"]["global_step"] == 3


def test_exported_folders_hold_the_weights(folder, tensor_parallel):
    trained = tensor_parallel["export"]
    actor = AutoModelForCausalLM.from_pretrained(folder / "actor" / "last", dtype=torch.float32)
    for name, weight in actor.named_parameters():
        assert torch.equal(weight, trained[f"actor.{name}"]), name
    head = load_file(folder / "critic" / "last" / "value_head.safetensors")
    assert torch.equal(head["weight"], trained["critic.value_head"])
    assert head["weight"].any()


def test_the_adapter_folder_and_the_merged_weights_are_one_model(folder, tensor_parallel):
    trained = tensor_parallel["lora"]["weights"]
    merged = PeftModel.from_pretrained(read_base(folder), folder / "adapter" / "last").merge_and_unload()
    for name, weight in merged.named_parameters():
        assert_near(trained[f"actor.{name}"], weight.detach())
    moved = trained["actor.model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(moved, read_base(folder).model.layers[0].self_attn.q_proj.weight)


def test_adapters_have_gradients_where_activations_are_computed_again(folder, tensor_parallel):
    """Frozen embeddings have none, and a checkpointed block without any would give none to its adapters."""
    plain, recomputed = tensor_parallel["recomputed_adapters"]
    assert_close(recomputed, plain)
    base = dict(read_base(folder).named_parameters())
    moved = {name for name, weight in recomputed.items() if not torch.equal(weight, base[name])}
    assert len(moved) == 14  # seven layers in each of two blocks


def test_the_base_under_adapters_has_the_fingerprint_of_other_strategies(folder, tensor_parallel):
    assert tensor_parallel["lora"]["fingerprint"] == base_fingerprint(read_base(folder))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_optimizers_flag_decides_which_collective_sums_gradients(tensor_parallel, role):
    """Reduce-scatter with the distributed optimizer and no gradient all-reduced; the other way round without."""
    scattered, reduced = "c10d::reduce_scatter_tensor_coalesced_", "c10d::allreduce_coalesced_"
    for name, counted in tensor_parallel["collectives"].items():
        elements, parameters = counted["elements"][role], counted["parameters"][role]
        used, unused = (reduced, scattered) if name.startswith("plain") else (scattered, reduced)
        assert elements.get(used, 0) >= parameters, name
        assert unused not in elements, name


def test_validation_alone_sees_the_right_weights(folder, tensor_parallel, pipeline_parallel):
    """The loss of one process; Lightning would copy the first rank's part of the model to all others."""
    bench = Bench(strategy="auto", devices=1, folder=folder)
    chats = folder / "chats.jsonl"
    module = make_sft(folder / "model", actor=bench.model())
    (metrics,) = make_trainer(folder).validate(module, datamodule=make_chats(chats, chats), verbose=False)
    for results in (tensor_parallel, pipeline_parallel):
        assert results["validate"] == pytest.approx([metrics["val/loss"]] * 2, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_to_the_last_bit(conversions, kind):
    result = conversions[kind]
    assert result["names"] == result["parameters"]
    assert_close(result["exported"], result["stored"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(conversions, kind):
    for name in ("log_probs", "entropy"):
        assert_near(*conversions[kind][name], rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_is_taken_apart_without_megatron(conversions, model):
    """Of a critic for Qwen2. All parts of a fused weight have the moments of the whole."""
    result = conversions[f"{model} apart"]
    assert_close(result["state"], result["expected"], rtol=0, atol=0)
    marks = {name: result["moments"][index]["exp_avg"] for index, name in enumerate(result["names"])}
    for name, mark in marks.items():
        assert mark.shape == result["expected"][f"actor.{name}"].shape
        parts = mark if ".experts." in name else [mark]
        assert all(part.unique().numel() == 1 for part in parts)
    first = {
        name.rpartition(".self_attn.")[2]: float(mark.flatten()[0]) for name, mark in marks.items() if ".0." in name
    }
    assert first["q_proj.weight"] == first["k_proj.weight"] == first["v_proj.weight"] != first["o_proj.weight"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("qwen2 by megatron_bridge", "does not carry over `use_sliding_window: True`, `sliding_window: 3`"),
        ("qwen3_moe by megatron_bridge", r"does not carry over `mlp_only_layers: \[0\]` of its `config.json`"),
        ("glm4_moe by megatron_bridge", "Megatron can't make this model without TransformerEngine"),
        ("nemotron by megatron_bridge", "Megatron can't make this model without TransformerEngine"),
        ("seed_oss by megatron_bridge", "Megatron-Bridge can't map this model"),
        ("qwen2 by mbridge", "it knows no sliding window"),
    ],
)
def test_models_that_would_become_others_are_refused(conversions, kind, message):
    assert re.search(message, conversions["refused"][kind])
