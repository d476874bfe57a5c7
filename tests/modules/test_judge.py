"""What a judge says of a reward function before and while it judges."""

from __future__ import annotations

import re

import pytest
import torch

from tests.tiny import tiny_tokenizer
from verl_lightning.modules.judge import Judge, scale_warning
from verl_lightning.rewards.pool import RewardConfig
from verl_lightning.rollout.base import Completion, Request, SamplingConfig
from verl_lightning.rollout.completions import to_rollout

ROWS = [
    {"data_source": "sums", "prompt": [], "reward_model": {"ground_truth": 4}, "answer": "4"},
    {"data_source": "words", "prompt": [], "reward_model": {"ground_truth": ["four"]}},
]


@pytest.fixture
def try_out(tmp_path):
    """Tries a function of this source on the rows."""
    judges = []

    def run(source):
        (tmp_path / "reward.py").write_text(source)
        timeout = 1.0 if "while True" in source else 30.0  # a busy machine must not stop those that end
        judges.append(
            Judge(RewardConfig(function=f"{tmp_path}/reward.py:f", num_workers=1, timeout=timeout), tiny_tokenizer())
        )
        judges[-1].start()
        judges[-1].try_out(ROWS)

    yield run
    for judge in judges:
        judge.stop()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(s): return 'good'", "must return a number or None, got `reward` = 'good'."),
        ("def f(s): return {'reward': 'good'}", "must return a number or None, got `reward` = 'good'."),
        ("def f(s): return {'score': 1.0}", "must have the key `reward`, got ['score']."),
        ("def f(s): yield 1.0", "must return a number or None, got `reward` = <generator"),
        ("def f(s):\n    import absent_module", "No module named 'absent_module'"),
        ("def f(s): return mispelt", "name 'mispelt' is not defined"),
        ("def f(s): return s.text", "'RewardSample' object has no attribute 'text'"),
        ("def f(s): return len(s['response'])", "'RewardSample' object is not subscriptable"),
        ("def f(completions): return 1.0", "must return a list with one reward for each of its 2 responses, got 1.0"),
        ("def f(completions, solution): return []", "takes `solution`, which neither the row nor"),
    ],
)
def test_faults_of_the_function_itself_are_refused(try_out, source, message):
    with pytest.raises(ValueError, match=f"(?s)tried on the first row of `sums`, with.*{re.escape(message)}"):
        try_out(source)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (
            "def f(s): raise RuntimeError('as ever')",
            ["`sums`, with the responses '4' and 'I do not", "than `max_error_share: 0.1` of a batch", "as ever"],
        ),
        ("def f(s): return float('nan')", ["and failed on each", "numbers of at most 3.4e38"]),
        ("def f(s):\n    while True: pass", ["and failed on each", "stopped after 1 seconds"]),
        ("def f(s): return float(s.response)", ["`words`, with the responses '' and 'I do", "failed on each"]),
        ("def f(s): s.response == '4'", ["returned None for each, which", "Does it lack a `return`?"]),
    ],
)
def test_what_responses_may_be_to_blame_for_is_told(try_out, recwarn, source, messages):
    try_out(source)

    text = "\n".join(str(warning.message) for warning in recwarn)
    assert all(message in text for message in messages), text


def test_values_that_are_not_logged_are_named_once(try_out, caplog):
    try_out("def f(s): return {'reward': 1, 'why': 'so', 'length': 1}")

    assert [record.message for record in caplog.records if "no numbers and are not logged: `why`." in record.message]
    assert len(caplog.records) == 1


def test_a_function_that_judges_some_response_is_fine(try_out, recwarn):
    try_out("def f(s): return None if 'know' in s.response else len(s.response)")

    assert not recwarn.list


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1e20, 0.0, None, 1.0], "returned a number as large as 1e+20. Differences between such rewards get lost"),
        ([0.0, 1.0, -3e38, None], "as large as 3e+38"),
        ([1e-42, 0.0, None, -1e-42], "returned nothing larger than 1e-42"),
        ([1e8, 1e8 + 1, 0.0, 1.0], "such as 100000000.0 and 100000001.0, in 1 of 2 prompts."),
    ],
)
def test_rewards_whose_differences_get_lost_are_told_of(rewards, message):
    assert message in scale_warning(rewards, [0, 0, 1, 1])


@pytest.mark.parametrize("rewards", [[], [None] * 4, [0.0] * 4, [0.3, 0.1 + 0.2, 1e6, -1e6], [1e-300, 0.0, 1e14, 0.0]])
def test_other_rewards_are_fine(rewards):
    assert scale_warning(rewards, [0, 0, 1, 1][: len(rewards)]) is None


class Letters:
    """A tokenizer whose tokens are letters."""

    def batch_decode(self, tokens, **options):
        return ["".join(map(chr, row)) for row in tokens]


SOURCES = {
    "single": "def f(s): return float(len(s.response) + 10 * s.is_truncated)",
    "batched": "def f(completions, **columns): return [len(c) + max(map(len, completions)) / 8 for c in completions]",
}


@pytest.fixture(params=SOURCES)
def judge(request, tmp_path):
    (tmp_path / "reward.py").write_text(SOURCES[request.param])
    judge = Judge(RewardConfig(function=f"{tmp_path}/reward.py:f", num_workers=2), Letters())
    judge.start()
    yield judge
    judge.stop()


TEXTS = ["a", "bb", "ccc", "dddd"]  # two to each row


def rollout_of(texts):
    sampling = SamplingConfig()
    requests = [Request(prompt_ids=[1], sampling=sampling, seed=0, name="") for _ in texts]
    return to_rollout(requests, completions_of(texts), num_samples=2, pad_token_id=0, device=torch.device("cpu"))


def completions_of(texts):
    return [Completion([*map(ord, text)], [0.0] * len(text), len(text) == 2, 1) for text in texts]


def test_responses_that_come_one_by_one_get_the_rewards_of_a_whole_batch(judge):
    whole = judge.score(rollout_of(TEXTS), ROWS)
    hear = judge.begin(ROWS, 2)
    for position in (3, 0, 2, 1):
        hear(position, completions_of(TEXTS)[position])

    early = judge.score(rollout_of(TEXTS), ROWS)

    assert early.rewards.tolist() == whole.rewards.tolist()
    assert early.responses == whole.responses == TEXTS


def test_responses_that_nobody_asks_for_count_in_no_batch(judge):
    judge.begin(ROWS, 2)(0, completions_of(TEXTS)[0])  # the engine dies, and is asked again
    hear = judge.begin(ROWS, 2)
    for position, completion in enumerate(completions_of(["lost"] * 4)):
        hear(position, completion)

    other = judge.score(rollout_of(TEXTS), [dict(row) for row in ROWS])

    assert other.responses == TEXTS
    assert other.rewards.tolist() == judge.score(rollout_of(TEXTS), ROWS).rewards.tolist()
