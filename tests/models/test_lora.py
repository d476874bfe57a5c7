"""Adapters: what is trained, what is refused, what PEFT makes of the same folder."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.processes import start
from tests.runs import make_model_config
from tests.tiny import tiny_tokenizer
from tests.tolerances import assert_near
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import LoraConfig
from verl_lightning.models.fingerprint import base_fingerprint
from verl_lightning.models.hf_folder import atomic_folder
from verl_lightning.models.lora import adapter_weights, describe_trainable, peft_config, write_adapter
from verl_lightning.models.weights import merged_weights
from verl_lightning.modules import SFTModule
from verl_lightning.modules.ppo_config import CriticConfig
from verl_lightning.types import TokenBatch

TOKENS = torch.arange(12).view(2, 6)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def base_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def lora_scorer(folder, *, trained=True, activation_checkpointing="none", dtype="float32", **lora):
    """A policy with adapters; `trained` gives the ones that start at zero random values."""
    options = {"rank": 4, "alpha": 8.0} | lora
    config = make_model_config(
        folder, lora=LoraConfig(**options), activation_checkpointing=activation_checkpointing, dtype=dtype
    )
    torch.manual_seed(0)  # draws A
    scorer = build_scorer(config, "policy", trainable=True)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in scorer.backbone.named_parameters():
        if trained and ("lora_B" in name or "modules_to_save" in name):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return scorer


def load_merged(folder, scorer):
    """The base with the merged weights copied into it."""
    model = base_of(folder)
    model.load_state_dict(dict(merged_weights(scorer.backbone)), strict=False)
    return model


@pytest.fixture(scope="module")
def untied_folder(tmp_path_factory, tiny_folder):
    """The tiny model with an output head of its own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, tie_word_embeddings=False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def adapter_folder(tmp_path, tiny_folder):
    scorer = lora_scorer(tiny_folder)
    (tmp_path / "adapter").mkdir()
    write_adapter(
        tmp_path / "adapter", scorer.backbone, adapter_weights(scorer.backbone), base_fingerprint(scorer.backbone)
    )
    return tmp_path / "adapter"


def test_a_new_adapter_changes_nothing(tiny_folder):
    scorer = lora_scorer(tiny_folder, trained=False)

    assert_close(logits_of(scorer.backbone), logits_of(base_of(tiny_folder)), rtol=0, atol=0)


def test_only_adapters_are_trained_and_the_report_counts_them(tiny_folder):
    backbone = lora_scorer(tiny_folder, target_modules=["q_proj"]).backbone

    # Two layers; A is 4 x 32 and B 32 x 4.
    assert describe_trainable(backbone).startswith("LoRA trains 512 of ")
    assert describe_trainable(backbone).endswith("beside 2 layers.")
    assert all(".lora_" in name for name, p in backbone.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
def test_every_trainable_parameter_gets_a_gradient(tiny_folder, activation_checkpointing):
    scorer = lora_scorer(tiny_folder, activation_checkpointing=activation_checkpointing)
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    batch = TokenBatch(input_ids=TOKENS, attention_mask=mask, response_mask=mask[:, 1:])

    scorer(batch).log_probs.sum().backward()

    trained = [p for p in scorer.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)


def test_without_adapters_the_base_answers_and_then_the_policy_again(untied_folder):
    scorer = lora_scorer(untied_folder, modules_to_save=["lm_head"])
    policy = logits_of(scorer.backbone)

    with scorer.without_adapters():
        reference = logits_of(scorer.backbone)

    assert_close(reference, logits_of(base_of(untied_folder)), rtol=0, atol=0)
    assert_close(logits_of(scorer.backbone), policy, rtol=0, atol=0)
    assert not torch.allclose(policy, reference)
    assert all(p.requires_grad == (".lora_" in n or "modules_to_save" in n) for n, p in scorer.named_parameters())


# PEFT rounds the product and then the sum to bfloat16; here the sum alone is rounded.
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 0), ("bfloat16", 2e-3)])
def test_merging_equals_pefts_and_never_drifts(tiny_folder, adapter_folder, dtype, atol):
    scorer = lora_scorer(tiny_folder, dtype=dtype)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=getattr(torch, dtype))
    expected = PeftModel.from_pretrained(base, adapter_folder).merge_and_unload().state_dict()

    before = {name: weight.clone() for name, weight in scorer.backbone.state_dict().items()}
    for _ in range(20):
        merged = dict(merged_weights(scorer.backbone))

    for name, weight in merged.items():
        assert_close(weight, expected[name], rtol=0, atol=atol)
    assert merged.keys() == dict(base_of(tiny_folder).named_parameters()).keys()
    for name, weight in scorer.backbone.state_dict().items():
        assert torch.equal(weight, before[name])


def test_merged_weights_give_the_policys_logits(untied_folder):
    scorer = lora_scorer(untied_folder, modules_to_save=["lm_head"], target_modules=["q_proj", "embed_tokens"])

    merged = load_merged(untied_folder, scorer)

    assert_near(logits_of(merged), logits_of(scorer.backbone))


@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": r".*\.0\..*q_proj"}])
def test_peft_loads_the_folder(tmp_path, untied_folder, lora):
    scorer = lora_scorer(untied_folder, **lora)
    write_adapter(tmp_path, scorer.backbone, adapter_weights(scorer.backbone), base_fingerprint(scorer.backbone))

    loaded = PeftModel.from_pretrained(base_of(untied_folder), tmp_path)

    assert_near(logits_of(loaded), logits_of(scorer.backbone))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(untied_folder)
    assert config["inference_mode"] is True


def test_training_goes_on_from_a_folder_that_we_wrote(tiny_folder, adapter_folder):
    ours = lora_scorer(tiny_folder)

    again = lora_scorer(tiny_folder, trained=False, adapter_path=str(adapter_folder))

    assert_close(logits_of(again.backbone), logits_of(ours.backbone), rtol=0, atol=0)
    assert any(p.requires_grad for p in again.parameters())


def test_training_goes_on_from_a_folder_that_peft_wrote(tmp_path, untied_folder):
    config = PeftLoraConfig(r=4, lora_alpha=8, target_modules=["v_proj"], modules_to_save=["lm_head"])
    theirs = get_peft_model(base_of(untied_folder), config)
    torch.nn.init.normal_(theirs.base_model.model.model.layers[0].self_attn.v_proj.lora_B["default"].weight)
    theirs.save_pretrained(tmp_path)
    lora = {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"], "adapter_path": str(tmp_path)}

    ours = lora_scorer(untied_folder, trained=False, **lora)

    assert_close(logits_of(ours.backbone), logits_of(theirs), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, "has rank 4, but `lora.rank` is 8"),
        ({"alpha": 4.0}, "has alpha 8, but `lora.alpha` is 4"),
        ({"target_modules": ["q_proj"]}, "has other adapters than `lora` asks for"),
        ({"init": "gaussian"}, "no effect on the adapter"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(tiny_folder, adapter_folder, lora, message):
    with pytest.raises(ValueError, match=message):
        lora_scorer(tiny_folder, adapter_path=str(adapter_folder), **lora)


def test_an_adapter_of_another_base_is_refused(untied_folder, adapter_folder):
    with pytest.raises(ValueError, match="trained on another base"):
        lora_scorer(untied_folder, adapter_path=str(adapter_folder))


def test_layouts_that_are_not_read_are_refused_with_the_way_out(tmp_path, tiny_folder, adapter_folder):
    (tmp_path / "verl" / "lora_adapter").mkdir(parents=True)
    shutil.copy(adapter_folder / "adapter_config.json", tmp_path / "verl" / "lora_adapter")
    dora = tmp_path / "dora"
    shutil.copytree(adapter_folder, dora)
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))

    for folder, message in [
        (tiny_folder, "is no PEFT adapter folder"),
        (tmp_path / "verl", "Give `.*lora_adapter`"),
        (tmp_path / "verl" / "lora_adapter", "convert it with PEFT"),
        (dora, "uses `use_dora`"),
    ]:
        with pytest.raises(ValueError, match=message):
            lora_scorer(tiny_folder, adapter_path=str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init_lora_weights": "pissa"}, "`init_lora_weights: pissa`, so it belongs to a base that PEFT has changed"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "belongs to a base"),
        ({"bias": "all"}, "trains biases too"),
        ({"alora_invocation_tokens": [5]}, "uses `alora_invocation_tokens`"),
    ],
)
def test_an_adapter_that_means_something_else_is_refused(tmp_path, tiny_folder, adapter_folder, change, message):
    shutil.copytree(adapter_folder, folder := tmp_path / "other")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))

    with pytest.raises(ValueError, match=message):
        lora_scorer(tiny_folder, adapter_path=str(folder))


def write_and_die(base, target):
    """Write an adapter; a SIGKILL comes between its weights and its config."""
    scorer = lora_scorer(base)
    type(peft_config(scorer.backbone)).save_pretrained = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with atomic_folder(target) as folder:
        write_adapter(folder, scorer.backbone, adapter_weights(scorer.backbone), "")


def test_a_kill_while_writing_leaves_the_old_adapter(tmp_path, tiny_folder, adapter_folder):
    with start(write_and_die, tiny_folder, adapter_folder, folder=tmp_path / "process") as process:
        process.wait(code=-signal.SIGKILL)

    (half,) = tmp_path.glob(".*.partial")
    assert (half / "adapter_model.safetensors").exists()
    with pytest.raises(ValueError, match="Can't find 'adapter_config.json'"):
        PeftModel.from_pretrained(base_of(tiny_folder), half)
    with pytest.raises(ValueError, match="is no PEFT adapter folder"):
        lora_scorer(tiny_folder, adapter_path=str(half))
    assert (
        logits_of(lora_scorer(tiny_folder, adapter_path=str(adapter_folder), trained=False).backbone).isfinite().all()
    )


def test_an_adapter_is_not_taken_for_a_model(adapter_folder):
    with pytest.raises(ValueError, match="Set `path` to its base"):
        build_scorer(make_model_config(adapter_folder), "policy", trainable=True)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["q_prj"]}, "has no module `q_prj`. It has `q_proj`"),
        ({"exclude_modules": ["down"]}, "`lora.exclude_modules`: the model has no module `down`. It has `down_proj`"),
        ({"modules_to_save": ["head"]}, "`lora.modules_to_save`: the model has no module `head`. It has `lm_head`"),
        ({"target_modules": "q_proj"}, "is a pattern that no module's whole name matches"),
        ({"modules_to_save": ["lm_head"]}, "`lm_head`, whose weight is tied to `model.embed_tokens`"),
        ({"target_modules": ["embed_tokens"]}, "whose weight is tied to `lm_head`"),
        ({"rank": 0}, "`lora.rank` must be at least 1"),
        ({"merge_for_rollout": False, "modules_to_save": ["lm_head"]}, "sends adapters alone, but `lora.modules_to"),
    ],
)
def test_bad_names_are_refused_before_training(tiny_folder, lora, message):
    with pytest.raises(ValueError, match=message):
        lora_scorer(tiny_folder, **lora)


def test_a_model_that_samples_nothing_has_no_engine_to_send_adapters_to(tiny_folder):
    config = make_model_config(tiny_folder, lora=LoraConfig(merge_for_rollout=False))

    with pytest.raises(ValueError, match=r"`model\.actor\.lora\.merge_for_rollout` has no effect"):
        SFTModule(config)
    with pytest.raises(ValueError, match=r"`model\.critic\.model\.lora\.merge_for_rollout` has no effect"):
        CriticConfig(model=config)


def test_excluded_modules_get_no_adapter(tiny_folder):
    backbone = lora_scorer(tiny_folder, exclude_modules=["down_proj"]).backbone

    adapted = {name.split(".lora_A")[0].split(".")[-1] for name, _ in backbone.named_parameters() if ".lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


def test_init_and_dropout_reach_the_adapters(tiny_folder):
    torch.manual_seed(0)
    gaussian = lora_scorer(tiny_folder, init="gaussian", dropout=0.25, trained=False).backbone
    layer = gaussian.model.layers[0].self_attn.q_proj

    # PEFT draws A from a normal distribution of standard deviation 1 / rank; Kaiming's is uniform, below 1 / sqrt(32).
    assert layer.lora_A["default"].weight.abs().max() > 32**-0.5
    assert layer.lora_dropout["default"].p == 0.25
