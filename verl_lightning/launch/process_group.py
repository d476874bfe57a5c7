"""Process group of Ray's workers, made on the loopback interface if all are on one machine."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from verl_lightning.processes.loopback import free_port


def torch_config(backend: str) -> Any:
    """Makes the `TorchConfig` with which a `TorchTrainer` lets workers of one node meet on the loopback interface.

    Args:
        backend: ``nccl`` or ``gloo``.
    """
    import ray
    from ray.train.torch import TorchConfig

    usual: type = TorchConfig().backend_cls

    class Group(usual):  # type: ignore[misc]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            if len(set(worker_group.execute(node_id))) > 1:
                super().on_start(worker_group, backend_config)
                return
            port, count = worker_group.execute_single(0, free_port), len(worker_group)
            arguments = {"backend": backend, "world_size": count, "port": port, "seconds": backend_config.timeout_s}
            ray.get(
                [worker_group.execute_single_async(rank, meet, world_rank=rank, **arguments) for rank in range(count)]
            )

    class Config(TorchConfig):
        @property
        def backend_cls(self) -> type:
            return Group

    return Config(backend=backend)


def node_id() -> str:
    """Returns the id of this worker's node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def meet(*, backend: str, world_rank: int, world_size: int, port: int, seconds: float) -> None:
    """Joins the group, in a worker. Collective."""
    import ray

    from verl_lightning.strategies.process_group import meet_on_loopback

    device = ray.train.torch.get_device()
    timeout = timedelta(seconds=seconds)
    meet_on_loopback(backend, rank=world_rank, world_size=world_size, port=port, timeout=timeout, device=device)
