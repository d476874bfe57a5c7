"""What transformers leaves switched off, PEFT's modules switch by themselves."""

from __future__ import annotations

import torch
from peft import LoraConfig
from torch.testing import assert_close

from tests.tiny import tiny_model
from verl_lightning.compat.peft import switch_adapters


def test_copies_of_modules_are_switched_with_the_adapters():
    model = tiny_model()
    model.add_adapter(LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False))
    tokens = torch.arange(4)[None]
    with torch.no_grad():
        model.base_model.norm.modules_to_save["default"].weight.add_(1.0)
        adapted = model(tokens).logits
        switch_adapters(model, on=False)
        plain = model(tokens).logits
        switch_adapters(model, on=True)
        again = model(tokens).logits
    assert not torch.allclose(plain, adapted)
    assert_close(again, adapted, rtol=0, atol=0)
    assert_close(plain, tiny_model()(tokens).logits)
