"""Speed of an iteration, its use of the devices, and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from verl_lightning.models.blocks import attention_heads
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.vision import tower_weights

SQUARED_LENGTHS = "perf/squared_lengths"
"""Sum over all sequences of the squares of their lengths, which attention's operations follow; not logged."""

PEAK_TFLOPS = {
    "B300": 2250.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Dense bfloat16 matrix products of NVIDIA's data sheets, by a part of the device's name; the first that fits."""


class Work(NamedTuple):
    """Matrix products of one phase for each token of an iteration."""

    name: str
    """Name in the metric, ``perf/mfu/<name>``."""

    phase: str
    """Phase whose time counts."""

    per_token: float
    """Operations for a token in weights."""

    per_pair: float
    """Operations for a pair of tokens in attention."""

    def times(self, number: int) -> Work:
        """Returns the work of ``number`` such passes."""
        return self._replace(per_token=self.per_token * number, per_pair=self.per_pair * number)


def scoring_work(name: str, phase: str, model: TokenScorer) -> Work:
    """Work of a forward pass: ``2 * weights * tokens + 4 * layers * heads * head_dim * sum(length**2)``."""
    heads, head_dim = attention_heads(model.backbone)
    layers = model.backbone.config.get_text_config().num_hidden_layers
    return Work(name, phase, 2 * _active(model, trainable=False), 4.0 * layers * heads * head_dim)


def training_work(name: str, phase: str, model: TokenScorer) -> Work:
    """Work of a forward and a backward pass: three times as much, without the gradients of frozen weights."""
    forward = scoring_work(name, phase, model)
    per_token = 2 * forward.per_token + 2 * _active(model, trainable=True)
    return forward._replace(per_token=per_token, per_pair=3 * forward.per_pair)


def peak_tflops(device: torch.device) -> float | None:
    """Returns the device's peak in bfloat16, in 10**12 operations a second; None if that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def mfu_notice(device: torch.device) -> str:
    """Explains what ``perf/mfu/*`` means on this device, in a sentence for the log."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    peak = peak_tflops(device)
    if peak is None:
        return f"`perf/mfu/*` is not logged: the peak of {name} is not known to verl_lightning."
    return (
        "`perf/mfu/*` = (2 * weights * tokens + 4 * layers * heads * head_dim * sum(length**2)) / seconds / devices"
        f" / peak, three times as much in training; peak = {peak:g} TFLOP/s, dense bfloat16 on {name}."
    )


def speed_metrics(
    metrics: Mapping[str, float],
    *,
    ranks: int,
    devices: int,
    device: torch.device,
    work: Sequence[Work] = (),
    peak_memory: int = 0,
) -> dict[str, float]:
    """An iteration's metrics with throughput, time per token of each phase, use of the devices, and peak memory.

    Args:
        metrics: Metrics of all ranks: ``timing_s/...`` in seconds; ``perf/total_num_tokens``, every prompt and response
            token once; `SQUARED_LENGTHS`.
        ranks: Number of data-parallel ranks.
        devices: Number of all devices.
        device: Device of this rank.
        work: Matrix products of each phase.
        peak_memory: Most bytes that torch held on the GPU since the run began; 0 on the CPU.

    Returns:
        The given metrics and ``perf/throughput`` in tokens a second and rank, ``perf/time_per_step`` in seconds,
        ``timing_per_token_ms/...`` in milliseconds, ``perf/mfu/...`` as a share of the peak where that is known, and
        on GPUs ``perf/max_memory_allocated_gb`` in units of 2**30 bytes.
    """
    speed = {name: value for name, value in metrics.items() if name != SQUARED_LENGTHS}
    seconds, tokens = metrics["timing_s/step"], metrics.get("perf/total_num_tokens", 0.0)
    speed |= {"perf/time_per_step": seconds, "perf/throughput": tokens / seconds / ranks}
    for name, value in metrics.items():
        if name.startswith("timing_s/") and name != "timing_s/step":
            speed[name.replace("timing_s/", "timing_per_token_ms/")] = 1000 * value / max(tokens, 1)
    if peak_memory:
        speed["perf/max_memory_allocated_gb"] = peak_memory / 2**30
    peak = peak_tflops(device)
    return speed if peak is None else speed | mfu(metrics, work, operations=1e12 * peak * devices)


def mfu(metrics: Mapping[str, float], work: Sequence[Work], *, operations: float) -> dict[str, float]:
    """``perf/mfu/<name>`` of each phase that ran: what its models need, over what the devices could have done.

    Args:
        metrics: Metrics as `speed_metrics` takes them.
        work: Matrix products of each phase.
        operations: Operations that all devices together can do in a second.
    """
    tokens, squares = metrics.get("perf/total_num_tokens", 0.0), metrics.get(SQUARED_LENGTHS, 0.0)
    return {
        f"perf/mfu/{part.name}": (part.per_token * tokens + part.per_pair * squares) / seconds / operations
        for part in work
        if (seconds := metrics.get(f"timing_s/{part.phase}", 0.0)) > 0
    }


def _active(model: TokenScorer, *, trainable: bool) -> float:
    """Weights that a token is multiplied with: without look-up tables and without experts that it is not sent to."""
    config = model.backbone.config.get_text_config()
    shapes = model.weight_shapes()
    tower = {id(weight) for weight in tower_weights(model.backbone)}  # which no token is multiplied with
    named = model.named_parameters()
    frozen = {name for name, weight in named if id(weight) in tower or (trainable and not weight.requires_grad)}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    share = getattr(config, "num_experts_per_tok", experts) / experts
    looks_up = model.head == "value" or not model.backbone.config.tie_word_embeddings
    count = 0.0
    for name in shapes.keys() - frozen:
        if not (looks_up and name.endswith("embed_tokens.weight")):
            count += torch.Size(shapes[name]).numel() * (share if ".experts." in name else 1.0)
    return count
