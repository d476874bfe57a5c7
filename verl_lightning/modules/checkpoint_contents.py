"""Describes a run in its checkpoints, and checks that a resumed run is like it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_lightning.models.scorer import TokenScorer
from verl_lightning.modules.resume_checks import CONFIGS_KEY, check_config, config_text
from verl_lightning.modules.run_settings import SETTINGS_KEY

if TYPE_CHECKING:
    from verl_lightning.modules.base import PostTrainingModule

OPTIMIZATION_KEY = "automatic_optimization"
TASK_KEY = "task"
SHAPES_KEY = "weight_shapes"
BASES_KEY = "base_fingerprints"


def saved_models(module: PostTrainingModule) -> dict[str, TokenScorer]:
    """Returns the models whose weights a checkpoint holds, by role."""
    return {name: child for name, child in module.named_children() if isinstance(child, TokenScorer)}


def describe(module: PostTrainingModule, checkpoint: dict[str, Any]) -> None:
    """Writes into a checkpoint what `check_description` compares. Collective.

    Args:
        module: Module of the run.
        checkpoint: Checkpoint that is being made.
    """
    configs = {name: config_text(model.backbone.config) for name, model in saved_models(module).items()}
    checkpoint |= {
        OPTIMIZATION_KEY: module.automatic_optimization,
        SHAPES_KEY: _weight_shapes(module),
        BASES_KEY: module.base_fingerprints,
        CONFIGS_KEY: configs,
        SETTINGS_KEY: module.told_settings(),
    }


def check_description(module: PostTrainingModule, checkpoint: dict[str, Any]) -> None:
    """Checks that a run can go on from a checkpoint: its task, the shapes and configs of models, adapters' bases.

    Args:
        module: Module of the run.
        checkpoint: Checkpoint that it is to go on from.

    Raises:
        ValueError: With what differs.
    """
    theirs, ours = checkpoint.get(SHAPES_KEY), _weight_shapes(module)
    if theirs is None:
        raise ValueError("`ckpt_path` is not a checkpoint of a verl_lightning module; give one that `fit` wrote.")
    is_automatic = checkpoint.get(OPTIMIZATION_KEY, module.automatic_optimization)
    task = checkpoint.get(TASK_KEY, "SFT" if is_automatic else "PPO")
    if module.trainer.training and task != module.task:
        raise ValueError(
            f"`ckpt_path` is of {task}, with whose steps and optimizers a"
            f" `{type(module).__name__}` can't go on. Start from its weights: give `model.actor.path` the folder"
            " that its `HFCheckpoint` or `verl-export` wrote."
        )
    if wrong := sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)):
        name = wrong[0]
        raise ValueError(
            f"`ckpt_path` holds another model: weight `{name}` has shape {theirs.get(name, 'none')} there and"
            f" {ours.get(name, 'none')} here ({len(wrong)} weights differ). Use the model settings of that run."
        )
    _check_bases(module, checkpoint)


def _check_bases(module: PostTrainingModule, checkpoint: dict[str, Any]) -> None:
    models, configs = saved_models(module), checkpoint.get(CONFIGS_KEY, {})
    for role in module.roles:
        if role.name in configs:
            check_config(f"{role.key}.path", configs[role.name], config_text(models[role.name].backbone.config))
        there, here = checkpoint.get(BASES_KEY, {}).get(role.name), module.base_fingerprints.get(role.name)
        if there != here:
            raise ValueError(
                f"`ckpt_path` holds adapters for another base than `{role.key}.path`: the frozen weights differ"
                f" (fingerprint {there} there, {here} here). Use the base model of that run."
            )


def _weight_shapes(module: PostTrainingModule) -> dict[str, list[int]]:
    models = saved_models(module).items()
    return {f"{role}.{name}": shape for role, model in models for name, shape in model.weight_shapes().items()}
