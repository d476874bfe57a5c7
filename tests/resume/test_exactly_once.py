"""An asynchronous run whose trainer, engine and workers are killed learns from each prompt once."""

from __future__ import annotations

import sys

import pytest

from tests.processes import preload
from tests.resume.exactly_once import ALGORITHMS, KILLS, RANKS, run_chain

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
preload("tests.resume.campaign")


def test_there_are_as_many_kills_as_promised():
    assert len(KILLS) * len(ALGORITHMS) * len(RANKS) >= 50


@pytest.mark.parametrize(
    ("algorithm", "strategy", "kills"),
    [("agents", "auto", KILLS[2:4]), ("grpo", "fsdp", [KILLS[1], KILLS[4], KILLS[6]])],
)
def test_each_prompt_is_learnt_from_once_whatever_is_killed(tmp_path, tiny_folder, algorithm, strategy, kills):
    """All chains, also PPO's, are run by hand: `python -m tests.resume.exactly_once`."""
    counts = run_chain(tmp_path, algorithm, strategy, tiny_folder, kills)

    assert counts["learnt"] == 24
