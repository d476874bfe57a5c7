"""Megatron-Core under Lightning: tensor, pipeline, context and expert parallelism, with the distributed optimizer."""

from verl_lightning.strategies.megatron.strategy import MegatronStrategy

__all__ = ["MegatronStrategy"]
