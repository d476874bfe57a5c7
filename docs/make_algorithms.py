"""Writes a page for each method of PPOModule and DPOModule from its docstrings: ``python docs/make_algorithms.py``.

A test fails when the pages are not what this script would write.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from docstring_parser import Docstring, DocstringStyle
from docstring_parser import parse as parse_any

from verl_lightning.algorithms import advantages, corrections, losses, preferences
from verl_lightning.algorithms.advantages.base import AdvantageEstimator
from verl_lightning.algorithms.losses.base import PolicyLoss
from verl_lightning.algorithms.preferences.base import PreferenceLoss
from verl_lightning.functional.normalizer import token_weights
from verl_lightning.types import Experience

HERE = Path(__file__).parent
GROUPS = {
    "advantage": ("Advantage estimators", advantages.METHODS),
    "policy_loss": ("Policy losses", losses.METHODS),
    "corrections": ("Rollout corrections", corrections.METHODS),
    "loss": ("Preference losses", preferences.METHODS),
}
SHARED_MATHS = ("verl_lightning.functional.mismatch", "verl_lightning.functional.returns")
"""Files of `functional` whose formulas are a method's own, beside those in its file."""
METRICS = {
    "advantage": ["critic/advantages/{mean,max,min}", "critic/score/{mean,max,min}", "critic/rewards/{mean,max,min}"],
    "policy_loss": ["actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy", "actor/on_policy_ratio_error"],
    "corrections": [
        "rollout_corr/{abs_log_prob_gap,kl,gen_kl_error,token_mult_prob_error,weight,zero_weight_frac,rejected_frac}",
        "rollout_corr/effective_sample_size",
    ],
    "loss": [
        "train/loss",
        "rewards/{chosen,rejected,margins}",
        "logps/{chosen,rejected}",
        "train/grad_norm",
        "train/lr",
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


def maths(method: type) -> list[Callable[..., object]]:
    """The formulas that a method's code names, of the algorithms' files and of the shared maths."""
    found: dict[str, Callable[..., object]] = {}
    for cls in method.__mro__:
        if not cls.__module__.startswith("verl_lightning.algorithms.") or cls.__module__.endswith(".base"):
            continue
        names = re.findall(r"\b[a-z_]\w*\b", inspect.getsource(cls))
        members = {name: getattr(sys.modules[cls.__module__], name, None) for name in names}
        found |= {name: member for name, member in members.items() if inspect.isfunction(member) and is_formula(member)}
    return list(found.values())


def is_formula(function: Callable[..., object]) -> bool:
    """Tells a formula from a helper that checks options or gathers arguments."""
    file = function.__module__
    is_method = file.startswith("verl_lightning.algorithms.") and not file.endswith((".base", ".checks", ".discovery"))
    return (is_method or file in SHARED_MATHS) and not function.__name__.startswith("_")


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
    for function in maths(method):
        parts += [f"### `{function.__name__}`", f"```text\n{inspect.getdoc(function)}\n```"]
    return "\n\n".join([*parts, "## Metrics", ", ".join(f"`{name}`" for name in metrics(slot, method))]) + "\n"


def metrics(slot: str, method: type) -> list[str]:
    """What the method logs: a loss is asked, on one token."""
    own: list[str] = []
    if issubclass(method, AdvantageEstimator):
        own = ["train/frac_zero_std"] * method.needs_groups + CRITIC_METRICS * method.needs_critic
    if issubclass(method, PreferenceLoss):
        own = ["rewards/accuracies"] * method.is_paired + list(method.metrics)
    if issubclass(method, PolicyLoss):
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
        [
            "# Algorithms",
            "Each is one option of the same `PPOModule`, or of `DPOModule`; recipes are in `examples/recipes`.",
        ],
    )
    for slot, (title, methods) in GROUPS.items():
        rows = []
        for method in methods.values():
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
