"""Options that were renamed or moved, as users still write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_lightning.cli import deprecation
from verl_lightning.cli.deprecation import OldKeyError, renamed_flags, renamed_settings


@pytest.fixture(autouse=True)
def nothing_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(deprecation, "_SHOWN", set())


@pytest.mark.parametrize(("old", "new"), [(True, "full"), (False, "none")])
def test_gradient_checkpointing_is_activation_checkpointing(old: bool, new: str) -> None:
    written: Any = {"model": {"init_args": {"critic": {"model": {"path": "m", "gradient_checkpointing": old}}}}}
    with pytest.warns(FutureWarning, match=r"Use `model.critic.model.activation_checkpointing`"):
        read = renamed_settings(written)
    assert read["model"]["init_args"]["critic"]["model"] == {"path": "m", "activation_checkpointing": new}
    with pytest.warns(FutureWarning, match=r"Use `model.actor.activation_checkpointing`"):
        flags = list(renamed_flags(["--model.actor.gradient_checkpointing", str(old).lower()]))
    assert flags == [f"--model.actor.activation_checkpointing={new}"]


def test_checkpoint_every_names_the_option_of_the_model(tmp_path: Path) -> None:
    said = "is an option of each model since version 0.1: set `model.actor.activation_checkpointing` to that number"
    with pytest.raises(OldKeyError, match=said):
        renamed_settings({"fsdp": {"checkpoint_every": 2}})
    with pytest.raises(OldKeyError, match=said):
        list(renamed_flags(["--fsdp.checkpoint_every", "2"]))
    with pytest.raises(OldKeyError, match=said):
        deprecation.renamed_text("fsdp: {checkpoint_every: 2}")
