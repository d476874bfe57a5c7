"""Sums of weights, by which an engine's are compared with those that it was sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

WeightSums = dict[str, list[float]]
"""Sum and sum of squares of the weights of each block, such as ``model.layers.3.mlp``."""


def weight_sums(weights: Iterable[tuple[str, Tensor]]) -> WeightSums:
    """Sums weights by blocks: engines join the matrices of a block, which leaves its sums as they are.

    Args:
        weights: Weights under their Hugging Face names, or those of an engine that joins the matrices of a block.
    """
    sums: WeightSums = {}
    for name, weight in weights:
        values = weight.detach().double()
        block = sums.setdefault(block_of(name), [0.0, 0.0])
        block[0] += float(values.sum())
        block[1] += float(values.square().sum())
    return sums


def block_of(name: str) -> str:
    """Returns the block of a weight: a part of a layer, or a module outside of all layers."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if number is None else parts[: number + 2])


def differing_blocks(sent: Mapping[str, list[float]], held: Mapping[str, list[float]]) -> list[str]:
    """Returns the blocks that are not what was sent; those that the engine names otherwise are left out."""
    return [
        block
        for block, (total, squares) in sent.items()
        if block in held
        and not (
            math.isclose(held[block][1], squares, rel_tol=1e-9)
            and abs(held[block][0] - total) <= 1e-9 * math.sqrt(squares) + 1e-12
        )
    ]


def difference_message(sent: Mapping[str, list[float]], held: Mapping[str, list[float]]) -> str:
    """Says which weights of an engine are not those that it was sent."""
    known = sent.keys() & held.keys()
    if not known:
        return "The engine's weights were not compared with those that it was sent: it has none here, or other names."
    if blocks := differing_blocks(sent, held):
        shown = ", ".join(f"`{block}`" for block in blocks[:4])
        return f"The engine holds other weights than it was sent in {len(blocks)} of {len(known)} blocks: {shown}."
    if len(known) == len(sent):
        return "By their sums, all weights in the engine are those that it was sent: the rest is rounding or the model."
    missing = ", ".join(f"`{block}`" for block in list(sent.keys() - held.keys())[:4])
    return f"Weights in the engine are those that it was sent, but some it has not, or names otherwise: {missing}."
