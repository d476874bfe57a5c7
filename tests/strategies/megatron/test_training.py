"""Training under Megatron goes as under `auto`: rewards rise, losses fall, and SFT has all of Lightning's features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.strategies.conformance import Bench
from tests.strategies.megatron.training_checks import STEPS, learn, sft_features

pytestmark = [
    pytest.mark.backend,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # without the callback that saves
]


@pytest.fixture(scope="module")
def bench(folder) -> Bench:
    """One process, whose numbers are right."""
    return Bench(strategy="auto", devices=1, folder=folder)


@pytest.fixture(scope="module")
def features(bench) -> dict[str, Any]:
    return sft_features(bench)


def flat(change: list[dict[str, Tensor]]) -> Tensor:
    """Of all steps and weights."""
    return torch.stack([torch.cat([step[name].flatten() for name in sorted(step)]) for step in change])


def test_rewards_rise_and_losses_fall_as_under_auto(bench, pipeline_parallel):
    """On two stages: the last four of GRPO's rewards are .2 above the first, those of SFT's losses 1.5 below.

    KTO's adapters begin with other random numbers than PEFT's, and at the reference: its margins rise from 0.
    """
    expected, curves = learn(bench), pipeline_parallel["learn"]

    lifts = {name: sum(curve[-4:]) / 4 - curve[0] for name, curve in curves.items()}

    assert {name: len(curve) for name, curve in curves.items()} == STEPS
    assert curves["grpo"][:3] == pytest.approx(expected["grpo"][:3], abs=1e-4)  # later, another token may be sampled
    assert curves["sft"] == pytest.approx(expected["sft"], rel=1e-3)
    assert lifts["grpo"] > 0.2
    assert lifts["sft"] < -1.5
    for margins in (curves["kto"], expected["kto"]):
        assert margins[0] == pytest.approx(0.0, abs=1e-6)
        assert margins[-1] > 0.03


@pytest.mark.parametrize("run", ["whole", "resumed", "dry"])
def test_accumulation_clipping_and_schedules_are_lightnings(features, pipeline_parallel, run):
    """Losses, norms, rates, skipped steps and tokens of each batch; validations; calls of hooks; counters."""
    expected, ours = features[run], pipeline_parallel["replicas_features"][run]
    for step, other in zip(expected["steps"], ours["steps"], strict=True):
        assert other == pytest.approx(step, rel=1e-4, nan_ok=True)
    assert ours["validations"] == pytest.approx(expected["validations"], rel=1e-4)
    for name in ("hooks", "global_step", "scheduler"):
        assert ours[name] == expected[name]
    change, other_change = flat(expected["change"]), flat(ours["change"])
    assert (change - other_change).norm() <= 1e-3 * change.norm()


def test_a_gradient_that_is_not_finite_changes_nothing(pipeline_parallel):
    whole = pipeline_parallel["replicas_features"]["whole"]
    moved = [any(change.any() for change in batch.values()) for batch in whole["change"]]
    assert moved == [False, True, False, False, False, True, False, True]  # the second step is skipped


def test_an_accumulated_run_is_resumed_to_the_last_bit(pipeline_parallel):
    runs = pipeline_parallel["replicas_features"]
    assert_close(runs["resumed"]["end"], runs["whole"]["end"], rtol=0, atol=0)


def test_callbacks_of_lightning_see_rates_and_validations(features, pipeline_parallel):
    """Of `LearningRateMonitor` and `EarlyStopping`, which no loss is good enough for."""
    assert pipeline_parallel["replicas_features"]["rates"] == pytest.approx(features["rates"])
    assert pipeline_parallel["replicas_features"]["stopped"] == features["stopped"] == 2
