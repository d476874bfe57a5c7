"""A warning for weights in 16 bits, whose steps are too large for most updates at a small learning rate."""

from __future__ import annotations

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from verl_lightning.models.size import ModelRole

SAMPLES = 4096
"""Values of each weight that are looked at."""

ENOUGH = 0.5
"""Share of a model's weights that a step must be able to change."""


class WarnOfLostUpdates(Callback):
    """Says before the first step which models' updates would mostly be rounded away."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        roles: list[ModelRole] = pl_module.roles  # type: ignore[assignment]
        trained = [role for role in roles if role.trainable]
        for role, optimizer in zip(trained, trainer.optimizers, strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            share = changeable_share(parameters, role.config.optim.lr)
            if share < ENOUGH:
                rank_zero_warn(_warning(role, share, str(trainer.precision)))


def changeable_share(parameters: list[Tensor], lr: float) -> float:
    """Share of values whose stored number changes when AdamW's first step, as large as the learning rate, is added.

    Args:
        parameters: Parameters of an optimizer; of sharded ones this rank's part is looked at.
        lr: The learning rate.
    """
    total, changed = 0, 0.0
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        stored = local.detach().flatten()
        stored = stored[:: max(1, len(stored) // SAMPLES)]
        if len(stored):
            moved = (stored.float() + lr).to(stored.dtype) != stored
            changed += local.numel() * (1.0 if stored.dtype == torch.float32 else float(moved.float().mean()))
        total += local.numel()
    return changed / total if total else 1.0


def _warning(role: ModelRole, share: float, precision: str) -> str:
    of_trainer = precision.endswith("-true") and precision.startswith(("bf16", "16"))
    cause = f"`trainer.precision: {precision}`" if of_trainer else f"`{role.key}.dtype: {role.config.dtype}`"
    way_out = "`trainer.precision: bf16-mixed`"
    if role.config.dtype != "float32":
        way_out = f"`{role.key}.dtype: float32` and {way_out}"
    return (
        f"{cause} stores the {role.name}'s weights in 16 bits: a step of `{role.key}.optim.lr`"
        f" ({role.config.optim.lr:g}) changes about {share:.1%} of them, and is rounded away in the others."
        f" Keep weights in float32 and compute in bfloat16: {way_out}."
    )
