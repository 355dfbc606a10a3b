"""Which sequences that are being written move to another engine, and which engines are emptied for it.

A sequence moves by re-prefill: the engine that has it ends it between two passes and answers with what it has written (ids,
log-probabilities and versions stay), and another engine is asked to go on after that. Its KV cache is computed there anew, under one
version. Versions never fall along a sequence, so only an engine of its last token's version or a later one may take it.

- `relieve`: a sequence that waits for room (it was never begun, or it gave way in a full cache and would be computed again anyway) moves to
  an engine whose cache is predicted to hold it to its end. It costs nothing that waiting would not.
- `repack`: near the end of a round engines decode a few long sequences each, hardly faster than many. The engine with the fewest gives all
  it has to the others, where they fit, so that it is free: for a swap, another role, or nothing. Worth it where computing the caches
  anew takes a small part of the time for which the engine is freed.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Generic, TypeVar

from orchestrator.rules.lengths import peak_tokens

T = TypeVar("T")
MOST_OF_GAIN = 0.2
"""Part of the freed time that re-prefill may take. A larger value moves for little; a smaller one leaves engines with a single sequence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held(Generic[T]):
    """A sequence that an engine has."""

    rollout: T
    num_tokens: float
    """Of its context and of what it has written."""
    to_come: float
    """Tokens that it is expected to write yet."""
    version: int
    """Of its last token."""
    waits: bool = False
    """It has no room in the cache."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Holding(Generic[T]):
    """An engine and what it has; moves that are decided are counted in."""

    engine_id: int
    version: int
    slots: int
    room: float
    """Tokens that its KV cache holds."""
    held: list[Held[T]]
    num_tokens: float = dataclasses.field(init=False)
    """That all of them hold now."""

    def __post_init__(self) -> None:
        self.num_tokens = sum(one.num_tokens for one in self.held)

    def add(self, one: Held[T]) -> None:
        """Count a sequence in."""
        self.held.append(one)
        self.num_tokens += one.num_tokens

    def remove(self, one: Held[T]) -> None:
        """Count a sequence out."""
        self.held.remove(one)
        self.num_tokens -= one.num_tokens

    def takes(self, one: Held[T], *, slots: int) -> bool:
        """Return whether it may go on with a sequence, and its cache is predicted to hold all to their ends."""
        if self.version < one.version or len(self.held) >= slots or self.num_tokens + one.num_tokens > self.room:
            return False
        return peak_tokens([(held.num_tokens, held.to_come) for held in (*self.held, one)]) <= self.room


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move(Generic[T]):
    """One sequence, from one engine to another."""

    rollout: T
    source: int
    target: int


def relieve(engines: Sequence[Holding[T]]) -> list[Move[T]]:
    """Move what waits, the longest first, to engines that have room and nothing waiting; each to the one with the fewest sequences."""
    free = sorted((engine for engine in engines if not any(one.waits for one in engine.held)), key=_place)
    waiting = [(engine, one) for engine in engines for one in engine.held if one.waits]
    moves: list[Move[T]] = []
    for source, one in sorted(waiting, key=lambda pair: -pair[1].to_come):
        target = next((engine for engine in free if engine.takes(one, slots=engine.slots)), None)
        if target is not None:
            moves.append(_move(one, source, target))
            free.remove(target)
            bisect.insort(free, target, key=_place)
    return moves


def _place(engine: Holding[T]) -> tuple[int, int]:
    return len(engine.held), engine.engine_id


def repack(engines: Sequence[Holding[T]], *, most: int, prefill_passes: float) -> list[Move[T]]:
    """Empty the engine with the fewest sequences into the others, again and again while it fits; nothing while anything waits.

    No engine gets more than `most` sequences: up to so many a pass takes hardly longer. `prefill_passes` is what computing one token takes,
    in passes.
    """
    if any(one.waits for engine in engines for one in engine.held):
        return []
    moves: list[Move[T]] = []
    busy = [engine for engine in engines if engine.held]
    while len(busy) > 1:
        source = min(busy, key=lambda engine: (len(engine.held), engine.engine_id))
        busy.remove(source)
        freed = max(one.to_come for one in source.held)
        if prefill_passes * sum(one.num_tokens for one in source.held) > MOST_OF_GAIN * freed:
            break
        planned = _plan(source, busy, most=most)
        if planned is None:
            break
        moves += [_move(one, source, target) for one, target in planned]
    return moves


def _plan(source: Holding[T], others: Sequence[Holding[T]], *, most: int) -> list[tuple[Held[T], Holding[T]]] | None:
    """Return where all of an engine's sequences would go, the longest first; None where one does not fit."""
    copies = {engine.engine_id: dataclasses.replace(engine, held=list(engine.held)) for engine in others}
    by_id = {engine.engine_id: engine for engine in others}
    planned: list[tuple[Held[T], Holding[T]]] = []
    for one in sorted(source.held, key=lambda held: -held.to_come):
        takers = [engine for engine in copies.values() if engine.takes(one, slots=min(most, engine.slots))]
        if not takers:
            return None
        target = min(takers, key=lambda engine: (-len(engine.held), engine.engine_id))
        target.add(one)
        planned.append((one, by_id[target.engine_id]))
    return planned


def _move(one: Held[T], source: Holding[T], target: Holding[T]) -> Move[T]:
    source.remove(one)
    target.add(dataclasses.replace(one, waits=False))
    return Move(rollout=one.rollout, source=source.engine_id, target=target.engine_id)
