"""Groups of weights: those that AdamW decays, and norms and biases, which it spares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from verl_lightning.models.config import OptimConfig


def norms_and_biases(model: nn.Module) -> list[nn.Parameter]:
    """Find the weights of norms, and the biases, by what transformers, PEFT and Megatron call them."""
    return [
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "norm" in type(module).__name__.lower() or "norm" in name or "bias" in name
    ]


def decay_of_spared(config: OptimConfig) -> float:
    """Return the weight decay of norms and biases."""
    return config.weight_decay if config.decay_norms_and_biases else 0.0


def make_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Part the weights in training into AdamW's groups, whatever the decay is, so that checkpoints are alike.

    Args:
        model: Model with the weights.
        config: Options of the user.

    Returns:
        The weights that decay, then norms and biases, each in the model's order; without a group that is empty.
    """
    spared = {id(parameter) for parameter in norms_and_biases(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in spared], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if id(p) in spared], "weight_decay": decay_of_spared(config)},
    ]
    return [group for group in groups if group["params"]]


def part_state(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Part the state of an optimizer that has all weights in one group, in the model's order, as the optimizer's are.

    Older checkpoints hold such a state, and those of Megatron where another strategy reads them.

    Args:
        optimizer: Optimizer that takes the state.
        model: Model of the optimizer's weights, or one that holds it.
        state: State of all weights, from a checkpoint.

    Returns:
        The state by groups; the same one if it has groups already, or does not fit.
    """
    groups, saved = optimizer.param_groups, state["param_groups"]
    own = {id(parameter) for group in groups for parameter in group["params"]}
    if len(saved) != 1 or len(groups) == 1 or len(saved[0]["params"]) != len(own):
        return state
    order = (id(parameter) for parameter in model.parameters() if id(parameter) in own)
    index = dict(zip(order, saved[0]["params"], strict=True))
    parted = [saved[0] | {"params": [index[id(parameter)] for parameter in group["params"]]} for group in groups]
    return {**state, "param_groups": parted}
