"""Time and memory of an iteration's phases, measured without making the host wait for the device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from typing_extensions import override

from verl_lightning.metrics import Metric
from verl_lightning.ranges import named_range

METRICS = "metrics"
"""The phase in which an iteration is summed up and logged."""

SAVE_CHECKPOINT = "save_checkpoint"
"""The phase, and Lightning's name of it."""


@runtime_checkable
class PhaseListener(Protocol):
    """A callback that wants to know which phase of an iteration begins."""

    def on_phase_start(self, module: LightningModule, phase: str) -> None:
        """Called as each phase begins."""


@runtime_checkable
class PhaseEndListener(Protocol):
    """A callback that wants to know what a phase took."""

    def on_phase_end(self, module: LightningModule, span: Span) -> None:
        """Called as each phase ends; the span tells its seconds once the device has come that far."""


class TimedModule(Protocol):
    """A module that divides its iterations into phases."""

    clock: PhaseClock
    trainer: Trainer

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Marks what is done within as one phase."""


class Moment:
    """A point in time: of the host and, on a GPU, of when the device has done all that was asked of it before.

    Args:
        origin: An earlier moment, from which the device's clock counts; None makes this one an origin.
        on_gpu: True if the device has a clock.
    """

    def __init__(self, origin: Moment | None, *, on_gpu: bool) -> None:
        self.host = time.perf_counter()
        self._origin = origin
        self._event: Any = torch.cuda.Event(enable_timing=True) if on_gpu else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    @cached_property
    def seconds(self) -> float:
        """Seconds on the clock of ``time.perf_counter``. Waits until the device has come to this moment."""
        if self._event is None or self._origin is None or self._origin._event is None:
            return self.host
        self._event.synchronize()
        return self._origin.seconds + float(self._origin._event.elapsed_time(self._event)) / 1000


class Span:
    """One time that a phase ran.

    Args:
        name: Name of the phase.
        depth: 0, or the number of phases around it.
        start: Moment at which the phase began.
    """

    def __init__(self, name: str, depth: int, start: Moment) -> None:
        self.name = name
        self.depth = depth
        self.start = start
        self.end = start
        self.peak_memory = 0
        """Most bytes that torch held on this rank's GPU during the phase; 0 on the CPU."""

    @property
    def seconds(self) -> float:
        """Duration of the phase, in seconds. Waits for the device."""
        return self.end.seconds - self.start.seconds


class PhaseClock:
    """Times phases and finds each one's peak of memory.

    On a GPU, a phase begins when the device has done what was asked before it and ends when its own work is done, so
    that no phase pays for another one's kernels. The peaks of `torch.cuda` are reset at the borders of phases:
    ask `peak_memory` for the run's.
    """

    def __init__(self) -> None:
        self._on_gpu = False
        self._origin: Moment | None = None
        self._start: Moment | None = None  # of the first phase since the last `take`
        self._open: list[Span] = []
        self._spans: list[Span] = []
        self._peak = 0

    def use(self, device: torch.device) -> None:
        """Sets the device whose clock and memory count."""
        self._on_gpu = device.type == "cuda"
        self._origin = Moment(None, on_gpu=self._on_gpu)

    def now(self) -> Moment:
        """Returns this moment."""
        return Moment(self._origin, on_gpu=self._on_gpu)

    @contextmanager
    def measure(self, name: str) -> Iterator[Span]:
        """Times what is done within."""
        self._turn_peak()
        span = Span(name, len(self._open), self.now())
        self._start = self._start or span.start
        self._open.append(span)
        try:
            with named_range(name):
                yield span
        finally:
            self._turn_peak()
            span.end = self.now()
            self._open.remove(span)
            self._spans.append(span)

    def take(self) -> list[Span]:
        """Returns the spans since the last call, behind one called ``step`` from the first of them to now.

        Waits for the device.
        """
        spans, self._spans = self._spans, []
        if self._start is None:
            return []
        step = Span("step", -1, self._start)
        step.end = self.now()
        step.peak_memory = max((span.peak_memory for span in spans), default=0)
        self._start = None
        step.end.seconds  # noqa: B018  the device has come to the end of all spans
        self._origin = Moment(None, on_gpu=self._on_gpu)  # a device's clock loses precision over hours
        return [step, *spans]

    def forget(self) -> None:
        """Drops the spans since the last `take`, which nobody asks for."""
        self._spans, self._start = [], None

    def peak_memory(self) -> int:
        """Returns the most bytes that torch held on this rank's GPU since the run began; 0 on the CPU."""
        self._turn_peak()
        return self._peak

    def _turn_peak(self) -> None:
        """Gives the peak since the last border to all open phases."""
        if not self._on_gpu:
            return
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._peak = max(self._peak, peak)
        for span in self._open:
            span.peak_memory = max(span.peak_memory, peak)


def span_metrics(spans: list[Span], *, steps: int = 1) -> dict[str, Metric]:
    """Metrics of one rank's spans, for a `MetricTable`: over ranks, the slowest and the fullest one count.

    Args:
        spans: Spans from `PhaseClock.take`.
        steps: Iterations that the spans cover; times are means over them.

    Returns:
        ``timing_s/<phase>`` in seconds and, where memory is known, ``perf/max_memory_allocated_gb/<phase>`` in units
        of 2**30 bytes.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    peaks: defaultdict[str, int] = defaultdict(int)
    for span in spans:
        seconds[span.name] += span.seconds
        peaks[span.name] = max(peaks[span.name], span.peak_memory)
    metrics = {f"timing_s/{name}": Metric("max", total / steps) for name, total in seconds.items()}
    for name, peak in peaks.items():
        if peak and name != "step":
            metrics[f"perf/max_memory_allocated_gb/{name}"] = Metric("max", peak / 2**30)
    return metrics


class CheckpointClock(Profiler):
    """Times what only the Trainer knows the borders of, as phases of the module; all else is left to another profiler.

    Lightning has no hook at the end of writing a checkpoint, but tells its profiler.

    Args:
        module: Module whose phases are timed.
        profiler: The user's, which goes on as if this one were not there.
    """

    def __init__(self, module: TimedModule, profiler: Profiler) -> None:
        super().__init__(profiler.dirpath, profiler.filename)
        self.module = module
        self.profiler = profiler
        self.actions: list[tuple[str, float, float]] | None = None
        """Name, start and end of what Lightning did, on the clock of ``time.perf_counter``; None when nobody asks."""

    @override
    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]
        if self.actions is not None:
            return self._timed(action_name)
        return self._profile(action_name)

    def _profile(self, action_name: str) -> AbstractContextManager[str]:
        """Marks an action; a hundred times a step, so where there is nothing to mark it must take no time."""
        if action_name == SAVE_CHECKPOINT and self.module.trainer.training:
            return self._as_phase(action_name)
        if isinstance(self.profiler, PassThroughProfiler):
            return nullcontext(action_name)
        return self.profiler.profile(action_name)

    @contextmanager
    def _timed(self, action_name: str) -> Iterator[str]:
        start = time.perf_counter()
        with self._profile(action_name):
            yield action_name
        if self.actions is not None:
            self.actions.append((action_name, start, time.perf_counter()))

    @contextmanager
    def _as_phase(self, action_name: str) -> Iterator[str]:
        with self.profiler.profile(action_name), self.module.phase(action_name):
            yield action_name

    @override
    def start(self, action_name: str) -> None:
        self.profiler.start(action_name)

    @override
    def stop(self, action_name: str) -> None:
        self.profiler.stop(action_name)

    @override
    def summary(self) -> str:
        return self.profiler.summary()

    @override
    def describe(self) -> None:
        self.profiler.describe()

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.profiler.setup(stage, local_rank, log_dir)

    @override
    def teardown(self, stage: str | None) -> None:
        self.profiler.teardown(stage)

    def __del__(self) -> None:
        """Leaves the other profiler alone, which Lightning's base class would tear down."""


def users_profiler(trainer: Trainer) -> Profiler:
    """The profiler that the user gave to the Trainer."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    return profiler.profiler if isinstance(profiler, CheckpointClock) else profiler
