"""An episode as tokens, which are never made again from text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_lightning.environments.base import Message
from verl_lightning.episodes import PastTrajectory
from verl_lightning.rollout.base import Completion, Request
from verl_lightning.seeding import derive_seed


@dataclass(kw_only=True, eq=False)
class Trajectory:
    """Words of an episode so far, token by token."""

    prompt_ids: list[int]
    """Tokens that the policy's first turn follows."""

    ids: list[int] = field(default_factory=list)
    """Tokens after the prompt: the policy's turns, and what it read between them."""

    mask: list[bool] = field(default_factory=list)
    """True on the policy's own tokens."""

    log_probs: list[float] = field(default_factory=list)
    """Log-probs of the policy's own tokens as they were sampled, in nats; 0 elsewhere."""

    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each of the policy's own tokens; -1 elsewhere."""

    ends: list[int] = field(default_factory=list)
    """Number of ``ids`` at the end of each of the policy's turns."""

    rewards: list[float] = field(default_factory=list)
    """Reward of each of the policy's turns."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Sum of each of the environment's metrics over the turns."""

    is_truncated: bool = False
    """True if the episode ended for want of tokens or turns."""

    messages: Sequence[Message] = ()
    """All that was said; filled in where trajectories end."""

    turns_before: int = 0
    """Turns of the policy in the episode's earlier trajectories."""

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return len(self.ends)

    @property
    def turns_of_episode(self) -> int:
        """Turns of the policy in the episode so far."""
        return self.turns_before + self.num_turns

    def next_request(self, request: Request) -> Request:
        """Returns the request for the policy's next turn.

        Args:
            request: Request for the first turn, whose ``max_new_tokens`` bounds all that follows the prompt.
        """
        room = request.sampling.max_new_tokens - len(self.ids)
        turn = self.turns_of_episode
        return Request(
            prompt_ids=self.prompt_ids + self.ids,
            sampling=dataclasses.replace(request.sampling, max_new_tokens=room),
            seed=request.seed if turn == 0 else derive_seed("turn", request.seed, turn),
            name=request.name,
        )

    def add_turn(self, completion: Completion) -> None:
        """Add what the policy said."""
        self._append(completion.token_ids, completion.log_probs, completion.own_versions)
        self.ends.append(len(self.ids))

    def add_read(self, ids: list[int]) -> None:
        """Add what the policy reads."""
        self._append(ids, [0.0] * len(ids), [-1] * len(ids))

    def add_reward(self, reward: float, metrics: Mapping[str, float]) -> None:
        """Add the environment's judgement of the newest turn."""
        self.rewards.append(float(reward))
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def cut(self, length: int) -> None:
        """Leave out what follows some tokens after the prompt.

        Args:
            length: Number of these tokens.
        """
        for values in (self.ids, self.mask, self.log_probs, self.versions):
            del values[length:]

    def as_past(self) -> PastTrajectory:
        """Returns what was said, up to the policy's last turn, as a trajectory that others follow."""
        self.cut(self.ends[-1])
        return PastTrajectory(
            prompt_ids=self.prompt_ids,
            token_ids=self.ids,
            is_own=self.mask,
            log_probs=self.log_probs,
            versions=self.versions,
            turn_ends=self.ends,
            rewards=self.rewards or [0.0] * len(self.ends),
            messages=list(self.messages),
            is_truncated=self.is_truncated,
        )

    def _append(self, ids: list[int], log_probs: list[float], versions: list[int]) -> None:
        self.ids += ids
        self.mask += [version >= 0 for version in versions]
        self.log_probs += log_probs
        self.versions += versions
