"""Private names of Ray that `compat.ray` uses are where it looks; `tests/ray/test_local.py` tries their effect."""

from __future__ import annotations

import importlib.metadata
import inspect

from ray._private import ray_constants, services

from verl_lightning.compat.ray import use_loopback


def test_the_version_is_the_one_that_was_read():
    assert importlib.metadata.version("ray").startswith("2.60.")


def test_an_address_is_looked_for():
    assert list(inspect.signature(services.canonicalize_bootstrap_address).parameters)[0] == "addr"


def test_rays_processes_are_told_to_listen_on_loopback(monkeypatch):
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setenv(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "1")

    use_loopback()

    assert not ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, True)
    assert not ray_constants.ENABLE_RAY_CLUSTER
