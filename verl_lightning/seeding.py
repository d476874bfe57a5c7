"""Stateless randomness: every generator is seeded from what it is for, so a resumed run needs no saved state."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch


def run_seed() -> int:
    """The seed of the run: what Lightning's ``seed_everything`` was called with, 0 if it never was."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def derive_seed(*parts: int | str) -> int:
    """A seed in ``[0, 2**63)`` that depends on all parts and on nothing else.

    Args:
        parts: Parts that tell what the random numbers are for, such as the run's seed, the step, the row and a purpose.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def reseed(*parts: int | str) -> None:
    """Seed the global streams of Python, numpy and torch, which libraries draw from (dropout, for one)."""
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the only stream that old-style numpy code draws from
    # Not `torch.manual_seed`: it formats a traceback for each kind of device that is not there, a millisecond a call.
    torch.default_generator.manual_seed(seed)
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        streams = torch.get_device_module(device)
        (streams.manual_seed if device.type == "mps" else streams.manual_seed_all)(seed)
