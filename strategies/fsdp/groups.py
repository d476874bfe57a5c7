"""Groups of ranks that share a model's weights, that share a sequence, and that see different data."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from verl_lightning.models.attention import UNTESTED, VARLEN, packing_obstacle
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.strategies.base import DataParallelMixin


class FSDPGroups(DataParallelMixin):
    """Ranks in the order replica, data, sequence: those of one sequence lie side by side, and within one replica.

    Weights are sharded over all ranks of a replica, whether they see different data or parts of the same sequences.
    """

    replicate_size: int
    sequence_parallel_size: int
    root_device: torch.device
    _shard_mesh: DeviceMesh | None = None
    _data_mesh: DeviceMesh | None = None

    def check_world(self, world: int) -> None:
        """Refuse sizes that don't fit the number of processes.

        Raises:
            MisconfigurationException: With the keys to change.
        """
        copies, share = self.replicate_size, self.sequence_parallel_size
        if world % copies:
            raise MisconfigurationException(
                f"`fsdp.replicate_size` ({copies}) must divide the number of processes ({world})."
            )
        if world // copies % share:
            raise MisconfigurationException(
                f"`fsdp.sequence_parallel_size` ({share}) must divide the processes of a copy of the model"
                f" ({world // copies}: `trainer.devices` * `trainer.num_nodes` / `fsdp.replicate_size`)."
            )

    def start_groups(self, world: int) -> None:
        """Make the meshes. Collective."""
        kind, copies, share = self.root_device.type, self.replicate_size, self.sequence_parallel_size
        if copies == 1:
            self._shard_mesh = init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
        else:
            self._shard_mesh = init_device_mesh(kind, (copies, world // copies), mesh_dim_names=("replicate", "shard"))
        if share > 1:
            self._data_mesh = init_device_mesh(kind, (world // share, share), mesh_dim_names=("data", "sequence"))

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh with one axis to shard over; with copies of the model, with two: replicate, then shard."""
        assert self._shard_mesh is not None
        return self._shard_mesh

    @property
    @override
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return None if self._data_mesh is None else self._data_mesh.get_group("data")

    @property
    @override
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        return None if self._data_mesh is None else self._data_mesh.get_group("sequence")


def packed_attention(config: ModelConfig) -> ModelConfig:
    """Return a model's options, with the attention that can share sequences among ranks.

    Raises:
        MisconfigurationException: If another one is asked for.
    """
    if config.attn_implementation not in ("auto", VARLEN):
        raise MisconfigurationException(
            f"`fsdp.sequence_parallel_size` shares sequences among ranks through `attn_implementation: {VARLEN}`, but"
            f" the model's is {config.attn_implementation}. Set it to `auto` or `{VARLEN}`."
        )
    if config.packing == "never":
        raise MisconfigurationException(
            "`fsdp.sequence_parallel_size` shares packed sequences among ranks, but the model has `packing: never`."
            " Set it to `auto` or `always`, or `fsdp.sequence_parallel_size` to 1."
        )
    return replace(config, attn_implementation=VARLEN)


def check_shares(model: TokenScorer, size: int) -> None:
    """Refuse a model whose sequences cannot be shared among ranks.

    Args:
        model: Model with the options of `packed_attention`.
        size: Ranks that share a sequence.

    Raises:
        MisconfigurationException: If it cannot be packed, or its heads don't divide.
    """
    backbone, name = model.backbone, type(model.backbone).__name__
    if not model.packs:
        obstacle = packing_obstacle(backbone) or UNTESTED
        raise MisconfigurationException(
            f"`fsdp.sequence_parallel_size` ({size}) shares packed sequences among ranks, but `{name}` is not packed:"
            f" {obstacle}."
        )
    config = backbone.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or max(size, key_heads) % min(size, key_heads):
        raise MisconfigurationException(
            f"`fsdp.sequence_parallel_size` ({size}) must divide the attention heads of `{name}` ({heads}), and divide"
            f" or be a multiple of its key heads ({key_heads}). Choose another size."
        )
