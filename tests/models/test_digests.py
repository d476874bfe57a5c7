"""Hugging Face folders of ours are read as they were written, or refused by the name of a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.runs import make_model_config
from tests.strategies.tampering import flip, flips
from verl_lightning.models import digests
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import LoraConfig, ModelConfig
from verl_lightning.models.digests import (
    DIGESTS_FILE,
    DamagedFileError,
    Digest,
    DigestedFile,
    check_file,
    check_folder,
    crcs_of,
    digest_of,
    write_digests,
)
from verl_lightning.models.lora import adapter_weights, write_adapter
from verl_lightning.models.streaming import stream_scorer
from verl_lightning.models.tokenizer import load_tokenizer


@pytest.fixture
def ours(tiny_folder: Path, tmp_path: Path) -> Path:
    """A folder as `HFCheckpoint` leaves it."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "ours"))
    write_digests(folder)
    return folder


def test_a_flipped_byte_anywhere_is_refused(ours: Path) -> None:
    check_all(ours)
    for path in sorted(ours.iterdir()):
        content = path.read_bytes()
        for position in flips(path):
            flip(path, position)
            with pytest.raises(DamagedFileError):
                check_all(ours)
            path.write_bytes(content)
    check_all(ours)


def check_all(folder: Path) -> None:
    """Compare the small files, then all."""
    check_folder(folder)
    check_folder(folder, [path.name for path in folder.iterdir()])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", DIGESTS_FILE])
def test_the_error_names_the_file_and_the_way_out(ours: Path, name: str) -> None:
    flip(ours / name, -20)
    with pytest.raises(DamagedFileError, match=rf"^`{ours / name}` is damaged: [^\n]*\.$") as error:
        build_scorer(make_model_config(ours), "policy", trainable=True)
    assert ("If it was changed on purpose, delete" in str(error.value)) == (name != DIGESTS_FILE)


@pytest.mark.parametrize("harm", ["missing", "truncated"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_missing_and_truncated_files_are_named(ours: Path, name: str, harm: str) -> None:
    if harm == "missing":
        (ours / name).unlink()
    else:
        (ours / name).write_bytes((ours / name).read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=rf"^`{ours / name}` is (missing|damaged)"):
        list(stream_scorer(make_model_config(ours), "policy", trainable=True))


def test_adapters_are_compared_too(ours: Path, tiny_folder: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_folder), lora=LoraConfig(rank=2))
    backbone = build_scorer(config, "policy", trainable=True).backbone
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", backbone, adapter_weights(backbone), "")
    write_digests(tmp_path / "adapter")
    flip(tmp_path / "adapter" / "adapter_model.safetensors", -1)

    lora = LoraConfig(rank=2, adapter_path=str(tmp_path / "adapter"))
    with pytest.raises(DamagedFileError, match=r"adapter_model\.safetensors` is damaged"):
        build_scorer(ModelConfig(path=str(tiny_folder), lora=lora), "policy", trainable=True)


def test_a_folder_that_was_edited_on_purpose_is_read_without_its_digests(ours: Path) -> None:
    config = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(config))
    with pytest.raises(DamagedFileError, match=r"config\.json` is damaged"):
        load_tokenizer(ours)
    (ours / DIGESTS_FILE).unlink()
    assert load_tokenizer(ours).chat_template


def test_blocks_are_counted_alike_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When written, when read again, and in memory."""
    monkeypatch.setattr(digests, "BLOCK_BYTES", 10)
    monkeypatch.setattr(digests, "PIECE_BYTES", 4)
    content = bytes(range(95))
    with (tmp_path / "file").open("wb") as raw:
        file = DigestedFile(raw)
        for start in range(0, 95, 7):
            file.write(content[start : start + 7])

    assert file.digest == digest_of(tmp_path / "file") == Digest(95, crcs_of(content))
    assert len(file.digest.crcs) == 10
    zeroed = digest_of(tmp_path / "file", num_blank=6)
    assert zeroed == Digest(95, crcs_of(content[:89] + bytes(6)))
    check_file(tmp_path / "file", Digest.from_json(json.loads(json.dumps(file.digest.to_json()))))
