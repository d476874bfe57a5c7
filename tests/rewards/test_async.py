"""Reward functions that wait, hundreds of calls at once."""

from __future__ import annotations

import pytest

from tests.rewards.conftest import ticks_while_only


def test_hundreds_of_calls_wait_at_once(make_sample, start_pool):
    """Each comes back only when 150 of its worker wait; both workers take half."""
    pool = start_pool("reward_functions.py:meet", num_workers=2, max_concurrency=300)

    results = pool.score([make_sample(str(i), ground_truth=150) for i in range(300)])

    assert results.rewards == [150.0] * 300
    assert len(set(results.components["pid"])) == 2


def test_no_more_calls_are_open_than_the_option_says(make_sample, start_pool):
    results = start_pool("reward_functions.py:meet", max_concurrency=4).score([make_sample(ground_truth=4)] * 12)

    assert results.rewards == [4.0] * 12


@pytest.mark.parametrize("lost", ["exit", "hold up"])
def test_a_call_that_ends_or_holds_up_its_worker_costs_no_other(make_sample, start_pool, set_clock, monkeypatch, lost):
    monkeypatch.setattr("verl_lightning.rewards.pool._GRACE_SECONDS", 0.0)
    pool = start_pool("reward_functions.py:misbehave_async", timeout=0.3, max_error_share=0.5)
    # The clock goes on only while all wait for the call that holds up its worker.
    set_clock(ticks_while_only(pool, {0} if lost == "hold up" else set()))

    results = pool.score([make_sample({0: lost, 5: "raise"}.get(i, "fine")) for i in range(8)])

    assert [i for i, reward in enumerate(results.rewards) if reward is None] == [0, 5]
    assert (results.num_errors, results.num_timeouts) == ((2, 0) if lost == "exit" else (1, 1))


def test_a_call_that_waits_too_long_is_cancelled(make_sample, start_pool):
    """The others don't wait, so that they can't be late."""
    pool = start_pool("reward_functions.py:misbehave_async", timeout=0.2, max_error_share=0.5)

    results = pool.score([make_sample("wait" if i % 4 == 1 else "fine") for i in range(8)])

    assert results.rewards == [1.0, None, 1.0, 1.0] * 2
    assert results.num_timeouts == 2
    assert results.first_traceback == "The worker was stopped after 0.2 seconds of scoring sample 1."


def test_the_bound_is_for_async_functions(start_pool):
    with pytest.raises(ValueError, match="`model.reward.max_concurrency: 8` is for functions that are defined with"):
        start_pool("reward_functions.py:number", max_concurrency=8)
