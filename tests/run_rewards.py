"""Reward functions for test runs: a tiny random model must meet good and bad responses; loaded by file path."""

from __future__ import annotations

import os

from verl_lightning.rewards.base import ANY_RESPONSE


def is_trial(sample):
    """Before models are loaded; a warning would end the test."""
    return sample.response == ANY_RESPONSE


def even_share(sample):
    """Share of the response's characters with an even code; 0 for an empty response."""
    return _even_share(sample.response)


def _even_share(text):
    return sum(ord(character) % 2 == 0 for character in text) / max(1, len(text))


def parts_of_even_share(sample):
    """`even_share`, with a number beside it."""
    return {"reward": even_share(sample), "length": len(sample.response)}


def starts_even(sample):
    """1 if the first character has an even code, else 0."""
    return float(bool(sample.response) and ord(sample.response[0]) % 2 == 0)


def fails_on_even(sample):
    """Like `even_share`, but fails on responses that start with an even code."""
    if starts_even(sample):
        raise RuntimeError("an even start")
    return even_share(sample)


def none_on_even(sample):
    """Like `even_share`, but has no reward for responses that start with an even code."""
    return None if starts_even(sample) else even_share(sample)


def none_but_in_the_trial(sample):
    """Has a reward for made-up responses alone."""
    return 1.0 if is_trial(sample) else None


def fails_on_even_rows(sample):
    """Like `even_share`, but fails for every other row of the data."""
    if sample.extra_info["index"] % 2 == 0 and not is_trial(sample):
        raise RuntimeError("an even row")
    return even_share(sample)


def as_in_trl(prompts, completions, data_source, index, **kwargs):
    """`even_share` of each, and checks that all are of one row."""
    assert len(completions) == len(prompts) == len(index)
    assert len(set(index)) == len(set(data_source)) == 1
    return [_even_share(completion[0]["content"]) for completion in completions]


def as_in_verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": _even_share(solution_str), "pred": solution_str}


def text(sample):
    """What is no reward."""
    return "good"


def fails(sample):
    """On all that is sampled."""
    if not is_trial(sample):
        raise RuntimeError("as ever")


def fails_on_monotony(sample):
    """Like `even_share`, but fails for every other row if the response repeats itself, as greedy ones do."""
    if sample.extra_info["index"] % 2 == 0 and len(set(sample.response)) < 2:
        raise RuntimeError("boring")
    return even_share(sample)


def always_one(sample):
    """The same for every response."""
    return 1.0


def same_on_even_rows(sample):
    """Like `even_share`, but the same for every response to every other row of the data."""
    return 1.0 if sample.extra_info["index"] % 2 == 0 else even_share(sample)


def differs_by_process(sample):
    """A number of the worker that is asked, as a judge's mood would be."""
    return os.getpid() % 1009 / 1009 + even_share(sample)


def of_a_model(sample, path):
    """Like `even_share`, as if a model in a folder had judged it."""
    return even_share(sample) if os.path.isdir(path) else None
