"""Each family in this process: scores, a step, the exported folder, and samples, or a refusal in one sentence."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, Gemma3Config, T5Config

from tests.families.catalog import FAMILIES, write_folder
from tests.families.family_parts import gap_of, transformers_log_probs
from tests.models.packed_models import make_batch
from tests.rollout.asking import sample
from tests.rollout.vllm_parts import make_prompts
from verl_lightning.compat.transformers import attention_of
from verl_lightning.models.build import build_scorer, make_backbone
from verl_lightning.models.config import LoraConfig, ModelConfig
from verl_lightning.models.hf_folder import write_model
from verl_lightning.models.lora import describe_trainable
from verl_lightning.models.pretrained import read_config
from verl_lightning.models.size import model_size
from verl_lightning.models.weights import merged_weights
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.hf import HFEngine, check_cache

CLOSE = 1e-5
"""Largest difference in float32, as a share of the largest value."""

STATEFUL = {"mamba"}
"""Families that `HFRollout` refuses."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("family") / request.param, request.param)


def test_scores_and_folder_after_a_step_are_those_of_transformers(folder, tmp_path):
    scorer, batch = build_scorer(ModelConfig(path=str(folder)), "policy", trainable=True), make_batch()
    assert model_size(scorer).weights == sum(weight.numel() for weight in scorer.parameters())
    assert scorer.attention_cost >= 0
    assert gap_of(masked(scorer.eval(), batch), transformers_log_probs(folder, batch)) < CLOSE

    (-scorer.train()(batch).log_probs.where(batch.response_mask, 0.0).mean()).backward()
    torch.optim.AdamW(scorer.parameters(), lr=0.01).step()
    write_model(tmp_path, scorer.backbone, merged_weights(scorer.backbone))

    stepped = masked(scorer.eval(), batch)
    assert gap_of(stepped, transformers_log_probs(tmp_path, batch)) < CLOSE
    assert gap_of(stepped, transformers_log_probs(folder, batch)) > CLOSE
    scorer.backbone.save_pretrained(tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_samples_have_the_log_probs_of_transformers(folder):
    config = ModelConfig(path=str(folder))
    if folder.name in STATEFUL:
        with pytest.raises(ValueError, match="`HFRollout` samples with transformers' key-value cache"):
            check_cache(read_config(config.path))
        return
    check_cache(read_config(config.path))
    engine = HFEngine(config, eos_token_ids=[1], pad_token_id=0)
    engine.start(torch.device("cpu"))

    rollout = sample(engine, make_prompts(num_samples=2), SamplingConfig(num_samples=2, max_new_tokens=5))

    expected = transformers_log_probs(folder, rollout)
    assert gap_of(rollout.rollout_log_probs, expected) < CLOSE


def test_capped_scores_are_not_dropped(tmp_path):
    folder = write_folder(tmp_path, "gemma2")
    scorer = build_scorer(ModelConfig(path=str(folder)), "policy", trainable=False)

    assert attention_of(scorer.backbone) == "eager"
    for kernel in ("sdpa", "varlen"):
        with pytest.raises(ValueError, match=f"`attn_implementation: {kernel}` leaves out the cap"):
            build_scorer(ModelConfig(path=str(folder), attn_implementation=kernel), "policy", trainable=False)


@torch.no_grad()
def masked(scorer, batch):
    return scorer(batch).log_probs.where(batch.response_mask, 0.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(d_model=16, num_layers=1), "is a `t5`, of which transformers has no causal language model"),
        (BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2), "is a `bert`, an encoder"),
    ],
)
def test_models_that_are_not_causal_are_refused(config, message, tmp_path):
    config.save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=message):
        make_backbone(ModelConfig(path=str(tmp_path)), "policy")


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "falcon", "phi3"])
def test_dropout_of_a_models_own_config_is_switched_off(family, tmp_path):
    dropouts = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "hidden_dropout")
    write_folder(tmp_path, family, **dict.fromkeys(dropouts, 0.5))
    scorer, batch = build_scorer(ModelConfig(path=str(tmp_path)), "policy", trainable=True), make_batch()
    assert not torch.equal(masked(scorer, batch), masked(scorer, batch))

    scorer.disable_dropout()

    assert torch.equal(masked(scorer, batch), masked(scorer.eval(), batch))


@pytest.mark.parametrize(
    ("family", "without"),
    [("qwen3_moe", "mlp"), ("mixtral", "mlp"), ("gpt_oss", "mlp"), ("deepseek_v3", "shared_experts"), ("llama", None)],
)
def test_all_linear_adapts_what_is_linear_in_every_family(family, without, tmp_path):
    folder = write_folder(tmp_path, family)
    scorer = build_scorer(ModelConfig(path=str(folder), lora=LoraConfig(rank=2)), "policy", trainable=True)
    adapted = {name.partition(".lora_")[0] for name, _ in scorer.named_parameters() if ".lora_" in name}

    assert any(name.endswith("self_attn.o_proj") for name in adapted)
    assert not any(f".{without}." in name or name.endswith("lm_head") for name in adapted)
    assert ("Experts, which transformers holds fused" in describe_trainable(scorer.backbone)) == (without is not None)


def test_what_text_never_reaches_is_neither_trained_nor_adapted(tmp_path):
    text = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 104}
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    for lora in (None, LoraConfig(rank=2)):
        scorer = build_scorer(ModelConfig(path=str(tmp_path), lora=lora), "policy", trainable=True)
        scorer(make_batch()).log_probs.sum().backward()
        trained = {name: weight.grad for name, weight in scorer.named_parameters() if weight.requires_grad}
        assert all(gradient is not None for gradient in trained.values())
        assert all(".language_model." in name for name in trained)
