"""Speed of supervised fine-tuning with `fsdp` inside `Trainer.fit`, and of the same step in a bare loop beside it.

On one to four GPUs, from the root of the repository::

    python benchmarks/fsdp_sft.py --devices 1 --out results.json

Trains a randomly initialised model of Qwen3-0.6B's shape on random tokens: float32 weights, bfloat16 compute, two
sequences a step and device (or ranks that share them), with and without recomputing all activations. Model FLOPs are
counted as ``6 * parameters + 12 * layers * heads * (hidden / heads) * length`` a token, as published figures do, over
the H100's 989 TFLOP/s in bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from step_timer import Spread, StepTimer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3Config

from verl_lightning.models.config import ModelConfig, OptimConfig
from verl_lightning.models.pretrained import read_config
from verl_lightning.modules import SFTModule
from verl_lightning.strategies import STRATEGIES
from verl_lightning.types import RowLength, TokenBatch

PEAK_FLOPS = 989e12


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table."""

    length: int
    """Tokens of a sequence."""

    checkpointing: bool
    """Whether all activations are recomputed."""

    devices: int
    """Processes."""

    fit_tokens_per_second: float
    """Inside `Trainer.fit`, of all devices together."""

    bare_tokens_per_second: float
    """The same steps called in a plain loop, in blocks that take turns with those of `Trainer.fit`."""

    loop_ms: Spread
    """What `Trainer.fit` adds to a step: quartiles over pairs of neighbouring blocks."""

    host_ms: float
    """The host's work of a step inside `Trainer.fit`; the device waits for it where a step is shorter."""

    loop_host_ms: Spread
    """What `Trainer.fit` adds to that."""

    mfu: float
    """Inside `Trainer.fit`; a share of the devices' peak."""

    peak_gib: float
    """Most memory that torch held on a device."""

    loss: float
    """Of the last step in the bare loop, in nats; near the vocabulary's log."""


def random_batches(vocab_size: int, length: int, count: int, *, sharing: int = 1) -> DataLoader[TokenBatch]:
    """Two sequences each, of which every token but the first is learnt; ``sharing`` ranks have the same."""
    generator = torch.Generator().manual_seed(int(os.environ.get("LOCAL_RANK", "0")) // sharing)
    ids = torch.randint(0, vocab_size, (count, 2, length), generator=generator)
    mask = torch.ones(2, length, dtype=torch.bool)
    lengths = (RowLength(length, length - 1, 1, length - 1),) * 2
    batches = [
        TokenBatch(input_ids=rows, attention_mask=mask, response_mask=mask[:, 1:], row_lengths=lengths) for rows in ids
    ]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


SHAPES = {  # hidden, feed-forward, layers, heads, key heads, head's size, vocabulary
    "tiny": (64, 128, 2, 4, 2, 16, 512),
    "135m": (576, 1536, 30, 9, 3, 64, 49152),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "1.7b": (2048, 6144, 28, 16, 8, 128, 151936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),
}
"""Sizes of Qwen3's family, and of SmolLM2-135M in its architecture."""


def write_model(folder: Path, shape: str = "0.6b") -> None:
    """A random model in a shape of Qwen3's family, unless it is there."""
    if folder.exists() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    torch.manual_seed(0)
    hidden, feed_forward, layers, heads, key_heads, head_dim, vocabulary = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        tie_word_embeddings=shape != "8b",
        max_position_embeddings=131072,
        rope_theta=1e6,
    )
    draft = folder.with_name(f".{folder.name}")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.bfloat16)
    model.save_pretrained(draft)
    draft.rename(folder)


def flops_per_token(model: torch.nn.Module, config: Any, length: int) -> float:
    """See the top of this file."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 6 * parameters + 12 * config.num_hidden_layers * config.hidden_size * length


def chosen_strategy(arguments: argparse.Namespace) -> Any:
    """What ``--strategy`` names, with the options of `fsdp` where they apply."""
    if arguments.strategy != "fsdp" and arguments.sequence_parallel > 1:
        raise SystemExit("`--sequence-parallel` needs `--strategy fsdp`.")
    if arguments.strategy == "auto":
        return "auto"
    options = {
        "compile": arguments.compile,
        "reshard_after_forward": arguments.reshard,
        "sequence_parallel_size": arguments.sequence_parallel,
    }
    return STRATEGIES[arguments.strategy](**options if arguments.strategy == "fsdp" else {})


def quiet_trainer(arguments: argparse.Namespace, strategy: Any, *callbacks: Callback, **options: Any) -> Trainer:
    """One that prints, logs and saves nothing."""
    return Trainer(
        accelerator=arguments.accelerator,
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )


def measure(arguments: argparse.Namespace, *, length: int, checkpointing: bool) -> Result:
    """One fit and one bare loop."""
    timer = StepTimer(arguments.warmup, arguments.steps, blocks=arguments.blocks, profiles=arguments.profile)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = quiet_trainer(
        arguments,
        chosen_strategy(arguments),
        timer,
        devices=arguments.devices,
        precision=arguments.precision,
        max_steps=timer.num_fit_steps,
    )
    config = ModelConfig(
        path=str(arguments.model),
        optim=OptimConfig(lr=1e-5),
        activation_checkpointing="full" if checkpointing else "none",
        packing=arguments.packing,
    )
    module = SFTModule(config)
    shape = read_config(arguments.model)
    batches = random_batches(shape.vocab_size, length, timer.num_fit_steps, sharing=arguments.sequence_parallel)
    trainer.fit(module, batches)
    tokens = 2 * length * trainer.world_size // arguments.sequence_parallel
    speed = tokens / timer.fit_seconds
    if timer.profile is not None:
        show(timer.profile.summary())
        if arguments.trace is not None and trainer.is_global_zero:
            timer.profile.export(arguments.trace)
    result = Result(
        length=length,
        checkpointing=checkpointing,
        devices=trainer.world_size,
        fit_tokens_per_second=round(speed, 1),
        bare_tokens_per_second=round(tokens / timer.bare_seconds, 1),
        loop_ms=milliseconds(timer.cost("step")),
        host_ms=round(1000 * statistics.median(block.host for block in timer.fit), 3),
        loop_host_ms=milliseconds(timer.cost("host")),
        mfu=round(speed * flops_per_token(module, shape, length) / trainer.world_size / PEAK_FLOPS, 4),
        peak_gib=round(module.clock.peak_memory() / 2**30, 2),
        loss=round(timer.loss, 4),
    )
    del trainer, module, timer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def told(spread: Spread) -> str:
    """A median with its quartiles, for people."""
    return f"{spread.median:+.2f} ({spread.low:+.2f} to {spread.high:+.2f})"


def milliseconds(seconds: Spread) -> Spread:
    """The same in thousandths."""
    return Spread(*(round(1000 * value, 3) for value in seconds))


def show(text: str) -> None:
    """Print on one rank, at once."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, flush=True)  # noqa: T201


def main() -> None:
    """Measure each length, with and without recomputation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("/tmp/qwen3-0.6b-random"), help="folder; made if absent")
    parser.add_argument("--strategy", choices=["auto", *STRATEGIES], default="fsdp")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sequence-parallel", type=int, default=1, help="ranks that share each sequence, under `fsdp`")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384], help="tokens of a sequence")
    parser.add_argument("--checkpointing", choices=["full", "none"], nargs="+", default=["full", "none"])
    parser.add_argument("--steps", type=int, default=5, help="counted steps of a block")
    parser.add_argument("--blocks", type=int, default=4, help="turns of `fit` and of the bare loop")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="blocks, under `fsdp`")
    parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=False, help="after forward")
    parser.add_argument("--packing", choices=["auto", "always", "never"], default="auto")
    parser.add_argument("--profile", action="store_true", help="say where the time of a step goes")
    parser.add_argument("--trace", type=Path, help="JSON file for the profile's trace")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU: what is left is the host's work")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(model=Path("/tmp/qwen3-tiny-random"), lengths=[16], checkpointing=["none"], compile=False)
        parser.set_defaults(accelerator="cpu", precision="32-true")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    write_model(arguments.model, "tiny" if arguments.tiny else "0.6b")
    names = ("length", "recompute", "devices", "tok/s in fit", "tok/s bare", "loop, ms", "loop, host ms")
    show(f"| {' | '.join((*names, 'MFU', 'peak GiB', 'loss'))} |\n{'| --- ' * 10}|")
    results = []
    for length in arguments.lengths:
        for checkpointing in arguments.checkpointing:
            row = measure(arguments, length=length, checkpointing=checkpointing == "full")
            results.append(asdict(row))
            show(
                f"| {row.length} | {checkpointing} | {row.devices} | {row.fit_tokens_per_second:,.0f}"
                f" | {row.bare_tokens_per_second:,.0f} | {told(row.loop_ms)}"
                f" | {told(row.loop_host_ms)} of {row.host_ms:.1f}"
                f" | {row.mfu:.1%} | {row.peak_gib} | {row.loss} |"
            )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = json.dumps({"device": device, "torch": torch.__version__, "results": results})
    show(report)
    if arguments.out is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        arguments.out.write_text(report)


if __name__ == "__main__":
    main()
