"""FSDP2: every process holds a part of each weight."""

from verl_lightning.strategies.fsdp.strategy import FSDPStrategy

__all__ = ["FSDPStrategy"]
