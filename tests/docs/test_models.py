"""The page of model families says what `make families` recorded, of all families that are tested."""

from __future__ import annotations

import json

from tests.families.catalog import FAMILIES, VARIANTS
from tests.tiny import ROOT, load_script

pages = load_script(ROOT / "docs" / "make_models.py")


def test_the_page_of_families_is_fresh():
    table = json.loads((ROOT / "docs" / "models.json").read_text())

    assert pages.make_page(table) == (ROOT / "docs" / "models.md").read_text()
    assert all(family in FAMILIES | VARIANTS for column in table.values() for family in column)
    assert table["auto"].keys() == FAMILIES.keys()
