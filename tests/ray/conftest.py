"""One small Ray cluster of two nodes for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ray.warm_workers import warm_workers

SIZE = {"num_cpus": 5, "num_gpus": 0, "object_store_memory": 200 * 2**20}
"""Of a node."""


@pytest.fixture(scope="session")
def cluster_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a cluster of two nodes with five CPUs each, as Ray counts them; both on this machine."""
    with warm_workers(str(tmp_path_factory.mktemp("ray"))) as options:
        cluster = start_cluster(**options)
        yield cluster.address
        cluster.shutdown()


@pytest.fixture(scope="module")
def joined_cluster(cluster_address: str) -> Iterator[None]:
    """This process is a driver of the cluster."""
    import ray

    ray.init(address=cluster_address, log_to_driver=False)
    yield
    ray.shutdown()


def start_cluster(attempts: int = 3, *, head_cpus: int = 5, **options: str) -> Any:
    """Starts it, again if the machine is so busy that Ray's own 30 seconds do not do."""
    from ray.cluster_utils import Cluster

    # Ray's own processes get little of a busy machine, since it starts them with the niceness 15; and when others have
    # filled the machine's memory, Ray kills workers.
    system = {"worker_niceness": 0, "memory_monitor_refresh_ms": 0}
    head = {"include_dashboard": False, "_system_config": system}
    cluster = Cluster()
    try:
        cluster.add_node(**SIZE | {"num_cpus": head_cpus}, **head, **options)
        cluster.add_node(**SIZE, **options, node_ip_address="127.0.0.2")  # else Ray Train takes both for one
        cluster.wait_for_nodes()
    except Exception:
        cluster.shutdown()
        if attempts == 1:
            raise
        return start_cluster(attempts - 1, head_cpus=head_cpus, **options)
    return cluster
