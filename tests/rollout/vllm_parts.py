"""What tests of vLLM share: a model that its CPU kernels can run, and engines for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from tests.rollout.asking import Prompts
from tests.tiny import tiny_model, tiny_tokenizer
from verl_lightning.models.config import ModelConfig
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.vllm import VLLMEngine
from verl_lightning.rollout.vllm_config import VLLMConfig

EOS, PAD = 1, 0


def write_sharp_folder(path: Path) -> Path:
    """A tiny model with heads of 32, the least that vLLM has kernels for, and weights that make it sure of itself."""
    model = tiny_model(hidden_size=64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def make_vllm_engine(folder: Path, **changes) -> VLLMEngine:
    """An engine of 64 tokens in float32, not started."""
    return VLLMEngine(make_vllm_config(folder, **changes))


def make_vllm_config(folder: Path, **changes) -> VLLMConfig:
    """Of 64 tokens in float32."""
    options = {"eos_token_ids": [EOS], "pad_token_id": PAD, "max_model_len": 64, "dtype": "float32"}
    return VLLMConfig(path=str(folder), enforce_eager=True, **options | changes)


def make_hf_engine(folder: Path) -> HFEngine:
    """The engine to compare with, started with the folder's weights."""
    engine = HFEngine(ModelConfig(path=str(folder)), eos_token_ids=[EOS], pad_token_id=PAD)
    engine.start(torch.device("cpu"))
    return engine


def make_prompts(lengths: Iterable[int] = (3, 9, 6), *, num_samples: int = 1) -> Prompts:
    """Random prompts of these lengths, each sample with a seed of its own."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(5, 100, (length,), generator=generator).tolist() for length in lengths]
    seeds = [[100 * row + sample for sample in range(num_samples)] for row in range(len(tokens))]
    return Prompts(tokens, seeds)


def weights_of(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Names and values, tied weights once, as strategies send them."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]
