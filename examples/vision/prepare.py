"""Builds a task with pictures from nothing: a tiny Qwen2.5-VL, its processor, and pictures of coloured squares.

A picture of 16 by 16 pixels shows one to eight squares on a grid of four by four, some red, some blue; the answer to
"red" is the number of the red ones. Nothing is downloaded, and the same seed gives the same files. Run
``python examples/vision/prepare.py --out runs/vision``; it writes there

* ``model/``: the model with random weights, its tokenizer and its image processor;
* ``pictures/``: the pictures, as PNG;
* ``sft.jsonl``: questions with their answers, for a short SFT;
* ``train.jsonl``, ``val.jsonl``: other questions, for GRPO, in verl's schema with its column ``images``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

QUICKSTART = Path(__file__).parents[1] / "quickstart" / "prepare.py"
MARKS = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
MARKS |= {"image": "<|image_pad|>", "video": "<|video_pad|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COLORS = ["red", "blue"]
SIDE, CELL = 16, 4


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The quick start's tokenizer of characters, with the marks of images."""
    spec = importlib.util.spec_from_file_location("quickstart_prepare", QUICKSTART)
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    tokenizer: PreTrainedTokenizerFast = quickstart.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS.values())})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_model(path: Path, *, seed: int = 0, hidden_size: int = 64) -> None:
    """Writes a Qwen2.5-VL with random weights, which makes four tokens of a picture.

    Args:
        path: Folder to write.
        seed: Of the weights. The global random state is left as it was.
        hidden_size: Width of the language model's residual stream; that of the vision tower is the same.
    """
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(path)
    processor = Qwen2VLImageProcessorPil(
        patch_size=CELL, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    processor.save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    sections = [hidden_size // parts for parts in (16, 32, 32)]  # time, height and width: half of a head's width
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
        },
        vision_config={
            "depth": 2,
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_heads": 4,
            "patch_size": CELL,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden_size,
            "fullatt_block_indexes": [1],
            "window_size": SIDE,
            "tokens_per_second": 2,
        },
        tie_word_embeddings=False,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(path)


def draw(counts: dict[str, int], generator: random.Random) -> Image.Image:
    """Draws squares of these colours and numbers into cells of a white picture."""
    places = [(x, y) for x in range(0, SIDE, CELL) for y in range(0, SIDE, CELL)]
    picture, chosen = Image.new("RGB", (SIDE, SIDE), "white"), generator.sample(places, sum(counts.values()))
    colors = [color for color, count in counts.items() for _ in range(count)]
    for (x, y), color in zip(chosen, colors, strict=True):
        picture.paste(color, (x, y, x + CELL, y + CELL))
    return picture


def make_row(folder: Path, index: int, generator: random.Random) -> dict[str, Any]:
    """Draws a picture, and returns a question about it with its answer."""
    counts = {color: generator.randint(0, 4) for color in COLORS}
    if not any(counts.values()):
        counts[generator.choice(COLORS)] = 1
    asked = generator.choice(COLORS)
    picture = folder / "pictures" / f"{index:04d}.png"
    draw(counts, generator).save(picture)
    return {
        "data_source": "squares",
        "prompt": [{"role": "user", "content": f"<image>{asked}"}],
        "images": [str(picture.relative_to(folder))],
        "ground_truth": str(counts[asked]),
    }


def write_rows(folder: Path, *, num_sft: int = 512, num_train: int = 1024, num_val: int = 128, seed: int = 0) -> None:
    """Writes the pictures and the three files of rows."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    rows = [make_row(folder, index, generator) for index in range(num_sft + num_train + num_val)]
    taught = [{**row, "completion": row["ground_truth"]} for row in rows[:num_sft]]
    parts = {"sft": taught, "train": rows[num_sft : num_sft + num_train], "val": rows[num_sft + num_train :]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def main() -> None:
    """Writes everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/vision"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_model(arguments.out / "model", seed=arguments.seed)
    write_rows(arguments.out, seed=arguments.seed)


if __name__ == "__main__":
    main()
