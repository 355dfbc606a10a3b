"""What waits for room in an engine moves to one that has it (`rules.relief`).

Engines say which of their sequences wait, and are asked to give some of them back; `stages.engine_attempts` then asks the targets.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

from orchestrator.peers.engine import Request
from orchestrator.peers.engines import Engines
from orchestrator.rules.lengths import Lengths
from orchestrator.rules.relief import NO_GROUP, Asked, Place, Relief
from orchestrator.rules.validation.announcements import AnnouncementCheck
from pipelinerl.config import Config
from pipelinerl.messages import Completion, EngineSequences, Finish
from pipelinerl.observe.journal import Journal

EVERY_S = 1.0
"""Seconds between two decisions, as between two reports of an engine: sooner, they would be made on the same reports."""


class ReliefOfEngines:
    """Asks the rule at a report in which something waits."""

    def __init__(self, rule: Relief, *, engines: Engines, check: AnnouncementCheck | None, journal: Journal) -> None:
        """Without a `check` every report is believed."""
        self.rule = rule
        self._engines, self._check, self._journal = engines, check, journal
        self._decided_at = -math.inf
        engines.peers.on(EngineSequences, self._on_sequences)
        engines.on_died(rule.lost)
        engines.requests.on_answered(self._on_answered)

    def _on_sequences(self, peer: str, said: EngineSequences) -> None:
        if self._engines.find(said.engine_id) is None:
            return
        if self._check is not None and (violation := self._check.sequences(said)) is not None:
            self._engines.peers.refuse(peer, violation)
            return
        self.rule.reported(said.engine_id, written=said.written, waiting=said.waiting)
        now_s = asyncio.get_running_loop().time()
        if said.waiting and now_s >= self._decided_at + EVERY_S:
            self._decided_at = now_s
            self._decide()

    def _decide(self) -> None:
        moves = self.rule.decide(list(self._places()), [_asked_of(one) for one in self._engines.requests])
        for move in moves:
            self._engines.requests.move(move.rollout.rollout_id, move.rollout.attempt, target=move.target)
        if moves:
            named = [{"rollout_id": move.rollout.rollout_id, "source": move.source, "target": move.target} for move in moves]
            self._journal.write("migration", moves=named)

    def _places(self) -> Iterator[Place]:
        for engine in self._engines:
            yield Place(
                engine_id=engine.engine_id,
                version=engine.version,
                slots=engine.ready.max_running,
                room=engine.ready.kv_tokens or math.inf,
                takes_work=self._engines.takes_work(engine.engine_id),
            )

    def _on_answered(self, asked: Request, completion: Completion) -> None:
        is_whole = asked.moved is not None and completion.finish in (Finish.STOP, Finish.LENGTH)
        self.rule.answered(
            completion.rollout_id,
            engine_id=asked.engine_id,
            group_id=_group_of(asked),
            num_tokens=completion.num_written + len(completion.token_ids) if is_whole else None,
            goes_on=asked.moved is not None and asked.goes_on_after(completion),
        )


def relief_of(
    config: Config, *, num_siblings: int, engines: Engines, check: AnnouncementCheck | None, journal: Journal
) -> ReliefOfEngines | None:
    """Return the relief that a config asks for; None where sequences stay where they are."""
    if config.pipeline.migration == "off":
        return None
    lengths = Lengths(group_size=num_siblings, max_tokens=config.rollout.max_tokens)
    return ReliefOfEngines(Relief(lengths=lengths), engines=engines, check=check, journal=journal)


def _asked_of(one: Request) -> Asked:
    return Asked(
        rollout_id=one.request.rollout_id,
        attempt=one.request.attempt,
        engine_id=one.engine_id,
        group_id=_group_of(one),
        num_given=len(one.request.token_ids),
        num_written=one.request.num_written,
        version=one.oldest,
        may_move=one.moved is not None and not one.is_withdrawn,
        is_moving=one.is_moving,
        target=one.target,
    )


def _group_of(one: Request) -> int:
    """Return the group of a rollout that may move; its name begins with it."""
    return NO_GROUP if one.moved is None else int(one.request.rollout_id.partition("/")[0])
