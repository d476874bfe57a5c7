"""What becomes of verl's settings; the fixtures state facts of verl 0.9's keys."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.cli.toy import ParsedCLI
from verl_lightning.cli import main
from verl_lightning.migrate.reading import parse_value, read_verl
from verl_lightning.migrate.report import migrate

SCRIPT = r"""
# a comment with data.train_batch_size=1
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
GPUS=4
DATA=(
    data.train_batch_size=64
    data.max_response_length=1024
)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "${DATA[@]}" \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.layered_summon=True \
    +actor_rollout_ref.rollout.never_heard_of=7 \
    trainer.n_gpus_per_node=$GPUS \
    trainer.save_freq=20 $@
"""


def migrated(tmp_path, text, *overrides, name="run.sh"):
    return migrate(read_verl(str(write(tmp_path, text, name)), overrides))


def fates(migration):
    return {line.key: line.fate for line in migration.lines}


def test_a_run_script_is_read_without_running_it(tmp_path):
    """Arrays, variables, defaults, continued lines and comments are a shell's; overrides that follow win."""
    ours = migrated(tmp_path, SCRIPT, "actor_rollout_ref.rollout.n=6").settings
    actor = ours["model"]["init_args"]["actor"]
    assert actor["path"] == "Qwen/Qwen3-0.6B"
    assert actor["lora"] == {"rank": 32, "alpha": 64.0, "target_modules": "all-linear"}
    assert actor["optim"]["lr"] == 3e-6
    assert ours["data"]["init_args"]["prompts_per_step"] == 64
    assert ours["rollout"]["init_args"]["sampling"]["num_samples"] == 6
    assert ours["rollout"]["init_args"]["val_sampling"]["max_new_tokens"] == 1024
    assert ours["trainer"]["devices"] == 4
    assert ours["model"]["init_args"]["kl"] == {"place": "loss", "coef": 0.001, "estimator": "k3"}


def test_every_key_has_a_line_and_an_unknown_one_is_not_supported(tmp_path):
    """Nothing is dropped silently."""
    given = read_verl(str(write(tmp_path, SCRIPT)), ())
    found = fates(migrate(given))
    assert set(found) == set(given)
    assert found["actor_rollout_ref.rollout.never_heard_of"] == "not supported"
    assert found["actor_rollout_ref.rollout.layered_summon"] == "not needed"
    assert found["actor_rollout_ref.actor.kl_loss_type"] == "translated"


def write(folder, text, name="run.sh"):
    path = folder / name
    path.write_text(text)
    return path


MEGATRON = """
model_engine: megatron
use_legacy_worker_impl: disable
actor_rollout_ref:
  actor:
    strategy: megatron
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, sequence_parallel: true}
    optim: {lr: 1e-6, lr_decay_style: cosine, min_lr: 1e-7}
    policy_loss: {loss_mode: gspo}
    clip_ratio_low: 0.0003
    clip_ratio_high: 0.0004
    ppo_max_token_len_per_gpu: 4096
    use_dynamic_bsz: true
  ref: {megatron: {tensor_model_parallel_size: 4}}
  model: {path: m, lora: {rank: 8, alpha: 16, target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2]}}
  rollout: {name: sglang, n: "${oc.select:algorithm.group,8}"}
algorithm: {adv_estimator: rloo, rollout_correction: {rollout_rs: seq_mean_k1, rollout_rs_threshold: "0.5_2.0"}}
trainer: {total_training_steps: 50, logger: [console]}
global_profiler: {tool: torch_memory, steps: [3, 4]}
"""


def test_megatron_lora_corrections_and_profiler(tmp_path):
    """The structured LoRA keys, the sizes, a schedule that ends with the run, and references with defaults."""
    migration = migrated(tmp_path, MEGATRON, name="verl.yaml")
    ours, module = migration.settings, migration.settings["model"]["init_args"]
    assert (ours["trainer"]["strategy"], ours["megatron"]["tensor_parallel_size"]) == ("megatron", 2)
    assert module["actor"]["lora"] == {"rank": 8, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}
    assert module["actor"]["optim"]["schedule"] == "cosine"
    assert module["actor"]["optim"]["min_lr_ratio"] == pytest.approx(0.1)
    assert module["policy_loss"] == {"class_path": "GSPO", "init_args": {"clip_low": 0.0003, "clip_high": 0.0004}}
    assert module["update"]["max_tokens_per_micro_batch"] == 4096
    assert module["corrections"][0]["init_args"]["high"] == pytest.approx(0.693147, abs=1e-6)  # log 2
    assert ours["profile"]["init_args"] == {"tool": "memory", "steps": [3, 4]}
    assert ours["rollout"]["init_args"]["sampling"]["num_samples"] == 8
    assert "vLLM in its place" in next(line.words for line in migration.lines if line.key.endswith("rollout.name"))


@pytest.mark.parametrize(("recompute", "expected"), [("", "full"), ("recompute_granularity: selective", None)])
def test_one_place_says_what_megatron_recomputes(tmp_path, recompute, expected):
    """Where verl's Megatron recomputes by its own option, the models' says nothing."""
    sizes = "{tensor_model_parallel_size: 2, "
    text = MEGATRON.replace(sizes, f"{sizes}override_transformer_config: {{{recompute}}}, ", 1)
    ours = migrated(tmp_path, text, name="verl.yaml").settings
    assert ours["model"]["init_args"]["actor"].get("activation_checkpointing") == expected
    assert ours["megatron"].get("transformer", {}).get("recompute") == (None if expected else "selective")


def test_ranks_that_share_sequences_share_a_budget(tmp_path):
    """verl's budget is of a GPU: two that share sequences take twice as many tokens."""
    text = MEGATRON.replace("megatron\n", "fsdp\n").replace("strategy: fsdp", "strategy: fsdp2")
    text = text.replace("    optim: {", "    fsdp_config: {ulysses_sequence_parallel_size: 2}\n    optim: {", 1)
    ours = migrated(tmp_path, text, name="verl.yaml").settings
    assert ours["fsdp"]["sequence_parallel_size"] == 2
    assert ours["model"]["init_args"]["update"]["max_tokens_per_micro_batch"] == 8192


def test_a_role_that_differs_from_the_actor_must_be_decided(tmp_path):
    """One strategy serves all models, so another size of the reference is no detail."""
    found = fates(migrated(tmp_path, MEGATRON, name="verl.yaml"))
    assert found["actor_rollout_ref.ref.megatron.tensor_model_parallel_size"] == "not supported"
    assert found["use_legacy_worker_impl"] == "not needed"


def test_sft_batches_are_shared_by_the_ranks(tmp_path):
    """64 chats a step on 2 GPUs of 8 chats a pass: 8 a batch, 4 batches a step."""
    words = ["data.train_batch_size=64", "data.micro_batch_size_per_gpu=8", "data.use_dynamic_bsz=False"]
    given = read_verl(None, ["model.path=m", "optim.lr=1e-5", "trainer.n_gpus_per_node=2", *words])
    ours = migrate(given).settings
    assert ours["model"]["class_path"] == "SFTModule"
    assert (ours["data"]["init_args"]["batch_size"], ours["trainer"]["accumulate_grad_batches"]) == (8, 4)


def test_sft_is_known_by_its_data_and_files_to_compose_are_told(tmp_path):
    """verl's own SFT file names its model in another file."""
    text = "defaults: [{model@model: hf_model}, {data: mine}]\ndata: {max_length: 64}"
    migration = migrated(tmp_path, text, name="verl.yaml")
    assert migration.settings["model"]["class_path"] == "SFTModule"
    expected = {"defaults.model": "not needed", "defaults.data": "not supported", "data.max_length": "translated"}
    assert fates(migration) == expected
    assert "put it beside the one that names it" in migration.lines[1].words


def test_an_engine_shared_by_gpus_is_translated(tmp_path):
    text = "actor_rollout_ref: {rollout: {name: vllm, tensor_model_parallel_size: 2}}"
    assert migrated(tmp_path, text, name="v.yaml").settings["rollout"]["init_args"]["tensor_parallel_size"] == 2


CISPO = """
actor_rollout_ref: {actor: {policy_loss: {loss_mode: cispo}, clip_ratio_low: 10, clip_ratio_high: 0.2}}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
"""


BYPASS = """
actor_rollout_ref: {actor: {policy_loss: {loss_mode: sapo}, loss_agg_mode: token-mean}}
algorithm: {adv_estimator: grpo, rollout_correction: {bypass_mode: true, rollout_is: token, rollout_rs: seq_mean_k1}}
reward: {reward_manager: {name: dapo}, reward_kwargs: {overlong_buffer_cfg: {enable: true, len: 64}, max_resp_len: 512}}
"""


def test_bypass_mode_leaves_nothing_to_correct(tmp_path):
    """We refuse corrections of the engine's own log-probs; verl weighs nothing there either, but it rejects."""
    migration = migrated(tmp_path, BYPASS, name="verl.yaml")
    module, found = migration.settings["model"]["init_args"], fates(migration)
    assert "corrections" not in module
    assert module["update"]["old_log_probs"] == "engine"
    assert found["algorithm.rollout_correction.rollout_is"] == "not needed"
    assert found["algorithm.rollout_correction.rollout_rs"] == "not supported"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (
            "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
            {"overlong_buffer": 64, "overlong_penalty": 0.5},
        ),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=False", None),
    ],
)
def test_what_long_responses_cost_is_translated(tmp_path, word, expected):
    migration = migrated(tmp_path, BYPASS, word, name="verl.yaml")
    assert migration.settings["model"]["init_args"].get("shaping") == expected
    assert fates(migration)["reward.reward_manager.name"] == "not needed"


@pytest.mark.parametrize("older", ["reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"])
def test_older_keys_of_rewards_are_no_reward_models(older):
    words = [f"{older}.enable=True", f"{older}.len=64", "reward_model.reward_manager=prime", "data.max_prompt_length=8"]
    migration = migrate(read_verl(None, words))
    assert migration.settings["model"]["init_args"]["shaping"] == {"overlong_buffer": 64}
    assert fates(migration)["reward_model.reward_manager"] == "not supported"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("{rollout_is: token, rollout_is_threshold: 2.0}", [("TruncatedImportanceSampling", "token", 2.0)]),
        ("{rollout_is: token, rollout_is_threshold: 0.5_5.0}", [("IcePop", 0.5, 5.0)]),
        ("{rollout_is: sequence, rollout_is_threshold: 0.5_5.0}", None),
        # verl's k1 is the log-ratio of engine over trainer, ours that of trainer over engine
        ("{rollout_rs: token_k1, rollout_rs_threshold: 0.5_4.0}", [("Rejection", "k1", "token", -1.386294, 0.693147)]),
        (
            "{rollout_rs: 'seq_mean_k1,seq_max_k3', rollout_rs_threshold: '2.0,0.1'}",
            [
                ("Rejection", "k1", "sequence-mean", -0.693147, 0.693147),
                ("Rejection", "k3", "sequence-max", -1e-6, 0.1),
            ],
        ),
        ("{rollout_rs: 'seq_mean_k1,never_heard_of', rollout_rs_threshold: 2.0}", None),
    ],
)
def test_corrections(tmp_path, options, expected):
    text = f"algorithm: {{adv_estimator: grpo, rollout_correction: {options}}}"
    corrections = migrated(tmp_path, text, name="verl.yaml").settings["model"]["init_args"].get("corrections")
    found = corrections and [
        (each["class_path"], *(round(v, 6) if isinstance(v, float) else v for v in each["init_args"].values()))
        for each in corrections
    ]
    assert found == expected


def test_a_loss_that_verl_averages_over_sequences_is_so_here(tmp_path):
    """verl's `sapo` does not read `loss_agg_mode`."""
    migration = migrated(tmp_path, BYPASS, name="verl.yaml")
    assert migration.settings["model"]["init_args"]["update"]["aggregation"] == "seq-mean-token-mean"
    assert "always so" in next(line.words for line in migration.lines if line.key.endswith("loss_agg_mode"))


def test_dppo_reads_both_bounds_and_the_cap():
    words = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl"]
    given = [*words, "actor_rollout_ref.actor.clip_ratio_low=0.1", "actor_rollout_ref.actor.clip_ratio_c=20"]
    loss = migrate(read_verl(None, given)).settings["model"]["init_args"]["policy_loss"]
    assert loss == {"class_path": "DPPOKL", "init_args": {"bound_low": 0.1, "bound_high": 0.2, "max_ratio": 20}}


ACCEPTED = [("run.sh", SCRIPT), ("verl.yaml", MEGATRON), ("cispo.yaml", CISPO), ("bypass.yaml", BYPASS)]


@pytest.mark.parametrize(("name", "text"), ACCEPTED)
def test_the_command_line_accepts_what_was_written(tmp_path, monkeypatch, capsys, name, text):
    """The written file is parsed by `verl-fit`, and all of its classes are built."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, text, name)
    assert exit_code(["migrate", name, "--output", "ours.yaml"]) == 0
    assert "keys:" in capsys.readouterr().out
    assert type(ParsedCLI(["--config", "ours.yaml", "--trainer.accelerator", "cpu"]).model).__name__ == "PPOModule"


def exit_code(words):
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code or 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.yaml"], "neither a file nor an override"),
        (["trainer.nnodes=1", "algorithm.gamma=x"], "`algorithm.gamma` must be a number, got 'x'"),
        (["trainer.nnodes=1", "nonsense"], "expected an override of verl's"),
        (
            ["foreign.yaml"],
            "`foreign.yaml` is no configuration of verl's: 2 of 2 keys are not verl's (`model.class_path`",
        ),
        (["setup.sh"], "`setup.sh` has no settings of verl's or TRL's: it starts no trainer"),
        (["evaluate.sh"], "`evaluate.sh` has no settings of verl's or TRL's: it starts no trainer"),
    ],
)
def test_mistakes_say_what_to_do(tmp_path, monkeypatch, capsys, words, message):
    """One sentence, no traceback."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "model: {class_path: LitModel, init_args: {width: 3}}", "foreign.yaml")
    write(tmp_path, "pip install verl\nexit 0\npython -m verl.trainer.main_ppo trainer.nnodes=2", "setup.sh")
    write(tmp_path, "python -m verl.trainer.main_eval data.path=x trainer.nnodes=2", "evaluate.sh")
    assert exit_code(["migrate", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("migrated*"))


CHOICES = """
STRATEGY=${STRATEGY:-fsdp2}
case $STRATEGY in fsdp2) lr=1e-6 ;; *) lr=2e-6 ;; esac
if [ -f /.dockerenv ]; then tp=4; else tp=1; fi
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr=$lr \\
    actor_rollout_ref.actor.strategy=$STRATEGY actor_rollout_ref.rollout.tensor_model_parallel_size=$tp
"""


def test_what_a_shell_decides_is_told_with_its_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, CHOICES)
    assert exit_code(["migrate", "run.sh"]) == 0
    report = (tmp_path / "migrated.report.md").read_text()
    assert (
        "| `STRATEGY` is not set: its default `fsdp2` is taken | `actor_rollout_ref.actor.optim.lr`, `actor_" in report
    )
    assert "| of `case $STRATEGY`, the branch `fsdp2` is taken | `actor_rollout_ref.actor.optim.lr` |" in report
    assert (
        "| a shell decides `if [ -f /.dockerenv ]`: it is taken that it does not hold | `actor_rollout_ref.rol"
        in report
    )
    assert "3 things that a shell decides were taken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "is_foreign"),
    [("recipe.prime.main_prime", True), ("my_own.main", True), ("recipe.dapo.main_dapo", False),
     ("verl.experimental.fully_async_policy.fully_async_main", False), ("$ENTRY", False)],
)  # fmt: skip
def test_a_trainer_that_is_not_verls_own_is_told_of(tmp_path, monkeypatch, capsys, module, is_foreign):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, CHOICES.replace("verl.trainer.main_ppo", module))
    assert exit_code(["migrate", "run.sh"]) == 0
    told = f"taken: verl's own trainer, in the place of `{module}`" in capsys.readouterr().out
    assert told == is_foreign
    assert (
        f"| verl's own trainer, in the place of `{module}`" in (tmp_path / "migrated.report.md").read_text()
    ) == told


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        ("actor_rollout_ref.actor.checkpoint.async_save=True", "fsdp.async_save", True),
        ("actor_rollout_ref.model.lora.type=canonical_lora", "model.init_args.actor.lora.rank", 8),
        (
            "actor_rollout_ref.model.lora.target_modules=[linear_q,linear_fc2]",
            "model.init_args.actor.lora.target_modules",
            ["q_proj", "down_proj"],
        ),
    ],
)
def test_what_exists_here_is_translated(word, key, expected):
    given = read_verl(None, ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora.rank=8", word])
    migration = migrate(given)
    value = migration.settings
    for part in key.split("."):
        value = value[part]
    assert value == expected
    assert fates(migration)[word.partition("=")[0]] == "translated"


def test_conversations_say_how_they_are_sampled_here():
    group = "actor_rollout_ref.rollout.multi_turn"
    lines = migrate(read_verl(None, [f"{group}.enable=True", f"{group}.max_assistant_turns=5"])).lines
    assert "`--rollout.environment` (docs/agents.md) and `--rollout.episodes.max_turns 5`" in lines[0].words


@pytest.mark.parametrize(
    ("text", "value"),
    [("[a,{b:1,c:'x,y'}]", ["a", {"b": 1, "c": "x,y"}]), ("{a:[1,2]}", {"a": [1, 2]}), ("'[0.9,0.95]'", "[0.9,0.95]")],
)
def test_values_are_read_as_hydra_does(text, value):
    assert parse_value(text) == value


@pytest.mark.oracle
def test_every_reference_config_of_the_published_package_is_accepted(tmp_path, monkeypatch, capsys):
    """Needs verl on the path, unpacked or installed without its dependencies; nothing of it is imported."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("put the unpacked package of verl on PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    folder = Path(spec.origin).parent / "trainer" / "config"
    files = [*sorted(folder.glob("_generated_ppo*_trainer.yaml")), folder / "sft_trainer_engine.yaml"]
    assert len(files) > 2
    for file in files:
        given = read_verl(str(file), ())
        lines = migrate(given).lines
        assert [line.key for line in lines] == list(given)
        assert not [line.key for line in lines if line.words == "this key is not known"]
        assert exit_code(["migrate", str(file), "--output", f"{file.stem}.yaml"]) == 0
        assert exit_code(["--config", f"{file.stem}.yaml", "--print_config"]) == 0
