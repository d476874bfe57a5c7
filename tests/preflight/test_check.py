"""What is told before Lightning is imported, and what is not, since only the real parser or the run can know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.toy import ParsedCLI
from tests.runs import make_settings
from verl_lightning.cli import normalize_arguments
from verl_lightning.cli.preflight import check_settings
from verl_lightning.needs import has_certainly_no_gpu


@pytest.fixture(autouse=True)
def folder(tmp_path, tiny_folder, prompt_file, monkeypatch):
    """The working directory, with a configuration that runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = make_settings(tiny_folder, prompt_file, max_steps=1, logger=False)
    Path("base.yaml").write_text(yaml.safe_dump(settings))
    Path("lora.yaml").write_text("rank: sixteen")
    Path("sets.yaml").write_text("data: {init_args: {val_sets: {easy: {files: no.jsonl}}}}")
    Path("judge.py").write_text("def reward(response): return 1.0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # else it depends on the network what a hub name is told
    return tmp_path


def refusal(*words: str) -> str:
    """What is said of ``verl-fit --config base.yaml ...``."""
    with pytest.raises(ValueError, match=".") as failure:
        check_settings(normalize_arguments(["--config", "base.yaml", *words]))
    return str(failure.value)


KEYS = [
    (
        "--model.update.mini_batch_sise 2",
        "`model.update.mini_batch_sise` is not a setting of `PPOModule`. Did you mean",
    ),
    ("--trainer.max_step 3", "`trainer.max_step` is not a setting of `verl-fit`. Did you mean `trainer.max_steps`?"),
    ("--modle PPOModule", "`modle` is not a setting of `verl-fit`. Did you mean `model`?"),
    ("--actor.path x", "`actor.path` is not a setting of `verl-fit`. Did you mean `model.actor.path`?"),
    ("--model.lora_rank 3", "`model.lora_rank` is not a setting of `PPOModule`."),
    (
        "--model.actor.lr 1e-5",
        "`model.actor.lr` is not a setting of `ModelConfig`. Did you mean `model.actor.optim.lr`?",
    ),
    ("--model.actor.lora {rnk: 2}", "`model.actor.lora.rnk` is not a setting of `LoraConfig`. Did you mean"),
    ("--model.actor.lora.init_args.rnk 2", "`model.actor.lora.rnk` is not a setting of `LoraConfig`."),
    (
        "--rollout.temprature 3",
        "`rollout.temprature` is not a setting of `HFRollout`. Did you mean `rollout.temp",
    ),
    ("--fsdp.compil true", "`fsdp.compil` is not a setting of `verl-fit`. Did you mean `fsdp.compile`?"),
    ("--model.advantage grpo", "`model.advantage`: there is no class `grpo` to choose here. Did you mean `GRPO`?"),
    ("--rollout vllm", "`rollout`: there is no class `vllm` to choose here. Did you mean `VLLMRollout`?"),
    ("--trainer.callbacks+=EarlyStoping", "`trainer.callbacks`: there is no class `EarlyStoping` to choose here. Did"),
    ("--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr=x", "`trainer.callbacks.monitr` is not a setting"),
    ("--trainer.callbacks+=nowhere.Callback", "`trainer.callbacks`: No module named 'nowhere'"),
    (
        "--model.kl 0.01",
        "`model.kl` is a group of settings, got 0.01. Set one of them, such as `--model.kl.coef 0.01`.",
    ),
    (
        "--model.actor.lora 16",
        "`model.actor.lora` is a group of settings, got 16. Set one of them, such as `--model.act",
    ),
    ("--model.actor.optim.lr abc", "`model.actor.optim.lr`: expected float, got 'abc'."),
    ("--trainer.max_epochs x", "`trainer.max_epochs`: expected int or null, got 'x'."),
    ("--data.overlong Error", "`data.overlong`: expected one of 'error', 'drop', 'truncate', got 'Error'."),
    ("trainer.max_steps=3", "settings begin with two dashes: `--trainer.max_steps 3` in the place of `trainer.max_ste"),
    ("--print_config +trainer.max_steps=3", "settings begin with two dashes: `--trainer.max_steps 3` in the place of"),
    ("validate", "the subcommand comes first: `verl-fit validate ...`."),
    ("--strategy dpp", "`trainer.strategy` has no choice 'dpp'. Did you mean `ddp`?"),
    (
        "--strategy deepspeed",
        "`trainer.strategy: deepspeed` is Lightning's own, under which `PPOModule` can't train its",
    ),
    ("--fsdp.checkpoint_every 2", "`fsdp.checkpoint_every` is an option of each model since version 0.1: set"),
    ("--model.kl abc", "`model.kl` is a group of settings, got abc. Set one of them, such as `--model.kl."),
    ("--model.update null", "`model.update` is a group of settings, got null. Leave it out, or set one of them below"),
    ("--trainer.val_check_interval 0", "`trainer.val_check_interval` must be a whole number of batches, at least 1"),
    ("--trainer.accelerator tpu", "`trainer.accelerator: tpu`: models are trained on GPUs and CPUs. Choose `gpu`"),
    ("--trainer.precision bf17", "`trainer.precision`: expected one of '64', '32', '16'"),
    (
        "--model.policy_loss.class_path verl_lightning.losses.PPOClip",
        "`model.policy_loss`: `verl_lightning` has no `losses`. Say `PPOClip`.",
    ),
    (
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpont",
        "`trainer.callbacks`: `lightning.pytorch.callbacks` has no `ModelCheckpont`. Did you mean `ModelCheckpoint`?",
    ),
    ("--model.actor.lora lora.yaml", "`model.actor.lora.rank`: expected int, got 'sixteen'."),
    ("--trainer.accelerator gpuu", "`trainer.accelerator` has no choice 'gpuu'. Did you mean `gpu`?"),
    ("--data null", "`PPOModule` has no `data` to learn from. Choose it, such as `--data PromptDataModule"),
]


@pytest.mark.parametrize(("words", "sentence"), KEYS)
def test_a_wrong_setting_is_told_from_sources_alone(words, sentence):
    assert refusal(*words.split(maxsplit=1 if "{" in words else -1)).startswith(sentence)


@pytest.mark.slow
def test_what_is_refused_early_is_refused_by_the_real_parser_too(capsys):
    for words, _ in KEYS:
        with pytest.raises(SystemExit) as stop:
            ParsedCLI(["--config", "base.yaml", *words.split(maxsplit=1 if "{" in words else -1)])
        assert stop.value.code == 2, words
        assert len(capsys.readouterr().err.splitlines()) == 1, words


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "trainer: {max_step: 3}",
            "`trainer.max_step` is not a setting of `verl-fit`. Did you mean `trainer.max_steps",
        ),
        ("model: {init_args: {update: {epoch: 1}}}", "`model.update.epoch` is not a setting of `PPOModule`."),
        ("trainer: {callbacks: [{class_path: HFCheckpoint, init_args: {montor: x}}]}", "`trainer.callbacks.montor` is"),
        ("trainer: {max_steps: 1, max_steps: 2}", "line 1 sets `max_steps` a second time."),
        ("trainer:\n  max_steps: 3\n max_epochs: 2\n", "line 3 is not valid YAML: did not find expected key."),
        ("", "expected settings, such as `trainer: {max_steps: 10}`, got nothing."),
        (
            "trainer:\nfsdp: {}",
            "`trainer` is a group of settings, got null. Leave it out, or set one of them below it.",
        ),
        ("fsdp: [1]", "`fsdp` is a group of settings, got [1]. Set one of them, such as `--fsdp."),
        ("just words", "expected settings, such as `trainer: {max_steps: 10}`, got something else."),
        ("a: \x07", "unacceptable character"),
    ],
)
def test_a_wrong_file_is_told_by_its_name(text, sentence):
    Path("wrong.yaml").write_text(text)
    assert refusal("--config", "wrong.yaml").startswith(f"in `wrong.yaml`: {sentence}")


MISSING = [
    ("--data.train_files no.jsonl", "`data.train_files`: The data file `no.jsonl` does not exist"),
    ("--data.val_files [no.jsonl,base.yaml]", "`data.val_files`: The data file `no.jsonl` does not exist"),
    (
        "--model.actor.path /no/model",
        "`model.actor`: no model could be loaded from `path: /no/model` (there is no such",
    ),
    (
        "--model.actor.path runs/no/model",
        "`model.actor`: no model could be loaded from `path: runs/no/model` (there is",
    ),
    (
        "--model.actor.path .",
        "`model.actor`: no model could be loaded from `path: .` (the folder has no `config.json`)",
    ),
    ("--model.critic.model.path /no/model", "`model.critic.model`: no model could be loaded from `path: /no/model`"),
    ("--model.actor.lora.adapter_path /tmp", "`model.actor`: `lora.adapter_path: /tmp` is no PEFT adapter folder"),
    (
        "--model.reward.function no.py:reward",
        "The reward `function: no.py:reward` does not import: FileNotFound",
    ),
    (
        "--model.reward.function nowhere.reward",
        "The reward `function: nowhere.reward` does not import: ModuleNotFound",
    ),
    (
        "--model.reward.function judge.py:reword",
        "The reward `function: judge.py:reword` does not import: `judge.py` has no `reword`. Did you mean `reward`?",
    ),
    ("--model.teacher.path /no/model", "`model.teacher`: no model could be loaded from `path: /no/model`"),
    ("--model.reward.model.path /no/model", "`model.reward.model`: no model could be loaded from `path: /no/model`"),
    ("--config sets.yaml", "`data.val_sets.easy`: The data file `no.jsonl` does not exist"),
    ("--data.train_files base.yaml", "`data.train_files`: The data file `base.yaml` should end in `.jsonl`"),
    (
        "--fsdp.compile true",
        "`fsdp.compile` is a setting of the strategy `fsdp`, but `trainer.strategy` is `auto`. Add",
    ),
    ("--ckpt_path last", "`--ckpt_path last`: no run in `runs` has a `last` checkpoint, nor any other. Train with"),
    ("--ckpt_path last --name mine", "`--ckpt_path last`: no run in `runs/mine` has a `last` checkpoint, nor any"),
    ("--model.actor.path base.yaml", "`model.actor`: no model could be loaded from `path: base.yaml` (it is a file)."),
    ("--model.reward.function gsm9k", "The reward `function: gsm9k` is unknown. Did you mean `gsm8k`?"),
    ("--trainer.default_root_dir base.yaml/x", "`trainer.default_root_dir: base.yaml/x` can't be made a folder: `/"),
    ("--seed_everything -3", "`seed_everything` must lie between 0 and 4294967295, got -3."),
    ("--trainer.limit_train_batches 0", "`trainer.limit_train_batches` is 0, so there is nothing to train on."),
    ("--model.actor.path=", "`model.actor`: no model could be loaded from `path: ` (it is empty)."),
    ("--ckpt_path registry:org/model", "`--ckpt_path registry:org/model`, of Lightning's model registry, needs the pa"),
    ("--ckpt_path registry_of_mine.ckpt", "`--ckpt_path registry_of_mine.ckpt` does not exist."),
    ("--ckpt_path no.ckpt", "`--ckpt_path no.ckpt` does not exist. Give a checkpoint's file or folder, or `last`."),
    ("--rollout VLLMRollout", "`VLLMRollout` needs vLLM, which can't be imported (No module named 'vllm'). Install it"),
    ("--trainer.logger MLFlowLogger", "`trainer.logger: MLFlowLogger` needs the package `mlflow`, which is not insta"),
    ("--trainer.precision transformer-engine", "`trainer.precision: transformer-engine` needs the package `transfor"),
    (
        "--model.actor.attn_implementation flash_attention_2",
        "`model.actor`: `attn_implementation: flash_attention_2` needs the package `flash_attn`, which is not inst",
    ),
    (
        "--strategy megatron",
        "`trainer.strategy: megatron` needs `megatron-core` 0.19.x on Python 3.12, found none. Inst",
    ),
]


@pytest.fixture
def without_packages(monkeypatch):
    """An environment without optional packages, wherever the tests run."""
    monkeypatch.setattr("verl_lightning.needs.has_package", lambda name: False)
    monkeypatch.setattr("verl_lightning.needs.installed_version", lambda name: "none")


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize(("words", "sentence"), MISSING)
def test_what_is_missing_here_is_told_early(words, sentence):
    assert refusal(*words.split()).startswith(sentence)


@pytest.mark.skipif(not has_certainly_no_gpu(), reason="there may be GPUs")
def test_a_file_for_gpus_says_what_to_do_without_one():
    assert refusal("--trainer.accelerator", "gpu").startswith("`trainer.accelerator` is `gpu`, but torch finds none")


def test_an_evaluation_needs_its_own_files_only():
    Path("ok.jsonl").touch()
    words = ["--config", "base.yaml", "--data.train_files", "no.jsonl"]
    check_settings(normalize_arguments(["validate", *words, "--data.val_files", "ok.jsonl"]))
    check_settings(normalize_arguments(["validate", *words, "--data.val_sets.easy.files", "ok.jsonl"]))
    with pytest.raises(ValueError, match=r"`data.val_files` is empty, so there is nothing to read. Name a file."):
        check_settings(normalize_arguments(["validate", *words]))
    with pytest.raises(ValueError, match=r"`--ckpt_path auto` begins anew .* but `validate` needs one: `last`."):
        check_settings(normalize_arguments(["validate", *words, "--ckpt_path", "auto"]))
    with pytest.raises(ValueError, match=r"`data.test_files`: The data file `no.jsonl` does not exist"):
        check_settings(normalize_arguments(["test", *words, "--data.test_files", "no.jsonl"]))


def test_a_model_of_an_unreachable_hub_is_refused_unless_the_cache_has_it(monkeypatch, tmp_path):
    def no_network(host, port):
        raise OSError

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    assert "the hub `127.0.0.1` can't be reached" in refusal("--model.actor.path", "org/model")
    (tmp_path / "models--org--model").mkdir()
    check_settings(normalize_arguments(["--config", "base.yaml", "--model.actor.path", "org/model"]))


ALLOWED = [
    "--model mine.Module --model.anything 3 --trainer.strategy their_own --data mine.Data --data.x 1",
    "--model.advantage mine.Advantage --model.advantage.x 1",
    "--trainer.callbacks+=mine.Callback --trainer.callbacks.x=1 --trainer.callbacks+=OfMine",
    "--model.actor.path Qwen/Qwen2.5-0.5B-Instruct",
    "--model.actor.path no-such-model",
    "--model.reward.function json.reward",
    "--model.actor.gradient_checkpointing true",
    "--model.kl kl.yaml",
    "--model.kl {coef: 0.1}",
    "--model.reward.arguments.anything 3",
    "--trainer.callbacks+=EMAWeightAveraging --trainer.callbacks.decay=0.9",
    "--trainer.logger true",
    "--trainer.devices [0,1] --trainer.precision 32",
    "--trainer.limit_val_batches 0.5 --trainer.limit_train_batches 3",
    "--trainer.val_check_interval 00:01:00:00 --trainer.num_sanity_val_steps -1 --trainer.limit_test_batches 0",
    "--trainer.check_val_every_n_epoch null --trainer.val_check_interval 7 --trainer.max_epochs -1",
    "--trainer.profiler simple --trainer.strategy auto",
    "--trainer.max_time 00:12:00:00",
    "--seed_everything true",
    "--rollout null",
    "--ckpt_path last --trainer.logger CSVLogger",
    "--ckpt_path last --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpath=mine",
    "--ckpt_path last --config later.yaml --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=x",
    "--ddp.timeout 0:30:00",
    "--fsdp.compile true --config later.yaml --strategy fsdp",
    "--model.reward.function dynamic.py:made",
    "--model.policy_loss.class_path verl_lightning.algorithms.losses.PPOClip --model.advantage verl_lightning.GRPO",
    "--ckpt_path s3://bucket/last.ckpt",
    "--print_config --data.train_files no.jsonl --strategy megatron",
    "--print_config=skip_null --data.train_files no.jsonl",
    "--model.help PPOModul",
    "--help",
    "--config later.yaml",
]


@pytest.mark.parametrize("words", ALLOWED)
def test_what_may_be_right_goes_on_to_the_real_parser(words):
    Path("mine.py").write_text("")
    Path("dynamic.py").write_text("globals()['ma' + 'de'] = print")
    callbacks = "{class_path: ModelCheckpoint, init_args: {dirpath: mine}}"
    Path("later.yaml").write_text(
        "model: {init_args: {actor: {optim: {lr: 1e-3}}}}\ntrainer: {strategy: ddp, callbacks: " + callbacks + "}\n"
    )
    check_settings(normalize_arguments(["--config", "base.yaml", *words.split(maxsplit=1 if "{" in words else -1)]))


def test_all_that_is_early_is_told_without_torch():
    """Through the command itself, in an interpreter that has imported nothing."""
    cases = [words.split() for words, _ in [*KEYS[:3], *MISSING[:3]]] + [["--config", "no.yaml"]]
    code = (
        "import sys\nfrom verl_lightning.cli import main\n"
        f"for words in {cases}:\n"
        "    try: main(['--config', 'base.yaml', *words])\n"
        "    except SystemExit as stop: assert stop.code == 2, stop.code\n"
        "print(sorted({'torch', 'lightning', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert run.stdout == "[]\n", run.stderr
    assert [line[:17] for line in run.stderr.splitlines()] == ["verl-fit: error: "] * len(cases)
