"""Advantage estimators: how rewards become the advantage of each response token."""

import sys

from verl_lightning.algorithms.advantages.base import AdvantageEstimator
from verl_lightning.algorithms.discovery import methods_in

METHODS: dict[str, type[AdvantageEstimator]] = methods_in(sys.modules[__name__], AdvantageEstimator)
"""Every method by the name that YAML gives it."""

globals().update(METHODS)
