"""Ranges of the Trainer's numbers, of which Lightning takes some that mean nothing, and refuses others late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Least(NamedTuple):
    """Least value of a setting, and what to know about it."""

    value: int
    hint: str = ""


LEAST = {
    "max_epochs": Least(-1, " -1 sets no limit."),
    "min_epochs": Least(0),
    "max_steps": Least(-1, " -1 sets no limit."),
    "min_steps": Least(0),
    "fast_dev_run": Least(0),
    "log_every_n_steps": Least(0, " 0 logs nothing."),
    "num_sanity_val_steps": Least(-1, " -1 takes all batches, 0 none."),
    "check_val_every_n_epoch": Least(1, " null has `trainer.val_check_interval` count batches over all epochs."),
    "reload_dataloaders_every_n_epochs": Least(0),
    "accumulate_grad_batches": Least(1),
    "gradient_clip_val": Least(0),
    "num_nodes": Least(1),
}
"""Range of each setting that is a plain number."""

SHARES = {
    "limit_train_batches": "",
    "limit_val_batches": "",
    "limit_test_batches": "",
    "limit_predict_batches": "",
    "overfit_batches": "",
    "val_check_interval": " To validate never, set `trainer.limit_val_batches: 0`.",
}
"""What to know about each setting that is a number of batches or, with a decimal point, a share of them."""


def wrong_numbers(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields a complaint about each number that is out of its range.

    Args:
        settings: Settings of the Trainer by name, as many as are known; values of other types are left to others.
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if (least := LEAST.get(name)) is not None and not value >= least.value:
            yield f"`trainer.{name}` must be at least {least.value}, got {value}.{least.hint}"
        if name in SHARES and not is_share(value, may_be_zero=name != "val_check_interval"):
            number, share = ("0", "0") if name != "val_check_interval" else ("1", "above 0")
            yield (
                f"`trainer.{name}` must be a whole number of batches, at least {number}, or a share of them between"
                f" {share} and 1.0, got {value}.{SHARES[name]}"
            )
    if (devices := settings.get("devices")) in (0, "0") and devices is not False:
        yield "`trainer.devices` is 0, but a run needs a device. -1 takes all that there are, `auto` chooses."


def nothing_to_train(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields a complaint about each number by which a fit would make no step.

    Args:
        settings: Settings of the Trainer by name, as many as are known.
    """
    for name in ("limit_train_batches", "max_epochs", "max_steps"):
        if settings.get(name) == 0:
            yield (
                f"`trainer.{name}` is 0, so there is nothing to train on. Raise it; to evaluate alone, run"
                " `verl-fit validate`."
            )


def is_share(value: float, *, may_be_zero: bool) -> bool:
    """Tells whether a number may count batches or be a share of them.

    Args:
        value: The number.
        may_be_zero: True if no batch at all may be meant.
    """
    return (value > 0 or (may_be_zero and value == 0)) and (value <= 1 or value % 1 == 0)
