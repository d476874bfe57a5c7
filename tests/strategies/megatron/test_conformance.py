"""Megatron on two processes gives what one process gives under `auto`, in each layout that CPUs can run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.callbacks.test_profiler import RANGES, names_in, traces
from tests.strategies.conformance import AGGREGATIONS, Bench, run_scenarios
from tests.strategies.megatron.layouts import LAYOUTS, write_kinds

pytestmark = [pytest.mark.backend, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("run_layouts.py")
TOLERANCES = {"losses": 1e-4, "norms": 1e-3, "counts": 0.0}
PAIRS = [(name, scenario) for name, layout in LAYOUTS.items() for scenario in layout.scenarios]


class Runs(NamedTuple):
    """Results by scenario: of one process for each kind of model, and of two for each layout; and their folder."""

    expected: dict[str, dict[str, Any]]
    actual: dict[str, dict[str, Any]]
    folder: Path

    def of(self, layout: str, scenario: str) -> tuple[Any, Any]:
        """What is compared."""
        return self.expected[LAYOUTS[layout].kind][scenario], self.actual[layout][scenario]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All layouts in one launch; a hang is a failure, and the last line tells the layout."""
    folder = tmp_path_factory.mktemp("layouts")
    write_kinds(folder)
    out = folder / "results.pt"
    command = [sys.executable, SCRIPT, "--folder", folder, "--out", out]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    expected = {}
    for kind in ("dense", "deep", "experts"):
        wanted = {scenario for layout in LAYOUTS.values() if layout.kind == kind for scenario in layout.scenarios}
        bench = Bench(strategy="auto", devices=1, folder=folder / kind)
        expected[kind] = dict(run_scenarios(bench, sorted(wanted)))
    return Runs(expected, torch.load(out), folder)


@pytest.mark.parametrize(("layout", "scenario"), PAIRS)
def test_numbers_are_those_of_one_process(runs, layout, scenario):
    expected, actual = runs.of(layout, scenario)
    for kind, tolerance in TOLERANCES.items():
        for name, values in expected[kind].items():
            for value, other in zip(values, actual[kind][name], strict=True):
                assert (value is None) == (other is None), name
                if value is not None:
                    assert other == pytest.approx(value, rel=tolerance, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize(("layout", "scenario"), PAIRS)
def test_responses_and_weights_are_those_of_one_process(runs, layout, scenario):
    """Weights as the rollout engine gets them, in every step, measured over all of them together."""
    expected, actual = runs.of(layout, scenario)
    assert actual["responses"] == expected["responses"]
    for change, other in zip(expected["weight_change"], actual["weight_change"], strict=True):
        assert change.keys() == other.keys()
        flat, other_flat = (torch.cat([part[name].flatten() for name in sorted(part)]) for part in (change, other))
        assert (flat - other_flat).norm() <= 1e-3 * flat.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_micro_batches(runs, layout, aggregation):
    expected, actual = runs.of(layout, "gradients_of_any_cut")
    loss, norm = expected["measured"][f"{aggregation}, 16x1"]
    for cut in ("16x1", "4x4", "uneven"):
        other_loss, other_norm = actual["measured"][f"{aggregation}, {cut}"]
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert other_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("layout", [name for name, of in LAYOUTS.items() if "infinite_gradient" in of.scenarios])
def test_an_infinite_gradient_is_skipped_and_counted(runs, layout):
    _, results = runs.of(layout, "infinite_gradient")
    assert results["counts"]["actor/skipped_updates"] == [0.0, 2.0, 0.0]
    moved = [any(change.any() for change in step.values()) for step in results["weight_change"]]
    assert moved == [True, False, True]


@pytest.mark.parametrize("layout", ["virtual pipeline", "expert parallel"])
def test_a_resumed_run_is_the_same_to_the_last_bit(runs, layout):
    whole, rest = (runs.actual[f"resume, {layout}"][name] for name in ("whole", "rest"))
    assert rest["steps"][1:] == whole["steps"][5:]  # a batch later, when the first step after the resumption is told
    assert len(rest["steps"]) == 4
    assert rest["global_step"] == whole["global_step"] == 4
    torch.testing.assert_close(rest["end"], whole["end"], rtol=0, atol=0)


def test_experts_that_were_spread_are_not_gathered_in_silence(runs):
    assert "experts spread in another way" in runs.actual["gather experts"]
    assert "`megatron.expert_parallel_size`" in runs.actual["gather experts"]


@pytest.mark.parametrize("task", ["ppo", "sft"])
def test_traces_hold_every_phase_of_the_chosen_step_and_rank(runs, task):
    out = runs.folder / "dense" / "profiles" / task
    assert traces(out) == {"torch_step=2_rank=1"}
    names = names_in(out / "torch_step=2_rank=1.json.gz")
    assert names >= RANGES[task]
    assert {name for name in names if name.startswith("step ")} == {"step 2"}


def test_a_training_gives_its_process_groups_back(runs):
    """Each of gloo's has threads, and there are about thirty of them in a training."""
    first, *_, last = runs.actual["threads"]
    assert last < 2 * first
