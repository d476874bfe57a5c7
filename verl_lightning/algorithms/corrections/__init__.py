"""Rollout corrections: for an engine whose policy is not quite the trainer's."""

import sys

from verl_lightning.algorithms.corrections.base import RolloutCorrection
from verl_lightning.algorithms.discovery import methods_in

METHODS: dict[str, type[RolloutCorrection]] = methods_in(sys.modules[__name__], RolloutCorrection)
"""Every method by the name that YAML gives it."""

globals().update(METHODS)
