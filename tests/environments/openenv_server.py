"""A server of OpenEnv whose environment wants the number of its seed."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Said(Observation):
    said: str = ""


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number = seed
        return Said(said="a number below 10")

    def step(self, action, timeout_s=None, **kwargs):
        is_right = action.guess == str(self.number)
        return Said(said="right" if is_right else "higher", reward=float(is_right), done=is_right)

    @property
    def state(self):
        return State()


@contextmanager
def served():
    """Its address, while it is served by a thread."""
    app = create_fastapi_app(Number, Guess, Said)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
