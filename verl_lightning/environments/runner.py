"""Plays episodes, each by itself and a bounded number at once: none waits for the slowest of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lightning.fabric.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from verl_lightning.environments.agent_server import AgentServer
from verl_lightning.environments.agent_session import Speaker
from verl_lightning.environments.agents import Agent
from verl_lightning.environments.base import Environment
from verl_lightning.environments.chat import Chat
from verl_lightning.environments.config import Environments, EpisodesConfig
from verl_lightning.environments.episode import EpisodeError, Generate, Player, Policy, Schemas
from verl_lightning.environments.own_thread import Threads
from verl_lightning.environments.replies import PlainText, Replies
from verl_lightning.environments.tool_use import ToolUse
from verl_lightning.environments.trajectory import Trajectory
from verl_lightning.episodes import Episode
from verl_lightning.faults import RunError
from verl_lightning.rollout.base import Completion, Request
from verl_lightning.rollout.turns import TurnsConfig
from verl_lightning.rollout.watchdog import end_if_frozen


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest(Request):
    """Request for a whole episode: that for its first turn, whose limit of tokens all turns share."""

    row: Mapping[str, Any]
    """Data row that the episode is about."""


def episode_requests(
    requests: Sequence[Request], rows: Sequence[Mapping[str, Any]], *, num_samples: int
) -> list[EpisodeRequest]:
    """Returns requests for episodes.

    Args:
        requests: Requests for first turns, ``num_samples`` for each row.
        rows: Data rows.
        num_samples: Episodes of each row.
    """
    return [
        EpisodeRequest(
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            seed=request.seed,
            name=request.name,
            row=rows[index // num_samples],
        )
        for index, request in enumerate(requests)
    ]


@dataclass(kw_only=True)
class EpisodeRunner:
    """Plays the episodes of one rank."""

    environments: Environments | TurnsConfig
    """Environments by name, or that of `rollout.turns`."""

    config: EpisodesConfig
    """Limits of the episodes."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""

    eos_token_ids: Collection[int]
    """Tokens that end a turn."""

    max_prompt_length: int | None
    """Most tokens that first messages may have; None sets no limit."""

    enable_thinking: bool | None
    """Value for the chat template of rows that have none; None leaves it to the template."""

    def __post_init__(self) -> None:
        self._threads = Threads()
        self._tool_uses: dict[str, ToolUse] = {}
        self._overridden: set[str] = set()
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def check(self) -> None:
        """Make one environment of each kind, and look for faults that no episode can do without.

        Raises:
            ValueError: If one is no environment, a tool has no types or documentation, or the chat template writes
                earlier turns anew.
        """
        if isinstance(self.environments, TurnsConfig):
            return
        for kind, make in self.environments.makers.items():
            if isinstance(make, Agent):
                continue
            environment = make()
            if not isinstance(environment, Environment):
                raise ValueError(
                    f"`rollout.environment`: `{kind}` must be a class of environments, or a function that makes one,"
                    f" but calling it made {environment!r:.80}."
                )
            self._check_tools(kind, environment)
            role: Literal["user", "tool"] = "tool" if environment.tools else "user"
            tools = self._tool_uses[kind].toolbox(environment).schemas if environment.tools else None
            complaint = self._chat({}, f"`{kind}`", tools).history_complaint(role)
            if complaint is not None and self.config.history == "refuse":
                raise ValueError(
                    f"The chat template writes earlier turns anew: {complaint}. Episodes of `{kind}` would have other"
                    " tokens than those that the policy said. Set `rollout.episodes.history: split` to learn from each"
                    " history that the template writes, `keep` to have the policy read what it said, or use another"
                    " template: `chat_template.jinja` in the model's folder."
                )

    def _check_tools(self, kind: str, environment: Environment) -> None:
        """Find out how the policy uses an environment's tools, if it has any."""
        key, limit = f"rollout.environment: {kind}", self.config.timeout
        if not environment.tools:
            return
        if not 0 < environment.tool_timeout < limit:
            raise ValueError(
                f"`{key}`: a tool may take {environment.tool_timeout:g} s, which must be positive and less than"
                f" `rollout.episodes.timeout` ({limit:g} s): else an episode is lost where the policy would read that"
                " its tool was late."
            )
        self._tool_uses[kind] = ToolUse(environment, self.tokenizer, key)

    async def play(self, generate: Generate, requests: Sequence[EpisodeRequest]) -> list[Completion]:
        """Play an episode for each request; those of one event loop are together no more than are allowed at once."""
        room = self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.config.max_concurrency))
        policy = Policy(generate=generate, tokenizer=self.tokenizer, eos_token_ids=self.eos_token_ids)
        server = AgentServer()

        async def play_one(request: EpisodeRequest) -> Completion:
            async with room:
                agent = self._agents.get(self._kind(request))
                if agent is None:
                    return await self._play(policy, request)
                return await self._play_agent(policy, server, agent, request)

        with end_if_frozen(self.config.timeout):
            if not self._agents:
                return list(await asyncio.gather(*map(play_one, requests)))
            async with server:
                return list(await server.watch(asyncio.gather(*map(play_one, requests))))

    def stop(self) -> None:
        """End the threads of environments and the processes of tools."""
        self._threads.stop()
        for tool_use in self._tool_uses.values():
            tool_use.stop()
        for agent in self._agents.values():
            agent.workers.stop()

    @cached_property
    def _agents(self) -> dict[str, Agent]:
        makers = {} if isinstance(self.environments, TurnsConfig) else self.environments.makers
        return {kind: make for kind, make in makers.items() if isinstance(make, Agent)}

    def _kind(self, request: EpisodeRequest) -> str:
        """Return the name of an episode's environment."""
        environments = self.environments
        if isinstance(environments, TurnsConfig):
            return type(environments.environment).__name__
        return environments.name_of(request.row)

    async def _play_agent(
        self, policy: Policy, server: AgentServer, agent: Agent, request: EpisodeRequest
    ) -> Completion:
        speaker = Speaker(
            generate=policy.generate,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            max_prompt_length=self.max_prompt_length,
            enable_thinking=self.enable_thinking,
            history=self.config.history,
            tool_calls=agent.tool_calls,
        )
        outcome = await agent.play(server, speaker, request.row, request)
        if outcome.session.overridden - self._overridden:
            self._overridden |= outcome.session.overridden
            names = ", ".join(f"`{name}`" for name in sorted(self._overridden))
            rank_zero_warn(f"Agents set {names}, but the policy is sampled as `rollout.sampling` says.")
        kind = self._kind(request)
        episode = outcome.episode(kind, f"`{kind}` ({request.name})")
        histories = outcome.session.learnt_from() or [Trajectory(prompt_ids=request.prompt_ids)]
        return _as_completion(histories[-1], episode)

    async def _play(self, policy: Policy, request: EpisodeRequest) -> Completion:
        player, error = self._player(policy, request), None
        try:
            await player.play(request.row, request)
        except EpisodeError as caught:
            error = caught
        return _completion(player, error)

    def _player(self, policy: Policy, request: EpisodeRequest) -> Player:
        environments, kind = self.environments, self._kind(request)
        if isinstance(environments, TurnsConfig):
            turns, prompt = environments, str(self.tokenizer.decode(request.prompt_ids))
            make: Callable[[], Environment] = lambda: Replies(turns, prompt)  # noqa: E731
        else:
            maker = environments.makers[kind]
            assert not isinstance(maker, Agent)
            make = maker
        return Player(
            name=f"`{kind}` ({request.name})",
            kind=kind,
            make=make,
            is_quick=getattr(getattr(make, "func", make), "is_quick", False),
            start_talk=lambda environment, tools: self._talk(environment, request, tools),
            policy=policy,
            threads=self._threads,
            config=self.config,
            max_prompt_length=self.max_prompt_length,
            trajectory=Trajectory(prompt_ids=request.prompt_ids),
            tool_use=self._tool_uses.get(kind),
        )

    def _talk(self, environment: Environment, request: EpisodeRequest, tools: Schemas | None) -> Chat | PlainText:
        if isinstance(environment, Replies):
            return PlainText(self.tokenizer, request.prompt_ids)
        return self._chat(request.row, request.name, tools)

    def _chat(self, row: Mapping[str, Any], name: str, tools: Schemas | None) -> Chat:
        values = dict(row) if tools is None else {**row, "tools": tools}
        return Chat(
            self.tokenizer, values, name=name, enable_thinking=self.enable_thinking, history=self.config.history
        )

    def check_errors(self, completions: Sequence[Completion]) -> None:
        """Refuse a batch in which too many episodes failed; tell of some that did.

        Raises:
            RunError: If too many have.
        """
        episodes = [completion.episode for completion in completions if completion.episode is not None]
        failed = [episode for episode in episodes if episode.error]
        if not failed:
            return
        counts = f"{len(failed)} of {len(episodes)} episodes of a batch could not be finished"
        if len(failed) > self.config.max_error_share * len(episodes):
            raise RunError(
                f"{counts}, which is more than `rollout.episodes.max_error_share: {self.config.max_error_share:g}`"
                f" allows. The first: {failed[0].error}"
            )
        rank_zero_warn(f"{counts} and are left out. The first: {failed[0].error}")


def _completion(player: Player, error: EpisodeError | None) -> Completion:
    """Returns an episode as an engine's answer."""
    trajectory = player.trajectory
    episode = Episode(
        environment=player.kind,
        messages=[] if player.talk is None else list(player.talk.messages),
        turn_ends=trajectory.ends,
        rewards=trajectory.rewards,
        metrics=trajectory.metrics,
        seconds=player.seconds,
        past=player.past if error is None else [],
        error="" if error is None else str(error),
        is_timeout=error is not None and error.is_timeout,
    )
    return _as_completion(trajectory, episode)


def _as_completion(trajectory: Trajectory, episode: Episode) -> Completion:
    ids, mask, log_probs = trajectory.ids, trajectory.mask, trajectory.log_probs
    if not ids:  # nothing to learn from, but a row of its group
        ids, mask, log_probs = trajectory.prompt_ids[-1:], [False], [0.0]
    return Completion(
        token_ids=ids,
        log_probs=log_probs,
        is_truncated=trajectory.is_truncated,
        weights_version=max(trajectory.versions, default=-1),
        is_own=mask,
        versions=trajectory.versions or [-1],
        prompt_ids=trajectory.prompt_ids,
        episode=episode,
    )
