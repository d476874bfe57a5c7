"""The benchmark of engines beside the trainer, in small and on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ray_rollout.py"
SIZES = {"prompts": 8, "samples": 4, "prompt-length": 16, "response-length": 16, "steps": 4, "warmup": 2}


@pytest.mark.backend
@pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")
def test_rows_are_compared_with_the_colocated_one(tmp_path):
    words = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    words += ["--object-store", "200000000", "--row-seconds", "600", "--folder", str(tmp_path / "runs")]
    command = [sys.executable, str(SCRIPT), "--cards", "2", "--tiny", *words, "--out", str(tmp_path / "out.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}

    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["run"] for row in result["rows"]] == ["1 + 1, overlap", "colocated", "1 + 1"]
    assert [row["staleness"] for row in result["rows"]] == [1, 0, 0]
    assert max(row["log_prob_gap"] for row in result["rows"]) < 1e-3
    speeds = {row["run"]: row["response_tokens_per_s"] for row in result["rows"]}
    for name, ratio in result["over_colocated"].items():
        assert ratio == pytest.approx(speeds[name] / speeds["colocated"], abs=1e-3)
    assert len(result["over_colocated"]) == 2
