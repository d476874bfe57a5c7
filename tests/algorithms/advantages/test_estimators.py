"""The estimators that YAML names: golden tables through the options, what each needs, and what it refuses."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close

from tests.golden import ALL_VALID, GROUPS, MASK, REWARDS, SEQUENCE_REWARDS, VALUES
from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.algorithms.advantages.gdpo import GDPO
from verl_lightning.algorithms.advantages.gpg import GPG
from verl_lightning.algorithms.advantages.grpo import GRPO
from verl_lightning.algorithms.advantages.grpo_passk import GRPOPassK
from verl_lightning.algorithms.advantages.opo import OPO
from verl_lightning.algorithms.advantages.optimal_token_baseline import OptimalTokenBaseline
from verl_lightning.algorithms.advantages.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from verl_lightning.algorithms.advantages.remax import ReMax
from verl_lightning.algorithms.advantages.rloo import RLOO
from verl_lightning.functional.masking import whiten

INPUTS = AdvantageInputs(
    token_rewards=REWARDS,
    rewards=SEQUENCE_REWARDS,
    response_mask=MASK,
    group_index=GROUPS,
    is_valid=ALL_VALID,
    values=VALUES,
    greedy_rewards=torch.tensor([0.5, 0.5, 0.25, 1.0]),
    reward_components={"correct": SEQUENCE_REWARDS, "format": 3 * SEQUENCE_REWARDS},
    log_probs=torch.full((4, 4), math.log(0.5)),
    sum_squared_probs=torch.full((4, 4), 0.3),
    nonzero_reward_share=0.75,
)
ESTIMATORS: list[AdvantageEstimator] = [
    GAE(gamma=0.99, lam=0.95),
    GRPO(),
    GRPO(normalize_by_std=False),
    RLOO(),
    ReinforcePlusPlus(gamma=0.9),
    ReinforcePlusPlusBaseline(),
    ReMax(),
    OPO(),
    GPG(),
    GRPOPassK(),
    GDPO(weights={"correct": 0.5, "format": 0.25}),
    OptimalTokenBaseline(),
]
# The advantage of each response's first token: MATH.md's golden tables; the last two estimators have none.
FIRST_TOKEN = [
    [0.636686, -0.906475, -0.932989, 0.574657],
    [0.707106, -0.707106, -0.707106, 0.707106],
    [0.5, -0.5, -0.75, 0.75],
    [1.0, -1.0, -1.5, 1.5],
    [-0.000845, -1.112897, -0.49509, 0.888797],
    [0.652299, -0.889499, -1.274949, 1.037749],
    [0.5, -0.5, 0.25, 1.0],
    [0.571429, -0.428571, -1.0, 0.5],
    [0.666667, -0.666667, -1.0, 1.0],
    [1.414212, 0.0, 0.0, 1.414212],
]


def names(estimator: AdvantageEstimator) -> str:
    return type(estimator).__name__


@pytest.mark.parametrize(("estimator", "expected"), [*zip(ESTIMATORS[:10], FIRST_TOKEN, strict=True)])
def test_estimators_match_the_golden_tables(estimator, expected):
    outputs = estimator(INPUTS)

    advantages = whiten(outputs.advantages, MASK) if estimator.whitens else outputs.advantages
    assert_close(advantages[:, 0], torch.tensor(expected), atol=1e-5, rtol=0)
    assert torch.equal(outputs.advantages[~MASK], torch.zeros(3))
    assert (outputs.returns is not None) == estimator.needs_critic


def test_gdpo_weighs_named_rewards():
    advantages = ESTIMATORS[10](INPUTS).advantages

    expected = torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.75 / math.sqrt(2)
    assert_close(advantages[:, 0], expected, atol=1e-5, rtol=0)


def test_optimal_token_baseline_weighs_all_alike_under_equal_noise():
    """With equal noise at the first token its baseline is the group's mean."""
    advantages = ESTIMATORS[11](INPUTS).advantages

    assert_close(advantages[:, 0], torch.tensor([0.5, -0.5, -0.75, 0.75]))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=names)
def test_what_lies_behind_the_mask_or_is_invalid_changes_nothing(estimator):
    valid = torch.tensor([True, True, True, False])
    used = MASK & valid.unsqueeze(-1)

    def spoil(x: torch.Tensor) -> torch.Tensor:
        return torch.where(used if x.ndim == 2 else valid, x, math.nan)

    plain = dataclasses.replace(INPUTS, is_valid=valid)
    spoilt = dataclasses.replace(
        plain,
        token_rewards=spoil(REWARDS),
        rewards=spoil(SEQUENCE_REWARDS),
        values=spoil(VALUES),
        greedy_rewards=spoil(INPUTS.greedy_rewards),
        reward_components={name: spoil(x) for name, x in INPUTS.reward_components.items()},
        log_probs=spoil(INPUTS.log_probs),
        sum_squared_probs=spoil(INPUTS.sum_squared_probs),
    )

    actual = estimator(spoilt).advantages

    assert_close(actual, estimator(plain).advantages)
    assert torch.equal(actual[~used], torch.zeros(int((~used).sum())))


@pytest.mark.parametrize("estimator", [x for x in ESTIMATORS if x.needs_groups], ids=names)
def test_groups_without_signal_teach_nothing(estimator):
    """Both groups get the reward 1 for each response, however it is spread over tokens."""
    rewards = torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]])
    ones = torch.ones(4)
    inputs = dataclasses.replace(
        INPUTS, token_rewards=rewards, rewards=ones, reward_components={"correct": ones, "format": ones}
    )

    assert torch.equal(estimator(inputs).advantages, torch.zeros(4, 4))


def test_a_greedy_response_without_a_score_teaches_nothing():
    inputs = dataclasses.replace(INPUTS, greedy_rewards=torch.tensor([math.nan, 0.5, 0.25, 1.0]))

    advantages = ReMax()(inputs).advantages

    assert_close(advantages[:, 0], torch.tensor([0.0, -0.5, 0.25, 1.0]))


def test_gdpo_names_the_rewards_that_are_missing():
    with pytest.raises(ValueError, match=r"names \['style'\], but the reward function returned only \['correct', 'fo"):
        GDPO(weights={"correct": 1.0, "style": 1.0})(INPUTS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GAE(gamma=1.5), r"`model.advantage.gamma` must be from 0 to 1, got 1\.5"),
        (lambda: GAE(lam=-0.1), r"`model.advantage.lam` must be from 0 to 1, got -0\.1"),
        (lambda: ReinforcePlusPlus(gamma=2.0), r"`model.advantage.gamma` must be from 0 to 1"),
        (lambda: GDPO(weights={}), r"`model.advantage.weights` must name at least one"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gae_whitens_unless_told_not_to():
    assert GAE().whitens
    assert not GAE(whiten=False).whitens
