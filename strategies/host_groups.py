"""Groups of ranks that talk over their hosts' network, without waiting for what devices have been asked to do."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

_Made = dict[tuple[timedelta, tuple[int, ...]], dist.ProcessGroup]

_MADE: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()
"""All such groups of this process, by the world they belong to. They live as long as it does: torch names a group that
only its members make by its ranks, and one of the same name would read the addresses that a closed one left behind."""


def host_group(group: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup | None:
    """The same ranks as in a group for devices, on gloo: counts and small objects go from host to host.

    A collective of NCCL whose result the host reads waits for all kernels before it, and launches none meanwhile.
    Collective among the ranks when a process first asks for them.

    Args:
        group: The ranks; None is the world. One on gloo is returned as it is.
        timeout: Longest wait for the other hosts, in seconds.
    """
    if dist.get_backend(group) == "gloo":
        return group
    assert dist.group.WORLD is not None
    made = _MADE.setdefault(dist.group.WORLD, {})
    ranks, limit = tuple(dist.get_process_group_ranks(group)), timedelta(seconds=timeout)
    if (limit, ranks) not in made:
        made[limit, ranks] = dist.new_group(list(ranks), timeout=limit, backend="gloo", use_local_synchronization=True)
    return made[limit, ranks]
