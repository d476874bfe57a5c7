"""Private names of ray>=2.60,<2.61."""

from __future__ import annotations

import os
from collections.abc import Callable


def address_on_this_machine(wanted: str | None) -> str | None:
    """Address of the head of the cluster that Ray would join here; None if it would start one.

    Args:
        wanted: ``auto`` for any that runs; None for ``RAY_ADDRESS``, or the newest that was started by ``ray start``.

    Raises:
        ConnectionError: If ``auto`` finds none.
    """
    from ray._private import services

    find: Callable[[str | None], str | None] = services.canonicalize_bootstrap_address  # type: ignore[assignment]
    return find(wanted)


def use_loopback() -> None:
    """Has Ray's processes, which this one starts or joins, listen on the loopback interface alone, as on Macs.

    Else Ray listens on all interfaces, whatever address a node is given.
    """
    from ray._private import ray_constants

    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False  # read from that when Ray was imported
