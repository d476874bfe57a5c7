"""vLLM in each process of a run with several."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.vllm_parts import write_sharp_folder

pytestmark = [pytest.mark.backend, pytest.mark.slow, pytest.mark.timeout(600)]  # starts three processes

SCRIPT = Path(__file__).with_name("run_vllm_ranks.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sharp_folder(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, folder, prompt_file):
    """Metrics of each step of one process."""
    return run(tmp_path_factory.mktemp("one"), folder, prompt_file, "ddp", 1)


@pytest.mark.parametrize(("strategy", "ranks_an_engine"), [("ddp", 1), ("fsdp", 1), ("fsdp", 2), ("same_data", 2)])
def test_two_ranks_sample_what_one_would(tmp_path, folder, prompt_file, one_rank, strategy, ranks_an_engine):
    two_ranks = run(tmp_path, folder, prompt_file, strategy, 2, ranks_an_engine)

    assert len(one_rank) == len(two_ranks) == 3
    for one, two in zip(one_rank, two_ranks, strict=True):
        assert two["critic/score/mean"] == pytest.approx(one["critic/score/mean"], abs=1e-6)
        assert two["rollout/canary_gap"] < 1e-4


def run(out, folder, prompts, strategy, devices, ranks_an_engine=1):
    """Metrics of each step on the last rank."""
    words = ["--strategy", strategy, "--devices", str(devices), "--folder", folder, "--prompts", prompts, "--out", out]
    words += ["--tensor-parallel-size", str(ranks_an_engine)]
    subprocess.run([sys.executable, SCRIPT, *words], check=True, capture_output=True)
    return json.loads((out / f"{devices - 1}.json").read_text())
