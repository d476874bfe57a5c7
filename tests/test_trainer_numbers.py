"""Numbers of the Trainer that Lightning would take without a word, or refuse late."""

from __future__ import annotations

import pytest

from verl_lightning.trainer_numbers import wrong_numbers

LEAST = "must be at least"
SHARE = "must be a whole number of batches"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("log_every_n_steps", -1, LEAST),
        ("num_sanity_val_steps", -2, LEAST),
        ("check_val_every_n_epoch", 0, LEAST),
        ("accumulate_grad_batches", 0, LEAST),
        ("gradient_clip_val", -0.5, LEAST),
        ("gradient_clip_val", float("nan"), LEAST),
        ("max_epochs", -2, LEAST),
        ("max_steps", -2, LEAST),
        ("min_epochs", -1, LEAST),
        ("fast_dev_run", -1, LEAST),
        ("reload_dataloaders_every_n_epochs", -1, LEAST),
        ("val_check_interval", 0, SHARE),
        ("val_check_interval", 0.0, SHARE),
        ("val_check_interval", 1.5, SHARE),
        ("val_check_interval", float("inf"), SHARE),
        ("limit_train_batches", -1, SHARE),
        ("limit_val_batches", 2.5, SHARE),
        ("limit_test_batches", float("nan"), SHARE),
        ("overfit_batches", -0.1, SHARE),
        ("devices", 0, "a run needs a device"),
    ],
)
def test_a_number_out_of_its_range_is_told_by_its_full_key(name, value, words):
    (complaint,) = wrong_numbers({"max_steps": 3, name: value})
    assert complaint.startswith(f"`trainer.{name}` ")
    assert words in complaint


def test_other_values_are_fine():
    numbers = {"max_steps": -1, "max_epochs": None, "log_every_n_steps": 0, "num_sanity_val_steps": float("inf")}
    shares = {"limit_val_batches": 0, "limit_train_batches": 7, "overfit_batches": 0.0, "val_check_interval": 3.0}
    others = {"devices": "auto", "fast_dev_run": False, "max_time": "00:01:00:00", "check_val_every_n_epoch": None}
    assert not list(wrong_numbers(numbers | shares | others | {"limit_test_batches": 0.5}))
    assert not list(wrong_numbers({"val_check_interval": "00:01:00:00", "devices": [0, 1]}))
