"""Every recipe runs, and the classical ones learn the quick start's task, as GRPO does by `make run`."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tests.runs import Recorder
from tests.tiny import quickstart
from verl_lightning.cli.lightning_cli import CLI

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path.stem for path in (EXAMPLES / "recipes").glob("*.yaml"))
HALF = ["--data.prompts_per_step", "32", "--model.update.mini_batch_size", "8"]  # of the quick start's batches
LEARNERS = dict.fromkeys(("ppo", "dr_grpo", "rloo", "reinforce_plus_plus"), (16, HALF)) | {"remax": (24, [])}


@pytest.fixture(scope="session")
def warm_folder(tmp_path_factory):
    """The quick start after its SFT, in a folder to run verl-fit from."""
    folder = tmp_path_factory.mktemp("recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", ["prepare.py"])
        quickstart.main()
        CLI(["fit", "--config", str(EXAMPLES / "quickstart" / "sft.yaml")])
    return folder


def run_recipe(name: str, folder: Path, *flags: str, patch: pytest.MonkeyPatch) -> Recorder:
    """The metrics of a recipe over the quick start's GRPO."""
    patch.chdir(folder)
    recorder = Recorder()
    patch.setattr(CLI, "before_fit", lambda cli: cli.trainer.callbacks.append(recorder), raising=False)
    files = [EXAMPLES / "quickstart" / "grpo.yaml", EXAMPLES / "recipes" / f"{name}.yaml"]
    configs = [word for file in files for word in ("--config", str(file))]
    quiet = ["--trainer.callbacks", "[]", "--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]
    quiet += ["--trainer.enable_checkpointing", "false", "--trainer.limit_val_batches", "0"]
    CLI(["fit", *configs, *quiet, "--trainer.default_root_dir", f"runs/{name}", *flags])
    return recorder


def test_there_is_a_recipe_for_each_method_people_ask_for():
    """The names that users come with."""
    assert set(RECIPES) == {*LEARNERS, "grpo", "dapo", "gspo", "cispo"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*RECIPES} - {*LEARNERS}))
def test_a_recipe_that_starts_from_a_strong_model_takes_steps(name, warm_folder, monkeypatch):
    """Two iterations update the policy with finite numbers."""
    sizes = ["--trainer.max_steps", "2", "--data.prompts_per_step", "16", "--model.update.mini_batch_size", "8"]
    sizes += ["--model.shaping.overlong_buffer", "4"] if name == "dapo" else []  # of responses of 12 tokens at the most

    recorder = run_recipe(name, warm_folder, *sizes, "--model.actor.optim.warmup_steps", "0", patch=monkeypatch)

    assert recorder.steps[-1]["training/global_step"] == 2
    assert 0 < recorder.steps[-1]["actor/grad_norm"] < float("inf")
    assert recorder.steps[-1]["actor/skipped_updates"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_the_classical_recipes_raise_the_reward(name, warm_folder, monkeypatch):
    """From about 0.25 by at least 0.15, measured over the first and the last three iterations."""
    steps, sizes = LEARNERS[name]
    recorder = run_recipe(name, warm_folder, "--trainer.max_steps", str(steps), *sizes, patch=monkeypatch)

    rewards = recorder.column("critic/score/mean")
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.15
