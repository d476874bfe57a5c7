"""What a reward function sees of the environment."""

from __future__ import annotations

import re

import pytest

from verl_lightning.rewards.pool import RewardConfig

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "HTTPS_PROXY", "MINE")
BASICS = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "TMPDIR", "OMP_NUM_THREADS", "HF_HOME")


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    for name in ("LANG", "LC_ALL"):
        monkeypatch.setenv(name, "C.UTF-8")
    for name in ("HOME", "TMPDIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "", prepend=":")
    for name in SECRETS:
        monkeypatch.setenv(name, "sesame")


@pytest.mark.parametrize(
    ("allowed", "seen"),
    [(None, {*SECRETS, *BASICS}), ([], {*BASICS}), (["OPENAI_API_KEY", "NOT_SET"], {*BASICS, "OPENAI_API_KEY"})],
)
def test_workers_see_what_they_may(make_sample, start_pool, allowed, seen):
    pool = start_pool("reward_functions.py:sees", environment=allowed)

    rewards = pool.score([make_sample(name) for name in (*SECRETS, *BASICS)]).rewards

    assert {name for name, reward in zip((*SECRETS, *BASICS), rewards, strict=True) if reward} == seen


def test_nothing_above_the_worker_tells_it_more(make_sample, start_pool):
    """Its own supervisors and children; a process of the same user can read the trainer's."""
    pool = start_pool("reward_functions.py:environments", environment=["MINE"])

    assert pool.score([make_sample("HF_TOKEN"), make_sample("MINE")]).rewards == [0.0, 4.0]


def test_arguments_may_refer_to_the_environment(make_sample, start_pool):
    arguments = {"key": "${MINE}", "others": [{"header": "${OPENAI_API_KEY}"}, "${MINE} as text", 3]}
    pool = start_pool("reward_functions.py:takes_key", arguments=arguments, environment=["MINE", "OPENAI_API_KEY"])

    assert pool.score([make_sample()]).rewards == [1.0]
    assert pool.config.arguments == arguments  # which is what is saved and logged


@pytest.mark.parametrize(("name", "allowed"), [("ABSENT", None), ("MINE", [])])
def test_references_to_what_is_not_there_are_refused(start_pool, name, allowed):
    message = f"`model.reward.arguments` refers to `${{{name}}}`, but the reward's workers have no environment variable"
    with pytest.raises(ValueError, match=re.escape(message)):
        start_pool("reward_functions.py:takes_key", arguments={"key": f"${{{name}}}"}, environment=allowed)


@pytest.mark.parametrize("name", ["KEY=sesame", "", "a b", "*"])
def test_what_is_no_name_is_refused_without_showing_a_value(name):
    with pytest.raises(ValueError, match="`environment` lists names of environment variables") as caught:
        RewardConfig(function="gsm8k", environment=[name])

    assert "sesame" not in str(caught.value)
