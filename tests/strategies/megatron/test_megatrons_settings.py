"""What Megatron is told: of data parallelism, and of experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verl_lightning.models.config import ModelConfig
from verl_lightning.strategies.megatron.config import DataParallelConfig, ParallelSizes, TransformerOptions
from verl_lightning.strategies.megatron.ddp_config import make_ddp_config
from verl_lightning.strategies.megatron.provider import ModelSettings, checked_overrides, provider_fields
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


def test_nothing_balances_experts_beside_the_loss():
    """As transformers trains them. Megatron would move the biases of DeepSeek-V3's experts by .001 a step."""
    settings = ModelSettings(
        sizes=ParallelSizes(),
        sequence_parallel=False,
        transformer=TransformerOptions(use_transformer_engine=False),
        is_bf16=False,
        device=torch.device("cpu"),
    )
    fields = provider_fields(ModelConfig(path="m"), settings, SimpleNamespace(num_moe_experts=8, num_layers=2))

    assert fields["moe_router_bias_update_rate"] == fields["moe_aux_loss_coeff"] == 0
    assert fields["moe_z_loss_coeff"] is None


@pytest.mark.parametrize("field", ["moe_aux_loss_coeff", "moe_z_loss_coeff"])
def test_losses_that_megatron_would_weigh_by_tokens_are_refused(field):
    with pytest.raises(ValueError, match=f"`megatron.transformer.overrides` can't set `{field}`: Megatron weighs it"):
        checked_overrides(SimpleNamespace(), TransformerOptions(overrides={field: 0.01}))
