"""The documentation site builds, and each of its pages can be found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_site_builds_without_a_broken_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}

    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "algorithms" / "GRPO" / "index.html").is_file()


def test_every_page_has_a_place_in_the_navigation():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    navigation = (ROOT / "mkdocs.yml").read_text()

    assert {page for page in pages if f": {page}\n" not in navigation} == set()
