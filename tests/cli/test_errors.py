"""Table of mistakes on the command line, each answered by one sentence with the way out."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from verl_lightning.cli.errors import did_you_mean, read_failure

FLAGS = [
    ("--trainer.max_step 3", "`trainer.max_step` is not a setting of `verl-fit`. Did you mean `trainer.max_steps`?"),
    ("--modle ToyModule", "`modle` is not a setting of `verl-fit`. Did you mean `model`?"),
    ("--optim.lr 3", "`optim.lr` is not a setting of `verl-fit`."),
    ("--ddp.bucket_cap 3", "`ddp.bucket_cap` is not a setting of `verl-fit`. Did you mean `ddp.bucket_cap_mb`?"),
    ("--model.optim.lrr 3", "`model.optim.lrr` is not a setting of `ToyModule`. Did you mean `model.optim.lr`?"),
    ("--model.optim.l 3", "`model.optim.l` is not a setting of `ToyModule`. Did you mean `model.optim.lr`?"),
    ("--model.lora.rnk 3", "`model.lora.rnk` is not a setting of `ToyLora`. Did you mean `model.lora.rank`?"),
    (
        "--model.lora_rank 3",
        "`model.lora_rank` is not a setting of `ToyModule`. verl's `lora_rank` is `model.lora.rank`",
    ),
    ("--model.target_modules q", "`model.target_modules` is not a setting of `ToyModule`. verl's `target_modules` is"),
    ("--model.judge.baar 3", "`model.judge.baar` is not a setting of `Strict`. Did you mean `model.judge.bar`?"),
    ("--model.judge.smile 3", "`model.judge.smile` is not a setting of `Strict`. `verl-fit fit --help all` lists"),
    ("--rollout.temprature 3", "`rollout.temprature` is not a setting of `ToyRollout`. Did you mean `rollout.temp"),
    ("--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr=x", "`trainer.callbacks.monitr` is not a setting"),
    ("--trainer.callbacks+=EarlyStopping", "`EarlyStopping` needs `trainer.callbacks.monitor`."),
    ("--trainer.callbacks+=EarlyStoping", "`trainer.callbacks`: there is no class `EarlyStoping` to choose here. Did"),
    ("--model.judge Lenint", "`model.judge`: there is no class `Lenint` to choose here."),
    ("--model ToyModul", "`model`: there is no class `ToyModul` to choose here. Did you mean `ToyModule`?"),
    ("--model.judge nowhere.Judge", "`model.judge`: No module named 'nowhere'"),
    ("--model tests.cli.toy.ToyOptim", "`model`: expected a subclass of LightningModule or null, got 'tests.cli.toy."),
    ("--model.optim.lr abc", "`model.optim.lr`: expected float, got 'abc'."),
    ("--model.optim.lr -1", "`model.optim.lr` must be above 0, got -1.0."),
    ("--model.kind tiny", "`model.kind`: expected one of 'small', 'big', got 'tiny'."),
    ("--model.lora.rank x", "`model.lora.rank`: expected int, got 'x'."),
    ("--trainer.default_root_dir base.yaml/x", "`trainer.default_root_dir: base.yaml/x` can't be made a folder: `/"),
    ("--seed_everything -3", "`seed_everything` must lie between 0 and 4294967295, got -3."),
    ("--data.batch_size null", "`data.batch_size`: expected int, got null."),
    ("--model.optim.lr null", "`model.optim.lr`: expected float, got"),
    ("--model.lora.rank null", "`model.lora.rank`: expected int, got"),
    ("--trainer.log_every_n_steps null --trainer.benchmark null --trainer.detect_anomaly null", "`trainer.detect_anom"),
    ("--data.batch_size x", "`data.batch_size`: expected int, got 'x'."),
    ("--trainer.log_every_n_steps x", "`trainer.log_every_n_steps`: expected int or null, got 'x'."),
    ("--trainer.precision 33", "`trainer.precision`: expected one of 64, 32, 16 or one of 'transformer-engine'"),
    ("--trainer.max_steps", "`--trainer.max_steps` needs a value."),
    ("--model.optim.lr --trainer.max_steps 3", "`--model.optim.lr` needs a value."),
    ("--data ToyModule", "`data`: there is no class `ToyModule` to choose here. Did you mean `ChatDataModule`?"),
    ("--trainer.devices 0", "`trainer.devices` is 0, but a run needs a device."),
    ("--trainer.max_steps -5", "`trainer.max_steps` must be at least -1, got -5."),
    ("--trainer.max_time soon", "`trainer.max_time`: `Timer(duration='soon')` is not a valid duration."),
    ("--strategy dpp", "`trainer.strategy` has no choice 'dpp'. Did you mean `ddp`?"),
    ("--strategy megatron_lm", "`trainer.strategy` has no choice 'megatron_lm'. Did you mean `megatron`?"),
    (
        "--fsdp.compile true",
        "`fsdp.compile` is a setting of the strategy `fsdp`, but `trainer.strategy` is `auto`. Add",
    ),
    (
        "--strategy fsdp --ddp.timeout=9",
        "`ddp.timeout` is a setting of the strategy `ddp`, but `trainer.strategy` is `",
    ),
    ("--trainer.accelerator cpuu", "`trainer.accelerator` has no choice 'cpuu'. Did you mean `cpu`?"),
    ("--trainer.profiler simpl", "`trainer.profiler` has no choice 'simpl'. Did you mean `simple`?"),
    ("--ckpt_path base.yml", "`--ckpt_path base.yml` does not exist. Did you mean `base.yaml`?"),
    ("--ckpt_path no/such.ckpt", "`--ckpt_path no/such.ckpt` does not exist. Give a checkpoint's file or folder, or"),
    ("--ckpt_path hpc", "`--ckpt_path hpc` is of Lightning's own requeueing, which `verl-fit slurm` does without: "),
    ("--ckpt_path best", "`--ckpt_path best` is known only to the process that trained; give its file, or `last`."),
    ("validate", "the subcommand comes first: `verl-fit validate ...`."),
    ("--config bas.yaml", "`--config bas.yaml` is neither a file nor a shipped configuration"),
    ("--print_config=colours", 'Invalid option "colours" for --print_config'),
]


@pytest.mark.parametrize(("words", "sentence"), FLAGS)
def test_wrong_flag_is_answered_by_one_sentence(refuse, words, sentence):
    said = refuse("--config", "base.yaml", *words.split())
    assert said.startswith(sentence)
    assert len(said.splitlines()) == 1


FILES = [
    ("modle: {}", "`modle` is not a group of settings. Did you mean `model`?"),
    ("modle: {a: 1}", "`modle` is not a group of settings. Did you mean `model`?"),
    ("trainer: {modle: {}}", "`trainer.modle` is not a group of settings."),
    ("model: {init_args: {optimm: {}}}", "`model.optimm` is not a group of settings. Did you mean `model.optim`?"),
    ("model: {init_args: {judge: {class_path: Lenient, init_args: {smil: {}}}}}", "`model.judge.smil` is not a group"),
    ("model: {init_args: {optim: 3}}", "`model.optim` is a group of settings, got 3."),
    ("model: {init_args: {lora: {rnk: {}}}}", "`model.lora.rnk` is not a group of settings."),
    ("trainer: 3", "`trainer` is a group of settings, got 3."),
    ("trainer:\nfsdp: {}", "`trainer` is a group of settings, got null. Leave it out, or set one of them below it."),
    ("fsdp:\nddp: {}", "`fsdp` is a group of settings, got null. Leave it out, or set one of them below it."),
    ("model: 3", "`model`: expected subclass of LightningModule or null, got '3'."),
    ("model: {init_args: {optim: {lrr: 1}}}", "`model.optim.lrr` is not a setting of `ToyModule`. Did you mean"),
    ("rollout: {class_path: ToyRollout, temperature: 3}", "`rollout`: put the settings of a class under `init_args`"),
    ("trainer: {max_steps: 1, max_steps: 2}", "line 1 sets `max_steps` a second time."),
    ("trainer:\n  max_steps: 3\n max_epochs: 2\n", "line 3 is not valid YAML: did not find expected key."),
    ("just words", "expected settings, such as `trainer: {max_steps: 10}`, got something else."),
    ("", "expected settings, such as `trainer: {max_steps: 10}`, got something else."),
]


@pytest.mark.parametrize(("text", "sentence"), FILES)
def test_wrong_file_is_answered_by_its_name_and_one_sentence(refuse, folder, text, sentence):
    (folder / "wrong.yaml").write_text(text)
    said = refuse("--config", "base.yaml", "--config", "wrong.yaml")
    assert said.startswith(f"in `wrong.yaml`: {sentence}")
    assert len(said.splitlines()) == 1


def test_unknown_key_in_a_file_names_the_closest(refuse, folder):
    (folder / "wrong.yaml").write_text("trainer: {max_step: 3}")
    said = refuse("--config", "wrong.yaml", "--config", "base.yaml")
    assert said == "`trainer.max_step` is not a setting of `verl-fit`. Did you mean `trainer.max_steps`?"


def test_setting_of_our_modules_is_found_without_its_group(refuse):
    said = refuse("--config", "base.yaml", "--actor.path", "x")
    assert said == "`actor.path` is not a setting of `verl-fit`. Did you mean `model.actor.path`?"


def test_settings_without_a_class_ask_for_it(refuse, folder):
    (folder / "amends.yaml").write_text("model: {init_args: {optim: {lr: 1}}}")
    said = refuse("--config", "amends.yaml")
    assert said == "in `amends.yaml`: `model`: say which class it is, as `model.class_path`, before its settings."


def test_run_without_a_model_is_refused(refuse):
    assert refuse("fit") == "`verl-fit` needs `model`."


def test_help_of_an_unknown_class_names_the_closest(refuse):
    said = refuse("fit", "--model.help", "ToyModul")
    assert said == "`model.help`: there is no class `ToyModul` to choose here. Did you mean `ToyModule`?"


def test_users_code_that_fails_is_told_with_its_place(refuse, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "mine.py").write_text("\nraise RuntimeError('boom')\n")

    said = refuse("--config", "base.yaml", "--trainer.callbacks+=mine.Callback")

    assert said.startswith(f"`trainer.callbacks`: boom (RuntimeError in `{folder / 'mine.py'}`, line 2)")


def test_suggestion_ignores_the_group_that_both_share():
    """Else `model.advantage.std` would pass for a misspelt `model.advantage.lam`."""
    assert did_you_mean("model.advantage.lam", ["model.advantage.std"]) == ""
    assert did_you_mean("model.advantage.sdt", ["model.advantage.std"]) == " Did you mean `model.advantage.std`?"


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("config.json", "is a Hugging Face folder, which can't resume a run. Start from it: `model.actor.path`."),
        ("adapter_config.json", "is a PEFT folder, which can't resume a run. Start from it: `model.actor.lora.adapter"),
        ("checkpoints/last.ckpt", "is not a checkpoint. Did you mean `saved/checkpoints/last.ckpt`?"),
        ("config.yaml", "is not a checkpoint. Give its file or folder, or `last`."),
    ],
)
def test_a_folder_that_cannot_resume_is_told_apart(refuse, folder, file, sentence):
    path = folder / "saved" / file
    path.parent.mkdir(parents=True)
    path.touch()

    said = refuse("--config", "base.yaml", "--ckpt_path", "saved")

    assert said.startswith(f"`--ckpt_path saved` {sentence}")


def test_a_folder_without_its_settings_is_named_before_models_are_built(refuse, folder):
    (folder / "runs").mkdir()
    torch.save({"state_dict": {}, "global_step": 3}, folder / "runs" / "step=3.ckpt")
    (folder / "runs" / "last.ckpt").mkdir()
    (folder / "runs" / "last.ckpt" / "__0_0.distcp").touch()

    said = refuse("--config", "base.yaml", "--ckpt_path", "runs/last.ckpt")

    expected = "`runs/last.ckpt/meta.pt` is missing. The newest whole checkpoint beside it is `runs/step=3.ckpt`:"
    assert said.startswith(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_a_file_for_gpus_says_what_to_do_without_one(parse):
    with pytest.raises(MisconfigurationException, match="torch finds none .* `--trainer.accelerator cpu"):
        parse("--trainer.accelerator", "gpu")


def test_failure_is_read_from_the_innermost_level():
    message = (
        'Parser key "model":\n  Does not validate against any of the Union subtypes\n  Errors:\n'
        "    - Problem with given class_path 'a.B':\n        Parser key \"c.d\":\n"
        "          Expected a <class 'float'>. Got value: abc\n    - Expected a <class 'NoneType'>\n"
    )
    failure = read_failure(message)
    assert (failure.key, failure.class_path, failure.expected, failure.got) == ("model.c.d", "a.B", ("float",), "abc")
