"""What is written is scored, step by step where a process reward model is asked, and compared with its siblings where a reward does that.

Room is bounded in bytes as in the live channels (`orchestrator.channels`): what is being scored and what batching has not taken yet share
`queue_bytes`. What finds no room waits as a completion, and while those fill as many bytes engines are asked for nothing more.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from orchestrator.rules.early_stop import Audit, EarlyStop
from orchestrator.rules.group_cut import GroupCut
from orchestrator.rules.group_rewards import join_comparison, plan_comparison
from orchestrator.rules.grouping import Grouping
from orchestrator.simulate.events import Events
from orchestrator.simulate.rollouts import Rollout
from orchestrator.simulate.scorers import Slots, Steps
from orchestrator.simulate.world import ScoringWorld
from pipelinerl.messages import Outcome, Result, ScoredTrajectory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Early stop: the live rule and its audit."""

    rule: EarlyStop
    audit: Audit


class Scoring:
    """Everything between a written rollout and batching."""

    def __init__(
        self,
        events: Events,
        *,
        world: ScoringWorld,
        slots: Slots,
        prm: Slots | None,
        stopping: Stopping | None,
        comparing: Grouping | None,
        min_group_size: int,
        queue_bytes: int,
        deadline_s: float,
        steps: Steps | None,
        max_waiting_tokens: int,
        stop: Callable[[Rollout], None],
    ) -> None:
        """`prm`, `steps`, `stopping` and `comparing` are None in a run without them; `stop` ends a rollout that an engine writes."""
        self.on_scored: Callable[[ScoredTrajectory], None] = lambda scored: None
        """Called with what batching may take. It calls `taken` once it has."""
        self.on_room: Callable[[], None] = lambda: None
        """Called where `full` may have another answer."""
        self.group_cut: GroupCut | None = None
        self.num_waiting_tokens = 0
        """Tokens that the process reward model has to answer for."""
        self.num_hopeless = self.num_stopped = 0
        self._events, self._world, self._slots, self.prm, self._stopping = events, world, slots, prm, stopping
        self._comparing, self._min_group_size, self._stop = comparing, min_group_size, stop
        self._queue_bytes, self._deadline_s = queue_bytes, deadline_s
        self._steps, self._max_waiting_tokens = steps, max_waiting_tokens
        self._completions: collections.deque[tuple[Rollout, int]] = collections.deque()
        self._waiting_bytes = 0
        self._claimed_bytes = 0
        self._num_steps: dict[str, int] = {}
        """Steps of a rollout that the process reward model has scored."""

    def full(self) -> str | None:
        """Name what has to be taken away before anything more is asked of engines."""
        if self._completions and self._waiting_bytes >= self._queue_bytes:
            return "room in completions"
        return "the process reward model" if self.num_waiting_tokens > self._max_waiting_tokens else None

    @property
    def num_waiting(self) -> int:
        """Completions that wait for room."""
        return len(self._completions)

    @property
    def claimed_bytes(self) -> int:
        """Bytes of what is being scored and of what batching has not taken."""
        return self._claimed_bytes

    def take(self, rollout: Rollout) -> None:
        """Take a rollout that is written."""
        if self.prm is not None:
            self.step(rollout, rollout.num_sampled)
        size = 13 * (rollout.num_sampled + rollout.num_observed + rollout.draws.prompt_tokens)
        self._completions.append((rollout, size))
        self._waiting_bytes += size
        self._begin()

    def taken(self, scored: ScoredTrajectory) -> None:
        """Note that batching has taken it: its room is free."""
        self._claimed_bytes -= scored.trajectory.num_bytes
        self._begin()

    def _begin(self) -> None:
        while self._completions:
            rollout, size = self._completions[0]
            if self._claimed_bytes and self._claimed_bytes + size > self._queue_bytes:
                return
            self._completions.popleft()
            self._waiting_bytes -= size
            self.on_room()
            self._claimed_bytes += size
            self._score(rollout)

    def _score(self, rollout: Rollout) -> None:
        seconds = float(rollout.draws.score_s[rollout.sibling])
        is_late = seconds * self._slots.slowness > self._deadline_s
        scored = rollout.scored(failed_fraction=self._world.failed_fraction, deadline=is_late)
        if scored.score.outcome in (Outcome.STOPPED,) or scored.score.error == "it was not sampled":
            self._events.after(0.0, lambda: self._scored(rollout, scored))  # no scorer is asked
            return
        if is_late:
            seconds = self._deadline_s / self._slots.slowness
        self._slots.call(seconds, lambda: self._events.after(self._world.overhead_s, lambda: self._scored(rollout, scored)))

    def _scored(self, rollout: Rollout, scored: ScoredTrajectory) -> None:
        if self.group_cut is not None:
            self.group_cut.decided(rollout.name, rollout.attempt)
            if scored.score.reward is not None:
                self.group_cut.scored(scored.score.reward)
        if self._stopping is not None and rollout.decision is not None and not rollout.decision.stops and scored.score.reward is not None:
            self._stopping.audit.saw(reward=scored.score.reward)
        if self.prm is not None and rollout.num_at_prm:
            rollout.waiting = scored
        else:
            self._pass_on(scored)

    def _pass_on(self, scored: ScoredTrajectory) -> None:
        self._num_steps.pop(scored.trajectory.rollout_id, None)
        if self._comparing is None:
            self.on_scored(scored)
            return
        group = self._comparing.add(scored)
        if group is None:
            return
        plan = plan_comparison(group, min_group_size=self._min_group_size)
        if not plan.compared:
            for member in plan.done:
                self.on_scored(member)
            return
        num = len(plan.compared)
        result = Result(request_id=0, outcome=Outcome.OK, rewards=(0.0,) * num, components=({"comparison": 0.0},) * num)

        def end() -> None:
            for member in (*plan.done, *join_comparison(plan.compared, result)):
                self.on_scored(member)

        self._slots.call(self._world.group_score_s.average, end)

    # --- the process reward model ---

    def step(self, rollout: Rollout, end: int) -> None:
        """Have the process reward model score the step of a rollout that is `end` tokens long by now, or in all."""
        assert self.prm is not None
        attempt, tokens = rollout.attempt, end - rollout.num_traced
        rollout.num_at_prm += 1
        rollout.num_traced = end
        self.num_waiting_tokens += tokens
        seconds = self._world.prm_step_s + self._world.prm_token_s * tokens
        self.prm.call(seconds, lambda: self._step_scored(rollout, tokens, attempt))

    def _step_scored(self, rollout: Rollout, tokens: int, attempt: int) -> None:
        self.num_waiting_tokens -= tokens
        self.on_room()
        rollout.num_at_prm -= 1
        if attempt == rollout.attempt:
            self._decide(rollout)
        if rollout.waiting is not None and not rollout.num_at_prm:
            scored, rollout.waiting = rollout.waiting, None
            self._pass_on(scored)

    def _decide(self, rollout: Rollout) -> None:
        number = self._num_steps[rollout.name] = self._num_steps.get(rollout.name, 0) + 1
        if self._stopping is None or rollout.decision is not None or rollout.sequence is None or not self._stopping.audit.allows_stopping:
            return
        decision = self._stopping.rule.decide(rollout.name, rollout.attempt, self._step_scores(rollout, number))
        if decision is None:
            return
        rollout.decision = decision
        self.num_hopeless += 1
        if decision.stops:
            self.num_stopped += 1
            self._stop(rollout)

    def _step_scores(self, rollout: Rollout, number: int) -> list[float]:
        """Return the scores of the first steps: 1, from the step at which a hopeless one shows it 0."""
        uniform = float(rollout.draws.luck[rollout.sibling, 1])
        if uniform >= self._world.hopeless_fraction:
            return [1.0] * number
        assert self._steps is not None
        steps = max(1, int(rollout.draws.lengths[rollout.sibling]) // self._steps.num_tokens)
        shows_at = int(uniform / self._world.hopeless_fraction * steps)
        return [1.0 if step < shows_at else 0.0 for step in range(number)]
