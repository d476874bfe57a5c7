"""Parts of a module from the short forms in which they may be given: a path, a name, a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from verl_lightning.algorithms import advantages, corrections, losses, preferences
from verl_lightning.algorithms.advantages.base import AdvantageEstimator
from verl_lightning.algorithms.corrections.base import RolloutCorrection
from verl_lightning.algorithms.losses.base import PolicyLoss
from verl_lightning.algorithms.preferences.base import PreferenceLoss
from verl_lightning.faults import closest
from verl_lightning.models.config import ModelConfig
from verl_lightning.options import within
from verl_lightning.rewards.config import RewardConfig

T = TypeVar("T")


def as_model(given: ModelConfig | str, lr: float | None) -> ModelConfig:
    """Returns a model's settings.

    Args:
        given: The settings, or the model's path.
        lr: Peak learning rate; None where the settings have it.

    Raises:
        ValueError: If both give a learning rate.
    """
    model = ModelConfig(path=given) if isinstance(given, str) else given
    if lr is None:
        return model
    if model.optim.lr not in (type(model.optim).lr, lr):
        raise ValueError(
            f"`model.lr` ({lr}) and `model.actor.optim.lr` ({model.optim.lr}) are both set. Leave out the first, which"
            " is short for the second."
        )
    with within("model.actor"):
        return replace(model, optim=replace(model.optim, lr=lr))


def as_reward(given: RewardConfig | str | Callable[..., Any] | None) -> RewardConfig | None:
    """Returns the settings of a reward; None where nothing is judged.

    Args:
        given: The settings, the name of a function, or a function.
    """
    if given is None or isinstance(given, RewardConfig):
        return given
    return RewardConfig(function=given)  # type: ignore[arg-type]  # which takes a function too


def as_advantage(given: AdvantageEstimator | str) -> AdvantageEstimator:
    """Returns an estimator, which may be given by its name."""
    return _method(given, advantages.METHODS, "model.advantage")


def as_policy_loss(given: PolicyLoss | str) -> PolicyLoss:
    """Returns a loss, which may be given by its name."""
    return _method(given, losses.METHODS, "model.policy_loss")


def as_preference_loss(given: PreferenceLoss | str) -> PreferenceLoss:
    """Returns a loss of preferences, which may be given by its name."""
    return _method(given, preferences.METHODS, "model.loss")


def as_corrections(given: Sequence[RolloutCorrection | str]) -> list[RolloutCorrection]:
    """Returns corrections, each of which may be given by its name."""
    return [_method(each, corrections.METHODS, "model.corrections") for each in given]


def _method(given: T | str, methods: Mapping[str, type[T]], key: str) -> T:
    if not isinstance(given, str):
        return given
    if given not in methods:
        raise ValueError(f"`{key}` has no choice {given!r}.{closest(given, methods)} There are {', '.join(methods)}.")
    try:
        return methods[given]()
    except TypeError as error:
        raise ValueError(f"`{key}`: `{given}` needs arguments ({error}): give the object, `{given}(...)`.") from None
