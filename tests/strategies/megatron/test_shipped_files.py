"""The YAML files of ``configs/`` take a step under Megatron, on two processes."""

from __future__ import annotations

import math

import pytest

from tests.examples.shipped import launch, shipped_files


@pytest.mark.backend
@pytest.mark.filterwarnings("default")  # or those that Megatron gives would be errors on the ranks
def test_every_shipped_file_takes_a_step(tmp_path):
    results = launch("megatron", 2, tmp_path)

    assert list(results) == shipped_files("megatron")
    assert {file for file, (step, norm) in results.items() if step != 1 or not 0 < norm < math.inf} == set()
