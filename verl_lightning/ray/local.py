"""A Ray cluster of this machine alone: on the loopback interface, behind a token that nobody else can read."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl_lightning.compat import ray as compat

_PROBE_SECONDS = 5.0  # for the head of a cluster to take a connection; Ray itself waits a minute


def start() -> None:
    """Starts a cluster that ends with this process, and joins it."""
    import ray

    protect_token()
    compat.use_loopback()
    with own_handler(signal.SIGTERM):
        ray.init(address="local")


def join(address: str | None) -> None:
    """Joins a cluster that runs.

    Args:
        address: Address of its head; ``auto`` or None for the one on this machine.
    """
    import ray

    with own_handler(signal.SIGTERM):
        ray.init(address=address)


def running_address(wanted: str = "") -> str | None:
    """Address of the cluster that runs on this machine; None if there is none, or one that has died.

    Args:
        wanted: ``auto`` for any; else the newest that was started by ``ray start``.
    """
    try:
        address = compat.address_on_this_machine(wanted or None)
    except ConnectionError:
        return None
    return None if address is None or why_silent(address) else address


def why_silent(address: str) -> str:
    """Says why nobody answers at an address like ``10.0.0.1:6379`` or ``ray://HOST:10001``; empty if somebody does."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return ""  # Ray says what it takes
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except OSError as error:
        return str(error)
    return ""


def protect_token() -> None:
    """Makes the file of the token, with which Ray runs anybody's code, readable for its owner alone."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(exist_ok=True)
    with suppress(FileExistsError):  # else Ray makes it, for all to read
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    with suppress(PermissionError):  # somebody else's
        path.chmod(0o600)


@contextmanager
def own_handler(signum: signal.Signals) -> Iterator[None]:
    """Keeps this process's handler of a signal, in whose place Ray puts its own.

    Args:
        signum: Signal; for SIGTERM, Ray's handler exits, and for SIGINT it asks workers that are gone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signum)
    try:
        yield
    finally:
        signal.signal(signum, handler)
