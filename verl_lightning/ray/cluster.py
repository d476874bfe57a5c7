"""A Ray cluster as a run sees it: how to join it, and whether it can hold what is asked."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_lightning.compat.ray import use_loopback
from verl_lightning.faults import RunError
from verl_lightning.ray import local

_ADVICE = "Ask for fewer or smaller ones, or add nodes."
_BUSY_SECONDS = 5.0  # what a dead group held is free again after about one


class PlacementError(RunError):
    """The cluster can't hold what was asked."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Equal bundles of resources, each of which must fit into one node."""

    option: str
    """Option by which the user asked for the bundles, such as ``--num-workers``."""

    count: int
    """Number of bundles."""

    cpus: float
    """CPUs of each, as Ray counts them."""

    gpus: float = 0.0
    """GPUs of each."""

    @property
    def bundle(self) -> dict[str, float]:
        """One bundle under Ray's names."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount > 0}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine of the cluster."""

    address: str
    """Address of the machine, as Ray shows it."""

    resources: Mapping[str, float]
    """All that it has, in use or not, under Ray's names."""

    def room(self, demand: Demand) -> int:
        """Counts the bundles of a demand that the node can hold when nothing else is on it."""
        return min(
            (math.floor(self.resources.get(name, 0.0) / amount + 1e-6) for name, amount in demand.bundle.items()),
            default=demand.count,
        )


def is_alone(address: str | None) -> bool:
    """Tells whether `connect` will start a cluster of this machine alone."""
    wanted = address or os.environ.get("RAY_ADDRESS")
    return wanted == "local" or (not wanted and local.running_address() is None)


def connect(address: str | None = None) -> None:
    """Joins a cluster, unless this process has joined one.

    Args:
        address: Address of the head node, or ``auto`` for a cluster that runs on this machine; None takes
            ``RAY_ADDRESS``, else a cluster that runs here, or else starts one of this machine alone.

    Raises:
        ConnectionError: If no cluster answers there.
    """
    import ray

    if ray.is_initialized():
        return
    wanted = address or os.environ.get("RAY_ADDRESS")
    if wanted and wanted not in ("auto", "local"):
        if reason := local.why_silent(wanted):
            raise ConnectionError(
                f"no Ray cluster answers at {wanted} ({reason}), where {'`--address`' if address else '`RAY_ADDRESS`'}"
                " looks for one. Look at `ray status` on its head node; left out, a cluster of this machine is started."
            )
        local.join(wanted)
    elif is_alone(address):
        local.start()
    elif wanted == "auto" and local.running_address("auto") is None:
        raise ConnectionError("no Ray cluster runs here. Start one by `ray start --head`, or leave `auto` out.")
    else:
        local.join(wanted or None)


def connect_like(address: str) -> None:
    """Joins the cluster that another process of the run has joined or started, maybe on another node.

    Args:
        address: Address of that cluster, as Ray shows it.

    Raises:
        ConnectionError: If this node is not in that cluster.
    """
    import ray

    if not ray.is_initialized():
        # Not by its address, with which Ray 2.60 would not show its token to a cluster that asks for one.
        if address.startswith(("127.", "[::1]")):
            use_loopback()
        with contextlib.suppress(ConnectionError):
            local.join("auto")
    found = ray.get_runtime_context().gcs_address if ray.is_initialized() else "no place"
    if found != address:
        raise ConnectionError(
            f"Ray's cluster on this machine is at {found}, but the run's first process is in the one at {address}."
            " Join all machines by `ray start`, or start the run by `verl-fit ray`."
        )


def nodes() -> list[Node]:
    """The living nodes of the cluster."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [Node(address=node["NodeManagerAddress"], resources=node["Resources"]) for node in alive]


def require(*demands: Demand, wait: float = 0.0, patience: float = _BUSY_SECONDS) -> None:
    """Makes sure that the cluster can hold some demands now, so that nothing ever waits in a queue without end.

    Args:
        demands: The bundles, all at the same time.
        wait: Seconds to wait for nodes that are still to come, and for others to free what they hold.
        patience: Seconds to wait for the latter at least.

    Raises:
        PlacementError: With the arithmetic, if the cluster is too small or too busy.
    """
    deadline = time.monotonic() + wait
    while (complaint := shortage(demands, nodes())) and time.monotonic() < deadline:
        time.sleep(min(1.0, wait))
    if complaint:
        raise PlacementError(complaint)
    if not _fit_now(demands, max(patience, deadline - time.monotonic())):
        raise PlacementError(_busy_message(demands))


def shortage(demands: Sequence[Demand], cluster: Sequence[Node]) -> str | None:
    """Says why a cluster could never hold some demands, with the arithmetic; None if it seems that it could.

    Args:
        demands: The bundles; no bundle is split over nodes.
        cluster: The nodes.
    """
    has = {name: sum(node.resources.get(name, 0.0) for node in cluster) for name in ("CPU", "GPU")}
    for demand in demands:
        rooms = [node.room(demand) for node in cluster]
        if sum(rooms) < demand.count:
            shares = ", ".join(f"{room} on {node.address}" for node, room in zip(cluster, rooms, strict=True))
            return (
                f"`{demand.option} {demand.count}` needs {_amounts(demand.bundle, times=demand.count)}"
                f" ({demand.count} x {_amounts(demand.bundle)}, each on one node), but the cluster has"
                f" {_amounts(has)}, which hold {sum(rooms)} ({shares}). {_ADVICE}"
            )
    needed = total(demands)
    if all(amount <= has[name] + 1e-6 for name, amount in needed.items()):
        return None
    return f"{_sum(demands)} need {_amounts(needed)} in all, but the cluster has {_amounts(has)}. {_ADVICE}"


def total(demands: Sequence[Demand]) -> dict[str, float]:
    """Sums the resources that some demands need together, under Ray's names."""
    names = dict.fromkeys(name for demand in demands for name in demand.bundle)
    return {name: sum(demand.bundle.get(name, 0.0) * demand.count for demand in demands) for name in names}


def _fit_now(demands: Sequence[Demand], seconds: float) -> bool:
    from ray.util import placement_group, remove_placement_group

    bundles = [demand.bundle for demand in demands if demand.bundle for _ in range(demand.count)]
    if not bundles:
        return True
    group = placement_group(bundles, strategy="PACK")
    try:
        return bool(group.wait(seconds))
    finally:
        remove_placement_group(group)


def _busy_message(demands: Sequence[Demand]) -> str:
    import ray

    available = ray.available_resources()  # type: ignore[no-untyped-call]
    free = {name: available.get(name, 0.0) for name in ("CPU", "GPU")}
    return (
        f"{_sum(demands)} need {_amounts(total(demands))}. The cluster has them, but others use them, or nodes can't be"
        f" filled that way: free are {_amounts(free)}. Look at `ray status`, ask for less, or wait for more."
    )


def _sum(demands: Sequence[Demand]) -> str:
    return " and ".join(f"`{each.option} {each.count}` ({each.count} x {_amounts(each.bundle)})" for each in demands)


def _amounts(resources: Mapping[str, float], *, times: int = 1) -> str:
    return " and ".join(f"{amount * times:g} {name}s" for name, amount in resources.items()) or "nothing"
