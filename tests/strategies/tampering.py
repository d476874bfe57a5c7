"""What happens to checkpoints: bytes that change, and files that somebody replaces to run a command."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from verl_lightning.models.digests import crcs_of
from verl_lightning.strategies.sealed_files import load_file
from verl_lightning.strategies.sharded_io import write_settings


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


def flip(path: Path, position: int) -> None:
    """Change one bit of one byte; a negative position counts from the end."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def flips(path: Path, count: int = 16) -> Iterator[int]:
    """Positions all over a file, and each of its last ones."""
    size = path.stat().st_size
    yield from {*range(0, size, max(1, size // count)), *range(size - min(12, size), size), 1, 30}


def replace_metadata(folder: Path, settings: str, content: bytes) -> None:
    """Put another table of contents into a folder, and have its digest fit."""
    (folder / ".metadata").write_bytes(content)
    write_settings(folder / settings, saved(load_file(folder / settings, checks=False)))


def replace_entry(folder: Path, settings: str, key: str, content: bytes, name: str = "__9_0.distcp") -> None:
    """Put another file into a folder, say that it holds an entry, and have all digests fit."""
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / name).write_bytes(content)
    (index,) = (index for index in metadata.storage_data if index.fqn == key)
    metadata.storage_data[index] = _StorageInfo(name, 0, len(content))
    metadata.storage_data[index].crc32 = crcs_of(content)
    replace_metadata(folder, settings, pickle.dumps(metadata))


def saved(value: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def attr_chain(proof: Path) -> bytes:
    """A pickle that reaches `os.system` by `getattr` alone, from a module that tables of contents name."""
    command = f"touch {proof}".encode()
    module = b"ctorch.distributed.checkpoint.metadata\nos\n"
    return b"cbuiltins\ngetattr\n(" + module + b"S'system'\ntR(S'" + command + b"'\ntR."


def dotted(proof: Path) -> bytes:
    """A pickle that names `os.system` by way of an allowed module."""
    return (
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93"
        + b"("
        + b"X"
        + len(f"touch {proof}").to_bytes(4, "little")
        + f"touch {proof}".encode()
        + b"tR."
    )


def changed_class(proof: Path) -> bytes:
    """A pickle that gives an allowed class another method."""
    del proof
    metadata = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return metadata + b"(N}S'__setstate__'\nctorch\nSize\nstb."


METADATA_ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "reduce": lambda proof: pickle.dumps(Command(proof)),
    "within": lambda proof: pickle.dumps(Metadata(state_dict_metadata={"a": Command(proof)})),  # type: ignore[dict-item]
    "getattr": attr_chain,
    "dotted": dotted,
    "changed_class": changed_class,
    "eval": lambda proof: f'cbuiltins\neval\n(S\'__import__("os").system("touch {proof}")\'\ntR.'.encode(),
    "nothing": lambda _: b"",
    "another type": lambda _: pickle.dumps([1, 2]),
}
"""Tables of contents that are none."""

ENTRY_ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "reduce": lambda proof: saved(Command(proof)),
    "within": lambda proof: saved([1.0, {"lr": Command(proof)}]),
    "old format": lambda proof: pickle.dumps(Command(proof)),
    "mesh": lambda _: saved(_mesh()),
    "behind a decoy": lambda _: with_decoy("archive/a_data.pkl"),
    "behind a decoy in a folder": lambda _: with_decoy("archive/a/data.pkl"),
    "behind a decoy in capitals": lambda _: with_decoy("archive/DATA.PKL"),
    "nothing": lambda _: b"",
}
"""Entries that are no plain values."""


def with_decoy(name: str) -> bytes:
    """An archive in whose pickle torch would find a `DeviceMesh`, behind a harmless one."""
    harmless, other = (zipfile.ZipFile(io.BytesIO(saved(value))) for value in (1.0, _mesh()))
    joined = io.BytesIO()
    with zipfile.ZipFile(joined, "w") as archive:
        archive.writestr(name, harmless.read("archive/data.pkl"))
        for member in other.namelist():
            archive.writestr(member, other.read(member))
    return joined.getvalue()


def _mesh() -> Any:
    """An object of a class that torch lets any file hold, and that starts process groups."""
    mesh = torch.distributed.device_mesh.DeviceMesh.__new__(torch.distributed.device_mesh.DeviceMesh)
    mesh.__dict__ |= {"_device_type": "cpu"}
    return mesh
