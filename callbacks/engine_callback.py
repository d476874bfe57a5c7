"""A callback with an engine: its place, its beginning and end, and its weights, which are the policy's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from verl_lightning.callbacks.canary import Canary
from verl_lightning.callbacks.placement import Placement
from verl_lightning.callbacks.replacements import Replacements
from verl_lightning.callbacks.rollout_checks import sends_adapters
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.rollout.background import Background
from verl_lightning.rollout.base import Completion, Engine, Request
from verl_lightning.rollout.stepping import SteppingEngine
from verl_lightning.rollout.weight_sums import difference_message, weight_sums
from verl_lightning.types import PromptBatch

T = TypeVar("T")


class EngineCallback(Callback):
    """Runs an engine that samples from the policy, and sends it the policy's weights.

    Args:
        placement: Place of the engines, such as `Beside` or `RayActors`; None is in the training processes.
        canary_limit: Largest gap of the canary, in nats per token; None follows the type in which both compute.

    Raises:
        ValueError: If the limit is none.
    """

    def __init__(self, placement: Placement | None, canary_limit: float | None) -> None:
        if canary_limit is not None and canary_limit <= 0:
            raise ValueError(f"`rollout.canary_limit` must be above 0 nats per token, got {canary_limit}.")
        self.placement = placement
        self._canary: Canary | None = Canary(canary_limit)
        self._replacements: Replacements | None = None
        self._engine: Engine | None = None
        self._has_started = False
        self._weights_step = -1  # `global_step` of the weights in the engine; -1 before the first
        self._weights_version = 0

    takes_adapters = False
    """True if the engine takes adapters beside its weights; see `sync_weights`."""

    @abstractmethod
    def make_engine(self, module: PostTrainingModule) -> Engine:
        """Make an engine for the module's policy, without starting it."""

    @abstractmethod
    def check_canary(self, module: PostTrainingModule, batch: PromptBatch, canary: Canary) -> None:
        """Compare the engine's and the trainer's log-probs of the engine's own responses. Collective."""

    @property
    def background(self) -> Background | None:
        """Thread that has the engine as long as training lasts, where it samples while the policy learns."""
        return None

    def begin_version(self, module: PostTrainingModule) -> None:
        """Hear that the engine gets the next version of the weights."""

    def begin_anew(self) -> None:
        """Hear that an engine takes a dead one's place."""

    def place_engine(self, module: PostTrainingModule) -> None:
        """Make an engine at its place, without starting it."""
        self._weights_step, self._has_started = -1, False
        if self._canary is not None:
            self._canary.forget()
        self._engine = self._place(module)

    def _place(self, module: PostTrainingModule) -> Engine:
        """Make an engine at its place."""
        engine, placement = self.make_engine(module), self.placement
        if placement is None:
            return engine
        if not isinstance(engine, SteppingEngine):
            kind = type(engine).__name__
            raise MisconfigurationException(f"`rollout.placement` can't place a `{kind}`. Leave it out.")
        placed = placement.place(engine, module)
        if placement.max_restarts is not None:
            self._replacements = Replacements(
                placement.max_restarts,
                replace=lambda module: self._replace(placed, module),
                sync_weights=self._send_weights,
            )
        return placed

    def _replace(self, engine: Engine, module: PostTrainingModule) -> None:
        """Start this rank's engine anew, unless it lives."""
        engine.start(module.device)
        self.begin_anew()

    def _make_ready(self, trainer: Trainer) -> None:
        """Start the engine unless it runs. Collective.

        Not in ``setup``: after that hook, Lightning frees the workspaces of cuBLAS on the device, into which the CUDA
        graphs of an engine in this process would go on writing.
        """
        if not self._has_started:
            module = cast(PostTrainingModule, trainer.lightning_module)
            self.attempt(module, lambda: self.start_engine(trainer.strategy.root_device))
            self._has_started = True

    def stop_engine(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def start_engine(self, device: torch.device) -> None:
        """Start the engine, on a device that the strategy has set up. Collective."""
        assert self._engine is not None
        self._engine.start(device)

    def sync_weights(self, module: PostTrainingModule) -> None:
        """Send the engine the policy as it is now, adapters merged in. Collective."""
        assert self._engine is not None
        self._engine.load_weights(self._weights(module), self._weights_version)

    def ready_to_answer(self, module: PostTrainingModule) -> Callable[[Request], Awaitable[Completion]]:
        """Send the running engine the policy as it is now; returns what asks it for one response. Collective."""
        assert self._engine is not None
        self.attempt(module, lambda: self._send_weights(module))
        return self._engine.generate

    def _send_weights(self, module: PostTrainingModule) -> None:
        """Send the engine a new version of the weights, under responses that are on their way too. Collective."""
        self._weights_version += 1
        self.begin_version(module)
        with self.alone(module):
            self.sync_weights(module)

    @contextmanager
    def alone(self, module: PostTrainingModule) -> Iterator[None]:
        """Have the engine to oneself: nothing is asked or sampled meanwhile, by no other process either. Collective."""
        with (
            nullcontext() if (background := self.background) is None else background.paused(),
            nullcontext() if self.placement is None else self.placement.alone(module.trainer),
        ):
            yield

    def _weights(self, module: PostTrainingModule) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights that the engine is sent. Collective."""
        return module.contract.named_weights(module.policy, self.weights_type(module))

    def weights_type(self, module: PostTrainingModule) -> torch.dtype | None:
        """Return the type of the weights that the engine is sent; None where it takes them as they are."""
        return None

    def attempt(self, module: PostTrainingModule, work: Callable[[], T]) -> T:
        """Do some work of the engine and return its result; where engines may die, it is done anew. Collective."""
        return work() if self._replacements is None else self._replacements.attempt(module, work)

    def _sync(self, module: PostTrainingModule, batch: PromptBatch) -> None:
        """Bring the engine to the newest policy. Collective."""
        if self._weights_step != module.trainer.global_step:
            with module.phase("update_weights"):
                self.attempt(module, lambda: self._send_weights(module))
            self._weights_step = module.trainer.global_step
            if self._canary is not None:
                self.check_canary(module, batch, self._canary)

    def _difference(self, module: PostTrainingModule, engine: Engine) -> str:
        """Say which weights of the engine are not those that it was sent. Collective."""
        if sends_adapters(module):
            return "Adapters alone were sent, whose sums the engine does not tell."
        dtype = self.weights_type(module)
        sent = weight_sums((name, weight.to(dtype or weight.dtype)) for name, weight in self._weights(module))
        return difference_message(sent, engine.weight_sums())

    def engine_dtype(self, module: PostTrainingModule) -> str:
        """Name the type in which trainer and engine compute: of ``trainer.precision``, else that of the weights."""
        name = (module.trainer.precision or "").partition("-")[0]
        return {"bf16": "bfloat16", "16": "float16"}.get(name, module.policy_config.dtype)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._canary is None else {"canary": self._canary.state()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._canary is not None and "canary" in state_dict:  # else the run that saved had none
            self._canary.restore(state_dict["canary"])
