"""Groups of ranks that talk over their hosts' network, without waiting for what devices have been asked to do."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

_Made = dict[tuple[timedelta, tuple[int, ...]], dist.ProcessGroup]

_MADE: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()
"""All such groups of this process, by the world they belong to. They live as long as it does: torch names a group that
only its members make by its ranks, and one of the same name would read the addresses that a closed one left behind."""


class HostGroups:
    """The same ranks as in groups for devices, on gloo: counts and small objects go from host to host.

    A collective of NCCL whose result the host reads waits for all kernels before it, and launches none meanwhile.

    Args:
        timeout: Longest wait for the other hosts, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)

    def of(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The ranks of a group, None being the world. Collective among them when a process first asks for them."""
        if dist.get_backend(group) == "gloo":
            return group
        assert dist.group.WORLD is not None
        made = _MADE.setdefault(dist.group.WORLD, {})
        ranks = tuple(dist.get_process_group_ranks(group))
        if (self._timeout, ranks) not in made:
            made[self._timeout, ranks] = dist.new_group(
                list(ranks), timeout=self._timeout, backend="gloo", use_local_synchronization=True
            )
        return made[self._timeout, ranks]
