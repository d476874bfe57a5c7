"""The Ray actor that holds one replica of an engine, for `RayEngines`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_lightning.ray.actors import RuntimeEnvironment
from verl_lightning.rollout.base import Completion, Engine, Request
from verl_lightning.rollout.completions import answer
from verl_lightning.rollout.stored_weights import read_weights
from verl_lightning.rollout.weight_sums import WeightSums


class EngineActor:
    """One replica.

    Args:
        engine: Not started.
        device: Device on which it starts.
        environment: The caller's folder and modules.
    """

    def __init__(self, engine: Engine, device: torch.device, environment: RuntimeEnvironment) -> None:
        environment.enter()
        self._engine = engine
        self._device = device
        self._version: int | None = None  # None before the engine has weights
        self._has_started = False

    def ready(self) -> None:
        """Starts the engine, unless it runs."""
        if not self._has_started:
            self._engine.start(self._device)
            self._has_started = True

    def load_weights(self, version: int, weights: Sequence[Any]) -> None:
        """Loads the policy's weights.

        Args:
            version: Number of this version of the weights.
            weights: References from `store_weights`.
        """
        self.ready()  # again, if Ray has replaced this actor
        self._version = None
        self._engine.load_weights(read_weights(weights), version)
        self._version = version

    async def generate(self, version: int, weights: Sequence[Any], requests: Sequence[Request]) -> list[Completion]:
        """Samples with weights of this version, which are loaded if it has others."""
        if self._version != version:
            self.load_weights(version, weights)
        return await answer(self._engine.generate, requests)

    def drop_caches(self) -> None:
        """Forgets what was kept of prompts so far."""
        self._engine.drop_caches()

    def weight_sums(self) -> WeightSums:
        """Sums the weights that the engine holds."""
        return self._engine.weight_sums()
