"""Preference losses: what a policy minimises on responses that people preferred, or did not."""

import sys

from verl_lightning.algorithms.discovery import methods_in
from verl_lightning.algorithms.preferences.base import PreferenceLoss

METHODS: dict[str, type[PreferenceLoss]] = methods_in(sys.modules[__name__], PreferenceLoss)
"""Every method by the name that YAML gives it."""

globals().update(METHODS)
