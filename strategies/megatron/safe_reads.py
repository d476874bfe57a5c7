"""Reads Megatron's checkpoint folders through our reader, in which nothing can run and each item has its CRC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl_lightning.compat.megatron import reading_by
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.models.pretrained import check_weights
from verl_lightning.strategies.sharded_io import CheckedReader, failures_told


def load_parts(states: Any, reader: CheckedReader) -> dict[str, Any]:
    """This rank's part of a folder. Collective.

    Args:
        states: Megatron's sharded tensors, which say what is wanted.
        reader: Reader of the folder.

    Raises:
        DamagedFileError: On every rank, if a file that any of them reads is not as it was written.
    """
    from megatron.core import dist_checkpointing

    loaded: dict[str, Any] = {}
    problem = None
    try:
        check_only_ours(reader.folder)
        with reading_by(reader), failures_told():
            loaded = dist_checkpointing.load(states, str(reader.folder))
    except DamagedFileError as error:
        problem = error
    raise_together(problem)
    return loaded


def check_weights_once(path: str) -> None:
    """Compare a model's files with what was written, on the first rank for all. Collective.

    Raises:
        DamagedFileError: On every rank, if one differs.
    """
    problem = None
    if dist.get_rank() == 0:
        try:
            check_weights(path)
        except DamagedFileError as error:
            problem = error
    raise_together(problem)


def raise_together(problem: DamagedFileError | None) -> None:
    """Make one rank's problem everybody's, lest the others wait for it. Collective.

    Raises:
        DamagedFileError: If any rank has one.
    """
    problems: list[DamagedFileError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for each in problems:
        if each is not None:
            raise DamagedFileError(each.path, each.what) from problem


def check_only_ours(folder: Path) -> None:
    """See that a folder has no file that Megatron-Core reads, and this package does not write.

    Raises:
        DamagedFileError: If there is one.
    """
    if (common := folder / "common.pt").exists():
        raise DamagedFileError(common, "is no part of a checkpoint that `megatron` writes. Delete it.")
