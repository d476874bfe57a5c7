"""Log-probs from hidden states against those from whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from verl_lightning.functional import linear_log_probs as module
from verl_lightning.functional.linear_log_probs import linear_log_probs


@pytest.mark.parametrize("chunk", [13, 26, 10_000])
def test_equals_log_softmax_of_all_logits(chunk, monkeypatch):
    """Values and both gradients, however the rows are cut."""
    monkeypatch.setattr(module, "_CHUNK_NUMEL", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(13, 8, generator=generator).requires_grad_()
    labels = torch.randint(0, 13, (2, 5), generator=generator)
    scale = torch.rand(2, 5, generator=generator)

    log_probs, entropy = linear_log_probs(hidden, weight, labels, temperature=0.7, with_entropy=True)
    grads = torch.autograd.grad((scale * (log_probs + 0.3 * entropy)).sum(), (hidden, weight))

    every = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    expected = every.gather(-1, labels[..., None]).squeeze(-1)
    expected_entropy = -(every.exp() * every).sum(-1)
    expected_grads = torch.autograd.grad((scale * (expected + 0.3 * expected_entropy)).sum(), (hidden, weight))
    assert_close(log_probs, expected)
    assert_close(entropy, expected_entropy)
    assert_close(grads, expected_grads)


def test_frozen_head_gets_no_gradient():
    hidden = torch.ones(1, 3, 4, requires_grad=True)
    weight = torch.arange(8.0).view(2, 4)

    linear_log_probs(hidden, weight, torch.zeros(1, 3, dtype=torch.long), temperature=1.0)[0].sum().backward()

    # d/dh log softmax(W h)[0] = W[0] - p @ W, with p nearly (0, 1): W[0] - W[1] = -4.
    assert_close(hidden.grad, torch.full((1, 3, 4), -4.0), rtol=0, atol=1e-5)
    assert weight.grad is None


def test_logits_of_16_bit_weights_are_not_rounded():
    """A logit near 20 has steps of 0.125 in bfloat16; the products are exact in float32."""
    generator = torch.Generator().manual_seed(0)
    hidden = (4 * torch.randn(1, 64, 32, generator=generator)).bfloat16()
    weight = torch.randn(50, 32, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 50, (1, 64), generator=generator)

    log_probs, _ = linear_log_probs(hidden, weight, labels, temperature=1.0)
    log_probs.sum().backward()

    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    assert_close(log_probs.double(), exact.gather(-1, labels[..., None])[..., 0], rtol=1e-5, atol=1e-4)
    assert weight.grad.dtype == torch.bfloat16


def test_autocast_does_not_round_logits():
    hidden, weight = torch.full((1, 1, 1), 1.001), torch.tensor([[10.0], [0.0]])

    with torch.autocast("cpu", torch.bfloat16):
        log_probs, _ = linear_log_probs(hidden, weight, torch.ones(1, 1, dtype=torch.long), temperature=1.0)

    assert_close(log_probs[0, 0], torch.tensor(-10.01).exp().log1p().neg() - 10.01, rtol=1e-5, atol=0)
