"""The worked example of two nodes runs as its page says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.resume.experiment import read_metrics
from tests.tiny import ROOT


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")
def test_two_nodes_train_while_their_engines_sample(tmp_path):
    command = [sys.executable, str(ROOT / "examples/ray/run.py"), "--steps", "6"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (folder,) = (tmp_path / "runs/quickstart/grpo").glob("grpo-*")
    name = "rollout/staleness/max"
    rows = [row for row in read_metrics(folder) if row.get(name)]
    assert [float(row[name]) for row in rows] == [0, 1, 1, 1, 1, 1]
    assert all(0 < float(row["actor/grad_norm"]) < float("inf") for row in rows)
