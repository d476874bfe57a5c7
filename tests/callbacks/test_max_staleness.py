"""Sampling ahead, with an engine in a thread: what steps learn from, and what a resumed run finds."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.processes import on_ranks
from tests.resume.experiment import Experiment, assert_same_state
from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_trainer
from tests.strategies.same_data import SameDataStrategy
from tests.tiny import write_prompt_file, write_tiny_folder
from tests.tolerances import assert_near
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.callbacks import HFRollout
from verl_lightning.rollout.base import SamplingConfig

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")  # a resumed run's own folder


def make_rollout(max_staleness=1):
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    return HFRollout(sampling, sampling, max_staleness=max_staleness)


def make_module(model):
    return make_ppo(model, actor=make_model_config(model, lr=1e-2), corrections=[TruncatedImportanceSampling()])


def make_callbacks(max_staleness):
    return [make_rollout(max_staleness)]


def make_experiment(folder, max_staleness):
    """Three batches an epoch, so that some are on their way from one epoch to the next."""
    folder.mkdir()
    prompts = write_prompt_file(folder / "prompts.jsonl", num_rows=12)
    return Experiment(
        folder=folder,
        make_module=partial(make_module, write_tiny_folder(folder / "model")),
        make_data=partial(make_prompts, prompts, shuffle=True),
        make_callbacks=partial(make_callbacks, max_staleness),
        trainer={},
    )


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return make_experiment(tmp_path_factory.mktemp("ahead") / "one", 1)


@pytest.fixture(scope="module")
def whole(experiment):
    return experiment.run("whole")


def check_resumed(experiment, whole, step):
    resumed = experiment.resume(step, "early")

    assert_same_state(resumed.module.state_dict(), whole.module.state_dict())
    assert resumed.order.rows == whole.order.rows[step:]
    assert resumed.order.tokens == whole.order.tokens[step:]
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize("step", [1, 4])
def test_a_resumed_run_learns_from_what_was_on_its_way(experiment, whole, step):
    check_resumed(experiment, whole, step)

    assert [row["rollout/staleness/max"] for row in whole.metrics] == ["0.0", "1.0", "1.0", "1.0", "1.0"]


def test_two_batches_on_their_way_are_resumed_too_and_come_in_order(tmp_path, whole):
    experiment = make_experiment(tmp_path / "two", 2)
    older = experiment.run("whole")

    check_resumed(experiment, older, 3)
    assert [row["rollout/staleness/mean"] for row in older.metrics] == ["0.0", "1.0", "2.0", "2.0", "2.0"]
    assert older.order.rows == whole.order.rows
    assert older.order.tokens[:2] == whole.order.tokens[:2]  # from the same weights, with the same seeds
    assert older.order.tokens[2:] != whole.order.tokens[2:]


def fit_with_the_same_data(experiment, name, start, steps):
    """Metrics of a rank that shares its data, from a checkpoint or from nothing to a checkpoint."""
    recorder = Recorder()
    saved = ModelCheckpoint(dirpath=experiment.folder / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"devices": 2, "strategy": SameDataStrategy(), "max_steps": steps, "enable_checkpointing": True}
    trainer = make_trainer(experiment.folder, make_rollout(), recorder, saved, **options)
    seed_everything(7, verbose=False)  # as `Experiment.run`
    trainer.fit(experiment.make_module(), experiment.make_data(), ckpt_path=start, weights_only=True)
    return recorder.steps


def test_ranks_with_the_same_data_resume_their_parts(experiment, whole):
    """Of four prompts with four responses each, every rank has two on its way."""
    names = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "rollout/staleness/mean")
    on_ranks(2, fit_with_the_same_data, experiment, "half", None, 2)
    start = experiment.folder / "half" / "step=2.ckpt"
    for rest in on_ranks(2, fit_with_the_same_data, experiment, "rest", start, 5):
        for name in names:
            assert_near([step[name] for step in rest], [float(step[name]) for step in whole.metrics[2:]], rel=1e-3)


def test_a_resumed_run_with_other_data_begins_anew(experiment, whole, tmp_path):
    other = write_prompt_file(tmp_path / "other.jsonl", num_rows=4)
    recorder = Recorder()
    trainer = make_trainer(tmp_path, make_rollout(), recorder, max_steps=5)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(experiment.make_module(), make_prompts(other), ckpt_path=str(experiment.checkpoint("whole", 3)))

    assert any("of other training rows" in str(warning.message) for warning in warned)
    assert recorder.column("rollout/staleness/max") == [0.0, 1.0]


class MemoryWitness(Callback):
    """Asks a rollout for its engine's memory when training starts."""

    def on_train_start(self, trainer, pl_module):
        (rollout,) = (callback for callback in trainer.callbacks if isinstance(callback, HFRollout))
        self.found = rollout.engine_memory(0)


def test_the_plan_counts_a_cache_that_stays_while_the_policy_learns(experiment, tmp_path):
    found = []
    for max_staleness in (0, 2):
        witness = MemoryWitness()
        trainer = make_trainer(tmp_path, make_rollout(max_staleness), witness, max_steps=1)
        trainer.fit(experiment.make_module(), experiment.make_data())
        found.append(witness.found)

    synchronous, ahead = found
    cache = synchronous.sampling - synchronous.learning
    assert cache > 0
    assert ahead.sampling == ahead.learning == synchronous.learning + 2 * cache
