"""The loopback interface, on which the processes of one machine can reach one another and nobody else can."""

from __future__ import annotations

import os
import socket

ADDRESS = "127.0.0.1"


def use_for(*libraries: str) -> None:
    """Has libraries of collectives listen on the loopback interface, unless the user has named another one.

    Args:
        libraries: Names among ``GLOO`` and ``NCCL``.
    """
    interface = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for library in libraries:
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        port: int = listener.getsockname()[1]
        return port
