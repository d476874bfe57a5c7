"""Strategies: where tensors live, and how a mini-batch becomes a gradient."""

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from verl_lightning.strategies.base import PostTrainingStrategy, as_contract
from verl_lightning.strategies.ddp import DDPStrategy
from verl_lightning.strategies.fsdp import FSDPStrategy
from verl_lightning.strategies.megatron import MegatronStrategy

STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "megatron": MegatronStrategy}
"""Ours by name. `ddp` takes the place of Lightning's, which it equals for modules of other projects; `fsdp` that of
Lightning's for FSDP1, which can neither run on CPUs nor clip a norm."""

for _name, _class in STRATEGIES.items():
    StrategyRegistry.register(_name, _class, description=(_class.__doc__ or "").splitlines()[0], override=True)

__all__ = ["STRATEGIES", "DDPStrategy", "FSDPStrategy", "MegatronStrategy", "PostTrainingStrategy", "as_contract"]
