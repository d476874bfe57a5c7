"""Times steps inside `Trainer.fit` and the same steps in a bare loop, in blocks that take turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from verl_lightning.modules import SFTModule
from verl_lightning.types import TokenBatch


class Mark(NamedTuple):
    """A moment, taken without waiting for the device."""

    device: Any
    """An event of the device; the host's clock without a GPU."""

    host: float
    """Seconds that this thread has computed; what other processes take does not count."""


class Block(NamedTuple):
    """Median seconds of a step in a run of steps."""

    step: float
    """From one step to the next, on the device."""

    host: float
    """Of the host's work, whether the device waited for it or not."""


class Spread(NamedTuple):
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Those of some numbers."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


class StepTimer(Callback):
    """Times blocks of steps inside `fit`, and after each as many outside Lightning's loop, with the same model.

    A machine that is slower for a while slows blocks of both kinds, and how the differences between neighbours spread
    tells noise from cost. The device is never waited for while steps are timed, as in training.

    Args:
        warmup: First steps of `fit` that are not counted: they compile.
        steps: Counted steps of a block.
        blocks: How often the two take turns.
        profiles: Whether three more steps of `fit` are profiled at the end.
    """

    def __init__(self, warmup: int, steps: int, *, blocks: int = 1, profiles: bool = False) -> None:
        self.warmup, self.steps, self.blocks = warmup, steps, blocks
        self.fit: list[Block] = []
        self.bare: list[Block] = []
        self.loss = float("nan")  # of the last bare step
        self.profile = Profile() if profiles else None
        self._marks: list[Mark] = []

    @property
    def num_fit_steps(self) -> int:
        """Steps that `fit` must take."""
        return self.warmup + self.blocks * self.steps + (3 if self.profile else 1)

    @property
    def fit_seconds(self) -> float:
        """Of a step inside `fit`."""
        return statistics.median(block.step for block in self.fit)

    @property
    def bare_seconds(self) -> float:
        """Of a step in the bare loop."""
        return statistics.median(block.step for block in self.bare)

    def cost(self, of: str) -> Spread:
        """Seconds that `fit` adds to a step, over pairs of neighbouring blocks.

        Args:
            of: ``step``, the device's time, or ``host``, the work of the host.
        """
        pairs = zip(self.fit, self.bare, strict=True)
        return Spread.of([getattr(inside, of) - getattr(outside, of) for inside, outside in pairs])

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        counted = batch_idx - self.warmup
        if not 0 <= counted <= self.blocks * self.steps:
            return
        self._marks.append(mark())
        if counted and counted % self.steps == 0:
            self.fit.append(block_of(self._marks))
            self.bare.append(self._bare_block(trainer, pl_module))
            self._marks = [mark()]
        if counted == self.blocks * self.steps and self.profile is not None:
            self.profile.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.num_fit_steps and self.profile is not None:
            self.profile.stop()

    def _bare_block(self, trainer: Trainer, module: Any) -> Block:
        assert isinstance(module, SFTModule)
        optimizer: Any = trainer.optimizers[0]
        marks, loss = [], torch.zeros(())
        for batch in itertools.islice(endless(trainer.train_dataloader), self.steps + 1):
            marks.append(mark())
            loss = bare_step(module, optimizer, batch.to(module.device))
        block = block_of(marks)
        self.loss = float(loss) / module.contract.gradient_divisor
        return block


def endless(loader: Any) -> Iterator[Any]:
    """Its batches, again and again."""
    while True:
        yield from loader


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
    loss.backward()  # type: ignore[no-untyped-call]
    contract.prepare_step(optimizer, module.policy_config.optim.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return contract.sum_over_data_parallel(loss.detach())


def mark() -> Mark:
    """This moment."""
    if not torch.cuda.is_available():
        return Mark(time.perf_counter(), time.thread_time())
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return Mark(event, time.thread_time())


def block_of(marks: list[Mark]) -> Block:
    """Medians between consecutive moments; a step that compiles or collects garbage does not count."""
    now()
    pairs = list(itertools.pairwise(marks))
    host = statistics.median(after.host - before.host for before, after in pairs)
    if not torch.cuda.is_available():
        return Block(statistics.median(after.device - before.device for before, after in pairs), host)
    return Block(statistics.median(before.device.elapsed_time(after.device) for before, after in pairs) / 1000, host)


def now() -> float:
    """Seconds, once the device has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
