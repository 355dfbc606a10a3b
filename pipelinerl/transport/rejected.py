"""Counts the connections that ZeroMQ rejected: without a key, with a key that is not on the list, or with another protocol.

Only so many connections that have said nothing are kept, the newest: more would take the descriptors that the process needs for its files
and its peers. A peer that is shut out with them connects again.

Rejected connections are those that ended without a handshake. ZeroMQ also reports why a handshake failed, but the same report of later
bytes that it cannot decrypt overwrites the error it is about to act on (libzmq 4.3.5): it then neither reads that connection nor closes it.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import resource
import socket as sockets

import zmq
from zmq.utils.monitor import recv_monitor_message

_numbers = itertools.count()
_libc = ctypes.CDLL(None)
MAX_SILENT = 1024
"""Connections kept, of each socket, that have said nothing so far. More only costs memory; fewer shuts out peers that connect at once."""
SILENT_FRACTION = 8
"""One part in so many of the files that the process may open, if that is less: a run has three sockets, and needs files of its own."""


class RejectedConnections:
    """Listens to what a bound socket reports of its connections; make one before the socket is bound."""

    def __init__(self, socket: zmq.Socket[bytes], *, refused: collections.Counter[str], num_peers: int) -> None:
        """`num_peers` may connect, and at once: so many, and as many again, are always kept."""
        self._socket = socket
        self._refused = refused
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_silent = max(min(MAX_SILENT, most // SILENT_FRACTION), 2 * num_peers)
        self._silent: dict[int, None] = {}
        """Descriptors of connections on which nothing was heard, the oldest first."""
        self._outside: dict[int, None] = {}
        """Descriptors of connections without a handshake, the oldest first."""
        address = f"inproc://rejected-{next(_numbers)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._reports = socket.context.socket(zmq.PAIR)
        self._reports.rcvhwm = 0  # ZeroMQ's own thread would wait where reports were not read
        self._reports.linger = 0
        self._reports.connect(address)
        self.descriptor = int(self._reports.getsockopt(zmq.FD))
        """Readable once there are reports to be booked."""

    def heard(self, descriptor: int) -> None:
        """Somebody with a key has said something over a connection."""
        self._silent.pop(descriptor, None)

    def count(self) -> None:
        """Book the reports since the last call, and shut out the oldest of too many that are silent."""
        while True:
            try:
                report = recv_monitor_message(self._reports, zmq.NOBLOCK)
            except zmq.Again:
                break
            if report["event"] == zmq.EVENT_DISCONNECTED:
                self._silent.pop(report["value"], None)
            match report["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._outside[report["value"]] = self._silent[report["value"]] = None
                case zmq.EVENT_HANDSHAKE_SUCCEEDED if self._outside:  # of which, it does not say; the sum is right once both are gone
                    del self._outside[next(iter(self._outside))]
                case zmq.EVENT_DISCONNECTED if report["value"] in self._outside:
                    del self._outside[report["value"]]
                    self._refused["unauthenticated"] += 1
                case _:
                    pass

        while len(self._silent) > self._max_silent:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            # ZeroMQ notices, and closes it. Should it have done so just now, this meets what has the number since: no socket, or a
            # connection that will be made anew.
            _libc.shutdown(oldest, sockets.SHUT_RDWR)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._reports.close()
