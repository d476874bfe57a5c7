"""Has vLLM add up its layers' outputs in float32, as the trainer does, where it computes in 16 bits.

Rounded after every layer, this sum, the residual stream, errs as much as all else that is rounded. vLLM has no option
for it, but lets other classes take the place of its own in every model (``CustomOp.register_oot``). Its models hand the
stream from norm to norm and read it nowhere else.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from verl_lightning.models.pretrained import read_config

FLOAT32_RESIDUAL = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Model types whose models in vLLM do so, which was read in their source: `RMSNorm` alone adds to the stream."""

OPTIONS = {"residual": "float32"}
"""vLLM's ``additional_config`` of an engine that does; it also keeps its compiled graphs apart from other engines'."""


def residual_options(path: str) -> dict[str, str]:
    """The ``additional_config`` for a model; empty if its stream keeps the engine's type.

    Args:
        path: Folder or hub name of a Hugging Face model.
    """
    return OPTIONS if read_config(path).model_type in FLOAT32_RESIDUAL else {}


@cache
def register_float32_residual() -> None:
    """Have engines of this process with these options do so, from now on; again, it changes nothing."""
    custom_op = importlib.import_module("vllm.model_executor.custom_op").CustomOp
    layers = importlib.import_module("vllm.model_executor.layers.layernorm")
    config = importlib.import_module("vllm.config")
    base: Any = layers.RMSNorm

    class Float32ResidualRMSNorm(base):  # type: ignore[misc]
        """`RMSNorm` that returns the stream in float32, whatever comes in."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._sums_in_float32 = OPTIONS.items() <= config.get_current_vllm_config().additional_config.items()

        @override
        def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
            if residual is None or not self._sums_in_float32:
                return super().forward(x, residual)
            stream = x.float() + residual.float()
            scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + self.variance_epsilon)
            return (stream * scale).to(x.dtype) * self.weight, stream

    custom_op.register_oot(Float32ResidualRMSNorm, name=base.__name__)
