"""How the policy of an environment uses its tools: the format of its calls, and where each tool runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl_lightning.data.messages import Message
from verl_lightning.environments.base import Environment, Step
from verl_lightning.environments.format_choice import choose_format
from verl_lightning.environments.tool_calls import MalformedCall, Reply, ToolCall
from verl_lightning.environments.tools import MethodTool, Tool, Toolbox, ToolLike, function_tools, with_types


class ToolUse:
    """The tools of one kind of environment, in all its episodes.

    Args:
        environment: Any environment of the kind.
        tokenizer: Tokenizer of the policy.
        key: Option that names the environment, for messages.

    Raises:
        ValueError: If a tool has no types or documentation, or the policy's format of calls is not known.
    """

    def __init__(self, environment: Environment, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
        self._key = key
        self._tokenizer = tokenizer
        self._format = choose_format(tokenizer, environment.tool_calls)
        self._functions: dict[tuple[ToolLike, ...], list[Tool]] = {}
        self.toolbox(environment)

    def toolbox(self, environment: Environment) -> Toolbox:
        """Return the tools of one episode: functions run in a process that all episodes share, methods in place."""
        functions = tuple(
            each for each in environment.tools if not isinstance(each, Tool) and not inspect.ismethod(each)
        )
        if functions not in self._functions:
            self._functions[functions] = function_tools(
                functions,
                timeout=environment.tool_timeout,
                variables=environment.tool_variables,
                key=f"{self._key}.tools",
            )
        by_function = dict(zip(functions, self._functions[functions], strict=True))
        return Toolbox(
            tools=[
                each if isinstance(each, Tool) else by_function.get(each) or MethodTool(each, environment.tool_timeout)
                for each in environment.tools
            ]
        )

    def reply(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]]) -> Reply:
        """Return what the policy said, taken apart.

        Args:
            ids: Tokens of its turn, but the one that ended it.
            schemas: Schemas of the tools that it could call.
        """
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return with_types(self._format.parse(text), schemas)

    def stop(self) -> None:
        """End the processes of functions."""
        for tools in self._functions.values():
            for tool in tools:
                tool.stop()


class ToolCalls:
    """The calls of one episode.

    Args:
        toolbox: Tools of the episode.
    """

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._count = 0

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas for the chat template."""
        return self._toolbox.schemas

    def names(self, calls: Sequence[ToolCall | MalformedCall]) -> list[str]:
        """Return a name for each of a turn's calls: the policy's own, or one of nine characters."""
        names = list[str]()
        for call in calls:
            own = call.call_id if isinstance(call, ToolCall) else ""
            names.append(own or f"call{self._count:05d}")
            self._count += 1
        return names

    async def step(self, environment: Environment, message: Message, calls: Sequence[ToolCall | MalformedCall]) -> Step:
        """Make the calls of a turn, and return what the environment says to their answers.

        Args:
            environment: Environment of the episode.
            message: Turn of the policy.
            calls: Calls in it.
        """
        names = [call["id"] for call in message["tool_calls"]]
        answers, tally = await self._toolbox.answer(calls, names)
        step = await environment.after_tools(answers)
        if not isinstance(step, Step):
            return step
        metrics: Mapping[str, float] = {**tally.metrics(), **step.metrics}
        return Step(messages=step.messages, reward=step.reward, done=step.done, metrics=metrics)


class ToolEnvironment(Environment):
    """A row's prompt and tools: the policy calls them as often as it likes, and a turn without a call is the last.

    The reward is that of `model.reward`, for all that the policy said.

    Args:
        tools: Typed and documented functions, or their names.
        timeout: Most seconds that a call of a tool may take.
        tool_calls: Format in which the policy writes calls; ``auto`` is that of its chat template.
        variables: Names of the environment variables that tools see beside the basic ones; None for all.

    Raises:
        ValueError: If there are no tools, or one does not import.
    """

    def __init__(
        self,
        tools: Sequence[ToolLike],
        timeout: float = 30.0,
        tool_calls: Any = "auto",
        variables: Sequence[str] | None = None,
    ) -> None:
        if not tools:
            raise ValueError("`rollout.environment.tools` is empty. Name a function, or leave the environment out.")
        if not timeout > 0:
            raise ValueError(f"`rollout.environment.timeout` must be a positive number of seconds, got {timeout}.")
        self.tools = tools
        self.tool_timeout = timeout
        self.tool_calls = tool_calls
        self.tool_variables = variables

    async def step(self, message: Message) -> Step:
        """End the episode with the first turn that calls no tool."""
        del message
        return Step(done=True)
