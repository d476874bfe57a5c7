"""One small Ray cluster of two nodes for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a cluster of two nodes with two CPUs each, as Ray counts them; both on this machine."""
    from ray.cluster_utils import Cluster

    store = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 200 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**store, "include_dashboard": False})
    cluster.add_node(**store)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()
