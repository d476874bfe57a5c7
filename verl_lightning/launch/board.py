"""A small actor on which the workers of a run say how far they are, and read whether to stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_lightning.processes.exit_codes import Ending
from verl_lightning.ray.actors import on_this_node


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place where a worker runs: its rank, node and process."""

    rank: int
    """Rank of the worker among all workers."""

    node: str
    """Address of the worker's node."""

    pid: int
    """Process id of the worker on that node."""

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node} (process {self.pid})"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Log version and checkpoint folders of a run, which a restart needs."""

    log_version: int | str | None
    """Version of the run's `ResumableCSVLogger`; None with another logger."""

    checkpoint_folders: tuple[str, ...]
    """Folders in which the run's callbacks keep a `last` checkpoint."""


class Board:
    """Ray actor that keeps what the workers of one run tell its driver, and outlives the workers."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._moments: dict[int, str] = {}
        self._folder: RunFolder | None = None
        self._refusal: str | None = None
        self._stop_reason: str | None = None
        self._ending: Ending | None = None

    def begin(self, place: Place) -> None:
        """Notes that a worker has started."""
        self._places[place.rank] = place
        self._moments[place.rank] = "setting up"

    def enter(self, rank: int, step: int, phase: str) -> None:
        """Notes that a worker enters a phase of a step."""
        self._moments[rank] = f"in phase `{phase}` of step {step}"

    def keep_folder(self, folder: RunFolder) -> None:
        """Notes the run's folder."""
        self._folder = folder

    def folder(self) -> RunFolder | None:
        """Returns the run's folder; None if the run did not come so far."""
        return self._folder

    def refuse(self, message: str) -> None:
        """Notes a mistake of the user's that a worker has met and a restart would meet again. The first one counts."""
        self._refusal = self._refusal or message

    def refusal(self) -> str | None:
        """Returns what the user must change, in a sentence; None if nothing."""
        return self._refusal

    def stop(self, reason: str) -> None:
        """Asks the workers to save and end."""
        self._stop_reason = reason

    def stop_reason(self) -> str | None:
        """Returns the reason to save and end; None to go on."""
        return self._stop_reason

    def keep_ending(self, ending: Ending) -> None:
        """Notes that the workers have ended, and why."""
        self._ending = ending

    def ending(self) -> Ending | None:
        """Returns why the workers have ended; None if they have not."""
        return self._ending

    def describe(self, rank: int) -> str:
        """Says which worker has a rank, where it runs, and what it did last."""
        return f"{self._places.get(rank, f'rank {rank}')}, {self._moments.get(rank, 'not started')}"


def make_board() -> Any:
    """Starts the actor, which needs no resources of its own, on the driver's node."""
    import ray

    remote: Any = ray.remote(num_cpus=0)(Board)
    return remote.options(scheduling_strategy=on_this_node()).remote()
