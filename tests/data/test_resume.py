from __future__ import annotations

import contextlib
import shutil

import pytest

from tests.data.recorder import Counters, Killed, Recorder, SaveAndDie, make_trainer
from tests.tiny import write_prompt_file
from verl_lightning.data import PromptDataModule

# The fixture has 64 prompts: with 24 a step an epoch has two steps, and 16 prompts are left over.
MAX_STEPS = 7


def prompts(prompt_file, prompts_per_step=24):
    return PromptDataModule(
        str(prompt_file), str(prompt_file), prompts_per_step=prompts_per_step, val_batch_size=40, max_prompt_length=64
    )


def fit(prompt_file, *, ckpt_path=None, callbacks=(), prompts_per_step=24, **options):
    module = Recorder()
    trainer = make_trainer(**{"max_steps": MAX_STEPS, "callbacks": list(callbacks)} | options)
    trainer.fit(module, datamodule=prompts(prompt_file, prompts_per_step), ckpt_path=ckpt_path)
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


VALIDATIONS = {"each epoch": {}, "each second step": {"val_check_interval": 2, "check_val_every_n_epoch": None}}
CHANGES = {
    "nothing": {},
    "smaller steps": {"prompts_per_step": 8},
    "larger steps": {"prompts_per_step": 32},
    "more rows": {"num_rows": 120},
    "fewer rows": {"num_rows": 30},
}


@pytest.fixture(scope="module")
def checkpoints(prompt_file, tmp_path_factory):
    """One of each moment, with two steps an epoch."""
    folder, made = tmp_path_factory.mktemp("moments"), []
    for name, options in VALIDATIONS.items():
        for hook in ("on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
            for step in (1, 2, 3, 4):
                path = folder / f"{name}, {hook}, {step}.ckpt"
                with contextlib.suppress(Killed):
                    fit(prompt_file, callbacks=[SaveAndDie(step, str(path), hook)], max_steps=5, **options)
                made += [(name, hook, step, path)] if path.exists() else []
    return made


def count_by_hand(step, *, prompts_per_step=24, num_rows=64):
    """Epoch, logged step and finished steps of each later step, after steps of 24 of 64 rows."""
    epoch, used = step // 2, step % 2 * 24
    if num_rows != 64:
        used = 0  # an epoch that had begun begins again
    for later in range(step, MAX_STEPS):
        if used + prompts_per_step > num_rows:
            epoch, used = epoch + 1, 0
        used += prompts_per_step
        yield epoch, later, later + 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.filterwarnings("ignore:The checkpoint was saved with", "ignore:A batch over all ranks had")
def test_steps_and_epochs_are_counted_on_whatever_has_changed(prompt_file, tmp_path, checkpoints, change):
    """Resumed from a save at each moment at which a callback can make one."""
    options = dict(change)
    file = write_prompt_file(tmp_path / "other.jsonl", num_rows=options.pop("num_rows", 64))
    for name, hook, step, path in checkpoints:
        counters = Counters()
        fit(file, ckpt_path=path, callbacks=[counters], **options, **VALIDATIONS[name])
        assert counters.seen == list(count_by_hand(step, **change)), (name, hook, step)


@pytest.mark.parametrize(("change", "steps"), [({"prompts_per_step": 8}, 2 + 8), ({"num_rows": 120}, 2 + 5)])
@pytest.mark.filterwarnings("ignore:The checkpoint was saved with")
def test_the_last_epoch_is_a_whole_one(prompt_file, tmp_path, change, steps):
    """Resumed at the end of the first of two epochs."""
    path = str(tmp_path / "killed.ckpt")
    with pytest.raises(Killed):
        fit(prompt_file, callbacks=[SaveAndDie(2, path, "on_train_batch_end")])
    options = dict(change)
    file = write_prompt_file(tmp_path / "other.jsonl", num_rows=options.pop("num_rows", 64))

    counters = Counters()
    fit(file, ckpt_path=path, callbacks=[counters], max_steps=-1, max_epochs=2, **options)

    assert counters.seen[-1] == (1, steps - 1, steps)


def test_a_run_that_is_killed_at_the_end_of_each_epoch_counts_on(prompt_file, tmp_path):
    """Lightning's own counters drift apart at the second resume."""
    seen, paths = [], [None, *(str(tmp_path / f"{step}.ckpt") for step in (2, 4, 6))]
    for before, path, step in zip(paths, [*paths[1:], None], (2, 4, 6, None), strict=True):
        counters = Counters()
        callbacks = [counters] if path is None else [counters, SaveAndDie(step, path, "on_train_batch_end")]
        with contextlib.suppress(Killed):
            fit(prompt_file, ckpt_path=before, callbacks=callbacks)
        seen += counters.seen
    assert seen == list(count_by_hand(0))


def test_the_same_rows_elsewhere_are_no_change(prompt_file, tmp_path):
    """Warnings are errors here."""
    path = str(tmp_path / "killed.ckpt")
    killed = Recorder()
    with pytest.raises(Killed):
        make_trainer(max_steps=MAX_STEPS, callbacks=[SaveAndDie(1, path, "on_train_batch_end")]).fit(
            killed, datamodule=prompts(prompt_file)
        )
    moved = shutil.copy(prompt_file, tmp_path / "moved.jsonl")

    assert killed.train_rows + fit(moved, ckpt_path=path).train_rows == fit(prompt_file).train_rows


def change_one_answer(rows):
    """The same prompts, of which one wants another answer."""
    return [*rows[:-1], rows[-1].replace('"ground_truth": "', '"ground_truth": "9')]


@pytest.mark.parametrize("edit", [change_one_answer, lambda rows: rows[::-1]])
def test_a_changed_file_of_as_many_rows_is_told_of(prompt_file, tmp_path, edit, caplog):
    path = str(tmp_path / "killed.ckpt")
    with pytest.raises(Killed):
        fit(prompt_file, callbacks=[SaveAndDie(1, path, "on_train_batch_end")])
    edited = tmp_path / "edited.jsonl"
    edited.write_text("".join(edit(prompt_file.read_text().splitlines(keepends=True))))

    with pytest.warns(UserWarning, match="but with others .* so the epoch begins again"), caplog.at_level("INFO"):
        after = fit(edited, ckpt_path=path).train_rows

    assert after[:2] == fit(edited).train_rows[:2]
    assert "The validation rows are not those of the checkpoint" in caplog.text


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
