"""What becomes of TRL's options; the fixtures state facts of TRL 1.16's `GRPOConfig` and `SFTConfig`."""

from __future__ import annotations

import math

import pytest

from tests.cli.toy import ParsedCLI
from verl_lightning.cli import main
from verl_lightning.migrate.trl import read_trl
from verl_lightning.migrate.trl_settings import migrate_trl

GRPO = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [think_format_reward, my.rewards.brief]
reward_weights: [1.0, 0.5]
learning_rate: 1e-5
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
steps_per_generation: 4
num_generations: 4
num_iterations: 2
max_completion_length: 256
max_steps: 100
beta: 0.04
epsilon_high: 0.28
use_vllm: true
bf16: true
logging_steps: 1
top_entropy_quantile: 0.2
never_heard_of: 1
"""


def migrated(tmp_path, text, *words, name="trl.yaml"):
    (tmp_path / name).write_text(text)
    return migrate_trl(read_trl(str(tmp_path / name), words))


def test_grpo_batches_losses_and_rewards(tmp_path):
    """8 x 2 x 4 responses an optimizer step, in groups of 4: 16 prompts; twice as many an iteration, learnt twice."""
    migration = migrated(tmp_path, GRPO, "num_processes=4")
    ours, module = migration.settings, migration.settings["model"]["init_args"]
    assert (ours["data"]["init_args"]["prompts_per_step"], module["update"]["mini_batch_size"]) == (32, 16)
    assert (module["update"]["micro_batch_size"], module["update"]["epochs"]) == (8, 2)
    assert ours["trainer"]["max_steps"] == 25  # each iteration has 2 x 2 of TRL's 100 optimizer steps
    assert module["policy_loss"]["class_path"] == "PPOClip"
    assert module["policy_loss"]["init_args"] == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": math.inf}
    assert module["kl"] == {"place": "loss", "coef": 0.04, "estimator": "k3"}
    assert module["corrections"] == [{"class_path": "SequenceMask", "init_args": {"cap": 3.0}}]
    assert module["reward"]["functions"] == [
        {"function": "tag_format", "weight": 1.0},
        {"function": "my.rewards.brief", "weight": 0.5},
    ]
    assert (ours["trainer"]["strategy"], module["actor"]["optim"]["schedule"]) == ("ddp", "linear")
    fates = {line.key: line.fate for line in migration.lines}
    assert fates["logging_steps"] == "not needed"
    assert (fates["top_entropy_quantile"], fates["never_heard_of"]) == ("not supported", "not supported")


@pytest.mark.parametrize(
    ("options", "loss", "aggregation"),
    [
        ("loss_type: cispo\nepsilon_high: 5.0", ("CISPO", {"clip_low": 1.0, "clip_high": 4.0}), "token-mean"),
        (
            "loss_type: grpo\nimportance_sampling_level: sequence\nepsilon: 3e-4",
            ("GSPO", {"clip_low": 3e-4, "clip_high": 3e-4}),
            "seq-mean-token-mean",
        ),
        (
            "loss_type: dr_grpo\ndelta: 4",
            ("PPOClip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 4.0}),
            "seq-mean-token-sum-norm",
        ),
        (
            "loss_type: sapo",
            ("SAPO", {"temperature_positive": 1.0, "temperature_negative": 1.05}),
            "seq-mean-token-mean",
        ),
    ],
)
def test_losses(tmp_path, options, loss, aggregation):
    text = f"model_name_or_path: m\nnum_generations: 8\nreward_funcs: [a.b]\n{options}"
    module = migrated(tmp_path, text).settings["model"]["init_args"]
    assert (module["policy_loss"]["class_path"], module["policy_loss"]["init_args"]) == loss
    assert (module["update"]["aggregation"], module["kl"]) == (aggregation, None)


SCRIPT = """
GPUS=${GPUS:-2}
accelerate launch --config_file fsdp2.yaml --num_processes $GPUS trl/scripts/sft.py \\
    --model_name_or_path "Qwen/Qwen3-0.6B" --dataset_name trl-lib/Capybara \\
    --learning_rate=2e-4 --per_device_train_batch_size 4 --use_peft --lora-r 32 \\
    --lora_target_modules q_proj v_proj --max_length 2048 --report_to none --output_dir $OUT
"""


def test_sft_of_a_script(tmp_path):
    migration = migrated(tmp_path, SCRIPT, name="run.sh")
    ours, actor = migration.settings, migration.settings["model"]["init_args"]["actor"]
    assert ours["model"]["class_path"] == "SFTModule"
    assert actor["lora"] == {"rank": 32, "alpha": 32.0, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert (actor["optim"]["lr"], ours["data"]["init_args"]["max_length"]) == (2e-4, 2048)
    assert (ours["trainer"]["strategy"], ours["trainer"]["devices"]) == ("fsdp", 2)
    assert migration.choices == {
        "`data.train_files: trl-lib/Capybara`: a place-holder for your files": [],
        "`GPUS` is not set: its default `2` is taken": ["num_processes"],
    }
    words = {line.key: line.words for line in migration.lines}
    assert "shell only: give `output_dir=VALUE`" in words["output_dir"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GRPO.replace("num_generations: 4", "num_generations: 7"), "no whole groups of `num_generations: 7`"),
        (GRPO.replace("reward_funcs", "reward_functions"), "`reward_funcs` is not given"),
        (GRPO + "loss_type: mine", "`loss_type: mine` is not known here"),
        ("learning_rate: 1\nnum_generations: 8", "`model_name_or_path` is not given"),
    ],
)
def test_what_can_not_be_translated_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        migrated(tmp_path, text)


def test_the_command_line_accepts_what_was_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trl.yaml").write_text(GRPO)
    (tmp_path / "run.sh").write_text(SCRIPT)
    for name, module in (("trl.yaml", "PPOModule"), ("run.sh", "SFTModule")):
        with pytest.raises(SystemExit) as stop:
            main(["migrate", name, "--output", f"{name}.ours.yaml"])
        assert not stop.value.code
        assert "From TRL" in (tmp_path / f"{name}.ours.report.md").read_text()
        words = ["--config", f"{name}.ours.yaml", "--trainer.accelerator", "cpu"]
        assert type(ParsedCLI(words).model).__name__ == module
