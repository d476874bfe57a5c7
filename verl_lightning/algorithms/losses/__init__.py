"""Policy losses: what the policy minimises, per response token."""

import sys

from verl_lightning.algorithms.discovery import methods_in
from verl_lightning.algorithms.losses.base import PolicyLoss

METHODS: dict[str, type[PolicyLoss]] = methods_in(sys.modules[__name__], PolicyLoss)
"""Every method by the name that YAML gives it."""

globals().update(METHODS)
