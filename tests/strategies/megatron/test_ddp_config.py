"""The one place that makes Megatron's settings of data parallelism."""

from __future__ import annotations

import pytest

from verl_lightning.strategies.megatron.config import DataParallelConfig
from verl_lightning.strategies.megatron.ddp_config import make_ddp_config
from verl_lightning.strategies.megatron.runtime import import_megatron

pytestmark = pytest.mark.backend

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture(autouse=True)
def imported() -> None:
    import_megatron()


def test_options_and_overrides_reach_megatrons_config():
    options = DataParallelConfig(**OVERLAP, bucket_size=99, overrides={"pad_buckets_for_high_nccl_busbw": True})

    config = make_ddp_config(options, use_distributed_optimizer=True)

    names = (*OVERLAP, "use_distributed_optimizer", "grad_reduce_in_fp32", "pad_buckets_for_high_nccl_busbw")
    assert all(getattr(config, name) is True for name in names)
    assert config.bucket_size == 99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": {"bucket": 1}}, "has no `bucket`"),
        ({"overrides": {"grad_reduce_in_fp32": False}}, "but `megatron.ddp.grad_reduce_in_fp32` is True. Set that"),
        ({"overrides": {"use_distributed_optimizer": True}}, "but `megatron.use_distributed_optimizer` is False"),
        ({"overrides": {"average_in_collective": True}}, "can't set `average_in_collective: True`: gradients are sum"),
        (OVERLAP, "`megatron.ddp.overlap_param_gather` needs `megatron.use_distributed_optimizer` and"),
    ],
)
def test_settings_that_contradict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_ddp_config(DataParallelConfig(**options), use_distributed_optimizer=False)
