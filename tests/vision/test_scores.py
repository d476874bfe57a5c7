"""Log-probs of sequences with images are those of transformers' own forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.vision.tiny_vision import FAMILIES, HAS_NUM2WORDS, squares, write_vision_folder
from verl_lightning.compat.transformers import attention_of
from verl_lightning.models.build import build_scorer, make_backbone
from verl_lightning.models.config import LoraConfig, ModelConfig
from verl_lightning.models.processor import image_processor
from verl_lightning.models.tokenizer import load_tokenizer
from verl_lightning.types import TokenBatch


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_vision_folder(tmp_path_factory.mktemp(request.param), request.param)


def rows_with_images(folder):
    """Two rows with images, one of two sizes, and one of text, as what the processor makes of each."""
    processor = image_processor(str(folder))
    shown = [[squares(2)], [squares(1, size=(24, 16)), squares(3, color="blue")], []]
    texts = ["ab" + processor.placeholder + "c", f"{processor.placeholder}x{processor.placeholder}yz12", "only text 12"]
    rows = []
    for text, images in zip(texts, shown, strict=True):
        options = {"images": [images]} if images else {}
        rows.append(processor.processor(text=[text], return_tensors="pt", add_special_tokens=False, **options))
    return processor, rows, [processor.read(images) if images else None for images in shown]


def token_batch(processor, rows, images, *, response=4):
    ids = [row["input_ids"][0] for row in rows]
    width = max(map(len, ids))
    batch = torch.zeros(len(ids), width, dtype=torch.long)
    mask = torch.zeros(len(ids), width, dtype=torch.bool)
    for row, own in enumerate(ids):
        batch[row, width - len(own) :], mask[row, width - len(own) :] = own, True
    return TokenBatch(
        input_ids=batch,
        attention_mask=mask,
        response_mask=torch.ones(len(ids), response, dtype=torch.bool),
        images=tuple(images),
        mm_token_type_ids=(batch == processor.image_token_id).long(),
    )


@torch.no_grad()
def reference_log_probs(model, row, response=4):
    logits = model(**row).logits[0, -response - 1 : -1]
    labels = row["input_ids"][0, -response:]
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def test_scores_are_those_of_transformers_with_any_neighbours(folder):
    processor, rows, images = rows_with_images(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    scorer = build_scorer(ModelConfig(path=str(folder)), "policy", trainable=False)
    batch = token_batch(processor, rows, images)

    expected = torch.stack([reference_log_probs(model, row) for row in rows])
    packs = build_scorer(ModelConfig(path=str(folder), packing="always"), "policy", trainable=False)
    with torch.no_grad():
        assert_close(scorer(batch).log_probs, expected, atol=1e-5, rtol=0)
        assert_close(packs(batch).log_probs, expected, atol=1e-5, rtol=0)
        backwards = scorer(batch.select(torch.tensor([2, 1, 0]))).log_probs
        text_alone = scorer(batch.select(slice(2, 3))).log_probs
    assert_close(backwards.flip(0), expected, atol=1e-5, rtol=0)
    assert_close(text_alone[0], expected[2], atol=1e-5, rtol=0)
    negative = reference_log_probs(model, rows[0] | {"pixel_values": -rows[0]["pixel_values"]})
    assert (expected[0] - negative).abs().max() > 1e-4


def test_the_image_token_is_text_where_the_policy_says_it(folder):
    processor, rows, images = rows_with_images(folder)
    batch = token_batch(processor, rows, images)
    said = batch.input_ids.clone()
    said[:, -2] = processor.image_token_id
    scorer = build_scorer(ModelConfig(path=str(folder)), "policy", trainable=False)
    packs = build_scorer(ModelConfig(path=str(folder), packing="always"), "policy", trainable=False)

    with torch.no_grad():
        scores = scorer(replace(batch, input_ids=said)).log_probs
        assert_close(packs(replace(batch, input_ids=said)).log_probs, scores, atol=1e-5, rtol=0)
        neighbours = scorer(replace(batch, input_ids=said).select(slice(2, 3))).log_probs
        before = scorer(batch).log_probs
    assert_close(scores[2:], neighbours, atol=1e-5, rtol=0)
    assert_close(scores[:, :2], before[:, :2], atol=1e-5, rtol=0)
    assert not torch.allclose(scores[:, 2:], before[:, 2:])


def test_the_tower_is_frozen_unless_asked_for_and_adapters_stay_in_the_language_model(folder):
    processor, rows, images = rows_with_images(folder)
    batch = token_batch(processor, rows, images)
    lora = LoraConfig(rank=2), LoraConfig(rank=2, target_modules=["q_proj", "o_proj"])
    adapted = [({"lora": each}, False) for each in lora]
    for options, trains in (({}, False), ({"train_vision_tower": True}, True), *adapted):
        scorer = build_scorer(ModelConfig(path=str(folder), **options), "policy", trainable=True)
        for part in (batch, batch.select(slice(2, 3))):  # with images, and a rank's batch without
            scorer.zero_grad()
            scorer(part).log_probs.sum().backward()
            trained = {name: weight for name, weight in scorer.named_parameters() if weight.requires_grad}
            assert all(weight.grad is not None for weight in trained.values())
            assert any("vision" in name or "visual" in name for name in trained) == trains
    with pytest.raises(ValueError, match="`train_vision_tower` trains whole weights"):
        ModelConfig(path=str(folder), train_vision_tower=True, lora=LoraConfig())


def test_our_causal_kernel_is_for_tokens_alone(folder):
    """A tower looks both ways within an image."""
    with torch.device("meta"):
        backbone = make_backbone(ModelConfig(path=str(folder), attn_implementation="varlen"), "policy")

    assert attention_of(backbone) == "varlen"
    assert backbone.config.vision_config._attn_implementation == "sdpa"


def test_tokenizer_of_the_folder_writes_the_placeholder(folder):
    parts = [{"type": "text", "text": "a"}, {"type": "image"}]
    text = load_tokenizer(folder).apply_chat_template([{"role": "user", "content": parts}], tokenize=False)

    assert image_processor(str(folder)).placeholder in text


@pytest.mark.skipif(HAS_NUM2WORDS, reason="the package is there")
def test_smolvlm_names_the_package_that_its_processor_needs(tmp_path):
    folder = write_vision_folder(tmp_path, "smolvlm")

    with pytest.raises(ValueError, match="is a model that reads images, but .*pip install num2words"):
        image_processor(str(folder)).text((16, 16))
