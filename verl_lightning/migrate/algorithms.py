"""Translates verl's estimators, losses, penalties and corrections."""

from __future__ import annotations

import math
import re
from typing import Any

from verl_lightning.migrate.composing import NUMBER
from verl_lightning.migrate.parts import Findings, Remark, Setting, VerlConfig

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
ESTIMATORS = {
    "gae": "GAE",
    "grpo": "GRPO",
    "grpo_vectorized": "GRPO",
    "rloo": "RLOO",
    "rloo_vectorized": "RLOO",
    "reinforce_plus_plus": "ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": "ReinforcePlusPlusBaseline",
    "remax": "ReMax",
    "opo": "OPO",
    "gpg": "GPG",
    "grpo_passk": "GRPOPassK",
    "gdpo": "GDPO",
    "optimal_token_baseline": "OptimalTokenBaseline",
    "tir_optimal_token_baseline": "OptimalTokenBaseline",  # which skips what is read between turns
}
"""Our class for each of verl's `adv_estimator`."""

CLIPPED = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}
BOUNDED = {"bound_low": "clip_ratio_low", "bound_high": "clip_ratio_high", "max_ratio": "clip_ratio_c"}
LOSSES: dict[str, tuple[str, dict[str, str]]] = {
    "vanilla": ("PPOClip", CLIPPED | {"dual_clip": "clip_ratio_c"}),
    "gspo": ("GSPO", CLIPPED),
    "geo_mean": ("GeoMean", CLIPPED),
    "cispo": ("CISPO", CLIPPED),
    "clip_cov": (
        "ClipCov",
        CLIPPED
        | {
            "fraction": "policy_loss.clip_cov_ratio",
            "covariance_low": "policy_loss.clip_cov_lb",
            "covariance_high": "policy_loss.clip_cov_ub",
        },
    ),
    "kl_cov": ("KLCov", {"fraction": "policy_loss.kl_cov_ratio", "coef": "policy_loss.ppo_kl_coef"}),
    "sapo": ("SAPO", {"temperature_positive": "tau_pos", "temperature_negative": "tau_neg"}),
    "gpg": ("GPGLoss", {}),
    "dro": ("DRO", {"beta": "policy_loss.dro_beta"}),
    "dppo_tv": ("DPPOTV", BOUNDED),
    "dppo_kl": ("DPPOKL", BOUNDED),
}
"""Our class and its options, by verl's keys, for each `loss_mode`."""

LOWEST_RATIO = {"CISPO": 1.0, "PPOClip": 0.999999, "GSPO": 0.999999, "ClipCov": 0.999999}
"""The largest `clip_low` of losses that clip ratios; above it verl's bound is never met."""

SEQUENCE_MEANS = ("sapo", "geo_mean")
"""Losses that verl averages over each response and then over responses, whatever `loss_agg_mode` says."""

LOSS_OPTIONS = sorted({key for _, options in LOSSES.values() for key in options.values()} | {"clip_ratio"})
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ALGORITHM_DEFAULTS: dict[str, Any] = {
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.filter_groups.enable": False,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.bypass_mode": False,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.clip_cov_ratio": 2e-4,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 2e-4,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
}


def translate_advantage(verl: VerlConfig) -> Findings:
    """Translates the estimator of advantages and its options."""
    key = "algorithm.adv_estimator"
    name = str(verl[key]).rsplit(".", 1)[-1].lower()
    if name not in ESTIMATORS:
        yield Remark(source=key, reason=f"there is no estimator {name}; `GRPO` in its place")
    ours = ESTIMATORS.get(name, "GRPO")
    yield Setting(key="model.init_args.advantage.class_path", value=ours, sources=(key,) if name in ESTIMATORS else ())
    options = {"GAE": ["gamma", "lam"], "ReinforcePlusPlus": ["gamma"]}.get(ours, [])
    if ours == "GDPO":
        yield from translate_weights(verl)
    for option in ("gamma", "lam"):
        source = f"algorithm.{option}"
        if option in options:
            yield Setting(
                key=f"model.init_args.advantage.init_args.{option}", value=verl.number(source), sources=(source,)
            )
        elif source in verl.given:
            yield Remark(source=source, reason=f"`{ours}` does not discount", needed=False)
    source = "algorithm.norm_adv_by_std_in_grpo"
    if ours in ("GRPO", "GRPOPassK"):
        target = "model.init_args.advantage.init_args.normalize_by_std"
        yield Setting(key=target, value=bool(verl[source]), sources=(source,))
    elif source in verl.given:
        yield Remark(source=source, reason=f"for GRPO; `{ours}` is in use", needed=False)


def translate_weights(verl: VerlConfig) -> Findings:
    """Translates the rewards of GDPO, each by the name under which the reward function returns it."""
    keys, weights = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
    names = verl[keys] if isinstance(verl[keys], list) else []
    factors = verl[weights] if isinstance(verl[weights], list) else [1.0] * len(names)
    if not names or len(factors) != len(names):
        yield Remark(source="algorithm.adv_estimator", reason="set `model.advantage.weights` to each reward's weight")
    value = {str(name): float(factor) for name, factor in zip(names, factors, strict=False)}
    sources = (keys, weights) if weights in verl.given else (keys,)
    yield Setting(key="model.init_args.advantage.init_args.weights", value=value or {"score": 1.0}, sources=sources)


def translate_loss(verl: VerlConfig) -> Findings:
    """Translates the policy loss of response tokens and its options."""
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = str(verl[key])
    if mode not in LOSSES:
        yield Remark(source=key, reason=f"there is no loss {mode}; `PPOClip` in its place")
    ours, options = LOSSES.get(mode, LOSSES["vanilla"])
    group = "model.init_args.policy_loss"
    yield Setting(key=f"{group}.class_path", value=ours, sources=(key,) if mode in LOSSES else ())
    for name, verl_name in options.items():
        source = verl_name
        if verl_name in CLIPPED.values() and verl[f"{ACTOR}.{verl_name}"] is None:
            source = "clip_ratio"  # as verl does for a bound that is null
        if verl[f"{ACTOR}.{source}"] is not None:
            key = f"{ACTOR}.{source}"
            value, most = verl.number(key), LOWEST_RATIO.get(ours, math.inf) if name == "clip_low" else math.inf
            note = "no lower bound: a ratio is never below 0" if value > most else ""
            yield Setting(key=f"{group}.init_args.{name}", value=min(value, most), sources=(key,), note=note)
    for name in LOSS_OPTIONS:
        source = f"{ACTOR}.{name}"
        if source in verl.given and name not in options.values():
            yield Remark(source=source, reason=f"verl's loss `{mode}` does not read it", needed=False)


def translate_kl(verl: VerlConfig) -> Findings:
    """Translates the penalty for leaving the reference, in the loss or in the reward."""
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    group = "model.init_args.kl"
    if verl[in_loss]:
        yield Setting(key=f"{group}.place", value="loss", sources=(in_loss,))
        coef = f"{ACTOR}.kl_loss_coef"
        yield Setting(key=f"{group}.coef", value=verl.number(coef), sources=(coef,))
        yield from translate_kl_estimator(verl, f"{ACTOR}.kl_loss_type", shapes_gradient=True)
        reason = "the penalty stands in one place, and the loss has it"
        yield Remark(source=in_reward, reason=reason, needed=bool(verl[in_reward]))
    elif verl[in_reward]:
        yield Setting(key=f"{group}.place", value="reward", sources=(in_reward, in_loss))
        coef = "algorithm.kl_ctrl.kl_coef"
        yield Setting(key=f"{group}.coef", value=verl.number(coef), sources=(coef,))
        yield from translate_kl_estimator(verl, "algorithm.kl_penalty", shapes_gradient=False)
        if verl["algorithm.kl_ctrl.type"] == "adaptive":
            steering = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.type")
            yield Setting(key=f"{group}.target", value=verl.number(steering[0]), sources=steering)
            horizon = "algorithm.kl_ctrl.horizon"
            yield Setting(key=f"{group}.horizon", value=verl.whole(horizon), sources=(horizon,))
    else:
        yield Setting(key=group, value=None, sources=(in_loss, in_reward))
    yield from unused_kl(verl, bool(verl[in_loss]), bool(verl[in_reward]))


def translate_kl_estimator(verl: VerlConfig, source: str, *, shapes_gradient: bool) -> Findings:
    """Translates the estimator of the KL, by the key that names it."""
    name = str(verl[source])
    ours = KL.get(name.removesuffix("+"))
    straight = name.endswith("+") and shapes_gradient and ours != "k2"
    if ours is None:
        yield Remark(source=source, reason=f"there is no estimator {name}; k3 in its place")
    value = f"{ours or 'k3'}_straight_through" if straight else ours or "k3"
    yield Setting(key="model.init_args.kl.estimator", value=value, sources=(source,) if ours else ())


def unused_kl(verl: VerlConfig, in_loss: bool, in_reward: bool) -> Findings:
    """Says of the options of a penalty that is off, or of a place that is not taken, that nothing reads them."""
    loss_keys = [f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"]
    control = ["type", "kl_coef", "horizon", "target_kl"]
    reward_keys = ["algorithm.kl_penalty", *(f"algorithm.kl_ctrl.{name}" for name in control)]
    unused = ([] if in_loss else loss_keys) + (reward_keys if in_loss or not in_reward else [])
    for key in unused:
        if key in verl.given:
            yield Remark(source=key, reason="this penalty is off", needed=False)
    if in_reward and not in_loss and verl["algorithm.kl_ctrl.type"] == "fixed":
        for name in ("type", "horizon", "target_kl"):
            if f"algorithm.kl_ctrl.{name}" in verl.given:
                yield Remark(source=f"algorithm.kl_ctrl.{name}", reason="the weight is fixed", needed=False)


def translate_correction(verl: VerlConfig) -> Findings:
    """Translates the corrections of the difference between the engine's policy and the trainer's."""
    level, cap = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
    statistic, bounds = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"
    bypass = f"{CORRECTION}.bypass_mode"
    if verl[bypass]:
        yield Setting(key="model.init_args.update.old_log_probs", value="engine", sources=(bypass,))
        yield from nothing_to_correct(verl, (level, cap, statistic, bounds), rejects=bool(verl[statistic]))
        return
    weights, rejections = read_weights(verl[level], verl[cap]), read_rejections(verl[statistic], verl[bounds])
    sources = ((level, cap) if weights else ()) + ((statistic, bounds) if rejections else ())
    if corrections := weights + rejections:
        yield Setting(key="model.init_args.corrections", value=corrections, sources=sources)
    for key in (level, statistic):
        if verl[key] and key not in sources:
            yield Remark(source=key, reason="this kind is not known; see `model.corrections` in docs/algorithms.md")
    for key in (cap, bounds):
        if key in verl.given and key not in sources:
            yield Remark(source=key, reason="of a correction that is not used here", needed=False)


def nothing_to_correct(verl: VerlConfig, keys: tuple[str, ...], *, rejects: bool) -> Findings:
    """Says of the options of corrections that we have none in `bypass_mode`, where verl does not weigh, but rejects."""
    for key in keys:
        if key in verl.given:
            reason = "ratios to the engine's log-probs, as `bypass_mode` has them, are not corrected"
            yield Remark(source=key, reason=reason, needed=rejects and key.endswith("rollout_rs"))


def read_weights(level: Any, bounds: Any) -> list[dict[str, Any]]:
    """Reads importance weights of verl's, with a cap such as ``2.0`` or a band such as ``0.5_5.0``, else none."""
    numbers = read_numbers(bounds)
    if level in ("token", "sequence") and len(numbers) == 1:
        return [correction("TruncatedImportanceSampling", level=level, cap=numbers[0])]
    if level == "token" and len(numbers) == 2:
        return [correction("IcePop", low=numbers[0], high=numbers[1])]
    return []


def read_rejections(statistics: Any, bounds: Any) -> list[dict[str, Any]]:
    """Reads rejections of verl's, such as ``seq_mean_k1,token_k3`` with ``0.999_1.001,0.1``; none if one is unknown."""
    names, limits = str(statistics).split(","), str(bounds).split(",")
    limits = limits * len(names) if len(limits) == 1 else limits
    found = [read_rejection(*pair) for pair in zip(names, limits, strict=False)]
    return [each for each in found if each] if all(found) and len(limits) == len(names) else []


def read_rejection(statistic: str, bounds: str) -> dict[str, Any] | None:
    """Reads one rejection; None if its statistic or its bounds are unknown.

    verl bounds ratios of engine over trainer where the statistic is ``k1``, divergences where it is ``k2`` or ``k3``.
    """
    match = re.fullmatch(r"\s*(token|seq_sum|seq_mean|seq_max)_(k[123])\s*", statistic)
    numbers = read_numbers(bounds)
    if match is None or not 1 <= len(numbers) <= 2 or min(numbers) <= 0:
        return None
    level, estimator = match[1].replace("seq_", "sequence-"), match[2]
    if estimator != "k1":
        return correction("Rejection", statistic=estimator, level=level, low=-1e-6, high=numbers[0])
    lowest, highest = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
    low, high = -math.log(highest), -math.log(lowest)
    return correction("Rejection", statistic="k1", level=level, low=low, high=high) if low < high else None


def read_numbers(bounds: Any) -> list[float]:
    """Reads the one or two numbers of a bound; none if it is something else."""
    parts = str(bounds).strip().split("_")
    return [float(part) for part in parts] if all(NUMBER.fullmatch(part) for part in parts) else []


def correction(name: str, **options: Any) -> dict[str, Any]:
    """Returns a correction as our YAML says it."""
    return {"class_path": name, "init_args": options}
