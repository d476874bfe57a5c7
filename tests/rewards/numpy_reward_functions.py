"""Reward functions that use NumPy, in a file of their own because its import takes longer than a worker's start."""

from __future__ import annotations

import random

import numpy as np


def numpy_reward(sample):
    return {"reward": np.float32(0.5), "is_correct": True, "count": np.int64(3)}


def drawn(sample):
    return {"reward": random.random(), "numpy": np.random.rand(), "order": float(hash(sample.response))}
