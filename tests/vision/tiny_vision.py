"""Tiny models of each family that reads images, with their processors, and rows of coloured squares."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from tests.tiny import quickstart

HAS_NUM2WORDS = importlib.util.find_spec("num2words") is not None
SMOLVLM = pytest.param("smolvlm", marks=pytest.mark.oracle)  # its processor needs num2words
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", SMOLVLM]
TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TOKENS += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
TOKENS += ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
PLACEHOLDERS = {"qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<start_of_image>"}
PLACEHOLDERS |= dict.fromkeys(("qwen2_vl", "qwen3_vl"), PLACEHOLDERS["qwen2_5_vl"])
PLACEHOLDERS |= {"smolvlm": "<image>", "idefics3": "<image>"}

QWEN_PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}

TEMPLATE = """{% for message in messages %}<|{{ message['role'] }}|>\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>\
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

TEXT = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}


def vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of the quick start with the tokens that stand for images."""
    tokenizer = quickstart.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS[family])
    if family == "gemma3":
        names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            **tokenizer.special_tokens_map,
            extra_special_tokens=names,
            padding_side="left",
            chat_template=tokenizer.chat_template,
        )
    return tokenizer


def write_processor(path: Path, family: str) -> PreTrainedTokenizerFast:
    """Saves a processor that makes few tokens of an image, patches of 4 pixels in twos and twos; returns its tokenizer.

    Whole processors of most families can't be made without torchvision, which they want for videos.
    """
    tokenizer = vision_tokenizer(family)
    tokenizer.save_pretrained(path)
    if family in QWEN_PROCESSORS:
        images = Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
        )
        settings = {"processor_class": QWEN_PROCESSORS[family]}
    elif family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        settings = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    else:
        images = Idefics3ImageProcessorPil(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=False
        )
        name = "SmolVLMProcessor" if family == "smolvlm" else "Idefics3Processor"
        settings = {"processor_class": name, "image_seq_len": 4}
    images.save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps(settings))
    return tokenizer


def vision_config(family: str, tokenizer: PreTrainedTokenizerFast, *, wide: bool = False) -> Any:
    """A tiny model's configuration."""
    ids = tokenizer.convert_tokens_to_ids
    text = TEXT | ({"hidden_size": 128, "head_dim": 32} if wide else {}) | {"vocab_size": len(tokenizer)}
    text |= {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    if family in QWEN_PROCESSORS:
        vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4}
        vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": text["hidden_size"]}
        names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
        names |= {"vision_end": "<|vision_end|>"}
        common = {f"{name}_token_id": ids(token) for name, token in names.items()} | {"tie_word_embeddings": False}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        if family == "qwen2_vl":
            vision |= {"embed_dim": 16, "hidden_size": vision.pop("out_hidden_size"), "mlp_ratio": 2}
            return Qwen2VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision, **common)
        if family == "qwen2_5_vl":
            vision |= {"fullatt_block_indexes": [1], "window_size": 16, "tokens_per_second": 2}
            return Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision, **common)
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        rope["mrope_interleaved"] = True
        text |= {"rope_parameters": rope, "head_dim": 8}
        return Qwen3VLConfig(text_config=text, vision_config=vision, **common)
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    if family == "gemma3":
        text |= {
            "head_dim": 32 if wide else 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        names = {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>"}
        names |= {"eoi_token_index": "<end_of_image>"}
        tokens = {name: ids(token) for name, token in names.items()}
        return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    kind = SmolVLMConfig if family == "smolvlm" else Idefics3Config
    text = text | {"model_type": "llama"}
    return kind(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=ids("<image>"),
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip


def write_vision_folder(path: Path, family: str, *, seed: int = 0, wide: bool = False) -> Path:
    """Saves a tiny model with random weights and its processor, and returns the folder.

    Args:
        path: Folder to make.
        family: One of `FAMILIES`.
        seed: Seed of the weights.
        wide: True makes heads of 32, the least that vLLM has kernels for, and weights that are sure of themselves.
    """
    tokenizer = write_processor(path, family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(vision_config(family, tokenizer, wide=wide))
        for weight in model.parameters():
            if not weight.any():  # as Gemma-3's projection, through which no image would be seen
                torch.nn.init.normal_(weight, std=0.02)
            if wide and weight.dim() == 2:
                weight.data.mul_(8)
    model.save_pretrained(path)
    return path


def squares(count: int, *, size: tuple[int, int] = (16, 16), color: str = "red") -> Image.Image:
    """A white picture with some coloured squares of 4 pixels."""
    picture = Image.new("RGB", size, "white")
    for index in range(count):
        x, y = 4 * (2 * index % (size[0] // 4)), 4 * (2 * index // (size[0] // 4))
        picture.paste(color, (x, y, x + 4, y + 4))
    return picture
