"""The server that agents ask: OpenAI's API on the loopback interface, with a key for each episode."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

from verl_lightning.environments.agent_session import AgentSession
from verl_lightning.environments.openai_api import APIError, APIRequest, Choice, Kind, answer_body, events, read_request
from verl_lightning.needs import INSTALL_AGENTS, missing_package
from verl_lightning.processes import loopback

if TYPE_CHECKING:
    from aiohttp import web

T = TypeVar("T")

_MAX_BODY = 2**26  # bytes of a request


class AgentServer:
    """Answers agents while a batch is sampled, in the event loop that samples.

    Use it in an ``async with``, at whose end nobody is answered any more.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._failure: asyncio.Future[None] | None = None
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    def open(self, session: AgentSession) -> str:
        """Return a new key, which reaches a session until it is closed."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """Have a key reach nothing any more."""
        self._sessions.pop(key).is_over = True

    async def __aenter__(self) -> Self:
        """Begin to listen, at a port that is free.

        Raises:
            ValueError: If aiohttp is not installed.
        """
        if (complaint := missing_package("`rollout.environment.agent`", "aiohttp", INSTALL_AGENTS)) is not None:
            raise ValueError(complaint)
        from aiohttp import web

        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._handler("chat.completion"))
        app.router.add_post("/v1/completions", self._handler("text_completion"))
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._nothing)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, loopback.ADDRESS, 0)
        await site.start()
        self.base_url = f"http://{loopback.ADDRESS}:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stop listening."""
        assert self._runner is not None
        await self._runner.cleanup()

    def _handler(self, kind: Kind) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                asked = read_request(await _body(request), kind)
                answer = session.chat if kind == "chat.completion" else session.complete
                return await _send(request, await answer(asked), kind, asked)
            except APIError as error:
                return _json_response(error.body, error.status)
            except Exception as error:  # of the engine: it is the run's, and no agent's
                if self._failure is not None and not self._failure.done():
                    self._failure.set_exception(error)
                return _json_response(APIError("The run has failed.", status=500).body, 500)

        return handle

    async def watch(self, work: Awaitable[T]) -> T:
        """Wait for some work, which is given up if the engine fails meanwhile.

        Args:
            work: Work that waits for agents.
        """
        self._failure = failure = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: None if failure.done() else failure.set_result(None))
        await asyncio.wait({failure})
        if (error := failure.exception()) is None:
            return await task
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        raise error

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except APIError as error:
            return _json_response(error.body, error.status)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "verl-lightning"}
        return _json_response({"object": "list", "data": [model]}, 200)

    async def _nothing(self, request: web.Request) -> web.Response:
        error = APIError(f"Unknown request URL: {request.method} {request.path}.", status=404, code="unknown_url")
        return _json_response(error.body, error.status)

    def _session(self, request: web.Request) -> AgentSession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key) if scheme == "Bearer" else None
        if session is None:
            raise APIError("Incorrect API key provided.", status=401, code="invalid_api_key")
        return session


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise APIError("The body must be a JSON object.") from error


async def _send(request: web.Request, choices: list[Choice], kind: Kind, asked: APIRequest) -> web.StreamResponse:
    from aiohttp import web

    name = f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{secrets.token_hex(12)}"
    body = answer_body(choices, kind, name=name, created=int(time.time()), has_log_probs=asked.has_log_probs)
    if not asked.is_streamed:
        return _json_response(body, 200)
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    for event in events(body):
        await stream.write(f"data: {json.dumps(event)}\n\n".encode())
    await stream.write(b"data: [DONE]\n\n")
    await stream.write_eof()
    return stream


def _json_response(body: dict[str, Any], status: int) -> web.Response:
    from aiohttp import web

    return web.json_response(body, status=status)
