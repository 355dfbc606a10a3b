"""Counts those whom ZeroMQ turned away at the door: without a key, with a key that is not on the list, or not speaking its language."""

from __future__ import annotations

import collections
import itertools

import zmq
from zmq.utils.monitor import recv_monitor_message

_numbers = itertools.count()
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Strangers:
    """Listens to a bound socket's own reports of failed handshakes; make one before the socket is bound."""

    def __init__(self, socket: zmq.Socket[bytes], *, refused: collections.Counter[str]) -> None:
        self._socket = socket
        self._refused = refused
        address = f"inproc://strangers-{next(_numbers)}"
        socket.monitor(address, _REFUSALS)
        self._reports = socket.context.socket(zmq.PAIR)
        self._reports.rcvhwm = 0  # ZeroMQ's own thread would wait where reports were not read
        self._reports.linger = 0
        self._reports.connect(address)

    def count(self) -> None:
        """Book the reports since the last call."""
        while True:
            try:
                event = recv_monitor_message(self._reports, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] & _REFUSALS:
                self._refused["unauthenticated"] += 1

    def close(self) -> None:
        self._socket.disable_monitor()
        self._reports.close()
