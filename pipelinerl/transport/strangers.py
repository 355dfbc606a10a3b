"""Counts those whom ZeroMQ turned away at the door: without a key, with a key that is not on the list, or not speaking its language.

They are the connections that ended without a handshake. ZeroMQ also reports why a handshake failed, but the same report of later bytes that
it cannot decrypt overwrites the error it is about to act on (libzmq 4.3.5): it then neither reads that connection nor closes it.
"""

from __future__ import annotations

import collections
import itertools

import zmq
from zmq.utils.monitor import recv_monitor_message

_numbers = itertools.count()


class Strangers:
    """Listens to what a bound socket reports of its connections; make one before the socket is bound."""

    def __init__(self, socket: zmq.Socket[bytes], *, refused: collections.Counter[str]) -> None:
        self._socket = socket
        self._refused = refused
        self._outside: dict[int, None] = {}
        """Descriptors of connections without a handshake, the oldest first."""
        address = f"inproc://strangers-{next(_numbers)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._reports = socket.context.socket(zmq.PAIR)
        self._reports.rcvhwm = 0  # ZeroMQ's own thread would wait where reports were not read
        self._reports.linger = 0
        self._reports.connect(address)

    def count(self) -> None:
        """Book the reports since the last call."""
        while True:
            try:
                report = recv_monitor_message(self._reports, zmq.NOBLOCK)
            except zmq.Again:
                return
            match report["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._outside[report["value"]] = None
                case zmq.EVENT_HANDSHAKE_SUCCEEDED if self._outside:  # of which, it does not say; the sum is right once both are gone
                    del self._outside[next(iter(self._outside))]
                case zmq.EVENT_DISCONNECTED if report["value"] in self._outside:
                    del self._outside[report["value"]]
                    self._refused["unauthenticated"] += 1
                case _:
                    pass

    def close(self) -> None:
        self._socket.disable_monitor()
        self._reports.close()
