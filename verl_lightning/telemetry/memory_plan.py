"""Memory and speed of a run before its first step: estimates for one device, and whether they fit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from rich.table import Table

from verl_lightning.models.build import build_skeleton
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.size import ModelRole, ModelSize, model_size
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.strategies.memory import ModelMemory
from verl_lightning.telemetry.speed import Work, peak_tflops, training_work

GIB = 2**30
RESERVED_SHARE = 0.07
"""Share of a device's memory for the driver, libraries, and what allocators can't use."""

USUAL_MFU = 0.4
"""Share of a device's peak at which the plan tells the speed of an update."""


class EngineMemory(NamedTuple):
    """Memory that a rollout engine takes of each training device, in bytes."""

    sampling: int = 0
    """Bytes while the engine samples."""

    learning: int = 0
    """Bytes while the policy learns."""


@runtime_checkable
class HoldsEngine(Protocol):
    """A callback whose engine shares the training devices."""

    memory_key: str
    """The option that bounds what the engine takes."""

    def engine_memory(self, device_bytes: int) -> EngineMemory:
        """Returns the memory that the engine takes of a device with ``device_bytes``."""


class PlannedModule(Protocol):
    """A module that says which models it makes and how much of them is at work at once."""

    policy_config: ModelConfig
    trainer: Trainer
    pass_key: str

    @property
    def contract(self) -> PostTrainingStrategy:
        """The strategy's operations."""

    @property
    def roles(self) -> list[ModelRole]:
        """The models that the module makes."""

    @property
    def tokens_per_pass(self) -> int | None:
        """Most tokens of a forward and backward pass on one rank; None where not known."""

    @property
    def accumulates(self) -> bool:
        """True if an optimizer step may have several forward and backward passes."""

    @property
    def model_sizes(self) -> ModelSizes:
        """Sizes of these models; measured once."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Estimates for one device of a run; see `memory_plan`."""

    models: Mapping[str, ModelMemory]
    """Memory of each model by role; those that are trained learn one after another."""

    tokens: int | None
    """Tokens of the largest forward and backward pass; None where not known."""

    device: str
    """Name of the device, for people."""

    device_bytes: int
    """Memory of the device, in bytes; on the host, this process' share."""

    engine: EngineMemory = EngineMemory()
    """Memory of the rollout engine."""

    work: Work | None = None
    """Matrix products of the policy's update."""

    peak_tflops: float | None = None
    """Peak of the device in 10**12 operations a second; None where not known."""

    keys: tuple[str, ...] = ()
    """Options to change where the plan does not fit, the cheapest first."""

    @property
    def resting(self) -> int:
        """Bytes of all models between updates: weights, optimizer states, and gradients that keep their memory."""
        return sum(model.resting for model in self.models.values())

    @property
    def learning(self) -> int:
        """Bytes at the peak of an update, with what the engine keeps meanwhile."""
        return self.resting + max(model.working for model in self.models.values()) + self.engine.learning

    @property
    def sampling(self) -> int:
        """Bytes while responses are sampled, with what sends the policy's weights to the engine."""
        return self.resting + self._sending + self.engine.sampling

    @property
    def fits(self) -> bool:
        """True if neither peak is above the device's memory."""
        return max(self.learning, self.sampling) <= self.device_bytes

    @property
    def _sending(self) -> int:
        return max(model.gathered for model in self.models.values())

    def engine_share(self, *, sleeps: bool) -> float:
        """Returns the share of the device's memory that is left for a rollout engine on it, in ``[0, 1)``.

        Args:
            sleeps: True if the engine gives its memory back while the policy learns; else it gets what the peak of an
                update leaves.
        """
        own = self.resting + self._sending if sleeps else self.learning - self.engine.learning
        return max(0.0, 1 - own / self.device_bytes - RESERVED_SHARE)

    def table(self) -> Table:
        """Returns the plan as a table for people."""
        title = f"Memory plan of each device ({self.device}, {amount(self.device_bytes)}), estimated"
        table = Table(title=title, title_justify="left")
        for name in ("", "weights", "gradients", "optimizer", "gathered", "activations", "logits"):
            table.add_column(name, justify="right" if name else "left")
        for role, model in self.models.items():
            state = (model.weights, model.gradients, model.optimizer)
            place = [f"{amount(part)} host" if model.on_host else amount(part) for part in state]
            table.add_row(role, *place, amount(model.gathered), amount(model.activations), amount(model.head))
        table.add_section()
        for row in self._sums():
            table.add_row(*row)
        table.caption, table.caption_justify = self._caption(), "left"
        return table

    def _sums(self) -> list[tuple[str, str]]:
        rows = [("between updates", amount(self.resting)), ("while learning", amount(self.learning))]
        if any(self.engine):
            rows.append(("engine, learning", amount(self.engine.learning)))
            rows.append(("engine, sampling", amount(self.engine.sampling)))
            rows.append(("while sampling", amount(self.sampling)))
        return rows

    def _caption(self) -> str:
        """Tells the tokens of the largest pass and the speed of an update."""
        words = "tokens of a pass are not known" if self.tokens is None else f"{self.tokens:,} tokens in a pass"
        if self.work is None:
            return words
        words += f"; an update takes {self.work.per_token / 1e9:,.2f} GFLOP a token beside attention"
        if self.peak_tflops is None:
            return words
        speed = USUAL_MFU * 1e12 * self.peak_tflops / self.work.per_token
        return words + f": at {USUAL_MFU:.0%} of the peak at most {speed:,.0f} tokens a second on each device"

    def warning(self) -> str | None:
        """Tells what to change where the plan does not fit; None where it does."""
        if self.fits:
            return None
        when, most = max(("learning", self.learning), ("sampling", self.sampling), key=lambda peak: peak[1])
        return (
            f"the memory plan does not fit: while {when}, about {amount(most)} of the {amount(self.device_bytes)} of"
            f" {self.device} are needed. Change, the cheapest first: {', '.join(self.keys)}."
        )


def memory_plan(module: PlannedModule) -> MemoryPlan:
    """Estimates the memory that a run takes on one device. Can be asked for from ``setup`` on; not collective.

    Args:
        module: Module with its trainer.
    """
    sizes, tokens = module.model_sizes, module.tokens_per_pass
    device, device_bytes = sizes.device
    return MemoryPlan(
        models=sizes.memory(tokens),
        tokens=tokens,
        device=device,
        device_bytes=device_bytes,
        engine=engine_memory(module, device_bytes),
        work=sizes.work,
        peak_tflops=peak_tflops(module.contract.root_device),
        keys=tuple(memory_keys(module, engines_of(module))),
    )


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of the models of a run, from which their memory follows for any size of a pass."""

    module: PlannedModule
    """The run's module."""

    sizes: Mapping[str, ModelSize]
    """Size of each model by role."""

    work: Work | None
    """Matrix products of the update of the first model."""

    @classmethod
    def of(cls, module: PlannedModule) -> ModelSizes:
        """Measures the models that a module makes, without making them."""
        sizes, work = {}, None
        for role in module.roles:
            if role.is_elsewhere:
                continue
            skeleton = build_skeleton(role.config, role.head, trainable=role.trainable)
            sizes[role.name] = model_size(skeleton)
            work = work or training_work(role.name, "update", skeleton)
        return cls(module=module, sizes=sizes, work=work)

    @property
    def device(self) -> tuple[str, int]:
        """Name and bytes of a rank's device; see `device_memory`."""
        return device_memory(self.module.contract.root_device, processes=self.module.trainer.num_devices)

    def memory(self, tokens: int | None) -> dict[str, ModelMemory]:
        """Returns the memory of each model by role.

        Args:
            tokens: Tokens of the largest pass; None where not known.
        """
        plan, accumulates = self.module.contract.plan_memory, self.module.accumulates
        return {
            role.name: plan(self.sizes[role.name], role.config, tokens, accumulates=accumulates)
            for role in self.module.roles
            if role.name in self.sizes
        }


def engines_of(module: PlannedModule) -> list[HoldsEngine]:
    """Returns the callbacks of a run whose engines may share the training devices."""
    return [each for each in module.trainer.callbacks if isinstance(each, HoldsEngine)]  # type: ignore[attr-defined]


def engine_memory(module: PlannedModule, device_bytes: int) -> EngineMemory:
    """Returns the memory that all engines of a run take of a training device.

    Args:
        module: Module with its trainer.
        device_bytes: Memory of the device.
    """
    taken = [engine.engine_memory(device_bytes) for engine in engines_of(module)]
    return EngineMemory(*(sum(part) for part in zip(*taken, strict=True))) if taken else EngineMemory()


def memory_keys(module: PlannedModule, engines: Sequence[HoldsEngine]) -> Iterator[str]:
    """Options that a run can still change to take less memory, the cheapest first, with their values.

    Args:
        module: Module with its trainer.
        engines: Callbacks whose engines take memory of the training devices.
    """
    for engine in engines:
        yield f"`{engine.memory_key}`"
    yield f"`{module.pass_key}`"
    for role in module.roles:
        key = {"actor": "model.actor", "critic": "model.critic.model"}.get(role.name)
        if key is not None and role.config.activation_checkpointing != "full":
            yield f"`{key}.activation_checkpointing: full`"
    if module.policy_config.lora is None:
        yield "`model.actor.lora: {}`"
    yield "`trainer.strategy: fsdp` with more `trainer.devices`, and `fsdp.cpu_offload: true`"


def device_memory(device: torch.device, *, processes: int) -> tuple[str, int]:
    """Name and bytes of a device; of the host, the share of one of its processes.

    Args:
        device: Device of this rank.
        processes: Training processes on this host.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.total_memory
    return "the host", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes


def amount(number: int | None) -> str:
    """Bytes for people, in GiB or, where that would be near 0, in MiB."""
    if number is None:
        return "?"
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.2f} MiB" if number else "0"
