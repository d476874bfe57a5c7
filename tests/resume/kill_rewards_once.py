"""A reward function whose worker is killed once in each attempt to run."""

from __future__ import annotations

import secrets

from tests.resume.kill_once import kill_once
from tests.run_rewards import is_trial


def never_same_on_odd_rows(sample):
    """On every other row the same for all responses, on the others never."""
    if not is_trial(sample):
        kill_once("kill a reward worker")
    return secrets.randbelow(10**6) / 10**6 if sample.extra_info["index"] % 2 else 0.5
