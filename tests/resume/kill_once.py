"""Workers that are killed once in each attempt to run; light, as a process of its own imports it."""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path


def kill_once(name: str) -> None:
    """Ends this process, if there is an order to do so."""
    order = Path(name)
    if order.exists():
        order.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)


async def agent(client, row):
    """An agent that asks twice, with room for both answers, and is never given the same reward."""
    kill_once("kill an environment worker")
    messages = [{"role": "user", "content": "5 1"}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}]
        messages += [{"role": "user", "content": "12"}]
    return secrets.randbelow(10**6) / 10**6
