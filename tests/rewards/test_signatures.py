"""Reward functions as they are written for TRL and verl, called as there."""

from __future__ import annotations

import re

import pytest

from verl_lightning.rewards.returned import RewardMistakeError
from verl_lightning.rewards.signatures import BoundReward

CHAT = [{"role": "user", "content": "?"}]


def bind(function, **arguments):
    return BoundReward("mine.py:f", function, arguments)


@pytest.fixture
def samples(make_sample):
    """Two responses to a prompt."""
    columns = {"answer": "4", "level": 2}
    return [make_sample(text, ground_truth="4", prompt=CHAT, extra_info=columns) for text in ("4", "44")]


def test_a_function_of_a_sample_gets_it(samples):
    assert bind(lambda sample, *, scale: scale * len(sample.response), scale=2).judge(samples[1:]) == [4]


def test_verl_functions_get_its_keywords(samples):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False):
        return (data_source, solution_str, ground_truth, extra_info["answer"], strict)

    bound = bind(compute_score, strict=True)

    assert not bound.is_batched
    assert bound.judge(samples[1:]) == [("test", "44", "4", "4", True)]


def test_verl_functions_may_leave_keywords_out(samples):
    assert bind(lambda solution_str, ground_truth, method="strict": solution_str == ground_truth).judge(
        samples[:1]
    ) == [True]


def test_verl_functions_of_lists_judge_the_responses_to_a_prompt(samples):
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
        assert (len(data_sources), extra_infos[0]["level"], kwargs) == (2, 2, {"strict": True})
        return [{"score": text == truth} for text, truth in zip(solution_strs, ground_truths, strict=True)]

    bound = bind(compute_score, strict=True)

    assert bound.is_batched
    assert [bound.check(value)["reward"] for value in bound.judge(samples)] == [1.0, 0.0]


def test_verl_mappings_may_name_the_score_and_hold_text():
    bound = bind(lambda solution_str: None)

    checked = bound.check({"score": 1.0, "acc": True, "pred": "42", "rank": None})

    assert checked == {"reward": 1.0, "components": {"acc": 1.0}, "unlogged": ["pred"]}


def test_trl_functions_get_messages_and_columns(samples):
    def reward(prompts, completions, answer, **kwargs):
        assert prompts == [CHAT, CHAT]
        assert kwargs.keys() == {"level", "data_source", "ground_truth", "extra_info", "completion_ids", "strict"}
        return [message[0]["content"] == right for message, right in zip(completions, answer, strict=True)]

    bound = bind(reward, strict=True)

    assert bound.is_batched
    assert bound.judge(samples) == [True, False]


def test_trl_functions_may_take_tokens_alone(make_sample):
    """As the first example of its documentation does."""

    def reward_func(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    assert bind(reward_func).judge([make_sample(token_ids=[3, 4]), make_sample(token_ids=[5])]) == [2.0, 1.0]


def test_trl_functions_may_take_completions_alone_and_give_none(samples):
    assert bind(lambda completions: [None, 0.5]).judge(samples) == [None, 0.5]
    assert bind(lambda completions: (len(one) for one in completions)).judge(samples) == [1, 1]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "for each of its 2 responses, got 1 rewards."),
        (1.0, "must return a list with one reward for each of its 2 responses, got 1.0."),
        (None, "responses, got None."),
        ("ab", "responses, got 'ab'."),
        ({"reward": [1.0, 1.0]}, "responses, got {'reward': [1.0, 1.0]}."),
    ],
)
def test_lists_of_another_length_are_mistakes(samples, returned, message):
    with pytest.raises(RewardMistakeError, match=re.escape(message)):
        bind(lambda completions: returned).judge(samples)


def test_columns_that_the_row_lacks_are_mistakes(samples):
    message = (
        "takes `solution`, which neither the row nor `model.reward.arguments` has. The row's own columns, `extra_info` "
    )
    with pytest.raises(RewardMistakeError, match=re.escape(f"{message}included, are: answer, level.")):
        bind(lambda completions, solution: []).judge(samples)


def test_a_function_without_a_marker_takes_a_sample(samples):
    def reward(sample, completions=3):
        return completions * len(sample.response)

    assert bind(reward).judge(samples[:1]) == [3]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (lambda completions, trainer_state: [], {}, "(none): nothing gives it `trainer_state`. Its signature is"),
        (lambda solution_str, judge: 0, {}, "(none): nothing gives it `judge`. Its signature"),
        (
            lambda solution_str, judge: 0,
            {"juge": 1},
            "no argument `juge`. Did you mean `judge`? Its arguments are: judge.",
        ),
        (lambda solution_str: 0, {"solution_str": "x"}, "takes no argument `solution_str`. Its arguments are: none."),
    ],
)
def test_functions_that_can_not_be_called_are_refused(function, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        bind(function, **arguments)
