"""Our losses beside TRL's published package on random ragged batches: ``pytest -m oracle``, where TRL is installed.

Written against TRL 1.16.0, whose loss is a method of its trainer; it gets our log-probs instead of a model's.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.testing import assert_close

from tests.algorithms.test_verl_package import Batch
from verl_lightning.algorithms.losses.cispo import cispo_loss
from verl_lightning.algorithms.losses.gspo import gspo_loss
from verl_lightning.algorithms.losses.ppo_clip import ppo_clip_loss
from verl_lightning.algorithms.losses.sapo import sapo_loss
from verl_lightning.algorithms.losses.vespo import vespo_loss
from verl_lightning.functional.kl import kl_k3
from verl_lightning.functional.normalizer import token_weights

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
SEEDS = range(5)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
PPO = {**CLIP, "dual_clip": float("inf")}
VESPO = {"power_positive": 2.0, "decay_positive": 3.0, "power_negative": 3.0, "decay_negative": 2.0}

# TRL's loss type and level of its ratio: our loss and aggregation. TRL bounds CISPO's weight from above alone.
RECIPES = {
    ("grpo", "token"): (lambda args: ppo_clip_loss(*args, **PPO), "seq-mean-token-mean"),
    ("bnpo", "token"): (lambda args: ppo_clip_loss(*args, **PPO), "token-mean"),
    ("dapo", "token"): (lambda args: ppo_clip_loss(*args, **PPO), "token-mean"),
    ("dr_grpo", "token"): (lambda args: ppo_clip_loss(*args, **PPO), "seq-mean-token-sum-norm"),
    ("grpo", "sequence"): (lambda args: gspo_loss(*args, **CLIP), "seq-mean-token-mean"),
    ("cispo", "token"): (lambda args: cispo_loss(*args, clip_low=1.0, clip_high=4.0), "token-mean"),
    ("sapo", "token"): (
        lambda args: sapo_loss(*args, temperature_positive=1.0, temperature_negative=1.05),
        "seq-mean-token-mean",
    ),
    ("vespo", "token"): (lambda args: vespo_loss(*args, **VESPO), "token-mean"),
}


@pytest.fixture(scope="module")
def trainer_class():
    """TRL's trainer: ``pip install --no-deps trl==1.16.0``."""
    return pytest.importorskip("trl").GRPOTrainer


def trl_loss(trainer_class, kind: str, level: str, batch: Batch, *, beta: float = 0.0) -> tuple[Tensor, Tensor]:
    """TRL's loss and its gradient."""
    log_probs = batch.log_probs.clone().requires_grad_()
    args = SimpleNamespace(
        delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, steps_per_generation=1,
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=args, loss_type=kind, importance_sampling_level=level, beta=beta, epsilon_low=0.2,
        epsilon_high=5.0 if kind == "cispo" else 0.28, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        use_vllm=False, vllm_importance_sampling_correction=False, aux_loss_enabled=False,
        _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1, max_completion_length=9,
        model=SimpleNamespace(training=True), accelerator=Accelerator(cpu=True),
        _metrics={"train": defaultdict(list)}, get_gamma_weights=trainer_class.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, torch.zeros_like(log_probs), None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(24, 1, dtype=torch.long), "prompt_mask": torch.ones(24, 1, dtype=torch.long),
        "completion_ids": torch.zeros(24, 9, dtype=torch.long), "completion_mask": batch.mask.long(),
        "advantages": batch.rewards, "old_per_token_logps": batch.old_log_probs,
        "ref_per_token_logps": batch.old_log_probs, "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    loss = trainer_class._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), log_probs.grad


def our_loss(loss_of, aggregation: str, batch: Batch, *, beta: float = 0.0) -> tuple[Tensor, Tensor]:
    """Ours and its gradient."""
    log_probs = batch.log_probs.clone().requires_grad_()
    values = loss_of((log_probs, batch.old_log_probs, batch.rewards[:, None] * batch.mask, batch.mask))
    values = values + beta * kl_k3(log_probs, batch.old_log_probs, batch.mask)
    totals = {"num_tokens": batch.mask.sum(), "num_sequences": torch.tensor(24), "max_response_length": 9}
    loss = (values * token_weights(batch.mask, aggregation, **totals)).sum()
    loss.backward()
    return loss.detach(), log_probs.grad


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "level"), RECIPES)
def test_losses_and_gradients(trainer_class, kind, level, beta, seed):
    loss_of, aggregation = RECIPES[kind, level]

    loss, gradient = our_loss(loss_of, aggregation, Batch(seed), beta=beta)
    their, their_gradient = trl_loss(trainer_class, kind, level, Batch(seed), beta=beta)

    assert_close(loss, their, atol=1e-5, rtol=1e-5)
    assert_close(gradient, their_gradient, atol=1e-5, rtol=1e-5)
