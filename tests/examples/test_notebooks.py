"""The notebooks run from their first cell to their last, with few steps and small batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
SMALLER = {
    "max_steps=30": "max_steps=1",
    "max_steps=20": "max_steps=1",
    "max_steps=5": "max_steps=1",
    '"max_steps": 10': '"max_steps": 1',
    "val_check_interval=10": "val_check_interval=1, limit_val_batches=1",
    "batch_size=128": "batch_size=4",
    "batch_size=32": "batch_size=4",
    '"batch_size": 32': '"batch_size": 4',
    "prompts_per_step=64": "prompts_per_step=4, val_batch_size=4",
    "num_samples=8": "num_samples=2",
    "num_samples=4": "num_samples=2",
    "max_new_tokens=12": "max_new_tokens=2",
    "max_new_tokens=8": "max_new_tokens=2",
    "(tokenizer)": "(tokenizer, hidden_size=32, num_heads=2)",
    "devices=1": "devices=1, accelerator='cpu', enable_progress_bar=False",
    '"devices": 1': '"devices": 1, "accelerator": "cpu", "enable_progress_bar": False',
}
"""Sizes of a reader's, and those of the test."""


def code_of(path: Path) -> str:
    """A notebook's cells as a script."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    return code


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    (tmp_path / "quickstart").symlink_to(ROOT / "examples/quickstart")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    space: dict[str, Any] = {"__name__": "__main__"}

    exec(compile(code_of(path), path.stem, "exec"), space)

    assert space.get("trainer", getattr(space.get("cli"), "trainer", None)).global_step == 1


def test_notebooks_hold_no_outputs():
    """They would be of another day and machine."""
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    assert len(NOTEBOOKS) == 3
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
