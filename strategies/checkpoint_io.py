"""Writes checkpoint files that are whole or not there, and reads those of every strategy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from verl_lightning.models.digests import DamagedFileError
from verl_lightning.models.hf_folder import discard, replace
from verl_lightning.models.torch_files import UNREADABLE, reason_of
from verl_lightning.strategies.checkpoints import read_checkpoint
from verl_lightning.strategies.sealed_files import WAY_OUT, write_sealed


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the final place, flushes to the disk, then renames.

    Lightning's own writes into the system's temporary folder and moves the file from there, which across file systems
    is a copy that a kill can cut short. Remote paths are left to it.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = final.with_name(f".{final.name}.tmp")
        try:
            write_sealed(draft, lambda file: torch.save(checkpoint, cast(IO[bytes], file)))
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
        if "://" in str(path):
            try:
                return super().load_checkpoint(path, map_location, weights_only is not False)
            except OSError:
                raise
            except UNREADABLE as error:
                raise DamagedFileError(path, reason_of(error, WAY_OUT)) from error
        return read_checkpoint(Path(path), weights_only=weights_only, map_location=map_location)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
