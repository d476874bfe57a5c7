"""Groups of ranks that talk over their hosts' network, without waiting for what devices have been asked to do."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class HostGroups:
    """The same ranks as in groups for devices, on gloo: counts and small objects go from host to host.

    A collective of NCCL whose result the host reads waits for all kernels before it, and launches none meanwhile.

    Args:
        timeout: Longest wait for the other hosts, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The ranks of a group, None being the world. Collective among them when it is first asked for."""
        if dist.get_backend(group) == "gloo":
            return group
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(
                list(ranks), timeout=self._timeout, backend="gloo", use_local_synchronization=True
            )
        return self._groups[ranks]

    def close(self) -> None:
        """Give them back; they are made again when they are asked for."""
        while self._groups:
            dist.destroy_process_group(self._groups.popitem()[1])
