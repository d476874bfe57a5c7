"""Checkpoints of whole `verl-fit` runs, turned into folders by `verl-export`."""

from __future__ import annotations

import shutil

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from tests.runs import REWARDS
from tests.tiny import write_tiny_folder
from tests.tolerances import assert_near
from verl_lightning.cli.export import main
from verl_lightning.cli.lightning_cli import CLI

LENGTHS = {"max_prompt_length": 32, "val_batch_size": 4}
TOKENS = torch.arange(12).view(2, 6)


def run_ppo(folder, model_folder, prompt_file, lora):
    """PPO with a critic of its own; returns the trained module and its only checkpoint."""
    optim = {"lr": 1e-2}
    settings = {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 2,
            "logger": {
                "class_path": "verl_lightning.loggers.ResumableCSVLogger",
                "init_args": {"save_dir": str(folder)},
            },
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 2}}],
        },
        "model": {
            "class_path": "PPOModule",
            "init_args": {
                "actor": {"path": str(model_folder), "optim": optim, "lora": lora},
                "critic": {"model": {"path": str(model_folder), "optim": optim}},
                "advantage": {"class_path": "GAE"},
                "reward": {"function": f"{REWARDS}:even_share", "num_workers": 1},
                "update": {"mini_batch_size": 4, "micro_batch_size": 4},
            },
        },
        "data": {
            "class_path": "PromptDataModule",
            "init_args": {"train_files": str(prompt_file), "prompts_per_step": 4} | LENGTHS,
        },
        "rollout": {"class_path": "HFRollout", "init_args": {"sampling": {"num_samples": 2, "max_new_tokens": 6}}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    cli = CLI(["--config", str(folder / "run.yaml")])
    (checkpoint,) = folder.glob("*/checkpoints/*.ckpt")
    return cli.model, checkpoint


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, tiny_folder, prompt_file):
    return run_ppo(tmp_path_factory.mktemp("full"), tiny_folder, prompt_file, None)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory, tiny_folder, prompt_file):
    return run_ppo(tmp_path_factory.mktemp("lora"), tiny_folder, prompt_file, {"rank": 4, "alpha": 8})


def export(checkpoint, output, *words):
    main(["--ckpt_path", str(checkpoint), "--output", str(output), *words])


def refusal(capsys, checkpoint, output, *words):
    """What a command says that must fail."""
    with pytest.raises(SystemExit):
        export(checkpoint, output, *words)
    assert not output.exists() or not any(output.glob("*.safetensors"))
    return capsys.readouterr().err


def logits_of(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def base_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_full_checkpoint_becomes_a_model(tmp_path, full_run):
    module, checkpoint = full_run

    export(checkpoint, tmp_path / "out", "--to", "hf")

    loaded = base_of(tmp_path / "out")
    assert_close(logits_of(loaded), logits_of(module.policy.backbone), rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_a_critic_keeps_its_value_head(tmp_path, lora_run):
    module, checkpoint = lora_run

    export(checkpoint, tmp_path / "out", "--to", "hf", "--role", "critic")

    loaded = AutoModel.from_pretrained(tmp_path / "out").eval()(TOKENS).last_hidden_state
    assert_close(loaded, module.critic.backbone.eval()(TOKENS).last_hidden_state, rtol=0, atol=0)
    (weight,) = load_file(tmp_path / "out" / "value_head.safetensors").values()
    assert_close(weight, module.critic.value_head.weight.detach(), rtol=0, atol=0)


def test_an_adapter_and_the_merged_model_agree_with_peft(tmp_path, lora_run, tiny_folder):
    module, checkpoint = lora_run

    export(checkpoint, tmp_path / "adapter", "--to", "peft")
    export(checkpoint, tmp_path / "merged", "--to", "merged")

    adapted = PeftModel.from_pretrained(base_of(tiny_folder), tmp_path / "adapter")
    merged = base_of(tmp_path / "merged")
    assert_near(logits_of(adapted), logits_of(module.policy.backbone))
    assert_close(logits_of(merged), logits_of(adapted.merge_and_unload()), rtol=0, atol=0)
    assert not torch.allclose(logits_of(merged), logits_of(base_of(tiny_folder)), atol=1e-3)


def test_dtype_chooses_the_stored_type(tmp_path, full_run):
    export(full_run[1], tmp_path / "out", "--to", "hf", "--dtype", "bfloat16")

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_an_untrained_adapter_is_not_merged(tmp_path, lora_run, capsys):
    checkpoint = torch.load(lora_run[1])
    for name, weight in checkpoint["state_dict"].items():
        if "lora_B" in name:
            weight.zero_()
    torch.save(checkpoint, tmp_path / "zero.ckpt")
    shutil.copy(lora_run[1].parents[1] / "config.yaml", tmp_path)

    said = refusal(capsys, tmp_path / "zero.ckpt", tmp_path / "out", "--to", "merged")

    assert "the adapter adds nothing to the base" in said
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_refused_with_the_way_out(tmp_path, capsys, full_run, lora_run):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    shutil.copy(lora_run[1], tmp_path / "lost.ckpt")
    (tmp_path / "megatron").mkdir()
    torch.save({}, tmp_path / "megatron" / "megatron_meta.pt")
    lora_config = str(lora_run[1].parents[1] / "config.yaml")
    cases = [
        (lora_run[1], "out", ["--to", "hf"], "was trained with LoRA. Use `--to peft` or `--to merged`"),
        (full_run[1], "out", ["--to", "peft"], "has no LoRA adapter. Use `--to hf`"),
        (full_run[1], "full", ["--to", "hf"], "exists already"),
        (tmp_path / "none.ckpt", "out", ["--to", "peft", "--config", lora_config], "does not exist. Give a checkpoint"),
        (tmp_path, "out", ["--to", "peft", "--config", lora_config], "is not a checkpoint. Did you mean"),
        (
            tmp_path / "full" / "notes.txt",
            "out",
            ["--to", "peft", "--config", lora_config],
            "not a checkpoint, or not the whole of one",
        ),
        (tmp_path / "megatron", "out", ["--to", "peft", "--config", lora_config], "in an older layout"),
        (tmp_path / "lost.ckpt", "out", ["--to", "peft"], "no `config.yaml` lies beside"),
        (full_run[1], "out", ["--to", "peft", "--config", lora_config], "for another base"),
        (lora_run[1], "out", ["--to", "hf", "--config", str(full_run[1].parents[1] / "config.yaml")], "does not fit"),
    ]
    for checkpoint, output, words, message in cases:
        assert message in refusal(capsys, checkpoint, tmp_path / output, *words)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_settings_of_an_older_version_are_read_and_unknown_ones_named(tmp_path, full_run, capsys):
    text = (full_run[1].parents[1] / "config.yaml").read_text()
    path = tmp_path / "config.yaml"

    path.write_text(text.replace("activation_checkpointing: none", "gradient_checkpointing: false"))
    export(full_run[1], tmp_path / "out", "--to", "hf", "--config", str(path))
    assert (tmp_path / "out" / "model.safetensors").exists()

    cases = [
        ("dtype: float32", "checkpoint: 3", "can't read: `actor.checkpoint` is not a setting of `ModelConfig`."),
        (
            "dtype: float32",
            "dtype: int8",
            "can't read: `actor.dtype`: expected one of 'float32', 'bfloat16', got 'int8'.",
        ),
        ("dtype: float32", "{", f"in `{path}`: line "),
    ]
    capsys.readouterr()
    for right, wrong, message in cases:
        path.write_text(text.replace(right, wrong))
        said = refusal(capsys, full_run[1], tmp_path / "none", "--to", "hf", "--config", str(path))
        assert message in said
        assert len(said.splitlines()) == 1


def test_adapters_are_not_merged_into_another_base(tmp_path, lora_run, capsys):
    other = write_tiny_folder(tmp_path / "other", seed=1)
    config = yaml.safe_load((lora_run[1].parents[1] / "config.yaml").read_text())
    config["model"]["init_args"]["actor"]["path"] = str(other)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    said = refusal(capsys, lora_run[1], tmp_path / "out", "--to", "merged", "--config", str(tmp_path / "config.yaml"))

    assert "adapters for another base" in said
