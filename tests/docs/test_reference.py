"""The reference says what types and docstrings say, and leaves no option without a meaning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "reference.md",
    "reference/distillation.yaml",
    "reference/dpo.yaml",
    "reference/grpo.yaml",
    "reference/ppo.yaml",
    "reference/reward_model.yaml",
    "reference/sft.yaml",
]


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    """What the script would write, from a process of its own: other tests load classes and change the parser."""
    code = (
        "import json, sys; sys.path.insert(0, 'docs'); import make_reference; print(json.dumps(make_reference.pages()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=DOCS.parent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_fresh(written, name):
    """Else run ``make reference``."""
    assert written.keys() == set(PAGES)
    assert (DOCS / name).read_text(encoding="utf-8") == written[name]


def test_every_option_has_a_meaning():
    rows = [line for line in (DOCS / "reference.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]

    assert len(rows) > 200
    assert [row for row in rows if not row.rstrip("| ").split(" | ")[3:]] == []


def test_the_reference_says_defaults_and_units():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")

    assert "| `update.epochs` | int | `1` | Passes over the iteration's responses. |" in text
    assert "| `merge_for_rollout` | bool | `true` |" in text
