"""The benchmark that runs TRL's trainer beside ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_rollout.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("vllm_rollout_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_step_of_trl_is_read_from_what_it_prints(benchmark, tmp_path):
    script = tmp_path / "trl.py"
    script.write_text(
        "import sys, os\nassert os.path.isdir('work')\nassert sys.argv[1:] == ['512', '16']\n"
        "print('step 4 26.1')\nprint('TRL median step 26.0123 tokens/step 262144')\n"
    )

    assert benchmark.run_trl(script, tmp_path / "new", response_length=512, micro_batch_size=16) == 26.0123


def test_a_script_that_prints_no_step_is_an_error(benchmark, tmp_path):
    script = tmp_path / "trl.py"
    script.write_text("print('done')")

    with pytest.raises(RuntimeError, match="did not print `TRL median step`, but: done"):
        benchmark.run_trl(script, tmp_path, response_length=512, micro_batch_size=16)
