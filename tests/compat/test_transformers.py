"""Private names of transformers that `compat.transformers` uses are where it looks for them."""

from __future__ import annotations

import torch
from torch.testing import assert_close
from transformers import PreTrainedModel, Qwen2_5_VLConfig

from tests.tiny import tiny_model
from tests.vision.tiny_vision import write_processor
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


def test_a_processor_without_videos_is_that_of_the_model(tmp_path):
    """Where torchvision is missing; else it is the whole one. Its class is looked up by the model's configuration."""
    write_processor(tmp_path, "qwen2_5_vl")
    processor = compat.read_image_processor(str(tmp_path), Qwen2_5_VLConfig())
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert processor.image_token == "<|image_pad|>"
