"""Has the rule of elastic roles (`rules.role_orders`) drive a live run: it measures windows from swap boundary to swap boundary, asks the
rule, and says in the journal what was decided on which figures. `stages.scaling` carries out what it orders.

What the rule has decided is in the run's folder before anybody acts upon it: an orchestrator may be killed at any moment, and the one that
follows goes on with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterable

from orchestrator.observe.progress import Progress
from orchestrator.peers.engines import Engines
from orchestrator.peers.prm import Prm
from orchestrator.peers.reward_model import RewardModel
from orchestrator.rules.admission import ENGINES_FULL
from orchestrator.rules.pass_profile import PassSeconds
from orchestrator.rules.role_orders import Decision, Orders, RoleOrders, Seen, Word
from orchestrator.rules.role_window import LATE_S, SILENT_S, Counts, RoleWindow
from orchestrator.rules.roles import WINDOW_SWITCHES, Window
from orchestrator.rules.trainer_ranks import TrainerChange
from orchestrator.stages.training import Training
from pipelinerl.messages import EngineLoad, StepDone, Trajectory
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.membership import Member, ScaleFolder, State
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.trainer_ranks import Phase
from pipelinerl.runtime.watch import Watch

_NOT_HELD = (ENGINES_FULL, "completions")
"""Waits of generation that do not hold engines back."""


@dataclasses.dataclass(slots=True, kw_only=True)
class RoleChanges:
    """Waits for engines that are missing, and no change of its own is under way, for `missing_s`; else for nothing: whoever carries orders
    out looks here twice a second, and asks for those that are to be carried out now.
    """

    rule: RoleOrders
    window: RoleWindow
    engines: Engines
    scoring: Prm | RewardModel | None
    """The model that scores and whose engines, or processes, change, too; None where none do."""
    others: tuple[Prm | RewardModel, ...]
    """Models that score on devices which do not change by themselves."""
    change: TrainerChange
    training: Training
    completions: Channel[Trajectory]
    progress: Progress
    watch: Watch
    journal: Journal
    folder: ScaleFolder
    stages: int
    """Ranks of an engine for each of its `tensor_parallel_size`."""
    scorers_of_unit: int
    drain_s: float
    """Seconds that engines which leave may take to end what they have."""
    missing_s: float
    """Seconds in which a spare that is missing has to come, or come again; then what there is is shared without it."""
    is_first: bool
    """No orchestrator of this run was there before."""
    _boundary: Counts | None = dataclasses.field(default=None, init=False)
    """What was counted at the last swap boundary; None once that was looked at."""
    _has_started: bool = dataclasses.field(default=False, init=False)
    _missing_since_s: float | None = dataclasses.field(default=None, init=False)
    """Since when spares have been missing; None where none are."""
    _given_up: str = dataclasses.field(default="", init=False)
    """Which engines were given up last, and why."""
    _told: dict[str, object] = dataclasses.field(default_factory=dict, init=False)
    """The figures of the last window."""

    def __post_init__(self) -> None:
        self.engines.on_load(self._reported)
        self.engines.on_died(self.window.lost)
        self.progress.on_trained = self._trained
        self.completions.on_put = self._completed

    def look(self) -> Orders | None:
        """Return the orders that are to be carried out now; None where there are none."""
        boundary, self._boundary = self._boundary, None
        self._give_up_missing()
        seen = self._seen()
        self._note_start(seen)
        decision = self.rule.follow(seen)
        if decision is None:
            decision = self._plan(seen, boundary)
        if decision is None:
            return None
        self._tell(decision)
        self.folder.remember_roles(self.rule.record)
        return decision.orders

    def _plan(self, seen: Seen, boundary: Counts | None) -> Decision | None:
        """Begin a window, or end it and ask the rule, where a swap boundary was."""
        window, seconds = self.window, self.rule.seconds
        silence_s = self._silence_s(seen.now_s)
        if not (seen.is_whole and self.rule.may_plan and silence_s <= SILENT_S):
            window.stop()
        elif silence_s > LATE_S:
            return None
        elif boundary is not None and window.began is None:
            window.begin(boundary)
        elif boundary is not None and window.seconds(boundary.now_s) >= WINDOW_SWITCHES * seconds.switch_s:
            of_unit = {"engines_of_unit": self.rule.engines_of_unit, "scorers_of_unit": self.scorers_of_unit}
            others = [len(list(model)) for model in self.others]
            found = window.window(boundary, width=self.rule.roles.layout.width, **of_unit, others=others)
            if found is None or (decision := self.rule.plan(seen, found[0], window.passes(), slots=window.slots)) is None:
                return None
            window.begin(boundary)
            self._told = self._figures(*found)
            return decision
        return None

    def _seen(self) -> Seen:
        record, membership = self.change.record, self.engines.membership
        is_settled, size = record.phase is Phase.SETTLED, membership.tensor_parallel_size or 1
        missing, has_trainer = membership.missing(), self.training.session.is_whole
        has_scorers = not any(model.membership.missing() for model in self._models)
        num_scorers, scored_by = self._wanted_scorers
        are_others = has_trainer and has_scorers
        return Seen(
            wanted=Orders(membership.num_wanted, record.wanted, num_scorers, size, scored_by=scored_by),
            num_given_up=membership.num_given_up,
            is_settled=is_settled,
            is_away=record.phase is Phase.STARTING,
            is_whole=is_settled and are_others and not missing,
            is_short=are_others and all(member.state is State.LOST for member in missing),
            step=self.training.steps.num_booked,
            now_s=_now_s(),
            reason=membership.record().refused or record.reason,
            given_up=self._given_up,
        )

    @property
    def _models(self) -> tuple[Prm | RewardModel, ...]:
        """All models that score."""
        return (*([] if self.scoring is None else [self.scoring]), *self.others)

    @property
    def _wanted_scorers(self) -> tuple[int, str]:
        return (0, "") if self.scoring is None else (self.scoring.membership.num_wanted, self.scoring.membership.kind)

    def _give_up_missing(self) -> None:
        """Do without the spares that have been missing for too long while nothing changes."""
        membership, now_s = self.engines.membership, _now_s()
        is_settled = self.change.record.phase is Phase.SETTLED and not self.rule.is_changing
        absent = membership.absent() if is_settled else []
        if not absent:
            self._missing_since_s = None
        elif self._missing_since_s is None:
            self._missing_since_s = now_s
        elif now_s - self._missing_since_s > self.missing_s:
            names = ", ".join(f"engine-{member.engine_id}" for member in absent)
            self._given_up = f"waited {self.missing_s:g} s for {names} to come{_last_words(absent)}"
            membership.give_up_absent(f"it has not come within {self.missing_s:g} s")

    def _silence_s(self, now_s: float) -> float:
        """Return for how long the most silent of engines, trainer and the scorer of reward models was not heard of."""
        session = self.training.session
        trainer_s = [session.trainer.silence_s(f"trainer-{replica}") for replica in session.replicas]
        models_s = [model.silence_s(now_s) for model in self._models if isinstance(model, RewardModel)]
        return max(*trainer_s, *models_s, self.window.silence_s((engine.engine_id for engine in self.engines), now_s=now_s), 0.0)

    def _note_start(self, seen: Seen) -> None:
        """Note how long everybody took to load, once they are there: who follows an orchestrator may find them at work."""
        if not self._has_started and seen.is_whole:
            self._has_started = True
            if self.is_first:
                self.rule.seconds.started(seen.now_s - self.progress.started_s)
                self.folder.remember_roles(self.rule.record)

    # --- what is heard ---

    def _reported(self, load: EngineLoad) -> None:
        member = self.engines.membership.find(load.engine_id)
        size = None if member is None else member.tensor_parallel_size
        width = self.rule.roles.layout.width if size is None else size * self.stages
        self.window.reported(load, width=width, now_s=_now_s())

    def _completed(self, trajectory: Trajectory) -> None:
        self.window.completed(num_tokens=trajectory.num_tokens, num_sampled=trajectory.num_trained_tokens)

    def _trained(self, done: StepDone) -> None:
        num_tokens, rate = (done.metrics.get(name, math.nan) for name in ("num_tokens", "tokens_per_s"))
        working_s = 0.0 if num_tokens == 0 else num_tokens / (rate or math.nan)
        num_row_tokens = self.progress.last_step["num_tokens"]
        assert isinstance(num_row_tokens, int), "a number of tokens"
        self.window.trained(num_tokens=num_row_tokens, working_s=working_s, num_replicas=self.change.num_replicas, now_s=_now_s())
        self._boundary = self._counts()

    def _counts(self) -> Counts:
        waits = ((name.partition(": "), seconds) for name, seconds in self.watch.all_waited_s().items())
        held_s = sum(seconds for (stage, _, what), seconds in waits if stage == "generation" and what not in _NOT_HELD)
        scored_s = None if self.scoring is None else self.scoring.busy_s()
        others_s = tuple(model.busy_s() for model in self.others)
        sampled, trained = self.engines.num_tokens, self.progress.num_trained_tokens
        return Counts(now_s=_now_s(), sampled=sampled, trained=trained, held_s=held_s, scored_s=scored_s, others_s=others_s)

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
            step=self.training.steps.num_booked,
            epoch=self.rule.roles.epoch,
            engines=decision.now.engines,
            trainer=decision.now.trainer,
            scorers=decision.now.scorers,
            scored_by=decision.now.scored_by,
            tensor_parallel_size=decision.now.tensor_parallel_size,
            engines_then=decision.then.engines,
            trainer_then=decision.then.trainer,
            scorers_then=decision.then.scorers,
            tensor_parallel_size_then=decision.then.tensor_parallel_size,
            reason=decision.reason,
            **figures,
        )


def _last_words(members: Iterable[Member]) -> str:
    words = "; ".join(f"engine-{member.engine_id}: {member.reason}" for member in members if member.reason)
    return f" ({words})" if words else ""


def _now_s() -> float:
    return asyncio.get_running_loop().time()
