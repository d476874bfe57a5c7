"""Refusals of rollout options that don't fit the module, the data or one another."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from verl_lightning.callbacks.prompt_stream import OrderedLoader
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.ppo import PPOModule


def sends_adapters(module: PostTrainingModule) -> bool:
    """Tell whether the policy's adapters go to the engine by themselves."""
    lora = module.policy_config.lora
    return lora is not None and not lora.merge_for_rollout


def check_age(max_staleness: int, in_flight: str) -> None:
    """Refuse a bound on age that is none, and a treatment of responses that nothing can need.

    Raises:
        ValueError: If so.
    """
    if max_staleness < 0:
        raise ValueError(f"`rollout.max_staleness` must not be negative, got {max_staleness}.")
    if in_flight != "finish" and not max_staleness:
        raise ValueError(
            f"`rollout.in_flight: {in_flight}` is for responses that are on their way when weights change, but with"
            " `rollout.max_staleness: 0` none is. Allow some age, or leave it out."
        )


def check_adapters(module: PostTrainingModule, rollout: str, *, are_taken: bool, in_flight: str) -> None:
    """Refuse adapters that are sent alone where an engine does not take them so.

    Args:
        module: Module in training.
        rollout: Name of the callback's class.
        are_taken: True if engines take adapters at their place.
        in_flight: Treatment of responses that are on their way when weights change.

    Raises:
        MisconfigurationException: If so.
    """
    if not sends_adapters(module):
        return
    if not are_taken:
        raise MisconfigurationException(
            f"`lora.merge_for_rollout: false` sends adapters alone, but the engine of `{rollout}` takes"
            " whole weights only, as all Ray actors do. Set it to true, or sample with `VLLMRollout`."
        )
    if in_flight != "finish":
        raise MisconfigurationException(
            f"`rollout.in_flight: {in_flight}` changes weights under way, which adapters alone"
            " (`lora.merge_for_rollout: false`) can't. Set it to `finish`, or send whole weights."
        )


def check_staleness(module: LightningModule, max_staleness: int) -> None:
    """Refuse to sample ahead where a step's age would go unnoticed.

    Raises:
        MisconfigurationException: If nothing corrects for it, or advantages need greedy responses of the same policy.
    """
    option = f"`rollout.max_staleness: {max_staleness}`"
    if not isinstance(module, PPOModule):
        raise MisconfigurationException(f"{option} needs a `PPOModule`, not `{type(module).__name__}`.")
    if not module.corrections and module.update.old_log_probs == "trainer":
        raise MisconfigurationException(
            f"{option} samples from older policies than the one that learns, but nothing corrects for that. Add"
            " `model.corrections` such as `TruncatedImportanceSampling`, or clip against the engine's log-probs with"
            " `model.update.old_log_probs: engine`."
        )
    if module.needs_greedy_rollout:
        raise MisconfigurationException(
            f"`{type(module.advantage).__name__}` compares with greedy responses of the same policy, which"
            f" {option} does not sample. Set it to 0."
        )


def check_order(trainer: Trainer, max_staleness: int) -> None:
    """Refuse to ask for prompts that nobody knows before the loader yields them.

    Raises:
        MisconfigurationException: If the training loader is not ours.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, OrderedLoader):
        option, way_out = f"`rollout.max_staleness: {max_staleness}`", "set it to 0"
        if not max_staleness:
            option, way_out = "`model.dynamic_sampling`", "take it out"
        raise MisconfigurationException(
            f"{option} samples prompts before their turn, but a `{type(loader).__name__}` does not tell them. Train"
            f" with a `PromptDataModule`, or {way_out}."
        )
