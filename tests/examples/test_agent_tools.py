"""The tools of ``examples/agents`` do what they tell the policy."""

from __future__ import annotations

import pytest

from tests.tiny import ROOT, load_script
from verl_lightning.environments.tools import tool_schema

search = load_script(ROOT / "examples" / "agents" / "search.py").search


@pytest.mark.parametrize(
    ("query", "title"),
    [("who cast the copper bell", "Velin bell"), ("length of the Oule", "Oule"), ("goats", "Jon Aldery")],
)
def test_a_search_finds_the_passage(query, title):
    assert search(query).startswith(f"{title}: ")
    assert len(search(query, limit=1).splitlines()) == 1


def test_a_search_without_a_match_says_so():
    assert search("zebra") == "Nothing was found."
    assert tool_schema(search)["function"]["parameters"]["required"] == ["query"]
