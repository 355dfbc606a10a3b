"""Builds the six stages and joins them: read this first.

    prompts -> dispatch -> scoring -> batching -> delivery        refresh
                 |  ^        |  ^                   |  ^           |  ^
                engines    scorers                 trainer        engines

Everything that talks to the world is handed in (hubs, source, journal, ledger), so the live run and the simulation build the same thing.
"""

from __future__ import annotations

import asyncio
import dataclasses

from orchestrator.evaluation import Evaluation
from orchestrator.progress import Progress
from orchestrator.rules.admission import Admission, pace_of
from orchestrator.rules.batch import BatchCut, Credit, StepRules
from orchestrator.rules.grouping import Grouping
from orchestrator.rules.packing import Packing
from orchestrator.rules.road import choose_road
from orchestrator.stages.batching import Batching, Row, Seal
from orchestrator.stages.comparing import Comparing
from orchestrator.stages.delivery import Delivery
from orchestrator.stages.dispatch import Dispatch
from orchestrator.stages.prompts import Prompts, Source
from orchestrator.stages.refresh import Refresh
from orchestrator.stages.scoring import Scoring
from orchestrator.state.engines import Engines
from orchestrator.state.ledger import Identity, Ledger
from orchestrator.state.peers import Peers
from orchestrator.state.scorers import Scorers
from orchestrator.status import Status
from pipelinerl.config import Config
from pipelinerl.messages import LayoutFixed, PolicyPublished, Prompt, Sampling, ScoredTrajectory, Stop, Trajectory
from pipelinerl.metrics import Journal
from pipelinerl.stages import Channel, Signal, Stage
from pipelinerl.transport.base import Hub
from pipelinerl.watch import Watch, wait_for

PROMPTS_AHEAD = 64
"""Prompts tokenised before an engine has room for them. More only makes a resumed run repeat more tokenisation."""
MAX_BARREN_STEPS = 10
"""Steps' worth of groups that may fail or be stale in a row before the run ends. Fewer ends runs in a bad patch."""
NUM_SCORERS = 1
"""Scorer processes; each runs `scorer.slots` calls at once in worker processes of its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended."""

    reason: str
    """"finished", or why it was stopped before."""
    identity: Identity
    evaluations: tuple[tuple[int, float], ...]
    """(version, mean reward) of each evaluation."""
    pauses_s: tuple[float, ...]


class Pipeline:
    """One run's stages and what they share. `run` returns when the last policy is published, or after `stop`."""

    def __init__(
        self,
        config: Config,
        *,
        engine_hub: Hub,
        scorer_hub: Hub,
        trainer_hub: Hub,
        source: Source,
        held_out: list[Prompt],
        credit: Credit,
        journal: Journal,
        ledger: Ledger,
        step_rules: StepRules | None = None,
    ) -> None:
        self.watch = Watch(stall_limit_s=config.pipeline.stall_limit_s)
        self._config = config
        self._journal = journal
        self._ledger = ledger
        self._credits = Signal()
        """Set whenever another group might be admitted."""
        self._stop_reason: str | None = None
        self._stopped = asyncio.Event()
        self._started_s = asyncio.get_running_loop().time()
        self._progress = Progress(journal=journal, started_s=self._started_s)
        self._build_peers(engine_hub=engine_hub, scorer_hub=scorer_hub, trainer_hub=trainer_hub)
        self._build_stages(source, credit, step_rules)
        self._evaluation = Evaluation(
            held_out,
            engines=self._engines,
            scorers=self._scorers,
            sampling=self._sampling(temperature=config.evaluation.temperature),
            journal=journal,
            watch=self.watch,
            every=config.evaluation.every,
        )

    async def run(self) -> Ending:
        """Wait for the peers, run the stages to the end, evaluate, tell everyone to stop. Raises the first error of any stage or peer."""
        async with asyncio.TaskGroup() as group:
            service = [group.create_task(task.run()) for task in (*self._peers, self._status)]
            main = group.create_task(self._main())
            stop = group.create_task(self._stopped.wait())
            await asyncio.wait((main, stop), return_when=asyncio.FIRST_COMPLETED)
            for task in (*service, main, stop):
                task.cancel()
        return self._end()

    def stop(self, reason: str) -> None:
        """End the run early; the trainer saves what it has."""
        self._stop_reason = reason
        self._stopped.set()

    async def _main(self) -> None:
        await self._wait_for_peers()
        async with asyncio.TaskGroup() as group:
            watchdog = group.create_task(self.watch.run(), name="watchdog")
            await self._train()
            watchdog.cancel()

    async def _train(self) -> None:
        self._trainer.hub.send(
            "trainer-0",
            LayoutFixed(tensors=self._engines.layout(), num_engines=self._config.engine.count, road=self._choose_road()),
        )
        await self._evaluation.evaluate(0)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stage.run(), name=stage.name) for stage in self._stages]
            tasks.append(group.create_task(self._evaluation.follow(lambda: self._admission.version), name="evaluation"))
            await self._delivery.finished.wait()
            await self._last_policy_in_force()
            for task in tasks:
                task.cancel()
        await self._evaluation.evaluate(self._config.trainer.steps)

    def _choose_road(self) -> str:
        weights = self._config.weights
        machines = {engine.peer: engine.ready.machine for engine in self._engines}
        road, reason = choose_road(weights.road, trainer=self._delivery.trainer_machine, engines=machines, address=weights.address)
        self._journal.write("choice", text=reason)
        print(reason, flush=True)
        return road

    async def _wait_for_peers(self) -> None:
        config = self._config
        await wait_for(
            self._engines.wait_until_ready(), peer="engines", what="to load the model", deadline_s=config.engine.ready_deadline_s
        )
        await wait_for(
            self._scorers.wait_until_ready(), peer="scorers", what="to load the rewards", deadline_s=config.engine.ready_deadline_s
        )
        await wait_for(
            self._delivery.wait_until_ready(), peer="trainer", what="to load the model", deadline_s=config.trainer.ready_deadline_s
        )

    async def _last_policy_in_force(self) -> None:
        """Wait until every engine samples under the last policy, which the final evaluation is about."""
        with self.watch.waiting("pipeline", "engines to commit the last policy"):
            while not self._engines.all_hold(self._config.trainer.steps):
                await self._engines.changed.wait()

    def _end(self) -> Ending:
        reason = self._stop_reason or "finished"
        for peers in self._peers:
            peers.stop_all(Stop(reason=reason))
        now_s = asyncio.get_running_loop().time()
        self._ledger.cancel_rest(now_s=now_s, reason="the run ended")
        identity = self._ledger.identity()
        self._ledger.flush()
        self._journal.write("status", **self._status.gauges(now_s=now_s))
        self._journal.write("end", reason=reason, identity=dataclasses.asdict(identity), elapsed_s=now_s - self._started_s)
        return Ending(
            reason=reason,
            identity=identity,
            evaluations=tuple(self._evaluation.results),
            pauses_s=tuple(self._progress.pauses_s),
        )

    def _build_peers(self, *, engine_hub: Hub, scorer_hub: Hub, trainer_hub: Hub) -> None:
        config = self._config
        engines = Peers(
            engine_hub,
            role="engine",
            expected=config.engine.count,
            ready_deadline_s=config.engine.ready_deadline_s,
            silent_after_s=config.engine.silent_after_s,
        )
        scorers = Peers(
            scorer_hub,
            role="scorer",
            expected=NUM_SCORERS,
            ready_deadline_s=config.engine.ready_deadline_s,
            silent_after_s=config.scorer.silent_after_s,
        )
        self._trainer = Peers(
            trainer_hub,
            role="trainer",
            expected=config.trainer.ranks,
            ready_deadline_s=config.trainer.ready_deadline_s,
            silent_after_s=config.trainer.silent_after_s,
        )
        self._peers = (engines, scorers, self._trainer)
        self._engines = Engines(engines, expected=config.engine.count, watch=self.watch, credits=self._credits)
        self._scorers = Scorers(scorers, expected=NUM_SCORERS, watch=self.watch)

    def _build_stages(self, source: Source, credit: Credit, step_rules: StepRules | None) -> None:
        config, watch, bound = self._config, self.watch, self._config.pipeline.queue_bytes
        pace = pace_of(config.pipeline.mode, max_staleness=config.pipeline.max_staleness)
        self._admission = Admission(
            pace=pace,
            groups_per_step=config.batch.groups_per_step,
            num_steps=config.trainer.steps,
            max_running=config.max_running_rollouts,
        )
        credits = self._credits
        prompts = Channel[Prompt]("prompts", giver="prompts", taker="dispatch", watch=watch, bound_bytes=PROMPTS_AHEAD)
        trajectories = Channel[Trajectory](
            "trajectories", giver="dispatch", taker="scoring", watch=watch, bound_bytes=bound, size=_bytes_of_trajectory
        )
        scored = Channel[ScoredTrajectory](
            "scored",
            giver="scoring",
            taker="batching",
            watch=watch,
            bound_bytes=bound,
            size=lambda item: _bytes_of_trajectory(item.trajectory),
        )
        rows = Channel[Row | Seal](
            "rows", giver="batching", taker="delivery", watch=watch, bound_bytes=bound, size=lambda item: item.num_bytes
        )
        published = Channel[PolicyPublished]("policies", giver="delivery", taker="refresh", watch=watch, bound_bytes=config.trainer.steps)
        self._delivery = Delivery(
            rows=rows,
            published=published,
            trainer=self._trainer,
            num_replicas=config.trainer.ranks,
            num_steps=config.trainer.steps,
            holds_batches=pace.holds_batches,
            ledger=self._ledger,
            progress=self._progress,
            watch=watch,
        )
        self._refresh = Refresh(
            published=published,
            engines=self._engines,
            trainer=self._trainer,
            admission=self._admission,
            credits=credits,
            progress=self._progress,
            journal=self._journal,
            commit_deadline_s=config.pipeline.stall_limit_s,
        )
        compared, comparing = self._compare(scored)
        self._stages: tuple[Stage, ...] = (
            Prompts(source, prompts=prompts),
            Dispatch(
                prompts=prompts,
                trajectories=trajectories,
                engines=self._engines,
                admission=self._admission,
                credits=credits,
                ledger=self._ledger,
                watch=watch,
                sampling=self._sampling(temperature=config.rollout.temperature),
                group_size=config.rollout.group_size,
                queue_bytes=bound,
            ),
            Scoring(trajectories=trajectories, scored=scored, scorers=self._scorers, watch=watch, queue_bytes=bound),
            *comparing,
            Batching(
                scored=compared,
                rows=rows,
                grouping=Grouping(group_size=config.rollout.group_size),
                cut=BatchCut(
                    groups_per_step=config.batch.groups_per_step,
                    max_staleness=pace.max_staleness,
                    min_survivors=config.batch.min_survivors,
                    credit=credit,
                    rules=step_rules,
                ),
                packing=Packing(max_tokens=config.batch.max_tokens),
                admission=self._admission,
                credits=credits,
                ledger=self._ledger,
                progress=self._progress,
                max_given_up=MAX_BARREN_STEPS * config.batch.groups_per_step,
            ),
            self._delivery,
            self._refresh,
        )
        self._status = Status(
            journal=self._journal,
            ledger=self._ledger,
            admission=self._admission,
            engines=self._engines,
            scorers=self._scorers,
            channels=[prompts, trajectories, scored, rows],
            watch=watch,
            progress=self._progress,
            num_steps=config.trainer.steps,
        )

    def _compare(self, scored: Channel[ScoredTrajectory]) -> tuple[Channel[ScoredTrajectory], tuple[Stage, ...]]:
        """Where batching takes scored trajectories from, and the stage between, which only runs with a reward per group have."""
        config = self._config
        if all(reward.per == "sample" for reward in config.reward):
            return scored, ()
        bound = config.pipeline.queue_bytes
        compared = Channel[ScoredTrajectory](
            "compared",
            giver="comparing",
            taker="batching",
            watch=self.watch,
            bound_bytes=bound,
            size=lambda item: _bytes_of_trajectory(item.trajectory),
        )
        stage = Comparing(
            scored=scored,
            compared=compared,
            scorers=self._scorers,
            watch=self.watch,
            group_size=config.rollout.group_size,
            min_survivors=config.batch.min_survivors,
            queue_bytes=bound,
        )
        return compared, (stage,)

    def _sampling(self, *, temperature: float) -> Sampling:
        rollout = self._config.rollout
        return Sampling(max_tokens=rollout.max_tokens, temperature=temperature, stop_token_ids=rollout.stop_token_ids)


def _bytes_of_trajectory(trajectory: Trajectory) -> int:
    """Bytes of its token columns: ids, mask, log-probabilities, versions."""
    return 13 * trajectory.num_tokens
