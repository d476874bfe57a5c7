"""A scorer's weights in small parts, for strategies whose ranks hold a part each: nobody holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from verl_lightning.models.build import assemble, make_backbone, make_value_head, read_value_head
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.fingerprint import fingerprint_of, sample
from verl_lightning.models.library_errors import model_must_be_at
from verl_lightning.models.lora import check_base
from verl_lightning.models.pretrained import check_weights
from verl_lightning.models.scorer import Head, TokenScorer
from verl_lightning.models.weight_files import stream_weights, weight_files
from verl_lightning.models.weights import base_name


def stream_scorer(config: ModelConfig, head: Head, *, trainable: bool) -> Iterator[dict[str, Tensor]]:
    """Yields the parameters and buffers of the scorer that `build_scorer` builds, by name, a layer at a time.

    First comes what no file of the model holds: buffers, a value head, adapters with the very numbers that
    `build_scorer` would draw. Tied weights come under one of their names, or under each.

    Args:
        config: Settings of the model and its training.
        head: Scores that the model gives.
        trainable: False freezes every weight.

    Raises:
        ValueError: At once, if there is no model at ``config.path``, or an adapter is not as asked for; after the last
            layer, if the adapter was trained on another base.
    """
    lora = config.lora if trainable else None
    adapter = None if lora is None or lora.adapter_path is None else Path(lora.adapter_path)
    with model_must_be_at(config.path):
        check_weights(config.path)
        files = weight_files(config.path)
    with torch.device("meta"):
        skeleton = make_backbone(config, head)
    scorer = build_hollow(config, head, trainable=trainable)
    weights = stream_weights(skeleton, files)
    if adapter is not None:
        weights = _checked(weights, skeleton, adapter, config.path)
    return _parts(scorer, weights, has_own_copies=adapter is not None)


def build_hollow(config: ModelConfig, head: Head, *, trainable: bool) -> TokenScorer:
    """Builds the scorer of `build_scorer`, but with zeros that take no memory for the model's weights.

    Args:
        config: Settings of the model and its training.
        head: Scores that the model gives.
        trainable: False freezes every weight.
    """
    handle = register_module_parameter_registration_hook(_on_meta)  # type: ignore[arg-type]
    try:
        backbone = make_backbone(config, head)
    finally:
        handle.remove()
    hollow = {id(weight): _zeros(weight) for weight in backbone.parameters()}
    for name, weight in list(backbone.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        setattr(backbone.get_submodule(owner), leaf, hollow[id(weight)])
    value_head = None if head == "policy" else make_value_head(backbone)
    if value_head is not None:
        read_value_head(value_head, config)
    return assemble(backbone, value_head, config, head, trainable=trainable, holds_base=False)


def _checked(
    weights: Iterator[dict[str, Tensor]], skeleton: PreTrainedModel, adapter: Path, path: str
) -> Iterator[dict[str, Tensor]]:
    """Yields the weights as they are; refuses them at the end if the adapter was trained on others."""
    first = {id(weight): name for name, weight in skeleton.named_parameters()}
    names = {name: first[id(weight)] for name, weight in skeleton.named_parameters(remove_duplicate=False)}
    samples: dict[str, bytes] = {}
    for part in weights:
        for name in part.keys() & names.keys():  # tied weights count once
            samples[names[name]] = sample(names[name], part[name])
        yield part
    check_base(adapter, path, fingerprint_of(samples))


def _parts(
    scorer: TokenScorer, weights: Iterator[dict[str, Tensor]], *, has_own_copies: bool
) -> Iterator[dict[str, Tensor]]:
    """Yields the tensors that no file holds, then those of the files by the scorer's names."""
    own = dict(scorer.named_buffers())
    places: dict[str, list[str]] = {name.removeprefix("backbone."): [name] for name in own}
    for name, weight in scorer.named_parameters(remove_duplicate=False):
        stored = _stored_name(name, has_own_copies=has_own_copies)
        if stored is None:
            own[name] = weight.detach()
        else:
            places.setdefault(stored, []).append(name)
    del scorer
    if own:
        yield own
    for part in weights:
        if found := {place: part[stored] for stored in part for place in places.get(stored, ())}:
            yield found
            found.clear()  # before the next ones are read


def _stored_name(name: str, *, has_own_copies: bool) -> str | None:
    """Returns the model's own name of a scorer's parameter, None if the model's files don't hold it."""
    inner = name.removeprefix("backbone.")
    if inner == name or ".lora_" in inner:
        return None
    if ".modules_to_save." not in inner:
        return base_name(inner)
    module, _, rest = inner.partition(".modules_to_save.")
    return None if has_own_copies else f"{module}.{rest.partition('.')[2]}"


def _on_meta(module: nn.Module, name: str, weight: nn.Parameter) -> nn.Parameter | None:
    """Takes the memory of a parameter as soon as its module gets it; one that is tied is not made twice."""
    del module, name
    return None if weight.is_meta else nn.Parameter(weight.data.to("meta"), requires_grad=weight.requires_grad)


def _zeros(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=weight.requires_grad)
