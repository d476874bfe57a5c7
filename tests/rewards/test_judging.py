"""The weighted sum of several reward functions, each called in its own way."""

from __future__ import annotations

import asyncio

import pytest

from verl_lightning.rewards.judging import Judges, Part
from verl_lightning.rewards.scoring import units_of
from verl_lightning.rewards.signatures import BoundReward


def judges_of(**functions):
    """Functions by name, with their weights."""
    parts = [
        Part(function=BoundReward(name, function, {}), label=name, weight=weight)
        for name, (function, weight) in functions.items()
    ]
    return Judges(parts, is_sum=True, timeout=30.0)


def outcomes(judges, samples):
    return judges.total(asyncio.run(judges.judge_async(samples, judges.judge(samples))))


@pytest.fixture
def samples(make_sample):
    return [make_sample("4", ground_truth="4"), make_sample("five", ground_truth="4")]


def length(sample):
    return {"reward": len(sample.response), "words": 1, "kind": "text"}


def brief(completions, **columns):
    return [len(messages[0]["content"]) < 3 for messages in completions]


async def is_right(solution_str, ground_truth):
    await asyncio.sleep(0)
    return 1.0 if solution_str == ground_truth else None


def test_rewards_of_all_forms_are_added_by_weight(samples):
    """0.5 x length, 2 x brief, and -1 for the right answer; a function that returns None has no part in the sum."""
    judges = judges_of(length=(length, 0.5), brief=(brief, 2.0), right=(is_right, -1.0))

    first, second = outcomes(judges, samples)

    assert (judges.is_batched, judges.is_async) == (True, True)
    assert first["reward"] == 0.5 * 1 + 2.0 * 1 - 1.0
    assert first["components"] == {"length": 1.0, "brief": 1.0, "right": 1.0, "length/words": 1.0}
    assert second["reward"] == 0.5 * 4 + 2.0 * 0
    assert second["components"] == {"length": 4.0, "brief": 0.0, "length/words": 1.0}
    assert second["unlogged"] == ["length/kind"]


def test_a_sample_fails_if_one_function_does(samples):
    judges = judges_of(length=(length, 1.0), number=(lambda sample: float(sample.response), 0.0))

    first, second = outcomes(judges, samples)

    assert first["reward"] == 1.0
    assert second["error"].startswith("In the reward `number`:\nTraceback")
    assert not second["is_mistake"]


def test_no_function_with_a_reward_is_no_reward(samples):
    (none,) = outcomes(judges_of(a=(lambda sample: None, 1.0), b=(is_right, 1.0)), samples[1:])

    assert none == {"reward": None, "components": {}, "unlogged": []}


def test_a_sum_that_does_not_fit_is_an_error(samples):
    (outcome,) = outcomes(judges_of(a=(lambda sample: 3e38, 2.0)), samples[:1])

    assert "at most 3.4e38" in outcome["error"]


def test_a_plain_function_that_returns_a_coroutine_is_a_mistake(samples):
    (outcome,) = judges_of(a=(lambda sample: is_right("", ""), 1.0)).judge(samples[:1])[0]

    assert outcome["is_mistake"]
    assert "Define it with `async def`." in outcome["error"]


def test_prompts_of_the_same_words_about_other_images_are_judged_apart(make_sample):
    samples = [make_sample("4", ground_truth="4", extra_info={"images": [name]}) for name in ("a", "a", "b")]

    assert [len(unit) for unit in units_of(samples, is_batched=True)] == [2, 1]
