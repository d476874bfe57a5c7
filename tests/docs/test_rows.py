"""Every row that the page on data shows is read as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from verl_lightning.data.preference_rows import read_preferences
from verl_lightning.data.rows import read_chat_rows, read_prompt_rows

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- (\w+)(?: columns=(.*?))? -->\n\n```json\n(.*?)```", PAGE, re.DOTALL)
READERS = {"prompts": read_prompt_rows, "chats": read_chat_rows, "preferences": read_preferences}


@pytest.mark.parametrize(("kind", "columns", "row"), BLOCKS)
def test_a_row_of_the_page_is_read(kind, columns, row, tmp_path):
    (tmp_path / "rows.jsonl").write_text(row)
    found = READERS[kind](str(tmp_path / "rows.jsonl"), json.loads(columns) if columns else None)
    assert len(found[0] if kind == "preferences" else found) == 1


def test_the_page_has_rows_of_every_kind():
    assert len(BLOCKS) == PAGE.count("```json") == 14
    assert {kind for kind, _, _ in BLOCKS} == READERS.keys()
