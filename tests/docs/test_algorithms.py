"""The pages of the algorithms say what their docstrings say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import load_script

DOCS = Path(__file__).parents[2] / "docs"
PAGES = load_script(DOCS / "make_algorithms.py").pages()


@pytest.mark.parametrize("name", PAGES)
def test_algorithm_pages_are_fresh(name):
    """Else run ``python docs/make_algorithms.py``."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name]


def test_every_method_has_a_page_and_no_other_is_left():
    """A page of a method that is gone would mislead."""
    assert {path.name for path in (DOCS / "algorithms").glob("*.md")} == {Path(n).name for n in PAGES if "/" in n}
