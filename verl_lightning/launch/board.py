"""Where the workers of a run say how far they are, and read whether to stop: one small actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_lightning.processes.exit_codes import Ending
from verl_lightning.ray.actors import on_this_node


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker runs."""

    rank: int
    """Its rank among all workers."""

    node: str
    """Address of its node."""

    pid: int
    """Its process there."""

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node} (process {self.pid})"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Where a run keeps what a restart needs."""

    log_version: int | str | None
    """Version of its `ResumableCSVLogger`; None with another logger."""

    checkpoint_folders: tuple[str, ...]
    """Folders in which its callbacks keep a `last` checkpoint."""


class Board:
    """What the workers of one run tell its driver; a Ray actor, for it outlives the workers."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._moments: dict[int, str] = {}
        self._folder: RunFolder | None = None
        self._refusal: str | None = None
        self._stop_reason: str | None = None
        self._ending: Ending | None = None

    def begin(self, place: Place) -> None:
        """A worker has started."""
        self._places[place.rank] = place
        self._moments[place.rank] = "setting up"

    def enter(self, rank: int, step: int, phase: str) -> None:
        """A worker enters a phase of a step."""
        self._moments[rank] = f"in phase `{phase}` of step {step}"

    def keep_folder(self, folder: RunFolder) -> None:
        """The run has its folder."""
        self._folder = folder

    def folder(self) -> RunFolder | None:
        """The run's folder, if it came so far."""
        return self._folder

    def refuse(self, message: str) -> None:
        """A worker has met a mistake of the user's, which a restart would meet again. The first one counts."""
        self._refusal = self._refusal or message

    def refusal(self) -> str | None:
        """What the user must change; None if nothing."""
        return self._refusal

    def stop(self, reason: str) -> None:
        """Ask the workers to save and end."""
        self._stop_reason = reason

    def stop_reason(self) -> str | None:
        """Why to save and end; None to go on."""
        return self._stop_reason

    def keep_ending(self, ending: Ending) -> None:
        """The workers have come to an end, and say why."""
        self._ending = ending

    def ending(self) -> Ending | None:
        """Why the workers have ended; None if they have not."""
        return self._ending

    def describe(self, rank: int) -> str:
        """Who and where a worker is, and what it did last."""
        return f"{self._places.get(rank, f'rank {rank}')}, {self._moments.get(rank, 'not started')}"


def make_board() -> Any:
    """Starts the actor, which needs no resources of its own, on the driver's node."""
    import ray

    remote: Any = ray.remote(num_cpus=0)(Board)
    return remote.options(scheduling_strategy=on_this_node()).remote()
