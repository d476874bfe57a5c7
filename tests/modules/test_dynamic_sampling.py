"""Dynamic sampling by refill: each prompt is learnt from at most once, iterations are Lightning's, resume is exact."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from lightning.pytorch import Callback

from tests.processes import on_ranks
from tests.resume.experiment import Experiment, assert_same_state
from tests.runs import Recorder, make_ppo, make_prompts, make_reward, make_rollout, make_trainer
from tests.tiny import write_prompt_file
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.callbacks import HFRollout
from verl_lightning.modules.ppo_config import DynamicSamplingConfig
from verl_lightning.rollout.base import SamplingConfig

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")  # a resumed run's own folder
NUM_ROWS = 40


class LearntRows(Callback):
    """The rows that each step learns from, and those that wait after it, of all ranks."""

    def __init__(self):
        self.learnt, self.waiting = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (rollout,) = (callback for callback in trainer.callbacks if isinstance(callback, HFRollout))
        gather = pl_module.contract.gather_over_data_parallel
        self.learnt.append([row for rows in gather(batch.row_index.tolist()) for row in rows])
        groups = rollout._supply.state_dict()["groups"]
        self.waiting = [row for group in groups for *_, row in group["prompts"]]


def make_module(folder):
    """Half of the prompts have no signal."""
    return make_ppo(
        folder,
        reward=make_reward("same_on_even_rows"),
        corrections=[TruncatedImportanceSampling()],
        dynamic_sampling=DynamicSamplingConfig(max_batches=20),
    )


def make_callbacks(max_staleness, in_flight):
    sampling = SamplingConfig(num_samples=2, max_new_tokens=6)
    return [HFRollout(sampling, sampling, max_staleness=max_staleness, in_flight=in_flight)]


def fit(folder, tiny_folder, prompts, max_staleness, in_flight, ranks=1):
    """The rows of three steps, on a rank."""
    rows = LearntRows()
    trainer = make_trainer(folder, *make_callbacks(max_staleness, in_flight), rows, max_steps=3, devices=ranks)
    trainer.fit(make_module(tiny_folder), make_prompts(prompts, shuffle=True))
    return rows


def check_once(rows):
    """Each row is learnt from once, waits, or had no signal; none is far behind the others."""
    learnt = Counter(row for step in rows.learnt for row in step)
    assert [len(step) for step in rows.learnt] == [4, 4, 4]
    assert max((learnt + Counter(rows.waiting)).values()) == 1
    assert all(row % 2 for row in learnt)


@pytest.mark.parametrize(("max_staleness", "in_flight"), [(0, "finish"), (2, "continue")])
def test_no_prompt_with_signal_is_lost_or_learnt_from_twice(tmp_path, tiny_folder, max_staleness, in_flight):
    prompts = write_prompt_file(tmp_path / "prompts.jsonl", num_rows=NUM_ROWS)
    check_once(fit(tmp_path, tiny_folder, prompts, max_staleness, in_flight))


def test_two_ranks_fill_each_step_together(tmp_path, tiny_folder):
    prompts = write_prompt_file(tmp_path / "prompts.jsonl", num_rows=NUM_ROWS)
    for rows in on_ranks(2, fit, tmp_path, tiny_folder, prompts, 0, "finish", 2):
        check_once(rows)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, tiny_folder, max_staleness):
    prompts = write_prompt_file(tmp_path / "prompts.jsonl", num_rows=NUM_ROWS)
    experiment = Experiment(
        folder=tmp_path,
        make_module=partial(make_module, tiny_folder),
        make_data=partial(make_prompts, prompts, shuffle=True),
        make_callbacks=partial(make_callbacks, max_staleness, "finish"),
        trainer={"max_steps": 4},
    )
    whole = experiment.run("whole")

    resumed = experiment.resume(2, "early")

    assert_same_state(resumed.module.state_dict(), whole.module.state_dict())
    assert resumed.order.tokens == whole.order.tokens[2:]
    assert resumed.metrics == whole.metrics


class ValidatedSteps(Callback):
    """The iterations after which there was a validation."""

    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize("interval", [2, 0.5])
def test_lightning_counts_iterations(tmp_path, tiny_folder, prompt_file, interval):
    """An epoch has four of them, whatever they ask for."""
    recorder, watch = Recorder(), ValidatedSteps()
    options = {"limit_train_batches": 4, "limit_val_batches": 1, "val_check_interval": interval}
    trainer = make_trainer(tmp_path, make_rollout(), recorder, watch, max_epochs=1, max_steps=-1, **options)
    module = make_ppo(
        tiny_folder, reward=make_reward("same_on_even_rows"), dynamic_sampling=DynamicSamplingConfig(max_batches=20)
    )
    trainer.fit(module, make_prompts(prompt_file, prompt_file))

    assert watch.steps == [2, 4]
    assert len(recorder.steps) == trainer.global_step == 4
