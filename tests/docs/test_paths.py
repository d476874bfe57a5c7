"""Files that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = r"(?:verl_lightning|strategies|callbacks|configs|tests|examples|benchmarks|docs)"
NAMED = re.compile(rf"(?<![\w/.-]){ROOMS}/[\w/.-]*[\w/]")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    named = set(NAMED.findall(page.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_map_names_files():
    assert len(set(NAMED.findall((ROOT / "docs" / "architecture.md").read_text()))) > 40
