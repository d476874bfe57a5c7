"""Private names and work-arounds of torch 2.11 to 2.13."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from verl_lightning.compat.patching import replaced

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed.checkpoint.storage import StorageReader

DTYPES = frozenset(
    ("torch", str(kind).removeprefix("torch.")) for kind in vars(torch).values() if isinstance(kind, torch.dtype)
)

METADATA_NAMES = DTYPES | {
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(("torch.distributed.checkpoint.metadata", f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""Modules and names in the pickle of a sharded checkpoint's `.metadata`, also where Megatron-Core 0.19 wrote it."""

ENTRY_NAMES = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    *(("torch", f"{kind}Storage") for kind in ("Float", "Double", "Half", "BFloat16")),
    *(("torch", f"{kind}Storage") for kind in ("Long", "Int", "Short", "Char", "Byte", "Bool")),
}
"""Modules and names in the pickles of its entries: of a tensor, or of tensors among plain values."""

STORAGE_INFO = "_StorageInfo"
"""Name of the class that says where an entry lies."""


def storage_info(file: str, offset: int, length: int) -> Any:
    """Describe where an entry of a sharded checkpoint lies, as its table of contents does.

    Args:
        file: Name of the file.
        offset: First byte.
        length: Number of bytes.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


@contextmanager
def item_writer_replaced(module: ModuleType, write: Callable[..., Any]) -> Iterator[None]:
    """Have a module that writes a checkpoint's entries by torch's private `_write_item` call our function.

    `test_each_item_has_a_crc` and its like for Megatron fail when that has another name or is not used.

    Args:
        module: `torch.distributed.checkpoint.filesystem`, or one that has imported the function from there.
        write: Called with torch's function before the arguments for it.
    """
    own = module._write_item
    # Megatron-Core looks at its signature.
    with replaced(module, "_write_item", functools.wraps(own)(functools.partial(write, own))):
        yield


def load_alone(reader: StorageReader, state: dict[str, Any]) -> None:
    """Read a sharded checkpoint in one process, whether or not it is in a group of several.

    The public `load` warns that it is alone, and reads no entry that the state does not name.

    Args:
        reader: Reader of the folder.
        state: Tensors to be read in place; an empty one gets all that the folder holds.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    planner = DefaultLoadPlanner() if state else _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)


def is_running(group: dist.ProcessGroup) -> bool:
    """Tell whether a process group has not been destroyed, which torch's public functions tell by errors alone."""
    return group in dist.distributed_c10d._world.pg_map


def mark_static(tensor: Tensor, axis: int) -> None:
    """Have compiled functions take the size of an axis for a constant; documented in spite of its private module."""
    torch._dynamo.mark_static(tensor, axis)


def varlen_options() -> dict[str, Any]:
    """Get the option by which variable-length attention takes fewer key heads than query heads; 2.11 needs none."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def view_of_read_only(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over an array that nobody may write to; torch warns that it can't forbid it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def record_memory_history(max_entries: int | None) -> None:
    """Begin to keep the history of GPU allocations with their Python stacks, or end it.

    Documented in spite of its underscore, as `dump_memory_snapshot` is.

    Args:
        max_entries: Allocations to keep; null ends the history.
    """
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)


def dump_memory_snapshot(path: Path) -> None:
    """Write the history of GPU allocations to a file."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def set_gradient_scale(optimizer: torch.optim.Optimizer, *, factor: Tensor, skips: Tensor) -> None:
    """Tell a fused optimizer what to multiply its gradients by in its next step, or to change nothing at all.

    Through the attributes by which `torch.amp.GradScaler` tells it the same.

    Raises:
        TypeError: If the optimizer is not fused.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise TypeError(
            f"`{type(optimizer).__name__}` cannot scale gradients while it steps. Give it `fused=True`, or make it with"
            " the strategy's `make_optimizer`."
        )
    factors: Any = optimizer
    factors.grad_scale = torch.where(skips, 1.0, 1.0 / factor).float()  # what it divides by
    factors.found_inf = skips.float()


def forget_gradient_scale(optimizer: torch.optim.Optimizer, *step_arguments: Any) -> None:
    """Take back what `set_gradient_scale` said: a hook for after each step."""
    del step_arguments
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def move_schedule(schedule: LRScheduler, state: Mapping[str, Any], rates: list[float | Tensor]) -> None:
    """Bring a schedule to the position of a saved one, and leave all else of it as it is.

    Args:
        schedule: Schedule whose ``load_state_dict`` would take base learning rates too.
        state: State of the saved schedule.
        rates: Learning rates of the groups at that position.
    """
    schedule.last_epoch, schedule._step_count = state["last_epoch"], state["_step_count"]
    schedule._last_lr = rates


def hide_schedule_warning() -> None:
    """Hide that a schedule moves before its optimizer: it counts iterations, and an actor waits for its critic."""
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


class LocalAdamW(torch.optim.AdamW):
    """AdamW that steps over this rank's parts, with distributed tensors as its parameters and state.

    Each element is stepped by itself, so no other rank is needed; torch would find that out anew for each parameter
    and step, which keeps the host busy for longer than the step takes.
    """

    @override
    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Hand the parts to the step, for which torch collects tensors in lists."""
        from torch.distributed.tensor import DTensor

        has_complex = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        return bool(has_complex)
