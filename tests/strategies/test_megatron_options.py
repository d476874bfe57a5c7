"""What `megatron` refuses before anything heavy is imported."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import HalfPrecision
from transformers import LlamaConfig

from verl_lightning.models.config import ModelConfig
from verl_lightning.strategies import MegatronStrategy
from verl_lightning.strategies.megatron.config import DataParallelConfig, ParallelSizes, TransformerOptions
from verl_lightning.strategies.megatron.provider import (
    ModelSettings,
    check_experts,
    fused_operations,
    language_model_fields,
    recompute_fields,
)
from verl_lightning.strategies.megatron.tokens import Slicing, context_slice, model_tokens
from verl_lightning.types import TokenBatch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "`megatron.tensor_parallel_size` must be at least 1, got 0"),
        ({"virtual_pipeline_parallel_size": 2}, "needs `megatron.pipeline_parallel_size` above 1"),
        ({"sequence_parallel": True}, "`megatron.sequence_parallel` needs `megatron.tensor_parallel_size` above 1"),
        ({"micro_batch_size": 0}, "`megatron.micro_batch_size` must be at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MegatronStrategy(**options)


def test_a_number_of_processes_that_no_model_fits_is_refused():
    with pytest.raises(ValueError, match="needs a multiple of 4 processes .* got 6"):
        ParallelSizes(tensor=2, pipeline=2).check_world(6)
    ParallelSizes(tensor=2, pipeline=2).check_world(8)


def test_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="`megatron.transformer.recompute_num_layers` has no effect"):
        TransformerOptions(recompute_num_layers=2)
    with pytest.raises(ValueError, match="`megatron.ddp.bucket_size` must be at least 1"):
        DataParallelConfig(bucket_size=0)
    with pytest.raises(ValueError, match="`megatron.ddp.bucket_size: 9` has no effect without `megatron.ddp.overlap_g"):
        DataParallelConfig(bucket_size=9)


@pytest.mark.parametrize(
    ("which", "recompute", "expected"),
    [
        ("none", "none", {"recompute_granularity": None}),
        ("none", "selective", {"recompute_granularity": "selective"}),
        ("full", "none", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        # 10 layers on two stages: 2 of the 5 on each are every third, rounded up.
        (3, "none", {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}),
    ],
)
def test_activation_checkpointing_becomes_megatrons_fields(which, recompute, expected):
    settings = model_settings(TransformerOptions(recompute=recompute))
    assert recompute_fields(ModelConfig(path="m", activation_checkpointing=which), settings, 10) == expected


def test_one_place_says_what_is_computed_again():
    settings = model_settings(TransformerOptions(recompute="selective"))
    with pytest.raises(ValueError, match="`activation_checkpointing: full` of `path: m` and `megatron.transformer.rec"):
        recompute_fields(ModelConfig(path="m", activation_checkpointing="full"), settings, 10)


def model_settings(transformer: TransformerOptions) -> ModelSettings:
    """Two stages."""
    return ModelSettings(
        sizes=ParallelSizes(pipeline=2),
        sequence_parallel=False,
        transformer=transformer,
        is_bf16=False,
        device=torch.device("cpu"),
    )


def test_contexts_need_transformer_engine_and_shared_columns_do_not():
    """Megatron's own attention sees one rank's columns; its norms are replaced by ours."""
    local = dataclasses.replace(model_settings(TransformerOptions()), sequence_parallel=True)
    assert not local.uses_transformer_engine
    with pytest.raises(MisconfigurationException, match="`megatron.context_parallel_size: 2` needs TransformerEngine"):
        assert dataclasses.replace(local, sizes=ParallelSizes(context=2)).uses_transformer_engine


@pytest.mark.parametrize("backend", ["flash", "fused", "unfused"])
def test_attention_of_layers_that_are_not_used_is_refused(backend):
    options = TransformerOptions(attention_backend=backend, use_transformer_engine=False)
    with pytest.raises(MisconfigurationException, match=f"`megatron.transformer.attention_backend: {backend}` is not"):
        assert model_settings(options).uses_transformer_engine
    local = TransformerOptions(attention_backend="local", use_transformer_engine=False)
    assert not model_settings(local).uses_transformer_engine


def test_experts_want_sequence_parallelism_beside_tensor_parallelism():
    settings = dataclasses.replace(model_settings(TransformerOptions()), sizes=ParallelSizes(tensor=2))
    check_experts(None, settings)
    check_experts(4, dataclasses.replace(settings, sequence_parallel=True))
    with pytest.raises(MisconfigurationException, match="`megatron.sequence_parallel: true`. Set it, or"):
        check_experts(4, settings)


def test_an_unknown_precision_is_refused():
    with pytest.raises(MisconfigurationException, match="knows `trainer.precision` 32-true and bf16-mixed"):
        MegatronStrategy().precision_plugin = HalfPrecision("bf16-true")


def padded_batch() -> TokenBatch:
    """A prompt with padding before it, a response with padding after it; and a row without."""
    ids = torch.tensor([[0, 11, 12, 13, 0], [21, 22, 23, 24, 25]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    return TokenBatch(input_ids=ids, attention_mask=mask, response_mask=mask[:, 2:])


def test_rows_begin_with_their_real_tokens():
    tokens = model_tokens(padded_batch(), slicing=Slicing(multiple=4), packs=False)
    assert tokens.input_ids.tolist() == [[11, 12, 13, 0, 0, 0, 0, 0], [21, 22, 23, 24, 25, 0, 0, 0]]
    assert tokens.labels.tolist() == [12, 13, 23, 24, 25]
    assert [part.tolist() for part in tokens.source] == [[0, 0, 1, 1, 1], [0, 1, 1, 2, 3]]  # the position before each
    assert [part.tolist() for part in tokens.target] == [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]]


def test_context_parallel_ranks_hold_an_early_and_a_late_piece_of_each_sequence():
    """Sequences of 4 and 8 tokens, two ranks: pieces 0 and 3 to the first, 1 and 2 to the second."""
    first, second = (context_slice([4, 8], Slicing(context_size=2, context_rank=rank)).tolist() for rank in (0, 1))
    assert first == [0, 3, 4, 5, 10, 11]
    assert second == [1, 2, 6, 7, 8, 9]


def test_context_parallel_ranks_score_each_token_once():
    parts = [
        model_tokens(padded_batch(), slicing=Slicing(multiple=4, context_size=2, context_rank=rank), packs=False)
        for rank in (0, 1)
    ]
    targets = [pair for part in parts for pair in zip(*(t.tolist() for t in part.target), strict=True)]
    assert sorted(targets) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    for part in parts:
        predicted = part.input_ids[part.source]  # each token here is one less than the one it predicts
        assert (predicted + 1).tolist() == part.labels.tolist()


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        ({}, {"apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"}),
        ({"multi_latent_attention": True}, {"bias_activation_fusion", "bias_dropout_fusion"}),
        ({"activation_func": F.gelu}, {"apply_rope_fusion", "bias_dropout_fusion"}),
        ({"gated_linear_unit": False}, {"apply_rope_fusion", "bias_dropout_fusion"}),
    ],
)
def test_operations_are_fused_where_the_model_has_them(model, fused):
    """Megatron refuses a fused activation that is not the model's; its fused latent attention is experimental."""
    swiglu = {"gated_linear_unit": True, "activation_func": F.silu, "glu_linear_offset": 0.0}
    transformer = SimpleNamespace(**{"multi_latent_attention": False} | swiglu | model)
    assert {name for name, chosen in fused_operations(transformer).items() if chosen} == fused


def test_a_reward_model_is_mapped_as_the_language_model_with_its_trunk():
    classifier = LlamaConfig(architectures=["LlamaForSequenceClassification"])
    known = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    assert language_model_fields(classifier) == known
    assert language_model_fields(LlamaConfig(architectures=["LlamaForCausalLM"])) == {}
