"""Sets of validation prompts, each with its own environment and sampling."""

from __future__ import annotations

import re
from dataclasses import dataclass

from verl_lightning.options import Options

_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class ValidationSet(Options, key="val_sets"):
    """One of several sets of validation prompts."""

    files: list[str] | str
    """Files of its prompts, as for ``train_files``."""

    environment: str | None = None
    """Environment of all its prompts, by its name in ``rollout.environment``; null leaves that to the rows."""

    num_samples: int | None = None
    """Responses to each prompt; null takes ``rollout.val_sampling.num_samples``."""

    temperature: float | None = None
    """Softmax temperature, dimensionless; 0 is greedy decoding, null takes ``rollout.val_sampling.temperature``."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("`files` must name the files of a validation set, but it is empty.")
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1, got {self.num_samples}.")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"`temperature` must not be negative, got {self.temperature}.")


def check_names(sets: dict[str, ValidationSet]) -> None:
    """Refuse names of validation sets that can't be a part of a metric's name.

    Raises:
        ValueError: If one is such a name.
    """
    for name in sets:
        if not _NAME.fullmatch(name) or name in ("reward", "response_length", "unscored_responses"):
            raise ValueError(
                f"`data.val_sets` has a set called {name!r}, which can't be a part of the metric `val/{name}/reward`."
                " Give it a name of letters, digits and `_.-` that no metric has."
            )
