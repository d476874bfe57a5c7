"""Builds a scorer from a Hugging Face folder: its backbone, its heads, its adapters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from verl_lightning.compat.transformers import attention_of
from verl_lightning.models.attention import (
    PACKS_BY_DEFAULT,
    UNTESTED,
    attention_options,
    knows_boundaries,
    packing_obstacle,
)
from verl_lightning.models.blocks import checkpoint_activations
from verl_lightning.models.classifier import SCORE
from verl_lightning.models.config import ModelConfig, Packing
from verl_lightning.models.digests import check_folder
from verl_lightning.models.hf_folder import VALUE_HEAD_FILE
from verl_lightning.models.library_errors import model_must_be_at
from verl_lightning.models.lora import add_adapters
from verl_lightning.models.pretrained import AutoClass, make_model, read_config, read_model
from verl_lightning.models.scorer import Head, TokenScorer
from verl_lightning.models.torch_files import open_safetensors
from verl_lightning.models.vision import prepare_tower
from verl_lightning.models.weight_files import check_readable, stored_weight


def build_scorer(config: ModelConfig, head: Head, *, trainable: bool) -> TokenScorer:
    """Load a model from its Hugging Face folder and give it the heads it needs.

    Args:
        config: Settings of the model and its training.
        head: Scores that the model gives.
        trainable: False freezes every weight.

    Raises:
        ValueError: If there is no model at ``config.path``.
    """
    backbone = load_backbone(config, _auto_class(head))
    value_head = None if head == "policy" else make_value_head(backbone)
    if value_head is not None:
        read_value_head(value_head, config)
    return assemble(backbone, value_head, config, head, trainable=trainable)


def build_skeleton(config: ModelConfig, head: Head, *, trainable: bool) -> TokenScorer:
    """Build the scorer of `build_scorer` on the meta device: no weight is read, none takes memory.

    Args:
        config: Settings of the model and its training.
        head: Scores that the model gives.
        trainable: False freezes every weight.
    """
    if config.lora is not None:
        config = replace(config, lora=replace(config.lora, adapter_path=None))
    with torch.device("meta"):
        backbone = make_backbone(config, head)
        value_head = None if head == "policy" else make_value_head(backbone)
        return assemble(backbone, value_head, config, head, trainable=trainable)


def make_backbone(config: ModelConfig, head: Head) -> PreTrainedModel:
    """Make the model without reading its weights: those that it holds are made up.

    Raises:
        ValueError: If there is no model at ``config.path``.
    """
    with model_must_be_at(config.path):
        return make_model(
            _auto_class(head),
            config.path,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention_options(config.attn_implementation, read_config(config.path)),
        )


def _auto_class(head: Head) -> AutoClass:
    return AutoModel if head == "value" else AutoModelForCausalLM


def assemble(
    backbone: PreTrainedModel,
    value_head: nn.Linear | None,
    config: ModelConfig,
    head: Head,
    *,
    trainable: bool,
    holds_base: bool = True,
) -> TokenScorer:
    """Make a scorer of a model and its heads, with adapters if it is trained and the settings have them.

    Args:
        backbone: The model.
        value_head: Head that scores values; None for a policy alone.
        config: Settings of the model and its training.
        head: Scores that the model gives.
        trainable: False freezes every weight.
        holds_base: True if the model holds its weights; else whoever brings them must `check_base` of its adapters.
    """
    if config.lora is not None and trainable:
        backbone = add_adapters(
            backbone,
            config.lora,
            task_type="FEATURE_EXTRACTION" if head == "value" else "CAUSAL_LM",
            holds_base=holds_base,
        )
    if trainable:
        if config.lora is None:
            prepare_tower(backbone, trains=config.train_vision_tower)
        checkpoint_activations(backbone, config.activation_checkpointing)
    scorer = TokenScorer(backbone, value_head, head, packs=decide_packing(backbone, config.packing))
    scorer.trains_tower = trainable and config.train_vision_tower
    return scorer.train() if trainable else scorer.requires_grad_(False).eval()


def decide_packing(backbone: PreTrainedModel, packing: Packing) -> bool:
    """Tell whether a model's batches are packed.

    Raises:
        ValueError: If ``packing: always`` is asked of a model that can't be packed.
    """
    obstacle = packing_obstacle(backbone)
    if packing == "always" and obstacle is not None:
        raise ValueError(
            f"`packing: always` does not fit `{type(backbone).__name__}`: {obstacle}. Set `packing: auto` or `never`."
        )
    if packing != "auto":
        return packing == "always"
    if not knows_boundaries(attention_of(backbone)):
        return False
    if obstacle is None and backbone.config.model_type not in PACKS_BY_DEFAULT:
        obstacle = UNTESTED
    if obstacle is not None and backbone.device.type != "meta":  # else the same model follows with its weights
        rank_zero_info(f"`{type(backbone).__name__}` is trained on padded batches: {obstacle}.")
    return obstacle is None


def make_value_head(backbone: PreTrainedModel) -> nn.Linear:
    """Make a value head for a trunk: zeros, since a random one makes the first updates huge."""
    head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False, dtype=backbone.dtype)
    nn.init.zeros_(head.weight)
    return head


def read_value_head(head: nn.Linear, config: ModelConfig) -> None:
    """Go on from the value head beside the adapter or the model that training starts from, if there is one.

    Raises:
        ValueError: If the value head is of another model.
    """
    adapter = config.lora.adapter_path if config.lora is not None else None
    files = [Path(folder) / VALUE_HEAD_FILE for folder in (adapter, config.path) if folder is not None]
    if (file := next((file for file in files if file.is_file()), None)) is None:
        score = stored_weight(config.path, SCORE)
        if score is not None and score.shape == head.weight.shape:
            head.load_state_dict({"weight": score})
            rank_zero_info(f"The value head goes on from the reward model at `{config.path}`.")
            return
        rank_zero_info(f"The value head starts at zero: `{files[0]}` does not exist.")
        return
    check_folder(file.parent, [file.name])
    with open_safetensors(file) as stored:
        weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    if {name: weight.shape for name, weight in weights.items()} != {"weight": head.weight.shape}:
        raise ValueError(f"`{file}` is not a value head of `path: {config.path}`: its size is another. Remove it.")
    head.load_state_dict(weights)
    rank_zero_info(f"The value head goes on from `{file}`.")


def load_backbone(config: ModelConfig, auto_class: AutoClass) -> PreTrainedModel:
    """Load the weights with one of transformers' auto classes.

    Raises:
        DamagedFileError: If a file of it can't be read, or could run code.
        ValueError: If there is no model at ``config.path``, or not a whole one.
    """
    with model_must_be_at(config.path):
        check_readable(config.path)
        model, missing = read_model(
            auto_class,
            config.path,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention_options(config.attn_implementation, read_config(config.path)),
        )
    check_none_missing(config.path, missing)
    return model


def check_none_missing(path: str, missing: Collection[str]) -> None:
    """Refuse a folder that lacks weights of the model, which would stay as they were drawn.

    Args:
        path: Path of the folder.
        missing: Names of weights that its files don't hold.

    Raises:
        ValueError: If there are any.
    """
    if missing:
        raise ValueError(
            f"`path: {path}` lacks {len(missing)} weights of the model, such as `{min(missing)}`. Give a whole"
            " model, as `save_pretrained` writes it; a critic's folder has no output head, and is for"
            " `model.critic.model.path`."
        )
