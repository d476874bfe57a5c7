"""Private names of transformers that `compat.transformers` uses are where it looks for them."""

from __future__ import annotations

import torch
from torch.testing import assert_close
from transformers import PreTrainedModel

from tests.tiny import tiny_model
from verl_lightning.compat import transformers as compat


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
