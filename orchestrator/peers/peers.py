"""The behaviour that all kinds of peers share: a peer announces itself, is heard from, and may fall silent."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterable
from typing import Any

from orchestrator.rules.membership import Membership
from orchestrator.rules.validation.penalties import Penalties, Penalty
from orchestrator.rules.validation.violations import Kind, Violation, number_of, shorten, wrong_identity
from pipelinerl.errors import PeerGone, PeerRefused, PeerSilent
from pipelinerl.messages import Failed, Message, Starting, Stop, Unread
from pipelinerl.runtime.membership import State
from pipelinerl.transport.base import Hub

Handler = Callable[[str, Any], None]
"""The handler takes a peer's name and its message; it never waits."""
Told = Callable[[str, str, str, int], None]
"""The callback is told of a peer, the kind of its violation or of the consequence, a description, and the count so far."""


class Peers:
    """The peers on one hub: each message goes to the handler of its type, and silence is watched for.

    A peer that was heard from and then is not for `silent_after_s` (one that starts again: for `ready_deadline_s`) is fenced, and its
    process is replaced where possible. The key says who speaks: a message that names another peer is refused here; for every other
    violation its handler calls `refuse`. A peer that keeps committing violations is replaced, and banned in the end
    (`rules.validation.penalties`).

    A peer that says it has failed gets no more work until another process takes its place. That process is asked for once the failed one
    has had time to end by itself: its launcher knows by its exit whether its error ends the run. Where nobody replaces it and the run
    cannot do without it, the peer is not believed: it falls silent, or has not failed.

    Raises `PeerRefused` with a peer's own words when one fails and `failure_ends_run`, or when one is banned and the run cannot do without
    it. Raises `PeerSilent` when a silent peer was not replaced within `ready_deadline_s`, or cannot be, or when fewer than `expected` have
    announced themselves after `ready_deadline_s`.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        role: str,
        expected: int,
        ready_deadline_s: float,
        silent_after_s: float,
        replace: Callable[[str], None] | None = None,
        tell: Told = lambda peer, kind, words, count: None,
        has_spares: bool = False,
        failure_ends_run: bool = False,
        max_processes: int | None = None,
        membership: Membership | None = None,
    ) -> None:
        """Await the first `expected` peers, for good, and those of `membership`, which may join and leave.

        Take `replace(peer)`, which has a peer's process killed so that another takes its place; None where nobody can.

        With `has_spares` the run goes on while one of these peers is left. With `failure_ends_run` it ends with the words of a peer that
        fails. More than `max_processes` processes of one name within an hour are a violation.
        """
        self.hub = hub
        self.role = role
        self.is_expected_to_end = False
        """True once the run ends: silence is then no fault."""
        self.refused: collections.Counter[str] = collections.Counter()
        """Violations of peers, by kind; the hub counts messages that could not be read."""
        self._handlers: dict[type[Message], Handler] = {Failed: _raise_failed if failure_ends_run else self._on_failed}
        self._fixed = range(expected)
        self._membership = membership or Membership(count=0)
        self._names = self._named([*self._fixed, *self._membership.names])
        """The peers that there may be."""
        self._has_spares = has_spares
        self._tell = tell
        self._told: collections.Counter[tuple[str, str]] = collections.Counter()
        """Refused messages by peer and kind."""
        self._penalties = Penalties(can_replace=replace is not None, max_processes=max_processes)
        self._rejected: list[Callable[[str, bool], None]] = []
        self._on_silent: Callable[[str, str], bool] = lambda peer, words: False
        self._banned: set[str] = set()
        self._ready_deadline_s = ready_deadline_s
        self._silent_after_s = silent_after_s
        self._replace = replace
        self._heard_at: dict[str, float] = {}
        self._process_ids: dict[str, int] = {}
        """The process ids that peers have announced: only a change of one matters."""
        self._silent: set[str] = set()
        """Peers whose replacement was asked for."""
        self._starting: set[str] = set()
        """Peers that load, and have nothing to say meanwhile."""
        self._last_words: dict[str, str] = {}
        """The errors of peers that said they have failed, and whose name no other process has taken since."""
        self._ended: set[str] = set()
        """The failed peers that are believed: only another process is heard under their name."""
        self._gone: set[str] = set()
        """Peers that could not be sent to, and were not heard of since."""
        self._all_heard = asyncio.Event()
        if not self._awaited():
            self._all_heard.set()

    def on(self, message_type: type[Message], handler: Handler) -> None:
        """Have messages of one type handled by `handler`."""
        self._handlers[message_type] = handler

    def on_rejected(self, handler: Callable[[str, bool], None]) -> None:
        """Have `handler` called with a peer that must get no work: it is to be replaced for its violations, or, with True, is banned."""
        self._rejected.append(handler)

    def on_silent(self, handler: Callable[[str, str], bool]) -> None:
        """Have `handler` called with a peer that has fallen silent, and words about it; it returns True where the run goes on without."""
        self._on_silent = handler

    def forget(self, peer: str) -> None:
        """Expect nothing of a peer any more: its silence is no fault. A process that announces itself under its name is heard."""
        for known in (self._heard_at, self._process_ids, self._last_words):
            known.pop(peer, None)
        for names in (self._silent, self._starting, self._ended):
            names.discard(peer)

    def refuse(self, peer: str, violation: Violation, *, is_hopeless: bool = False) -> None:
        """Count and report a violation of a peer. Its process is replaced where it keeps committing violations, or at once where
        `is_hopeless`: it is then in a state in which it can be of no use.
        """
        self.refused[violation.kind] += 1
        self._hold_against(peer, violation, is_hopeless=is_hopeless)

    def send(self, peer: str, message: Message) -> bool:
        """Send a message; return False where the connection is closed: the process has ended, and another will announce itself under its
        name.
        """
        try:
            self.hub.send(peer, message)
        except PeerGone:
            self._gone.add(peer)
            return False
        return True

    def is_reachable(self, peer: str) -> bool:
        """Return False from a failed send until the peer is heard from again."""
        return peer not in self._gone

    def silence_s(self, peer: str) -> float:
        """Return for how long a peer has said nothing; 0 where it was not heard yet."""
        now_s = asyncio.get_running_loop().time()
        return now_s - self._heard_at.get(peer, now_s)

    def dismiss(self, stop: Stop) -> None:
        """Tell every peer to end, also one whose process is only being replaced. Silence is no fault from now on."""
        self.is_expected_to_end = True
        self.hub.dismiss(stop)

    async def run(self) -> None:
        """Receive and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive())
            group.create_task(self._watch())

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for peer, message in await self.hub.receive():
                if peer in self._banned:
                    continue
                if self._names and (violation := wrong_identity(peer, message, names=self._names)) is not None:
                    self.refuse(peer, violation)
                    continue
                self._heard(peer, message, now_s=loop.time())
                if isinstance(message, Unread):  # the hub has counted it
                    self._hold_against(peer, Violation(kind=message.reason, words=message.words))
                if type(message) in self._handlers and peer not in self._banned:
                    self._handlers[type(message)](peer, message)
            if self._awaited() <= self._heard_at.keys():
                self._all_heard.set()

    def _heard(self, peer: str, message: Message, *, now_s: float) -> None:
        process_id = getattr(message, "process_id", None)
        is_another = process_id is not None and process_id != self._process_ids.get(peer)
        if is_another:
            self._last_words.pop(peer, None)
            self._ended.discard(peer)
        if peer in self._ended:
            return
        self._heard_at[peer] = now_s
        self._gone.discard(peer)
        self._silent.discard(peer)
        if is_another and process_id is not None:
            self._process_ids[peer] = process_id
            if self._penalties.began_anew(peer, now_s=now_s) is Penalty.BAN:
                self._ban(
                    peer, Violation(kind=Kind.IDENTITY, words=f"{peer} says to be one process after another, more than anybody starts")
                )
        (self._starting.add if isinstance(message, Starting) else self._starting.discard)(peer)

    def _on_failed(self, peer: str, failed: Failed) -> None:
        if peer in self._last_words:
            return
        self._last_words[peer] = words = shorten(failed.error)
        self._tell(peer, "failed", f"it says that it has failed: {words}", 1)
        if self._penalties.failed(peer, now_s=asyncio.get_running_loop().time()):
            self._ended.add(peer)  # from now on it is silent, and in the end replaced for that
            self._gone.add(peer)
        elif not self._has_spares or self._present() <= self._banned | self._last_words.keys():
            return
        self._condemn(peer, is_final=False)

    def _hold_against(self, peer: str, violation: Violation, *, is_hopeless: bool = False) -> None:
        self._told[peer, violation.kind] += 1
        count = self._told[peer, violation.kind]
        if count & (count - 1) == 0:  # reported at 1, 2, 4, 8: a flood would fill the journal
            self._tell(peer, violation.kind, shorten(violation.words), count)
        match self._penalties.violated(peer, now_s=asyncio.get_running_loop().time(), is_hopeless=is_hopeless):
            case Penalty.REPLACE:
                self._tell(peer, "replaced", f"it keeps saying what cannot be, last {violation.kind}: its process is replaced", count)
                self._condemn(peer, is_final=False)
                assert self._replace is not None, "penalties knows whether a process can be replaced"
                self._replace(peer)
            case Penalty.BAN:
                self._ban(peer, violation)
            case Penalty.REFUSE:
                pass

    def _ban(self, peer: str, violation: Violation) -> None:
        """Listen to no process of this name any more. Raises `PeerRefused` where the run cannot go on without it."""
        self._tell(peer, "banned", f"it keeps saying what cannot be, last {violation.kind}: nothing it says is heard any more", 1)
        self._banned.add(peer)
        is_spare = self._membership.may_be_lost(number_of(peer))
        self._condemn(peer, is_final=True)
        if not is_spare and (not self._has_spares or self._banned >= self._present()):
            raise PeerRefused(
                f"{peer} keeps saying what cannot be, and the run cannot go on without it: {shorten(violation.words)}. It was replaced as"
                " often as may be; see its log, and who else may have its key"
            )

    def _condemn(self, peer: str, *, is_final: bool) -> None:
        for handler in self._rejected:
            handler(peer, is_final)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._ready_deadline_s):
                await self._all_heard.wait()
        except TimeoutError:
            missing = sorted(self._awaited() - self._heard_at.keys())
            raise PeerSilent(
                f"waited {self._ready_deadline_s:g} s for {', '.join(missing)} to start; see the logs in the run folder"
            ) from None
        while True:
            await asyncio.sleep(self._silent_after_s / 4)
            for peer, heard_at in list(self._heard_at.items()):
                if peer in self._banned or self._is_to_join(peer):
                    continue
                limit_s = self._ready_deadline_s if peer in self._starting else self._silent_after_s
                self._look_at(peer, silence_s=loop.time() - heard_at, limit_s=limit_s)

    def _look_at(self, peer: str, *, silence_s: float, limit_s: float) -> None:
        if silence_s <= limit_s or self.is_expected_to_end:
            return
        words = f"it was last heard {silence_s:.0f} s ago; the limit is {limit_s:g} s{self._said_last(peer)}"
        if self._on_silent(peer, words):
            if self._replace is not None:
                self._replace(peer)
            return
        if self._replace is None:
            raise PeerSilent(f"{peer} was last heard {silence_s:.0f} s ago; the limit is {limit_s:g} s{self._said_last(peer)}")
        if silence_s > limit_s + self._ready_deadline_s:
            raise PeerSilent(
                f"{peer} was last heard {silence_s:.0f} s ago; the limit is {limit_s:g} s, and nobody took its place in the"
                f" {self._ready_deadline_s:g} s since. See the launcher's log{self._said_last(peer)}"
            )
        if peer not in self._silent:
            self._silent.add(peer)
            self._gone.add(peer)
            self._replace(peer)

    def _is_to_join(self, peer: str) -> bool:
        """Return whether a process that joins has not announced itself: what was heard under its name is the last word of one that left."""
        number = number_of(peer)
        is_joining = self._membership.state(number) is State.JOINING and number not in self._membership.awaited()
        return is_joining and peer not in self._process_ids

    def _awaited(self) -> set[str]:
        return self._named([*self._fixed, *self._membership.awaited()])

    def _present(self) -> set[str]:
        return self._named([*self._fixed, *self._membership.present()])

    def _named(self, numbers: Iterable[int]) -> set[str]:
        return {f"{self.role}-{number}" for number in numbers}

    def _said_last(self, peer: str) -> str:
        return f". Its last words: {self._last_words[peer]}" if peer in self._last_words else ""


def _raise_failed(peer: str, failed: Failed) -> None:
    raise PeerRefused(f"{peer} failed: {failed.error}")
