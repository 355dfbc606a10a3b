"""A peer of the run that lies: its own process, key and connection, and now and then something that cannot be among what it says.

Which peers lie, and how often, `<run>/storm.json` says. All that such a peer says goes into `<run>/lies/<peer>.log` before it is sent, a
line each: process, digest, kind of lie (`-`: the truth), its name, whether it is a bare frame, whether it may be fenced. `account` compares
that with what `witness` has seen arrive.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from orchestrator.rules.validation.violations import number_of
from pipelinerl.errors import WireError
from pipelinerl.messages import Alive, Completion, EngineLoad, FromEngine, FromScorer, FromTrainer, Generate, Message, ScorerLoad
from pipelinerl.transport import zmq as transport
from pipelinerl.transport.codec import Decoder, encode
from scripts.chaos.lies import OCCASIONS, Forgery, Known

TRUTH, PLAUSIBLE = "-", "plausible"
FORGER = "engine-1"
"""Says of every token that it was less likely by `FORGED_NATS`: no rule at the door can tell."""
FORGED_NATS = 0.5
"""A KL of e^0.5 - 1 - 0.5 = 0.149 nats per token, five times `trainer.max_mismatch_kl`."""
FACTORS: dict[type[Message], int] = {Completion: 3, EngineLoad: 10, ScorerLoad: 20, Alive: 5}
"""How many times as many lies come with these as with others: there is one sign of life a second, and an engine that lies gives few answers
before it is replaced. A trainer that is replaced time and again trains nothing that could be lost.
"""
_SAYS = {"engine": FromEngine, "scorer": FromScorer, "trainer": FromTrainer}


def digest_of(sent: bytes | memoryview) -> str:
    """Return the digest by which both logs know a message or a frame."""
    return hashlib.blake2b(sent, digest_size=10).hexdigest()


def make_liars(run_folder: Path, *, fraction: float, has_forger: bool) -> dict[str, float]:
    """Make the peers that lie, and how often they do; none where `fraction` is 0."""
    (run_folder / "lies").mkdir(exist_ok=True)
    return dict.fromkeys(("engine-0", "scorer-0", "trainer-0", *([FORGER] if has_forger else [])), fraction) if fraction else {}


def install(run_folder: Path) -> None:
    """Have links of this process lie, where theirs is the name of one that does."""
    settings = json.loads((run_folder / "storm.json").read_text())
    make, receive = transport.ZmqLink.__init__, transport.ZmqLink.receive

    def make_liar(link: transport.ZmqLink, folder: Path, role: str, index: int, **options: Any) -> None:
        make(link, folder, role, index, **options)
        if link.name in settings["liars"]:
            link.liar = Liar(link, folder, seed=settings["seed"], fraction=settings["liars"][link.name])  # pyright: ignore[reportAttributeAccessIssue]

    def overhear(link: transport.ZmqLink, timeout_s: float) -> Any:
        message = receive(link, timeout_s)
        if isinstance(message, Generate) and (liar := getattr(link, "liar", None)) is not None:
            liar.known.asked[message.rollout_id] = message
        return message

    transport.ZmqLink.__init__ = make_liar  # pyright: ignore[reportAttributeAccessIssue]
    transport.ZmqLink.receive = overhear  # pyright: ignore[reportAttributeAccessIssue]


class Liar:
    """The words of one link, lies included. It goes on in the deck of lies where the process before it was killed."""

    def __init__(self, link: transport.ZmqLink, run_folder: Path, *, seed: int, fraction: float) -> None:
        self._session = session = link._session
        self._name, self._seed, self._fraction = link.name, seed, 0.0 if link.name == FORGER else fraction
        self._chance = random.Random(f"{seed}/{link.name}/{os.getpid()}")
        self.known = Known(chance=self._chance, identity=session.identity)
        self._decoder: Decoder[Message] = Decoder(_SAYS[link.name.partition("-")[0]])
        path = run_folder / "lies" / f"{link.name}.log"
        self._num_told = _num_told(path)
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._again: dict[str, Forgery] = {}
        """By digest: what was said once, and is said again where an orchestrator died."""
        self._forged: set[str] = set()
        """The same of answers with forged log-probabilities."""
        self._say, self._transmit = session.send, link._transmit  # frames pass by the storm, too
        session.send = self.send

    def send(self, *bodies: bytes) -> None:
        """Say messages, and what comes to mind on these occasions."""
        said = [each for body in bodies for each in self._with_lies(body)]
        if said:
            self._say(*said)

    def _with_lies(self, body: bytes) -> Iterator[bytes]:
        before = self._again.get(digest_of(body))
        if before is not None:
            yield self._note(body, before)
            return
        try:
            message = self._decoder.decode(body)
        except WireError:  # its own lie, which it keeps
            yield self._note(body, None)
            return
        is_replaced = False
        for forgery in self._lies_on(message):
            made = forgery.make(message, self.known)
            for lie in made if isinstance(made, list) else [] if made is None else [made]:
                is_replaced |= forgery.replaces
                yield from self._tell(lie, forgery)
        self.known.said[type(message)] = message
        if is_replaced:
            return
        if self._name == FORGER and isinstance(message, Completion) and len(message.logprobs) and digest_of(body) not in self._forged:
            body = encode(msgspec.structs.replace(message, logprobs=(message.logprobs - FORGED_NATS).astype(np.float32)))
            self._forged.add(digest_of(body))
            self._write(body, kind=PLAUSIBLE, name="log-probabilities", is_frame=False, is_answer=True)
            yield body
            return
        yield self._note(body, None)

    def _lies_on(self, message: Message) -> Iterator[Forgery]:
        """The next lies of the deck of its occasion, if any."""
        deck, occasion = OCCASIONS.get(type(message)), type(message).__name__
        if deck is None:
            return
        for _ in range(int(self._fraction * FACTORS.get(type(message), 1) + self._chance.random())):
            number = self._num_told[occasion] = self._num_told.get(occasion, -1) + 1
            order = random.Random(f"{self._seed}/{self._name}/{occasion}/{number // len(deck)}").sample(range(len(deck)), len(deck))
            os.write(self._log, f"occasion {occasion}\n".encode())
            yield deck[order[number % len(deck)]]

    def _tell(self, lie: Message | bytes, forgery: Forgery) -> Iterator[bytes]:
        if forgery.is_frame and not self._session.has_met:  # it would die with a connection that there is not yet
            return
        body = lie if isinstance(lie, bytes) else encode(lie)
        self._note(body, forgery)
        if forgery.is_frame:
            self._transmit(body)
        else:
            self._again[digest_of(body)] = forgery
            yield body

    def _note(self, body: bytes, forgery: Forgery | None) -> bytes:
        if forgery is None:
            self._write(body, kind=TRUTH, name="", is_frame=False, is_answer=False)
        else:
            self._write(body, kind=forgery.kind, name=forgery.name, is_frame=forgery.is_frame, is_answer=forgery.is_answer)
        return body

    def _write(self, body: bytes, *, kind: str, name: str, is_frame: bool, is_answer: bool) -> None:
        line = json.dumps([os.getpid(), digest_of(body), str(kind), name, is_frame, is_answer])
        os.write(self._log, f"{line}\n".encode())


def _num_told(path: Path) -> dict[str, int]:
    """Return the number of the last lie that was told, by occasion."""
    told: dict[str, int] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("occasion "):
            occasion = line.removeprefix("occasion ")
            told[occasion] = told.get(occasion, -1) + 1
    return told


def forger_id() -> int:
    """Number of the engine that forges."""
    return number_of(FORGER)
