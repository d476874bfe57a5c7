"""Divergences of a student from its teacher: against TRL, against the formula, and however they are cut."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad
from torch.testing import assert_close

from verl_lightning.functional import distillation as module
from verl_lightning.functional.distillation import (
    generalized_jsd,
    linear_divergence,
    linear_top_k,
    linear_top_k_divergence,
)

VOCAB = 13


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_hand(logits, teacher_logits, beta, temperature):
    """The definition in float64, one mixture and two sums."""
    p, q = ((each.double() / temperature).softmax(-1) for each in (logits, teacher_logits))
    if beta in (0, 1):
        first, second = (q, p) if beta == 0 else (p, q)
        return (first * (first / second).log()).sum(-1)
    m = (1 - beta) * p + beta * q
    return beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 0.5108256), (0.5, 0.1017492), (1.0, 0.3680642)])
def test_numbers_of_a_coin(beta, expected):
    """Student (.9, .1), teacher (.5, .5): KL(q||p) = ln(5/3), and so on."""
    student, teacher = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()

    assert_close(generalized_jsd(student, teacher, beta=beta), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk", [13, 26, 10_000])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_equals_the_definition_on_whole_logits(beta, chunk, monkeypatch):
    """Values and both gradients, however the rows are cut; the teacher is of another width."""
    monkeypatch.setattr(module, "_CHUNK_NUMEL", chunk)
    hidden, weight = drawn(2, 5, 8).requires_grad_(), drawn(VOCAB, 8).requires_grad_()
    of_teacher, head, scale = drawn(2, 5, 6), drawn(VOCAB, 6), drawn(2, 5)

    divergence = linear_divergence(hidden, weight, of_teacher, head, beta=beta, temperature=0.7)
    grads = torch.autograd.grad((scale * divergence).sum(), (hidden, weight))

    expected = by_hand(hidden @ weight.T, of_teacher @ head.T, beta, 0.7)
    expected_grads = torch.autograd.grad((scale.double() * expected).sum(), (hidden, weight))
    assert_close(divergence.double(), expected, rtol=1e-5, atol=1e-6)
    assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_list_of_all_tokens_tells_as_much_as_hidden_states(beta):
    hidden, weight = drawn(1, 7, 8).requires_grad_(), drawn(VOCAB, 8)
    of_teacher, head = drawn(1, 7, 6), drawn(VOCAB, 6)
    whole = linear_divergence(hidden, weight, of_teacher, head, beta=beta, temperature=0.7)

    def of_list(top_k):
        ids, log_probs = linear_top_k(of_teacher, head, top_k=top_k, temperature=0.7)
        return linear_top_k_divergence(hidden, weight, ids, log_probs, beta=beta, temperature=0.7)

    assert_close(of_list(VOCAB), whole, rtol=1e-4, atol=1e-5)
    few, more = of_list(2), of_list(5)
    assert (few <= more + 1e-6).all()
    assert (more <= whole + 1e-5).all()


def test_tokens_that_fill_up_a_list_count_for_nothing():
    hidden, weight = drawn(1, 3, 8).requires_grad_(), drawn(VOCAB, 8)
    ids, log_probs = linear_top_k(drawn(1, 3, 8), weight, top_k=3, temperature=1.0)
    options = {"beta": 0.5, "temperature": 1.0}

    short = linear_top_k_divergence(hidden, weight, ids, log_probs, **options)
    filled = pad(log_probs, (0, 2), value=-torch.inf)
    long = linear_top_k_divergence(hidden, weight, pad(ids, (0, 2)), filled, **options)

    assert_close(short, long)
    (grad,) = torch.autograd.grad(long.sum(), hidden)
    assert grad.isfinite().all()
    assert grad.abs().max() > 0


def test_tokens_of_one_model_alone_are_left_out():
    """A family pads its vocabularies to unlike sizes."""
    hidden, weight, of_teacher, head = drawn(1, 3, 8), drawn(VOCAB, 8), drawn(1, 3, 6), drawn(VOCAB + 3, 6)

    divergence = linear_divergence(hidden, weight, of_teacher, head, beta=1.0, temperature=1.0)

    expected = by_hand(hidden @ weight.T, (of_teacher @ head.T)[..., :VOCAB], 1.0, 1.0)
    assert_close(divergence.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 1.7848074), (0.1, 0.1266622), (0.5, 0.2912625), (1.0, 1.6018679)])
def test_equals_the_loss_of_trl(beta, expected):
    """What GKD's loss of TRL 1.16.0 gives for these logits, as a mean over the tokens that are trained."""
    index = torch.arange(2 * 3 * 5).double()
    student, teacher = ((2 * wave).view(2, 3, 5).float() for wave in (index.sin(), (1.3 * index).cos()))
    is_trained = torch.tensor([[False, True, True], [True, False, True]])

    eye = torch.eye(5)  # a head whose logits are the hidden states
    divergence = linear_divergence(student, eye, teacher, eye, beta=beta, temperature=0.9)

    assert_close(divergence[is_trained].mean(), torch.tensor(expected), rtol=0, atol=1e-6)
