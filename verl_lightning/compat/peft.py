"""Work-arounds for PEFT 0.21."""

from __future__ import annotations

from torch import nn


def switch_adapters(backbone: nn.Module, *, on: bool) -> None:
    """Have a model answer with its adapters or without.

    Not by transformers' `enable_adapters` and `disable_adapters`, which leave copies of `modules_to_save` switched off.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for module in backbone.modules():
        if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)):
            module.enable_adapters(enabled=on)
