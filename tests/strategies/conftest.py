"""What the conformance tests of every strategy begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategies.conformance import write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the data of all scenarios."""
    folder = tmp_path_factory.mktemp("conformance")
    write_inputs(folder)
    return folder
