"""Chooses how many tokens a forward and backward pass takes, by the run's memory plan."""

from __future__ import annotations

from typing import Protocol

from verl_lightning.telemetry.memory_plan import RESERVED_SHARE, PlannedModule, engine_memory

MOST_TOKENS = {"cuda": 32768, "cpu": 4096}
"""Largest pass by type of device: beyond it nothing is gained, on CPUs since caches no longer hold activations."""

SHARE = 0.5
"""Part of the memory left beside models and engine that a pass may take: the plan is an estimate, allocators leave
gaps, and an engine that stays awake takes what a pass leaves."""


class SizedModule(PlannedModule, Protocol):
    """A module whose longest sequence may be known."""

    @property
    def max_tokens(self) -> int | None:
        """Longest sequence, in tokens; None where not known."""


def planned_tokens(module: SizedModule) -> int:
    """Returns the tokens of a pass: what fits, at least the longest sequence.

    Args:
        module: Module with its trainer.
    """
    sizes = module.model_sizes
    least = module.max_tokens or 1
    most = max(least, MOST_TOKENS.get(module.contract.root_device.type, MOST_TOKENS["cpu"]))
    _, device_bytes = sizes.device
    resting = sum(memory.resting for memory in sizes.memory(least).values())
    free = (1 - RESERVED_SHARE) * device_bytes - resting - engine_memory(module, device_bytes).learning
    while most > least and max(memory.working for memory in sizes.memory(most).values()) > SHARE * free:
        most = max(least, most * 3 // 4)
    return most
