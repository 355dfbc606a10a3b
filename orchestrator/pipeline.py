"""Builds the six stages and joins them: read this first.

    prompts -> dispatch -> scoring -> batching -> delivery        refresh
                 |  ^        |  ^                   |  ^           |  ^
                engines    scorers                 trainer        engines

A run with an environment has `replying` beside dispatch, one with a process reward model `following` around scoring, one whose rewards
compare siblings `comparing` after it.

Everything that talks to the world is handed in (hubs, source, journal, ledger), so the live run and the simulation build the same thing.
A ledger that holds an earlier life of the run makes it go on where that one ended: see `state.ledger`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.channels import Channels, make_channels
from orchestrator.evaluation import Evaluation
from orchestrator.progress import Progress
from orchestrator.rules.admission import Admission, pace_of
from orchestrator.rules.batch import BatchCut, Credit, StepRules, sampled_of
from orchestrator.rules.concurrency import Concurrency
from orchestrator.rules.curriculum import success_of
from orchestrator.rules.early_stop import Audit, EarlyStop
from orchestrator.rules.grouping import Grouping
from orchestrator.rules.kv import KvPolicy
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.road import choose_road
from orchestrator.stages.asking import Asking
from orchestrator.stages.batching import Batching
from orchestrator.stages.comparing import Comparing
from orchestrator.stages.delivery import Delivery
from orchestrator.stages.dispatch import Dispatch
from orchestrator.stages.following import Following, Stopping
from orchestrator.stages.prompts import Prompts, Source
from orchestrator.stages.refresh import Refresh
from orchestrator.stages.replying import Replying
from orchestrator.stages.scoring import Scoring
from orchestrator.state.engines import Engines
from orchestrator.state.ledger import Identity, Ledger
from orchestrator.state.peers import Peers
from orchestrator.state.prm import Prm
from orchestrator.state.scorers import Scorers
from orchestrator.state.snapshot import RecordedStep, read_snapshot, read_successes
from orchestrator.status import Status
from pipelinerl.config import Config
from pipelinerl.messages import EngineLoad, Group, LayoutFixed, Prompt, Sampling, ScoredTrajectory, Stop, TrainerReady
from pipelinerl.metrics import Journal
from pipelinerl.packing import Packing
from pipelinerl.stages import Signal, Stage
from pipelinerl.transport.base import Hub
from pipelinerl.watch import Watch, wait_for

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
        replace: Callable[[str, int], None] | None = None,
    ) -> None:
        """`replace`: see `Peers`."""
        self._replace = replace
        self.watch = Watch(stall_limit_s=config.pipeline.stall_limit_s)
        self._config = config
        self._journal = journal
        self._ledger = ledger
        self._adds_greedy = step_rules is not None and step_rules.adds_greedy
        self._num_siblings = config.rollout.group_size + self._adds_greedy
        ledger.begin(_promises(config, adds_greedy=self._adds_greedy), now_s=asyncio.get_running_loop().time(), unix_s=journal.clock())
        self._past = read_snapshot(ledger)
        source.position = self._past.position
        if config.data.difficulty is not None:
            correct_reward, group_size = config.algorithm.correct_reward, config.rollout.group_size
            for prompt_id, success in read_successes(ledger, correct_reward=correct_reward, group_size=group_size):
                source.measured(prompt_id, success=success)
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
            section=config.evaluation,
            correct_reward=config.algorithm.correct_reward,
            engines=self._engines,
            scorers=self._scorers,
            pins=self._refresh,
            sampling=self._sampling(temperature=config.evaluation.temperature),
            max_turns=config.environment.max_turns if config.environment.function is not None else 1,
            journal=journal,
            ledger=ledger,
            watch=self.watch,
            done=self._past.evaluations,
        )

    async def run(self) -> Ending:
        """Wait for the peers, run the stages to the end, evaluate, tell everyone to stop. Raises the first error of any stage or peer."""
        async with asyncio.TaskGroup() as group:
            service = [group.create_task(task.run()) for task in (*self._peers, self._status)]
            main = group.create_task(self._main())
            stop = group.create_task(self._stopped.wait())
            await asyncio.wait((main, stop), return_when=asyncio.FIRST_COMPLETED)
            main.cancel()
            stop.cancel()
            for peers in self._peers:
                peers.dismiss(Stop(reason=self._stop_reason or "finished"))
            for task in service:
                task.cancel()
        return self._end()

    def stop(self, reason: str) -> None:
        """End the run early; the trainer saves what it has."""
        self._stop_reason = reason
        self._stopped.set()

    async def _main(self) -> None:
        await self._wait_for_peers()
        past = self._past
        self._admission.restore(accepted=past.num_placed_groups, running=len(past.running_groups), version=self._delivery.trainer_version)
        async with asyncio.TaskGroup() as group:
            watchdog = group.create_task(self.watch.run(), name="watchdog")
            await self._train()
            watchdog.cancel()

    async def _train(self) -> None:
        if not self._delivery.trainer_version:
            await self._evaluation.evaluate(0)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stage.run(), name=stage.name) for stage in self._stages]
            tasks.append(group.create_task(self._evaluation.follow(self._engines.oldest_version), name="evaluation"))
            await self._delivery.finished.wait()
            await self._last_policy_in_force()
            for task in tasks:
                task.cancel()
        await self._evaluation.evaluate(self._config.trainer.steps)

    def _layout_for(self, trainer: TrainerReady) -> LayoutFixed:
        """What a trainer that starts must know to publish: how the engines lie, and the road to them."""
        weights = self._config.weights
        machines = {engine.peer: engine.ready.machine for engine in self._engines}
        roads = frozenset(trainer.roads).intersection(*(engine.ready.roads for engine in self._engines))
        road, reason = choose_road(weights.road, trainer=trainer.machine, engines=machines, address=weights.address, device_roads=roads)
        self._journal.write("choice", text=reason)
        print(reason, flush=True)
        return LayoutFixed(tensors=self._engines.layout(), num_engines=self._config.engine.count, road=road)

    async def _wait_for_peers(self) -> None:
        config = self._config
        await wait_for(
            self._engines.wait_until_ready(), peer="engines", what="to load the model", deadline_s=config.engine.ready_deadline_s
        )
        await wait_for(
            self._scorers.wait_until_ready(), peer="scorers", what="to load the rewards", deadline_s=config.engine.ready_deadline_s
        )
        if self._prm is not None:
            await wait_for(
                self._prm.wait_until_ready(),
                peer="the process reward model",
                what="to load",
                deadline_s=config.engine.ready_deadline_s,
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
        now_s = asyncio.get_running_loop().time()
        identity = self._ledger.finish(reason, now_s=now_s)
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
            replace=self._replace,
        )
        scorers = Peers(
            scorer_hub,
            role="scorer",
            expected=NUM_SCORERS + (config.prm.is_used),
            ready_deadline_s=config.engine.ready_deadline_s,
            silent_after_s=config.scorer.silent_after_s,
            replace=self._replace,
        )
        self._trainer = Peers(
            trainer_hub,
            role="trainer",
            expected=config.trainer.layout.replicas,
            ready_deadline_s=config.trainer.ready_deadline_s,
            silent_after_s=config.trainer.silent_after_s,
            replace=self._replace,
        )
        self._peers = (engines, scorers, self._trainer)
        self._engines = Engines(engines, expected=config.engine.count, watch=self.watch, credits=self._credits)
        self._scorers = Scorers(scorers, expected=NUM_SCORERS, watch=self.watch)
        self._prm = Prm(scorers) if config.prm.is_used else None

    def _build_stages(self, source: Source, credit: Credit, step_rules: StepRules | None) -> None:
        config, watch, bound = self._config, self.watch, self._config.pipeline.queue_bytes
        pace = pace_of(config.pipeline.mode, max_staleness=config.pipeline.max_staleness)
        self._admission = Admission(
            pace=pace,
            groups_per_step=config.batch.groups_per_step,
            num_steps=config.trainer.steps,
            max_running=config.max_running_rollouts,
        )
        if config.pipeline.adaptive_running:
            self._adapt_running()
        credits, past = self._credits, self._past
        channels = make_channels(
            watch=watch,
            queue_bytes=bound,
            num_policies=config.trainer.steps,
            follows=config.prm.is_used,
            compares=config.compares_siblings,
        )
        kv_policy = KvPolicy(span=config.weights.kv_span, bound=config.weights.kv_kl)
        self._delivery = Delivery(
            rows=channels.rows,
            published=channels.published,
            trainer=self._trainer,
            num_replicas=config.trainer.layout.replicas,
            num_steps=config.trainer.steps,
            holds_batches=pace.holds_batches,
            ledger=self._ledger,
            progress=self._progress,
            watch=watch,
            num_booked=past.num_done,
            recorded=past.steps,
            kv_policy=kv_policy,
        )
        self._refresh = Refresh(
            published=channels.published,
            engines=self._engines,
            trainer=self._trainer,
            admission=self._admission,
            credits=credits,
            progress=self._progress,
            journal=self._journal,
            layout_for=self._layout_for,
            commit_deadline_s=config.pipeline.stall_limit_s,
            kv_policy=kv_policy,
        )
        cut, open_step = self._make_cut(credit, step_rules, max_staleness=pace.max_staleness)
        quarantine = Quarantine(past.deaths)
        following = self._following = self._make_following(channels) if self._prm is not None else None
        asking = Asking(scorers=self._scorers, ledger=self._ledger, watch=watch, quarantine=quarantine)
        replying = self._make_replying(asking) if config.environment.function is not None else None
        self._stages: tuple[Stage, ...] = (
            Prompts(source, prompts=channels.prompts),
            Dispatch(
                prompts=channels.prompts,
                trajectories=channels.written,
                engines=self._engines,
                admission=self._admission,
                credits=credits,
                ledger=self._ledger,
                watch=watch,
                sampling=self._sampling(temperature=config.rollout.temperature),
                group_size=config.rollout.group_size,
                adds_greedy=self._adds_greedy,
                chunk_tokens=config.prm.chunk_tokens if following else 0,
                brake=following.brake if following else _no_brake,
                queue_bytes=bound,
                quarantine=quarantine,
                replying=replying,
                first_group_id=past.next_group_id,
                interrupted=past.interrupted,
            ),
            *([replying] if replying else []),
            Scoring(
                trajectories=channels.trajectories,
                scored=channels.scored,
                asking=asking,
                ledger=self._ledger,
                watch=watch,
                queue_bytes=bound,
            ),
            *([following] if following else []),
            *([self._make_comparing(channels, asking)] if config.compares_siblings else []),
            Batching(
                scored=channels.compared,
                rows=channels.rows,
                grouping=self._make_grouping(),
                cut=cut,
                packing=Packing(max_tokens=config.batch.max_tokens, num_replicas=config.trainer.layout.replicas),
                admission=self._admission,
                credits=credits,
                ledger=self._ledger,
                progress=self._progress,
                watch=watch,
                queue_bytes=bound,
                max_given_up=MAX_BARREN_STEPS * config.batch.groups_per_step,
                settled=functools.partial(_measure, source, config.algorithm.correct_reward),
                restored=self._restored_for("batching"),
                open_step=open_step,
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
            channels=channels.queues,
            hubs=[peers.hub for peers in self._peers],
            watch=watch,
            progress=self._progress,
            num_steps=config.trainer.steps,
            num_booked=lambda: self._delivery.num_booked,
            prm=lambda: self._prm_gauges(),
        )

    def _adapt_running(self) -> None:
        """Let what engines say of their KV caches decide how many rollouts they get."""
        engines, admission, group_size = self._engines, self._admission, self._num_siblings
        concurrency = Concurrency(most=admission.max_running, least=self._config.engine.count * group_size, group_size=group_size)

        def hear(load: EngineLoad) -> None:
            if load.kv_used is None:
                return
            num_held = load.num_running + load.num_waiting
            concurrency.reported(load.engine_id, kv_used=load.kv_used, num_held=num_held, num_outstanding=engines.num_outstanding)
            if concurrency.limit != admission.max_running:
                admission.max_running = concurrency.limit
                self._journal.write("limit", max_running=concurrency.limit, engine_id=load.engine_id, kv_used=load.kv_used)
                self._credits.set()

        engines.on_load(hear)
        engines.on_died(concurrency.lost)

    def _make_replying(self, asking: Asking) -> Replying:
        return Replying(
            asking=asking,
            ledger=self._ledger,
            watch=self.watch,
            max_tokens=self._config.rollout.max_tokens,
            max_turns=self._config.environment.max_turns,
            queue_bytes=self._config.pipeline.queue_bytes,
        )

    def _make_comparing(self, channels: Channels, asking: Asking) -> Comparing:
        config = self._config
        return Comparing(
            scored=channels.followed,
            compared=channels.compared,
            asking=asking,
            ledger=self._ledger,
            watch=self.watch,
            grouping=self._make_grouping(),
            min_survivors=config.batch.min_survivors,
            queue_bytes=config.pipeline.queue_bytes,
            restored=self._restored_for("comparing"),
        )

    def _make_following(self, channels: Channels) -> Following:
        assert self._prm is not None
        following = Following(
            written=channels.written,
            trajectories=channels.trajectories,
            scored=channels.scored,
            followed=channels.followed,
            prm=self._prm,
            ledger=self._ledger,
            watch=self.watch,
            credits=self._credits,
            max_waiting_tokens=self._config.prm.max_waiting_tokens,
            queue_bytes=self._config.pipeline.queue_bytes,
            stopping=self._make_stopping(),
            restored=self._restored_for("following"),
            flags=self._past.flags,
        )
        self._engines.on_tokens(following.take)
        return following

    def _make_stopping(self) -> Stopping | None:
        config, stop = self._config, self._config.prm.stop
        if stop.below is None:
            return None
        rule = EarlyStop(threshold=stop.below, epsilon=stop.keep, min_steps=stop.min_steps, seed=config.run.seed)
        audit = Audit(max_right_fraction=stop.max_right, correct_reward=config.algorithm.correct_reward)
        return Stopping(rule=rule, audit=audit, engines=self._engines)

    def _restored_for(self, stage: str) -> tuple[ScoredTrajectory, ...]:
        """What an earlier life of the run has scored and not placed, for the stage that is next to see it."""
        past, config = self._past, self._config

        def next_stage(name: str) -> str:
            if config.compares_siblings and name in past.compared:
                return "batching"
            if config.prm.is_used and name not in past.followed:
                return "following"
            return "comparing" if config.compares_siblings else "batching"

        return tuple(one for one in past.scored if next_stage(one.trajectory.rollout_id) == stage)

    def _prm_gauges(self) -> dict[str, Any] | None:
        if self._prm is None or self._prm.load is None or self._following is None:
            return None
        names = (
            "num_waiting_tokens",
            *(("num_flagged", "num_stopped", "num_saved_tokens") if self._config.prm.stop.below is not None else ()),
        )
        return msgspec.structs.asdict(self._prm.load) | {name: getattr(self._following, name) for name in names}

    def _make_grouping(self) -> Grouping:
        past = self._past
        return Grouping(group_size=self._num_siblings, first_group_id=past.next_group_id, still_open=past.running_groups)

    def _make_cut(self, credit: Credit, rules: StepRules | None, *, max_staleness: int) -> tuple[BatchCut, RecordedStep | None]:
        """The rule that fills steps, and what an earlier life of the run has put into the one being filled."""
        batch, past = self._config.batch, self._past
        cut = BatchCut(
            groups_per_step=batch.groups_per_step,
            max_staleness=max_staleness,
            min_survivors=batch.min_survivors,
            credit=credit,
            rules=rules,
            first_step=past.open_step,
        )
        open_step = past.steps.get(past.open_step)
        if open_step is not None:
            cut.restore(open_step.samples, num_groups=open_step.num_groups, groups=open_step.groups, num_stopped=open_step.num_stopped)
        return cut, open_step

    def _sampling(self, *, temperature: float) -> Sampling:
        rollout = self._config.rollout
        return Sampling(max_tokens=rollout.max_tokens, temperature=temperature, stop_token_ids=rollout.stop_token_ids)


def _measure(source: Source, correct_reward: float, group: Group) -> None:
    """Tell the source how a prompt went."""
    rewards = [member.score.reward for member in sampled_of(group.members)]
    success = success_of(rewards, correct_reward=correct_reward)
    if success is not None:
        source.measured(group.members[0].trajectory.prompt.prompt_id, success=success)


def _no_brake() -> None:
    """Nothing holds admission back but its own rule."""


def _promises(config: Config, *, adds_greedy: bool) -> dict[str, Any]:
    """What an independent checker of the ledger needs to know of the settings."""
    return {
        "group_size": config.rollout.group_size,
        "adds_greedy": adds_greedy,
        "groups_per_step": config.batch.groups_per_step,
        "max_row_tokens": config.batch.max_tokens,
        "max_turns": config.environment.max_turns if config.environment.function is not None else None,
        "max_staleness": pace_of(config.pipeline.mode, max_staleness=config.pipeline.max_staleness).max_staleness,
        "num_steps": config.trainer.steps,
        "follows_traces": config.prm.is_used,
        "compares_siblings": config.compares_siblings,
        "stops_below": config.prm.stop.below,
        "seed": config.run.seed,
    }
