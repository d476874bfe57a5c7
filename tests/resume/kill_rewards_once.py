"""A reward function whose worker is killed once in each attempt to run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.run_rewards import is_trial
from tests.run_rewards import same_on_even_rows as share


def same_on_even_rows(sample):
    """Share of even characters, but on every other row the same for all responses."""
    order = Path("kill a reward worker")
    if not is_trial(sample) and order.exists():
        order.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return share(sample)
