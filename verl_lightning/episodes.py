"""Episodes: walks through environments, in plain values that cross to other processes and into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PastTrajectory:
    """A trajectory of an episode before its last one, as tokens: it ends where the history was written anew."""

    prompt_ids: list[int]
    """Tokens that the policy's first turn follows."""

    token_ids: list[int]
    """Tokens after the prompt, at least one: the policy's turns, and what it read between them."""

    is_own: list[bool]
    """True on the policy's own tokens."""

    log_probs: list[float]
    """Log-probs of the policy's own tokens as they were sampled, in nats; 0 elsewhere."""

    versions: list[int]
    """Version of the weights that sampled each of the policy's own tokens; -1 elsewhere."""

    turn_ends: list[int]
    """Number of ``token_ids`` at the end of each of the policy's turns."""

    rewards: list[float]
    """Reward of each of the policy's turns."""

    messages: list[dict[str, Any]]
    """All that was said, the first messages included."""

    is_truncated: bool = False
    """True if it ended for want of tokens."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A walk through an environment, beside the tokens of its last trajectory, in plain values."""

    environment: str
    """Name of the environment."""

    messages: list[dict[str, Any]]
    """All that was said in the last trajectory, the first messages included."""

    turn_ends: list[int]
    """Number of response tokens at the end of each of the policy's turns."""

    rewards: list[float]
    """Reward of each of the policy's turns."""

    metrics: dict[str, float]
    """Numbers that the environment gave, each summed over the turns."""

    seconds: list[float]
    """Seconds that each call of the environment took: the beginning, each turn, the end."""

    past: list[PastTrajectory] = field(default_factory=list)
    """Trajectories before the last one, in their order; empty where the history was never written anew."""

    error: str = ""
    """Reason for which it could not be finished; empty if it was."""

    is_timeout: bool = False
    """True if the environment was late."""

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(self.rewards) + sum(sum(each.rewards) for each in self.past)

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return len(self.turn_ends) + sum(len(each.turn_ends) for each in self.past)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Episode:
        """Restores the episode that `dataclasses.asdict` was given."""
        return cls(**{**state, "past": [PastTrajectory(**each) for each in state.get("past", [])]})
