"""Memory that a model takes on one device, estimated before it is built."""

from __future__ import annotations

from dataclasses import dataclass

from verl_lightning.models.size import Compute, ModelSize


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Memory of one model on one device, in bytes."""

    weights: int
    """The device's part of the weights, and of other copies of them that stay."""

    gradients: int = 0
    """The device's part of the gradients."""

    optimizer: int = 0
    """The device's part of the optimizer's state."""

    gathered: int = 0
    """Weights from other devices or in another type, and gradients on their way, which come and go with each block."""

    activations: int | None = 0
    """Activations that a forward pass keeps for its backward pass; None where its tokens are not known."""

    head: int = 0
    """Logits of a chunk and their gradients."""

    keeps_gradients: bool = False
    """True if gradients hold their memory between updates."""

    on_host: bool = False
    """True if weights, gradients and optimizer state lie in the host's memory."""

    @property
    def resting(self) -> int:
        """Bytes on the device between updates."""
        if self.on_host:
            return 0
        return self.weights + self.optimizer + (self.gradients if self.keeps_gradients else 0)

    @property
    def working(self) -> int:
        """Bytes on the device while the model learns, beside those of `resting`."""
        gradients = 0 if self.keeps_gradients or self.on_host else self.gradients
        return gradients + self.gathered + (self.activations or 0) + self.head


def learning_memory(size: ModelSize, compute: Compute, tokens: int | None) -> dict[str, int | None]:
    """Estimates activations and logits of a model in training; nothing of a frozen one, which keeps nothing.

    Args:
        size: Size of the model.
        compute: Types in which the model computes.
        tokens: Tokens of the largest pass of one device, None where not known.
    """
    if not size.trainable:
        return {}
    if tokens is None:
        return {"activations": None}
    return {"activations": size.activation_bytes(tokens, compute), "head": size.head_bytes(tokens, compute)}


def whole_memory(size: ModelSize, compute: Compute, tokens: int | None, *, keeps_gradients: bool) -> ModelMemory:
    """Estimates the memory of a model that lies whole on the device, under AdamW.

    Args:
        size: Size of the model.
        compute: Types in which the model computes.
        tokens: Tokens of the model's largest pass, None where not known.
        keeps_gradients: Whether gradients hold their memory between updates.
    """
    return ModelMemory(
        weights=size.weight_width * size.weights,
        gradients=size.weight_width * size.trainable,
        optimizer=2 * size.weight_width * size.trainable,
        gathered=compute.width * size.weights if compute.casts and size.trainable else 0,
        keeps_gradients=keeps_gradients,
        **learning_memory(size, compute, tokens),  # type: ignore[arg-type]
    )


def sharded_memory(
    size: ModelSize,
    compute: Compute,
    tokens: int | None,
    *,
    shards: int,
    keeps_gathered: bool,
    accumulates_whole: bool,
    on_host: bool,
) -> ModelMemory:
    """Estimates the memory of a model that is sharded over devices and gathered block by block, under AdamW.

    Args:
        size: Size of the model.
        compute: Types in which the model computes.
        tokens: Tokens of the model's largest pass on one device, None where not known.
        shards: Devices that share the weights.
        keeps_gathered: Whether gathered weights stay until the backward pass.
        accumulates_whole: Whether whole gradients are summed up over several passes.
        on_host: Whether what stays lies in the host's memory.
    """
    gathered = compute.width * (size.weights if keeps_gathered else size.outside + 2 * size.largest_block)
    if size.trainable:  # of a block reduced in float32, of all outside blocks at the end of the backward pass
        gathered += 4 * size.trainable if accumulates_whole else 4 * size.largest_block + compute.width * size.outside
    return ModelMemory(
        weights=size.weight_width * size.weights // shards,
        gradients=size.weight_width * size.trainable // shards,
        optimizer=2 * size.weight_width * size.trainable // shards,
        gathered=gathered,
        on_host=on_host,
        **learning_memory(size, compute, tokens),  # type: ignore[arg-type]
    )
