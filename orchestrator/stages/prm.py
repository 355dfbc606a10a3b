"""This stage stands around scoring, in runs with a process reward model: it sends every rollout to the model while it is being written, and
the model scores its steps.

Where the config says so, a rollout whose steps show it to be hopeless is stopped early, by a coin (`rules.early_stop`). The ledger has the
coin's outcome before the engine is told: an attempt that a later process of the run finds cut off was stopped, and is not drawn again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.prm import Prm, PrmEngine
from orchestrator.rules.early_stop import Audit, EarlyStop
from orchestrator.rules.validation.scores import steps_scored
from orchestrator.stages.step_trace import Trace
from pipelinerl.config import Config
from pipelinerl.messages import (
    Cancel,
    EarlyStopDecision,
    Finish,
    Generate,
    Int32,
    Outcome,
    Score,
    ScoredTrajectory,
    StepsScored,
    Tokens,
    TraceTokens,
    Trajectory,
)
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch

MAX_DEATHS = 3
"""Deaths of engines of the process reward model over tokens of one trace before that trace fails. 1 would fail it for its neighbours; a
larger value lets it go on killing.
"""


class OpenRequests(Protocol):
    """The part of `peers.engine_requests` that early stop needs."""

    def owes(self, rollout_id: str, attempt: int) -> bool: ...

    def withdraw(self, rollout_id: str, attempt: int) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """The parts that early stop consists of: its rule, its audit and the engines' requests."""

    rule: EarlyStop
    audit: Audit
    requests: OpenRequests


def early_stopping(config: Config, *, requests: OpenRequests) -> EarlyStopping | None:
    """Return what early stop consists of; None in a run without it."""
    stop = config.prm.early_stop
    if stop.threshold is None:
        return None
    rule = EarlyStop(threshold=stop.threshold, keep_probability=stop.keep_probability, min_steps=stop.min_steps, seed=config.run.seed)
    audit = Audit(max_false_stop_fraction=stop.max_false_stop_fraction, correct_reward=config.algorithm.correct_reward)
    return EarlyStopping(rule=rule, audit=audit, requests=requests)


@dataclasses.dataclass(slots=True, kw_only=True)
class PrmScoring:
    """The stage that sends engines' tokens on as they arrive, and joins step scores with rewards: by rollout, attempt and step, never by
    order of arrival.

    Engines are never held up: a backlog at the model slows admission alone, see `backpressure`. Trajectories that have their reward and
    wait for their steps, and those that wait for the next stage, share the room in `prm_scored`.

    takes     Tokens, from engines; Trajectory, from generation; ScoredTrajectory, from scoring; StepsScored, from the process reward model
    gives     TraceTokens and Cancel, to that; Cancel, to engines; Trajectory, to scoring; ScoredTrajectory, to the next stage
    waits for room towards scoring; room in `prm_scored`
    woken by  engines, generation, scoring, the process reward model
    fails     never: a trace that cannot be scored is an outcome; what a model that dies had is sent again, and names a trace it dies of
    ends      cancelled, when the run ends
    """

    name = "prm"
    generated: Channel[Trajectory]
    trajectories: Channel[Trajectory]
    scored: Channel[ScoredTrajectory]
    prm_scored: Channel[ScoredTrajectory]
    prm: Prm
    ledger: Ledger
    watch: Watch
    credits: Signal
    """The signal that `backpressure` has ended."""
    max_waiting_tokens: int
    stopping: EarlyStopping | None = None
    restored: tuple[ScoredTrajectory, ...] = ()
    """Trajectories that were scored before a restart, without their steps."""
    decisions: Mapping[tuple[str, int], EarlyStopDecision] = dataclasses.field(default_factory=dict)
    """The coins tossed before a restart, by rollout and attempt."""
    num_waiting_tokens: int = 0
    """Tokens that were sent, and not answered for."""
    num_hopeless: int = 0
    num_stopped: int = 0
    num_saved_tokens: float = 0.0
    """Estimate of the tokens that stopped rollouts would have gone on for: flagged rollouts that go on are a fair sample of them."""
    num_fenced: int = 0
    _traces: dict[str, Trace] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch.explain(self._owed)
        self.prm.on_scored(self._on_scored)
        self.prm.on_lost(self._on_lost)
        self.prm.on_room(self._place_all)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass_on())
            group.create_task(self._join())

    def backpressure(self) -> str | None:
        """Name what admission has to wait for: the model, while more tokens wait for it than may."""
        return "the process reward model" if self.num_waiting_tokens > self.max_waiting_tokens else None

    def gauges(self) -> dict[str, Any] | None:
        """Return the gauges of the model and of this stage; None before the model's first."""
        if (load := self.prm.load()) is None:
            return None
        names = ("num_waiting_tokens", *(("num_hopeless", "num_stopped", "num_saved_tokens") if self.stopping is not None else ()))
        return msgspec.structs.asdict(load) | {name: getattr(self, name) for name in names}

    def decision_of(self, rollout_id: str, attempt: int) -> EarlyStopDecision | None:
        """Return the outcome of the coin about an attempt that is not scored; None where none was tossed."""
        trace = self._traces.get(rollout_id)
        return trace.decision if trace is not None and trace.attempt == attempt else self.decisions.get((rollout_id, attempt))

    def take(self, request: Generate, tokens: Tokens) -> None:
        """Send the model the tokens with which an engine continues a sequence."""
        trace = self._trace(request.rollout_id, request.attempt, request.token_ids)
        if trace.is_done or tokens.start != len(trace.token_ids):
            return
        self._send(trace, tokens.token_ids, is_last=False)

    async def _pass_on(self) -> None:
        async for trajectory in self.generated:
            if trajectory.finish is Finish.ERROR:
                self.forget(trajectory.rollout_id)
            elif (decision := self._trace_of(trajectory).decision) is not None and decision.stops:
                await self._end(trajectory, decision)
                continue
            else:
                self._complete(trajectory)
            await self.trajectories.put(trajectory)

    async def _join(self) -> None:
        for scored in self.restored:
            await self._take_scored(scored)
        async for scored in self.scored:
            await self._take_scored(scored)

    async def _take_scored(self, scored: ScoredTrajectory) -> None:
        await self.prm_scored.claim(scored.trajectory.num_bytes)
        if scored.score.outcome is not Outcome.OK:
            self.forget(scored.trajectory.rollout_id)
            self._answer(scored)
            return
        trace = self._complete(scored.trajectory)
        trace.waiting = scored
        self._audit(scored, trace)
        self._finish(trace)

    def _complete(self, trajectory: Trajectory) -> Trace:
        """Send the rest of a finished trajectory."""
        trace = self._trace_of(trajectory)
        if not trace.is_whole:
            if self.prm.is_episodic:
                trace.turn_ends = np.zeros(0, np.int32) if trajectory.turns is None else trajectory.turns.ends
            rest = trajectory.token_ids[len(trajectory.prompt.token_ids) + len(trace.token_ids) :]
            trace.is_whole = True
            self._send(trace, rest, is_last=True)
        return trace

    def _trace_of(self, trajectory: Trajectory) -> Trace:
        num_prompt = len(trajectory.prompt.token_ids)
        return self._trace(trajectory.rollout_id, trajectory.attempt, trajectory.token_ids[:num_prompt])

    def _trace(self, rollout_id: str, attempt: int, prompt_token_ids: Int32) -> Trace:
        """Return the trace of an attempt; the trace of an older attempt is given up for it."""
        trace = self._traces.get(rollout_id)
        if trace is None or trace.attempt < attempt:
            self.forget(rollout_id)
            decision = self.decisions.get((rollout_id, attempt))
            trace = Trace(rollout_id=rollout_id, attempt=attempt, prompt_token_ids=prompt_token_ids, decision=decision)
            self._traces[rollout_id] = trace
        return trace

    def _send(self, trace: Trace, token_ids: Int32, *, is_last: bool) -> None:
        if trace.is_done:
            return
        start = len(trace.token_ids)
        trace.token_ids = np.concatenate((trace.token_ids, token_ids))
        self.num_waiting_tokens += len(token_ids)
        if trace.engine is None:
            self._place(trace)
            return
        self.prm.send(
            trace.engine,
            TraceTokens(rollout_id=trace.rollout_id, attempt=trace.attempt, start=start, token_ids=token_ids, is_last=is_last),
        )

    def _place(self, trace: Trace) -> None:
        """Begin a trace at the engine that has the fewest; without one that serves, it waits until there is one."""
        if (engine := self.prm.least_busy()) is None:
            return
        trace.engine = engine
        engine.num_outstanding += 1
        self.prm.send(engine, trace.whole())

    def _place_all(self) -> None:
        for trace in list(self._traces.values()):
            if trace.engine is None and not trace.is_done:
                self._place(trace)

    def _release(self, trace: Trace) -> None:
        """Note that no engine has a trace any more."""
        if trace.engine is not None:
            trace.engine.num_outstanding -= 1
            if trace.engine.leaves_for:
                self.credits.set()
            trace.engine = None

    def forget(self, rollout_id: str) -> None:
        """Have nothing more said about a rollout that needs no scores of its steps."""
        trace = self._traces.pop(rollout_id, None)
        if trace is not None:
            self._withdraw(trace)

    def _withdraw(self, trace: Trace) -> None:
        """Have the model say nothing more about a trace."""
        self._took(trace, len(trace.token_ids))
        engine, trace.is_done = trace.engine, True
        self._release(trace)
        if engine is not None:
            self.prm.send(engine, Cancel(rollout_id=trace.rollout_id, attempt=trace.attempt))

    def _took(self, trace: Trace, num_taken: int) -> None:
        was_held = self.backpressure()
        self.num_waiting_tokens -= num_taken - trace.num_taken
        trace.num_taken = num_taken
        if was_held and not self.backpressure():
            self.credits.set()

    def _on_scored(self, engine: PrmEngine, said: StepsScored) -> None:
        trace = self._traces.get(said.rollout_id)
        if trace is None or trace.engine is not engine or trace.attempt != said.attempt or said.first != len(trace.ends):
            self.num_fenced += 1
            return
        last_end = trace.ends[-1] if trace.ends else -1
        known = {"num_sent": len(trace.token_ids), "last_end": last_end, "turn_ends": trace.turn_ends}
        if (violation := steps_scored(said, **known)) is not None:
            self.prm.refuse(engine, violation)
            self._fail(trace, Outcome.INVALID, f"its answer could not be true, {violation}")
            return
        self.watch.moved()
        self._took(trace, said.num_taken)
        trace.ends += said.ends.tolist()
        trace.scores += said.scores.tolist()
        if said.outcome is not Outcome.OK:
            self._fail(trace, said.outcome, said.error)
            return
        if trace.version not in ("", said.version):
            error = f"the process reward model changed from {trace.version} to {said.version} within the trace"
            self._fail(trace, Outcome.INVALID, error)
            return
        trace.version = said.version
        if said.is_last:
            trace.is_done = True
            self._release(trace)
        if self.stopping is not None and trace.decision is None:
            self._judge(trace, stopping=self.stopping)
        self._finish(trace)

    # --- early stop ---

    def _judge(self, trace: Trace, *, stopping: EarlyStopping) -> None:
        """Toss a coin for a rollout that is still being written and that its steps so far show to be hopeless."""
        if not stopping.audit.allows_stopping or not stopping.requests.owes(trace.rollout_id, trace.attempt):
            return
        decision = stopping.rule.decide(trace.rollout_id, trace.attempt, trace.scores)
        if decision is None:
            return
        trace.decision, trace.decided_at = decision, len(trace.token_ids)
        self.num_hopeless += 1
        self.ledger.record_early_stop(trace.rollout_id, attempt=trace.attempt, decision=decision, now_s=_now_s())
        if not decision.stops:
            return
        self.ledger.flush()  # before the engine hears of it: see the module
        self.num_stopped += 1
        self._withdraw(trace)
        stopping.requests.withdraw(trace.rollout_id, trace.attempt)

    async def _end(self, trajectory: Trajectory, decision: EarlyStopDecision) -> None:
        """Score a rollout that was stopped, once an engine has given it back: it needs no reward."""
        score = Score(rollout_id=trajectory.rollout_id, attempt=trajectory.attempt, outcome=Outcome.STOPPED, reward=None)
        steps = self._trace_of(trajectory).result()
        stopped = ScoredTrajectory(trajectory=trajectory, score=score, steps=steps, early_stop=decision)
        self.ledger.record_score(stopped, now_s=_now_s())
        await self._take_scored(stopped)

    def _audit(self, scored: ScoredTrajectory, trace: Trace) -> None:
        """Note the reward of a flagged rollout that went on: it shows what stopping such rollouts saves and costs."""
        if trace.decision is None or self.stopping is None or scored.score.reward is None:
            return
        self.stopping.audit.saw(reward=scored.score.reward)
        if trace.decided_at:  # in this life of the run
            num_more = len(trace.token_ids) - trace.decided_at
            self.num_saved_tokens += (1.0 / trace.decision.probability - 1.0) * num_more

    # --- the model's end ---

    def _on_lost(self, engine: PrmEngine, has_died: bool) -> None:
        """Begin the traces of an engine anew, each at the engine that has the fewest."""
        for trace in list(self._traces.values()):
            if trace.engine is not engine:
                continue
            self._release(trace)
            trace.num_deaths += has_died and trace.num_taken < len(trace.token_ids)
            if trace.num_deaths >= MAX_DEATHS:
                error = f"the process reward model died {trace.num_deaths} times with tokens of this trace"
                self._fail(trace, Outcome.ERROR, error)
                continue
            self.num_waiting_tokens += trace.num_taken
            trace.begin_anew()
            self._place(trace)

    def _fail(self, trace: Trace, outcome: Outcome, error: str) -> None:
        self._withdraw(trace)
        trace.outcome, trace.error = outcome, error
        self._finish(trace)

    def _finish(self, trace: Trace) -> None:
        """Join reward and steps, where both the reward and the last step are there."""
        scored = trace.waiting
        if scored is None or not trace.is_done:
            return
        del self._traces[trace.rollout_id]
        if trace.outcome is Outcome.OK:
            self._answer(msgspec.structs.replace(scored, steps=trace.result(), early_stop=trace.decision))
            return
        error = f"process reward model: {trace.error}"
        score = msgspec.structs.replace(scored.score, outcome=trace.outcome, reward=None, components={}, error=error)
        self._answer(msgspec.structs.replace(scored, score=score))

    def _answer(self, scored: ScoredTrajectory) -> None:
        self.ledger.update_scores("prm_scored", (scored,), now_s=_now_s())
        self.prm_scored.put_claimed(scored)

    def _owed(self) -> str | None:
        """Name the answers that the model owes, for the report of a stall."""
        for trace in self._traces.values():
            if trace.num_taken < len(trace.token_ids):
                owed = f"{self.num_waiting_tokens} tokens, the first of rollout {trace.rollout_id}, attempt {trace.attempt}"
                return f"the process reward model owes an answer for {owed}"
        return None


def _now_s() -> float:
    return asyncio.get_running_loop().time()
