"""Writes checkpoint files that are whole or not there."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from typing_extensions import override

from verl_lightning.models.hf_folder import discard, replace


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the final place, flushes to the disk, then renames.

    Lightning's own writes into the system's temporary folder and moves the file from there, which across file systems
    is a copy that a kill can cut short. Remote paths are left to it.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or not _is_local_file_protocol(str(path)):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = final.with_name(f".{final.name}.tmp")
        try:
            write_durably(checkpoint, draft)
        except (OSError, RuntimeError) as error:
            draft.unlink(missing_ok=True)
            reason = error.__context__ if isinstance(error.__context__, OSError) else error  # torch buries it
            raise OSError(
                f"the checkpoint `{final}` could not be written ({reason}). The one before is whole."
            ) from error
        if final.is_dir() and not final.is_symlink():  # of another strategy, with which the run began
            replace(draft, final)
            discard(draft)
        else:
            draft.replace(final)
        sync_folder(final.parent)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        from verl_lightning.strategies.fsdp_checkpoint import is_sharded, read_whole
        from verl_lightning.strategies.megatron.portable import is_megatron_folder, read_portable

        if is_megatron_folder(Path(path)):
            return read_portable(Path(path), weights_only=weights_only)
        if is_sharded(Path(path)):  # written by `fsdp`
            return read_whole(Path(path), weights_only=weights_only)
        check_whole(path)
        return super().load_checkpoint(path, map_location, weights_only)


def write_durably(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint file and wait until it is on the disk."""
    with path.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def check_whole(path: str | Path) -> None:
    """Refuse a file that can't be a whole checkpoint, such as half a copy.

    Raises:
        ValueError: If it is not one; remote files, and those that are not there, are left to who reads them.
    """
    if Path(path).is_file() and not zipfile.is_zipfile(path):  # as `torch.save` writes; the directory is at the end
        raise ValueError(f"`{path}` is not a checkpoint, or not the whole of one. Give one that `fit` wrote.")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
