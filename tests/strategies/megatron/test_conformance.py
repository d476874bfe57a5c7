"""Megatron on two processes gives what one process gives under `auto`, in each layout that CPUs can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch import seed_everything
from torch.testing import assert_close

from tests.callbacks.test_profiler import RANGES, names_in, traces
from tests.strategies.conformance import AGGREGATIONS, SCENARIOS, Bench
from tests.strategies.fsdp_layouts import EXACT
from tests.strategies.megatron.layouts import LAYOUTS, write_kinds
from tests.strategies.megatron.ranks import Runs, launch, run_layout, run_more
from tests.strategies.test_conformance import compare_numbers, compare_weights, numbers_of

pytestmark = pytest.mark.backend

PAIRS = [(name, scenario) for name, layout in LAYOUTS.items() for scenario in layout.scenarios]


class Results(NamedTuple):
    """Of one process for each kind of model and scenario, of two for each layout, and of two for what else runs."""

    folder: Path
    expected: Runs
    actual: Runs
    more: Runs

    def of(self, layout: str, scenario: str) -> tuple[Any, Any]:
        """What is compared."""
        return self.expected[f"{LAYOUTS[layout].kind} {scenario}"], self.actual[layout][scenario]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each layout in a launch of its own."""
    folder = tmp_path_factory.mktemp("layouts")
    write_kinds(folder)

    def run_under_auto(name: str) -> Any:
        kind, scenario = name.split()
        seed_everything(0, verbose=False)
        return SCENARIOS[scenario](Bench(strategy="auto", devices=1, folder=folder / kind))

    needs = {"gather experts": lambda: more["resume, expert parallel"]}
    more = Runs(lambda name: launch(run_more, name, folder), needs)
    return Results(folder, Runs(run_under_auto), Runs(lambda name: launch(run_layout, name, folder)), more)


@pytest.mark.parametrize(("layout", "scenario"), PAIRS)
def test_losses_norms_and_counts_are_those_of_one_process(runs, layout, scenario):
    compare_numbers(*runs.of(layout, scenario), EXACT)


@pytest.mark.parametrize(("layout", "scenario"), PAIRS)
def test_responses_and_weights_are_those_of_one_process(runs, layout, scenario):
    """Weights as the rollout engine gets them, in every step."""
    expected, actual = runs.of(layout, scenario)
    assert actual["responses"] == expected["responses"]
    compare_weights(expected, actual, EXACT["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_micro_batches(runs, layout, aggregation):
    expected, actual = runs.of(layout, "gradients_of_any_cut")
    loss, norm = expected["measured"][f"{aggregation}, 16x1"]
    for other_loss, other_norm in numbers_of(actual, aggregation):
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
    whole, rest = (runs.more[f"resume, {layout}"][name] for name in ("whole", "rest"))
    assert rest["steps"][1:] == whole["steps"][5:]  # a batch later, when the first step after the resumption is told
    assert len(rest["steps"]) == 4
    assert rest["global_step"] == whole["global_step"] == 4
    assert_close(rest["end"], whole["end"], rtol=0, atol=0)


def test_experts_that_were_spread_are_not_gathered_in_silence(runs):
    assert "experts spread in another way" in runs.more["gather experts"]
    assert "`megatron.expert_parallel_size`" in runs.more["gather experts"]


@pytest.mark.parametrize("task", ["ppo", "sft"])
def test_traces_hold_every_phase_of_the_chosen_step_and_rank(runs, task):
    out = Path(runs.more["profiles"], task)
    assert traces(out) == {"torch_step=2_rank=1"}
    names = names_in(out / "torch_step=2_rank=1.json.gz")
    assert names >= RANGES[task]
    assert {name for name in names if name.startswith("step ")} == {"step 2"}


def test_a_training_gives_its_process_groups_back(runs):
    """Each of gloo's has threads, and there are about twenty of them in a training."""
    first, *_, last = runs.actual["tensor parallel"]["threads"]
    assert last < first
