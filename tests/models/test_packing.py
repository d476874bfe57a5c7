"""Packed sequences score as padded ones do, learn as they do, and see nothing of one another."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, GPT2Config, GPT2LMHeadModel, GptOssConfig

from tests.models.packed_models import SHAPE, SLIDING, learn, make_backbone, make_batch
from tests.runs import make_model_config
from tests.tolerances import assert_near
from verl_lightning.models.attention import PACKS_BY_DEFAULT, VARLEN, block_diagonal_mask, varlen_attention
from verl_lightning.models.build import build_scorer, decide_packing, make_value_head
from verl_lightning.models.packing import pack
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.types import RowLength, TokenBatch


def compare(backbone, head="policy"):
    """Both ways of scoring give the same numbers and gradients."""
    value_head = None if head == "policy" else make_value_head(backbone)
    if value_head is not None:
        torch.nn.init.normal_(value_head.weight)
    scorer = TokenScorer(backbone.base_model if head == "value" else backbone, value_head, head)
    padded, gradients = learn(scorer, make_batch())
    scorer.packs = True
    packed, packed_gradients = learn(scorer, make_batch())
    assert_near((packed, packed_gradients), (padded, gradients))


@pytest.mark.parametrize("attention", [VARLEN, "sdpa"])
@pytest.mark.parametrize("model_type", sorted(PACKS_BY_DEFAULT))
def test_packed_equals_padded(model_type, attention):
    compare(make_backbone(model_type, attention))


@pytest.mark.parametrize("attention", [VARLEN, "sdpa", "eager"])
@pytest.mark.parametrize("model_type", sorted(SLIDING))
def test_packed_equals_padded_within_sliding_windows(model_type, attention):
    compare(make_backbone(model_type, attention, **SLIDING[model_type]))


@pytest.mark.parametrize("head", ["value", "policy_and_value"])
def test_packed_values_equal_padded_ones(head):
    compare(make_backbone("qwen2", VARLEN), head)


@pytest.mark.parametrize("head", ["policy", "policy_and_value"])
def test_packed_logits_of_other_heads_equal_padded_ones(head):
    """GPT-2 has learnt positions; its log-probs come from whole logits."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"
    compare(GPT2LMHeadModel(config).eval(), head)


@pytest.mark.parametrize("attention", [VARLEN, "sdpa", "eager"])
def test_a_sequence_sees_nothing_of_the_others(attention):
    """No score moves when every token of another sequence is changed, and no gradient reaches it."""
    scorer = TokenScorer(make_backbone("qwen3", attention), None, "policy", packs=True)
    batch = make_batch()
    expected = scorer(batch).log_probs
    for row in range(5):
        ids = batch.input_ids.clone()
        ids[row] = 60 - ids[row]
        others = torch.arange(5) != row
        actual = scorer(dataclasses.replace(batch, input_ids=ids)).log_probs
        assert_close(actual[others], expected[others], rtol=0, atol=0)
        assert (actual[row] != expected[row])[batch.response_mask[row]].all()


def test_padding_is_never_read():
    """Neither its tokens nor what stands in masked columns."""
    scorer, batch = TokenScorer(make_backbone("qwen3", VARLEN), None, "policy", packs=True), make_batch()
    ids = torch.where(batch.attention_mask, batch.input_ids, 59)
    other = scorer(dataclasses.replace(batch, input_ids=ids)).log_probs
    expected = scorer(batch).log_probs
    assert_close(other, expected, rtol=0, atol=0)
    assert (expected == 0).equal(~batch.response_mask)


def test_a_hole_in_the_attention_mask_is_closed():
    """The token after a hole is predicted by the one before it."""
    scorer = TokenScorer(make_backbone("llama", VARLEN), None, "policy", packs=True)
    batch = make_batch().select(slice(0, 1))
    ids = torch.cat([batch.input_ids[:, :4], batch.input_ids[:, :1], batch.input_ids[:, 4:]], dim=1)
    is_real = torch.cat([batch.attention_mask[:, :4], torch.tensor([[False]]), batch.attention_mask[:, 4:]], dim=1)
    holed = dataclasses.replace(batch, input_ids=ids, attention_mask=is_real)
    assert_close(scorer(holed).log_probs, scorer(batch).log_probs, rtol=0, atol=0)


def test_what_lies_where():
    """By hand: two rows, of which the second has a masked token."""
    batch = TokenBatch(
        input_ids=torch.tensor([[0, 11, 12, 13], [21, 22, 23, 0]]),
        attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]).bool(),
        response_mask=torch.tensor([[1, 1], [1, 0]]).bool(),
    )
    packed = pack(batch)
    assert packed.input_ids.tolist() == [[11, 12, 13, 21, 22, 23]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert packed.cu_seq_lens.tolist() == [0, 3, 6]
    assert packed.labels.tolist() == [[12, 13, 23]]
    assert packed.predictors.tolist() == [0, 1, 4]
    assert packed.unpack(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert batch.known_lengths() == (RowLength(3, 2, 1, 2), RowLength(3, 1, 2, 1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(**SHAPE, layer_types=["full_attention"] * 2), "capped attention scores .`softcap`."),
        (GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1), "attention sinks .`s_aux`."),
    ],
)
def test_scores_are_not_changed_in_silence(config, message):
    """Padded or packed: torch's kernels would leave out a cap and sinks."""
    backbone = AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN)
    for packs in (False, True):
        with pytest.raises(ValueError, match=f"{message}.*`attn_implementation: flex_attention` or `eager`"):
            TokenScorer(backbone, None, "policy", packs=packs)(make_batch())


def test_lengths_follow_their_rows():
    batch = make_batch()
    known = dataclasses.replace(batch, row_lengths=batch.known_lengths())
    assert known.select(slice(1, 3)).row_lengths == batch.select(slice(1, 3)).known_lengths()
    assert known.select(torch.tensor([2, 0])).row_lengths is None


def test_a_batch_without_trained_tokens_still_has_a_gradient():
    scorer = TokenScorer(make_backbone("qwen2", VARLEN), None, "policy", packs=True).train()
    batch = make_batch()
    scores = scorer(dataclasses.replace(batch, response_mask=torch.zeros_like(batch.response_mask)))
    scores.log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in scorer.parameters())


def test_block_diagonal_mask():
    mask = block_diagonal_mask(torch.tensor([0, 2, 5]), 5, sliding_window=2)
    assert mask.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("lengths", [(3, 3), (2, 4)])
def test_attention_is_that_of_each_sequence_alone(lengths):
    """Equal lengths and ragged ones take different ways."""
    query, key, value = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    cu_seq_lens = torch.tensor([0, lengths[0], 6], dtype=torch.int32)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 2
    output, _ = varlen_attention(
        layer, query, key, value, None, scaling=0.5, cu_seq_lens_q=cu_seq_lens, max_length_q=max(lengths)
    )
    start = 0
    for length in lengths:
        alone = [part[:, :, start : start + length] for part in (query, key, value)]
        expected = F.scaled_dot_product_attention(*alone, is_causal=True, scale=0.5, enable_gqa=True)
        assert_close(output[:, start : start + length], expected.transpose(1, 2))
        start += length


def test_autocast_reaches_attention(monkeypatch):
    """Rotation leaves float32, which torch's variable-length kernel does not take."""
    kinds = []
    monkeypatch.setattr("verl_lightning.models.attention.block_diagonal_mask", lambda *_, **__: None)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, *_, **__: kinds.append({q.dtype, k.dtype, v.dtype}) or q
    )
    states, bounds = torch.randn(1, 2, 5, 4), torch.tensor([0, 2, 5])
    for is_on in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            varlen_attention(torch.nn.Identity(), states, states, states, None, cu_seq_lens_q=bounds, max_length_q=3)
    assert kinds == [{torch.bfloat16}, {torch.float32}]


def test_generation_with_our_attention_is_that_of_sdpa():
    """Padded prompts and a cache."""
    tokens = [
        make_backbone("qwen3", attention).generate(
            make_batch().input_ids[:, :5],
            attention_mask=make_batch().attention_mask[:, :5].long(),
            max_new_tokens=8,
            do_sample=False,
        )
        for attention in (VARLEN, "sdpa")
    ]
    assert tokens[0].equal(tokens[1])


def test_models_with_a_state_are_refused_when_packing_is_asked():
    config = AutoConfig.for_model("qwen3_next", **SHAPE | {"num_hidden_layers": 4})
    with torch.device("meta"):
        backbone = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="`packing: always` does not fit `Qwen3NextForCausalLM`: its layers"):
        decide_packing(backbone, "always")


def test_a_model_without_position_ids_is_refused(tiny_folder):
    config = AutoConfig.for_model("bloom", vocab_size=60, hidden_size=32, n_layer=1, n_head=2)
    with torch.device("meta"):
        backbone = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="does not go through transformers' attention interface"):
        decide_packing(backbone, "always")


@pytest.mark.parametrize(
    ("packing", "attention", "packs"),
    [("auto", "sdpa", False), ("auto", "varlen", True), ("always", "sdpa", True), ("never", "varlen", False)],
)
def test_who_is_packed(packing, attention, packs, tiny_folder):
    config = make_model_config(tiny_folder, packing=packing, attn_implementation=attention)
    assert build_scorer(config, "policy", trainable=True).packs is packs


def test_the_kernel_is_not_written_into_saved_models(tiny_folder, tmp_path):
    config = make_model_config(tiny_folder, attn_implementation="varlen")
    build_scorer(config, "policy", trainable=False).backbone.save_pretrained(tmp_path)
    assert "varlen" not in (tmp_path / "config.json").read_text()
