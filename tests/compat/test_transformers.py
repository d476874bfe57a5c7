"""Private names of transformers and PEFT that `compat` uses are where it looks for them."""

from __future__ import annotations

import torch
from peft import LoraConfig
from torch.testing import assert_close
from transformers import PreTrainedModel

from tests.tiny import tiny_model
from verl_lightning.compat import transformers as compat
from verl_lightning.compat.peft import switch_adapters


def test_what_a_model_says_of_itself_is_still_there():
    model = tiny_model()
    assert compat.attention_of(model) == "sdpa"
    assert compat.block_names(model) == {type(model.base_model.layers[0]).__name__}
    assert compat.goes_through_attention_interface(model)
    assert not compat.has_state(model)
    assert {"_is_stateful", "_supports_attention_backend", "_no_split_modules"} <= vars(PreTrainedModel).keys()


def test_weights_become_files_and_files_become_weights():
    model = tiny_model()
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    stored = compat.weights_as_stored(model, model.state_dict())
    told = compat.convert_weights(skeleton, stored)
    assert not told.mismatched_keys
    assert not told.conversion_errors
    assert_close(skeleton.state_dict(), model.state_dict())


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
