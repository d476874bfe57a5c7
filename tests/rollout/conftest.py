"""Lets processes of the tests of vLLM begin with vLLM imported."""

from __future__ import annotations

from tests.processes import preload

preload("tests.rollout.warm")
