"""Finds what would make the host wait for a GPU, on a machine without one: values that are read, shapes that depend on
them, and copies between host and device that block.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "equal", "is_nonzero"}
"""Operations that hand a value to the host."""

UNKNOWN_SHAPES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
"""Operations whose result has as many elements as values say, which the host must know."""

TO_HOST = {"cpu", "numpy", "tolist", "__array__"}
"""Methods that copy to the host."""

METHODS = (*sorted(TO_HOST), "to", "new_tensor", "__getitem__")
"""Methods that may copy between host and device: without an operation where both are the same."""

FROM_HOST = {"tensor", "as_tensor", "new_tensor"}
"""Functions that make a tensor of the host's numbers: on a device they copy from memory that is not pinned."""


class _Values(TorchDispatchMode):
    """Sees what operations do, those of backward passes among them."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS | UNKNOWN_SHAPES or (name == "repeat_interleave" and isinstance(args[-1], Tensor)):
            self.note(name)
        if name.startswith("index") and any(is_mask(index) for index in flat(args[1:2])):
            self.note(f"{name} by a mask")
        return func(*args, **kwargs or {})


class HostWaits:
    """Counts what would wait, by what is asked and by the functions of ours that ask, or else of another package."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Within it everything is seen."""
        with ExitStack() as stack:
            for place, names in {Tensor: METHODS, torch: ("tensor", "as_tensor")}.items():
                for name in names:
                    stack.enter_context(patch.object(place, name, self._seen(getattr(place, name), name)))
            stack.enter_context(_Values(self._note))
            yield

    def _seen(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function that copies between host and device, told of before it is called."""

        def call(*args: Any, **options: Any) -> Any:
            if (what := copied(name, args, options)) is not None:
                self._note(what)
            return function(*args, **options)

        return call

    def _note(self, what: str) -> None:
        self.found[f"{what}: {asker()}"] += 1


def copied(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
    """What a call would copy between host and device, None if nothing."""
    if name in TO_HOST or (name == "to" and "cpu" in (*args[1:], options.get("device"))):
        return name
    if name == "new_tensor" or (name in FROM_HOST and options.get("device") and not isinstance(args[0], Tensor)):
        return f"{name} on a device"
    if name == "__getitem__" and any(isinstance(index, list) for index in flat(args[1:2])):
        return "index by a list"
    return None


def asker() -> str:
    """The innermost function of this repository that is at work and whose caller it serves, else whoever it is."""
    frame, ours, others = sys._getframe(2), [], ""
    while frame is not None:
        name = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"
        if name.startswith("verl_lightning."):
            ours.append(name.removeprefix("verl_lightning."))
        elif not others and not name.startswith(("torch.", "tests.", "contextlib.")):
            others = name
        frame = frame.f_back
    return " for ".join(ours[:2]) or others


def flat(value: Any) -> Iterator[Any]:
    """Elements of tuples within tuples."""
    for each in value:
        yield each
        if isinstance(each, (tuple, list)):
            yield from flat(each)


def is_mask(index: Any) -> bool:
    """Whether an index counts the True elements of a tensor."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
