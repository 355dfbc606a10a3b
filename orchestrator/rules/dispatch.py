"""Dispatch decides which rollout of the admitted ones goes to which engine next, by predicted lengths (`rules.lengths`).

Without it a group's siblings go to the least busy engine the moment they are admitted. Each of its three parts is chosen alone:

- `longest_first`: of the groups that are due for the same step, first one sibling of each (a probe, whose end tells the length of the
  others), then the siblings that will hold most in KV caches for longest. A short rollout that begins last fills a gap, a long one
  makes everybody wait. Steps are due in order of admission: rollouts of an earlier step never wait for a later one, so order changes
  nothing about staleness, and every rollout that is admitted is written: no length is preferred in what is trained.
- `least_loaded`: the engine with the fewest predicted KV-token-passes ahead of it in place of the one with the fewest rollouts.
- `kv_admission`: a rollout waits while every engine's cache would overflow before those in it have ended. The room of a cache is learned
  from how full an engine says it is, with the tokens that it holds then.

Siblings go where their prompt is computed already, unless that engine is ahead of the least loaded by more than a whole group: that much
imbalance sending whole groups makes, too.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from orchestrator.rules.lengths import Lengths, kv_token_passes, peak_tokens
from pipelinerl.config import Config

T = TypeVar("T")
LEAST_USED = 0.05
"""Part of a cache in use below which its room is not learned: blocks that are not full weigh too much."""
NEW_WEIGHT = 0.2
"""Weight of the newest report in what is learned of a cache's room."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """An engine that takes new work."""

    engine_id: int
    version: int
    num_outstanding: int
    """Rollouts it was asked for and has not answered."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Group(Generic[T]):
    group_id: int
    number: int
    """Groups admitted before it."""
    num_prompt: int
    version: int
    """No engine under an older one may write it, see `rules.admission`."""
    waiting: collections.deque[T]
    is_probed: bool = False
    serial: int = 0
    """Raised when its place in the order changes."""
    home: int | None = None
    """The engine that has computed its prompt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    group_id: int
    num_prompt: int
    engine_id: int
    at_pass: int
    """Passes of the engine when it was sent."""
    predicted: float


class Dispatch(Generic[T]):
    """The rollouts that wait for an engine, and those that engines have."""

    def __init__(
        self, *, longest_first: bool, least_loaded: bool, kv_admission: bool, lengths: Lengths, groups_per_step: int, group_size: int
    ) -> None:
        self.num_waiting = 0
        self._longest_first, self._least_loaded, self._kv_admission = longest_first, least_loaded, kv_admission
        self._lengths, self._groups_per_step, self._group_size = lengths, groups_per_step, group_size
        self._groups: dict[int, _Group[T]] = {}
        self._order: list[tuple[tuple[float, ...], int, int]] = []
        """Heap of (place, group, serial)."""
        self._sent: dict[int, dict[str, _Sent]] = collections.defaultdict(dict)
        """Rollouts that each engine has."""
        self._passes: dict[int, int] = {}
        self._room: dict[int, float] = {}
        """Tokens that each engine's KV cache holds, as learned."""
        self._num_admitted = self._num_dispatched = self._num_home = self._num_held = 0
        self._is_held = False
        self._error = self._written = 0.0

    # --- what waits ---

    def add(self, group_id: int, rollouts: Iterable[T], *, num_prompt: int, version: int) -> None:
        """Take an admitted group; it was admitted for an engine that samples under `version`."""
        group = _Group(
            group_id=group_id, number=self._num_admitted, num_prompt=num_prompt, version=version, waiting=collections.deque(rollouts)
        )
        self._num_admitted += 1
        self.num_waiting += len(group.waiting)
        self._groups[group_id] = group
        self._place(group)

    def next(self, serving: Sequence[Serving], *, max_running: int) -> tuple[T, int] | None:
        """Take the rollout that is next, and name its engine; None while no engine may take it. Engines have `max_running` in all."""
        if (group := self._first()) is None:
            return None
        share = max(1, max_running // max(1, len(serving)))
        free = [one for one in serving if one.version >= group.version and one.num_outstanding < share]
        fitting = [one for one in free if self._fits(one.engine_id, group)] if self._kv_admission else free
        if not fitting:
            self._num_held += bool(free) and not self._is_held
            self._is_held = self._is_held or bool(free)
            return None
        self._is_held = False
        engine_id = self._engine_of(group, fitting)
        self._num_dispatched += 1
        self._num_home += engine_id == group.home
        group.home = engine_id if group.home is None else group.home
        rollout = group.waiting.popleft()
        self.num_waiting -= 1
        if not group.is_probed:
            group.is_probed = True
            self._place(group)
        return rollout, engine_id

    def _first(self) -> _Group[T] | None:
        while self._order:
            place, group_id, serial = self._order[0]
            group = self._groups.get(group_id)
            is_there = group is not None and group.serial == serial and bool(group.waiting)
            if group is not None and is_there and self._place_of(group) <= place:
                return group
            heapq.heappop(self._order)
            if group is not None and is_there:  # since it was placed, rollouts have turned out to be shorter
                self._place(group)
            elif group is not None and not group.waiting:
                del self._groups[group_id]
        return None

    def _place(self, group: _Group[T]) -> None:
        """Put a group where it belongs in the order."""
        group.serial += 1
        heapq.heappush(self._order, (self._place_of(group), group.group_id, group.serial))

    def _place_of(self, group: _Group[T]) -> tuple[float, ...]:
        if not self._longest_first:
            return (group.number,)
        due = group.number // self._groups_per_step
        return (due, 1, -self._area(group), group.number) if group.is_probed else (due, 0, 0.0, group.number)

    def _area(self, group: _Group[T]) -> float:
        return kv_token_passes(group.num_prompt, self._lengths.expected(group.group_id))

    # --- engines ---

    def _engine_of(self, group: _Group[T], fitting: Sequence[Serving]) -> int:
        loads = {one.engine_id: self._load(one) for one in fitting}
        least = min(loads, key=lambda engine_id: (loads[engine_id], engine_id))
        whole_group = self._group_size * (self._area(group) if self._least_loaded else 1.0)
        at_home = loads.get(group.home, float("inf")) if group.home is not None else float("inf")
        return group.home if group.home is not None and at_home - loads[least] < whole_group else least

    def _load(self, one: Serving) -> float:
        if not self._least_loaded:
            return one.num_outstanding
        return sum(to_come * now + to_come * to_come / 2 for now, to_come in self._held(one.engine_id))

    def _fits(self, engine_id: int, group: _Group[T]) -> bool:
        """Return whether an engine's cache holds one more until all in it have ended; an engine without any takes what comes."""
        room = self._room.get(engine_id)
        if room is None or not self._sent[engine_id]:
            return True
        is_shared = any(one.group_id == group.group_id for one in self._sent[engine_id].values())
        one_more = (0.0 if is_shared else float(group.num_prompt), self._lengths.expected(group.group_id))
        return peak_tokens([*self._held(engine_id), one_more]) <= room

    def _held(self, engine_id: int) -> list[tuple[float, float]]:
        """Return (tokens held, tokens to come) of each rollout of an engine; siblings hold their prompt once."""
        held: list[tuple[float, float]] = []
        groups: set[int] = set()
        passes = self._passes.get(engine_id, 0)
        for one in self._sent[engine_id].values():
            written = min(max(0, passes - one.at_pass), self._lengths.max_tokens)
            prompt = 0 if one.group_id in groups else one.num_prompt
            groups.add(one.group_id)
            held.append((prompt + written, self._lengths.expected(one.group_id, written=written) - written))
        return held

    # --- what happens to rollouts and engines ---

    def sent(self, rollout_id: str, *, group_id: int, num_prompt: int, engine_id: int) -> None:
        """Note that an engine was asked for a rollout, through here or again after it was lost."""
        predicted = self._lengths.expected(group_id)
        at_pass = self._passes.get(engine_id, 0)
        self._sent[engine_id][rollout_id] = _Sent(
            group_id=group_id, num_prompt=num_prompt, engine_id=engine_id, at_pass=at_pass, predicted=predicted
        )

    def ended(self, rollout_id: str, *, engine_id: int, num_tokens: int | None) -> None:
        """Note that an engine has written a rollout of so many tokens; None: it never will, or was stopped."""
        sent = self._sent[engine_id].pop(rollout_id, None)
        if sent is None or num_tokens is None:
            return
        self._error += abs(sent.predicted - num_tokens)
        self._written += num_tokens
        self._lengths.finished(sent.group_id, num_tokens)
        group = self._groups.get(sent.group_id)
        if self._longest_first and group is not None and group.is_probed and group.waiting:
            self._place(group)

    def reported(self, engine_id: int, *, num_passes: int, kv_used: float | None, num_running: int, num_queued: int) -> None:
        """Note an engine's gauges: its passes so far, how full its KV cache is, and how many of its rollouts are in it."""
        self._passes[engine_id] = num_passes
        if kv_used is None or kv_used < LEAST_USED or not num_running:
            return
        held = sum(now for now, _ in self._held(engine_id)) * num_running / (num_running + num_queued)
        if held:
            room = held / kv_used
            before = self._room.get(engine_id, room)
            self._room[engine_id] = before + NEW_WEIGHT * (room - before)

    def lost(self, engine_id: int) -> None:
        """Forget an engine that has ended; its rollouts are told of one by one."""
        self._passes.pop(engine_id, None)
        self._room.pop(engine_id, None)
        for group in self._groups.values():
            group.home = None if group.home == engine_id else group.home

    def gauges(self) -> dict[str, float]:
        """Return what each part that is on has done so far, and nothing of the others."""
        found: dict[str, float] = {"num_waiting": self.num_waiting, "num_dispatched": self._num_dispatched}
        if self._longest_first:
            found |= {"length_error_tokens": self._error, "length_tokens": self._written}
        if self._least_loaded:
            found |= {"num_at_home": self._num_home}
        if self._kv_admission:
            found |= {"num_held_by_kv": self._num_held, "kv_room_tokens": min(self._room.values(), default=0.0)}
        return found


def dispatch_of(config: Config, *, num_siblings: int) -> Dispatch[Any] | None:
    """Return the dispatch that a config asks for; None where groups go to engines the moment they are admitted."""
    pipeline = config.pipeline
    longest_first, least_loaded = pipeline.dispatch == "longest_first", pipeline.routing == "least_loaded"
    if not config.dispatches_rollouts:
        return None
    return Dispatch(
        longest_first=longest_first,
        least_loaded=least_loaded,
        kv_admission=pipeline.kv_admission,
        lengths=Lengths(group_size=num_siblings, max_tokens=config.rollout.max_tokens),
        groups_per_step=config.batch.groups_per_step,
        group_size=num_siblings,
    )


class Counting(Protocol):
    """A rule that counts what it has done."""

    def gauges(self) -> dict[str, float]: ...


def gauges_of(*rules: Counting | None) -> dict[str, float] | None:
    """Return what the rules that are on have done so far; None where none is."""
    found = [rule.gauges() for rule in rules if rule is not None]
    return {name: value for gauges in found for name, value in gauges.items()} or None
