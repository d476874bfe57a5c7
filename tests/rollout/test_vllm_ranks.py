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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_sample_what_one_would(tmp_path, prompt_file, strategy):
    folder = write_sharp_folder(tmp_path / "model")

    one, two = (
        run(tmp_path / str(devices), folder, prompt_file, s, devices) for s, devices in (("auto", 1), (strategy, 2))
    )

    assert len(one) == len(two) == 3
    for alone, together in zip(one, two, strict=True):
        assert together["critic/score/mean"] == pytest.approx(alone["critic/score/mean"], abs=1e-6)
        assert together["rollout/canary_gap"] < 1e-4


def run(out, folder, prompts, strategy, devices):
    """Metrics of each step on the last rank."""
    out.mkdir()
    words = ["--strategy", strategy, "--devices", str(devices), "--folder", folder, "--prompts", prompts, "--out", out]
    subprocess.run([sys.executable, SCRIPT, *words], check=True, capture_output=True)
    return json.loads((out / f"{devices - 1}.json").read_text())
