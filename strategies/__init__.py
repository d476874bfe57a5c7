"""Strategies: where tensors live, and how a mini-batch becomes a gradient."""

from typing import Any

from lightning.pytorch.strategies import FSDPStrategy as LightningFSDPStrategy
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from verl_lightning.needs import DDP_NAMES
from verl_lightning.strategies.base import PostTrainingStrategy, as_contract
from verl_lightning.strategies.ddp import DDPStrategy
from verl_lightning.strategies.fsdp import FSDPStrategy
from verl_lightning.strategies.megatron.strategy import MegatronStrategy

STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "megatron": MegatronStrategy}
"""Ours by name. `ddp` takes the place of Lightning's, as which it wraps modules of other projects; `fsdp` that of
Lightning's for FSDP1, which can neither run on CPUs nor clip a norm."""


def register_strategies(**options: dict[str, Any]) -> None:
    """Lets Lightning find our strategies by name, also where `auto` chooses one.

    Args:
        options: Keyword arguments of each strategy that does not take its defaults.
    """
    # Lightning's list of the names of its FSDP1, which it refuses beside any accelerator but GPUs.
    if (lightnings := LightningFSDPStrategy.get_registered_strategies()).count("fsdp"):
        lightnings.remove("fsdp")
    for name, kind in STRATEGIES.items():
        first_line = (kind.__doc__ or "").splitlines()[0]
        StrategyRegistry.register(name, kind, description=first_line, override=True, **options.get(name, {}))
    for name, finds in DDP_NAMES.items():
        chosen = options.get("ddp", {}) | {"find_unused_parameters": finds}
        StrategyRegistry.register(name, DDPStrategy, description="`ddp` with this setting", override=True, **chosen)


register_strategies()

__all__ = [
    "STRATEGIES",
    "DDPStrategy",
    "FSDPStrategy",
    "MegatronStrategy",
    "PostTrainingStrategy",
    "as_contract",
    "register_strategies",
]
