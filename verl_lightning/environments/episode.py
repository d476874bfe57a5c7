"""One episode: the policy and an environment take turns until one of them ends it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from verl_lightning.environments.base import Environment, Message, Row, Step, as_messages, complaint_about
from verl_lightning.environments.chat import Chat, HistoryError
from verl_lightning.environments.config import EpisodesConfig, Make
from verl_lightning.environments.own_thread import LateError, OwnThread, Threads
from verl_lightning.environments.tool_calls import MalformedCall, ToolCall
from verl_lightning.environments.tool_use import ToolCalls, ToolUse
from verl_lightning.environments.trajectory import Trajectory
from verl_lightning.episodes import PastTrajectory
from verl_lightning.rollout.base import Completion, Request

T = TypeVar("T")
Generate = Callable[[Request], Awaitable[Completion]]

Schemas = list[dict[str, Any]]
"""Schemas of tools, for the chat template."""


class Talk(Protocol):
    """A conversation that turns messages into tokens, such as `Chat`."""

    @property
    def messages(self) -> Sequence[Message]:
        """All that was said so far."""

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Take the first messages; return the tokens that the policy answers."""

    def add_turn(self, message: Message) -> None:
        """Take what the policy said."""

    def add_reply(self, messages: Sequence[Message], last: str | None) -> list[int]:
        """Take new messages; return the tokens that follow the policy's turn.

        Raises:
            HistoryError: If what was said before must be written anew.
        """


class EpisodeError(Exception):
    """An episode that can't go on.

    Args:
        text: Reason, with the episode's name.
        is_timeout: True if the environment was late.
    """

    def __init__(self, text: str, *, is_timeout: bool = False) -> None:
        super().__init__(text)
        self.is_timeout = is_timeout


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy as an episode sees it."""

    generate: Generate
    """Function that samples a turn."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""

    eos_token_ids: Collection[int]
    """Tokens that end a turn."""

    def message(self, ids: Sequence[int]) -> Message:
        """Return what the policy said as a message."""
        return {"role": "assistant", "content": str(self.tokenizer.decode(list(ids), skip_special_tokens=True))}

    def last(self, ids: Sequence[int]) -> str | None:
        """Return the text of the token that ended a turn; None if the turn ended otherwise."""
        if not ids or ids[-1] not in self.eos_token_ids:
            return None
        return str(self.tokenizer.convert_ids_to_tokens(ids[-1]))


@dataclass(kw_only=True)
class Player:
    """One episode while it is played."""

    name: str
    """Name of the environment and of the episode, in messages."""

    kind: str
    """Name of the environment."""

    make: Make
    """Function that makes the episode's own world."""

    is_quick: bool
    """True if the world is known to answer at once; see `Environment.is_quick`."""

    start_talk: Callable[[Environment, Schemas | None], Talk]
    """Function that begins the conversation with an environment, with its tools; None without any."""

    policy: Policy
    """Speaker of the turns."""

    threads: Threads
    """Threads in which environments run."""

    config: EpisodesConfig
    """Limits of the episode."""

    max_prompt_length: int | None
    """Most tokens that the first messages may have; None sets no limit."""

    trajectory: Trajectory
    """All that was said so far, as tokens, since the history was last written anew."""

    past: list[PastTrajectory] = field(default_factory=list)
    """Trajectories that ended where the history was written anew."""

    seconds: list[float] = field(default_factory=list)
    """Seconds that each call of the environment took."""

    tool_use: ToolUse | None = None
    """Use of tools in environments of this kind; None where there are none."""

    environment: Environment | None = None
    talk: Talk | None = None
    tool_calls: ToolCalls | None = None

    async def play(self, row: Row, request: Request) -> None:
        """Walk through the episode.

        Args:
            row: Data row that it is about.
            request: Request for the first turn; its prompt is replaced by what the environment begins with.

        Raises:
            EpisodeError: If the environment fails, answers what it must not, or is late.
        """
        self._thread: OwnThread | None = self.threads.take()
        try:
            await self._walk(row, request)
        except BaseException:
            with suppress(EpisodeError):  # the first error says more
                await self._close()
            raise
        await self._close()

    async def _walk(self, row: Row, request: Request) -> None:
        talk = await self._begin(row)
        while True:
            trajectory = self.trajectory
            completion = await self.policy.generate(trajectory.next_request(request))
            trajectory.add_turn(completion)
            step = await self._step(talk, completion)
            if step.done:
                return
            is_last = completion.is_truncated or trajectory.turns_of_episode == self.config.max_turns
            if is_last or not self._go_on(talk, step, completion, request):
                self.trajectory.is_truncated = True
                return

    def _go_on(self, talk: Talk, step: Step, completion: Completion, request: Request) -> bool:
        """Add what the policy reads next; tell whether it has room to answer."""
        trajectory = self.trajectory
        messages = self._rendered(lambda: as_messages(step.messages))
        if not messages:
            raise EpisodeError(f"{self.name}: `step` must return messages, or say that the episode is `done`.")
        try:
            reply = self._rendered(lambda: talk.add_reply(messages, self.policy.last(completion.token_ids)))
        except HistoryError:
            assert isinstance(talk, Chat)
            said = talk.messages
            prompt = self._rendered(partial(talk.begin_anew, messages))
            has_room = self.max_prompt_length is None or len(prompt) <= self.max_prompt_length
            if has_room:
                trajectory.messages = said
                self.past.append(trajectory.as_past())
                self.trajectory = Trajectory(
                    prompt_ids=prompt, turns_before=trajectory.turns_of_episode, metrics=trajectory.metrics
                )
            return has_room
        if len(trajectory.ids) + len(reply) >= request.sampling.max_new_tokens:
            return False
        trajectory.add_read(reply)
        return True

    async def _begin(self, row: Row) -> Talk:
        """Make the environment, and take what it begins with."""

        async def begin() -> tuple[Environment, str | Sequence[Message]]:
            self.environment = environment = self.make()
            return environment, await environment.reset(row)

        environment, first = await self._call("reset", begin)
        if self.tool_use is not None:
            self.tool_calls = ToolCalls(self.tool_use.toolbox(environment))
        self.is_quick = environment.is_quick
        tools = None if self.tool_calls is None else self.tool_calls.schemas
        self.talk = talk = self._rendered(lambda: self.start_talk(environment, tools))
        self.trajectory.prompt_ids = self._rendered(lambda: talk.begin(as_messages(first)))
        length, limit = len(self.trajectory.prompt_ids), self.max_prompt_length
        if limit is not None and length > limit:
            raise EpisodeError(
                f"{self.name} begins with {length} tokens, more than `data.max_prompt_length` ({limit}). Raise it, or"
                " have `reset` return less."
            )
        return talk

    async def _step(self, talk: Talk, completion: Completion) -> Step:
        """Have the environment answer the policy's turn."""
        environment, tool_calls = self.environment, self.tool_calls
        assert environment is not None
        message, calls = self._turn(completion)
        talk.add_turn(message)
        if tool_calls is not None and calls:
            step = await self._call("tools", lambda: tool_calls.step(environment, message, calls))
        else:
            step = await self._call("step", lambda: environment.step(message))
        if (complaint := complaint_about(step)) is not None:
            raise EpisodeError(f"{self.name}: {complaint}")
        self.trajectory.add_reward(step.reward, step.metrics)
        return step

    def _turn(self, completion: Completion) -> tuple[Message, Sequence[ToolCall | MalformedCall]]:
        """Return what the policy said, and the calls of tools in it; a turn that was cut off calls none."""
        end = self.policy.last(completion.token_ids)
        ids = completion.token_ids if end is None else completion.token_ids[:-1]
        if self.tool_use is None or self.tool_calls is None or completion.is_truncated:
            return self.policy.message(ids), ()
        reply = self.tool_use.reply(ids, self.tool_calls.schemas)
        return reply.to_message(self.tool_calls.names(reply.calls)), reply.calls

    def _rendered(self, render: Callable[[], T]) -> T:
        try:
            return render()
        except ValueError as error:
            if isinstance(error, HistoryError) and self.config.history == "split":
                raise
            raise EpisodeError(f"{self.name}: {error}") from error

    async def _close(self) -> None:
        """End the environment; one whose thread is stuck is left behind."""
        if self._thread is None:
            return
        if self.environment is not None:
            await self._call("close", self.environment.close)
        self.threads.give_back(self._thread)

    async def _call(self, method: str, work: Callable[[], Awaitable[T]]) -> T:
        """Have the environment do something in its thread."""
        assert self._thread is not None
        begin, timeout = time.monotonic(), self.config.timeout
        try:
            done = await self.threads.run(
                self._thread,
                work,
                kind=f"{self.kind}.{method}",
                is_quick=self.is_quick,
                timeout=timeout,
            )
        except LateError as error:
            left = " Its thread is left behind, for nobody can end it." if error.is_stuck else ""
            self._thread = None if error.is_stuck else self._thread
            raise EpisodeError(
                f"{self.name}: `{method}` took longer than `rollout.episodes.timeout` ({timeout:g} s).{left}",
                is_timeout=True,
            ) from None
        finally:
            self.seconds.append(time.monotonic() - begin)
        if (raised := done.exception()) is not None:
            place = traceback.extract_tb(raised.__traceback__)[-1]
            raise EpisodeError(
                f"{self.name}: `{method}` raised {type(raised).__name__}: {raised} ({place.filename}:{place.lineno})."
            ) from raised
        return done.result()
