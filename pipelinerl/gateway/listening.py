"""A server's socket, and uvicorn's server around it: what every HTTP server of this program begins with."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from pipelinerl.gateway.limits import Protocol
from pipelinerl.runtime.network import bind

KEEP_ALIVE_S = 75
"""Longest time that a connection may be idle between two requests."""


class Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to the process: the launcher ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_of(app: Any, *, max_connections: int) -> Server:
    """Return a server of an application, with deadlines and bounds on what comes before a body."""
    return Server(
        uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_level="error",  # a warning for each malformed request would let strangers fill the disk of the run
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            limit_concurrency=max_connections,
        )
    )


def listen(interface: str, port: int, *, section: str) -> tuple[socket.socket, str]:
    """Return a listening socket and its URL; port 0 takes a free one. Raises `ConfigError` naming the `section` of the settings."""
    listener = bind(interface, port, keys=f"{section}.")
    host, port = listener.getsockname()[:2]
    return listener, f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def remember(path: Path, said: Mapping[str, Any]) -> None:
    """Write down, for the owner alone, where a server listens and with which secret."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(draft, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(said, file)
    draft.replace(path)
