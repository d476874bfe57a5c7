"""The loss of reward models, by hand."""

from __future__ import annotations

import math

import torch
from torch.testing import assert_close

from verl_lightning.functional.bradley_terry import bradley_terry_loss


def test_the_loss_is_the_likelihood_of_the_preference_by_its_margin_and_the_centre():
    chosen = torch.tensor([1.0, 2.0], requires_grad=True)
    rejected, margins = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.5])

    losses = bradley_terry_loss(chosen, rejected, margins, center_coef=0.1)
    losses.sum().backward()

    expected = [math.log(2) + 0.1 * 4, math.log1p(math.exp(-1.5)) + 0.1 * 4]
    assert_close(losses.detach(), torch.tensor(expected))
    slopes = [-0.5 + 0.2 * 2, -1 / (1 + math.exp(1.5)) + 0.2 * 2]
    assert_close(chosen.grad, torch.tensor(slopes))
