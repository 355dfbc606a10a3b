"""Groups go to engines while the live rules allow it, and what engines answer goes on to scoring: as `stages.generation` does.

The order of the questions is that of the live stage: room, the process reward model's backpressure, then `Admission.holds_back`, for each
version that a serving engine holds; `Loads` chooses the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from orchestrator.rules.admission import Admission, num_kept_free
from orchestrator.rules.dispatch import Dispatch, Serving
from orchestrator.rules.group_cut import GroupCut
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.routing import Loads, route
from orchestrator.simulate.books import Books
from orchestrator.simulate.draws import Workload
from orchestrator.simulate.engine import SimulatedEngine
from orchestrator.simulate.events import Events
from orchestrator.simulate.rollouts import Rollout
from orchestrator.simulate.scorers import Slots, Steps
from orchestrator.simulate.sending import Sending
from orchestrator.simulate.sequence import Sequence
from orchestrator.simulate.waits import Waits
from orchestrator.simulate.world import ScoringWorld
from pipelinerl.messages import Finish

NO_ENGINE = "an engine that takes new work"
ANYWHERE = -1
"""In place of the engine to which a rollout moves: whichever may take it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The run's settings that bound a rollout."""

    group_size: int
    num_siblings: int
    """With the greedy one, where the method adds one."""
    max_tokens: int
    max_turns: int
    """1 without an environment."""
    steps: Steps | None
    """Those that a process reward model scores; None without one."""


class Generation:
    """Admission, routing, the engines' answers, and rollouts that were lost with their engine."""

    def __init__(
        self,
        events: Events,
        *,
        engines: list[SimulatedEngine],
        admission: Admission,
        workload: Workload,
        world: ScoringWorld,
        limits: Limits,
        books: Books,
        waits: Waits,
        num_prompts: int,
        replies: Slots | None,
        admit_s: float = 0.0,
        dispatch: Dispatch[Rollout] | None = None,
        group_cut: GroupCut | None = None,
    ) -> None:
        """`replies` are the slots of the environment, `dispatch` the rule that sends rollouts one by one, `group_cut` the one that ends the
        last of a group by a coin; None without. `admit_s` are the seconds between two groups that are sent.
        """
        self.events, self.engines, self.admission, self.waits = events, engines, admission, waits
        self.loads = Loads()
        """The engines that take new work."""
        self.asleep: set[int] = set()
        """Engines that take no new work while they sleep and others are awake."""
        self.outstanding = [0] * len(engines)
        """Rollouts that each engine was asked for and has not answered."""
        self.num_outstanding, self.has_changed = 0, True
        """Whether another group might be admitted: what a live run's credits signal."""
        self.num_missing = 0
        """Engines that are dead."""
        self.leaving: set[int] = set()
        """Engines that take no new work any more, and those that are gone for another role."""
        self.next_group_id = 0
        self.quarantine = Quarantine()
        self.on_finished: Callable[[Rollout], None] = lambda rollout: None
        """Called with a rollout that is written."""
        self.on_empty: Callable[[int], None] = lambda engine_id: None
        """Called with each engine that has nothing left."""
        self.on_step: Callable[[Rollout, int], None] = lambda rollout, end: None
        """Called with a rollout and its sampled tokens at a report after which a step of it has ended, for the process reward model."""
        self.full: Callable[[], str | None] = lambda: None
        """Names what has to be taken away before anything more is asked of engines."""
        self.replies, self.dispatch, self.group_cut = replies, dispatch, group_cut
        self._siblings: dict[int, list[Rollout]] = {}
        """By group, where groups are cut."""
        self._workload, self._world, self._limits, self._books, self._num_prompts = workload, world, limits, books, num_prompts
        self.sending = Sending(events, each_s=admit_s)
        self._in_engines: list[dict[Rollout, None]] = [{} for _ in engines]
        self._lost: dict[int, list[Rollout]] = {}
        """Rollouts to be asked for again, by group."""
        self._open: dict[int, int] = {}
        """Rollouts of each group that are not written."""
        for engine in engines:
            self.note(engine)

    # --- new groups ---

    def settle(self) -> None:
        """Ask for what was lost, then admit groups, until the rules hold back the next one; where nothing has changed, they would again."""
        if not self.has_changed:
            return
        self.has_changed = False
        for group_id in list(self._lost):
            if self.full() is None:
                self._ask_again(group_id)
        while self.sending.is_free and (engine_id := self._engine_for_a_group()) is not None:
            self._send_group(engine_id)
            self.sending.sent()
        self._send_rollouts()
        if not self.sending.is_free:
            self.events.at(self.sending.next_s, self.credit)
            return
        self.sending.over()
        self.waits.now("generation", self._held_back_by() or NO_ENGINE)

    def _send_rollouts(self) -> None:
        """Send rollouts one by one, as the live rule says."""
        dispatch = self.dispatch
        while dispatch is not None and dispatch.num_waiting and self.full() is None:
            serving = [
                Serving(engine_id=number, version=engine.version, num_outstanding=self.outstanding[number])
                for number, engine in enumerate(self.engines)
                if self._takes_work(engine)
            ]
            found = dispatch.next(serving, max_running=self.admission.max_running)
            if found is None:
                return
            self._ask(*found)
            self.note(self.engines[found[1]])

    def note(self, engine: SimulatedEngine) -> None:
        """Count an engine among those that take new work, or not."""
        self.has_changed = True
        if self._takes_work(engine):
            self.loads.note(engine.engine_id, version=engine.version, outstanding=self.outstanding[engine.engine_id])
        else:
            self.loads.forget(engine.engine_id)

    def _takes_work(self, engine: SimulatedEngine) -> bool:
        return engine.is_alive and engine.engine_id not in self.leaving | self.asleep

    def join(self, engine: SimulatedEngine) -> None:
        """Take another engine, whose id is the next one."""
        self.engines.append(engine)
        self.outstanding.append(0)
        self._in_engines.append({})
        self.note(engine)

    def leave(self, engine_id: int) -> None:
        """Have an engine give all that it has to others; `on_empty` says when it has."""
        self.leaving.add(engine_id)
        self.note(self.engines[engine_id])
        for rollout in self.in_engine(engine_id):
            self.move(rollout, ANYWHERE)

    def credit(self) -> None:
        """Note that another group might be admitted."""
        self.has_changed = True

    def all_hold(self, version: int) -> bool:
        """Return whether every engine is there and samples under `version` or a later one."""
        return not self.num_missing and not self.asleep and min(self.loads.versions(), default=version - 1) >= version

    def _engine_for_a_group(self) -> int | None:
        return self.loads.least_busy([version for version in self.loads.versions() if self._held_back_by(version) is None])

    def _held_back_by(self, version: int | None = None) -> str | None:
        version = max(self.loads.versions(), default=None) if version is None else version
        if version is None:
            return NO_ENGINE
        held = [self.outstanding[engine_id] for engine_id in self.asleep]
        num_generating = self.num_outstanding if self.dispatch is None else self.dispatch.num_waiting
        num_generating += num_kept_free(self.admission.max_running, num_engines=len(self.engines), held=held)
        return self.full() or self.admission.holds_back(
            version=version,
            num_generating=num_generating,
            engines_are_current=self.admission.schedule.in_rounds and self.all_hold(self.admission.version),
        )

    def _send_group(self, engine_id: int) -> None:
        group_id = self._next_group()
        self.admission.admitted()
        draws, (epoch, row) = self._workload.group(group_id), divmod(group_id, self._num_prompts)
        self._open[group_id] = self._limits.num_siblings
        rollouts: list[Rollout] = []
        for sibling in range(self._limits.num_siblings):
            rollout = Rollout(
                group_id=group_id,
                sibling=sibling,
                name=f"{group_id}/{sibling}",
                prompt_id=f"{epoch}:{row}",
                draws=draws,
                is_greedy=sibling >= self._limits.group_size,
                admitted_s=self.events.now_s,
                version=self.engines[engine_id].version,
            )
            self._books.admit(rollout.name)
            rollouts.append(rollout)
        if self.group_cut is not None:
            self._siblings[group_id] = rollouts
        if self.dispatch is not None:
            self.dispatch.add(group_id, rollouts, num_prompt=draws.prompt_tokens, version=self.engines[engine_id].version)
            return
        for rollout in rollouts:
            self._ask(rollout, engine_id)
        self.note(self.engines[engine_id])

    def _next_group(self) -> int:
        while True:
            group_id, self.next_group_id = self.next_group_id, self.next_group_id + 1
            if not self.quarantine.skips(f"0:{group_id % self._num_prompts}"):
                return group_id

    # --- one rollout ---

    def _ask(self, rollout: Rollout, engine_id: int) -> None:
        engine, draws, limits = self.engines[engine_id], rollout.draws, self._limits
        written = rollout.num_sampled + rollout.num_observed
        turns = min(int(draws.turns[rollout.sibling]), limits.max_turns)
        whole = int(draws.lengths[rollout.sibling])
        whole = max(1, round(whole * (rollout.turn + 1) / turns) - round(whole * rollout.turn / turns) - rollout.num_moved)
        length, sampled = min(whole, max(1, limits.max_tokens - written)), rollout.num_sampled
        context = draws.prompt_tokens + written
        is_cached = rollout.cached_under == (engine_id, engine.version)
        rollout.version, rollout.engine_id = max(rollout.version, engine.version), engine_id
        rollout.sequence = Sequence(
            group_id=rollout.group_id,
            num_context=context,
            num_shared=draws.prompt_tokens,
            length=length,
            finish=Finish.STOP if length == whole else Finish.LENGTH,
            answer=lambda sequence: self._answered(rollout, sequence),
            num_cached=context - self._world.reply_tokens if is_cached else 0,
            marks=tuple(end - sampled for end in limits.steps.ends(rollout, sampled, sampled + length)) if limits.steps else (),
            reached=lambda sequence, mark: self.on_step(rollout, sampled + mark),
        )
        self._in_engines[engine_id][rollout] = None
        if self.dispatch is not None:
            self.dispatch.sent(rollout.name, group_id=rollout.group_id, num_prompt=draws.prompt_tokens, engine_id=engine_id)
        self.outstanding[engine_id] += 1
        self.num_outstanding += 1
        engine.submit(rollout.sequence)

    def move(self, rollout: Rollout, engine_id: int) -> None:
        """Have a rollout that an engine writes go on in another one, with its cache computed there anew."""
        if rollout.sequence is not None and not rollout.sequence.is_over:
            rollout.moves_to = engine_id
            self.engines[rollout.engine_id].cancel(rollout.sequence)

    def _move_on(self, rollout: Rollout, engine_id: int, *, num_written: int) -> None:
        rollout.num_moved += num_written
        rollout.version = max([rollout.version, *(version for version, _ in rollout.runs[-1:])])
        self._ask_if(rollout, engine_id)

    def _ask_if(self, rollout: Rollout, engine_id: int) -> None:
        """Ask an engine, where it may go on with a rollout; else another one, once it may."""
        engine = None if engine_id == ANYWHERE else self.engines[engine_id]
        if engine is not None and self._takes_work(engine) and engine.version >= rollout.version:
            self._ask(rollout, engine_id)
            self.note(engine)
        else:
            self._lost.setdefault(rollout.group_id, []).append(rollout)
            self.has_changed = True

    def in_engine(self, engine_id: int) -> list[Rollout]:
        """Return the rollouts that an engine has, in the order in which it was asked."""
        return list(self._in_engines[engine_id])

    def stop(self, rollout: Rollout) -> None:
        """End a rollout early, where an engine still writes it."""
        if rollout.sequence is not None and not rollout.sequence.is_over:
            self.engines[rollout.engine_id].cancel(rollout.sequence)

    def _answered(self, rollout: Rollout, sequence: Sequence) -> None:
        if rollout.sequence is not sequence:  # its engine died while the answer was on its way
            return
        self._out_of_engine(rollout)
        if self.dispatch is not None:
            num_tokens = sequence.written if sequence.finish in (Finish.STOP, Finish.LENGTH) else None
            self.dispatch.ended(rollout.name, engine_id=rollout.engine_id, num_tokens=num_tokens)
        rollout.sequence = None
        rollout.runs += sequence.runs
        rollout.num_sampled += sequence.written
        target, rollout.moves_to = rollout.moves_to, None
        if target is not None and sequence.finish is Finish.CANCELLED and (rollout.decision is None or not rollout.decision.stops):
            self._move_on(rollout, target, num_written=sequence.written)
            return
        rollout.num_moved = 0
        rollout.finish, rollout.turn = sequence.finish, rollout.turn + 1
        if self.group_cut is not None:
            self._cut(rollout, self.group_cut)
        turns = min(int(rollout.draws.turns[rollout.sibling]), self._limits.max_turns)
        written = rollout.num_sampled + rollout.num_observed
        is_cut = sequence.finish is not Finish.STOP or written + self._world.reply_tokens >= self._limits.max_tokens
        if self.replies is None or is_cut or rollout.turn >= turns:
            self._finish(rollout)
            return
        rollout.cached_under = (rollout.engine_id, self.engines[rollout.engine_id].version)
        self.replies.call(float(rollout.draws.reply_s[rollout.sibling]), lambda: self._go_on(rollout))

    def _cut(self, rollout: Rollout, group_cut: GroupCut) -> None:
        """Toss coins for the siblings that engines still write, where enough of them have ended."""
        for number in group_cut.ended(rollout.group_id, rollout.sibling):
            sibling = self._siblings[rollout.group_id][number]
            if sibling.sequence is None or sibling.sequence.is_over:
                continue
            sibling.decision = group_cut.decide(sibling.name, sibling.attempt)
            if sibling.decision.stops:
                self.stop(sibling)

    def _go_on(self, rollout: Rollout) -> None:
        """Ask for the next turn: the engine of the last one, where it may go on."""
        rollout.num_observed += self._world.reply_tokens
        self._ask_if(rollout, rollout.engine_id)

    def _finish(self, rollout: Rollout) -> None:
        self._open[rollout.group_id] -= 1
        if not self._open[rollout.group_id]:
            del self._open[rollout.group_id]
            self._siblings.pop(rollout.group_id, None)
            self.quarantine.came_through("engine", rollout.prompt_id)
        rollout.finished_s = self.events.now_s
        self.on_finished(rollout)

    def _out_of_engine(self, rollout: Rollout) -> None:
        del self._in_engines[rollout.engine_id][rollout]
        self.outstanding[rollout.engine_id] -= 1
        self.num_outstanding -= 1
        self.note(self.engines[rollout.engine_id])
        if not self.outstanding[rollout.engine_id]:
            self.on_empty(rollout.engine_id)

    def reported(self, engine: SimulatedEngine) -> None:
        """Have `dispatch` hear an engine's gauges."""
        assert self.dispatch is not None
        gauges = engine.gauges()
        self.dispatch.reported(
            engine.engine_id,
            num_passes=int(gauges["num_steps"] or 0),
            kv_used=engine.kv_used,
            num_running=engine.num_running,
            num_queued=engine.num_waiting,
        )
        self.has_changed = True

    # --- engines that die ---

    def lost(self, engine_id: int) -> None:
        """Note that an engine has died: what it had is asked for again, as the next attempt."""
        suspects: dict[str, None] = {}
        for rollout in list(self._in_engines[engine_id]):
            self._out_of_engine(rollout)
            if self.dispatch is not None:
                self.dispatch.ended(rollout.name, engine_id=engine_id, num_tokens=None)
            suspects[rollout.prompt_id] = None
            rollout.begin_anew()
            self._lost.setdefault(rollout.group_id, []).append(rollout)
        if self.dispatch is not None:
            self.dispatch.lost(engine_id)
        self.quarantine.died("engine", list(suspects))

    def _ask_again(self, group_id: int) -> None:
        rollouts = self._lost[group_id]
        if self.quarantine.holds(rollouts[0].prompt_id):
            del self._lost[group_id]
            for rollout in rollouts:
                rollout.finish = Finish.ERROR
                self._finish(rollout)
            return
        newest = max(rollout.version for rollout in rollouts)
        may_take = {
            engine.engine_id: self.outstanding[engine.engine_id]
            for engine in self.engines
            if self._takes_work(engine) and engine.version >= newest and self._may_take(engine.engine_id, rollouts[0])
        }
        engine_id = route(may_take)
        if engine_id is None:
            return
        del self._lost[group_id]
        for rollout in rollouts:
            self._ask(rollout, engine_id)
        self.note(self.engines[engine_id])

    def _may_take(self, engine_id: int, rollout: Rollout) -> bool:
        """Return whether an engine would not have two suspects at once (`rules.quarantine`)."""
        if not self.quarantine.is_suspect("engine", rollout.prompt_id):
            return True
        others = {other.prompt_id for other in self._in_engines[engine_id] if other.group_id != rollout.group_id}
        return not any(self.quarantine.is_suspect("engine", prompt_id) for prompt_id in others)
