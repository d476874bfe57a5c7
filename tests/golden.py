"""The inputs of the golden tables, shared by the tests of the maths."""

from __future__ import annotations

import torch

REWARDS = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0.5, 0, 0], [0, 0, 0, 2]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
VALUES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0, -0.1, 0.2, 0.1], [0.5, 0.5, 0.5, 0.5], [1, 0.9, 0.8, 0.7]])
SEQUENCE_REWARDS = REWARDS.sum(dim=-1)
GROUPS = torch.tensor([7, 7, 3, 3])
ALL_VALID = torch.ones(4, dtype=torch.bool)

OLD_LOG_PROBS = torch.tensor([[0.5, 0.4, 0.3, 0.2], [0.6, 0.5, 0.4, 0.3]]).log()
LOG_PROBS = torch.tensor([[0.7, 0.4, 0.2, 0.2], [0.55, 0.7, 0.1, 0.3]]).log()
ADVANTAGES = torch.tensor([[1.0, 1, 1, 0], [-1, -1, -1, -1]])
LOSS_MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
