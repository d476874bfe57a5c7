"""Low-rank adapters: put beside a model, switched off, read from PEFT folders and written to them."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities import rank_zero_info
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from verl_lightning.compat.peft import not_of_experts, switch_adapters
from verl_lightning.models.config import LoraConfig
from verl_lightning.models.digests import DamagedFileError, check_folder
from verl_lightning.models.fingerprint import base_fingerprint
from verl_lightning.models.torch_files import open_safetensors
from verl_lightning.models.vision import tower_weights
from verl_lightning.models.weights import is_adapter_name, whole
from verl_lightning.needs import ADAPTER_CONFIG, ADAPTER_WEIGHTS, missing_adapter

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig

FINGERPRINT_KEY = "base_fingerprint"
PEFT_PREFIX = "base_model.model."
"""Prefix of each name in a PEFT adapter file."""

UNSUPPORTED = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "ensure_weight_tying"),
)
"""Settings of PEFT that change what an adapter means, and that are not supported here."""

KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of PEFT's ``init_lora_weights`` that leave the base as it is; others (PiSSA, OLoRA, ...) subtract from it."""


def has_adapters(backbone: nn.Module) -> bool:
    """Tell whether PEFT adapters were put into this model."""
    return hasattr(backbone, "peft_config")


def add_adapters(
    backbone: PreTrainedModel,
    lora: LoraConfig,
    *,
    task_type: Literal["CAUSAL_LM", "FEATURE_EXTRACTION"],
    holds_base: bool = True,
) -> PreTrainedModel:
    """Freeze the weights and put PEFT's adapters beside them, in place.

    Args:
        backbone: A transformers model.
        lora: Settings of the adapters, with the folder that they come from.
        task_type: PEFT's name for the kind of model, for whoever loads the adapter later.
        holds_base: True if the model holds its weights; else whoever brings them must `check_base`.

    Raises:
        ValueError: If a name is no module's, a tied weight would be untied, or ``lora.adapter_path`` does not fit.
    """
    from peft import LoraConfig as PeftLoraConfig

    check_names(backbone, lora)
    backbone.requires_grad_(False)
    backbone.add_adapter(
        PeftLoraConfig(
            task_type=task_type,
            r=lora.rank,
            lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # type: ignore[arg-type]
            lora_dropout=lora.dropout,
            target_modules=chosen_modules(backbone, lora.target_modules),
            exclude_modules=list(lora.exclude_modules) or None,
            modules_to_save=list(lora.modules_to_save) or None,
            init_lora_weights=True if lora.init == "kaiming" else lora.init,
        )
    )
    if reached := peft_config(backbone).target_parameters:
        raise ValueError(
            f"`lora.target_modules: {lora.target_modules}` reaches weights that are no linear layers in transformers"
            f" ({', '.join(f'`{name}`' for name in sorted(reached))}): routers, or experts held fused, which can't have"
            " adapters here. Name attention and dense layers only, or `all-linear`."
        )
    if lora.adapter_path is not None:
        load_adapter(backbone, lora, base_fingerprint(backbone) if holds_base else None)
    if backbone.device.type != "meta":  # the same model follows with its weights
        rank_zero_info(describe_trainable(backbone))
    return backbone


def chosen_modules(backbone: PreTrainedModel, targets: str | list[str]) -> str | list[str]:
    """Return the modules that get adapters as PEFT is to be told them.

    Those of ``all-linear`` are named one by one where PEFT would take more: a vision tower, or experts held fused. Ends
    of names leave a vision tower out too; a pattern for whole names means all that it matches.
    """
    if targets != "all-linear":
        return targets if isinstance(targets, str) else _outside_tower(backbone, targets)
    text, head = backbone.get_decoder(), backbone.get_output_embeddings()  # type: ignore[no-untyped-call]
    inside = set(text.modules())
    every = [(name, m) for name, m in backbone.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]
    linear = [name for name, module in every if module in inside]
    chosen = not_of_experts(linear, backbone)
    return chosen if has_fused_experts(backbone) or len(chosen) < len(every) else "all-linear"


def _outside_tower(backbone: PreTrainedModel, ends: list[str]) -> list[str]:
    """Return the same ends of names, or the whole names of the other modules where some are a vision tower's."""
    tower = {id(weight) for weight in tower_weights(backbone)}
    marks = tuple(f".{end}" for end in ends)
    named = [(name, module) for name, module in backbone.named_modules() if f".{name}".endswith(marks)]
    others = [name for name, module in named if not any(id(weight) in tower for weight in module.parameters())]
    return ends if len(others) == len(named) else others


def has_fused_experts(backbone: nn.Module) -> bool:
    """Tell whether transformers holds the experts of a mixture in one weight, which is no linear layer."""
    return any(".experts." in name and weight.dim() > 2 for name, weight in backbone.named_parameters())


def describe_trainable(backbone: nn.Module) -> str:
    """Describe in one line how much of a model is trained."""
    parameters = dict(backbone.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    count, total = sum(p.numel() for p in trained.values()), sum(p.numel() for p in parameters.values())
    layers = {name.partition(".lora_")[0] for name in trained if ".lora_" in name}
    more = " Experts, which transformers holds fused, have none." if has_fused_experts(backbone) else ""
    return f"LoRA trains {count:,} of {total:,} parameters ({count / total:.2%}), beside {len(layers)} layers.{more}"


@contextmanager
def adapters_off(backbone: PreTrainedModel) -> Iterator[None]:
    """Switch the adapters off within the context, so that the base alone answers; a no-op without adapters."""
    if not has_adapters(backbone):
        yield
        return
    switch_adapters(backbone, on=False)
    try:
        yield
    finally:
        switch_adapters(backbone, on=True)


def peft_config(backbone: nn.Module) -> PeftLoraConfig:
    """Return PEFT's own description of the adapters in a model."""
    configs: dict[str, PeftLoraConfig] = backbone.peft_config  # type: ignore[assignment]
    return configs["default"]


def adapter_weights(backbone: PreTrainedModel) -> dict[str, Tensor]:
    """Return the trained weights, whole, under the names of a PEFT adapter file. Collective."""
    from peft import get_peft_model_state_dict

    trained = {name: whole(p.detach()) for name, p in backbone.named_parameters() if is_adapter_name(name)}
    # PEFT would ask the hub whether the vocabulary has grown; it can't have.
    weights = get_peft_model_state_dict(backbone, state_dict=trained, save_embedding_layers=False)
    return {PEFT_PREFIX + name: weight for name, weight in weights.items()}


def write_adapter(
    folder: Path,
    backbone: PreTrainedModel,
    weights: dict[str, Tensor],
    fingerprint: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a PEFT adapter folder, which `PeftModel.from_pretrained` puts on the base model.

    Args:
        folder: An empty folder.
        backbone: Model with the adapters, whose settings are written.
        weights: Weights from `adapter_weights`.
        fingerprint: Fingerprint of the base, from `base_fingerprint`; `load_adapter` compares it.
        dtype: Type in which the adapters are stored; None leaves them as they are.
    """
    stored = {name: weight.to("cpu", dtype or weight.dtype).contiguous() for name, weight in weights.items()}
    metadata = {"format": "pt", FINGERPRINT_KEY: fingerprint}
    save_file(stored, folder / ADAPTER_WEIGHTS, metadata=metadata)
    write_adapter_config(folder, backbone)  # last: without it no loader accepts the folder


def write_adapter_config(folder: Path, backbone: PreTrainedModel) -> None:
    """Write what a PEFT adapter folder holds beside its weights.

    Args:
        folder: The folder.
        backbone: Model with the adapters.
    """
    config = copy.deepcopy(peft_config(backbone))
    config.inference_mode = True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file each time
    config.save_pretrained(str(folder))


def load_adapter(backbone: PreTrainedModel, lora: LoraConfig, fingerprint: str | None) -> None:
    """Copy the adapter of ``lora.adapter_path`` into the adapters of a model.

    Args:
        backbone: A transformers model with adapters.
        lora: Settings of the adapters, with the folder that they come from.
        fingerprint: Fingerprint of the base, from `base_fingerprint`; None where it is not known yet.

    Raises:
        ValueError: If the folder is not a LoRA adapter, or not of these settings, or was trained on another base.
    """
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(backbone, read_adapter(backbone, lora, fingerprint))


def read_adapter(backbone: PreTrainedModel, lora: LoraConfig, fingerprint: str | None) -> dict[str, Tensor]:
    """Read the weights in the folder of ``lora.adapter_path``, by PEFT's names without their prefix.

    Args:
        backbone: The model with adapters, of which only names are looked at.
        lora: Settings of the adapters, with the folder that they come from.
        fingerprint: Fingerprint of the base, from `base_fingerprint`; None where it is not known yet.

    Raises:
        ValueError: If the folder is not a LoRA adapter, or not of these settings, or was trained on another base.
    """
    folder = Path(str(lora.adapter_path))
    check_folder(folder, [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    check_adapter_config(folder, lora)
    if fingerprint is not None:
        check_base(folder, str(backbone.name_or_path), fingerprint)
    with open_safetensors(folder / ADAPTER_WEIGHTS) as file:
        weights = {name.removeprefix(PEFT_PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if whole_ones := sorted(name for name in weights if name.endswith("base_layer.weight")):
        raise ValueError(
            f"`lora.adapter_path: {folder}` holds whole weights beside its adapters, such as `{whole_ones[0]}`, as PEFT"
            " saves embeddings. Save it once more with `save_embedding_layers=False`, if the vocabulary is the base's."
        )
    ours = {name.removeprefix(PEFT_PREFIX): weight for name, weight in adapter_weights(backbone).items()}
    if wrong := sorted(weights.keys() ^ ours.keys()):
        where = "the folder only" if wrong[0] in weights else "these settings only"
        raise ValueError(
            f"`lora.adapter_path: {folder}` has other adapters than `lora` asks for: {len(wrong)} weights differ, the"
            f" first, `{wrong[0]}`, is in {where}. Set `target_modules` and `modules_to_save` as in `{ADAPTER_CONFIG}`."
        )
    return weights


def check_base(folder: Path, path: str, fingerprint: str) -> None:
    """Refuse an adapter that was trained on other weights, where its folder says on which.

    Args:
        folder: Folder of the adapter.
        path: Path of the base, for the message.
        fingerprint: Fingerprint of the base, from `base_fingerprint`.

    Raises:
        ValueError: If the fingerprints differ.
    """
    with open_safetensors(folder / ADAPTER_WEIGHTS) as file:
        stored = (file.metadata() or {}).get(FINGERPRINT_KEY)
    if stored not in (None, fingerprint):
        raise ValueError(
            f"`lora.adapter_path: {folder}` was trained on another base than `path: {path}`: their frozen weights"
            " differ. Use the base that it was trained on."
        )


def check_adapter_config(folder: Path, lora: LoraConfig) -> dict[str, Any]:
    """Check the configuration in a PEFT folder against ``lora``, and return it.

    Raises:
        ValueError: If it does not fit, with what to change.
    """
    if (complaint := missing_adapter(folder)) is not None:
        raise ValueError(complaint)
    name = f"`lora.adapter_path: {folder}`"
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text())
    except ValueError as error:
        raise DamagedFileError(folder / ADAPTER_CONFIG, f"is damaged: it holds no JSON ({error}).") from error
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{name} holds adapters of type {config.get('peft_type')}, but only LORA can be trained here.")
    if used := [key for key in UNSUPPORTED if config.get(key)]:
        raise ValueError(f"{name} uses `{used[0]}`, which can't be trained here. Merge it into its base with PEFT.")
    if (init := config.get("init_lora_weights")) not in KEEPS_BASE:
        raise ValueError(
            f"{name} was made with `init_lora_weights: {init}`, so it belongs to a base that PEFT has changed and not"
            " to the one at `path`. Convert it by `path_initial_model_for_weight_conversion` of PEFT's"
            " `save_pretrained`, or merge it into its base with PEFT."
        )
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"{name} trains biases too (`bias: {bias}`), which can't be done here. Merge it with PEFT.")
    for key, theirs, ours in (("rank", config.get("r"), lora.rank), ("alpha", config.get("lora_alpha"), lora.alpha)):
        if theirs is None:
            raise ValueError(f"{name} has no {key} in its `{ADAPTER_CONFIG}`. Give a folder as PEFT writes it.")
        if theirs != ours:
            raise ValueError(f"{name} has {key} {theirs}, but `lora.{key}` is {ours}. Set `lora.{key}: {theirs}`.")
    return config


def check_names(backbone: PreTrainedModel, lora: LoraConfig) -> None:
    """Refuse names that no module has, and modules whose weight is tied to another's.

    Raises:
        ValueError: If there are any; with the closest names for one that no module has.
    """
    modules = [name for name, _ in backbone.named_modules() if name]
    targets = lora.target_modules
    if targets == "all-linear":
        targeted = []
    elif isinstance(targets, str):
        targeted = [name for name in modules if re.fullmatch(targets, name)]
        if not targeted:
            raise ValueError(f"`lora.target_modules: {targets}` is a pattern that no module's whole name matches.")
    else:
        targeted = _named(modules, targets, "target_modules")
    _named(modules, lora.exclude_modules, "exclude_modules")
    _check_untied(backbone, targeted, "target_modules")
    _check_untied(backbone, _named(modules, lora.modules_to_save, "modules_to_save"), "modules_to_save")


def _named(modules: list[str], ends: list[str], option: str) -> list[str]:
    """Return the modules whose names have one of these ends."""
    chosen = []
    for end in ends:
        matching = [name for name in modules if name == end or name.endswith(f".{end}")]
        if not matching:
            leaves = sorted({leaf for name in modules if not (leaf := name.rpartition(".")[2]).isdecimal()})
            close = difflib.get_close_matches(end, leaves, n=3, cutoff=0.4) or leaves
            names = ", ".join(f"`{name}`" for name in close)
            raise ValueError(f"`lora.{option}`: the model has no module `{end}`. It has {names}.")
        chosen += matching
    return chosen


def _check_untied(backbone: nn.Module, chosen: list[str], option: str) -> None:
    owners: dict[int, set[str]] = {}
    for name, parameter in backbone.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    for tied in owners.values():
        if len(tied) > 1 and (names := sorted(tied & set(chosen))):
            raise ValueError(
                f"`lora.{option}` names `{names[0]}`, whose weight is tied to `{min(tied - {names[0]})}`: training one"
                " of them would untie them in silence. Leave it out."
            )
