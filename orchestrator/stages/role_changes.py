"""Has the rule of elastic roles (`rules.role_orders`) drive a live run: it measures windows from swap boundary to swap boundary, asks the
rule, and says in the journal what was decided on which figures. `stages.scaling` carries out what it orders.
"""

from __future__ import annotations

import asyncio
import dataclasses

from orchestrator.observe.progress import Progress
from orchestrator.peers.engines import Engines
from orchestrator.peers.prm import Prm
from orchestrator.rules.admission import ENGINES_FULL
from orchestrator.rules.pass_profile import PassSeconds
from orchestrator.rules.role_orders import Decision, Orders, RoleOrders, Seen, Word
from orchestrator.rules.role_window import Counts, RoleWindow
from orchestrator.rules.roles import Window
from orchestrator.rules.trainer_ranks import TrainerChange
from orchestrator.stages.training import Training
from pipelinerl.messages import EngineLoad, StepDone
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.trainer_ranks import Phase
from pipelinerl.runtime.watch import Watch

WINDOW_SWITCHES = 2.0
"""Seconds of a window over those of a change. With 2, a change that stops everything has to save a fifth of the time to pay within the
rule's horizon. A larger value follows drifts later; a smaller one lets hardly any change pay."""
_NOT_HELD = (ENGINES_FULL, "completions")
"""Waits of generation that do not hold engines back."""


@dataclasses.dataclass(slots=True, kw_only=True)
class RoleChanges:
    """Waits for nothing: whoever carries orders out looks here twice a second, and asks for those that are to be carried out now."""

    rule: RoleOrders
    window: RoleWindow
    engines: Engines
    prm: Prm | None
    """The process reward model whose engines change, too; None where none do."""
    change: TrainerChange
    training: Training
    progress: Progress
    watch: Watch
    journal: Journal
    engines_of_unit: int
    prms_of_unit: int
    drain_s: float
    """Seconds that engines which leave may take to end what they have."""
    _boundary: Counts | None = dataclasses.field(default=None, init=False)
    """What was counted at the last swap boundary; None once that was looked at."""
    _has_started: bool = dataclasses.field(default=False, init=False)
    _told: dict[str, object] = dataclasses.field(default_factory=dict, init=False)
    """The figures of the last window."""

    def __post_init__(self) -> None:
        self.engines.on_load(self._reported)
        self.engines.on_died(self.window.lost)
        self.progress.on_trained = self._trained

    def look(self) -> Orders | None:
        """Return the orders that are to be carried out now; None where there are none."""
        boundary, self._boundary = self._boundary, None
        seen = self._seen()
        self._note_start(seen)
        decision = self.rule.follow(seen)
        if decision is None:
            decision = self._plan(seen, boundary)
        if decision is None:
            return None
        self._tell(decision)
        return decision.orders

    def _plan(self, seen: Seen, boundary: Counts | None) -> Decision | None:
        """Begin a window, or end it and ask the rule, where a swap boundary was."""
        window, seconds = self.window, self.rule.seconds
        if not (seen.is_whole and self.rule.may_plan):
            window.stop()
        elif boundary is not None and window.began is None:
            window.begin(boundary)
        elif boundary is not None and window.seconds(boundary.now_s) >= WINDOW_SWITCHES * seconds.switch_s:
            found = window.window(boundary, engines_of_unit=self.engines_of_unit, prms_of_unit=self.prms_of_unit)
            if found is None or (decision := self.rule.plan(seen, *found, slots=window.slots, room=window.profile.room)) is None:
                return None
            window.begin(boundary)
            self._told = self._figures(*found)
            return decision
        return None

    def _seen(self) -> Seen:
        record, membership = self.change.record, self.engines.membership
        is_settled = record.phase is Phase.SETTLED
        prm = None if self.prm is None else self.prm.membership
        is_there = self.training.session.is_whole and not membership.missing() and not (prm and prm.missing())
        return Seen(
            wanted=Orders(membership.num_wanted, record.wanted, prm.num_wanted if prm else 0),
            is_settled=is_settled,
            is_away=record.phase is Phase.STARTING,
            is_whole=is_settled and is_there,
            step=self.training.last_version,
            now_s=_now_s(),
            reason=membership.record().refused or record.reason,
        )

    def _note_start(self, seen: Seen) -> None:
        """Note how long everybody took to load, once they are there, unless they had before this orchestrator began."""
        if not self._has_started and seen.is_whole:
            self._has_started = True
            if not any(engine.ready.version for engine in self.engines):
                self.rule.seconds.started(seen.now_s - self.progress.started_s)

    # --- what is heard ---

    def _reported(self, load: EngineLoad) -> None:
        self.window.reported(load, now_s=_now_s())

    def _trained(self, done: StepDone) -> None:
        rate = done.metrics.get("tokens_per_s", 0.0)
        working_s = done.metrics.get("num_tokens", 0.0) / rate if rate else 0.0
        self.window.trained(working_s=working_s, num_replicas=self.change.num_replicas)
        self._boundary = self._counts()

    def _counts(self) -> Counts:
        waits = ((name.partition(": "), seconds) for name, seconds in self.watch.all_waited_s().items())
        held_s = sum(seconds for (stage, _, what), seconds in waits if stage == "generation" and what not in _NOT_HELD)
        scored_s = None if self.prm is None else (load.busy_s if (load := self.prm.load()) else 0.0)
        sampled, trained = self.engines.num_tokens, self.progress.num_trained_tokens
        return Counts(now_s=_now_s(), sampled=sampled, trained=trained, held_s=held_s, scored_s=scored_s)

    # --- what is told ---

    def _figures(self, window: Window, passes_s: PassSeconds) -> dict[str, object]:
        weighed, pool = self.rule.roles.weighed, self.rule.roles.pool
        assert weighed is not None, "a window was weighed"
        return {
            **{name: getattr(weighed, name) for name in ("speed_now", "speed_then", "saved_s", "cost_s")},
            **{name: getattr(pool, name) for name in ("switch_s", "away_s")},
            **{name: value for name, value in dataclasses.asdict(window).items() if value is not None},
            "pass_s": dataclasses.asdict(passes_s),
        }

    def _tell(self, decision: Decision) -> None:
        """Write what was decided, and, where a window was weighed for it, on which figures."""
        figures = self._told if decision.word in (Word.STAYS, Word.BEGINS) else {}
        self.journal.write(
            "roles",
            word=decision.word,
            step=self.training.last_version,
            epoch=self.rule.roles.epoch,
            engines=decision.now.engines,
            trainer=decision.now.trainer,
            prm=decision.now.prm,
            engines_then=decision.then.engines,
            trainer_then=decision.then.trainer,
            prm_then=decision.then.prm,
            reason=decision.reason,
            **figures,
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
