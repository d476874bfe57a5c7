"""The optimal token baseline against a slow loop and hand-made numbers."""

import math

import torch
from torch.testing import assert_close

from verl_lightning.algorithms.advantages.optimal_token_baseline import optimal_token_baseline_advantages

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
GROUPS = torch.tensor([4, 4, 4, 8, 8])
REWARDS = torch.tensor([[0, 0, 0, 1.0], [0.5, 0.25, 0, 0], [0, 0, 2, 0], [0, 3, 0, 0], [1, 0, 0, 0]])
PROBS = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
SQUARES = PROBS.square() + 0.01
WEIGHTS = torch.full((5, 4), 1.5)
VALID = torch.ones(5, dtype=torch.bool)


def loop(group: list[int]) -> dict[tuple[int, int], float]:
    """The definition, one token at a time; no response here has masked tokens inside."""
    expected = {}
    for t in range(4):
        longer = [i for i in group if MASK[i, t]]
        noise = [sum((1 - 2 * PROBS[i, s] + SQUARES[i, s]) * 1.5**2 for s in range(t + 1)).item() for i in longer]
        returns = [REWARDS[i, t:][MASK[i, t:]].sum().item() for i in longer]
        baseline = sum(w * g for w, g in zip(noise, returns, strict=True)) / sum(noise) if len(longer) > 1 else 0.0
        expected |= {(i, t): g - baseline for i, g in zip(longer, returns, strict=True)}
    return expected


def test_optimal_token_baseline_is_its_definition():
    actual = optimal_token_baseline_advantages(REWARDS, PROBS.log(), SQUARES, WEIGHTS, MASK, GROUPS, VALID)

    expected = torch.zeros(5, 4)
    for (i, t), advantage in (loop([0, 1, 2]) | loop([3, 4])).items():
        expected[i, t] = advantage
    assert_close(actual, expected)


def test_tool_output_inside_a_response_changes_nothing():
    """A response that is interrupted compares with the others as if it were not."""
    holes = torch.tensor([0, 1, 3, 5])  # where the tokens go in the longer rows
    long = [torch.full((5, 6), math.nan) for _ in range(4)]
    for row, x in zip(long, (REWARDS, PROBS.log(), SQUARES, WEIGHTS), strict=True):
        row[0, holes] = x[0]
        row[1:, :4] = x[1:]
    mask = torch.zeros(5, 6, dtype=torch.bool)
    mask[0, holes] = True
    mask[1:, :4] = MASK[1:]

    actual = optimal_token_baseline_advantages(*long, mask, GROUPS, VALID)

    plain = optimal_token_baseline_advantages(REWARDS, PROBS.log(), SQUARES, WEIGHTS, MASK, GROUPS, VALID)
    assert_close(actual[0, holes], plain[0])
    assert_close(actual[1:, :4], plain[1:])
    assert torch.equal(actual[~mask], torch.zeros(int((~mask).sum())))


def test_differs_from_verl_for_a_single_response():
    """verl lets the raw reward through where there is nothing to compare with; here it teaches nothing."""
    alone = torch.tensor([True, False, False, True, True])

    actual = optimal_token_baseline_advantages(REWARDS, PROBS.log(), SQUARES, WEIGHTS, MASK, GROUPS, alone)

    assert torch.equal(actual[:3], torch.zeros(3, 4))
    assert actual[3:].any()
