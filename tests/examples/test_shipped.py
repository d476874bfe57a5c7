"""Every YAML file of the repository trains, and those of ``configs/`` under `fsdp`; Megatron has its turn elsewhere."""

from __future__ import annotations

import math

import pytest

from tests.examples.shipped import launch, shipped_files


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("fsdp", 2)])
def test_every_shipped_file_takes_a_step(strategy, devices, tmp_path):
    results = launch(strategy, devices, tmp_path)

    assert list(results) == shipped_files(strategy)
    wrong = {file: found for file, found in results.items() if found[0] != 1 or not 0 < found[1] < math.inf}
    assert wrong == {}
