"""The tutorial, from CSV to an answer: every step of it, with few steps of training."""

from __future__ import annotations

import csv
import re
import runpy
import shlex
from pathlib import Path

import pytest

from verl_lightning.cli.lightning_cli import CLI

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
SHORT = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--trainer.limit_val_batches", "1"]
SIZES = ["--data.prompts_per_step", "4", "--data.val_batch_size", "4", "--model.update.mini_batch_size", "4"]


def commands(program: str) -> list[list[str]]:
    """The page's commands of a program, in their order."""
    return [shlex.split(line)[1:] for line in re.findall(rf"^\$ ({program} .*)$", PAGE, re.MULTILINE)]


def test_the_page_shows_the_reward_that_is_used():
    assert (ROOT / "examples/tutorial/reward.py").read_text().partition("annotations\n\n")[2].strip() in PAGE


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning has a word for runs as short as these
def test_every_step_leads_to_the_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ((script, *words),) = commands("python")
    monkeypatch.setattr("sys.argv", [script, *words])
    runpy.run_path(script, run_name="__main__")
    for name in ("train", "val"):
        with Path(f"runs/tutorial/{name}.csv").open() as file:
            rows = list(csv.reader(file))
        with Path(f"runs/tutorial/{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows[:65])
    sft, grpo, validate = commands("verl-fit")[0], commands("verl-fit")[1], commands("verl-fit")[2]
    CLI(["fit", *sft, *SHORT, "--trainer.max_steps", "2", "--data.batch_size", "4"])
    CLI(["fit", *grpo, *SHORT, *SIZES, "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"])
    CLI([*validate, *SHORT, *SIZES])
    (code,) = re.findall(r"```python\nfrom transformers.*?```", PAGE, re.DOTALL)
    capsys.readouterr()

    exec(code.removeprefix("```python\n").removesuffix("```"), {})

    assert capsys.readouterr().out.endswith("\n")
    assert Path("runs/tutorial-grpo/report.html").is_file()
    assert Path("runs/tutorial-grpo/samples/index.html").is_file()
