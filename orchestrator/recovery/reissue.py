"""This module reissues rollouts that were lost with their engine, or got an impossible answer, and reattaches those that an engine still
has.

A rollout's next attempt goes to an engine whose version is no older than the rollout's; siblings that were lost together go together. A
prompt that was present at two deaths is not issued again, and no engine has two suspects at once (`rules.quarantine`).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.engines import Engine, Engines
from orchestrator.recovery.quarantine import PromptSuspects
from orchestrator.rollouts.rollout import Rollout, unanswered
from orchestrator.rules.quarantine import Quarantine, row_of
from orchestrator.rules.routing import route
from orchestrator.rules.validation.violations import Violation
from pipelinerl.messages import Completion, Generate
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch

MAX_REFUSED = 3
"""Impossible answers to a rollout before it fails. 1 would fail it for its engine's fault; a larger value lets it be repeated for long."""


class Attempts(Protocol):
    """The attempts of rollouts, which the generation stage makes."""

    def ask(self, rollout: Rollout, engine_id: int) -> None:
        """Ask an engine for an attempt, or for an episode's next turn."""
        ...

    def request(self, rollout: Rollout) -> Generate:
        """Return the request that is sent for an attempt."""
        ...

    def take(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        """Take an engine's answer to an attempt."""
        ...

    def finish(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        """End a rollout with its last answer."""
        ...

    def full(self) -> str | None:
        """Name the queue that has to get shorter before anything more is asked of engines."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Reissue:
    """The rollouts that engines have, and those that wait to be issued again."""

    engines: Engines
    quarantine: Quarantine
    ledger: Ledger
    credits: Signal
    watch: Watch
    attempts: Attempts
    may_move: Callable[[Rollout], bool]
    """The callback says whether a rollout may go on in another engine with its tokens."""
    _waiting: dict[int, list[Rollout]] = dataclasses.field(default_factory=dict)
    """The attempts to issue in place of lost ones, and the turns that no engine may continue yet, by group."""
    _running: dict[int, dict[str, int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(dict))
    """The rollouts in engines, each with its engine, by group; between two turns, with the engine of the last turn."""
    _lost: dict[int, set[str]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    """The prompts that a dying engine had, by engine."""
    _prompt_ids: dict[int, str] = dataclasses.field(default_factory=dict)
    """The prompt of each group that has rollouts in engines."""
    _suspects: PromptSuspects = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._suspects = PromptSuspects(role="engine", quarantine=self.quarantine, ledger=self.ledger)
        self.engines.on_died(self._on_died)
        self.engines.on_joined(self._on_joined)

    async def run(self) -> None:
        """Issue waiting rollouts as engines may take them."""
        while True:
            for group_id in list(self._waiting):
                if self.attempts.full() is None:
                    self._try_again(group_id)
            if self._waiting:
                with self.watch.waiting("generation", self.attempts.full() or "an engine that may go on with what another one has begun"):
                    await self.credits.wait()
            else:
                await self.credits.wait()

    def put(self, rollout: Rollout) -> None:
        """Have a rollout issued as soon as an engine may take it."""
        self._waiting.setdefault(rollout.group_id, []).append(rollout)

    def enter(self, rollout: Rollout, engine_id: int) -> None:
        """Note that a rollout is in an engine."""
        self._running[rollout.group_id][rollout.rollout_id] = engine_id
        self._prompt_ids[rollout.group_id] = rollout.prompt.prompt_id

    def leave(self, rollout: Rollout) -> None:
        """Note that a rollout is in no engine any more."""
        running = self._running[rollout.group_id]
        del running[rollout.rollout_id]
        if not running:
            del self._running[rollout.group_id]
            del self._prompt_ids[rollout.group_id]

    def end(self, rollout: Rollout, engine_id: int) -> None:
        """Note that a rollout is answered; the last of its group clears its prompt."""
        self.leave(rollout)
        is_last = rollout.group_id not in self._running and rollout.group_id not in self._waiting
        if is_last and self._suspects.clear(f"engine-{engine_id}", rollout.prompt.prompt_id):
            self.credits.set()

    def lose(self, rollout: Rollout, engine_id: int) -> None:
        """Issue the next attempt of a rollout that was lost with its engine."""
        engine = self.engines.find(engine_id)
        reason = f"engine-{engine_id} ended"
        if engine is None or not (engine.is_rejected or engine.leaves_for):
            self._lost[engine_id].add(rollout.prompt.prompt_id)
        else:  # it is replaced for what it said, or let go of: no prompt is suspected
            reason = f"engine-{engine_id} {'has left' if engine.leaves_for else 'is fenced for what it said'}"
        self._issue_next(rollout, rollout.next_attempt(), engine_id, reason=reason)

    def refuse(self, rollout: Rollout, engine_id: int, violation: Violation) -> None:
        """Issue the next attempt of a rollout whose answer is impossible, to another engine where there is one."""
        self._issue_next(rollout, rollout.next_attempt(refused_by=engine_id), engine_id, reason=str(violation))

    def move(self, rollout: Rollout, completion: Completion, engine_id: int, target: int | None = None) -> None:
        """Issue the next attempt of a rollout that goes on in another engine after what this one has written: in `target`, where that may
        take it now.
        """
        following = rollout.moved(completion)
        num = 0 if following.written is None else len(following.written.token_ids)
        self._issue_next(rollout, following, engine_id, reason=f"it moves from engine-{engine_id} with {num} tokens", target=target)

    def is_quarantined(self, rollout: Rollout) -> bool:
        return self.quarantine.holds(rollout.prompt.prompt_id)

    def may_take(self, engine_id: int, rollout: Rollout) -> bool:
        """Return whether an engine is no older than the rollout, and would not have two suspects at once."""
        if self.engines[engine_id].version < rollout.version:
            return False
        if not self.quarantine.is_suspect("engine", rollout.prompt.prompt_id):
            return True
        others = {group_id for group_id, running in self._running.items() if engine_id in running.values()} - {rollout.group_id}
        return not any(self.quarantine.is_suspect("engine", self._prompt_ids[group_id]) for group_id in others)

    def _issue_next(self, rollout: Rollout, following: Rollout, engine_id: int, *, reason: str, target: int | None = None) -> None:
        self.leave(rollout)
        self.ledger.lose(rollout.rollout_id, attempt=rollout.attempt, engine_id=engine_id, reason=reason, now_s=_now_s())
        following = dataclasses.replace(following, reason=reason)
        if target is not None and self._takes_now(target, following):
            self.attempts.ask(following, target)
        else:
            self.put(following)
        self.credits.set()

    def _takes_now(self, engine_id: int, rollout: Rollout) -> bool:
        is_held = self.is_quarantined(rollout) or self.attempts.full() is not None
        return not is_held and self.engines.takes_work(engine_id) and self.may_take(engine_id, rollout)

    def _try_again(self, group_id: int) -> None:
        rollouts = self._waiting[group_id]
        failed = rollouts if self.is_quarantined(rollouts[0]) else [one for one in rollouts if len(one.refused_by) >= MAX_REFUSED]
        for rollout in failed:
            answer = _not_sampled(rollout, is_quarantined=self.is_quarantined(rollout))
            self.attempts.finish(rollout.said(answer), answer, -1)
        ended = {rollout.rollout_id for rollout in failed}
        rollouts = self._waiting[group_id] = [rollout for rollout in rollouts if rollout.rollout_id not in ended]
        if not rollouts:
            del self._waiting[group_id]
            return
        newest = max(rollouts, key=lambda rollout: rollout.version)
        serving = self.engines.outstanding()
        others = serving.keys() - {engine_id for rollout in rollouts for engine_id in rollout.refused_by}
        may_take = {
            engine_id: num for engine_id, num in serving.items() if engine_id in (others or serving) and self.may_take(engine_id, newest)
        }
        engine_id = route(may_take)
        if engine_id is None:
            return
        del self._waiting[group_id]
        for rollout in rollouts:
            self.attempts.ask(rollout, engine_id)

    def _on_joined(self, engine: Engine) -> None:
        """Await the answers to attempts that the engine still has and that would otherwise be issued again; it drops everything else it
        has.

        An episode's earlier turns were lost with the orchestrator before: it is played again from its prompt.
        """
        if not engine.ready.running:
            return
        reattached: dict[str, Rollout] = {}
        for group_id in list(self._waiting):
            left: list[Rollout] = []
            for rollout in self._waiting.pop(group_id):
                before = dataclasses.replace(rollout, attempt=rollout.attempt - 1)
                has_it = engine.ready.running.get(rollout.rollout_id) == before.attempt
                if has_it and rollout.episode is None and not self.is_quarantined(rollout):
                    reattached[rollout.rollout_id] = before
                else:
                    left.append(rollout)
            if left:
                self._waiting[group_id] = left
        for rollout in reattached.values():
            self.ledger.reattach(rollout.rollout_id, attempt=rollout.attempt, engine_id=engine.engine_id, now_s=_now_s())
            self.enter(rollout, engine.engine_id)
        self.engines.requests.reattach(
            [(self.attempts.request(rollout), rollout.version) for rollout in reattached.values()],
            engine.engine_id,
            sink=lambda name: functools.partial(self.attempts.take, reattached[name]),
            lost=lambda name: functools.partial(self.lose, reattached[name]),
            refused=lambda name: functools.partial(self.refuse, reattached[name]),
            moved=lambda name: functools.partial(self.move, reattached[name]) if self.may_move(reattached[name]) else None,
        )

    def _on_died(self, engine_id: int) -> None:
        self._suspects.record_death(f"engine-{engine_id}", self._lost.pop(engine_id, set()))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _not_sampled(rollout: Rollout, *, is_quarantined: bool) -> Completion:
    """Return the completion that stands for a missing answer, where no engine may be asked, or every answer was impossible."""
    error = f"{len(rollout.refused_by)} answers could not be true, the last {rollout.reason}"
    if is_quarantined:
        error = f"its prompt (row {row_of(rollout.prompt.prompt_id)}) is quarantined: it was there when a process died, twice"
    return unanswered(rollout.rollout_id, attempt=rollout.attempt, error=error)
