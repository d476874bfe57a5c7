"""What a run ends with: exit codes, and the same in its JSON."""

from __future__ import annotations

import json

import pytest

from tests.processes import verl_fit

EARLY = {"monitor": "val/reward", "mode": "max", "stopping_threshold": "-1"}
UNHEALTHY = {"reward.level": "stop", "reward.limit": "9", "reward.patience": "2"}
FAIL = {"moment": "update_actor", "step": "3"}


def flags(callback: str, options: dict[str, str]) -> list[str]:
    return [
        f"--trainer.callbacks+={callback}",
        *[f"--trainer.callbacks.{key}={value}" for key, value in options.items()],
    ]


@pytest.mark.parametrize(
    ("words", "code", "ended_by"),
    [
        (["--trainer.max_steps=2"], 0, "finished"),
        (["--trainer.max_time=00:00:00:00"], 0, None),
        (flags("tests.endings.parts.FailAt", FAIL), 1, "ZeroDivisionError: as planned"),
        (flags("tests.endings.parts.FailAt", FAIL | {"interrupt": "true"}), 130, "KeyboardInterrupt"),
        (["--trainer.max_step=2"], 2, None),
        (flags("EarlyStopping", EARLY), 3, "stopped by EarlyStopping"),
        (flags("HealthMonitor", UNHEALTHY), 4, "stopped by HealthMonitor (reward)"),
        (flags("HealthMonitor", UNHEALTHY | {"reward.patience": "4"}), 4, "stopped by HealthMonitor (reward)"),
        (flags("EarlyStopping", EARLY) + ["--trainer.max_steps=2"], 0, "finished"),
        (flags("tests.endings.parts.SignalAt", FAIL), 75, "preempted (SIGTERM)"),
    ],
)
def test_exit_code_and_file_tell_how_a_run_has_ended(tmp_path, settings_file, words, code, ended_by):
    verl_fit("--config", str(settings_file), *words, folder=tmp_path, code=code)

    [kept] = [json.loads(file.read_text()) for file in tmp_path.rglob("final_validation.json")] or [None]
    assert (kept and kept["ended_by"]) == ended_by
    assert kept is None or kept["exit_code"] == code
