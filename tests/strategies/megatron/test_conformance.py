"""Megatron on two processes gives what one process gives under `auto`: data, tensor and pipeline parallel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.conformance import AGGREGATIONS, Bench, launch, run_scenarios

pytestmark = [pytest.mark.backend, pytest.mark.timeout(900)]

SCENARIOS = [
    "grpo_with_kl_and_entropy",
    "gae_with_own_critic",
    "gae_with_shared_trunk",
    "sft",
    "sft_accumulated",
    "one_rank_without_rewards",
    "nothing_to_train_on",
    "infinite_gradient",
    "gradients_of_any_cut",
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel, distributed optimizer": {},
    "data parallel, plain optimizer": {"use_distributed_optimizer": False},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline parallel": {"pipeline_parallel_size": 2},
}
TOLERANCES = {"losses": 1e-4, "norms": 1e-3, "counts": 0.0}


@pytest.fixture(scope="session")
def expected(inputs: Path) -> dict[str, Any]:
    """Results of one process without a strategy of ours."""
    return dict(run_scenarios(Bench(strategy="auto", devices=1, folder=inputs), SCENARIOS))


@pytest.fixture(scope="session", params=LAYOUTS)
def actual(request: pytest.FixtureRequest, inputs: Path) -> dict[str, Any]:
    """Results of two processes, all scenarios in one launch; a hang is a failure."""
    options = ["--options", json.dumps(LAYOUTS[request.param]), "--scenarios", ",".join(SCENARIOS)]
    return launch("megatron", inputs, *options, timeout=800)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", TOLERANCES)
def test_numbers_are_those_of_one_process(expected, actual, scenario, kind):
    for name, values in expected[scenario][kind].items():
        others = actual[scenario][kind][name]
        for value, other in zip(values, others, strict=True):
            assert (value is None) == (other is None), name
            if value is not None:
                assert other == pytest.approx(value, rel=TOLERANCES[kind], abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_responses_and_weights_are_those_of_one_process(expected, actual, scenario):
    """Weights as the rollout engine gets them, in every step, measured over all of them together."""
    assert actual[scenario]["responses"] == expected[scenario]["responses"]
    pairs = zip(expected[scenario]["weight_change"], actual[scenario]["weight_change"], strict=True)
    for change, other in pairs:
        assert change.keys() == other.keys()
        flat, other_flat = (torch.cat([part[name].flatten() for name in sorted(part)]) for part in (change, other))
        assert (flat - other_flat).norm() <= 1e-3 * flat.norm()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_micro_batches(expected, actual, aggregation):
    loss, norm = expected["gradients_of_any_cut"]["measured"][f"{aggregation}, 16x1"]
    for cut in ("16x1", "4x4", "uneven"):
        other_loss, other_norm = actual["gradients_of_any_cut"]["measured"][f"{aggregation}, {cut}"]
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert other_norm == pytest.approx(norm, rel=1e-5)


def test_an_infinite_gradient_is_skipped_and_counted(actual):
    results = actual["infinite_gradient"]
    assert results["counts"]["actor/skipped_updates"] == [0.0, 2.0, 0.0]
    moved = [any(change.any() for change in step.values()) for step in results["weight_change"]]
    assert moved == [True, False, True]
