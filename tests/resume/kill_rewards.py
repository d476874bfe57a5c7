"""A reward function that leaves a process behind, which must not outlive the run."""

from __future__ import annotations

import subprocess
from functools import cache

from tests.run_rewards import even_share as share


@cache
def leave_a_process() -> None:
    """Starts one, in a session of its own."""
    subprocess.Popen(["sleep", "infinity"], start_new_session=True)


def even_share(sample):
    """Share of even characters."""
    leave_a_process()
    return share(sample)
