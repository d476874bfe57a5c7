"""What differs between machines: the order in which kernels add float32 numbers, and what torch can compile."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

IS_PLAIN_X86 = platform.machine() in ("x86_64", "AMD64") and torch.backends.cpu.get_cpu_capability() == "DEFAULT"
needs_compiler = pytest.mark.skipif(
    IS_PLAIN_X86 or shutil.which("g++") is None,
    reason="torch.compile needs g++, and writes vectors even for x86 CPUs that have none",
)


def assert_near(actual: Any, expected: Any, *, rel: float = 1e-4) -> None:
    """Asserts that numbers are off by at most a share of the largest one among them.

    An element near 0 is often a sum that cancels, and off by more than any share of itself.

    Args:
        actual: Numbers, tensors, or mappings and sequences of these.
        expected: The same in shape; each tensor, and each sequence of numbers, is measured by its own largest.
        rel: Largest difference as a share of the largest expected absolute value.
    """
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_near(actual[name], expected[name], rel=rel)
    elif isinstance(expected, Sequence) and not all(isinstance(value, int | float) for value in expected):
        for value, other in zip(actual, expected, strict=True):
            assert_near(value, other, rel=rel)
    else:
        actual, expected = (value if isinstance(value, Tensor) else torch.tensor(value) for value in (actual, expected))
        is_exact = expected.numel() == 0 or not expected.is_floating_point()
        assert_close(actual, expected, rtol=0.0, atol=0.0 if is_exact else rel * expected.abs().max().item())
