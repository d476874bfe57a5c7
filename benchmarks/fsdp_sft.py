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
import itertools
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config
from typing_extensions import override

from verl_lightning.models.config import ModelConfig, OptimConfig
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
    """The same steps called in a plain loop."""

    mfu: float
    """Inside `Trainer.fit`; a share of the devices' peak."""

    peak_gib: float
    """Most memory that torch held on a device."""

    loss: float
    """Of the last step in the bare loop, in nats; near the vocabulary's log."""


class StepTimer(Callback):
    """Times the steps inside `fit`, then the same steps outside Lightning's loop, and looks into a few with a profiler.

    The device is never waited for while steps are timed, as in training; medians are told.

    Args:
        warmup: First steps of `fit` that are not counted: they compile.
        steps: Steps that are counted, in `fit` and then in the bare loop.
        profiles: Whether three more steps of `fit` are profiled.
    """

    def __init__(self, warmup: int, steps: int, *, profiles: bool) -> None:
        self.warmup, self.steps = warmup, steps
        self.fit_seconds = self.bare_seconds = float("nan")  # of one step
        self.loss = float("nan")
        self.profile = Profile() if profiles else None
        self._marks: list[Any] = []

    @property
    def num_fit_steps(self) -> int:
        """Steps that `fit` must take."""
        return self.warmup + self.steps + (3 if self.profile else 0)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.warmup <= batch_idx <= self.warmup + self.steps:
            self._marks.append(mark())
        if batch_idx == self.warmup + self.steps and self.profile is not None:
            self.profile.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.warmup + self.steps and self.profile is None:
            self._marks.append(mark())
        if batch_idx + 1 == self.num_fit_steps and self.profile is not None:
            self.profile.stop()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, SFTModule)
        optimizer: Any = trainer.optimizers[0]
        self.fit_seconds = median_seconds(self._marks)
        marks, loss = [], torch.zeros(())
        for batch in itertools.islice(trainer.train_dataloader, self.steps + 1):
            loss = bare_step(pl_module, optimizer, batch.to(pl_module.device))
            marks.append(mark())
        self.bare_seconds = median_seconds(marks)
        self.loss = float(loss) / pl_module.contract.gradient_divisor


class Profile:
    """Where three steps spend the device's time and the host's."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._start = self.seconds = 0.0

    def start(self) -> None:
        """Call before the first of them."""
        self._profiler.__enter__()
        self._start = now()

    def stop(self) -> None:
        """Call after the last."""
        self.seconds = now() - self._start
        self._profiler.__exit__(None, None, None)

    def summary(self, rows: int = 30) -> str:
        """Milliseconds a step: device busy, host waits, then the longest kernels and operations."""
        events = self._profiler.key_averages()
        on_device = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU]
        busy = sum(e.self_device_time_total for e in on_device) / 3000
        lines = [f"step {1000 * self.seconds / 3:.1f} ms (profiled), device busy {busy:.1f} ms"]
        for name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"):
            for event in (e for e in events if e.key == name):
                lines.append(f"{name}: {event.count / 3:.1f} calls, {event.self_cpu_time_total / 3000:.1f} ms")
        lines.append("-- device")
        for event in sorted(on_device, key=lambda e: -e.self_device_time_total)[:rows]:
            lines.append(f"{event.self_device_time_total / 3000:8.2f} ms {event.count / 3:7.1f} x {event.key[:110]}")
        lines.append("-- host")
        on_host = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]
        for event in sorted(on_host, key=lambda e: -e.self_cpu_time_total)[:rows]:
            lines.append(f"{event.self_cpu_time_total / 3000:8.2f} ms {event.count / 3:7.1f} x {event.key[:80]}")
        return "\n".join(lines)

    def export(self, path: Path) -> None:
        """A trace for chrome://tracing."""
        self._profiler.export_chrome_trace(str(path))


def bare_step(module: SFTModule, optimizer: torch.optim.Optimizer, batch: TokenBatch) -> Tensor:
    """What `fit` does in a step, without its loop, hooks and logs."""
    contract = module.contract
    tokens = contract.sum_over_data_parallel(batch.response_mask.sum())

    def loss_fn(scores: Any, batch: TokenBatch) -> Any:
        return -(scores.log_probs * batch.response_mask).sum() / tokens, {}

    loss, _ = contract.train_loss(module.policy, batch, loss_fn)
    contract.backward(loss, None)  # type: ignore[attr-defined]
    contract.prepare_step(optimizer, module.policy_config.optim.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return contract.sum_over_data_parallel(loss.detach())


def mark() -> Any:
    """A moment of the device's time, taken without waiting for it; of the host's without a GPU."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def median_seconds(marks: list[Any]) -> float:
    """Between consecutive moments; a step that compiles or collects garbage does not count."""
    now()
    pairs = itertools.pairwise(marks)
    if not torch.cuda.is_available():
        return statistics.median(after - before for before, after in pairs)
    return statistics.median(before.elapsed_time(after) for before, after in pairs) / 1000


def now() -> float:
    """Seconds, once the device has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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


def write_model(folder: Path) -> None:
    """A random model of Qwen3-0.6B's shape, unless it is there."""
    if folder.exists() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        rope_theta=1e6,
    )
    draft = folder.with_name(f".{folder.name}")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(draft)
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
    timer = StepTimer(arguments.warmup, arguments.steps, profiles=arguments.profile)
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
    shape = AutoConfig.from_pretrained(arguments.model)
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
        mfu=round(speed * flops_per_token(module, shape, length) / trainer.world_size / PEAK_FLOPS, 4),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0,
        loss=round(timer.loss, 4),
    )
    del trainer, module, timer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


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
    parser.add_argument("--steps", type=int, default=10, help="counted steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="blocks, under `fsdp`")
    parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=False, help="after forward")
    parser.add_argument("--packing", choices=["auto", "always", "never"], default="auto")
    parser.add_argument("--profile", action="store_true", help="say where the time of a step goes")
    parser.add_argument("--trace", type=Path, help="JSON file for the profile's trace")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    write_model(arguments.model)
    show("| length | recompute | devices | tok/s in fit | tok/s bare | loop cost | MFU | peak GiB | loss |")
    show("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    results = []
    for length in arguments.lengths:
        for checkpointing in arguments.checkpointing:
            row = measure(arguments, length=length, checkpointing=checkpointing == "full")
            results.append(asdict(row))
            cost = row.bare_tokens_per_second / row.fit_tokens_per_second - 1
            show(
                f"| {row.length} | {checkpointing} | {row.devices} | {row.fit_tokens_per_second:,.0f}"
                f" | {row.bare_tokens_per_second:,.0f} | {cost:+.1%} | {row.mfu:.1%} | {row.peak_gib} | {row.loss} |"
            )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = json.dumps({"device": device, "torch": torch.__version__, "results": results})
    show(report)
    if arguments.out is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        arguments.out.write_text(report)


if __name__ == "__main__":
    main()
