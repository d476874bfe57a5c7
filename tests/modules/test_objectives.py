"""The losses of one optimizer step: shares add up, terms have their weights and signs."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from verl_lightning.algorithms.losses.ppo_clip import PPOClip
from verl_lightning.functional.kl import KL_ESTIMATORS
from verl_lightning.modules.objectives import Normalizer, PolicyObjective, SharedObjective, ValueObjective
from verl_lightning.modules.ppo_config import KLConfig, KLEstimator
from verl_lightning.types import Experience, Scores

LOG_PROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
ADVANTAGES = torch.tensor([[1.0, -1.0, 2.0], [0.5, 1.0, 9.0]])


def make_experience(**changes):
    parts = {
        "input_ids": torch.zeros(2, 5, dtype=torch.long),
        "attention_mask": torch.ones(2, 5, dtype=torch.bool),
        "response_mask": MASK,
        "rollout_log_probs": LOG_PROBS,
        "old_log_probs": LOG_PROBS,
        "advantages": ADVANTAGES,
        "ref_log_probs": LOG_PROBS - 0.5,
        "values": torch.zeros(2, 3),
        "returns": torch.full((2, 3), 2.0),
    }
    return Experience(**parts | changes)


def make_normalizer(aggregation="token-mean", mask=MASK):
    return Normalizer(
        aggregation=aggregation, num_tokens=mask.sum(), num_sequences=mask.any(-1).sum(), max_response_length=3
    )


def make_policy_objective(**changes):
    parts = {
        "policy_loss": PPOClip(),
        "normalizer": make_normalizer(),
        "kl": None,
        "kl_coef": 0.0,
        "entropy_coef": 0.0,
        "is_on_policy": True,
    }
    return PolicyObjective(**parts | changes)


def test_on_policy_the_loss_is_minus_the_mean_advantage():
    loss, metrics = make_policy_objective()(Scores(log_probs=LOG_PROBS), make_experience())
    assert_close(loss, torch.tensor(-(1.0 - 1.0 + 2.0 + 0.5 + 1.0) / 5))
    assert float(metrics["actor/pg_loss"].value) == pytest.approx(-0.7)
    assert float(metrics["actor/on_policy_ratio_error"].value) == 0


def test_kl_is_added_and_entropy_taken():
    objective = make_policy_objective(kl=KLConfig(estimator="k1"), kl_coef=0.2, entropy_coef=0.1)
    entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    loss, metrics = objective(Scores(log_probs=LOG_PROBS, entropy=entropy), make_experience())
    assert_close(loss, torch.tensor(-0.7 + 0.2 * 0.5 - 0.1 * 3.0))  # the sixth entropy is masked
    assert float(metrics["actor/kl_loss"].value) == pytest.approx(0.5)
    assert float(metrics["actor/pg_loss"].value) == pytest.approx(-0.7)


def test_importance_weights_weigh_the_policy_loss_alone():
    weights = torch.tensor([[2.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    objective = make_policy_objective(kl=KLConfig(estimator="k1"), kl_coef=0.2)
    loss, _ = objective(Scores(log_probs=LOG_PROBS), make_experience(loss_weights=weights))
    assert_close(loss, torch.tensor(-(2.0 + 2.0 + 0.5 + 1.0) / 5 + 0.2 * 0.5))


def test_value_loss_by_hand():
    """Values 1 against returns 2: clipped at 0 + 0.25 the error is larger, and PPO takes the larger."""
    objective = ValueObjective(normalizer=make_normalizer(), clip=0.25)
    loss, metrics = objective(Scores(values=torch.ones(2, 3)), make_experience())
    assert_close(loss, torch.tensor(0.5 * 1.75**2))
    assert float(metrics["critic/vf_clipfrac"].value) == 1
    assert float(metrics["critic/vpred_mean"].value) == 1


def test_a_shared_trunk_adds_both_losses():
    value = ValueObjective(normalizer=make_normalizer(), clip=0.25)
    objective = SharedObjective(policy=make_policy_objective(), value=value, coef=0.1)
    loss, metrics = objective(Scores(log_probs=LOG_PROBS, values=torch.ones(2, 3)), make_experience())
    assert_close(loss, torch.tensor(-0.7 + 0.1 * 0.5 * 1.75**2))
    assert {"actor/pg_loss", "critic/vf_loss"} <= metrics.keys()


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_shares_of_micro_batches_add_up(aggregation):
    objective = make_policy_objective(normalizer=make_normalizer(aggregation), entropy_coef=0.3)
    batch, scores = make_experience(), Scores(log_probs=LOG_PROBS - 0.1, entropy=ADVANTAGES.square())
    whole, metrics = objective(scores, batch)

    rows = [slice(0, 1), slice(1, 2)]
    parts = [
        objective(Scores(log_probs=scores.log_probs[row], entropy=scores.entropy[row]), batch.select(row))
        for row in rows
    ]

    assert_close(parts[0][0] + parts[1][0], whole)
    merged = parts[0][1]["actor/pg_loss"].merge(parts[1][1]["actor/pg_loss"])
    assert_close(merged.value, metrics["actor/pg_loss"].value)


def test_a_masked_batch_has_loss_0_and_a_gradient_of_zeros():
    mask = torch.zeros_like(MASK)
    log_probs = torch.full((2, 3), -torch.inf).requires_grad_()
    objective = make_policy_objective(normalizer=make_normalizer(mask=mask), kl=KLConfig(), kl_coef=0.1)
    loss, _ = objective(Scores(log_probs=log_probs), make_experience(response_mask=mask))
    loss.backward()
    assert loss == 0
    assert_close(log_probs.grad, torch.zeros(2, 3))


def test_each_estimator_that_a_configuration_may_name_is_there():
    assert set(get_args(KLEstimator)) == KL_ESTIMATORS.keys()
