"""Imports vLLM, where it is installed, before `tests.processes` forks; see `preload` there."""

from __future__ import annotations

import importlib.util

from verl_lightning.rollout.vllm_launch import import_vllm

if importlib.util.find_spec("vllm") is not None:
    import_vllm()
