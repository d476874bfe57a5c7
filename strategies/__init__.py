"""Strategies: where tensors live, and how a mini-batch becomes a gradient."""

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from verl_lightning.strategies.base import PostTrainingStrategy, as_contract
from verl_lightning.strategies.ddp import DDPStrategy

STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDPStrategy}
"""Ours by name. `ddp` takes the place of Lightning's, which it equals for modules of other projects."""

for _name, _class in STRATEGIES.items():
    StrategyRegistry.register(_name, _class, description=(_class.__doc__ or "").splitlines()[0], override=True)

__all__ = ["STRATEGIES", "DDPStrategy", "PostTrainingStrategy", "as_contract"]
