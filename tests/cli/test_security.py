"""What settings and scripts can do, as docs/security.md says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from verl_lightning.migrate.command import main as migrate

SCRIPT = """#!/usr/bin/env bash
MODEL=$(touch executed; echo Qwen/Qwen2.5-0.5B)
touch executed; eval "touch executed"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \\
    data.train_batch_size=64 actor_rollout_ref.model.path=small trainer.experiment_name=`touch executed`
"""


def test_classes_of_a_configuration_are_imported_to_print_it(parse, monkeypatch, capsys):
    source = "open('imported', 'w').close()\nfrom lightning.pytorch.callbacks import Timer\n"
    Path("named_in_settings.py").write_text(source)
    monkeypatch.syspath_prepend(".")

    with pytest.raises(SystemExit):
        parse("--trainer.callbacks+=named_in_settings.Timer", "--print_config")

    assert "named_in_settings.Timer" in capsys.readouterr().out
    assert Path("imported").exists()


def test_scripts_are_read_and_not_run(capsys):
    Path("run.sh").write_text(SCRIPT)

    with contextlib.suppress(SystemExit):  # it may refuse
        migrate(["run.sh"])

    assert not Path("executed").exists()
