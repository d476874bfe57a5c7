from __future__ import annotations

import pytest

from tests.data.recorder import Killed, Recorder, SaveAndDie, make_trainer
from verl_lightning.data import PromptDataModule

# The fixture has 64 prompts: with 24 a step an epoch has two steps, and 16 prompts are left over.
MAX_STEPS = 7


def prompts(prompt_file):
    return PromptDataModule(
        str(prompt_file), str(prompt_file), prompts_per_step=24, val_batch_size=40, max_prompt_length=64
    )


def fit(prompt_file, *, ckpt_path=None, callbacks=(), **options):
    module = Recorder()
    trainer = make_trainer(max_steps=MAX_STEPS, callbacks=list(callbacks), **options)
    trainer.fit(module, datamodule=prompts(prompt_file), ckpt_path=ckpt_path)
    return module


def kill_and_resume(prompt_file, tmp_path, step, hook, **options):
    """Rows seen before a kill after `step` steps and after the resume."""
    path = str(tmp_path / "killed.ckpt")
    killed = Recorder()
    trainer = make_trainer(max_steps=MAX_STEPS, callbacks=[SaveAndDie(step, path, hook)], **options)
    with pytest.raises(Killed):
        trainer.fit(killed, datamodule=prompts(prompt_file))
    return killed.train_rows, fit(prompt_file, ckpt_path=path, **options).train_rows


@pytest.mark.parametrize("step", range(1, MAX_STEPS))
def test_a_killed_run_goes_on_with_the_rows_it_would_have_seen(prompt_file, tmp_path, step):
    expected = fit(prompt_file).train_rows

    before, after = kill_and_resume(prompt_file, tmp_path, step, "on_train_batch_end")

    assert len(expected) == MAX_STEPS
    assert before == expected[:step]
    assert after == expected[step:]


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
@pytest.mark.parametrize("step", [2, 4])
def test_a_run_killed_at_the_end_of_an_epoch_goes_on_with_the_next(prompt_file, tmp_path, step, hook):
    expected = fit(prompt_file).train_rows

    before, after = kill_and_resume(prompt_file, tmp_path, step, hook)

    assert before == expected[:step]
    assert after == expected[step:]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_run_that_validates_each_third_step_resumes(prompt_file, tmp_path, step):
    options = {"val_check_interval": 3, "check_val_every_n_epoch": None}
    expected = fit(prompt_file, **options).train_rows

    before, after = kill_and_resume(prompt_file, tmp_path, step, "on_train_batch_end", **options)

    assert before + after == expected


@pytest.mark.parametrize("step", range(1, MAX_STEPS))
def test_a_run_of_limited_epochs_resumes(prompt_file, tmp_path, step):
    expected = fit(prompt_file, limit_train_batches=1).train_rows

    before, after = kill_and_resume(prompt_file, tmp_path, step, "on_train_batch_end", limit_train_batches=1)

    assert len({tuple(rows) for rows in expected}) == MAX_STEPS
    assert before + after == expected


def test_a_checkpoint_after_the_run_has_the_position(prompt_file, tmp_path):
    module, trainer = Recorder(), make_trainer(max_steps=3)
    trainer.fit(module, datamodule=prompts(prompt_file))
    trainer.save_checkpoint(tmp_path / "done.ckpt")

    after = fit(prompt_file, ckpt_path=tmp_path / "done.ckpt").train_rows

    assert module.train_rows + after == fit(prompt_file).train_rows


def test_overfitting_repeats_the_same_batches(prompt_file):
    rows = fit(prompt_file, overfit_batches=2).train_rows

    assert rows == [[*range(24)], [*range(24, 48)]] * 3 + [[*range(24)]]


def test_fast_dev_run_takes_one_batch_of_each(prompt_file):
    module = fit(prompt_file, fast_dev_run=True)

    assert len(module.train_rows) == 1
    assert len(module.val_batches) == 1
