"""Writes a page for each method of PPOModule from its docstrings: ``python docs/make_algorithms.py``.

A test fails when the pages are not what this script would write.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from docstring_parser import Docstring, DocstringStyle
from docstring_parser import parse as parse_any

from verl_lightning.functional import advantages as estimators
from verl_lightning.functional import correction
from verl_lightning.functional import policy_losses as losses
from verl_lightning.functional.normalizer import token_weights
from verl_lightning.modules import advantages, corrections, policy_losses
from verl_lightning.types import Experience

HERE = Path(__file__).parent
MATHS = {
    "GAE": [estimators.gae],
    "GRPO": [estimators.grpo_advantages],
    "RLOO": [estimators.rloo_advantages],
    "ReinforcePlusPlus": [estimators.discounted_returns],
    "ReinforcePlusPlusBaseline": [estimators.grpo_advantages],
    "ReMax": [estimators.remax_advantages],
    "OPO": [estimators.opo_advantages],
    "GPG": [estimators.gpg_advantages],
    "GRPOPassK": [estimators.grpo_passk_advantages],
    "GDPO": [estimators.gdpo_advantages],
    "OptimalTokenBaseline": [estimators.optimal_token_baseline_advantages],
    "PPOClip": [losses.ppo_clip_loss],
    "GSPO": [losses.gspo_loss],
    "GeoMean": [losses.geo_mean_loss],
    "CISPO": [losses.cispo_loss],
    "ClipCov": [losses.clip_cov_loss, losses.select_at_random],
    "KLCov": [losses.kl_cov_loss, losses.select_top],
    "Reinforce": [losses.reinforce_loss],
    "GPGLoss": [losses.reinforce_loss],
    "SAPO": [losses.sapo_loss],
    "VESPO": [losses.vespo_loss],
    "DRO": [losses.dro_loss],
    "DPPOTV": [losses.dppo_loss, losses.inside_total_variation],
    "DPPOKL": [losses.dppo_loss, losses.inside_binary_kl],
    "TruncatedImportanceSampling": [correction.token_importance_weights, correction.truncated_weights],
    "IcePop": [correction.token_importance_weights, correction.icepop_weights],
    "SequenceMask": [correction.sequence_importance_weights, correction.icepop_weights],
    "Rejection": [correction.keep_tokens, correction.keep_sequences],
}
GROUPS = {
    "advantage": ("Advantage estimators", advantages.AdvantageEstimator),
    "policy_loss": ("Policy losses", policy_losses.PolicyLoss),
    "corrections": ("Rollout corrections", corrections.RolloutCorrection),
}
METRICS = {
    "advantage": ["critic/advantages/{mean,max,min}", "critic/score/{mean,max,min}", "critic/rewards/{mean,max,min}"],
    "policy_loss": ["actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy", "actor/on_policy_ratio_error"],
    "corrections": [
        "rollout_corr/{abs_log_prob_gap,kl,gen_kl_error,token_mult_prob_error,weight,zero_weight_frac,rejected_frac}",
        "rollout_corr/effective_sample_size",
    ],
}
"""What every method of a slot logs."""
CRITIC_METRICS = [
    "critic/{returns,values}/{mean,max,min}",
    "critic/{vf_loss,vf_clipfrac,vpred_mean,vf_explained_var,grad_norm,lr}",
]


def parse(text: str) -> Docstring:
    """A docstring in Google's style."""
    return parse_any(text, style=DocstringStyle.GOOGLE)


def methods(base: type) -> list[type]:
    """Every method that users can name, in the order of the source."""
    found = [cls for child in base.__subclasses__() for cls in (child, *methods(child))]
    ours = [cls for cls in found if cls.__module__.startswith("verl_lightning.")]
    return [cls for cls in ours if not cls.__name__.startswith("_") and not inspect.isabstract(cls)]


def options(method: type) -> str:
    """A table of the constructor's options."""
    parameters = list(inspect.signature(method).parameters.values())
    described = {item.arg_name: item.description or "" for item in parse(inspect.getdoc(method) or "").params}
    if not parameters:
        return "It has no options.\n"
    rows = [f"| `{p.name}` | `{p.default!r}` | {' '.join(described[p.name].split())} |" for p in parameters]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) + "\n"


def summary(text: str) -> str:
    """A docstring without its sections."""
    parsed = parse(text)
    return "\n\n".join(part for part in (parsed.short_description, parsed.long_description) if part)


def page(slot: str, method: type) -> str:
    """The page of one method."""
    name = method.__name__
    parts = [
        f"# {name}",
        summary(inspect.getdoc(method) or ""),
        f"```yaml\nmodel:\n  init_args:\n    {choice(slot, name)}\n```",
    ]
    parts += ["## Options", options(method), "## Maths"]
    for function in MATHS[name]:
        parts += [f"### `{function.__name__}`", f"```text\n{inspect.getdoc(function)}\n```"]
    return "\n\n".join([*parts, "## Metrics", ", ".join(f"`{name}`" for name in metrics(slot, method))]) + "\n"


def metrics(slot: str, method: type) -> list[str]:
    """What the method logs: a loss is asked, on one token."""
    own: list[str] = []
    if issubclass(method, advantages.AdvantageEstimator):
        own = ["train/frac_zero_std"] * method.needs_groups + CRITIC_METRICS * method.needs_critic
    if issubclass(method, policy_losses.PolicyLoss):
        token, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
        batch = Experience(
            input_ids=mask.long(),
            attention_mask=mask,
            response_mask=mask,
            rollout_log_probs=token,
            old_log_probs=token,
            advantages=token,
        )
        own = list(method().for_step(token[0], token[0])(token, batch)[1])
    return METRICS[slot] + own


def choice(slot: str, name: str) -> str:
    """How YAML names the method."""
    return f"{slot}: [{{class_path: {name}}}]" if slot == "corrections" else f"{slot}: {{class_path: {name}}}"


def pages() -> dict[str, str]:
    """Every page by its path below ``docs``."""
    written, index = (
        {},
        ["# Algorithms", "Each is one option of the same `PPOModule`; recipes are in `examples/recipes`."],
    )
    for slot, (title, base) in GROUPS.items():
        rows = []
        for method in methods(base):
            written[f"algorithms/{method.__name__}.md"] = page(slot, method)
            short = parse(inspect.getdoc(method) or "").short_description or ""
            rows.append(f"| [{method.__name__}](algorithms/{method.__name__}.md) | {' '.join(short.split())} |")
        index += [f"## {title}: `model.{slot}`", "\n".join(["| class | what it does |", "|---|---|", *rows])]
    index += ["## Aggregations: `model.update.aggregation`", f"```text\n{inspect.getdoc(token_weights)}\n```"]
    return {"algorithms.md": "\n\n".join(index) + "\n"} | written


def main() -> None:
    """Write all pages."""
    (HERE / "algorithms").mkdir(exist_ok=True)
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
