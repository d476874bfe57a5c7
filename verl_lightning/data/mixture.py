"""Shares of several kinds of rows in each training step."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_lightning.faults import closest
from verl_lightning.options import Options
from verl_lightning.seeding import derive_seed

_ROUNDING = 1e-9  # of a share of a batch, which may be a whole number of rows


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig(Options, key="curriculum"):
    """Kinds of prompts that join one after another, each once the policy has mastered the one before it."""

    pass_rate: float = 0.7
    """Share of the responses to the newest kind that must pass for the next kind to join, in ``[0, 1]``."""

    num_steps: int = 10
    """Latest steps over which the share is taken; a kind stays the newest for at least as many."""

    success_reward: float = 1.0
    """Reward from which a response passes, in units of reward."""

    def __post_init__(self) -> None:
        if not 0 <= self.pass_rate <= 1:
            raise ValueError(f"`pass_rate` must be between 0 and 1, got {self.pass_rate}.")
        if self.num_steps < 1:
            raise ValueError(f"`num_steps` must be at least 1, got {self.num_steps}.")


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

    curriculum: CurriculumConfig | None = None
    """Rule by which kinds join in the order of ``weights``; null has all from the first step."""

    def __post_init__(self) -> None:
        if bool(self.quotas) == bool(self.weights):
            raise ValueError("`mixture` must set one of `quotas` and `weights`.")
        if self.quotas and self.curriculum is not None:
            raise ValueError("`mixture.curriculum` changes shares, so it needs `weights`, not `quotas`.")
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
    """The order in which kinds of rows take turns: a pure function of seed, epoch and, in a curriculum, `joined`.

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
        self._levels = [kind for kind, share in shares.items() if share]
        self.joined: list[int] = []
        """Number of the run's batch in which each kind of a curriculum but the first has joined, or will."""

    @property
    def description(self) -> str:
        """The shares in words that tell them from others."""
        levels = "" if self.config.curriculum is None else f", in turn {', '.join(self._levels)}"
        shares = ", ".join(f"{kind} {share:g}" for kind, share in self._shares.items())
        return f"{self.config.column}: {shares}{levels}"

    def check_stages(self, batch_size: int) -> None:
        """Refuse shares that the rows don't fill, whichever kinds of a curriculum have joined.

        Args:
            batch_size: Rows of a batch over all ranks.

        Raises:
            ValueError: If a step takes more rows of a kind than there are.
        """
        first = 1 if self.config.curriculum is not None else len(self._levels)
        for kinds in (self._levels[:count] for count in range(first, len(self._levels) + 1)):
            total = sum(self._shares[kind] for kind in kinds)
            most = {kind: math.ceil(self._shares[kind] / total * batch_size - _ROUNDING) for kind in kinds}
            if scarce := [kind for kind, count in most.items() if count > len(self._rows[kind])]:
                raise ValueError(
                    f"`mixture` takes {most[scarce[0]]} prompts of `{scarce[0]}` in a step, but there are"
                    f" {len(self._rows[scarce[0]])}. Give it a smaller share, or more rows."
                )

    def kinds_at(self, number: int) -> list[str]:
        """Return the kinds of which a batch has rows, the newest last.

        Args:
            number: Number of the batch in the run.
        """
        if self.config.curriculum is None:
            return self._levels
        return self._levels[: 1 + sum(first <= number for first in self.joined)]

    @property
    def is_complete(self) -> bool:
        """True once all kinds have joined, or are to."""
        return self.config.curriculum is None or len(self.joined) + 1 >= len(self._levels)

    def _shares_at(self, number: int) -> dict[str, float]:
        kinds = self.kinds_at(number)
        total = sum(self._shares[kind] for kind in kinds)
        return {kind: share / total if kind in kinds else 0.0 for kind, share in self._shares.items()}

    def order(self, epoch: int, *, num_batches: int, batch_size: int, seed: int | None) -> list[int]:
        """Return the rows of an epoch, batch after batch.

        Args:
            epoch: Number of the epoch.
            num_batches: Batches of an epoch.
            batch_size: Rows of a batch over all ranks.
            seed: Seed of the orders; None keeps that of the rows.
        """
        whole = self._plan((epoch + 1) * num_batches, batch_size)
        before, plan = whole[: epoch * num_batches], whole[epoch * num_batches :]
        streams = {
            kind: _stream(
                self._rows[kind],
                start=sum(batch[kind] for batch in before),
                count=sum(batch[kind] for batch in plan),
                seed=seed,
                kind=kind,
            )
            for kind in self._shares
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
        """Return the number of rows of each kind in each batch from the run's first one on."""
        due, plan = dict.fromkeys(self._shares, 0.0), []  # rows that are owed to each kind
        for number in range(num_batches):
            shares = self._shares_at(number)
            due = {kind: due[kind] + share * batch_size for kind, share in shares.items()}
            counts = {kind: int(share * batch_size + _ROUNDING) for kind, share in shares.items()}
            due = {kind: due[kind] - count for kind, count in counts.items()}
            for _ in range(batch_size - sum(counts.values())):
                most = max((kind for kind in counts if shares[kind]), key=due.__getitem__)
                counts[most] += 1
                due[most] -= 1
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
