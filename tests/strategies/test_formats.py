"""A strategy's folders are checkpoints to everyone once their format is registered."""

from __future__ import annotations

import torch

from verl_lightning.strategies import checkpoints
from verl_lightning.strategies.checkpoints import FolderFormat, format_of, read_checkpoint, register_format
from verl_lightning.strategies.sealed_files import write_sealed


def read_whole(path, *, weights_only, with_optimizers=True):
    return torch.load(path / "settings.pt", weights_only=weights_only) | {"state_dict": {}, "all": with_optimizers}


def test_a_further_strategy_edits_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_FORMATS", [*checkpoints._FORMATS])
    ours = FolderFormat(settings_file="settings.pt", remains=("*.part",), read_whole=read_whole)
    register_format(ours)
    folder = tmp_path / "step.ckpt"
    folder.mkdir()
    write_sealed(folder / "settings.pt", lambda file: torch.save({"global_step": 3}, file))

    assert format_of(folder) is ours
    assert read_checkpoint(folder, with_optimizers=False) == {"global_step": 3, "state_dict": {}, "all": False}
    assert checkpoints.read_settings(folder) == {"global_step": 3}
    assert checkpoints.newest_whole(tmp_path / "other.ckpt") is None
