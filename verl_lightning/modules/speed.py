"""How fast an iteration was, and how much memory it took."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def speed_metrics(metrics: Mapping[str, float], *, ranks: int, device: torch.device) -> dict[str, float]:
    """Throughput, time per token of each phase, and peak memory.

    Args:
        metrics: An iteration's ``timing_s/...`` in seconds, and ``perf/total_num_tokens``, those of all ranks: every
            prompt and response token once.
        ranks: Data-parallel ranks.
        device: Whose memory is told, if it is a GPU.

    Returns:
        ``perf/throughput`` in tokens a second and rank, ``perf/time_per_step`` in seconds, ``timing_per_token_ms/...``
        in milliseconds, and on GPUs ``perf/max_memory_allocated_gb`` in units of 2**30 bytes.
    """
    seconds, tokens = metrics["timing_s/step"], metrics["perf/total_num_tokens"]
    speed = {"perf/time_per_step": seconds, "perf/throughput": tokens / seconds / ranks}
    for name, value in metrics.items():
        if name.startswith("timing_s/") and name != "timing_s/step":
            speed[name.replace("timing_s/", "timing_per_token_ms/")] = 1000 * value / max(tokens, 1)
    if device.type == "cuda":
        speed["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
    return speed
