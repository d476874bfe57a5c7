from __future__ import annotations

import os
import re
import select
import signal
import time

import pytest

from tests.rewards.conftest import ticks_while_only
from verl_lightning.rewards.config import RewardConfig, WeightedReward
from verl_lightning.rewards.pool import RewardPool


def test_rewards_keep_the_order_of_the_samples(make_sample, start_pool):
    """Uneven work, shared by both workers."""
    results = start_pool("reward_functions.py:slow_number", num_workers=2).score(
        [make_sample(str(i)) for i in range(40)]
    )

    assert results.rewards == [float(i) for i in range(40)]
    shares = [results.components["pid"].count(pid) for pid in set(results.components["pid"])]
    assert len(shares) == 2
    assert min(shares) >= 10


def test_a_pool_scores_batch_after_batch(make_sample, start_pool):
    pool = start_pool("reward_functions.py:number")

    assert pool.score([make_sample("1"), make_sample("2"), make_sample("3")]).rewards == [1, 2, 3]
    assert pool.score([]).rewards == []
    assert pool.score([make_sample("4")]).rewards == [4]


def test_arguments_reach_the_function(make_sample, start_pool):
    pool = start_pool("reward_functions.py:scaled", arguments={"scale": 2.0, "offset": 0.5})

    assert pool.score([make_sample("3")]).rewards == [6.5]


def test_numbers_of_all_kinds_become_floats(make_sample, start_pool):
    results = start_pool("numpy_reward_functions.py:numpy_reward").score([make_sample()])

    assert results.rewards == [0.5]
    assert results.components == {"is_correct": [1.0], "count": [3.0]}


def test_components_are_none_where_a_sample_has_none(make_sample, start_pool):
    results = start_pool("reward_functions.py:partial_components").score([make_sample("short"), make_sample("long")])

    assert results.rewards == [0.0, 1.0]
    assert results.components == {"length": [None, 3.0]}


@pytest.mark.parametrize(
    ("response", "traceback"),
    [
        ("raise", "KeyError: 'absent key'"),
        ("nan", "ValueError: A reward function must return finite numbers of at most 3.4e38, the"),
        ("infinite", "ValueError: A reward function must return finite numbers"),
        ("text", "RewardMistakeError: A reward function must return a number or None, got `reward` = '1.0'"),
        ("no reward key", "RewardMistakeError: A reward function's mapping must have the key `reward`, got ['score']"),
        ("nan component", "got `length` = nan"),
        ("leave", "SystemExit: 0"),
        ("interrupt", "KeyboardInterrupt"),
        ("exit", "The worker's process ended (exit code 3) while it scored sample 1."),
        ("segfault", "The worker's process ended (SIGSEGV) while it scored sample 1."),
    ],
)
def test_failures_are_counted_and_left_out(make_sample, start_pool, response, traceback):
    pool = start_pool("reward_functions.py:misbehave", max_error_share=0.5)

    results = pool.score([make_sample("fine"), make_sample(response), make_sample("fine")])

    assert results.rewards == [1.0, None, 1.0]
    assert (results.num_errors, results.num_timeouts) == (1, 0)
    assert traceback in results.first_traceback


def test_none_is_no_reward_and_no_failure(make_sample, start_pool):
    pool = start_pool("reward_functions.py:misbehave", max_error_share=0.0)

    results = pool.score([make_sample("none"), make_sample("fine"), make_sample("none")])

    assert results.rewards == [None, 1.0, None]
    assert (results.num_none, results.num_errors, results.num_unjudged) == (2, 0, 0)


def test_a_function_of_lists_gets_the_responses_to_a_prompt(make_sample, start_pool):
    pool = start_pool("reward_functions.py:count_completions", max_error_share=0.5, num_workers=2)
    prompts = [[{"role": "user", "content": str(i // 3)}] for i in range(9)]

    results = pool.score([make_sample("die" if i == 4 else str(i), prompt=prompts[i]) for i in range(9)])

    assert results.rewards == [3.0] * 3 + [None] * 3 + [3.0] * 3
    assert results.components["place"] == [0.0, 1.0, 2.0, None, None, None, 0.0, 1.0, 2.0]
    assert results.first_traceback == "The worker's process ended (exit code 3) while it scored samples 3 to 5."


@pytest.mark.parametrize("num_workers", [1, 2])
def test_hanging_samples_are_stopped_and_the_rest_goes_on(make_sample, start_pool, set_clock, num_workers):
    pool = start_pool("reward_functions.py:misbehave", num_workers=num_workers, timeout=0.3, max_error_share=0.5)
    set_clock(ticks_while_only(pool, {1, 2}))

    results = pool.score([make_sample({1: "loop", 2: "sleep"}.get(i, "fine")) for i in range(40)])

    assert [i for i, reward in enumerate(results.rewards) if reward is None] == [1, 2]
    assert (results.num_errors, results.num_timeouts) == (0, 2)
    assert results.first_traceback == "The worker was stopped after 0.3 seconds of scoring sample 1."


def test_time_counts_for_each_sample_by_itself(make_sample, start_pool, set_clock):
    """A worker's share of the batch takes far longer than one sample may: each takes 0.15 seconds."""
    pool = start_pool("reward_functions.py:number", timeout=0.2)
    set_clock(lambda: 0.15 * next((held.unit for held in pool._workers[0].queue), 30))

    assert pool.score([make_sample("1")] * 30).num_timeouts == 0


def test_a_worker_dies_with_the_processes_it_started(make_sample, start_pool, set_clock, tmp_path):
    pool = start_pool("reward_functions.py:hang_in_child", timeout=1.0, max_error_share=1.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    set_clock(lambda: 2.0 if select.select([reader], [], [], 0)[0] else 0.0)  # time is up when the child has started

    pool.score([make_sample(str(pipe))])

    assert os.read(reader, 10) == b"started"
    os.set_blocking(reader, True)  # the child held the pipe open for writing: while it lives, a read waits
    assert os.read(reader, 10) == b""
    os.close(reader)


def test_a_worker_that_died_between_batches_costs_no_sample(make_sample, start_pool):
    pool = start_pool("reward_functions.py:number", max_error_share=0.0)
    pid = int(pool.score([make_sample("1")]).components["pid"][0])
    os.kill(pid, signal.SIGKILL)
    while not pool._workers[0].is_dead:
        time.sleep(0.01)

    assert pool.score([make_sample("2")]).rewards == [2.0]


def test_samples_larger_than_a_pipe_do_not_block(make_sample, start_pool):
    pool = start_pool("reward_functions.py:ground_truth_length", max_error_share=0.0)

    results = pool.score([make_sample(ground_truth="x" * 200_000)] * 40)

    assert results.rewards == [200_000.0] * 40


def test_a_backlog_does_not_hide_a_hanging_worker(make_sample, start_pool, set_clock):
    """The pipe to the worker is full while it hangs."""
    pool = start_pool("reward_functions.py:misbehave", timeout=0.3)
    set_clock(ticks_while_only(pool, {0}))
    samples = [make_sample("loop" if i == 0 else "fine", ground_truth="x" * 200_000) for i in range(40)]

    results = pool.score(samples)

    assert results.rewards == [None] + [1.0] * 39


def test_what_a_function_prints_does_not_disturb_the_rewards(make_sample, start_pool, capfd):
    results = start_pool("reward_functions.py:noisy").score([make_sample()] * 3)

    assert results.rewards == [1.0] * 3
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count('{"reward": 9') == 9


def test_rewards_do_not_depend_on_who_draws_them(make_sample, start_pool):
    """`random`, NumPy's global state and the order of sets are the sample's, not the worker's."""
    samples = [make_sample(f"sample {i}") for i in range(20)]

    alone = start_pool("numpy_reward_functions.py:drawn", num_workers=1).score(samples)
    shared = start_pool("numpy_reward_functions.py:drawn", num_workers=2).score(samples[::-1])

    assert alone.rewards == shared.rewards[::-1]
    assert alone.components["numpy"] == shared.components["numpy"][::-1]
    assert alone.components["order"] == shared.components["order"][::-1]
    assert len(set(alone.rewards)) == 20


def test_workers_do_not_import_torch(make_sample, start_pool):
    assert start_pool("reward_functions.py:loaded_torch").score([make_sample()]).rewards == [0.0]


def test_too_many_failures_stop_the_run_with_the_first_traceback(make_sample, start_pool):
    pool = start_pool("reward_functions.py:misbehave", max_error_share=0.1)
    samples = [make_sample("raise" if i < 2 else "fine") for i in range(10)]

    message = "samples and ran out of time (`timeout: 30`) on 0, which is more than `max_error_share: 0.1`"
    # As many were judged as came at once.
    with pytest.raises(
        RuntimeError, match=rf"(?s)failed on 2 of \d {re.escape(message)}.*in misbehave.*KeyError: 'absent key'"
    ):
        pool.score(samples)

    with pytest.raises(RuntimeError, match="Call `start` first"):
        pool.score(samples)


def test_as_many_failures_as_allowed_do_not_stop_the_run(make_sample, start_pool):
    pool = start_pool("reward_functions.py:misbehave", max_error_share=0.1)

    results = pool.score([make_sample("raise" if i == 5 else "fine") for i in range(10)])

    assert results.num_errors == 1


def test_a_run_stops_as_soon_as_too_many_have_failed(make_sample, start_pool):
    """Not after waiting for each of 20 hanging samples."""
    pool = start_pool("reward_functions.py:misbehave", timeout=0.3, max_error_share=0.1)

    with pytest.raises(RuntimeError, match=r"ran out of time \(`timeout: 0.3`\) on 3"):
        pool.score([make_sample("loop")] * 20)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import absent_module", "does not import: ModuleNotFoundError: No module named 'absent_module'"),
        ("import os; os._exit(3)", r"does not import. The worker's process ended \(exit code 3\) meanwhile"),
    ],
)
def test_a_function_that_does_not_import_stops_the_start(tmp_path, start_pool, source, message):
    (tmp_path / "reward.py").write_text(source)

    with pytest.raises(ValueError, match=message):
        start_pool(f"{tmp_path}/reward.py:f")


def test_an_import_error_shows_where(tmp_path, start_pool):
    (tmp_path / "reward.py").write_text("import absent_module")

    with pytest.raises(ValueError, match="does not import") as caught:
        start_pool(f"{tmp_path}/reward.py:f")

    assert 'reward.py", line 1, in <module>' in caught.value.__notes__[0]


def test_import_paths_start_from_the_working_directory(tmp_path, monkeypatch, make_sample, start_pool):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges").mkdir()
    (tmp_path / "judges" / "strict.py").write_text("def half(sample): return 0.5")

    assert start_pool("judges.strict.half").score([make_sample()]).rewards == [0.5]


def test_import_paths_follow_the_parents_path(tmp_path, monkeypatch, make_sample, start_pool):
    """As when the parent is a script in another folder."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "judge_on_path.py").write_text("def half(sample): return 0.5")

    assert start_pool("judge_on_path.half").score([make_sample()]).rewards == [0.5]


def test_calls_in_the_wrong_order_are_refused(make_sample, start_pool):
    with pytest.raises(RuntimeError, match="Call `start` first"):
        RewardPool(RewardConfig(function="gsm8k")).score([make_sample()])
    pool = start_pool("reward_functions.py:number")
    with pytest.raises(RuntimeError, match="called twice"):
        pool.start()
    pool.stop()
    pool.stop()
    pool.start()
    assert pool.score([make_sample("1")]).rewards == [1.0]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"function": ""}, "`function` must name"),
        ({"function": None}, "`function` must name"),
        ({"functions": [WeightedReward(function="math")]}, "both set. Leave one of them out"),
        (
            {"function": None, "functions": [WeightedReward(function="math")], "arguments": {"x": 1}},
            "Give each of the `functions` its own",
        ),
        ({"function": None, "functions": [WeightedReward(function="")]}, "each of the `functions` needs a `function`"),
        (
            {"function": None, "functions": [WeightedReward(function=name) for name in ("a.py:f", "b.f")]},
            "several rewards of the name `f`",
        ),
        ({"max_concurrency": 1}, r"`max_concurrency` must be at least `num_workers` \(2\)"),
        ({"num_workers": 0}, "`num_workers` must be at least 1, got 0"),
        ({"timeout": 0.0}, "`timeout` must be a positive number of seconds, got 0"),
        ({"timeout": float("inf")}, "`timeout` must be a positive number of seconds, got inf"),
        ({"max_error_share": 1.5}, "`max_error_share` must be between 0 and 1, got 1.5"),
        ({"max_error_share": float("nan")}, "`model.reward.max_error_share` must be a number, got nan"),
    ],
)
def test_bad_options_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**{"function": "gsm8k"} | option)
