"""Requests of one agent to the policy in its episode, kept as tokens: each history is a trajectory."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl_lightning.environments.chat import Chat, History
from verl_lightning.environments.format_choice import choose_format
from verl_lightning.environments.openai_api import APIError, APIRequest, Choice
from verl_lightning.environments.tool_calls import MalformedCall, Reply, ToolCallFormat
from verl_lightning.environments.tools import with_types
from verl_lightning.environments.trajectory import Trajectory
from verl_lightning.rollout.base import Completion, Request
from verl_lightning.seeding import derive_seed


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """The policy, and how its text is read."""

    generate: Any
    """Function that samples a turn: `Engine.generate`."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""

    eos_token_ids: Collection[int]
    """Tokens that end a turn."""

    max_prompt_length: int | None
    """Most tokens of a prompt that has no answers in it; None sets no limit."""

    enable_thinking: bool | None
    """Value for the chat template; None leaves it to the template."""

    history: History
    """Treatment of templates that write earlier turns anew; with ``refuse`` such a history is a trajectory anew."""

    tool_calls: str | ToolCallFormat
    """Format of tool calls."""

    @cached_property
    def form(self) -> ToolCallFormat:
        """Format of tool calls.

        Raises:
            APIError: If it is not known.
        """
        try:
            return choose_format(self.tokenizer, self.tool_calls)
        except ValueError as error:
            raise APIError(str(error), param="tools") from error


@dataclass(kw_only=True)
class Point:
    """A place in a trajectory, after a turn of the policy, at which an agent may go on."""

    key: list[str]
    """All messages so far, each in one form whatever the agent leaves out of it; tools before them."""

    chat: Chat
    """Conversation so far."""

    ids: list[int]
    """All tokens so far."""

    last: str | None
    """Text of the token that ended the turn; None if it was cut off."""

    trajectory: Trajectory
    """Trajectory of the turn."""

    is_open: bool = True
    """True until somebody goes on here; whoever comes later begins a branch."""


@dataclass(kw_only=True)
class AgentSession:
    """One agent's episode."""

    speaker: Speaker
    """Policy that answers."""

    request: Request
    """Request for the episode: its sampling, and the most tokens that may follow a prompt."""

    trajectories: list[Trajectory] = field(default_factory=list)
    """Histories so far, in the order of their newest turns."""

    overridden: set[str] = field(default_factory=set)
    """Parameters of sampling that the agent gave in vain."""

    is_over: bool = False
    """True once the agent has ended; it may ask no more."""

    _points: list[Point] = field(default_factory=list)
    _num_asked: int = 0
    _num_calls: int = 0

    def learnt_from(self) -> list[Trajectory]:
        """Return the histories with turns of the policy, each up to its last one, by their newest turns."""
        spoken = [trajectory for trajectory in self.trajectories if trajectory.num_turns]
        for trajectory in spoken:
            trajectory.cut(trajectory.ends[-1])
        return spoken

    async def chat(self, asked: APIRequest) -> list[Choice]:
        """Answer a chat.

        Raises:
            APIError: If the chat can't be rendered, or has no room for an answer.
        """
        self.overridden |= set(asked.overridden)
        return list(await asyncio.gather(*(self._chat(asked) for _ in range(asked.num_choices))))

    async def complete(self, asked: APIRequest) -> list[Choice]:
        """Answer a prompt without a chat; each is a trajectory of its own.

        Raises:
            APIError: If it has no room for an answer.
        """
        self.overridden |= set(asked.overridden)
        ids = self._ids(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt

        async def complete() -> Choice:
            trajectory = self._begin(ids)
            completion = await self._generate(trajectory, asked.max_tokens)
            reply = Reply(content=self._text(completion.token_ids, is_plain=True))
            trajectory.messages = [
                {"role": "user", "content": self._text(ids, is_plain=False)},
                {"role": "assistant", "content": reply.content},
            ]
            return self._choice(reply, [], completion, len(ids))

        return list(await asyncio.gather(*(complete() for _ in range(asked.num_choices))))

    async def _chat(self, asked: APIRequest) -> Choice:
        if asked.tools:
            _ = self.speaker.form  # refused before anything is sampled
        key = [json.dumps(asked.tools, sort_keys=True), *map(_form, asked.messages)]
        chat, trajectory = self._go_on(key, asked) or self._start(asked)
        num_prompt = len(trajectory.prompt_ids) + len(trajectory.ids)
        completion = await self._generate(trajectory, asked.max_tokens)
        end = completion.token_ids[-1:] if completion.token_ids[-1:] and self._is_end(completion) else []
        own = completion.token_ids[: len(completion.token_ids) - len(end)]
        reply = self._reply(own, asked.tools, is_truncated=completion.is_truncated)
        ids = self._call_ids(reply)
        message = reply.to_message(ids)
        chat.add_turn(message)
        trajectory.messages = chat.messages
        self._points.append(
            Point(
                key=[*key, _form(message)],
                chat=chat,
                ids=trajectory.prompt_ids + trajectory.ids,
                last=str(self.speaker.tokenizer.convert_ids_to_tokens(end[0])) if end else None,
                trajectory=trajectory,
            )
        )
        return self._choice(reply, ids, completion, num_prompt)

    def _go_on(self, key: list[str], asked: APIRequest) -> tuple[Chat, Trajectory] | None:
        """Find the longest history that the messages go on from; None if there is none that they leave as it was."""
        points = [point for point in self._points if point.key == key[: len(point.key)] and len(point.key) < len(key)]
        for point in sorted(points, key=lambda point: (len(point.key), point.is_open), reverse=True):
            new = asked.messages[len(point.key) - 1 :]
            if any(message["role"] == "assistant" for message in new):
                continue
            chat = copy.copy(point.chat)
            chat.messages = list(point.chat.messages)
            try:
                read = chat.add_reply(new, point.last)
            except ValueError:  # the template writes what was said anew, which is a history of its own
                continue
            if not point.is_open:
                return chat, self._begin(point.ids + read)
            self._check_room(len(point.trajectory.ids) + len(read), self.request.sampling.max_new_tokens)
            point.is_open = False
            point.trajectory.add_read(read)
            return chat, point.trajectory
        return None

    def _start(self, asked: APIRequest) -> tuple[Chat, Trajectory]:
        """Begin a history with all messages as the template writes them."""
        speaker = self.speaker
        values: dict[str, Any] = {"tools": asked.tools} if asked.tools else {}
        chat = Chat(
            speaker.tokenizer,
            values,
            name=self.request.name,
            enable_thinking=speaker.enable_thinking,
            history=speaker.history,
        )
        try:
            ids = chat.begin(asked.messages)
        except ValueError as error:
            raise APIError(str(error), param="messages") from error
        return chat, self._begin(ids)

    def _begin(self, prompt_ids: list[int]) -> Trajectory:
        room, limit = self.request.sampling.max_new_tokens, self.speaker.max_prompt_length
        if limit is not None:
            self._check_room(len(prompt_ids), limit + room)
        trajectory = Trajectory(prompt_ids=list(prompt_ids))
        self.trajectories.append(trajectory)
        return trajectory

    def _check_room(self, num_tokens: int, limit: int) -> None:
        if num_tokens >= limit:
            raise APIError(
                f"This model's maximum context length is {limit} tokens, but the messages have {num_tokens}: raise"
                " `rollout.sampling.max_new_tokens` or `data.max_prompt_length`, or send less.",
                code="context_length_exceeded",
                param="messages",
            )

    async def _generate(self, trajectory: Trajectory, max_tokens: int | None) -> Completion:
        request = trajectory.next_request(self.request)
        room, limit = request.sampling.max_new_tokens, self.speaker.max_prompt_length
        if limit is not None:
            room = min(room, limit + self.request.sampling.max_new_tokens - len(request.prompt_ids))
        number, self._num_asked = self._num_asked, self._num_asked + 1
        sampling = dataclasses.replace(request.sampling, max_new_tokens=min(room, max_tokens or room))
        completion: Completion = await self.speaker.generate(
            dataclasses.replace(request, sampling=sampling, seed=derive_seed("agent", self.request.seed, number))
        )
        if self.is_over:
            raise APIError("The episode is over.", status=401, code="invalid_api_key")
        trajectory.add_turn(completion)
        trajectory.is_truncated = completion.is_truncated
        self.trajectories.remove(trajectory)
        self.trajectories.append(trajectory)
        return completion

    def _reply(self, ids: list[int], tools: list[dict[str, Any]], *, is_truncated: bool) -> Reply:
        if not tools or is_truncated:
            return Reply(content=self._text(ids, is_plain=True))
        reply = self.speaker.form.parse(self._text(ids, is_plain=False))
        if any(isinstance(call, MalformedCall) for call in reply.calls):  # the agent sees what was said
            return Reply(content=self._text(ids, is_plain=True))
        return with_types(reply, tools)

    def _call_ids(self, reply: Reply) -> list[str]:
        first, self._num_calls = self._num_calls, self._num_calls + len(reply.calls)
        return [f"call{first + n:05d}" for n in range(len(reply.calls))]

    def _choice(self, reply: Reply, call_ids: list[str], completion: Completion, num_prompt: int) -> Choice:
        pieces = [str(self.speaker.tokenizer.decode([token])) for token in completion.token_ids]
        return Choice(
            reply=reply, call_ids=call_ids, completion=completion, num_prompt_tokens=num_prompt, pieces=pieces
        )

    def _is_end(self, completion: Completion) -> bool:
        return completion.token_ids[-1] in self.speaker.eos_token_ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.speaker.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _text(self, ids: list[int], *, is_plain: bool) -> str:
        return str(self.speaker.tokenizer.decode(ids, skip_special_tokens=is_plain))


def _form(message: Mapping[str, Any]) -> str:
    """Returns what counts in a message, whatever a client adds or leaves out."""
    calls = [_call_form(call) for call in message.get("tool_calls") or []]
    return json.dumps(
        [message["role"], message.get("content") or "", calls, message.get("tool_call_id")], sort_keys=True
    )


def _call_form(call: Mapping[str, Any]) -> list[Any]:
    function = call["function"]
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:  # it stays the text that it is
        return [call.get("id"), function["name"], arguments]
    return [call.get("id"), function["name"], arguments]
