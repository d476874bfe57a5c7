"""The one place where Megatron's settings of data parallelism are made."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from verl_lightning.strategies.megatron.config import DataParallelConfig

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig

OWN_OPTIONS = {
    "use_distributed_optimizer": "megatron.use_distributed_optimizer",
    "overlap_grad_reduce": "megatron.ddp.overlap_grad_reduce",
    "overlap_param_gather": "megatron.ddp.overlap_param_gather",
    "grad_reduce_in_fp32": "megatron.ddp.grad_reduce_in_fp32",
    "bucket_size": "megatron.ddp.bucket_size",
}
"""Fields that have an option of their own, and its name."""

FIXED = {
    "average_in_collective": (False, "gradients are summed, since losses are normalised already"),
    "use_megatron_fsdp": (False, "`fsdp` is a strategy of its own"),
    "use_custom_fsdp": (False, "`fsdp` is a strategy of its own"),
}
"""Fields that must keep a value, and why."""


def make_ddp_config(options: DataParallelConfig, *, use_distributed_optimizer: bool) -> DistributedDataParallelConfig:
    """Megatron's config: our settings, then the user's overrides.

    Args:
        options: Options of the user.
        use_distributed_optimizer: True reduce-scatters gradients and shards the optimizer, False all-reduces.

    Raises:
        ValueError: If an override is unknown or contradicts an option, or options contradict one another.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    settings: dict[str, Any] = {
        "use_distributed_optimizer": use_distributed_optimizer,
        "overlap_grad_reduce": options.overlap_grad_reduce,
        "overlap_param_gather": options.overlap_param_gather,
        "grad_reduce_in_fp32": options.grad_reduce_in_fp32,
        "bucket_size": options.bucket_size,
    }
    _check_overrides(options.overrides, settings, {field.name for field in fields(DistributedDataParallelConfig)})
    if options.overlap_param_gather and not (use_distributed_optimizer and options.overlap_grad_reduce):
        raise ValueError(
            "`megatron.ddp.overlap_param_gather` needs `megatron.use_distributed_optimizer` and"
            " `megatron.ddp.overlap_grad_reduce`: only sharded weights are gathered. Set both, or drop it."
        )
    return DistributedDataParallelConfig(**settings | options.overrides)


def _check_overrides(overrides: dict[str, Any], settings: dict[str, Any], known: set[str]) -> None:
    for name, value in overrides.items():
        if name not in known:
            raise ValueError(f"`megatron.ddp.overrides`: Megatron's DistributedDataParallelConfig has no `{name}`.")
        if name in OWN_OPTIONS and value != settings[name]:
            raise ValueError(
                f"`megatron.ddp.overrides` sets `{name}: {value}`, but `{OWN_OPTIONS[name]}` is {settings[name]}."
                " Set that option, and take the override out."
            )
        if name in FIXED and value != FIXED[name][0]:
            raise ValueError(f"`megatron.ddp.overrides` can't set `{name}: {value}`: {FIXED[name][1]}.")
