"""The profiler's slot on the command line, and a run that uses it."""

from __future__ import annotations

import pytest

from tests.resume.settings import write_settings
from tests.runs import run_folders
from verl_lightning.callbacks import ProfilerCallback, RolloutCallback, StepRange
from verl_lightning.cli.lightning_cli import CLI


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], StepRange()),
        (["--profile.steps", "[1, 3]"], [1, 3]),
        (["--profile.steps", "{first: 3, last: null, every: 10}"], StepRange(first=3, last=None, every=10)),
        (["--profile.steps.first", "1"], StepRange(first=1)),
    ],
)
def test_steps_are_a_list_or_a_range(parse, flags, steps):
    cli = parse("--profile", "ProfilerCallback", *flags)

    profiler = next(callback for callback in cli.trainer.callbacks if isinstance(callback, ProfilerCallback))
    assert profiler.steps == steps


def test_the_profiler_runs_before_the_rollout(parse):
    callbacks = parse("--profile", "ProfilerCallback").trainer.callbacks

    kinds = [type(callback) for callback in callbacks if isinstance(callback, ProfilerCallback | RolloutCallback)]
    assert kinds[0] is ProfilerCallback


@pytest.mark.slow
def test_five_steps_and_the_callback_are_enough(folder, tiny_folder, prompt_file, capsys):
    write_settings(folder / "ppo.yaml", model=tiny_folder, prompts=prompt_file)

    CLI(["--config", "ppo.yaml", "--trainer.max_steps=5", "--profile", "ProfilerCallback"])

    out = run_folders(folder)[0] / "profile"
    assert {path.name for path in out.iterdir()} == {"timeline_rank=0.html", "torch_step=2_rank=0.json.gz"}
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("update_critic", "tokens/s", "share", "save_checkpoint"))
