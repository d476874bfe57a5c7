"""Tools of an MCP server, which each episode starts for itself and speaks to by stdin and stdout."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

from verl_lightning.environments.base import Environment, Message, Row, Step
from verl_lightning.environments.tools import Tool
from verl_lightning.environments.workers import Answer
from verl_lightning.needs import missing_package

if TYPE_CHECKING:
    from mcp import Client


class MCPEnvironment(Environment):
    """A row's prompt and the tools of an MCP server; a turn that calls none is the last.

    Args:
        command: Program that serves MCP on its stdin and stdout, with its arguments.
        variables: Environment variables of the server beside those that MCP always passes on.
        timeout: Most seconds that a call of a tool may take.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None, timeout: float = 30.0
    ) -> None:
        self._server = tuple(command), tuple(sorted((variables or {}).items()))
        self.tool_timeout = timeout
        self.tools = [MCPTool(name, text, schema, self) for name, text, schema in _listed(self._server)]
        self._end = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self.client: Client | None = None

    async def reset(self, row: Row) -> Sequence[Message]:
        """Start the server."""
        ready = asyncio.get_running_loop().create_future()
        # One task opens and closes the connection, as the package asks; calls may come from others.
        self._life = asyncio.create_task(self._live(ready))
        await asyncio.wait({ready, self._life}, return_when=asyncio.FIRST_COMPLETED)
        if self._life.done():
            self._life.result()
        messages: Sequence[Message] = row["prompt"]
        return messages

    async def step(self, message: Message) -> Step:
        """End the episode with the first turn that calls no tool."""
        del message
        return Step(done=True)

    async def close(self) -> None:
        """End the server."""
        self._end.set()
        if self._life is not None:
            await self._life

    async def _live(self, ready: asyncio.Future[None]) -> None:
        async with _connect(self._server) as self.client:
            ready.set_result(None)
            await self._end.wait()


class MCPTool(Tool):
    """A tool of an MCP server.

    Args:
        name: Its name.
        description: What it does.
        parameters: JSON schema of its arguments.
        environment: Environment that is connected to the server.
    """

    def __init__(self, name: str, description: str, parameters: dict[str, Any], environment: MCPEnvironment) -> None:
        function = {"name": name, "description": description, "parameters": parameters}
        super().__init__({"type": "function", "function": function})
        self._environment = environment

    async def call(self, arguments: dict[str, Any]) -> Answer:
        """Call the tool; the server's errors are answers."""
        client = self._environment.client
        assert client is not None
        try:
            async with asyncio.timeout(self._environment.tool_timeout):
                result = await client.call_tool(self.name, arguments)
        except TimeoutError:
            return Answer(is_timeout=True)
        except Exception as error:  # of the server, which the policy reads
            return Answer(error=f"{type(error).__name__}: {error}")
        text = "\n".join(str(getattr(part, "text", part)) for part in result.content)
        return Answer(error=text or "the tool has failed") if result.is_error else Answer(value=text)


def _connect(server: tuple[tuple[str, ...], tuple[tuple[str, str], ...]]) -> Client:
    if (complaint := missing_package("`MCPEnvironment`", "mcp", "Install `mcp`.")) is not None:
        raise ValueError(complaint)
    from mcp import Client, StdioServerParameters, stdio_client

    (command, *arguments), variables = server
    return Client(stdio_client(StdioServerParameters(command=command, args=arguments, env=dict(variables))))


@cache
def _listed(
    server: tuple[tuple[str, ...], tuple[tuple[str, str], ...]],
) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns name, description and schema of a server's tools; asked once, in a thread with a loop of its own."""

    async def ask() -> list[tuple[str, str, dict[str, Any]]]:
        async with _connect(server) as client:
            tools = (await client.list_tools()).tools
        return [(tool.name, tool.description or "", tool.input_schema) for tool in tools]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask()).result()
