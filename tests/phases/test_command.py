"""`verl-fit` with `phases`: one configuration, one run, one folder."""

from __future__ import annotations

import csv
import json

import pytest
import yaml

from tests.processes import run_verl_fit, start, verl_fit
from tests.resume.kill_points import Kill
from tests.runs import make_settings, run_folders

SAVES = {"class_path": "ModelCheckpoint", "init_args": {"save_top_k": 0, "save_last": True, "every_n_train_steps": 1}}
STOPS = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "stopping_threshold": 99.0}}


@pytest.fixture(scope="module")
def settings(tiny_folder, prompt_file, chat_file):
    """SFT that a callback stops after its first validation, then two steps of GRPO."""
    grpo = make_settings("phase:sft", prompt_file)
    files = {"train_files": str(chat_file), "val_files": str(chat_file), "batch_size": 4, "max_length": 64}
    checks = {"check_val_every_n_epoch": None, "val_check_interval": 2, "limit_val_batches": 1}
    return {
        "seed_everything": 5,
        "trainer": grpo.pop("trainer") | {"devices": 1},
        "phases": {
            "sft": {
                "trainer": checks | {"max_steps": 6, "callbacks": [SAVES, STOPS]},
                "model": {
                    "class_path": "SFTModule",
                    "init_args": {"actor": {"path": str(tiny_folder), "optim": {"lr": 1e-3}}},
                },
                "data": {"class_path": "ChatDataModule", "init_args": files},
            },
            "grpo": grpo | {"trainer": {"max_steps": 2, "callbacks": [SAVES]}},
        },
    }


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(folder):
    return [(row["step"], row["train/loss"], row["actor/pg_loss"], row["critic/score/mean"]) for row in rows_of(folder)]


@pytest.mark.slow
def test_one_configuration_is_one_run_that_goes_on_where_it_was_killed(settings, tmp_path):
    """By SIGKILL before the first phase has written its model, and within the second one."""
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    verl_fit("--config", "two.yaml", "--name", "whole", folder=tmp_path)
    words = ["--config", "two.yaml", "--name", "killed", "--ckpt_path", "auto"]
    for action in ("[Callback]RunPhase.on_train_end", "[PPOModule]gen"):
        kill = Kill(action=action, nth=1 if "Run" in action else 2)
        with start(run_verl_fit, *words, *kill.words(), folder=tmp_path) as process:
            process.wait(code=-9)
    verl_fit(*words, folder=tmp_path)

    whole, killed = run_folders(tmp_path)
    assert losses(killed) == losses(whole)
    assert [row["step"] for row in rows_of(whole) if row["actor/pg_loss"]] == ["2", "3"]
    done = json.loads((whole / "phases.json").read_text())
    assert [(phase["name"], phase["steps"], phase["ended_by"]) for phase in done] == [
        ("sft", 2, "stopped by EarlyStopping"),
        ("grpo", 2, "finished"),
    ]
    assert (killed / "phases/grpo/model/model.safetensors").read_bytes() == (
        whole / "phases/grpo/model/model.safetensors"
    ).read_bytes()
    assert yaml.safe_load((whole / "config.yaml").read_text())["phases"].keys() == {"sft", "grpo"}
