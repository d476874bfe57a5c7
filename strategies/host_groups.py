"""Groups of ranks that talk over their hosts' network, without waiting for what devices have been asked to do."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

Ranks = tuple[int, ...]

_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[float, Ranks], dist.ProcessGroup]] = WeakKeyDictionary()
"""All such groups of this process, by the world they belong to. They live as long as it does."""


def in_seconds(timeout: float | timedelta) -> float:
    """A time of waiting, which Lightning's own strategies take as a `timedelta` alone."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def host_group(group: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup | None:
    """The same ranks as in a group for devices, on gloo: counts and small objects go from host to host.

    A collective of NCCL whose result the host reads waits for all kernels before it, and launches none meanwhile.
    Collective among all ranks of the world when they first ask, each for the group of its kind that it is in.

    Args:
        group: The ranks; None is the world. One on gloo is returned as it is.
        timeout: Longest wait for the other hosts, in seconds.
    """
    if dist.get_backend(group) == "gloo":
        return group
    assert dist.group.WORLD is not None
    made = _MADE.setdefault(dist.group.WORLD, {})
    ranks = tuple(dist.get_process_group_ranks(group))
    if (timeout, ranks) not in made:
        made[timeout, ranks] = _make(ranks, timeout)
    return made[timeout, ranks]


def _make(ranks: Ranks, timeout: float) -> dist.ProcessGroup:
    """This rank's group, made with those of all others.

    Every rank makes every group: torch names one that only its members make by how many groups each of them is in,
    and stages of a pipeline differ in that.
    """
    wanted = [ranks]
    if len(ranks) < dist.get_world_size():
        everyone: list[Ranks] = [()] * dist.get_world_size()
        dist.all_gather_object(everyone, ranks, group=host_group(None, timeout))
        wanted = sorted(set(everyone))
    limit = timedelta(seconds=timeout)
    made: dict[Ranks, dist.ProcessGroup] = {
        each: dist.new_group(list(each), timeout=limit, backend="gloo") for each in wanted
    }
    return made[ranks]
