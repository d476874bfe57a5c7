"""Settings that are no mistake by themselves and hardly ever meant: asked about before models are built."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from verl_lightning.models.size import ModelRole
from verl_lightning.trainer_numbers import nothing_to_train

LARGEST_RATE = 0.1
"""Learning rate above which a warning asks whether it is meant: AdamW moves each weight by about the rate."""


def check_plan(trainer: Trainer) -> None:
    """Refuses a fit that would train nothing.

    Raises:
        MisconfigurationException: If there are no steps or no batches.
    """
    names = ("limit_train_batches", "max_epochs", "max_steps")
    for complaint in nothing_to_train({name: getattr(trainer, name) for name in names}):
        raise MisconfigurationException(complaint)


def ask_about_rates(roles: Sequence[ModelRole]) -> None:
    """Warns of learning rates at which a language model learns nothing but noise."""
    for role in roles:
        rate = role.config.optim.lr
        if role.trainable and rate > LARGEST_RATE:
            rank_zero_warn(
                f"`{role.key}.optim.lr` is {rate:g}: AdamW would move each weight by about that much in a step, and"
                " weights of language models are near 0.02. Rates from 1e-7 to 1e-3 are usual. Is it meant?"
            )
