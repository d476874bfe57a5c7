"""The package in Python: what a script or a notebook writes runs as it stands in the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import verl_lightning
from tests.tiny import ROOT, write_prompt_file, write_tiny_folder
from verl_lightning.algorithms import advantages, corrections, losses

BLOCK = re.compile(r"```python\n(from lightning\.pytorch import Trainer\n.*?)```", re.DOTALL)


def test_importing_the_package_imports_neither_torch_nor_lightning():
    code = "import sys, verl_lightning; print({'torch', 'lightning', 'transformers', 'numpy'} & sys.modules.keys())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "set()\n"


def test_every_public_name_is_there():
    for name in verl_lightning.__all__:
        assert getattr(verl_lightning, name).__name__ == name
    methods = advantages.METHODS | corrections.METHODS | losses.METHODS
    assert methods.keys() <= set(verl_lightning.__all__) <= set(dir(verl_lightning))
    with pytest.raises(AttributeError, match="has no attribute 'PPO'"):
        _ = verl_lightning.PPO


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_readmes_example_runs_as_a_script_does(tmp_path, monkeypatch):
    """Its model's name is a folder here, and its sizes are small; all else is as it is written."""
    (code,) = BLOCK.findall((ROOT / "README.md").read_text())
    for large, small in {"=200": "=1", "=64": "=4", "=512": "=4", "=8": "=2"}.items():
        assert large in code
        code = code.replace(large, small)
    write_tiny_folder(tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct")
    for name in ("train.jsonl", "val.jsonl"):
        write_prompt_file(tmp_path / name, num_rows=4)
    monkeypatch.chdir(tmp_path)
    code = code.replace("Trainer(", "trainer = Trainer(accelerator='cpu', ").replace(").fit(", ")\ntrainer.fit(")
    script: dict[str, Any] = {"__name__": "__main__"}

    exec(compile(code, "train.py", "exec"), script)

    assert script["trainer"].global_step == 1
    assert "val/reward" in script["trainer"].callback_metrics
    assert list(Path("lightning_logs").rglob("*.ckpt"))
