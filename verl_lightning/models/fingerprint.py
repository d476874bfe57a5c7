"""Checkpoints that hold only what is trained, and know the frozen weights that they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from verl_lightning.models.weights import base_weights, whole

SAMPLES = 64
"""Values of each weight that a fingerprint looks at."""


def base_fingerprint(backbone: nn.Module) -> str:
    """Digests names, shapes and evenly spaced values of a base model, to tell it from others. Collective.

    The same weights stored in another type have the same fingerprint as long as no value was rounded.
    """
    return fingerprint((name, whole(parameter.detach())) for name, parameter in base_weights(backbone))


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Computes the fingerprint of whole weights in any order; holds one weight at a time."""
    return fingerprint_of({name: sample(name, weight) for name, weight in weights})


def sample(name: str, weight: Tensor) -> bytes:
    """Returns what a fingerprint reads of a whole weight: its name, its shape and evenly spaced values."""
    values = weight.flatten()
    values = values[:: max(1, len(values) // SAMPLES)].float().cpu()
    return f"{name}{list(weight.shape)}".encode() + values.numpy().tobytes()


def fingerprint_of(samples: Mapping[str, bytes]) -> str:
    """Computes the fingerprint of weights from the samples that were taken of them, by name."""
    digest = hashlib.sha256()
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()[:32]


def without_frozen(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state dict without the frozen weights: the trained weights and the buffers."""
    frozen = frozen_names(module)
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def with_frozen(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adds the module's own frozen weights to a state dict where it lacks them, so that it can be loaded strictly."""
    frozen = frozen_names(module)
    return {name: tensor for name, tensor in module.state_dict().items() if name in frozen} | dict(state)


def frozen_names(module: nn.Module) -> set[str]:
    """Returns the names of the weights that no optimizer changes."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
