"""A few steps of SFT and PPO of a pretrained model on questions like GSM8K's; minutes, so run by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import load_script
from verl_lightning.cli import find_config
from verl_lightning.cli.lightning_cli import CLI

EXAMPLES = Path(__file__).parents[2] / "examples" / "gsm8k"


@pytest.fixture
def workspace(request, tmp_path, monkeypatch):
    """A folder with the model and 32 questions where the example's files expect them."""
    model = request.config.getoption("--real-model")
    assert model is not None, "name the model's folder: pytest -m real_model --real-model FOLDER"
    monkeypatch.chdir(tmp_path)
    Path("runs/models").mkdir(parents=True)
    Path("runs/models/smollm2").symlink_to(model.resolve())
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(32)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(
        "sys.argv", ["prepare.py", "--out", "runs/gsm8k", "--train", "rows.jsonl", "--test", "rows.jsonl"]
    )
    load_script(EXAMPLES / "prepare.py").main()
    return tmp_path


@pytest.mark.real_model
@pytest.mark.parametrize(("name", "metric"), [("sft", "train/loss"), ("ppo", "actor/grad_norm")])
def test_a_pretrained_model_takes_steps(name, metric, workspace):
    """The shipped configuration and the example's small one over it."""
    cli = CLI(["fit", "--config", str(find_config(name)), "--config", str(EXAMPLES / f"cpu_{name}.yaml")])

    assert cli.trainer.global_step == cli.trainer.max_steps
    assert 0 < float(cli.trainer.callback_metrics[metric]) < float("inf")
