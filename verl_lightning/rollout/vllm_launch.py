"""The way vLLM is started in a process: its import, its launcher and the arguments of its engine."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from verl_lightning.compat import vllm as compat
from verl_lightning.models.pretrained import read_config
from verl_lightning.models.vision import has_tower
from verl_lightning.needs import missing_vllm, no_vllm
from verl_lightning.rollout.vllm_config import VLLMConfig

CPU_CACHE_BYTES = 2**30
"""Size of the key-value cache on a CPU; on a GPU, vLLM fills its share of the memory."""


def import_vllm() -> Any:
    """Import the package, told to run its engine in this process.

    Raises:
        MisconfigurationException: If the package can't be imported.
    """
    try:
        return compat.import_in_process()
    except ImportError as error:
        raise MisconfigurationException(no_vllm(str(error))) from error


def check_vllm() -> None:
    """See that the package is there, without the time that its import takes.

    Raises:
        MisconfigurationException: If the package is not installed.
    """
    if (complaint := missing_vllm()) is not None:
        raise MisconfigurationException(complaint)


def launcher(device: torch.device) -> Literal["external_launcher"] | None:
    """Choose the way vLLM finds its device: by itself when alone, by the trainer's process group otherwise.

    Raises:
        MisconfigurationException: If the only process trains on another GPU than the first, where vLLM can't follow.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        # What `torchrun` sets and Lightning's own launchers don't.
        os.environ.setdefault("RANK", str(dist.get_rank()))
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
        return "external_launcher"
    if device.type == "cuda" and device.index:
        raise MisconfigurationException(
            f"`VLLMRollout` in a single process runs on the first visible GPU, but the trainer uses {device}."
            f" Set `CUDA_VISIBLE_DEVICES={device.index}` and `trainer.devices: 1`."
        )
    return None


def llm_options(config: VLLMConfig, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of ``vllm.LLM`` for an engine on a device, but for its model."""
    policy = read_config(config.path)
    is_cuda = device.type == "cuda"
    memory = (
        {"gpu_memory_utilization": config.gpu_memory_utilization, "enable_sleep_mode": True}
        if is_cuda
        else {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    )
    sources = memory | _weights_options(config)
    return sources | {
        "dtype": config.dtype,
        # As the trainer: rounding logits to 16 bits can part the two by about as much as all layers before do.
        "hf_overrides": {"head_dtype": "float32"} if is_cuda else None,
        "additional_config": {} if _has_draft_model(config) else compat.residual_options(policy.model_type),
        "max_model_len": config.max_model_len,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": config.log_probs_mode,
        "distributed_executor_backend": launcher(device),
        "tensor_parallel_size": config.tensor_parallel_size,
        "generation_config": "vllm",  # the model's own would add penalties that the trainer knows nothing of
        "skip_tokenizer_init": not (config.makes_text or reads_images(config)),
        "enable_prefix_caching": True,
        "speculative_config": None if config.speculation is None else config.speculation.vllm_options(),
    }


def reads_images(config: VLLMConfig) -> bool:
    """Tells whether the policy is one that images can be asked of."""
    return has_tower(read_config(config.path))


def _has_draft_model(config: VLLMConfig) -> bool:
    """Tells whether another model guesses tokens; it may read the policy's residual stream, in the engine's type."""
    return config.speculation is not None and config.speculation.method != "ngram"


def _weights_options(config: VLLMConfig) -> dict[str, Any]:
    """Returns the arguments of ``vllm.LLM`` that say where weights come from."""
    if config.lora_rank is None:
        transfer = {} if config.transfer == "host" else {"backend": config.transfer}
        return {"load_format": "dummy", "weight_transfer_config": transfer or None}
    ranks = [rank for rank in compat.LORA_RANKS if rank >= config.lora_rank]
    if not ranks:
        raise ValueError(f"vLLM takes adapters of rank {compat.LORA_RANKS[-1]} at the most, got {config.lora_rank}.")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": ranks[0]}
