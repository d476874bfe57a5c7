"""Megatron's folders run nothing, whoever reads them, and damage is told by the name of a file."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.megatron.tampering_checks import COMMON, harms
from tests.strategies.tampering import ENTRY_ATTACKS, METADATA_ATTACKS, flip, flips, replace_entry, replace_metadata
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.models.pretrained import ForeignCodeError
from verl_lightning.strategies.checkpoints import is_whole, read_checkpoint
from verl_lightning.strategies.megatron.mbridge import readable_config
from verl_lightning.strategies.megatron.portable import SETTINGS_FILE
from verl_lightning.strategies.megatron.provider import make_bridge
from verl_lightning.strategies.megatron.runtime import import_megatron
from verl_lightning.strategies.sealed_files import check_sealed
from verl_lightning.strategies.sharded_io import CheckedReader, failures_told
from verl_lightning.strategies.sharded_metadata import CRC_FIELD, read_metadata

pytestmark = pytest.mark.backend


@pytest.fixture
def checkpoint(folder: Path, tensor_parallel: Any, tmp_path: Path) -> Path:
    """A copy of what two ranks have written."""
    assert tensor_parallel["resume"]
    return Path(shutil.copytree(folder / "half" / "step=1.ckpt", tmp_path / "copy.ckpt"))


@pytest.mark.parametrize("name", harms(Path()))
def test_tampered_folders_run_nothing(folder: Path, tensor_parallel: Any, name: str) -> None:
    """Both ranks end alike, also where one of them alone reads what is damaged."""
    one, other = tensor_parallel["tampered"][name]
    assert one == other
    if name == "nothing":
        assert one == "loaded"
        return
    place = folder / "tampered"
    assert one.startswith(f"`{place}/bad.ckpt/{name}` ")
    assert one.endswith(f"The newest whole checkpoint beside it is `{place}/step=1.ckpt`: give that as `ckpt_path`.")
    assert not (folder / "proof").exists()


def test_each_item_has_a_crc(checkpoint: Path) -> None:
    places = read_metadata(checkpoint / ".metadata").storage_data.values()
    assert {place.relative_path for place in places} == {"__0_0.distcp", "__1_0.distcp"}
    assert all(getattr(place, CRC_FIELD) for place in places)
    assert check_sealed(checkpoint / SETTINGS_FILE).keys() == {".metadata", "metadata.json"}
    CheckedReader(checkpoint / SETTINGS_FILE).check()


@pytest.mark.parametrize("name", [SETTINGS_FILE, ".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"])
def test_a_flipped_byte_anywhere_is_refused(checkpoint: Path, name: str) -> None:
    content = (checkpoint / name).read_bytes()
    for position in flips(checkpoint / name):
        flip(checkpoint / name, position)
        assert not is_whole(checkpoint), position
        (checkpoint / name).write_bytes(content)
    flip(checkpoint / name, len(content) // 2)
    with pytest.raises(DamagedFileError, match=rf"^`{checkpoint / name}` is damaged"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("attack", METADATA_ATTACKS)
def test_other_strategies_run_no_table_of_contents(checkpoint: Path, tmp_path: Path, attack: str) -> None:
    replace_metadata(checkpoint, SETTINGS_FILE, METADATA_ATTACKS[attack](tmp_path / "proof"))
    with pytest.raises(DamagedFileError, match=rf"^`{checkpoint}/\.metadata` "):
        read_checkpoint(checkpoint)
    assert not (tmp_path / "proof").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("attack", ENTRY_ATTACKS)
def test_no_entry_runs(checkpoint: Path, tmp_path: Path, attack: str) -> None:
    """Other strategies read none of Megatron's; so the reader itself is asked."""
    replace_entry(checkpoint, SETTINGS_FILE, COMMON, ENTRY_ATTACKS[attack](tmp_path / "proof"))
    reader = CheckedReader(checkpoint / SETTINGS_FILE)
    with pytest.raises(DamagedFileError, match=rf"^`{checkpoint}/__9_0\.distcp` "), failures_told():
        torch.distributed.checkpoint.load({COMMON: 0}, storage_reader=reader, no_dist=True)
    assert not (tmp_path / "proof").exists()


@pytest.mark.filterwarnings("ignore")  # of Megatron's imports
def test_a_models_own_code_is_refused(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_megatron()
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}))
    (model / "own.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'proof')!r}).touch()\n")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    for read in (make_bridge, readable_config):
        with pytest.raises(ForeignCodeError, match=rf"^`path: {model}` holds code"):
            read(str(model))
    assert not (tmp_path / "proof").exists()
