"""The agents of `examples/agents` learn on a CPU to ask a calculator before they answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import Recorder
from tests.tiny import ROOT, load_script
from verl_lightning.cli.lightning_cli import CLI

EXAMPLES = ROOT / "examples" / "agents"
QUIET = "--trainer.enable_progress_bar false --trainer.enable_model_summary false"


class RecordedCLI(CLI):
    """Keeps the metrics of each step."""

    def before_fit(self):
        self.recorder = Recorder()
        self.trainer.callbacks.append(self.recorder)


def learn(seed, num_steps):
    """The steps of the example's reinforcement learning, in the present folder."""
    Path("examples").symlink_to(ROOT / "examples")
    load_script(EXAMPLES / "prepare.py").prepare(Path("runs/agents"), seed=seed)
    words = ["--seed_everything", str(seed), *QUIET.split()]
    RecordedCLI(["fit", "--config", str(EXAMPLES / "sft.yaml"), *words])
    few = ["--trainer.max_steps", str(num_steps), "--trainer.limit_val_batches", "0"]
    return RecordedCLI(["fit", "--config", str(EXAMPLES / "grpo.yaml"), *words, *few]).recorder.steps


def mean(steps, name):
    return sum(step[name] for step in steps) / len(steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "num_steps"), [(0, 25), *(pytest.param(seed, 40, marks=pytest.mark.seeds) for seed in (1, 2))]
)
def test_a_tiny_model_learns_to_ask_a_calculator(seed, num_steps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    steps = learn(seed, num_steps)

    assert steps[0]["env/calculator/called"] < 0.2
    assert mean(steps[-5:], "env/calculator/called") > 0.8
    assert mean(steps[-5:], "env/calculator/reward") > steps[0]["env/calculator/reward"] + 0.5
    assert {step["env/game/episodes"] for step in steps} == {128.0}
