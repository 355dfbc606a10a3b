"""CURVE on ZeroMQ's sockets: both ends show keys, and a connection without a key, or without signs of life, is closed."""

from __future__ import annotations

import zmq
import zmq.auth.thread

from pipelinerl.transport.keys import AllowList, KeyPair

HANDSHAKE_MS = 5000
"""Longest time that a new connection may take to show its key; then its connection is closed, so that those who have none keep no
descriptor. Shorter cuts off honest peers of a machine that is very busy, which connect again.
"""
HEARTBEAT_MS, DEAD_MS = 5000, 30000
"""Milliseconds between two signs of life, and without one until a connection is closed: a machine that lost its power says no goodbye."""


def configure(socket: zmq.Socket[bytes], keys: KeyPair, *, max_bytes: int) -> None:
    """Give a socket its keys and its bounds: no frame is longer than `max_bytes`. Closing waits for nothing, and sending drops nothing."""
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.maxmsgsize = max_bytes
    socket.handshake_ivl = HANDSHAKE_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, DEAD_MS


def authenticator(context: zmq.Context[zmq.Socket[bytes]], allow_list: AllowList) -> zmq.auth.thread.ThreadAuthenticator:
    """Let in those on the list alone, on all servers of the context; to be stopped before that is."""
    made = zmq.auth.thread.ThreadAuthenticator(context)
    made.start()
    made.configure_curve_callback(domain="*", credentials_provider=allow_list)
    return made


def bind(socket: zmq.Socket[bytes], interface: str) -> str:
    """Listen as a server on a port that the system picks; return the address. Raises `zmq.ZMQError` where nobody may listen there."""
    socket.curve_server = True
    socket.bind(f"tcp://{interface}:0")
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()  # pyright: ignore[reportArgumentType]
