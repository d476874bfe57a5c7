"""Metrics that state their own reduction, so that micro-batches and ranks of any size add up to the right number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from verl_lightning.faults import InternalValueError

Kind = Literal["mean", "sum", "max", "min"]
Number = Tensor | float


class Metric(NamedTuple):
    """A part of a metric: what one micro-batch or one rank knows of it."""

    kind: Kind
    total: Number
    weight: Number = 1.0
    """Divisor of a mean; at 0 a metric of any kind has nothing to report."""

    def merge(self, other: Metric) -> Metric:
        """Returns both parts as one.

        Raises:
            InternalValueError: If the two are reduced in different ways.
        """
        if self.kind != other.kind:
            raise InternalValueError(f"a metric cannot be both a {self.kind} and a {other.kind}")
        weight = self.weight + other.weight
        if self.kind in ("mean", "sum"):
            return Metric(self.kind, self.total + other.total, weight)
        if isinstance(self.total, Tensor) and isinstance(other.total, Tensor):  # Python's `max` waits for the device
            better = torch.maximum if self.kind == "max" else torch.minimum
            return Metric(self.kind, better(self.total, other.total), weight)
        best = max(self.total, other.total) if self.kind == "max" else min(self.total, other.total)
        return Metric(self.kind, best, weight)

    @property
    def value(self) -> Number:
        """The metric itself; a mean needs some weight."""
        return self.total / self.weight if self.kind == "mean" else self.total


def mean(total: Number, weight: Number = 1.0) -> Metric:
    """``total / weight``, each summed over micro-batches and ranks before they are divided; True weighs 1."""
    is_bool = isinstance(weight, Tensor) and weight.dtype == torch.bool  # two of which torch adds up to one
    return Metric("mean", total, weight * 1.0 if is_bool else weight)


def masked_mean(values: Tensor, mask: Tensor) -> Metric:
    """Mean of ``values`` where ``mask`` is True."""
    return Metric("mean", torch.where(mask, values.detach(), 0.0).sum(), mask.sum())


def total(value: Number) -> Metric:
    """Sum over micro-batches and ranks."""
    return Metric("sum", value)


def spread(name: str, values: Tensor, mask: Tensor | None = None) -> dict[str, Metric]:
    """``name/mean``, ``name/max`` and ``name/min`` of the given numbers; nothing is reported if there are none.

    Args:
        name: Beginning of all three names.
        values: The numbers.
        mask: True on values that count; unlike an index it does not wait for the device. None counts all.
    """
    if values.numel() == 0:
        return {}
    values = values.detach().double()  # float32 sums of large numbers may overflow
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    count = mask.sum()
    return {
        f"{name}/mean": Metric("mean", torch.where(mask, values, 0.0).sum(), count),
        f"{name}/max": Metric("max", _largest(values, mask), count),
        f"{name}/min": Metric("min", -_largest(-values, mask), count),
    }


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, -torch.inf).max()


class MetricTable:
    """Collects metrics over the parts of an iteration."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Merge one part's metrics."""
        for name, metric in metrics.items():
            self._metrics[name] = self._metrics[name].merge(metric) if name in self._metrics else metric

    @property
    def merged(self) -> Mapping[str, Metric]:
        """Each metric over all parts so far."""
        return self._metrics

    def reduce(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Reduces the metrics over all ranks, without those of weight 0. Collective; ranks may hold different names.

        Args:
            gather: Function that returns a list of every data-parallel rank's argument.
        """
        merged = MetricTable()
        for part in gather(self._to_floats()):
            merged.add({name: Metric(*fields) for name, fields in part.items()})
        known = {name: metric for name, metric in merged._metrics.items() if metric.weight}
        return {name: float(metric.value) for name, metric in known.items()}

    def _to_floats(self) -> dict[str, tuple[Kind, float, float]]:
        """Plain numbers, copied from the device in one go."""
        parts = [number for metric in self._metrics.values() for number in (metric.total, metric.weight)]
        numbers = [n if isinstance(n, Tensor) else torch.tensor(n, dtype=torch.float64) for n in parts]
        if not numbers:
            return {}
        device = next((n.device for n in numbers if n.device.type != "cpu"), torch.device("cpu"))
        flat = torch.stack([n.to(device, torch.float64) for n in numbers]).tolist()
        return {
            name: (metric.kind, flat[2 * i], flat[2 * i + 1]) for i, (name, metric) in enumerate(self._metrics.items())
        }
