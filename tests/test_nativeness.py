"""The README's table of what Lightning has in stock: every line holds, and none is missing."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import pytest
import torch
from lightning.fabric.connector import _PRECISION_INPUT_STR
from lightning.pytorch import Trainer, callbacks, loggers, profilers
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.lightning_suite import DIFFERENCES
from tests.nativeness import CALLBACKS, FLAGS, LOGGERS, NOT_OURS, NOT_TRIED, PRECISIONS, PROFILERS, STRATEGIES
from tests.runs import make_chats, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from verl_lightning.cli import normalize_arguments
from verl_lightning.cli.preflight.check import check_settings
from verl_lightning.needs import missing_strategy

ROOT = Path(__file__).parents[1]
EVERYTHING = {**CALLBACKS, **LOGGERS, **PROFILERS, **PRECISIONS, **STRATEGIES, **FLAGS}

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning has a word for most of these on CPUs


class Finetuning(callbacks.BaseFinetuning):
    """One that a user would write."""


Finetuning.__name__ = "BaseFinetuning"


class Writer(callbacks.BasePredictionWriter):
    """Writes nothing."""


MAKE = {
    "BackboneFinetuning": callbacks.BackboneFinetuning,
    "BaseFinetuning": Finetuning,
    "BatchSizeFinder": callbacks.BatchSizeFinder,
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({0: 2}),
    "LearningRateFinder": callbacks.LearningRateFinder,
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5),
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(swa_lrs=1e-3),
}
"""Callbacks that are refused."""

VALUES = {"accumulate_grad_batches": 2, "gradient_clip_algorithm": "value", "gradient_clip_val": 1.0}
"""Options of the trainer that are refused."""

QUIET = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
WORKS = {
    **{name: {"precision": name} for name in ("64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")},
    "advanced": {"profiler": "advanced"},
    "pytorch": {"profiler": "pytorch"},
    "single_device": {"profiler": profilers.PassThroughProfiler(), "strategy": "single_device"},
    "limits": {"limit_train_batches": 1, "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}
    | {"min_epochs": 1, "max_epochs": 2, "min_steps": 1, "max_steps": 2, "overfit_batches": 1},
    "switches": {"deterministic": "warn", "benchmark": False, "detect_anomaly": True, "sync_batchnorm": True}
    | {"use_distributed_sampler": False, "reload_dataloaders_every_n_epochs": 1, "enable_autolog_hparams": False}
    | {"inference_mode": True, "plugins": [LightningEnvironment()]},
    "barebones": {"barebones": True, "num_sanity_val_steps": None, **QUIET},
}
"""Options of the trainer that work, each set tried in one run."""


def stock_names() -> set[str]:
    """Names of all that Lightning has."""
    precisions = {name for name in get_args(_PRECISION_INPUT_STR) if isinstance(name, str)}
    flags = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    return {*callbacks.__all__, *loggers.__all__, *profilers.__all__, *precisions, *flags}


def test_the_table_has_a_line_for_everything_in_stock():
    known = {name.partition("(")[0] for name in EVERYTHING}
    assert stock_names() - known == NOT_TRIED
    strategies = StrategyRegistry.available_strategies()
    assert [name for name in strategies if not any(fnmatch(name, line) for line in STRATEGIES)] == []


def test_tests_that_the_table_names_exist():
    for stock in EVERYTHING.values():
        file, _, name = stock.test.partition("::")
        assert not file or (ROOT / "tests" / file).is_file(), file
        functions = ast.walk(ast.parse((ROOT / "tests" / file).read_text())) if name else ()
        assert not name or name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, name


def fit(tmp_path, folder, file, kind, *callbacks, **options):
    """A run of one step, or the error that refuses it."""
    options = {"max_steps": 1} | options
    if kind == "PPO":
        trainer = make_trainer(tmp_path, make_rollout(num_samples=2, max_new_tokens=2), *callbacks, **options)
        trainer.fit(make_ppo(folder), datamodule=make_prompts(file))
    else:
        trainer = make_trainer(tmp_path, *callbacks, **options)
        trainer.fit(make_sft(folder), datamodule=make_chats(file))
    return trainer


@pytest.mark.parametrize("kind", ["PPO", "SFT"])
@pytest.mark.parametrize("name", [name for name, stock in {**CALLBACKS, **FLAGS}.items() if stock.refusal])
def test_what_is_refused_is_refused_in_its_sentence(tmp_path, tiny_folder, prompt_file, name, kind):
    stock = EVERYTHING[name]
    if stock.only_ppo and kind == "SFT":
        return
    own = [MAKE[name]()] if name in MAKE else []
    options = {name: VALUES[name]} if name in VALUES else {}
    with pytest.raises(MisconfigurationException, match=re.escape(stock.refusal)):
        fit(tmp_path, tiny_folder, prompt_file, kind, *own, **options)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("logger", name) for name, stock in LOGGERS.items() if stock.refusal),
        *(("precision", name) for name, stock in PRECISIONS.items() if stock.refusal),
    ],
)
def test_what_lacks_its_package_says_so(key, name):
    with pytest.raises(ValueError, match=re.escape(EVERYTHING[name].refusal)):
        check_settings([*normalize_arguments(["--config", "grpo"]), f"--trainer.{key}", name])


def test_strategies_that_are_not_ours_are_refused():
    names = [name for name in StrategyRegistry.available_strategies() if STRATEGIES.get(name) is None]
    for name in names:
        assert (missing_strategy(name, "PPOModule") or "").startswith(NOT_OURS.replace("deepspeed", name))


@pytest.mark.parametrize("options", WORKS.values(), ids=WORKS)
def test_what_works_trains(tmp_path, tiny_folder, prompt_file, options):
    assert fit(tmp_path, tiny_folder, prompt_file, "PPO", **options).global_step >= 1


@pytest.mark.parametrize("kind", ["PPO", "SFT"])
def test_callbacks_without_a_test_of_their_own_see_the_run(tmp_path, tiny_folder, prompt_file, chat_file, kind):
    seen = []
    own = [callbacks.LambdaCallback(on_train_end=lambda *_: seen.append("end")), SpikeDetection(warmup=1, window=2)]
    own += [Writer(), callbacks.ThroughputMonitor(batch_size_fn=len if kind == "PPO" else lambda batch: 4)]
    fit(tmp_path, tiny_folder, prompt_file if kind == "PPO" else chat_file, kind, *own, logger=None)
    assert seen == ["end"]


def test_a_compiled_module_is_refused(tmp_path, tiny_folder, chat_file):
    with pytest.raises(MisconfigurationException, match=r"compile hooks, not models.*`FSDPStrategy\(compile"):
        make_trainer(tmp_path).fit(torch.compile(make_sft(tiny_folder)), datamodule=make_chats(chat_file))


def test_the_readme_has_the_table():
    """Else run ``python docs/make_nativeness.py``."""
    script = runpy.run_path(str(ROOT / "docs/make_nativeness.py"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script["written"](readme) == readme


def test_the_docs_repeat_where_we_differ_from_lightnings_tests():
    page = " ".join((ROOT / "docs/concepts.md").read_text(encoding="utf-8").split())
    assert [reason for reason in DIFFERENCES.values() if reason not in page] == []
