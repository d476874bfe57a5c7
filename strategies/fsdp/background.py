"""Writes sharded checkpoint folders while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.state_dict_saver import async_save

from verl_lightning.faults import RunError
from verl_lightning.models.hf_folder import atomic_folder, partial_folder, remove_folder
from verl_lightning.strategies.fsdp.checkpoint import SETTINGS_FILE, take_tensors
from verl_lightning.strategies.sharded_io import DigestingWriter, saved_bytes, write_settings


class BackgroundSaves:
    """One save at a time: copied to the host before `start` returns, then written, made durable, and given its name.

    What is to be deleted in its favour is deleted after that. A kill at any moment leaves what was there before.

    Args:
        group: All ranks, on a backend for the host, used for nothing else: threads meet on it.
        is_writer: Whether this rank moves finished folders to their place.
    """

    def __init__(self, group: dist.ProcessGroup, *, is_writer: bool) -> None:
        self._group = group
        self._is_writer = is_writer
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._outdated: list[Path] = []  # deleted once the running save is durable

    def start(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Begin to write a checkpoint folder, once the one before is durable. Collective.

        Args:
            checkpoint: Checkpoint as `save_sharded` takes it; may change once this returns.
            path: The folder.

        Raises:
            RunError: If the save before has failed; or the error with which it has.
        """
        self.wait()
        tensors, settings, stack = take_tensors(checkpoint), b"", ExitStack()
        if self._is_writer:
            settings = saved_bytes(checkpoint)
            stack.enter_context(atomic_folder(path))
        dist.barrier(group=self._group)  # the folder exists
        writer = DigestingWriter(partial_folder(path))
        written = cast("Future[Any]", async_save(tensors, storage_writer=writer, process_group=self._group))
        self._running = self._executor.submit(self._finish, written, settings, stack, path)

    def remove(self, path: Path) -> None:
        """Delete a checkpoint, once the running save is durable; never if it fails."""
        self._outdated.append(path)
        self.settle()

    def settle(self) -> None:
        """Tell of a save that has failed, and delete what a durable one makes needless; does not wait.

        Raises:
            RunError: If another rank's part of the save has failed; or the error with which this rank's has.
        """
        if self._running is not None:
            if not self._running.done():
                return
            running, self._running = self._running, None
            outdated, self._outdated = self._outdated, []  # a failed save makes nothing needless
            running.result()
            self._outdated = outdated
        while self._outdated:
            remove_checkpoint(self._outdated.pop(0), is_writer=self._is_writer)

    def wait(self) -> None:
        """`settle` once the running save is over."""
        if self._running is not None:
            self._running.exception()
        self.settle()

    def close(self) -> None:
        """`wait`, and end the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def _finish(self, written: Future[Any], settings: bytes, stack: ExitStack, path: Path) -> None:
        """Give the folder its name, in the thread, once all ranks have written, and tell all whether it has it."""
        is_whole = False
        try:
            with stack:
                written.result()
                if self._is_writer:
                    write_settings(partial_folder(path) / SETTINGS_FILE, settings)
            is_whole = True
        finally:
            told = [is_whole]
            dist.broadcast_object_list(told, src=0, group=self._group)
        if not told[0]:
            raise RunError(f"rank 0 could not complete the checkpoint `{path}`; its message says why.")


def remove_checkpoint(path: Path, *, is_writer: bool) -> None:
    """Delete a checkpoint's folder or file so that no moment shows half of it.

    Args:
        path: Path of the checkpoint.
        is_writer: Whether this rank does it.
    """
    if is_writer:
        remove_folder(path)


def check_links(callbacks: Sequence[Callback]) -> None:
    """Refuse links to checkpoints that are not there yet.

    Raises:
        MisconfigurationException: With what to set.
    """
    if any(isinstance(callback, ModelCheckpoint) and callback.save_last == "link" for callback in callbacks):
        raise MisconfigurationException(
            "`ModelCheckpoint(save_last='link')` links to a checkpoint that `fsdp.async_save` is still writing. Set"
            " `save_last: true`, or `fsdp.async_save: false`."
        )
