"""Our maths beside verl's published package on random ragged batches: ``pytest -m oracle``, where verl is installed.

Written against verl 0.9.1. Where we differ on purpose, the tests are named ``test_differs_from_verl_*``.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from verl_lightning.algorithms.advantages.gae import gae
from verl_lightning.algorithms.advantages.gpg import gpg_advantages
from verl_lightning.algorithms.advantages.grpo import grpo_advantages
from verl_lightning.algorithms.advantages.grpo_passk import grpo_passk_advantages
from verl_lightning.algorithms.advantages.opo import opo_advantages
from verl_lightning.algorithms.advantages.optimal_token_baseline import optimal_token_baseline_advantages
from verl_lightning.algorithms.advantages.remax import remax_advantages
from verl_lightning.algorithms.advantages.rloo import rloo_advantages
from verl_lightning.algorithms.corrections.icepop import icepop_weights
from verl_lightning.algorithms.corrections.rejection import Rejection
from verl_lightning.algorithms.corrections.truncated_importance_sampling import truncated_weights
from verl_lightning.algorithms.losses.cispo import cispo_loss
from verl_lightning.algorithms.losses.dppo import dppo_loss, inside_binary_kl, inside_total_variation
from verl_lightning.algorithms.losses.dro import dro_loss
from verl_lightning.algorithms.losses.gspo import gspo_loss
from verl_lightning.algorithms.losses.ppo_clip import ppo_clip_loss
from verl_lightning.algorithms.losses.reinforce import reinforce_loss
from verl_lightning.algorithms.losses.sapo import sapo_loss
from verl_lightning.functional import kl as our_kl
from verl_lightning.functional.masking import whiten
from verl_lightning.functional.mismatch import effective_sample_size, mismatch_log_ratio, weight_moments
from verl_lightning.functional.normalizer import token_weights
from verl_lightning.functional.returns import discounted_returns
from verl_lightning.functional.value_loss import clipped_value_loss

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
SEEDS = range(5)
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Batch:
    """Six prompts of four responses with ragged lengths; each row has a trainable token."""

    def __init__(self, seed: int, width: int = 9) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        rows = 24
        lengths = torch.randint(1, width + 1, (rows,), generator=generator)
        self.mask = torch.arange(width) < lengths[:, None]
        self.groups = torch.arange(rows) // 4
        self.names = np.array([f"prompt {group}" for group in self.groups.tolist()])
        self.rewards = normal(rows)
        self.token_rewards = torch.zeros(rows, width)
        self.token_rewards[torch.arange(rows), lengths - 1] = self.rewards
        self.values, self.advantages = normal(rows, width), normal(rows, width) * self.mask
        self.old_log_probs = -normal(rows, width).abs() - 0.1
        self.log_probs = (self.old_log_probs + 0.3 * normal(rows, width)).clamp(max=-1e-3)
        self.greedy = normal(rows)
        chosen = self.old_log_probs.exp()  # the sum of squares is at least its square
        self.squares = chosen.square() + (1 - chosen).square() * torch.rand(rows, width, generator=generator)
        self.valid = torch.ones(rows, dtype=torch.bool)

    def group(self) -> tuple[Tensor, Tensor, Tensor]:
        """What our group estimators take."""
        return self.rewards, self.groups, self.valid

    def ratio(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What our losses take; the first has a gradient."""
        return self.log_probs.clone().requires_grad_(), self.old_log_probs, self.advantages, self.mask


@pytest.fixture(scope="module")
def verl():
    """verl's core algorithms: ``pip install --no-deps verl==0.9.1``, and ray, tensordict, omegaconf, hydra-core."""
    return pytest.importorskip(
        "verl.trainer.ppo.core_algos", reason="`pip install --no-deps verl==0.9.1` and its needs"
    )


def on_tokens(batch: Batch, sequence: Tensor) -> Tensor:
    return sequence[:, None] * batch.mask


@pytest.mark.parametrize("seed", SEEDS)
def test_gae(verl, seed):
    batch = Batch(seed)
    args = (batch.token_rewards, batch.values, batch.mask)

    advantages, returns = gae(*args, gamma=0.99, lam=0.95)
    theirs = verl.compute_gae_advantage_return(*args[:2], batch.mask.float(), 0.99, 0.95)

    assert_close(whiten(advantages, batch.mask), theirs[0] * batch.mask, atol=1e-5, rtol=1e-5)
    assert_close(returns, theirs[1] * batch.mask, atol=1e-5, rtol=1e-5)


ESTIMATORS = {
    "grpo": lambda b: grpo_advantages(*b.group(), normalize_by_std=True),
    "grpo_vectorized": lambda b: grpo_advantages(*b.group(), normalize_by_std=True),
    "rloo": lambda b: rloo_advantages(*b.group()),
    "opo": lambda b: opo_advantages(b.rewards, b.mask.sum(-1), b.groups, b.valid),
    "gpg": lambda b: gpg_advantages(*b.group(), nonzero_reward_share=1.0),
    "grpo_passk": lambda b: grpo_passk_advantages(*b.group(), normalize_by_std=True),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_group_estimators(verl, name, seed):
    batch = Batch(seed)
    config = {"norm_adv_by_std_in_grpo": True} if name == "grpo_passk" else None
    options = {} if config is None else {"config": config}

    theirs, _ = verl.ADV_ESTIMATOR_REGISTRY[name](batch.token_rewards, batch.mask.float(), batch.names, **options)

    assert_close(on_tokens(batch, ESTIMATORS[name](batch)), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_dr_grpo_and_whitened_baselines(verl, seed):
    batch = Batch(seed)
    centred = on_tokens(batch, grpo_advantages(*batch.group(), normalize_by_std=False))
    mask = batch.mask.float()

    dr_grpo, _ = verl.compute_grpo_outcome_advantage(
        batch.token_rewards, mask, batch.names, norm_adv_by_std_in_grpo=False
    )
    baseline, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(batch.token_rewards, mask, batch.names)

    assert_close(centred, dr_grpo, atol=1e-5, rtol=1e-5)
    assert_close(whiten(centred, batch.mask), baseline, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_returns_with_a_discount_and_against_a_greedy_response(verl, seed):
    batch = Batch(seed)
    discounted = discounted_returns(batch.token_rewards, batch.mask, discount=0.9)
    mask = batch.mask.float()

    theirs, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
        batch.token_rewards, mask, config=SimpleNamespace(gamma=0.9)
    )
    remax, _ = verl.compute_remax_outcome_advantage(batch.token_rewards, batch.greedy, mask)

    assert_close(whiten(discounted, batch.mask), theirs, atol=1e-5, rtol=1e-5)
    assert_close(remax_advantages(batch.token_rewards, batch.greedy, batch.mask), remax, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_token_baseline(verl, seed):
    batch = Batch(seed)
    weights = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(seed))

    theirs, _ = verl.compute_optimal_token_baseline_advantage(
        batch.token_rewards, batch.mask.float(), batch.names, batch.old_log_probs, batch.squares, weights
    )
    advantages = optimal_token_baseline_advantages(
        batch.token_rewards, batch.old_log_probs, batch.squares, weights, batch.mask, batch.groups, batch.valid
    )

    assert_close(advantages, theirs * batch.mask, atol=1e-4, rtol=1e-4)


LOSSES = {
    "vanilla": lambda args: ppo_clip_loss(*args, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "gspo": lambda args: gspo_loss(*args, clip_low=0.2, clip_high=0.28),
    "sapo": lambda args: sapo_loss(*args, temperature_positive=1.0, temperature_negative=1.05),
    "cispo": lambda args: cispo_loss(*args, clip_low=0.2, clip_high=0.28),
    "gpg": lambda args: reinforce_loss(args[0], args[2], args[3]),
    "dro": lambda args: dro_loss(*args, beta=0.1),
    "dppo_tv": lambda args: dppo(inside_total_variation, *args),
    "dppo_kl": lambda args: dppo(inside_binary_kl, *args),
}


def dppo(region, *args: Tensor) -> Tensor:
    """Divergence PPO in a trust region."""
    return dppo_loss(*args[:3], region(*args, bound_low=0.2, bound_high=0.28), max_ratio=20.0)


def our_loss(name: str, batch: Batch, aggregation: str) -> tuple[Tensor, Tensor]:
    """A loss and its gradient."""
    args = batch.ratio()
    totals = {"num_tokens": batch.mask.sum(), "num_sequences": torch.tensor(24), "max_response_length": 9}
    loss = (LOSSES[name](args) * token_weights(batch.mask, aggregation, **totals)).sum()
    loss.backward()
    return loss.detach(), args[0].grad


def their_loss(verl, name: str, batch: Batch, aggregation: str) -> tuple[Tensor, Tensor]:
    """The same of verl's."""
    log_probs = batch.log_probs.clone().requires_grad_()
    inputs = (batch.old_log_probs, log_probs, batch.advantages, batch.mask.float(), aggregation)
    loss, _ = verl.POLICY_LOSS_REGISTRY[name](*inputs, config(name))
    loss.backward()
    return loss.detach(), log_probs.grad


def config(name: str):
    """verl's options for the numbers in `LOSSES`."""
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=20.0 if name.startswith("dppo") else 3.0,
        tau_pos=1.0,
        tau_neg=1.05,
        policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.1),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_and_gradients(verl, name, aggregation, seed):
    if name == "sapo":  # see `test_differs_from_verl_in_the_aggregation_of_sapo`
        aggregation = "seq-mean-token-mean"

    loss, gradient = our_loss(name, Batch(seed), aggregation)
    their, their_gradient = their_loss(verl, name, Batch(seed), aggregation)

    assert_close(loss, their, atol=1e-5, rtol=1e-5)
    assert_close(gradient, their_gradient, atol=1e-5, rtol=1e-5)


def test_differs_from_verl_in_the_aggregation_of_sapo(verl):
    """verl's takes means of sequences whatever is asked; ours does what is asked."""
    batch = Batch(0)

    theirs = [their_loss(verl, "sapo", batch, aggregation)[0] for aggregation in ("token-mean", "seq-mean-token-mean")]
    mine = [our_loss("sapo", batch, aggregation)[0] for aggregation in ("token-mean", "seq-mean-token-mean")]

    assert theirs[0] == theirs[1]
    assert abs(mine[0] - mine[1]) > 1e-3


def test_differs_from_verl_for_a_group_of_one(verl):
    """verl gives its reward as its advantage; ours is 0, since there is nothing to compare with."""
    rewards, mask = torch.tensor([[0.0, 2.0]]), torch.ones(1, 2)

    theirs, _ = verl.compute_grpo_outcome_advantage(rewards, mask, np.array(["a"]))
    mine = grpo_advantages(rewards.sum(-1), torch.tensor([0]), torch.tensor([True]), normalize_by_std=True)

    assert theirs[0, 0] > 1
    assert mine[0] == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("ours_name", "theirs_name"), [("k1", "kl"), ("abs", "abs"), ("k2", "mse"), ("k3", "k3")])
def test_kl_estimators(verl, ours_name, theirs_name, seed):
    batch = Batch(seed)

    theirs = verl.kl_penalty(batch.log_probs, batch.old_log_probs, theirs_name)

    mine = getattr(our_kl, f"kl_{ours_name}")(batch.log_probs, batch.old_log_probs, batch.mask)
    assert_close(mine, theirs * batch.mask, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(verl, seed):
    batch = Batch(seed)
    values = batch.values.clone().requires_grad_()
    old, returns = batch.values + 0.4 * batch.advantages, batch.advantages
    loss = clipped_value_loss(values, old, returns, batch.mask, clip=0.5).sum() / batch.mask.sum()

    theirs, _ = verl.compute_value_loss(values, returns, old, batch.mask.float(), 0.5)

    assert_close(loss, theirs, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def verl_correction():
    """verl's rollout corrections."""
    return pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("band", [(0.0, 1.2), (0.8, 1.2)])
def test_importance_weights(verl_correction, band, level, seed):
    batch, (low, high) = Batch(seed), band
    log_ratio = mismatch_log_ratio(batch.log_probs, batch.old_log_probs, batch.mask)

    threshold = f"{low}_{high}" if low else high
    theirs, metrics = verl_correction.compute_rollout_correction_weights(
        batch.log_probs - batch.old_log_probs, batch.mask.float(), level, threshold
    )

    raw = getattr(correction, f"{level}_importance_weights")(log_ratio, batch.mask)
    mine = icepop_weights(raw, low=low, high=high) if low else truncated_weights(raw, cap=high)
    assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    if level == "token":
        size = effective_sample_size(weight_moments(mine, batch.mask))
        assert_close(size.item(), metrics["rollout_is_eff_sample_size"], atol=1e-5, rtol=1e-5)


LEVELS = {"token": "token", "sequence-sum": "seq_sum", "sequence-mean": "seq_mean", "sequence-max": "seq_max"}
BANDS = {"k1": (-0.1, 0.2), "k2": (0.0, 0.05), "k3": (0.0, 0.05)}
REJECTIONS = [(level, name) for level in LEVELS for name in BANDS if (level, name) != ("sequence-max", "k1")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("level", "statistic"), REJECTIONS)
def test_rejection(verl_correction, level, statistic, seed):
    """verl's k1 is the log-ratio of engine over trainer and its bounds are ratios."""
    batch, (low, high) = Batch(seed), BANDS[statistic]
    log_ratio = mismatch_log_ratio(batch.log_probs, batch.old_log_probs, batch.mask)
    threshold = f"{np.exp(-high)}_{np.exp(-low)}" if statistic == "k1" else str(high)

    theirs, _ = verl_correction.compute_rollout_rejection_mask(
        log_ratio, batch.mask.float(), f"{LEVELS[level]}_{statistic}", threshold
    )

    mine = Rejection(statistic, level, low=low, high=high)(log_ratio, batch.mask).response_mask
    assert_close(mine.float(), theirs)
    assert 0 < mine.sum() < batch.mask.sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_adaptive_kl(verl, seed):
    kl = 0.05 + 0.05 * seed
    theirs = verl.AdaptiveKLController(0.2, 0.1, 100)
    theirs.update(kl, 10)

    mine = our_kl.adaptive_kl_coef(0.2, kl, target=0.1, num_samples=10, horizon=100)

    assert mine == pytest.approx(theirs.value, rel=1e-6)
