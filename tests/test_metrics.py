"""Metrics add up over micro-batches and ranks, each by its own rule."""

from __future__ import annotations

import pytest
import torch

from verl_lightning.metrics import Metric, MetricTable, masked_mean, mean, spread, total


def gather_with(*others):
    """What a rank gets when the others hold these tables."""
    return lambda value: [value, *(other._to_floats() for other in others)]


def table(*parts):
    filled = MetricTable()
    for part in parts:
        filled.add(part)
    return filled


def test_means_weigh_what_they_average_over():
    """Two tokens of loss 3 and one of loss 9 make 5, not 6."""
    first = masked_mean(torch.tensor([3.0, 3.0, torch.nan]), torch.tensor([True, True, False]))
    second = masked_mean(torch.tensor([torch.nan, 9.0]), torch.tensor([False, True]))
    assert table({"loss": first}, {"loss": second}).reduce(lambda value: [value]) == {"loss": 5.0}
    assert table({"loss": first}).reduce(gather_with(table({"loss": second}))) == {"loss": 5.0}


def test_a_mean_over_what_is_true():
    """Norms 1 and 3 of two updates, and one that is not finite, have the mean 2."""
    norms = torch.tensor([1.0, 3.0, torch.inf])
    parts = [{"norm": mean(norm.nan_to_num(posinf=0.0), norm.isfinite())} for norm in norms]
    assert table(*parts).reduce(lambda value: [value]) == {"norm": 2.0}


def test_each_kind_reduces_by_its_own_rule():
    ours = {"mean": mean(2.0, 1.0), "sum": total(2.0), "max": Metric("max", 2.0), "min": Metric("min", 2.0)}
    theirs = {"mean": mean(6.0, 3.0), "sum": total(6.0), "max": Metric("max", 6.0), "min": Metric("min", 6.0)}
    assert table(ours).reduce(gather_with(table(theirs))) == {"mean": 2.0, "sum": 8.0, "max": 6.0, "min": 2.0}


def test_ranks_may_hold_different_metrics():
    ours, theirs = table({"a": total(1.0)}), table({"a": total(1.0), "b": mean(3.0, 2.0)})
    assert ours.reduce(gather_with(theirs, MetricTable())) == {"a": 2.0, "b": 1.5}


def test_a_mean_over_nothing_is_left_out():
    nothing = masked_mean(torch.tensor([1.0]), torch.tensor([False]))
    assert table({"loss": nothing, "count": total(0.0)}).reduce(lambda value: [value]) == {"count": 0.0}
    assert table({"loss": nothing}).reduce(gather_with(table({"loss": mean(4.0, 2.0)}))) == {"loss": 2.0}


def test_spread_of_numbers():
    metrics = spread("length", torch.tensor([1, 2, 6]))
    assert table(metrics).reduce(lambda value: [value]) == {"length/mean": 3.0, "length/max": 6.0, "length/min": 1.0}
    assert spread("length", torch.tensor([])) == {}


def test_spread_of_masked_numbers():
    """What is masked is never read; nothing is said of no number, and another rank's numbers alone count then."""
    metrics = spread("value", torch.tensor([5.0, -2.0, torch.nan]), torch.tensor([False, True, False]))
    nothing = spread("value", torch.tensor([9.0]), torch.tensor([False]))
    assert table(nothing, metrics).reduce(lambda value: [value]) == dict.fromkeys(metrics, -2.0)
    assert table(nothing).reduce(gather_with(table(metrics))) == dict.fromkeys(metrics, -2.0)
    assert table(nothing).reduce(lambda value: [value]) == {}


def test_metrics_hold_no_graph():
    loss = torch.ones(2, requires_grad=True)
    assert not masked_mean(loss * 2, torch.ones(2).bool()).total.requires_grad
    assert not spread("loss", loss * 2)["loss/max"].total.requires_grad


def test_large_counts_stay_exact():
    """In float32, sixteen million and one is sixteen million."""
    assert table({"tokens": total(2.0**24)}, {"tokens": total(1.0)}).reduce(lambda value: [value]) == {
        "tokens": 2.0**24 + 1
    }


def test_one_name_has_one_kind():
    with pytest.raises(ValueError, match="cannot be both a sum and a max"):
        table({"a": total(1.0)}, {"a": Metric("max", 1.0)})
