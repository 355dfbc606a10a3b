"""`python -m scripts.chaos.storm MODULE ...`: a process of the run whose messages get lost, doubled, delayed and reordered.

The faults happen between the product's session and its real socket, to whole frames; `<run>/storm.json` says how often. What happens
to bytes on the wire itself (cuts, changed bytes, delays) is `detours`. Each fault leaves one letter in `<run>/storm.log`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.transport import zmq as transport
from pipelinerl.transport.session import Session
from scripts.chaos import liar
from scripts.chaos.detours import detour_of
from scripts.chaos.witness import Witness

LETTERS = {"lost": b"l", "doubled": b"2", "delayed": b"d", "reordered": b"r"}
MAX_DELAY_S = 0.5


class Storm:
    """Faults on one socket's way out. Every frame suffers at most one."""

    def __init__(self, run_folder: Path, *, name: str) -> None:
        settings = json.loads((run_folder / "storm.json").read_text())
        self._chance = random.Random(f"{settings['seed']}/{name}/{os.getpid()}")
        self._fraction = settings["fraction"]
        self._log = os.open(run_folder / "storm.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._late: list[tuple[float, Callable[[], object]]] = []
        self._behind: list[Callable[[], object]] = []
        """Frames that the next one overtakes."""

    def carry(self, send: Callable[[], Any], *, lost: Any = None) -> Any:
        """Send now, twice, later, behind the next one, or never."""
        self.blow()
        fault = self._chance.choice(list(LETTERS)) if self._chance.random() < self._fraction else ""
        if fault:
            os.write(self._log, LETTERS[fault])
        if fault == "lost":
            return lost
        if fault == "delayed":
            self._late.append((time.monotonic() + MAX_DELAY_S * self._chance.random(), send))
            return lost
        if fault == "reordered":
            self._behind.append(send)
            return lost
        sent = send()
        if fault == "doubled":
            send()
        behind, self._behind = self._behind, []
        for overtaken in behind:
            overtaken()
        return sent

    def blow(self) -> None:
        """Send what has been late for long enough."""
        now = time.monotonic()
        due = [send for at, send in self._late if at <= now]
        self._late = [(at, send) for at, send in self._late if at > now]
        for send in due:
            send()

    def wait_s(self, timeout_s: float) -> float:
        """Return how long a wait may last so that nothing is later than it should be."""
        return min([timeout_s, *(max(0.0, at - time.monotonic()) for at, _ in self._late)])


def main() -> None:
    """Put the faults in, then run the module as `python -m` would."""
    module, arguments = sys.argv[1], sys.argv[2:]
    run_folder = Path(arguments[arguments.index("--run-folder") + 1])
    _on_hubs(run_folder)
    _on_links(run_folder)
    read = transport.read_endpoint
    transport.read_endpoint = lambda path, *, deadline_s: msgspec.structs.replace(
        read(path, deadline_s=deadline_s), address=detour_of(run_folder, path.stem)
    )
    if json.loads((run_folder / "storm.json").read_text())["liars"]:
        liar.install(run_folder)
        if module == "orchestrator":
            Witness(run_folder).install()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _on_hubs(run_folder: Path) -> None:
    carry = transport.ZmqHub._carry
    storms: dict[int, Storm] = {}

    def carry_in_storm(hub: transport.ZmqHub, peer: str, frame: bytes) -> bool:
        storm = storms.get(id(hub))
        if storm is None:
            storm = storms[id(hub)] = Storm(run_folder, name=hub._role)

        def blow() -> None:
            if not hub._socket.closed:
                storm.blow()
                asyncio.get_running_loop().call_later(0.05, blow)

        if hub._loop is not None and not hasattr(hub, "blows"):
            hub.blows = True  # pyright: ignore[reportAttributeAccessIssue]
            hub._loop.call_later(0.05, blow)
        return storm.carry(lambda: not hub._socket.closed and carry(hub, peer, frame), lost=True)

    transport.ZmqHub._carry = carry_in_storm  # pyright: ignore[reportAttributeAccessIssue]


def _on_links(run_folder: Path) -> None:
    make, receive = transport.ZmqLink.__init__, transport.ZmqLink.receive

    def make_in_storm(link: transport.ZmqLink, folder: Path, role: str, index: int, **options: Any) -> None:
        make(link, folder, role, index, **options)
        storm = Storm(run_folder, name=link.name)
        transmit = link._transmit
        link.storm = storm  # pyright: ignore[reportAttributeAccessIssue]
        session: Session = link._session
        session._transmit = lambda frame: storm.carry(lambda: None if link._socket.closed else transmit(frame))

    def receive_in_storm(link: transport.ZmqLink, timeout_s: float) -> Any:
        storm: Storm = link.storm  # pyright: ignore[reportAttributeAccessIssue]
        storm.blow()
        return receive(link, storm.wait_s(timeout_s))

    transport.ZmqLink.__init__ = make_in_storm  # pyright: ignore[reportAttributeAccessIssue]
    transport.ZmqLink.receive = receive_in_storm  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    main()
