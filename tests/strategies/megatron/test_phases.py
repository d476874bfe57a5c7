"""Phases under Megatron: models go from one to the next as folders, a reward model's too."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.phases.three_phases import whole_and_killed
from tests.processes import on_ranks
from tests.strategies.megatron.cpu import pretend_cuda


def under_megatron(folder: Path, model: Path, files: dict[str, Path]) -> Any:
    """Whole and killed, on one process."""
    warnings.simplefilter("default")  # Megatron warns of defaults of its own
    pretend_cuda()
    return whole_and_killed(folder, model, files, "megatron", 1)


@pytest.mark.backend
def test_a_run_killed_on_a_border_ends_like_the_whole_one(tmp_path, tiny_folder, chat_file, pair_file, prompt_file):
    files = {"chats": chat_file, "pairs": pair_file, "prompts": prompt_file}

    ((whole, killed),) = on_ranks(1, under_megatron, tmp_path, tiny_folder, files)

    assert len(whole) == 7
    assert killed == whole
