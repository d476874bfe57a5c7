"""Work-arounds for PEFT 0.21."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def not_of_experts(names: list[str], backbone: PreTrainedModel) -> list[str]:
    """Return the modules that PEFT does not take for experts, which had layers of these names in transformers 4."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=names)
    convert_peft_config_for_transformers(config, backbone, None)
    kept = set(config.target_modules or ())
    return [name for name in names if name in kept]


def switch_adapters(backbone: nn.Module, *, on: bool) -> None:
    """Have a model answer with its adapters or without.

    Not by transformers' `enable_adapters` and `disable_adapters`, which leave copies of `modules_to_save` switched off.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for module in backbone.modules():
        if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)):
            module.enable_adapters(enabled=on)
