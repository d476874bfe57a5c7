"""What a shell would make of a run script, as far as migrating needs it."""

from __future__ import annotations

import pytest

from verl_lightning.migrate.reading import read_verl
from verl_lightning.migrate.report import migrate

SFT = """
set -xeuo pipefail
processes=$1
: "${RANK_OF_ADAPTERS:=32}"
LONG=${LONG:-$((1024 * 2))}
longer=$(((LONG + 1024) * 2))
more=()
if [ "${USE_PEFT:-1}" = "1" ]; then
    more+=(
        "model.lora_rank=${RANK_OF_ADAPTERS}"
        "model.lora_alpha=${ALPHA:-16}"
    )
fi
torchrun --standalone --nnodes=2 --nproc_per_node=${processes} -m verl.trainer.sft_trainer \\
    data.train_files=$HOME/data/train.parquet \\
    data.max_length=${LONG} data.max_token_len_per_gpu=${longer} \\
    engine=fsdp engine.ulysses_sequence_parallel_size=2 \\
    model.path="${MODEL:-org/model}" trainer.default_local_dir="$2" \\
    "${more[@]}" "$@"
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "run.sh").write_text(SFT)
    return str(tmp_path / "run.sh")


def test_defaults_sums_and_appended_arrays_are_read(script):
    given = read_verl(script, ["trainer.n_gpus_per_node=4"])
    assert (given["model.lora_rank"], given["model.lora_alpha"], given["model.path"]) == (32, 16, "org/model")
    assert (given["data.max_length"], given["data.max_token_len_per_gpu"]) == (2048, 6144)
    assert (given["trainer.nnodes"], given["trainer.n_gpus_per_node"]) == (2, 4)


def test_the_home_folder_is_this_users(script, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    settings = migrate(read_verl(script, [])).settings
    assert settings["data"]["init_args"]["train_files"] == "/home/me/data/train.parquet"


def test_what_only_the_shell_knows_must_be_given(script):
    """The script's arguments are no part of it; verl's own values stand until then."""
    migration = migrate(read_verl(script, []))
    said = {line.key: line.words for line in migration.lines if line.fate == "not supported"}
    assert said.keys() == {"trainer.n_gpus_per_node", "trainer.default_local_dir"}
    assert "give `trainer.n_gpus_per_node=VALUE` behind the script" in said["trainer.n_gpus_per_node"]
    assert migration.settings["trainer"]["devices"] == 1


def test_ranks_that_share_a_sequence_see_the_same_chats(script):
    """8 processes in pairs: 256 chats of a step are 64 on each pair."""
    settings = migrate(read_verl(script, ["trainer.n_gpus_per_node=4"])).settings
    assert settings["trainer"]["strategy"] == "fsdp"
    assert settings["fsdp"]["sequence_parallel_size"] == 2
    assert settings["data"]["init_args"]["batch_size"] == 64


@pytest.mark.parametrize("folder", ["config", "$PROJECT_DIR/recipes/config"])
def test_the_primary_file_of_a_script_is_composed(tmp_path, folder):
    """It lies below the script's folder, whatever variable leads there."""
    config = tmp_path / folder.rpartition("$PROJECT_DIR/")[2]
    config.mkdir(parents=True)
    (config / "mine.yaml").write_text("data: {train_batch_size: 8}\nalgorithm: {gamma: 0.5}")
    command = f"python -m verl.trainer.main_ppo --config-path={folder} --config-name='mine' algorithm.gamma=0.9"
    (tmp_path / "run.sh").write_text(command)
    given = read_verl(str(tmp_path / "run.sh"), [])
    assert given == {"data.train_batch_size": 8, "algorithm.gamma": 0.9}


def test_a_primary_file_that_is_not_there_is_told_of(tmp_path):
    (tmp_path / "run.sh").write_text("python -m verl.trainer.main_ppo --config-name=mine algorithm.gamma=0.9")
    (line,) = [
        line for line in migrate(read_verl(str(tmp_path / "run.sh"), [])).lines if line.key.startswith("defaults")
    ]
    assert (line.value, line.fate) == ("mine", "not supported")
