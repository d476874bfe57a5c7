"""Runs a function on several gloo ranks, each a fork of the test process, and returns what each rank returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls ``function(*args)`` on each rank as under torchrun; raises what a rank raised, or if one hangs."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=_run, args=(send, rank, world_size, port, function, args))
        for rank, (_, send) in enumerate(pipes)
    ]
    for process, (_, send) in zip(ranks, pipes, strict=True):
        process.start()
        send.close()  # so that a dead rank is noticed at once
    try:
        results = [_result(receive, timeout) for receive, _ in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if problems := [problem for _, problem in results if problem]:
        raise AssertionError("\n".join(problems))
    return [value for value, _ in results]


def _result(receive: Connection, timeout: float) -> tuple[Any, str | None]:
    # As bytes: torch would send a tensor as a file that its process must keep open.
    return (
        pickle.loads(receive.recv_bytes()) if receive.poll(timeout) else (None, f"a rank said nothing for {timeout} s")
    )


def _run(
    send: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests"}
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray, if an earlier test has started it, left a handler
    try:
        send.send_bytes(pickle.dumps((function(*args), None)))
    except BaseException:
        send.send_bytes(pickle.dumps((None, f"rank {rank}: {traceback.format_exc()}")))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
