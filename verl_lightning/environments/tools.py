"""Tools that the policy may call: their schemas, and answers to calls, each of which is a message that it reads."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from verl_lightning.data.messages import Message
from verl_lightning.environments.own_thread import run_in_thread
from verl_lightning.environments.tool_calls import MalformedCall, Reply, ToolCall
from verl_lightning.environments.workers import Answer, Workers
from verl_lightning.faults import closest
from verl_lightning.needs import INSTALL_AGENTS, missing_package
from verl_lightning.rewards.loading import find_object

TIMEOUT = 30.0
"""Seconds that a call of a tool may take unless more are set."""

ToolLike = str | Callable[..., Any]
"""A function or method, or the name of a function; where they mix with others, a `Tool` too."""

_WAYS_OUT = "Give an import path such as `package.module.function`, or a file such as `path/to/file.py:function`."


class Tool(ABC):
    """A tool as the policy sees it.

    Args:
        schema: Its name, description and arguments, in the form that chat templates take.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.name: str = schema["function"]["name"]

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        parameters: dict[str, Any] = self.schema["function"].get("parameters") or {"type": "object"}
        return parameters

    @abstractmethod
    async def call(self, arguments: dict[str, Any]) -> Answer:
        """Call the tool.

        Args:
            arguments: Arguments by name, which fit the schema.
        """

    def stop(self) -> None:  # noqa: B027
        """Give back what the tool holds; a later call takes it again."""


class FunctionTool(Tool):
    """A function that runs in a process of its own.

    Args:
        function: Typed and documented function.
        workers: Process with the function.
        number: Number of the function there.
        timeout: Most seconds that a call may take.
    """

    def __init__(self, function: Callable[..., Any], workers: Workers, number: int, timeout: float) -> None:
        super().__init__(tool_schema(function))
        self._workers = workers
        self._number = number
        self._timeout = timeout

    async def call(self, arguments: dict[str, Any]) -> Answer:
        """Call the function in its process."""
        return await self._workers.call(self._number, keywords=arguments, timeout=self._timeout)

    def stop(self) -> None:
        """End the process."""
        self._workers.stop()


class MethodTool(Tool):
    """A method of an episode's environment, which runs where the environment does, one call after another.

    Args:
        method: Typed and documented method; one that is not ``async`` runs in a thread of its own.
        timeout: Most seconds that a call may take.
    """

    def __init__(self, method: Callable[..., Any], timeout: float) -> None:
        super().__init__(tool_schema(method))
        self._method = method
        self._timeout = timeout
        self._lock = asyncio.Lock()

    async def call(self, arguments: dict[str, Any]) -> Answer:
        """Call the method."""
        try:
            async with self._lock, asyncio.timeout(self._timeout) as limit:
                if inspect.iscoroutinefunction(self._method):
                    return Answer(value=await self._method(**arguments))
                return Answer(value=await run_in_thread(partial(self._method, **arguments)))
        except (Exception, SystemExit) as error:  # of the user's code, which the policy reads
            if limit.expired():
                return Answer(is_timeout=True)
            return Answer(error=f"{type(error).__name__}: {error}")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function, as transformers makes it of its types and documentation.

    Raises:
        ValueError: If it lacks them.
    """
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"The tool `{name}` can't be described to the policy: {error} A tool needs a docstring with an `Args`"
            " section in Google style, and a type for each argument."
        ) from error
    return schema


def function_tools(
    functions: Sequence[ToolLike],
    *,
    timeout: float = TIMEOUT,
    variables: Collection[str] | None = None,
    key: str = "rollout.environment.tools",
) -> list[Tool]:
    """Return tools that are functions, all in one process.

    Args:
        functions: Functions or their names.
        timeout: Most seconds that a call may take.
        variables: Environment variables that they see beside the basic ones; None for all.
        key: Option under which they were given.

    Raises:
        ValueError: If one does not import, or has no types or documentation.
    """
    found = [find_object(f, f"`{key}: {f}`", _WAYS_OUT) if isinstance(f, str) else f for f in functions]
    workers = Workers(functions, variables=variables, key=key)
    return [FunctionTool(function, workers, number, timeout) for number, function in enumerate(found)]


@dataclass(kw_only=True)
class Tally:
    """What became of the calls of a turn."""

    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return the numbers as an environment's metrics."""
        return {f"tool_{name}": float(value) for name, value in vars(self).items()}


@dataclass(kw_only=True)
class Toolbox:
    """The tools of an environment, by name."""

    tools: Sequence[Tool]
    """Tools."""

    max_answer: int = 20_000
    """Most characters of an answer that the policy reads; of a longer one it reads the first and last."""

    by_name: dict[str, Tool] = field(init=False)

    def __post_init__(self) -> None:
        if (complaint := missing_package("Tools", "jsonschema", INSTALL_AGENTS)) is not None:
            raise ValueError(complaint)
        self.by_name = {tool.name: tool for tool in self.tools}
        if len(self.by_name) < len(self.tools):
            names = [tool.name for tool in self.tools]
            raise ValueError(f"Tools must have different names, got {', '.join(names)}.")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas for the chat template."""
        return [tool.schema for tool in self.tools]

    async def answer(
        self, calls: Sequence[ToolCall | MalformedCall], call_ids: Sequence[str]
    ) -> tuple[list[Message], Tally]:
        """Make all calls of a turn at once, and return an answer to each.

        Args:
            calls: Calls in their order; a malformed one is answered by its complaint.
            call_ids: Their names.
        """
        begin = time.monotonic()
        answers = await asyncio.gather(*map(self._answer, calls))
        messages: list[Message] = [
            {"role": "tool", "name": call.name or "invalid", "tool_call_id": call_id, "content": self._text(answer)}
            for call, call_id, answer in zip(calls, call_ids, answers, strict=True)
        ]
        timeouts = sum(answer.is_timeout for answer in answers)
        errors = sum(bool(answer.error) for answer in answers)
        return messages, Tally(calls=len(calls), errors=errors, timeouts=timeouts, seconds=time.monotonic() - begin)

    async def _answer(self, call: ToolCall | MalformedCall) -> Answer:
        if isinstance(call, MalformedCall):
            return Answer(error=call.complaint)
        if (tool := self.by_name.get(call.name)) is None:
            close = closest(call.name, self.by_name)
            return Answer(error=f"There is no tool {call.name!r}.{close} The tools are {', '.join(self.by_name)}.")
        if (complaint := wrong_arguments(call.arguments, tool.parameters)) is not None:
            return Answer(error=f"{call.name}: {complaint}")
        return await tool.call(call.arguments)

    def _text(self, answer: Answer) -> str:
        if answer.is_timeout:
            return "Error: the tool ran out of time."
        if answer.error:
            return self._cut(f"Error: {answer.error}")
        if isinstance(answer.value, str):
            return self._cut(answer.value)
        return self._cut(json.dumps(answer.value, ensure_ascii=False, default=str))

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_answer:
            return text
        half = self.max_answer // 2
        return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def wrong_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """Say how arguments do not fit a JSON schema; None if they do. Unknown ones never fit."""
    import jsonschema

    if unknown := arguments.keys() - schema.get("properties", arguments).keys():
        return f"unknown argument {min(unknown)!r}. The arguments are {', '.join(schema['properties']) or 'none'}."
    strict = jsonschema.Draft202012Validator(with_nullable(schema))
    error = jsonschema.exceptions.best_match(strict.iter_errors(arguments))
    if error is None:
        return None
    place = ".".join(map(str, error.absolute_path))
    return f"argument {place!r}: {error.message[:200]}." if place else f"{error.message[:200]}."


def with_nullable(schema: Any) -> Any:
    """Return a schema in which transformers' ``nullable`` is a type of JSON schema's own."""
    if isinstance(schema, list):
        return [with_nullable(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {key: with_nullable(value) for key, value in schema.items()}
    if changed.pop("nullable", None) is True:
        return {"anyOf": [changed, {"type": "null"}]}
    return changed


def with_types(reply: Reply, schemas: Sequence[dict[str, Any]]) -> Reply:
    """Return a reply whose calls have the values that their tools' schemas say, where the format writes bare text.

    Args:
        reply: Reply of the policy.
        schemas: Schemas of the tools. What does not fit them stays text.
    """
    functions = [schema.get("function", schema) for schema in schemas]
    parameters = {function["name"]: function.get("parameters") or {} for function in functions}
    return dataclasses.replace(reply, calls=tuple(_typed(call, parameters) for call in reply.calls))


def _typed(call: ToolCall | MalformedCall, parameters: Mapping[str, dict[str, Any]]) -> ToolCall | MalformedCall:
    if isinstance(call, MalformedCall) or not call.has_text_values:
        return call
    properties = parameters.get(call.name, {}).get("properties", {})
    values = {name: _read_value(text, properties.get(name, {})) for name, text in call.arguments.items()}
    return ToolCall(name=call.name, arguments=values, call_id=call.call_id)


def _read_value(text: Any, schema: Mapping[str, Any]) -> Any:
    is_text_wanted = schema.get("type") == "string" or "string" in str(schema.get("type", ""))
    if not isinstance(text, str) or (is_text_wanted and not (schema.get("nullable") and text.strip() == "null")):
        return text
    words = {"True": True, "False": False, "None": None}
    if text.strip() in words:
        return words[text.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
