"""Every strategy on two processes gives what one process gives; the tolerances are those of the issue."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.processes import on_ranks
from tests.strategies.conformance import AGGREGATIONS, SCENARIOS, Bench, Results, run_scenarios
from tests.strategies.fsdp_layouts import EXACT, LAYOUTS, run_layouts

pytestmark = pytest.mark.slow

RUNS = sorted(SCENARIOS.keys() - {"whole_weights"})
STRATEGIES = ["ddp", "fsdp"]
# Sampled from slightly other weights, responses of later steps may differ.
SAMPLES_OTHERWISE = {("bf16_compute", "gradients_of_any_cut")}
MEASURED = ("gradients_of_any_cut", "lengths_of_any_kind")
CASES = [(name, scenario) for name, layout in LAYOUTS.items() for scenario in layout.scenarios]


@pytest.fixture(scope="session")
def expected(inputs: Path) -> dict[str, Any]:
    """Results of one process without a strategy of ours."""
    return dict(run_scenarios(Bench(strategy="auto", devices=1, folder=inputs)))


@pytest.fixture(scope="session", params=STRATEGIES)
def actual(request: pytest.FixtureRequest, inputs: Path) -> dict[str, Any]:
    """Results of two processes."""
    return run_two(request.param, inputs)


@pytest.fixture(scope="session")
def layouts(inputs: Path) -> dict[str, Any]:
    """Results of two and of four processes that share work in other ways, by layout."""
    four: dict[str, Any] = on_ranks(4, run_layouts_alone, inputs)[0]
    return run_two("fsdp", inputs)["layouts"] | four


@functools.cache
def run_two(strategy: str, inputs: Path) -> dict[str, Any]:
    """Once for all tests."""
    results: dict[str, Any] = on_ranks(2, run_all, strategy, inputs)[0]
    return results


def run_all(strategy: str, inputs: Path) -> dict[str, Any]:
    """The results of every scenario on each of two ranks, and those of the layouts of ``fsdp``."""
    bench = Bench(strategy=strategy, devices=2, folder=inputs)
    results = dict(run_scenarios(bench))
    return results | ({"layouts": dict(run_layouts(bench))} if strategy == "fsdp" else {})


def run_layouts_alone(inputs: Path) -> dict[str, Any]:
    """The results of the layouts of four ranks."""
    return dict(run_layouts(Bench(strategy="fsdp", devices=4, folder=inputs)))


@pytest.mark.parametrize("scenario", RUNS)
def test_losses_norms_and_counts_are_those_of_one_process(expected, actual, scenario):
    compare_numbers(expected[scenario], actual[scenario], EXACT)


@pytest.mark.parametrize("scenario", RUNS)
def test_responses_are_those_of_one_process(expected, actual, scenario):
    assert actual[scenario]["responses"] == expected[scenario]["responses"]


@pytest.mark.parametrize("scenario", RUNS)
def test_weights_change_as_in_one_process(expected, actual, scenario):
    compare_weights(expected[scenario], actual[scenario], EXACT["weights"])


@pytest.mark.parametrize(("layout", "scenario"), sorted(set(CASES) - SAMPLES_OTHERWISE))
def test_a_layout_changes_no_number(expected, layouts, layout, scenario):
    tolerances = LAYOUTS[layout].tolerances
    assert layouts[layout][scenario]["responses"] == expected[scenario]["responses"]
    compare_numbers(expected[scenario], layouts[layout][scenario], tolerances)
    compare_weights(expected[scenario], layouts[layout][scenario], tolerances["weights"])


@pytest.mark.parametrize(("layout", "scenario"), [case for case in CASES if case[1] in MEASURED])
def test_a_layout_changes_no_gradient(expected, layouts, layout, scenario):
    compare_measured(expected[scenario], layouts[layout][scenario], LAYOUTS[layout].tolerances)


def test_no_lengths_hang(expected, actual):
    """And all give the scores and gradients of one process."""
    compare_measured(expected["lengths_of_any_kind"], actual["lengths_of_any_kind"], EXACT)


def test_packed_sequences_learn_as_padded_ones(expected):
    """Each scenario begins with the same weights, chats and seed."""
    packed, padded = expected["sft_packed_within_a_budget"], expected["sft_accumulated"]
    for kind, name in (("losses", "train/loss"), ("norms", "train/grad_norm")):
        pairs = zip(padded[kind][name], packed[kind][name], strict=True)
        assert all(same(value, other, EXACT[kind]) for value, other in pairs), name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_micro_batches_or_ranks(expected, actual, aggregation):
    """16x1, 4x4 and counts that differ between ranks, in one process and in two."""
    loss, norm = expected["gradients_of_any_cut"]["measured"][f"{aggregation}, 16x1"]
    for results in (expected, actual):
        for other_loss, other_norm in numbers_of(results["gradients_of_any_cut"], aggregation):
            assert other_loss == pytest.approx(loss, rel=1e-5)
            assert other_norm == pytest.approx(norm, rel=1e-5)


def numbers_of(results: Results, aggregation: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each of at least two cuts."""
    numbers = [pair for name, pair in results["measured"].items() if name.startswith(f"{aggregation}, ")]
    assert len(numbers) >= 2
    return numbers


def test_whole_weights_are_those_of_the_folder(inputs, actual):
    """Hugging Face names, tied weights once, adapters merged (new ones change nothing)."""
    folder = load_file(inputs / "model" / "model.safetensors")
    assert "lm_head.weight" not in folder  # tied to the embedding
    for weights in actual["whole_weights"]["named_weights"].values():
        assert_close(weights, folder, rtol=0, atol=0)


def test_a_rank_without_rewards_still_takes_part(expected, actual):
    for results in (expected, actual):
        counts = results["one_rank_without_rewards"]["counts"]
        assert counts["train/excluded_sequences"] == [8.0, 8.0]
        assert counts["reward/errors"] == [8.0, 8.0]
        assert counts["train/empty_batches"] == [0.0, 0.0]  # each mini-batch has rows of the other rank


def test_a_step_without_rewards_has_a_gradient_of_zeros(actual):
    results = actual["nothing_to_train_on"]
    assert results["counts"]["train/empty_batches"] == [2.0, 2.0]
    assert results["counts"]["actor/skipped_updates"] == [0.0, 0.0]
    assert results["norms"]["actor/grad_norm"] == [0.0, 0.0]
    assert not any(change.any() for step in results["weight_change"] for change in step.values())


def test_an_infinite_gradient_of_one_rank_is_skipped_by_all(actual):
    results = actual["infinite_gradient"]
    assert results["counts"]["actor/skipped_updates"] == [0.0, 2.0, 0.0]
    assert results["counts"]["training/global_step"] == [1.0, 2.0, 3.0]
    moved = [any(change.any() for change in step.values()) for step in results["weight_change"]]
    assert moved == [True, False, True]


def test_adapters_train(actual):
    first = actual["lora"]["weight_change"][0]
    assert first["model.layers.0.self_attn.q_proj.weight"].any()
    assert not first["model.embed_tokens.weight"].any()


def compare_numbers(expected: Results, actual: Results, tolerances: dict[str, float]) -> None:
    """Losses, norms and counts of every step."""
    for kind in ("losses", "norms", "counts"):
        for name, values in expected[kind].items():
            for step, (value, other) in enumerate(zip(values, actual[kind][name], strict=True)):
                assert same(value, other, tolerances[kind]), f"{name} of step {step}: {other}, expected {value}"


def compare_weights(expected: Results, actual: Results, tolerance: float) -> None:
    """How they change in every step, measured over all weights together."""
    for change, other in zip(expected["weight_change"], actual["weight_change"], strict=True):
        assert change.keys() == other.keys()
        flat, other_flat = (torch.cat([part[name].flatten() for name in sorted(part)]) for part in (change, other))
        assert (flat - other_flat).norm() <= tolerance * flat.norm()


def compare_measured(expected: Results, actual: Results, tolerances: dict[str, float]) -> None:
    """Sums, losses and, last, gradient norms of the probe's batches."""
    assert actual["measured"].keys() >= expected["measured"].keys()  # several ranks can cut in more ways
    for name, (*losses, norm) in expected["measured"].items():
        *other_losses, other_norm = actual["measured"][name]
        assert other_losses == pytest.approx(losses, rel=tolerances["losses"]), name
        assert other_norm == pytest.approx(norm, rel=tolerances["norms"]), name


def same(value: float | None, other: float | None, tolerance: float) -> bool:
    """Equal within a relative tolerance; near 0, where losses cancel, within as much of 1."""
    if value is None or other is None:
        return value is other
    if math.isnan(value):
        return math.isnan(other)
    return abs(value - other) <= tolerance * max(abs(value), 0.01)
