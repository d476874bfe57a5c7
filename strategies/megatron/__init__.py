"""Megatron-Core under Lightning: tensor, pipeline, context and expert parallelism, with the distributed optimizer."""
