"""TRL 1.16's published losses, gradients and advantages, recorded from its package."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from verl_lightning.algorithms.advantages.grpo import grpo_advantages
from verl_lightning.algorithms.losses.cispo import cispo_loss, clipped_weights
from verl_lightning.algorithms.losses.gspo import gspo_loss
from verl_lightning.algorithms.losses.ppo_clip import clip_fractions, ppo_clip_loss
from verl_lightning.algorithms.losses.sapo import sapo_loss
from verl_lightning.algorithms.losses.vespo import vespo_loss
from verl_lightning.functional.kl import kl_k3
from verl_lightning.functional.masking import masked_mean
from verl_lightning.functional.normalizer import Aggregation, token_weights
from verl_lightning.functional.ratio import clamped_log_ratio

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "trl116_losses.json").read_text())
CASES = ORACLE["cases"]
MASK = torch.tensor(ORACLE["formula"]["mask"]).bool()
ADVANTAGES = torch.tensor(ORACLE["formula"]["advantages"]).unsqueeze(-1).expand(4, 6)
ROW, COLUMN = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
LOG_PROBS = -(0.2 + 0.1 * ((3 * ROW + 2 * COLUMN) % 7))
OLD_LOG_PROBS = LOG_PROBS - 0.5 * torch.sin(1 + ROW + 2 * COLUMN)
REF_LOG_PROBS = LOG_PROBS + 0.1 * torch.cos(2 * ROW + COLUMN)

# TRL's name for the aggregation; its "luspo" has a loss per sequence, which weighs tokens like a sum.
AGGREGATIONS: dict[str, Aggregation] = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}


def check(case: dict[str, float], losses_of, aggregation: Aggregation) -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    weights = token_weights(MASK, aggregation, num_tokens=15, num_sequences=4, max_response_length=16)

    loss = (losses_of(log_probs) * weights).sum()
    loss.backward()

    actual = [loss.detach(), log_probs.grad.norm(), log_probs.grad.sum()]
    expected = [case["loss"], case["grad_l2"], case["grad_sum"]]
    assert_close(torch.stack(actual), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def ppo(log_probs, clip_high=0.2):
    return ppo_clip_loss(
        log_probs, OLD_LOG_PROBS, ADVANTAGES, MASK, clip_low=0.2, clip_high=clip_high, dual_clip=math.inf
    )


def gspo(log_probs):
    return gspo_loss(log_probs, OLD_LOG_PROBS, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize("name", [name for name in CASES if re.fullmatch(r"\w+\|\w+\|beta=0\.\d", name)])
def test_ppo_and_gspo_match_trl(name):
    aggregation, level, beta = name.split("|")
    surrogate = {"token": ppo, "sequence": gspo}[level]
    coef = float(beta.removeprefix("beta="))

    def losses_of(log_probs):
        return surrogate(log_probs) + coef * kl_k3(log_probs, REF_LOG_PROBS, MASK)

    check(CASES[name], losses_of, AGGREGATIONS[aggregation])
    if coef:
        assert_close(masked_mean(kl_k3(LOG_PROBS, REF_LOG_PROBS, MASK), MASK), torch.tensor(CASES[name]["kl"]))


def test_clip_fraction_matches_trl():
    clipped, _ = clip_fractions(
        LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.2, dual_clip=math.inf
    )

    assert_close(masked_mean(clipped, MASK), torch.tensor(CASES["dapo|token|beta=0.0"]["clip_ratio/region_mean"]))


def test_the_clip_fraction_of_cispo_matches_trl():
    clipped = clipped_weights(LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, MASK, clip_low=1.0, clip_high=0.05)

    assert_close(masked_mean(clipped, MASK), torch.tensor(CASES["cispo|token|eps_high=1.05"]["cispo_clip_ratio"]))


def test_clip_higher_matches_trl():
    check(CASES["dapo|token|eps_high=0.05"], lambda log_probs: ppo(log_probs, clip_high=0.05), "token-mean")


def test_importance_weighted_k3_matches_trl():
    def losses_of(log_probs):
        ratio = clamped_log_ratio(log_probs, OLD_LOG_PROBS, MASK).exp()
        return ppo(log_probs) + 0.1 * ratio * kl_k3(log_probs, REF_LOG_PROBS, MASK)

    check(CASES["dapo|token|beta=0.1|bias_corrected_kl"], losses_of, "token-mean")


@pytest.mark.parametrize(
    ("name", "loss", "options"),
    [
        ("cispo|token|eps_high=1.05", cispo_loss, {"clip_low": 1.0, "clip_high": 0.05}),
        ("sapo|token", sapo_loss, {"temperature_positive": 1.0, "temperature_negative": 1.05}),
        (
            "vespo",
            vespo_loss,
            {"power_positive": 2.0, "decay_positive": 3.0, "power_negative": 3.0, "decay_negative": 2.0},
        ),
    ],
)
def test_weighted_losses_match_trl(name, loss, options):
    aggregation = "seq-mean-token-mean" if name.startswith("sapo") else "token-mean"

    check(CASES[name], lambda log_probs: loss(log_probs, OLD_LOG_PROBS, ADVANTAGES, MASK, **options), aggregation)


def test_differs_from_trl_in_the_dual_clip():
    """TRL's `delta` also caps good tokens, and lets bad tokens inside the clip's band pass it."""

    def trl_losses(log_probs):
        ratio = clamped_log_ratio(log_probs, OLD_LOG_PROBS, MASK).exp()
        capped, clipped = ratio.clamp(max=1.05), ratio.clamp(0.8, 1.2)
        return torch.maximum(-capped * ADVANTAGES, -clipped * ADVANTAGES)

    ours = ppo_clip_loss(LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.2, dual_clip=1.05)

    check(CASES["dapo|token|delta=1.05"], trl_losses, "token-mean")
    differs = MASK & ((LOG_PROBS - OLD_LOG_PROBS).exp() > 1.05)
    assert_close((ours - trl_losses(LOG_PROBS)).abs()[MASK] > 1e-6, differs[MASK])


def test_differs_from_trl_in_the_epsilon_of_grpo():
    """TRL adds 1e-4 to the std, we 1e-6; without std the two agree, and groups without signal are 0 in both."""
    oracle = ORACLE["advantages"]
    rewards, groups = torch.tensor(oracle["rewards"]), torch.arange(12) // 4
    valid = torch.ones(12, dtype=torch.bool)

    centred = grpo_advantages(rewards, groups, valid, normalize_by_std=False)
    ours = grpo_advantages(rewards, groups, valid, normalize_by_std=True)

    std = rewards.view(3, 4).std(dim=-1).repeat_interleave(4)
    assert_close(centred, torch.tensor(oracle["none"]))
    assert_close(ours * (std + 1e-6) / (std + 1e-4), torch.tensor(oracle["group"]))
