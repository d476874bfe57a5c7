"""Speed of attention over packed rows: torch's variable-length kernel on ragged rows, beside what equal rows get.

On one GPU, from the root of the repository::

    python benchmarks/varlen_attention.py --out results.json

One layer of Qwen3-0.6B's heads, in bfloat16, over rows of the same number of tokens cut in different ways. Each is
timed as a model calls it (`varlen_attention`) forward and backward. FLOPs are those of causal attention: ``2 * heads *
dim * length**2`` for each sequence forward, two and a half times as many backward.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_lightning.models.attention import varlen_attention

HEADS, KEY_HEADS, DIM = 16, 8, 128


def cuts(tokens: int) -> dict[str, list[int]]:
    """Lengths of the sequences of a row of ``tokens``."""
    generator = torch.Generator().manual_seed(0)
    points = sorted({0, tokens, *torch.randint(1, tokens, (15,), generator=generator).tolist()})
    return {
        "one sequence": [tokens],
        "two equal": [tokens // 2] * 2,
        "two nearly equal": [tokens // 2 - 1, tokens // 2 + 1],
        "sixteen equal": [tokens // 16] * 16,
        "sixteen ragged": [after - before for before, after in zip(points, points[1:], strict=False)],
    }


def measure(lengths: list[int], *, device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of both passes."""
    total = sum(lengths)
    query, key, value = (
        torch.randn(1, heads, total, DIM, device=device, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(device)

    def forward() -> Tensor:
        output, _ = varlen_attention(
            nn.Identity(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=max(lengths)
        )
        return output

    output = forward()
    gradient = torch.randn_like(output)
    seconds = {
        "forward": median(forward, repeats, device),
        "backward": median(lambda: output.backward(gradient, retain_graph=True), repeats, device),
    }
    flops = {"forward": sum(2 * HEADS * DIM * length**2 for length in lengths)}
    flops["backward"] = flops["forward"] * 5 // 2
    return {
        f"{name}_{unit}": round(number, 3)
        for name, spent in seconds.items()
        for unit, number in (("ms", 1000 * spent), ("tflops", flops[name] / spent / 1e12))
    }


def median(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Seconds of one run, once it is warm."""
    seconds = []
    for _ in range(repeats + 3):
        start = now(device)
        run()
        seconds.append(now(device) - start)
    return sorted(seconds[3:])[repeats // 2]


def now(device: torch.device) -> float:
    """Seconds, once the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Measure each way to cut a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="of a row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    device, results = torch.device(arguments.device), []
    for tokens in arguments.tokens:
        for name, lengths in cuts(tokens).items():
            row = measure(lengths, device=device, dtype=getattr(torch, arguments.dtype), repeats=arguments.repeats)
            results.append({"tokens": tokens, "rows": name} | row)
            print(json.dumps(results[-1]), flush=True)  # noqa: T201
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"device": card, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
