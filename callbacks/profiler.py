"""Records what chosen steps of training do, and reports where their time and memory went."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from rich.console import Console
from typing_extensions import override

from verl_lightning.callbacks.profile_report import Interval, StepRecord, summary_rows, summary_table, timeline_page
from verl_lightning.callbacks.profile_tools import Tool, ToolName, make_tool
from verl_lightning.faults import closest
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.ranges import named_range
from verl_lightning.run_folders import shared_run_folder
from verl_lightning.telemetry.phases import SAVE_CHECKPOINT, CheckpointClock, Moment, Span, users_profiler


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Steps from the first to the last; step 1 is the first of training."""

    first: int = 2
    """First step; the very first one of a run compiles and warms up."""

    last: int | None = 2
    """Last step, which is part of the range; null for all that follow."""

    every: int = 1
    """Steps from one to the next."""

    def __post_init__(self) -> None:
        for name in ("first", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"`steps.{name}` must be at least 1, got {getattr(self, name)}.")
        if self.last is not None and self.last < self.first:
            raise ValueError(f"`steps.last` ({self.last}) comes before `steps.first` ({self.first}).")

    def __contains__(self, step: int) -> bool:
        """Tells whether a step is one of the range's."""
        inside = step >= self.first and (self.last is None or step <= self.last)
        return inside and (step - self.first) % self.every == 0


class ProfilerCallback(Callback):
    """Records chosen steps of a fit with a profiler, and says where their time and memory went.

    Each chosen rank writes a trace for each step, or for each run of a phase if some are chosen, and a timeline that a
    browser shows; the first of them prints a table. A step lasts until the next one begins, so that checkpoints, hooks
    and loading of data belong to it. In a resumed run, those steps are recorded that are still to come.

    Args:
        tool: ``torch`` writes Chrome traces for https://ui.perfetto.dev; ``memory`` writes them with each allocation
            and, on GPUs, snapshots for https://pytorch.org/memory_viz, one of them if memory is exhausted; ``nsys``
            tells Nsight Systems, which must have started the run, when to record.
        steps: Steps to record, as a range or one by one; step 1 is the first.
        ranks: Ranks of the processes that record.
        phases: Phases to record alone, each run of one in a trace of its own; null records whole steps.
        folder: Folder for the files; null puts them into ``profile`` beside the first logger's files.

    Raises:
        ValueError: At start, if a step, rank, phase or tool can't be had.
        MisconfigurationException: At start, if the module has no phases or another profiler of torch is at work.
    """

    def __init__(
        self,
        tool: ToolName = "torch",
        steps: StepRange | list[int] = StepRange(),
        ranks: Sequence[int] = (0,),
        phases: list[str] | None = None,
        folder: str | None = None,
    ) -> None:
        if isinstance(steps, list) and (not steps or min(steps) < 1):
            raise ValueError(f"`steps` must name at least one step, counted from 1, got {steps}.")
        if not ranks or phases == []:
            raise ValueError("`ranks` and `phases` must not be empty: take the callback out to record nothing.")
        self.tool = tool
        self.steps = steps
        self.ranks = tuple(ranks)
        self.phases = phases
        self.folder = folder
        self.records: list[StepRecord] = []
        """What was recorded on this rank, step by step."""
        self._files: list[Path] = []
        self._recorder: Tool | None = None  # None on ranks that record nothing
        self._path = Path()
        self._step = 0  # the one at work; 0 before the first
        self._in_batch = False
        self._spans: list[Span] | None = None  # of the step at work; None if it is not recorded
        self._metrics: dict[str, float] = {}
        self._window = ExitStack()
        self._start: Moment | None = None  # of the step at work
        self._rank = 0
        self._is_tracing = False
        self._wanted: list[int] = []  # steps that were still to come when training began, where their end is known

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(pl_module, PostTrainingModule):
            raise MisconfigurationException(
                f"`ProfilerCallback` records the phases of our modules, but `{type(pl_module).__name__}` has none."
                " Use `trainer.profiler: pytorch` instead."
            )
        self._check(trainer, pl_module)
        self._check_others(trainer)
        tool = make_tool(self.tool, trainer.strategy.root_device)
        self._rank = trainer.global_rank
        self._recorder = tool if self._rank in self.ranks else None

    def _check(self, trainer: Trainer, module: PostTrainingModule) -> None:
        """Refuse what can't be had."""
        last = max(self.steps) if isinstance(self.steps, list) else max(self.steps.first, self.steps.last or 0)
        if 0 <= trainer.max_steps < last:
            raise ValueError(
                f"`profile.steps` asks for step {last}, but training ends with step {trainer.max_steps}"
                " (`trainer.max_steps`). Choose earlier steps, or train longer."
            )
        if wrong := [rank for rank in self.ranks if not 0 <= rank < trainer.world_size]:
            raise ValueError(
                f"`profile.ranks` asks for rank {wrong[0]}, but there are {trainer.world_size}: ranks count from 0."
            )
        if wrong_phases := [name for name in self.phases or [] if name not in module.phases]:
            raise ValueError(
                f"`profile.phases` asks for `{wrong_phases[0]}`, but this training has the phases"
                f" {', '.join(module.phases)}.{closest(wrong_phases[0], module.phases)}"
            )

    def _check_others(self, trainer: Trainer) -> None:
        """Refuse a second profiler of torch: a process can have one."""
        if self.tool == "nsys":
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [c for c in callbacks if isinstance(c, ProfilerCallback) and c is not self and c.tool != "nsys"]
        if others or isinstance(users_profiler(trainer), PyTorchProfiler):
            other = "another `ProfilerCallback`" if others else "`trainer.profiler: pytorch`"
            raise MisconfigurationException(
                f"`profile` with `tool: {self.tool}` and {other} both need torch's profiler, which a process has once."
                " Keep one of them; `trainer.profiler: simple` can stay beside either."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = Path(self.folder or shared_run_folder(trainer) / "profile")
        done = trainer.global_step
        self._wanted = [step for step in self._known_steps() if step > done]
        if not self._wanted and not (isinstance(self.steps, StepRange) and self.steps.last is None):
            rank_zero_warn(f"`profile.steps` records nothing: the run goes on after step {done}.")
        if self._recorder is None:
            return
        self._path = path
        path.mkdir(parents=True, exist_ok=True)
        self._recorder.prepare()

    def _known_steps(self) -> list[int]:
        if isinstance(self.steps, list):
            return self.steps
        return [] if self.steps.last is None else list(range(self.steps.first, self.steps.last + 1, self.steps.every))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._turn(trainer, pl_module)

    def on_phase_start(self, module: PostTrainingModule, phase: str) -> None:
        """A step may begin with a phase, if another callback runs before this one; a phase may have its own trace."""
        if self._recorder is None or not module.trainer.training:
            return
        if phase != SAVE_CHECKPOINT:
            self._turn(module.trainer, module)
        if self._spans is not None and phase in (self.phases or ()):
            self._start_tracing()

    def on_phase_end(self, module: PostTrainingModule, span: Span) -> None:
        """Keep what the phase took, and its trace."""
        if self._spans is None or not module.trainer.training:
            return
        if span.name in (self.phases or ()):
            count = sum(earlier.name == span.name for earlier in self._spans)
            self._stop_tracing(f"_{span.name}_{count}")
        self._spans.append(span)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._in_batch = False
        if self._spans is not None:
            names = ("perf/total_num_tokens", "perf/mfu/")
            found = trainer.callback_metrics.items()
            self._metrics = {name: float(value) for name, value in found if name.startswith(names)}

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step >= self._step:  # else the step goes on after it
            self._end_step(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_step(trainer)
        if self._recorder is not None and (late := sorted({*self._wanted} - {r.step for r in self.records})):
            warnings.warn(
                f"`ProfilerCallback` could not record step {late[0]}: training ended with step {trainer.global_step}.",
                stacklevel=2,
            )
        self._finish(pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._recorder is None:
            return
        if isinstance(exception, torch.OutOfMemoryError):
            self._files += self._recorder.out_of_memory(self._path / f"out_of_memory_rank={self._rank}")
        self._end_step(trainer)
        self._finish(pl_module)

    def _turn(self, trainer: Trainer, module: LightningModule) -> None:
        """Begin the next step, if one begins."""
        if self._in_batch:
            return
        self._in_batch = True
        step = trainer.global_step + 1
        if self._recorder is None or step == self._step:
            return
        self._end_step(trainer)
        self._step = step
        if step in self.steps:
            self._begin_step(trainer, module)

    def _begin_step(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, PostTrainingModule)
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        if self.phases is None:
            self._start_tracing()
        self._spans, self._metrics = [], {}
        profiler = trainer.profiler  # type: ignore[attr-defined]
        assert isinstance(profiler, CheckpointClock)  # our modules put it there
        profiler.actions = []
        self._window.enter_context(named_range(f"step {self._step}"))
        self._start = module.clock.now()

    def _end_step(self, trainer: Trainer) -> None:
        """Write down the step at work, if it is recorded."""
        spans, self._spans = self._spans, None
        if spans is None:
            return
        assert self._start is not None
        module = trainer.lightning_module
        assert isinstance(module, PostTrainingModule)
        end = module.clock.now()
        self._window.close()
        profiler = trainer.profiler  # type: ignore[attr-defined]
        actions, profiler.actions = profiler.actions, None
        record = StepRecord(
            step=self._step,
            start=self._start.seconds,
            end=end.seconds,
            phases=[Interval(s.name, s.start.seconds, s.end.seconds, s.peak_memory) for s in spans],
            actions=[Interval(*action) for action in actions if not action[0].startswith(f"[{type(module).__name__}]")],
            metrics=self._metrics,
        )
        self.records.append(record)
        if self._is_tracing:
            self._stop_tracing("" if self.phases is None else "_unfinished")

    def _start_tracing(self) -> None:
        assert self._recorder is not None
        self._recorder.start()
        self._is_tracing = True

    def _stop_tracing(self, part: str) -> None:
        assert self._recorder is not None
        self._is_tracing = False
        self._files += self._recorder.stop(self._path / f"{self.tool}_step={self._step}{part}_rank={self._rank}")

    def _finish(self, module: LightningModule) -> None:
        """Write the timeline, show the table, and say where everything is."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recorder.finish()
        if not self.records:
            return
        assert isinstance(module, PostTrainingModule)
        title = f"{type(module).__name__}, rank {self._rank}: steps {', '.join(str(r.step) for r in self.records)}"
        rows = summary_rows(self.records, {work.phase: work.name for work in module.work})
        timeline = self._path / f"timeline_rank={self._rank}.html"
        timeline.write_text(timeline_page(self.records, rows, title), encoding="utf-8")
        if missing := self._missing():
            warnings.warn(f"`ProfilerCallback` could not record {', '.join(missing)}.", stacklevel=2)
        if self._rank == min(self.ranks):
            Console(width=100).print(summary_table(rows, title))
        where = "" if self._files else "; its traces are where `nsys` puts them"
        Console(soft_wrap=True).print(f"Profile of rank {self._rank}: {len(self._files)} traces and {timeline}{where}")

    def _missing(self) -> list[str]:
        """Traces that are not there, and phases that did not run in a recorded step."""
        files = [f"`{path}`" for path in self._files if not path.exists() or not path.stat().st_size]
        ran = {part.name for record in self.records for part in record.phases}
        return files + [f"the phase `{name}`, which did not run" for name in self.phases or () if name not in ran]
