"""The batch plan's numbers, worked out by hand, and the plans that it refuses."""

from __future__ import annotations

import pytest
from rich.console import Console

from verl_lightning.modules.batch_plan import BatchPlan
from verl_lightning.modules.ppo_config import UpdateConfig


def make_plan(*, mini=8, micro=3, epochs=2, **changes):
    options = {"prompts_per_step": 32, "num_samples": 4, "data_parallel_size": 2, "max_tokens": 100}
    update = UpdateConfig(mini_batch_size=mini, micro_batch_size=micro, epochs=epochs)
    return BatchPlan(update=update, **options | changes)


def test_numbers_of_a_plan():
    plan = make_plan()
    assert plan.sequences_per_step == 128
    assert plan.mini_batch_sequences_per_rank == 16  # 8 prompts, 4 samples, 2 ranks
    assert plan.micro_batches_per_mini_batch == 6  # five of three and one of one
    assert plan.mini_batches_per_epoch == 4
    assert plan.optimizer_steps == 8


def test_people_see_them():
    console = Console(width=100)
    with console.capture() as capture:
        console.print(make_plan().table())
    shown = capture.get()
    for name, value in {
        "prompts per step, all ranks": "32",
        "sequences per step and rank": "64",
        "sequences per mini-batch, all ranks": "32",
        "micro-batches per mini-batch, of at most": "6 x 3 sequences",
        "optimizer steps per iteration": "4 x 2 epochs = 8",
        "tokens per sequence, at most": "100",
    }.items():
        line = next(line for line in shown.splitlines() if name in line)
        assert value in line.split("│")[2]


def test_a_token_budget_is_shown_and_must_hold_a_sequence():
    def plan(budget):
        update = UpdateConfig(mini_batch_size=8, max_tokens_per_micro_batch=budget)
        return BatchPlan(prompts_per_step=32, num_samples=4, data_parallel_size=2, update=update, max_tokens=100)

    assert plan(100).micro_batches == "as many as lengths need x 100 tokens"
    with pytest.raises(
        ValueError, match=r"`model\.update\.max_tokens_per_micro_batch` \(99\) is less than one sequence may"
    ):
        plan(99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mini": 12}, r"`model\.update\.mini_batch_size` \(12 prompts\) must divide the prompts of a step \(32, "),
        ({"mini": 64}, r"`model\.update\.mini_batch_size` \(64 prompts\) must divide the prompts of a step \(32, "),
        ({"mini": 8, "data_parallel_size": 3}, r"must be a multiple of the number of data-parallel ranks \(3\)"),
        ({"mini": 1}, r"`model\.update\.mini_batch_size` \(1 prompts over all ranks\) must be a multiple"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**changes)


@pytest.mark.parametrize("name", ["mini_batch_size", "micro_batch_size", "epochs"])
def test_sizes_are_at_least_one(name):
    with pytest.raises(ValueError, match=rf"`model\.update\.{name}` must be at least 1, got 0"):
        UpdateConfig(**{name: 0})
