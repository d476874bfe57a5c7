"""Numbers are compared by the largest among them, and nothing else is let pass."""

from __future__ import annotations

import pytest
import torch

from tests.tolerances import assert_near


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([1000.05, 0.02]), torch.tensor([1000.0, 0.0])),
        ({"losses": [1.0, 2.0001], "mask": torch.tensor([True])}, {"losses": [1.0, 2.0], "mask": torch.tensor([True])}),
        (([0.0], [torch.zeros(0)]), ([0.0], [torch.zeros(0)])),
    ],
)
def test_what_is_near(actual, expected):
    assert_near(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([1000.2, 0.0]), torch.tensor([1000.0, 0.0])),
        ([torch.tensor([1000.0]), torch.tensor([1.1])], [torch.tensor([1000.0]), torch.tensor([1.0])]),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)]),
        (torch.tensor([False]), torch.tensor([True])),
        (torch.tensor([10**6 + 1]), torch.tensor([10**6])),
        (float("nan"), 1.0),
        (torch.ones(1, dtype=torch.bfloat16), torch.ones(1)),
        (torch.ones(2, 1), torch.ones(2)),
    ],
)
def test_what_is_not_near(actual, expected):
    with pytest.raises((AssertionError, ValueError)):
        assert_near(actual, expected)
