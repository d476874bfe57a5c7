"""Overlapped sampling, with an engine in a thread: what steps learn from, and what a resumed run finds."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.processes import on_ranks
from tests.resume.experiment import Experiment, assert_same_state
from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_trainer
from tests.strategies.same_data import SameDataStrategy
from tests.tiny import write_prompt_file, write_tiny_folder
from tests.tolerances import assert_near
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.callbacks import HFRollout
from verl_lightning.callbacks.rollout_queue import Ticket, restored
from verl_lightning.rollout.base import Completion, SamplingConfig
from verl_lightning.rollout.turns import TurnsConfig
from verl_lightning.types import PromptBatch

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")  # a resumed run's own folder


def make_rollout():
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    return HFRollout(sampling, sampling, max_staleness=1)


def make_module(model):
    return make_ppo(model, actor=make_model_config(model, lr=1e-2), corrections=[TruncatedImportanceSampling()])


def make_callbacks():
    return [make_rollout()]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Three batches an epoch, so that one is on its way from one epoch to the next."""
    folder = tmp_path_factory.mktemp("overlap")
    prompts = write_prompt_file(folder / "prompts.jsonl", num_rows=12)
    return Experiment(
        folder=folder,
        make_module=partial(make_module, write_tiny_folder(folder / "model")),
        make_data=partial(make_prompts, prompts, shuffle=True),
        make_callbacks=make_callbacks,
        trainer={},
    )


@pytest.fixture(scope="module")
def whole(experiment):
    return experiment.run("whole")


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_resumed_run_learns_from_what_was_on_its_way(experiment, whole, step):
    resumed = experiment.resume(step, "early")

    assert_same_state(resumed.module.state_dict(), whole.module.state_dict())
    assert resumed.order.rows == whole.order.rows[step:]
    assert resumed.order.tokens == whole.order.tokens[step:]
    assert resumed.metrics == whole.metrics
    assert [row["rollout/staleness"] for row in whole.metrics] == ["0.0", "1.0", "1.0", "1.0", "1.0"]


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
    names = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "rollout/staleness")
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

    assert any("responses to row" in str(warning.message) for warning in warned)
    assert recorder.column("rollout/staleness") == [0.0, 1.0]


def ticket_of(rows):
    """Of these rows, each with two responses whose tokens tell the row and the sample."""
    batch = PromptBatch(
        prompt_ids=torch.ones(len(rows), 1),
        prompt_mask=torch.ones(len(rows), 1).bool(),
        row_index=torch.tensor(rows),
        is_duplicate=torch.zeros(len(rows)).bool(),
        rows=[{}] * len(rows),
    )
    ticket = Ticket(batch, [], 3, None)
    pairs = [(row, sample) for row in rows for sample in (0, 1)]
    ticket.completions = [
        Completion([row, sample][: sample + 1], [-0.1] * (sample + 1), sample == 0, 9) for row, sample in pairs
    ]
    return ticket


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (2, 2), (4, 2)])
def test_other_ranks_get_the_responses_to_their_own_prompts(before, after):
    rows = [7, 2, 9, 4]
    saved = [ticket_of(rows[rank::before]).state_dict() for rank in range(before)]
    source = SimpleNamespace(
        row_index=sorted(rows), batch=lambda positions, _: ticket_of([sorted(rows)[p] for p in positions]).batch
    )
    trainer = SimpleNamespace(
        train_dataloader=SimpleNamespace(source=source), strategy=SimpleNamespace(batch_to_device=lambda batch: batch)
    )

    for rank in range(after):
        contract = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=after)
        share = restored(saved, lambda _: [], SimpleNamespace(contract=contract, trainer=trainer))

        expected = ticket_of(rows[rank::after])
        assert share.batch.row_index.tolist() == expected.batch.row_index.tolist()
        assert share.completions == expected.completions
        assert share.weights_step == 3


def test_conversations_do_not_overlap():
    with pytest.raises(ValueError, match="`rollout.max_staleness: 1` samples single responses"):
        HFRollout(turns=TurnsConfig(environment=None), max_staleness=1)


def test_two_steps_are_refused():
    with pytest.raises(ValueError, match="`rollout.max_staleness` must be 0 or 1, got 2"):
        HFRollout(max_staleness=2)
