"""This module checks what engines, scorers and trainers announce about themselves: figures and lists that this run can have.

No announcement is trusted where it matters: the connection's key says who speaks, and the launcher knows which process that is.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from orchestrator.rules.validation.violations import Kind, Violation
from pipelinerl.messages import (
    EngineReady,
    EngineSequences,
    Message,
    ScorerReady,
    TrainerReady,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)

MAX_COUNT = 1 << 53
"""The largest figure of any kind. A float holds every integer below, so nothing that is computed from one overflows."""
MAX_ROLLBACK_EPOCH = 1 << 31
"""The largest rollback epoch: each is due to a trainer that starts again."""
MAX_SLOTS = 1 << 16
"""Reward calls, or sequences, that one process may run at once. Requests are queued by it: a larger value lets one peer draw all of them to
itself.
"""
MAX_NAME = 64
"""The largest number of characters in a rollout's name: nobody gives longer ones, and the names that an engine sends go into the
journal.
"""


class AnnouncementCheck:
    """The check returns the violation in an announcement, or in gauges."""

    def __init__(self, *, max_outstanding: int, num_steps: int) -> None:
        """Bound announcements: `max_outstanding` requests may be in engines at once; policies are numbered up to `num_steps`."""
        self._max_outstanding = max_outstanding
        self._num_steps = num_steps

    def engine(self, said: EngineReady, *, newest: int) -> Violation | None:
        """Check an engine's announcement; `newest` is the newest version that any engine may hold."""
        if not 0 <= said.version <= newest or not 0 <= said.rollback_epoch <= MAX_ROLLBACK_EPOCH:
            expected = f"0 to {newest}, the newest there can be"
            return Violation(
                kind=Kind.VERSIONS,
                words=f"EngineReady: version {said.version} of rollback epoch {said.rollback_epoch}, expected {expected}",
            )
        if not 1 <= said.max_running <= MAX_SLOTS or not 1 <= said.max_model_tokens <= MAX_COUNT:
            got = f"max_running {said.max_running}, max_model_tokens {said.max_model_tokens}"
            return Violation(kind=Kind.BOUNDS, words=f"EngineReady: {got}, expected 1 to {MAX_SLOTS}, and 1 or more")
        if said.kv_tokens is not None and not 1 <= said.kv_tokens <= MAX_COUNT:
            return Violation(kind=Kind.BOUNDS, words=f"EngineReady: a KV cache of {said.kv_tokens} tokens, expected 1 or more")
        is_wrong = any(len(name) > MAX_NAME or not 0 <= attempt <= MAX_COUNT for name, attempt in said.running.items())
        if len(said.running) > self._max_outstanding or is_wrong:
            got, expected = f"{len(said.running)} rollouts that it goes on with", f"at most {self._max_outstanding}, with attempts from 0"
            return Violation(kind=Kind.BOUNDS, words=f"EngineReady: {got}, expected {expected}")
        return None

    def sequences(self, said: EngineSequences) -> Violation | None:
        """Check what an engine says that it has. Names that nobody asked it for may be of an orchestrator that is gone, and do no harm:
        none of them is asked back.
        """
        if (violation := gauges(said)) is not None:
            return violation
        if len(said.written) > self._max_outstanding or any(len(name) > MAX_NAME for name in said.written):
            got, expected = f"{len(said.written)} sequences", f"at most {self._max_outstanding}, with names of up to {MAX_NAME} characters"
            return Violation(kind=Kind.BOUNDS, words=f"EngineSequences: {got}, expected {expected}")
        if unknown := said.waiting.keys() - said.written.keys():
            words = f"EngineSequences: {min(unknown)[:MAX_NAME]} waits, and is none of the {len(said.written)} sequences that it has"
            return Violation(kind=Kind.BOUNDS, words=words)
        return None

    def scorer(self, said: ScorerReady) -> Violation | None:
        if 1 <= said.num_slots <= MAX_SLOTS:
            return None
        return Violation(kind=Kind.BOUNDS, words=f"ScorerReady: {said.num_slots} slots, expected 1 to {MAX_SLOTS}")

    def trainer(self, said: TrainerReady) -> Violation | None:
        """Check a trainer's announcement; `stages.training` checks that version and commit are the ledger's own."""
        saved = said.version if said.saved is None else said.saved
        oldest = saved if said.oldest is None else said.oldest
        if 0 <= oldest <= saved <= said.version <= self._num_steps:
            return None
        got, expected = f"version {said.version}, checkpoints {oldest} to {saved}", f"0 to {self._num_steps}, and no newer checkpoint"
        return Violation(kind=Kind.STEPS, words=f"TrainerReady: {got}, expected {expected}")


def policy_of(said: WeightsStaged | WeightsCommitted | WeightsRefused, *, newest: int, rollback_epoch: int) -> Violation | None:
    """Return the violation in a policy that an engine names, or None.

    `newest` and `rollback_epoch` are the newest it was told to fetch, or announced; an orchestrator that is gone may have told it of one
    rollback epoch more.
    """
    if 0 <= said.version <= newest and 0 <= said.rollback_epoch <= rollback_epoch + 1:
        return gauges(said)
    got, expected = (
        f"version {said.version} of rollback epoch {said.rollback_epoch}",
        f"up to {newest} of rollback epoch {rollback_epoch}, the newest it was told of",
    )
    return Violation(kind=Kind.VERSIONS, words=f"{type(said).__name__}: {got}, expected {expected}")


def gauges(said: Message) -> Violation | None:
    """Return the violation in a message's figures, those in lists and inner messages included: each must be finite and from 0."""
    for name, value in _figures(said):
        if not (0 <= value <= MAX_COUNT and math.isfinite(value)):
            return Violation(kind=Kind.BOUNDS, words=f"{type(said).__name__}.{name[:100]} is {value:g}, expected a finite number from 0")
    return None


def _figures(value: Any, name: str = "") -> list[tuple[str, int | float]]:
    if isinstance(value, bool | str) or value is None:
        return []
    if isinstance(value, int | float):
        return [(name, value)]
    if isinstance(value, msgspec.Struct):
        return [each for field in value.__struct_fields__ for each in _figures(getattr(value, field), f"{name}.{field}".strip("."))]
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in _figures(inner, f"{name}.{key}")]
    return []
