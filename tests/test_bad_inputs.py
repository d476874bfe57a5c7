"""Mistakes that users make: each is one sentence that says what to do, before the first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.runs import make_settings
from tests.tiny import tiny_model, tiny_tokenizer
from verl_lightning.cli.lightning_cli import CLI


@pytest.fixture
def config(tiny_folder, prompt_file, tmp_path, monkeypatch):
    """A configuration that trains, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return make_settings(tiny_folder, prompt_file, max_steps=1, logger=False, enable_checkpointing=False)


def run(config: dict, *flags: str) -> CLI:
    """What ``verl-fit`` does with this configuration."""
    Path("config_under_test.yaml").write_text(yaml.safe_dump(config))
    return CLI(["fit", "--config", "config_under_test.yaml", *flags])


def refusal(config: dict, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The message of a run that must not begin, from the parser or from a part."""
    capsys.readouterr()
    with pytest.raises((SystemExit, ValueError, RuntimeError, MisconfigurationException)) as failure:
        run(config, *flags)
    return capsys.readouterr().err + str(failure.value)


def test_the_configuration_without_mistakes_trains(config):
    assert run(config).trainer.global_step == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trainer.strategy", "megatroon"], ["megatroon", "strategy"]),
        (["--rollout.sampling.num_samples", "1"], ["GRPO", "rollout.sampling.num_samples", "at least 2"]),
        (["--model.update.mini_batch_size", "3"], ["update.mini_batch_size", "prompts_per_step", "divide"]),
        (["--model.reward.function", "no_such.module.reward"], ["no_such.module.reward"]),
        (["--model.actor.path", "no/such/folder"], ["no/such/folder"]),
        (["--model.update.mini_batch_sise", "2"], ["mini_batch_sise", "mini_batch_size"]),
        (["--data.max_prompt_length", "3"], ["max_prompt_length", "overlong"]),
        (["--data.train_files", "missing.jsonl"], ["missing.jsonl"]),
        (["--rollout", "null"], ["rollout"]),
        (["--model.advantage", "GAE"], ["GAE", "critic"]),
        (["--ckpt_path", "no/such.ckpt"], ["no/such.ckpt"]),
        (["--trainer.gradient_clip_val", "1.0"], ["gradient_clip_val", "actor.optim.max_grad_norm"]),
        (["--trainer.limit_train_batches", "0.01"], ["`trainer.limit_train_batches` is 0.01 of the 16 batches"]),
        (["--trainer.overfit_batches", "0.01"], ["`trainer.overfit_batches` is 0.01 of the 16 batches"]),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(flags, words, config, capsys):
    message = refusal(config, capsys, *flags)

    assert all(word in message for word in words), message


def test_a_validation_that_would_never_come_is_refused(config, capsys, prompt_file):
    told = refusal(config, capsys, "--data.val_files", str(prompt_file), "--trainer.val_check_interval=17")

    assert "`trainer.val_check_interval` is 17 batches, but an epoch has 16. Lower it, or set" in told


def test_an_empty_data_file_is_refused(config, capsys):
    Path("empty.jsonl").write_text("")

    assert "empty.jsonl" in refusal(config, capsys, "--data.train_files", "empty.jsonl")


def test_a_missing_column_is_refused(config, capsys, prompt_file):
    row = json.loads(prompt_file.read_text().splitlines()[0])
    row.pop("prompt")
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")

    message = refusal(config, capsys, "--data.train_files", "rows.jsonl")

    assert "rows.jsonl" in message
    assert "prompt" in message


@pytest.mark.parametrize("missing", ["chat_template", "pad_token"])
def test_a_tokenizer_without_a_needed_part_is_refused_or_helped(missing, config, capsys, tiny_folder):
    shutil.copytree(tiny_folder, "model")
    settings = Path("model/tokenizer_config.json")
    values = json.loads(settings.read_text())
    values.pop(missing, None)
    if missing == "pad_token":
        values.pop("eos_token")
    settings.write_text(json.dumps(values))
    if missing == "chat_template":
        Path("model/chat_template.jinja").unlink()

    message = refusal(config, capsys, "--model.actor.path", "model")

    assert missing.replace("_", " ") in message or missing in message


BAD_SETTINGS = {
    '{"a": ': "config.json` holds no JSON: ",
    "[1]": "config.json` can't be read (",
    '{"model_type": "llama", "num_hidden_layers": "two"}': "field 'num_hidden_layers': TypeError: ",
}


@pytest.mark.parametrize("text", BAD_SETTINGS)
def test_broken_settings_of_a_model_are_not_said_to_be_its_tokenizers(text, config, capsys, tiny_folder):
    shutil.copytree(tiny_folder, "model")
    Path("model/config.json").write_text(text)

    message = refusal(config, capsys, "--model.actor.path", "model")

    assert message.startswith("`model.actor`: ")
    assert BAD_SETTINGS[text] in message
    assert "tokenizer" not in message


def test_an_adapter_that_does_not_say_its_size_is_refused(config, capsys):
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text('{"peft_type": "LORA", "r": 16}')
    Path("adapter/adapter_model.safetensors").touch()

    message = refusal(config, capsys, "--model.actor.lora.adapter_path", "adapter")

    assert "`model.actor`: `lora.adapter_path: adapter` has no alpha in its `adapter_config.json`." in message


WHOSE = {
    "data.train_files": ["--data.train_files", "rows.jsonl"],
    "data.val_files": ["--data.val_files", "rows.jsonl"],
    "model.reward": ["--model.reward.arguments", "{nothing: 1}"],
    "model.critic.model": ["--model.advantage", "GAE", "--model.critic.model.path", "no-weights"],
}


@pytest.mark.parametrize("key", WHOSE)
def test_a_sentence_begins_with_the_key_that_it_is_about(key, config, capsys, tiny_folder):
    Path("rows.jsonl").write_text('{"prompt": "a"}')
    shutil.copytree(tiny_folder, "no-weights")
    Path("no-weights/model.safetensors").unlink()

    assert f"`{key}`: " in refusal(config, capsys, *WHOSE[key])


def test_pad_may_equal_eos(config, tiny_folder):
    shutil.copytree(tiny_folder, "model")
    settings = Path("model/tokenizer_config.json")
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps(values | {"pad_token": values["eos_token"]}))

    assert run(config, "--model.actor.path", "model").trainer.global_step == 1


def test_a_checkpoint_of_another_model_is_refused(config, capsys, tmp_path):
    tiny_model(hidden_size=16).save_pretrained("other")
    tiny_tokenizer().save_pretrained("other")
    run(config).trainer.save_checkpoint(tmp_path / "here.ckpt")

    message = refusal(config, capsys, "--model.actor.path", "other", "--ckpt_path", "here.ckpt")

    assert "ckpt_path" in message
    assert "another model" in message
