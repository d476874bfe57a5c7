"""User code that gets in the way of the protocol costs its own sample at most, and is counted."""

from __future__ import annotations

import tempfile

import pytest


@pytest.mark.parametrize(
    ("response", "traceback"),
    [
        ("write to every file", "Something that was no answer came out of the worker's pipe"),
        ("write half a line to every file", "Something that was no answer came out of the worker's pipe"),
        ("write much to every file", "Something that was no answer came out of the worker's pipe"),
        ("close every file", "The worker's process ended (exit code 1) while it scored sample 1."),
        ("kill its group", "The worker's process ended (SIGKILL) while it scored sample 1."),
        ("exit", "The worker's process ended (exit code 0) while it scored sample 1."),
        ("raise much", "characters) ..."),
    ],
)
def test_what_breaks_a_worker_costs_one_sample(make_sample, start_pool, response, traceback):
    pool = start_pool("unruly_reward_functions.py:unruly", max_error_share=0.5)

    results = pool.score([make_sample(), make_sample(response), make_sample()])
    again = pool.score([make_sample()])

    assert results.rewards == [1.0, None, 1.0]
    assert (results.num_errors, results.num_timeouts) == (1, 0)
    assert traceback in results.first_traceback
    assert len(results.first_traceback) < 30_000
    assert again.rewards == [1.0]


def test_what_leaves_the_protocol_alone_costs_nothing(make_sample, start_pool, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    pool = start_pool("unruly_reward_functions.py:unruly", max_error_share=0.0)
    tame = ["leave a thread", "go elsewhere", "print much", "come back twice", "come back twice in anger"]

    results = pool.score([make_sample(text) for text in [*tame, "delete temporary files", *tame]])

    assert results.rewards == [1.0] * 11


def test_closed_numbers_that_are_used_again_cost_nothing(make_sample, start_pool):
    pool = start_pool("unruly_reward_functions.py:unruly", max_error_share=0.0)

    assert pool.score([make_sample("close low files and open others"), make_sample()]).rewards == [1.0, 1.0]


def test_a_call_leaves_neither_folder_nor_alarm_to_the_next(make_sample, start_pool):
    assert len(set(start_pool("unruly_reward_functions.py:folder_length").score([make_sample()] * 3).rewards)) == 1
    alarms = start_pool("unruly_reward_functions.py:seconds_of_last_alarm").score([make_sample()] * 3)
    assert alarms.rewards == [0.0] * 3
