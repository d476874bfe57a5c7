"""Log-probabilities and entropy agree with torch's own, chunk by chunk, and give the same gradient."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.tolerances import needs_compiler
from verl_lightning.functional import log_probs
from verl_lightning.functional.log_probs import (
    log_probs_and_entropy,
    response_logits,
    token_entropy,
    token_log_probs,
    token_sum_squared_probs,
)

LABELS = torch.tensor([[1, 0, 4], [2, 2, 3]])


def random_logits() -> torch.Tensor:
    return torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()


def plain_log_probs_and_entropy(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    everything = torch.log_softmax(logits / temperature, dim=-1)
    return everything.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1), -(everything.exp() * everything).sum(-1)


@pytest.mark.parametrize(
    ("chunk_numel", "compiled"),
    [(1, False), (2**26, False), pytest.param(1, True, marks=[pytest.mark.slow, needs_compiler])],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
def test_log_probs_and_entropy_match_log_softmax(chunk_numel, compiled, monkeypatch):
    monkeypatch.setattr(log_probs, "_CHUNK_NUMEL", chunk_numel)
    logits, weights = random_logits(), torch.tensor([[1.0, 0, 2], [0, -1, 3]])

    actual = log_probs_and_entropy(logits, LABELS, temperature=0.7, compiled=compiled)
    expected = plain_log_probs_and_entropy(logits, 0.7)

    assert_close(actual, expected)
    for actual_part, expected_part in zip(actual, expected, strict=True):
        (actual_grad,) = torch.autograd.grad((actual_part * weights).sum(), logits, retain_graph=True)
        (expected_grad,) = torch.autograd.grad((expected_part * weights).sum(), logits, retain_graph=True)
        assert_close(actual_grad, expected_grad)


def test_entropy_of_a_uniform_distribution_is_log_of_its_size():
    assert_close(token_entropy(torch.zeros(1, 2, 8), temperature=2.0), torch.full((1, 2), math.log(8)))


def test_log_probs_divide_by_the_temperature():
    logits = torch.tensor([[[0.0, math.log(4.0)]]])

    actual = token_log_probs(logits, torch.tensor([[1]]), temperature=2.0)

    assert_close(actual, torch.tensor([[math.log(2 / 3)]]))


def test_sum_of_squared_probabilities_matches_a_hand_made_one():
    logits = torch.tensor([[[0.0, math.log(4.0)], [0.0, 0.0]]])

    assert_close(token_sum_squared_probs(logits, temperature=2.0), torch.tensor([[5 / 9, 0.5]]))


def test_tokens_that_the_vocabulary_excludes_do_not_make_nan():
    logits = torch.tensor([[[0.0, -math.inf, 0.0]]], requires_grad=True)

    values, entropy = log_probs_and_entropy(logits, torch.tensor([[0]]), temperature=1.0)
    (values + entropy).sum().backward()

    assert_close(entropy.detach(), torch.tensor([[math.log(2)]]))
    assert_close(logits.grad, torch.tensor([[[0.5, 0.0, -0.5]]]))


def test_nan_logits_of_an_unused_position_give_no_gradient():
    logits = torch.tensor([[[math.nan, 1.0], [0.0, 0.0]]], requires_grad=True)
    mask = torch.tensor([[False, True]])

    values = token_log_probs(logits, torch.tensor([[0, 0]]), temperature=1.0)
    torch.where(mask, values, 0.0).sum().backward()

    assert_close(logits.grad, torch.tensor([[[0.0, 0.0], [0.5, -0.5]]]))


def test_bfloat16_logits_give_float32_log_probs():
    logits = random_logits().detach().bfloat16()

    actual = token_log_probs(logits, LABELS, temperature=1.0)

    assert_close(actual, plain_log_probs_and_entropy(logits.float(), 1.0)[0])


@pytest.mark.parametrize("num_positions", [3, 7])
def test_response_logits_come_from_the_position_before_each_token(num_positions):
    """A model of which position p says p: the response of 2 tokens is predicted by the third and second to last."""
    logits = torch.arange(7.0).view(1, 7, 1)[:, -num_positions:]

    assert_close(response_logits(logits, 2).flatten(), torch.tensor([4.0, 5.0]))


def test_response_logits_need_the_position_before_the_response():
    with pytest.raises(ValueError, match="logits_to_keep=4"):
        response_logits(torch.zeros(1, 3, 5), 3)
