"""The benchmark of what metrics cost counts each call once, and every step."""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from metrics_cost import Meter, StepCosts, measure


@pytest.fixture
def clock(monkeypatch):
    """Goes on only when it is put forward."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    clock.forward = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr("metrics_cost.time", clock)
    return clock


def test_calls_within_calls_count_once(clock):
    meter = Meter()
    inner = meter.timed(lambda: clock.forward(1.0))
    outer = meter.timed(lambda: (inner(), clock.forward(0.5), inner()))

    outer()

    assert meter.seconds == 2.5


def test_the_body_of_a_phase_is_not_counted(clock):
    meter = Meter()

    @contextmanager
    def phase():
        clock.forward(1.0)
        yield
        clock.forward(0.5)

    with meter.borders(phase)():
        clock.forward(10.0)

    assert meter.seconds == 1.5


def test_medians_are_of_the_steps_after_the_warm_up():
    costs = StepCosts()
    costs.moments = [(0.0, 0.0), (9.0, 9.0), (10.0, 9.5), (12.0, 10.5), (17.0, 11.0)]

    assert costs.medians() == [3.5, 0.75]


@pytest.mark.slow
def test_both_tasks_are_measured(tmp_path):
    sizes = {"hidden_size": 64, "layers": 1, "batch_size": 4, "tokens": 4, "steps": 2}

    rows = measure(argparse.Namespace(**sizes, step_seconds=(1.0, 1.0)), tmp_path)

    assert [row["task"] for row in rows] == ["sft", "ppo"]
    for row in rows:
        assert 0 < row["metrics_ms"] < row["step_ms"]
        assert 0 < row["profiler_outside_its_steps_ms"] < row["step_ms"]
