"""Tools that record a window of training: torch's profiler, Nsight Systems, the history of the GPU's memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from verl_lightning.compat.torch import dump_memory_snapshot, record_memory_history

ToolName = Literal["torch", "nsys", "memory"]

NSYS_COMMAND = (
    "nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=repeat"
    " --output=step_%p verl-fit ..."
)
"""Command that starts a run such that Nsight Systems sees its windows."""

NSYS_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
"""Variables that Nsight Systems sets for the processes that it starts; some of them, depending on its options."""

MAX_HISTORY = 200_000
"""Most allocations that a memory snapshot tells of."""


class Tool(Protocol):
    """Records windows, one after the other."""

    suffix: str
    """Suffix of the tool's files; empty if another program writes them."""

    def prepare(self) -> None:
        """Called once, before the first step."""

    def start(self) -> None:
        """A window begins."""

    def stop(self, path: Path) -> list[Path]:
        """The window is over; returns the files it was written to."""

    def out_of_memory(self, path: Path) -> list[Path]:
        """The device's memory was exhausted; returns the files that tell why."""

    def finish(self) -> None:
        """Called once, after the last step."""


class TorchTool:
    """A Chrome trace of what Python, torch and the GPU's kernels did.

    Args:
        device: Device that trains.
        memory: Record each allocation as well.
    """

    suffix = ".json.gz"

    def __init__(self, device: torch.device, *, memory: bool = False) -> None:
        self._memory = memory
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile: profile | None = None

    def prepare(self) -> None:
        """Have the GPU's tracer start once, which takes seconds, outside the first window."""
        with profile(activities=self._activities):
            pass

    def start(self) -> None:
        """Record from here."""
        self._profile = profile(activities=self._activities, profile_memory=self._memory, record_shapes=self._memory)
        self._profile.start()

    def stop(self, path: Path) -> list[Path]:
        """Write what was recorded."""
        assert self._profile is not None
        self._profile.stop()
        file = path.with_name(path.name + self.suffix)
        self._profile.export_chrome_trace(str(file))
        self._profile = None
        return [file]

    def out_of_memory(self, path: Path) -> list[Path]:
        """Nothing: it knows no history."""
        del path
        return []

    def finish(self) -> None:
        """Nothing is left to do."""


class MemoryTool(TorchTool):
    """A Chrome trace with each allocation and, on GPUs, a snapshot for https://pytorch.org/memory_viz.

    On a GPU the history of allocations is kept from the first step on, so that a snapshot can be taken when memory is
    exhausted.

    Args:
        device: Device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, memory=True)
        self._has_history = device.type == "cuda"

    def prepare(self) -> None:
        """Begin the history."""
        super().prepare()
        if self._has_history:
            record_memory_history(MAX_HISTORY)

    def stop(self, path: Path) -> list[Path]:
        """Write the trace, and the snapshot of this moment."""
        return [*super().stop(path), *self.out_of_memory(path)]

    def out_of_memory(self, path: Path) -> list[Path]:
        """A snapshot with the latest allocations."""
        if not self._has_history:
            return []
        file = path.with_name(path.name + ".pickle")
        dump_memory_snapshot(file)
        return [file]

    def finish(self) -> None:
        """End the history."""
        if self._has_history:
            record_memory_history(None)


class NsysTool:
    """Tells Nsight Systems, which must have started the process, when to record.

    Args:
        device: Device that trains.
    """

    suffix = ""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self) -> None:
        """Nothing: the process runs inside the tool."""

    def start(self) -> None:
        """Record from here."""
        torch.cuda.synchronize(self._device)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def stop(self, path: Path) -> list[Path]:
        """Record up to what the device has been asked to do; `nsys` writes the file."""
        del path
        torch.cuda.synchronize(self._device)
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        return []

    def out_of_memory(self, path: Path) -> list[Path]:
        """Nothing: it knows no history."""
        del path
        return []

    def finish(self) -> None:
        """Nothing is left to do."""


def make_tool(name: ToolName, device: torch.device) -> Tool:
    """The tool of that name.

    Raises:
        ValueError: If the tool needs a GPU and training has none, or needs `nsys` and it has not started this process.
    """
    if name == "nsys":
        if device.type != "cuda":
            raise ValueError(
                "`profile.tool: nsys` records what an NVIDIA GPU does, but training runs on the"
                f" {device.type.upper()}. Use `tool: torch`, or train with `trainer.accelerator: gpu`."
            )
        if not is_under_nsys(os.environ):
            raise ValueError(
                "`profile.tool: nsys` tells Nsight Systems when to record, but `nsys` has not started this process."
                f" Run `{NSYS_COMMAND}`, or use `tool: torch`, which needs no other program."
            )
        return NsysTool(device)
    return MemoryTool(device) if name == "memory" else TorchTool(device)


def is_under_nsys(environment: Mapping[str, str]) -> bool:
    """Tells whether Nsight Systems has started the process with this environment."""
    return any(environment.get(name) for name in NSYS_VARIABLES)
