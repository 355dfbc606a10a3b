"""Relief decides, from what engines say of their sequences, which of those that wait for room move now (`rules.migration.relieve`).

A move costs nothing that waiting would not: what waits has no KV cache, and is computed anew in either engine. Three limits keep a wrong
prediction cheap:

- A sequence moves once for each wait: one that has moved may move again only once its new engine has sampled a token of it.
- An engine is given at most `MOST_AT_ONCE` sequences at a time, so that others' next tokens do not wait for long prefills, and the next
  report says how much room is left.
- Nothing goes to an engine in which anything waits, whatever it is. Evaluations, and sequences that may not move, count there, too.

Prompts that siblings share count once for each sibling, so an engine may have more room than is taken for granted, and never less.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.rules.lengths import Lengths
from orchestrator.rules.migration import Held, Holding, Move, relieve

MOST_AT_ONCE = 8
"""Sequences that an engine is given at a time. A larger value fills an empty engine sooner, and has more to compute anew in one go."""
NO_GROUP = -1
"""The group of sequences that are of none, as those of evaluations: they are expected to be as long as any."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An engine that is there."""

    engine_id: int
    version: int
    slots: int
    """Sequences that it decodes at once."""
    room: float
    """Tokens that its KV cache holds."""
    takes_work: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A sequence that an engine was asked for and has not answered."""

    rollout_id: str
    attempt: int
    engine_id: int
    group_id: int
    num_given: int
    """Tokens of the request: the prompt, and what other engines have written."""
    num_written: int
    """Of these, what other engines have written."""
    version: int
    """An engine under an older version may not go on with it, as long as this one has not sampled any of it."""
    may_move: bool
    is_moving: bool
    """Its engine was asked to give it back."""
    target: int | None
    """The engine that it then goes to; None: any, or it stays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    written: dict[str, int]
    waiting: dict[str, float]


class Relief:
    """The last report of each engine, and the sequences that have moved."""

    def __init__(self, *, lengths: Lengths) -> None:
        self._lengths = lengths
        self._reports: dict[int, _Report] = {}
        self._moved: set[str] = set()
        """Rollouts in engines that have moved before."""
        self._under_way: dict[str, tuple[float, int]] = {}
        """Seconds waited, and tokens to be computed anew, of sequences that their engines were asked to give back."""
        self._num_waited = self._num_moved = self._num_recomputed = 0
        self._waited_s = 0.0

    # --- what happens ---

    def reported(self, engine_id: int, *, written: Mapping[str, int], waiting: Mapping[str, float]) -> None:
        """Note the tokens that an engine has written of each sequence, and the seconds for which some of them have waited for room."""
        before = self._reports.get(engine_id)
        self._num_waited += sum(1 for name in waiting if before is None or name not in before.waiting)
        self._reports[engine_id] = _Report(written=dict(written), waiting=dict(waiting))

    def answered(self, rollout_id: str, *, engine_id: int, group_id: int, num_tokens: int | None, goes_on: bool) -> None:
        """Note that an engine has no more to do with a sequence: it has ended with so many tokens in all (None: it was stopped or failed),
        or goes on elsewhere.
        """
        if (report := self._reports.get(engine_id)) is not None:
            report.written.pop(rollout_id, None)
            report.waiting.pop(rollout_id, None)
        waited_s, num_recomputed = self._under_way.pop(rollout_id, (0.0, None))
        if not goes_on:
            self._moved.discard(rollout_id)
        elif num_recomputed is not None:
            self._moved.add(rollout_id)
            self._num_moved, self._waited_s = self._num_moved + 1, self._waited_s + waited_s
            self._num_recomputed += num_recomputed
        if num_tokens is not None:
            self._lengths.finished(group_id, num_tokens)

    def lost(self, engine_id: int) -> None:
        """Forget what an engine has said that is gone."""
        self._reports.pop(engine_id, None)

    # --- what follows ---

    def decide(self, places: Sequence[Place], asked: Iterable[Asked]) -> list[Move[Asked]]:
        """Return the sequences that move now, each with its target; their engines are to be asked to give them back."""
        holdings = {place.engine_id: self._empty(place) for place in places}
        unknown = {engine_id: set(report.written) for engine_id, report in self._reports.items()}
        stays = collections.Counter[int]()
        """What waits in each engine and does not move."""
        moving: set[str] = set()
        for one in asked:
            unknown.get(one.engine_id, set()).discard(one.rollout_id)
            if one.is_moving:
                moving.add(one.rollout_id)
            engine_id = one.engine_id if not one.is_moving else one.target
            if engine_id is None or (holding := holdings.get(engine_id)) is None:
                continue
            held = self._held(one, holding)
            stays[engine_id] += not held.waits and not one.is_moving and self._waits(one)
            holding.add(held)
        self._under_way = {name: known for name, known in self._under_way.items() if name in moving}
        for engine_id, holding in holdings.items():
            if (report := self._reports.get(engine_id)) is not None:
                stays[engine_id] += any(name in report.waiting for name in unknown[engine_id])
            if stays[engine_id]:
                holding.slots = 0
        return self._at_most(relieve(list(holdings.values())))

    def gauges(self) -> dict[str, float]:
        """Return what the rule has done so far."""
        return {
            "num_waits": self._num_waited,
            "num_moved": self._num_moved,
            "moved_after_s": self._waited_s,
            "num_recomputed_tokens": self._num_recomputed,
        }

    def _at_most(self, moves: Iterable[Move[Asked]]) -> list[Move[Asked]]:
        chosen: list[Move[Asked]] = []
        given = collections.Counter[int]()
        for move in moves:
            given[move.target] += 1
            if given[move.target] > MOST_AT_ONCE:
                continue
            chosen.append(move)
            one, report = move.rollout, self._reports[move.source]
            written = report.written.get(one.rollout_id, 0)
            num_recomputed = one.num_given + written if one.num_written + written else 0
            self._under_way[one.rollout_id] = report.waiting[one.rollout_id], num_recomputed
        return chosen

    @staticmethod
    def _empty(place: Place) -> Holding[Asked]:
        slots = place.slots if place.takes_work else 0
        return Holding(engine_id=place.engine_id, version=place.version, slots=slots, room=place.room, held=[])

    def _held(self, one: Asked, holding: Holding[Asked]) -> Held[Asked]:
        written = self._written(one)
        in_all = one.num_written + written
        to_come = max(1.0, self._lengths.expected(one.group_id, written=in_all) - in_all)
        is_free = one.may_move and not one.is_moving and (written > 0 or one.rollout_id not in self._moved)
        return Held(
            rollout=one,
            num_tokens=one.num_given + written,
            to_come=to_come,
            version=holding.version if written else one.version,
            waits=is_free and self._waits(one),
        )

    def _written(self, one: Asked) -> int:
        report = self._reports.get(one.engine_id)
        return 0 if report is None else report.written.get(one.rollout_id, 0)

    def _waits(self, one: Asked) -> bool:
        report = self._reports.get(one.engine_id)
        return report is not None and one.rollout_id in report.waiting
