"""Keeps each process on the processor that its GPU hangs on."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

SYSFS = Path("/sys")

log = logging.getLogger(__name__)


class NumaAffinity(Callback):
    """Pins each process and its threads to the cores of its GPU's NUMA node, so that copies take the short way.

    The GPU is the strategy's, chosen by its local rank. Cores that the process may not use stay out. Where there is
    nothing to gain (one node, no GPU, an unknown topology, not Linux) it changes nothing and says so.
    """

    def __init__(self) -> None:
        self._before: set[int] | None = None  # cores that the process could use; None if it was not pinned

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        if not hasattr(os, "sched_setaffinity"):
            rank_zero_info("`NumaAffinity` does nothing: this system can't pin processes.")
        elif len(numa_nodes(SYSFS)) < 2:
            rank_zero_info("`NumaAffinity` does nothing: this machine has one NUMA node.")
        elif device.type != "cuda":
            rank_zero_info("`NumaAffinity` does nothing: training uses no GPU.")
        else:
            self._pin(pci_address(device), trainer.local_rank)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._before is not None:
            set_affinity(self._before)
            self._before = None

    def _pin(self, address: str, local_rank: int) -> None:
        allowed = os.sched_getaffinity(0)
        node = node_of(address, SYSFS)
        cores = numa_nodes(SYSFS).get(node, set()) & allowed
        if not cores:
            log.info(f"`NumaAffinity` does nothing for local rank {local_rank}: node {node} has no core for it.")
            return
        set_affinity(cores)
        self._before = self._before or allowed
        log.info(
            f"`NumaAffinity`: local rank {local_rank} runs on the {len(cores)} cores of NUMA node {node} ({address})."
        )


def numa_nodes(sysfs: Path) -> dict[int, set[int]]:
    """Cores of each NUMA node of the machine, by the node's number; empty if the system does not tell.

    Args:
        sysfs: Folder in which Linux shows its devices.
    """
    folders = (sysfs / "devices/system/node").glob("node[0-9]*")
    nodes = {int(folder.name[4:]): parse_cores((folder / "cpulist").read_text()) for folder in folders}
    return {node: cores for node, cores in nodes.items() if cores}  # some have memory only


def node_of(address: str, sysfs: Path) -> int:
    """NUMA node of a PCI device; -1 if the system does not know.

    Args:
        address: PCI address, as in ``0000:3b:00.0``.
        sysfs: Folder in which Linux shows its devices.
    """
    file = sysfs / "bus/pci/devices" / address / "numa_node"
    return int(file.read_text()) if file.exists() else -1


def parse_cores(text: str) -> set[int]:
    """The numbers that a list such as ``0-3,8`` names."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def pci_address(device: torch.device) -> str:
    """Returns the PCI address of a GPU, as Linux writes it."""
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave these numbers out
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def set_affinity(cores: set[int]) -> None:
    """Let this process and all its threads run on these cores only; threads to come inherit it."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # it has ended meanwhile
            continue
