"""What the stages that ask scorers share: asking as there is room, and asking again for what a scorer that dies takes with it."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.scorers import Scorers
from orchestrator.rules.quarantine import Quarantine, row_of
from orchestrator.rules.validation.violations import Violation
from pipelinerl.messages import GroupScored, Replied, Reply, Score, Scored, ScoreGroup
from pipelinerl.runtime.watch import Watch

MAX_REFUSED = 3
"""Answers to one request that cannot be true before it fails. 1 would fail it for its scorer; many let it go round without end."""
QUARANTINED = "its prompt is quarantined: it was there when a scorer died, twice"


@dataclasses.dataclass(slots=True, kw_only=True)
class _Request:
    message: Reply | Score | ScoreGroup
    sink: Callable[[Any], None]
    refused: Callable[[str], None]
    num_refused: int = 0
    """Answers to it that could not be true."""

    @property
    def prompt_id(self) -> str:
        first = self.message.members[0] if isinstance(self.message, ScoreGroup) else self.message
        return first.prompt.prompt_id


class Asking:
    """Sends requests to scorers as they have room; every request is answered once, however many scorers die over it.

    A request that a scorer takes with it is asked again, except where its prompt was there at two such deaths; no two suspects are with a
    scorer at once (`rules.quarantine`). One instance serves every stage, so that a death is counted once. `run` sends what was lost.
    """

    def __init__(self, *, scorers: Scorers, ledger: Ledger, watch: Watch, quarantine: Quarantine) -> None:
        self._scorers = scorers
        self._ledger = ledger
        self._watch = watch
        self._quarantine = quarantine
        self._again: collections.deque[_Request] = collections.deque()
        """What scorers lost."""
        self._running: collections.Counter[str] = collections.Counter()
        """Prompts of what scorers have."""
        self._taken: set[str] = set()
        """Prompts of what a scorer that dies had."""
        scorers.on_died(self._on_died)

    async def ask(self, request: Score, *, by: str, sink: Callable[[Scored], None], refused: Callable[[str], None]) -> None:
        """Wait for room, and ask: then `sink` is called once with the score, or `refused` once with why there is none."""
        await self._ask_with_room(_Request(message=request, sink=sink, refused=refused), by=by)

    async def ask_group(self, request: ScoreGroup, *, by: str, sink: Callable[[GroupScored], None], refused: Callable[[str], None]) -> None:
        """As `ask`, for siblings to compare."""
        await self._ask_with_room(_Request(message=request, sink=sink, refused=refused), by=by)

    async def ask_reply(self, request: Reply, *, by: str, sink: Callable[[Replied], None], refused: Callable[[str], None]) -> None:
        """As `ask`, for an environment to reply."""
        await self._ask_with_room(_Request(message=request, sink=sink, refused=refused), by=by)

    async def run(self) -> None:
        """Ask again for what scorers take with them."""
        while True:
            while self._again and self._quarantine.holds(self._again[0].prompt_id):
                self._again.popleft().refused(QUARANTINED)
            if self._again and self._scorers.has_room and not self._waits_for_another(self._again[0]):
                self._ask(self._again.popleft())
            else:
                await self._scorers.changed.wait()

    async def _ask_with_room(self, request: _Request, *, by: str) -> None:
        if not self._scorers.has_room:
            with self._watch.waiting(by, "room in a scorer"):
                while not self._scorers.has_room:
                    await self._scorers.changed.wait()
        self._ask(request)

    def _waits_for_another(self, request: _Request) -> bool:
        if not self._quarantine.is_suspect("scorer", request.prompt_id):
            return False
        return any(self._quarantine.is_suspect("scorer", prompt_id) for prompt_id in self._running if prompt_id != request.prompt_id)

    def _ask(self, request: _Request) -> None:
        self._running[request.prompt_id] += 1

        def take(answer: Any) -> None:
            self._take(request, answer)

        def lose(scorer_id: int) -> None:
            self._lose(request)

        def refuse(violation: Violation) -> None:
            self._refuse(request, violation)

        match request.message:
            case Score():
                self._scorers.ask(request.message, sink=take, lost=lose, refused=refuse)
            case ScoreGroup():
                self._scorers.ask_group(request.message, sink=take, lost=lose, refused=refuse)
            case Reply():
                self._scorers.ask_reply(request.message, sink=take, lost=lose, refused=refuse)

    def _take(self, request: _Request, answer: Scored | GroupScored | Replied) -> None:
        self._leave(request.prompt_id)
        if request.prompt_id not in self._running and self._quarantine.came_through("scorer", request.prompt_id):
            self._ledger.record("cleared", now_s=_now_s(), peer="scorer", suspect=row_of(request.prompt_id))
        request.sink(answer)

    def _lose(self, request: _Request) -> None:
        self._leave(request.prompt_id)
        self._taken.add(request.prompt_id)
        self._again.append(request)  # bounded by the scorers' room
        self._scorers.changed.set()

    def _refuse(self, request: _Request, violation: Violation) -> None:
        """An answer cannot be true: ask again, a few times."""
        self._leave(request.prompt_id)
        request.num_refused += 1
        if request.num_refused >= MAX_REFUSED:
            request.refused(f"{request.num_refused} answers could not be true, the last {violation}")
        else:
            self._again.append(request)  # bounded by the scorers' room
        self._scorers.changed.set()

    def _leave(self, prompt_id: str) -> None:
        self._running[prompt_id] -= 1
        if not self._running[prompt_id]:
            del self._running[prompt_id]

    def _on_died(self, scorer_id: int, is_condemned: bool) -> None:
        prompt_ids, self._taken = self._taken, set()
        if is_condemned:  # it goes for what it said, and no prompt is suspected of it
            return
        for prompt_id in sorted(prompt_ids):
            self._ledger.record("suspected", now_s=_now_s(), peer=f"scorer-{scorer_id}", suspect=row_of(prompt_id))
        for row in self._quarantine.died("scorer", prompt_ids):
            self._ledger.record("quarantined", now_s=_now_s(), peer=f"scorer-{scorer_id}", suspect=row)
        self._ledger.flush()  # seldom, and it must outlive this process: the prompt may be what ends that, too


def _now_s() -> float:
    return asyncio.get_running_loop().time()
