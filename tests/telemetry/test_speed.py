"""Throughput and time per token by hand."""

from __future__ import annotations

import pytest
import torch

from verl_lightning.telemetry.speed import speed_metrics


def test_speed_is_told_per_rank_and_per_token():
    metrics = {"timing_s/step": 4.0, "timing_s/gen": 1.0, "perf/total_num_tokens": 800.0}

    speed = speed_metrics(metrics, ranks=2, devices=2, device=torch.device("cpu"))

    assert speed == metrics | {
        "perf/time_per_step": 4.0,
        "perf/throughput": pytest.approx(100.0),
        "timing_per_token_ms/gen": pytest.approx(1.25),
    }
