"""Shares of several kinds of rows in each training step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_lightning.faults import closest
from verl_lightning.options import Options
from verl_lightning.seeding import derive_seed

_ROUNDING = 1e-9  # of a share of a batch, which may be a whole number of rows


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(Options, key="mixture"):
    """Shares of several kinds of prompts in each training step. Set one of ``quotas`` and ``weights``."""

    column: str = "data_source"
    """Column that tells the kinds apart, such as ``data_source``, which is the file's name where rows have none, or
    ``environment``."""

    quotas: dict[str, int] = field(default_factory=dict)
    """Prompts of each kind in every step; together ``data.prompts_per_step``."""

    weights: dict[str, float] = field(default_factory=dict)
    """Share of each kind relative to the others; a step differs from it by less than one prompt, the run by none."""

    def __post_init__(self) -> None:
        if bool(self.quotas) == bool(self.weights):
            raise ValueError("`mixture` must set one of `quotas` and `weights`.")
        name, shares = ("quotas", self.quotas) if self.quotas else ("weights", self.weights)
        if wrong := [kind for kind, share in shares.items() if not share >= 0]:
            raise ValueError(f"`{name}.{wrong[0]}` must not be negative, got {shares[wrong[0]]}.")
        if not sum(shares.values()) > 0:
            raise ValueError(f"`{name}` must give some kind a share above 0, got {dict(shares)}.")

    def check_size(self, prompts_per_step: int) -> None:
        """Refuse quotas that don't fill a step.

        Raises:
            ValueError: If they don't.
        """
        if self.quotas and (total := sum(self.quotas.values())) != prompts_per_step:
            raise ValueError(
                f"`mixture.quotas` add up to {total} prompts, but a step has `prompts_per_step: {prompts_per_step}`."
                " Change either of them."
            )


class Mixture:
    """The order in which kinds of rows take turns: a pure function of seed and epoch.

    Each kind has an endless order of its own, shuffled anew whenever all of its rows were used, from which each step
    takes what its share is. An epoch is as many steps as the rows fill.

    Args:
        config: Shares of the kinds.
        kinds: Kind of each row.

    Raises:
        ValueError: If a kind has a share but no rows, or rows but no share.
    """

    def __init__(self, config: MixtureConfig, kinds: Sequence[Any]) -> None:
        shares: Mapping[str, float] = config.quotas or config.weights
        self.config = config
        self._rows = {kind: [row for row, own in enumerate(kinds) if own == kind] for kind in shares}
        found = sorted({str(kind) for kind in kinds})
        if missing := [kind for kind, rows in self._rows.items() if not rows and shares[kind]]:
            raise ValueError(
                f"`mixture` gives `{missing[0]}` a share, but no row's column `{config.column}` says so; there are"
                f" {', '.join(f'`{kind}`' for kind in found)}.{closest(missing[0], found)}"
            )
        if unnamed := [kind for kind in found if kind not in shares]:
            raise ValueError(
                f"rows whose column `{config.column}` is `{unnamed[0]}` have no share in `mixture`. Give them one; 0"
                " leaves them out."
            )
        total = sum(shares.values())
        self._shares = {kind: share / total for kind, share in sorted(shares.items()) if share}

    @property
    def description(self) -> str:
        """The shares in words that tell them from others."""
        return f"{self.config.column}: " + ", ".join(f"{kind} {share:g}" for kind, share in self._shares.items())

    def order(self, epoch: int, *, num_batches: int, batch_size: int, seed: int | None) -> list[int]:
        """Return the rows of an epoch, batch after batch.

        Args:
            epoch: Number of the epoch.
            num_batches: Batches of an epoch.
            batch_size: Rows of a batch over all ranks.
            seed: Seed of the orders; None keeps that of the rows.

        Raises:
            ValueError: If a step takes more rows of a kind than there are.
        """
        plan = self._plan(num_batches, batch_size)
        for kind, count in plan[0].items() if plan else ():
            if count > len(self._rows[kind]):
                raise ValueError(
                    f"`mixture` takes {count} prompts of `{kind}` in a step, but there are {len(self._rows[kind])}."
                    " Give it a smaller share, or more rows."
                )
        streams = {
            kind: _stream(self._rows[kind], start=epoch * total, count=total, seed=seed, kind=kind)
            for kind, total in ((kind, sum(batch[kind] for batch in plan)) for kind in self._shares)
        }
        taken = dict.fromkeys(self._shares, 0)
        order: list[int] = []
        for number, counts in enumerate(plan):
            batch: list[int] = []
            for kind, count in counts.items():
                batch += streams[kind][taken[kind] : taken[kind] + count]
                taken[kind] += count
            # Ranks and mini-batches take rows by their place.
            random.Random(derive_seed(seed or 0, epoch, number, "mixture")).shuffle(batch)
            order += batch
        return order

    def _plan(self, num_batches: int, batch_size: int) -> list[dict[str, int]]:
        """Return the number of rows of each kind in each batch of an epoch."""
        done = dict.fromkeys(self._shares, 0)
        plan = []
        for number in range(1, num_batches + 1):
            counts = {kind: int(share * batch_size + _ROUNDING) for kind, share in self._shares.items()}
            for _ in range(batch_size - sum(counts.values())):
                due = {kind: share * number * batch_size - done[kind] for kind, share in self._shares.items()}
                counts[max(counts, key=lambda kind: due[kind] - counts[kind])] += 1
            done = {kind: done[kind] + counts[kind] for kind in done}
            plan.append(counts)
        return plan


def _stream(rows: Sequence[int], *, start: int, count: int, seed: int | None, kind: str) -> list[int]:
    """Returns a stretch of the endless order of a kind's rows."""
    stretch: list[int] = []
    for cycle in range(start // len(rows), (start + count - 1) // len(rows) + 1 if count else 0):
        order = list(rows)
        if seed is not None:
            random.Random(derive_seed(seed, cycle, kind, "mixture order")).shuffle(order)
        stretch += order
    offset = start % len(rows)
    return stretch[offset : offset + count]
