"""Stage 2: turns prompts into rollouts on engines, and engine replies into trajectories; asks again for what an engine takes with it."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable

import msgspec

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import InterruptedGroup
from orchestrator.peers.engines import Engine, Engines
from orchestrator.rollouts.rollout import Rollout, unanswered
from orchestrator.rules.admission import Admission
from orchestrator.rules.quarantine import Quarantine, row_of
from orchestrator.rules.routing import route
from orchestrator.rules.validation.violations import Violation
from orchestrator.stages.environment import EnvironmentStage
from orchestrator.stages.prompts import Drawn
from pipelinerl.errors import DataError
from pipelinerl.messages import Completion, Generate, Replied, Sampling, Trajectory
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch

NO_ENGINE = "an engine that takes new work"
"""Every engine is fenced until it holds the newest policy."""
MAX_REFUSED = 3
"""Attempts of a rollout whose answers cannot be true before it fails. 1 would fail it for its engine; many let it go round without end."""
MAX_SKIPPED = 1000
"""Quarantined prompts drawn one after another before the run ends: more than by chance, so hardly any other prompt is left."""


class Generation:
    """Admits groups while the staleness bound allows it, gathers what the engines sampled, and issues again what they lost.

    With `queue_bytes` of completions nothing more is asked of engines but the next turns of episodes. What they were asked for before
    still comes, so there are at most that many bytes and a trajectory for each rollout in engines, and between two turns, at that moment:
    all are of groups that were admitted, of which there are fewer than (K + version + 1) * B (`rules.admission`).

    takes     Drawn, from prompts; Completion, from engines; Replied, from environment
    gives     Generate, to engines; turns of episodes, to environment; Trajectory, to scoring
    waits for an admission credit; an engine that may take a lost group; room in completions, turns and towards scoring
    woken by  an engine that answers, commits, joins or dies; batching placing or giving up a group
    fails     DataError, where hardly any prompt is not quarantined
    ends      when the run does
    """

    name = "generation"

    def __init__(
        self,
        *,
        prompts: Channel[Drawn],
        trajectories: Channel[Trajectory],
        engines: Engines,
        admission: Admission,
        credits: Signal,
        ledger: Ledger,
        watch: Watch,
        sampling: Sampling,
        group_size: int,
        adds_greedy: bool = False,
        chunk_tokens: int = 0,
        backpressure: Callable[[], str | None] = lambda: None,
        queue_bytes: int,
        quarantine: Quarantine,
        environment: EnvironmentStage | None = None,
        first_group_id: int = 0,
        interrupted: tuple[InterruptedGroup, ...] = (),
    ) -> None:
        """`interrupted` groups, of an earlier life of the run, are issued before anything new, as far as no engine still has them.

        `backpressure()` names what no group is admitted for, if anything; `credits` is set when that may have changed. `environment` is
        there in a run with one.
        """
        self._prompts = prompts
        self._trajectories = trajectories
        self._engines = engines
        self._admission = admission
        self._credits = credits
        self._ledger = ledger
        self._watch = watch
        self._sampling = sampling
        self._greedy = msgspec.structs.replace(sampling, temperature=0.0)
        self._group_size = group_size
        self._num_siblings = group_size + adds_greedy
        self._chunk_tokens = chunk_tokens
        self._backpressure = backpressure
        self._quarantine = quarantine
        self._environment = environment
        self._group_ids = itertools.count(first_group_id)
        self._again: dict[int, list[Rollout]] = {group.group_id: self._rollouts_of(group) for group in interrupted}
        """By group: attempts to issue, in place of some that were lost, and turns that no engine may go on with yet."""
        self._running: dict[int, dict[str, int]] = collections.defaultdict(dict)
        """By group: the rollouts in engines, and in which; between two turns, in which it was."""
        self._taken: dict[int, set[str]] = collections.defaultdict(set)
        """By engine that dies: the prompts it had."""
        self._prompt_ids: dict[int, str] = {}
        """By group that has rollouts in engines."""
        self._answered: Channel[Trajectory] = Channel(
            "completions",
            giver="engines",
            taker=self.name,
            watch=watch,
            bound_bytes=queue_bytes,
            size=lambda item: item.num_bytes,
            label=lambda item: f"rollout {item.rollout_id}, attempt {item.attempt}, of engine-{item.engine_id}",
        )
        engines.on_died(self._on_died)
        engines.on_joined(self._on_joined)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._admit())
            group.create_task(self._issue_again())
            group.create_task(self._collect())

    # --- new groups ---

    async def _admit(self) -> None:
        num_skipped = 0
        async for drawn in self._prompts:
            if self._quarantine.holds(drawn.prompt.prompt_id):
                num_skipped += 1
                self._ledger.record("skipped", now_s=_now_s(), prompt_id=drawn.prompt.prompt_id)
                if num_skipped >= MAX_SKIPPED:
                    raise DataError(f"the last {num_skipped} prompts are all quarantined, each for killing two processes: see the ledger")
                continue
            num_skipped = 0
            self._send_group(drawn, await self._wait_for_engine())

    async def _wait_for_engine(self) -> int:
        """Wait until a group may be admitted; return the engine to send it to."""
        while (engine_id := self._engine_for_a_group()) is None:
            reason = self._held_back_by() or NO_ENGINE
            with self._watch.waiting(self.name, reason):
                while self._engine_for_a_group() is None and (self._held_back_by() or NO_ENGINE) == reason:
                    await self._credits.wait()
        return engine_id

    def _engine_for_a_group(self) -> int | None:
        return self._engines.least_busy(lambda version: self._held_back_by(version) is None)

    def _held_back_by(self, version: int | None = None) -> str | None:
        """What an engine at `version` would have to wait for; without one, the serving engine that holds the newest."""
        version = self._engines.newest_version() if version is None else version
        if version is None:
            return NO_ENGINE
        return (
            self._full()
            or self._backpressure()
            or self._admission.holds_back(
                version=version,
                num_generating=self._engines.num_outstanding,
                engines_are_current=self._engines.all_hold(self._admission.version),
            )
        )

    def _full(self) -> str | None:
        """The queue that has to get shorter before anything more is asked of engines."""
        if self._answered.is_full:
            return f"room in {self._answered.name}"
        return self._environment.backpressure() if self._environment else None

    def _send_group(self, drawn: Drawn, engine_id: int) -> None:
        now_s = _now_s()
        group_id = next(self._group_ids)
        self._admission.admitted()
        names = self._ledger.admit(group_id, drawn.prompt, group_size=self._num_siblings, position=drawn.position, now_s=now_s)
        version = self._engines[engine_id].version
        for sibling, name in enumerate(names):
            rollout = Rollout(
                rollout_id=name,
                group_id=group_id,
                sibling=sibling,
                attempt=0,
                prompt=drawn.prompt,
                version=version,
                admitted_at=now_s,
                is_greedy=sibling >= self._group_size,
                episode=self._environment.begin(drawn.prompt) if self._environment else None,
            )
            self._ask(rollout, engine_id)

    # --- one attempt ---

    def _ask(self, rollout: Rollout, engine_id: int) -> None:
        if rollout.is_new:
            version = self._engines[engine_id].version
            self._ledger.issue(rollout.rollout_id, attempt=rollout.attempt, engine_id=engine_id, version=version, now_s=_now_s())
        self._enter(rollout, engine_id)
        self._engines.ask(
            self._request(rollout),
            engine_id,
            sink=lambda completion, engine_id: self._take(rollout, completion, engine_id),
            lost=lambda engine_id: self._lose(rollout, engine_id),
            refused=lambda engine_id, violation: self._refuse(rollout, engine_id, violation),
        )

    def _request(self, rollout: Rollout) -> Generate:
        return rollout.request(self._greedy if rollout.is_greedy else self._sampling, chunk_tokens=self._chunk_tokens)

    def _take(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        rollout = rollout.said(completion)
        if self._environment is None or rollout.episode is None or rollout.episode.is_over:
            self._end(rollout, completion, engine_id)
        else:
            self._environment.ask(rollout, engine_id=engine_id, then=functools.partial(self._go_on, rollout, completion, engine_id))

    def _go_on(self, rollout: Rollout, completion: Completion, engine_id: int, replied: Replied) -> None:
        """Ask for an episode's next turn: the engine of the last one, whose prefix cache may hold all before, where that may go on."""
        assert rollout.episode is not None
        episode = rollout.episode.observe(replied)
        rollout = dataclasses.replace(rollout, episode=episode)
        if episode.is_over:
            self._end(rollout, completion, engine_id)
        elif self._engines.takes_work(engine_id) and self._may_take(engine_id, rollout) and not self._is_quarantined(rollout):
            self._ask(rollout, engine_id)
        else:
            self._leave(rollout)
            self._again.setdefault(rollout.group_id, []).append(rollout)
        self._credits.set()

    def _end(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        self._leave(rollout)
        is_last = rollout.group_id not in self._running and rollout.group_id not in self._again
        if is_last and self._quarantine.came_through("engine", rollout.prompt.prompt_id):
            self._ledger.record("cleared", now_s=_now_s(), peer=f"engine-{engine_id}", suspect=row_of(rollout.prompt.prompt_id))
            self._credits.set()
        self._book(rollout, completion, engine_id)

    def _lose(self, rollout: Rollout, engine_id: int) -> None:
        engine = self._engines.find(engine_id)
        is_condemned = engine is not None and engine.is_condemned
        if not is_condemned:  # else it goes for what it said, and no prompt is suspected of it
            self._taken[engine_id].add(rollout.prompt.prompt_id)
        reason = f"engine-{engine_id} {'is fenced for what it said' if is_condemned else 'ended'}"
        self._issue_next(rollout, rollout.next_attempt(), engine_id, reason=reason)

    def _refuse(self, rollout: Rollout, engine_id: int, violation: Violation) -> None:
        """An engine's answer cannot be true: another engine is asked, where there is one."""
        self._issue_next(rollout, rollout.next_attempt(refused_by=engine_id), engine_id, reason=str(violation))

    def _issue_next(self, rollout: Rollout, following: Rollout, engine_id: int, *, reason: str) -> None:
        """The next attempt of a rollout, in place of one that came to nothing."""
        self._leave(rollout)
        self._ledger.lose(rollout.rollout_id, attempt=rollout.attempt, engine_id=engine_id, reason=reason, now_s=_now_s())
        self._again.setdefault(rollout.group_id, []).append(dataclasses.replace(following, reason=reason))
        self._credits.set()

    def _enter(self, rollout: Rollout, engine_id: int) -> None:
        """A rollout is in an engine."""
        self._running[rollout.group_id][rollout.rollout_id] = engine_id
        self._prompt_ids[rollout.group_id] = rollout.prompt.prompt_id

    def _leave(self, rollout: Rollout) -> None:
        """A rollout is in no engine any more."""
        running = self._running[rollout.group_id]
        del running[rollout.rollout_id]
        if not running:
            del self._running[rollout.group_id]
            del self._prompt_ids[rollout.group_id]

    # --- what outlived an orchestrator ---

    def _on_joined(self, engine: Engine) -> None:
        """Await what the engine has of the attempts before those that would be issued again; it drops whatever else it has.

        An episode's earlier turns went with the orchestrator before: it is played again from its prompt.
        """
        if not engine.ready.running:
            return
        adopted: dict[str, Rollout] = {}
        for group_id in list(self._again):
            left: list[Rollout] = []
            for rollout in self._again.pop(group_id):
                before = dataclasses.replace(rollout, attempt=rollout.attempt - 1)
                has_it = engine.ready.running.get(rollout.rollout_id) == before.attempt
                if has_it and rollout.episode is None and not self._is_quarantined(rollout):
                    adopted[rollout.rollout_id] = before
                else:
                    left.append(rollout)
            if left:
                self._again[group_id] = left
        for rollout in adopted.values():
            self._ledger.reattach(rollout.rollout_id, attempt=rollout.attempt, engine_id=engine.engine_id, now_s=_now_s())
            self._enter(rollout, engine.engine_id)
        self._engines.adopt(
            [(self._request(rollout), rollout.version) for rollout in adopted.values()],
            engine.engine_id,
            sink=lambda name: functools.partial(self._take, adopted[name]),
            lost=lambda name: functools.partial(self._lose, adopted[name]),
            refused=lambda name: functools.partial(self._refuse, adopted[name]),
        )

    # --- what an engine took with it ---

    def _on_died(self, engine_id: int) -> None:
        prompt_ids = self._taken.pop(engine_id, set())
        for prompt_id in sorted(prompt_ids):
            self._ledger.record("suspected", now_s=_now_s(), peer=f"engine-{engine_id}", suspect=row_of(prompt_id))
        for row in self._quarantine.died("engine", prompt_ids):
            self._ledger.record("quarantined", now_s=_now_s(), peer=f"engine-{engine_id}", suspect=row)
        self._ledger.flush()  # seldom, and it must outlive this process: the prompt may be what ends that, too

    async def _issue_again(self) -> None:
        """Issue lost attempts as engines may take them; the siblings that were lost together go together."""
        while True:
            for group_id in list(self._again):
                if self._full() is None:
                    self._try_again(group_id)
            if self._again:
                with self._watch.waiting(self.name, self._full() or "an engine that may go on with what another one has begun"):
                    await self._credits.wait()
            else:
                await self._credits.wait()

    def _try_again(self, group_id: int) -> None:
        rollouts = self._again[group_id]
        given_up = rollouts if self._is_quarantined(rollouts[0]) else [one for one in rollouts if len(one.refused_by) >= MAX_REFUSED]
        for rollout in given_up:
            answer = _not_sampled(rollout, is_quarantined=self._is_quarantined(rollout))
            self._book(rollout.said(answer), answer, -1)
        ended = {rollout.rollout_id for rollout in given_up}
        rollouts = self._again[group_id] = [rollout for rollout in rollouts if rollout.rollout_id not in ended]
        if not rollouts:
            del self._again[group_id]
            return
        newest = max(rollouts, key=lambda rollout: rollout.version)
        serving = self._engines.outstanding()
        others = serving.keys() - {engine_id for rollout in rollouts for engine_id in rollout.refused_by}
        may_take = {
            engine_id: num for engine_id, num in serving.items() if engine_id in (others or serving) and self._may_take(engine_id, newest)
        }
        engine_id = route(may_take)
        if engine_id is None:
            return
        del self._again[group_id]
        for rollout in rollouts:
            self._ask(rollout, engine_id)

    def _may_take(self, engine_id: int, rollout: Rollout) -> bool:
        """True where an engine is no older than what has the rollout so far, and has no other suspect with a suspect."""
        if self._engines[engine_id].version < rollout.version:
            return False
        if not self._quarantine.is_suspect("engine", rollout.prompt.prompt_id):
            return True
        others = {group_id for group_id, running in self._running.items() if engine_id in running.values()} - {rollout.group_id}
        return not any(self._quarantine.is_suspect("engine", self._prompt_ids[group_id]) for group_id in others)

    def _is_quarantined(self, rollout: Rollout) -> bool:
        return self._quarantine.holds(rollout.prompt.prompt_id)

    # --- towards scoring ---

    def _book(self, rollout: Rollout, completion: Completion, engine_id: int) -> None:
        """An answer is in the ledger before anything that it makes room for."""
        now_s = _now_s()
        trajectory = rollout.trajectory(completion, engine_id=engine_id, finished_at=now_s)
        self._ledger.record_completion(trajectory, now_s=now_s)
        self._answered.put_now(trajectory)  # bounded: `_full` holds back what is asked for, and each is one that was

    async def _collect(self) -> None:
        async for trajectory in self._answered:
            self._credits.set()  # there may be room again
            await self._trajectories.put(trajectory)

    def _rollouts_of(self, group: InterruptedGroup) -> list[Rollout]:
        """What an earlier life of the run left in engines, from now on."""
        return [
            Rollout(
                rollout_id=one.rollout_id,
                group_id=group.group_id,
                sibling=one.sibling,
                attempt=one.attempt,
                prompt=group.prompt,
                version=one.version,
                admitted_at=_now_s(),
                is_greedy=one.sibling >= self._group_size,
                episode=self._environment.begin(group.prompt) if self._environment else None,
            )
            for one in group.rollouts
        ]


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _not_sampled(rollout: Rollout, *, is_quarantined: bool) -> Completion:
    """What stands for an answer where nobody may be asked, or nobody gives one that can be true."""
    error = f"{len(rollout.refused_by)} answers could not be true, the last {rollout.reason}"
    if is_quarantined:
        error = f"its prompt (row {row_of(rollout.prompt.prompt_id)}) is quarantined: it was there when a process died, twice"
    return unanswered(rollout.rollout_id, attempt=rollout.attempt, error=error)
