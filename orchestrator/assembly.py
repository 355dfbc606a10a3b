"""Makes the parts of a run, each in one place: from the config, from what the run is joined to, and from the other parts it works with.

Whoever asks for a part gets it made, with all that it needs, so there is no order of making to keep. `orchestrator.pipeline` draws how
the stages are joined, and runs them.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec

from orchestrator.channels import Channels, make_channels
from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import read_resting, read_snapshot, read_successes
from orchestrator.observe.function_errors import FunctionErrors
from orchestrator.observe.progress import Progress
from orchestrator.observe.status import Status
from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.peers.prm import Prm
from orchestrator.peers.scorers import Scorers
from orchestrator.recovery.open_steps import OpenSteps
from orchestrator.rules.admission import Admission, schedule_of
from orchestrator.rules.batch import BatchCut, Credit, StepRules, sampled_of
from orchestrator.rules.concurrency import Concurrency
from orchestrator.rules.curriculum import epoch_and_number, success_of
from orchestrator.rules.early_stop import Audit, EarlyStop
from orchestrator.rules.grouping import Grouping
from orchestrator.rules.kv import KvPolicy
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.rules.validation.completions import CompletionCheck, Experts
from orchestrator.rules.validation.scores import ScoreCheck
from orchestrator.rules.weight_transport import choose_transport
from orchestrator.stages.batching import Batching
from orchestrator.stages.environment import EnvironmentStage, Turn
from orchestrator.stages.evaluation import Evaluation
from orchestrator.stages.generation import Generation
from orchestrator.stages.group_rewards import GroupRewards
from orchestrator.stages.prm import EarlyStopping, PrmScoring
from orchestrator.stages.prompts import Prompts, Source
from orchestrator.stages.scoring import Scoring
from orchestrator.stages.training import Training
from orchestrator.stages.weight_sync import WeightSync
from pipelinerl.algorithms.mismatch import MismatchRule
from pipelinerl.config import Config
from pipelinerl.data.packing import Packing
from pipelinerl.messages import EngineLoad, FunctionFailed, Group, LayoutFixed, Prompt, Sampling, ScoredTrajectory, TrainerReady
from pipelinerl.observe.alarms.rules import Alarms
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.pool.calls import component_names
from pipelinerl.runtime.stage import Channel, Signal, Stage
from pipelinerl.runtime.watch import Watch
from pipelinerl.transport.base import Hub

MAX_BARREN_STEPS = 10
"""Steps' worth of groups that may fail or be stale in a row before the run ends. Fewer ends runs in a bad patch."""
NUM_SCORERS = 1
"""Scorer processes; each runs `scorer.slots` calls at once in worker processes of its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything a run is joined to. The live run and the simulation differ in this alone."""

    engine_hub: Hub
    scorer_hub: Hub
    trainer_hub: Hub
    source: Source
    held_out: list[Prompt]
    stop_token_ids: tuple[int, ...] = ()
    """What ends a completion, in training and in evaluations, see `pipelinerl.data.stop_tokens`."""
    credit: Credit
    journal: Journal
    ledger: Ledger
    step_rules: StepRules | None = None
    replace: Callable[[str], None] | None = None
    """See `Peers`."""
    vocabulary: int | None = None
    """Tokens that the model knows; None: its folder does not say."""
    experts: Experts | None = None
    """Of a mixture whose routes travel; None: none do."""


class Assembly:
    """The parts of one life of a run. A ledger that holds an earlier one makes them go on where that ended: see `state.ledger`."""

    def __init__(self, config: Config, dependencies: Dependencies) -> None:
        self.started_s = asyncio.get_running_loop().time()
        self.watch = Watch(stall_limit_s=config.pipeline.stall_limit_s)
        alarms = Alarms(correct_reward=config.algorithm.correct_reward, max_mismatch_kl=config.trainer.max_mismatch_kl)
        self.progress = Progress(journal=dependencies.journal, started_s=self.started_s, alarms=alarms)
        self.function_errors = FunctionErrors(dependencies.journal)
        self._config = config
        self._dependencies = dependencies
        self._credits = Signal()
        """Set whenever another group might be admitted."""
        self._adds_greedy = dependencies.step_rules is not None and dependencies.step_rules.adds_greedy
        self._schedule = schedule_of(config.pipeline.mode, max_staleness=config.pipeline.max_staleness)
        dependencies.ledger.begin(self._promises(), now_s=self.started_s, unix_s=dependencies.journal.clock())
        self.past = read_snapshot(dependencies.ledger)
        self._restore_source()

    # --- peers ---

    @cached_property
    def peers(self) -> tuple[Peers, ...]:
        """Of every kind."""
        return (self._engine_peers, self._scorer_peers, self._trainer)

    @cached_property
    def engines(self) -> Engines:
        return Engines(
            self._engine_peers,
            expected=self._config.engine.count,
            watch=self.watch,
            credits=self._credits,
            completion_check=self._completion_check,
            announcement_check=self._announcement_check,
            newest=lambda: max(self.past.open_step, self.admission.version),
        )

    @cached_property
    def scorers(self) -> Scorers:
        self._scorer_peers.on(FunctionFailed, lambda _, failed: self.function_errors.take(failed))
        self.watch.explain(lambda: self.function_errors.words() or None)
        return Scorers(
            self._scorer_peers,
            expected=NUM_SCORERS,
            ledger=self._dependencies.ledger,
            watch=self.watch,
            quarantine=self._quarantine,
            score_check=self._score_check,
            announcement_check=self._announcement_check,
            first_request_id=int(1e6 * self._dependencies.journal.clock()),
        )

    @cached_property
    def prm(self) -> Prm | None:
        """The process reward model, in a run that has one."""
        return Prm(self._scorer_peers) if self._config.prm.is_used else None

    @cached_property
    def _engine_peers(self) -> Peers:
        engine = self._config.engine
        return Peers(
            self._dependencies.engine_hub,
            role="engine",
            expected=engine.count,
            ready_deadline_s=engine.ready_deadline_s,
            silent_after_s=engine.silent_after_s,
            replace=self._dependencies.replace,
            tell=self._report_violation,
            has_spares=True,
            max_processes=self._max_processes,
        )

    @cached_property
    def _scorer_peers(self) -> Peers:
        return Peers(
            self._dependencies.scorer_hub,
            role="scorer",
            expected=NUM_SCORERS + self._config.prm.is_used,
            ready_deadline_s=self._config.engine.ready_deadline_s,
            silent_after_s=self._config.scorer.silent_after_s,
            replace=self._dependencies.replace,
            tell=self._report_violation,
            max_processes=self._max_processes,
        )

    @cached_property
    def _trainer(self) -> Peers:
        trainer = self._config.trainer
        return Peers(
            self._dependencies.trainer_hub,
            role="trainer",
            expected=trainer.layout.replicas,
            ready_deadline_s=trainer.ready_deadline_s,
            silent_after_s=trainer.silent_after_s,
            failure_ends_run=True,
            replace=self._dependencies.replace,
            tell=self._report_violation,
            max_processes=self._max_processes,
        )

    @property
    def _max_processes(self) -> int | None:
        """Processes of one name within an hour: what its launcher may restart, and as many more; None where no launcher counts them."""
        return None if self._dependencies.replace is None else 2 * self._config.run.restarts + 10

    def _report_violation(self, peer: str, kind: str, words: str, count: int) -> None:
        """Write down what a peer said that cannot be, or what becomes of it for that."""
        self._dependencies.journal.write("lie", peer=peer, what=kind, words=words, count=count)
        is_verdict = kind in ("replaced", "banned", "failed")
        print(f"{peer}: {words}" if is_verdict else f"{peer}: refused: {kind}, {count} so far: {words}", flush=True)

    # --- what peers may say ---

    @cached_property
    def _completion_check(self) -> CompletionCheck:
        return CompletionCheck(vocabulary=self._dependencies.vocabulary, experts=self._dependencies.experts)

    @cached_property
    def _score_check(self) -> ScoreCheck:
        rewards = self._config.reward
        names = component_names([reward.function for reward in rewards])
        return ScoreCheck(
            weights={name: reward.weight for name, reward in zip(names, rewards, strict=True)}, completion_check=self._completion_check
        )

    @cached_property
    def _announcement_check(self) -> AnnouncementCheck:
        config = self._config
        num_evaluated = len(self._dependencies.held_out) * config.evaluation.samples
        num_admitted = (self._schedule.max_staleness + 1) * config.batch.groups_per_step * self._num_siblings  # `rules.admission`
        max_outstanding = num_admitted + num_evaluated  # not `max_running`: episodes go on, and what was lost is asked for again, above it
        return AnnouncementCheck(max_outstanding=max_outstanding, num_steps=config.trainer.steps)

    # --- stages ---

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All that this run has, in the order of the flow."""
        every = (
            self._prompts,
            self._generation,
            self._environment,
            self._scoring,
            self._prm_scoring,
            self._group_rewards,
            self._batching,
            self.training,
            self._weight_sync,
        )
        return tuple(stage for stage in every if stage is not None)

    @cached_property
    def _channels(self) -> Channels:
        config = self._config
        return make_channels(
            watch=self.watch,
            queue_bytes=config.pipeline.queue_bytes,
            num_policies=config.trainer.steps,
            follows=config.prm.is_used,
            compares=config.compares_siblings,
        )

    @cached_property
    def _prompts(self) -> Prompts:
        return Prompts(self._dependencies.source, prompts=self._channels.prompts)

    @cached_property
    def _generation(self) -> Generation:
        config, prm_scoring = self._config, self._prm_scoring
        return Generation(
            prompts=self._channels.prompts,
            trajectories=self._channels.generated,
            engines=self.engines,
            admission=self.admission,
            credits=self._credits,
            ledger=self._dependencies.ledger,
            watch=self.watch,
            sampling=self._sampling(temperature=config.rollout.temperature),
            group_size=config.rollout.group_size,
            adds_greedy=self._adds_greedy,
            chunk_tokens=config.prm.chunk_tokens if prm_scoring else 0,
            backpressure=prm_scoring.backpressure if prm_scoring else _no_backpressure,
            queue_bytes=config.pipeline.queue_bytes,
            quarantine=self._quarantine,
            environment=self._environment,
            next_group_id=self.past.next_group_id,
            interrupted=self.past.interrupted,
        )

    @cached_property
    def _environment(self) -> EnvironmentStage | None:
        config = self._config
        if config.environment.function is None:
            return None
        turns: Channel[Turn] = Channel(
            "turns",
            giver="generation",
            taker=EnvironmentStage.name,
            watch=self.watch,
            bound_bytes=config.pipeline.queue_bytes,
            size=lambda turn: turn.episode.num_bytes,
            label=lambda turn: f"of rollout {turn.rollout.rollout_id}, attempt {turn.rollout.attempt}, of engine-{turn.engine_id}",
        )
        return EnvironmentStage(
            turns=turns,
            scorers=self.scorers,
            ledger=self._dependencies.ledger,
            max_tokens=config.rollout.max_tokens,
            max_turns=config.environment.max_turns,
        )

    @cached_property
    def _scoring(self) -> Scoring:
        channels = self._channels
        return Scoring(trajectories=channels.trajectories, scored=channels.scored, scorers=self.scorers, ledger=self._dependencies.ledger)

    @cached_property
    def _prm_scoring(self) -> PrmScoring | None:
        if self.prm is None:
            return None
        prm_scoring = PrmScoring(
            generated=self._channels.generated,
            trajectories=self._channels.trajectories,
            scored=self._channels.scored,
            prm_scored=self._channels.prm_scored,
            prm=self.prm,
            ledger=self._dependencies.ledger,
            watch=self.watch,
            credits=self._credits,
            max_waiting_tokens=self._config.prm.max_waiting_tokens,
            stopping=self._stopping(),
            restored=self._restored_for("prm"),
            decisions=self.past.early_stops,
        )
        self.engines.requests.on_tokens(prm_scoring.take)
        return prm_scoring

    @cached_property
    def _group_rewards(self) -> GroupRewards | None:
        config = self._config
        if not config.compares_siblings:
            return None
        return GroupRewards(
            scored=self._channels.prm_scored,
            group_scored=self._channels.group_scored,
            scorers=self.scorers,
            ledger=self._dependencies.ledger,
            grouping=self._grouping(),
            min_group_size=config.batch.min_group_size,
            restored=self._restored_for("group_rewards"),
        )

    @cached_property
    def _batching(self) -> Batching:
        config = self._config
        return Batching(
            scored=self._channels.group_scored,
            rows=self._channels.rows,
            grouping=self._grouping(),
            cut=self._cut(),
            packing=Packing(max_tokens=config.batch.max_tokens, num_replicas=config.trainer.layout.replicas),
            admission=self.admission,
            credits=self._credits,
            ledger=self._dependencies.ledger,
            progress=self.progress,
            watch=self.watch,
            queue_bytes=config.pipeline.queue_bytes,
            max_dropped=MAX_BARREN_STEPS * config.batch.groups_per_step,
            causes=self.function_errors.words,
            settled=self._settled,
            restored=self._restored_for("batching"),
            open_step=self.past.steps.get(self.past.open_step),
        )

    @cached_property
    def training(self) -> Training:
        config = self._config
        return Training(
            rows=self._channels.rows,
            published=self._channels.published,
            trainer=self._trainer,
            num_replicas=config.trainer.layout.replicas,
            num_steps=config.trainer.steps,
            holds_batches=self._schedule.holds_batches,
            ledger=self._dependencies.ledger,
            progress=self.progress,
            watch=self.watch,
            steps=OpenSteps(self._dependencies.ledger, num_booked=self.past.num_done, recorded=self.past.steps),
            kv_policy=self._kv_policy,
            announcement_check=self._announcement_check,
            quarantine=self._quarantine,
            mismatch=MismatchRule(limit=config.trainer.max_mismatch_kl),
            teachers=tuple(config.reference.teachers),
        )

    @cached_property
    def _weight_sync(self) -> WeightSync:
        return WeightSync(
            published=self._channels.published,
            engines=self.engines,
            trainer=self._trainer,
            admission=self.admission,
            credits=self._credits,
            progress=self.progress,
            journal=self._dependencies.journal,
            layout_for=self._layout_for,
            commit_deadline_s=self._config.pipeline.stall_limit_s,
            kv_policy=self._kv_policy,
        )

    # --- what stages share ---

    @cached_property
    def admission(self) -> Admission:
        config = self._config
        admission = Admission(
            schedule=self._schedule,
            groups_per_step=config.batch.groups_per_step,
            num_steps=config.trainer.steps,
            max_running=config.max_running_rollouts,
        )
        if config.pipeline.adaptive_concurrency:
            self._adapt(admission)
        return admission

    @cached_property
    def _quarantine(self) -> Quarantine:
        return Quarantine(self.past.deaths)

    @cached_property
    def _kv_policy(self) -> KvPolicy:
        return KvPolicy(max_staleness=self._config.weights.kv_max_staleness, max_kl=self._config.weights.kv_max_kl)

    # --- beside the stages ---

    @cached_property
    def evaluation(self) -> Evaluation:
        config = self._config
        return Evaluation(
            self._dependencies.held_out,
            section=config.evaluation,
            correct_reward=config.algorithm.correct_reward,
            engines=self.engines,
            scorers=self.scorers,
            pins=self._weight_sync,
            sampling=self._sampling(temperature=config.evaluation.temperature),
            max_turns=config.environment.max_turns if config.environment.function is not None else 1,
            journal=self._dependencies.journal,
            ledger=self._dependencies.ledger,
            watch=self.watch,
            done=self.past.evaluations,
            on_evaluated=self.progress.evaluated,
        )

    @cached_property
    def status(self) -> Status:
        return Status(
            journal=self._dependencies.journal,
            ledger=self._dependencies.ledger,
            admission=self.admission,
            engines=self.engines,
            scorers=self.scorers,
            channels=self._channels.queues,
            refused=self._refused,
            watch=self.watch,
            progress=self.progress,
            num_steps=self._config.trainer.steps,
            num_booked=lambda: self.training.steps.num_booked,
            prm=self._prm_gauges,
            environment=self._environment_gauges,
        )

    # --- what is made for one part alone ---

    def _cut(self) -> BatchCut:
        """The rule that fills steps, with what an earlier life of the run has put into the one being filled."""
        batch, past = self._config.batch, self.past
        cut = BatchCut(
            groups_per_step=batch.groups_per_step,
            max_staleness=self._schedule.max_staleness,
            min_group_size=batch.min_group_size,
            credit=self._dependencies.credit,
            rules=self._dependencies.step_rules,
            first_step=past.open_step,
        )
        if (step := past.steps.get(past.open_step)) is not None:
            cut.restore(step.samples, num_groups=step.num_groups, groups=step.groups, num_stopped=step.num_stopped)
        return cut

    def _grouping(self) -> Grouping:
        return Grouping(group_size=self._num_siblings, first_group_id=self.past.next_group_id, still_open=self.past.running_groups)

    @property
    def _num_siblings(self) -> int:
        return self._config.rollout.group_size + self._adds_greedy

    def _stopping(self) -> EarlyStopping | None:
        config, stop = self._config, self._config.prm.early_stop
        if stop.threshold is None:
            return None
        rule = EarlyStop(threshold=stop.threshold, keep_probability=stop.keep_probability, min_steps=stop.min_steps, seed=config.run.seed)
        audit = Audit(max_false_stop_fraction=stop.max_false_stop_fraction, correct_reward=config.algorithm.correct_reward)
        return EarlyStopping(rule=rule, audit=audit, engines=self.engines.requests)

    def _adapt(self, admission: Admission) -> None:
        """Let what engines say of their KV caches decide how many rollouts they get."""
        engines, group_size = self.engines, self._num_siblings
        concurrency = Concurrency(most=admission.max_running, least=self._config.engine.count * group_size, group_size=group_size)

        def hear(load: EngineLoad) -> None:
            if load.kv_used is None:
                return
            num_held = load.num_running + load.num_waiting
            concurrency.reported(load.engine_id, kv_used=load.kv_used, num_held=num_held, num_outstanding=len(engines.requests))
            if concurrency.limit != admission.max_running:
                admission.max_running = concurrency.limit
                self._dependencies.journal.write("limit", max_running=concurrency.limit, engine_id=load.engine_id, kv_used=load.kv_used)
                self._credits.set()

        engines.on_load(hear)
        engines.on_died(concurrency.lost)

    def _layout_for(self, trainer: TrainerReady) -> LayoutFixed:
        """What a trainer that starts must know to publish: the engines' layout, and the transport to them."""
        weights = self._config.weights
        machines = {engine.peer: engine.ready.machine for engine in self.engines}
        transports = frozenset(trainer.transports).intersection(*(engine.ready.transports for engine in self.engines))
        transport, reason = choose_transport(
            weights.transport, trainer=trainer.machine, engines=machines, address=weights.address, device_transports=transports
        )
        self._dependencies.journal.write("choice", text=reason)
        print(reason, flush=True)
        return LayoutFixed(tensors=self.engines.layout(), num_engines=self._config.engine.count, transport=transport)

    def _sampling(self, *, temperature: float) -> Sampling:
        rollout = self._config.rollout
        return Sampling(
            max_tokens=rollout.max_tokens, temperature=temperature, stop_token_ids=self._dependencies.stop_token_ids, stop=rollout.stop
        )

    def _refused(self) -> dict[str, int]:
        """What was turned away, by reason and kind, of whom nobody knows and of peers."""
        counts = [counter for peers in self.peers for counter in (peers.hub.refused, peers.refused)]
        return dict(sum(counts, collections.Counter[str]()))

    def _prm_gauges(self) -> dict[str, Any] | None:
        if self.prm is None or self.prm.load is None or self._prm_scoring is None:
            return None
        names = (
            "num_waiting_tokens",
            *(("num_flagged", "num_stopped", "num_saved_tokens") if self._config.prm.early_stop.threshold is not None else ()),
        )
        return msgspec.structs.asdict(self.prm.load) | {name: getattr(self._prm_scoring, name) for name in names}

    def _environment_gauges(self) -> dict[str, Any] | None:
        replying = self._environment
        return None if replying is None else {"num_between": replying.num_between, "num_replies": replying.num_replies}

    # --- an earlier life of the run ---

    def _restore_source(self) -> None:
        config, source = self._config, self._dependencies.source
        source.position = self.past.position
        if config.data.difficulty is not None:
            source.resting.update(read_resting(self._dependencies.ledger))
            correct_reward, group_size = config.algorithm.correct_reward, config.rollout.group_size
            for prompt_id, success in read_successes(self._dependencies.ledger, correct_reward=correct_reward, group_size=group_size):
                self._measure(prompt_id, success)

    def _settled(self, group: Group) -> None:
        """Tell the source how a prompt went."""
        rewards = [member.score.reward for member in sampled_of(group.members)]
        success = success_of(rewards, correct_reward=self._config.algorithm.correct_reward)
        self._measure(group.members[0].trajectory.prompt.prompt_id, success)

    def _measure(self, prompt_id: str, success: float | None) -> None:
        source, number = self._dependencies.source, None
        if success is not None:
            source.measured(prompt_id, success=success)
            _, number = epoch_and_number(prompt_id)
        if self._config.data.difficulty is not None:
            self._dependencies.ledger.store_rest(number, None if number is None else source.resting.get(number))

    def _restored_for(self, stage: str) -> tuple[ScoredTrajectory, ...]:
        """What was scored and not placed, for the stage that is next to see it."""
        past, config = self.past, self._config

        def next_stage(name: str) -> str:
            if config.compares_siblings and name in past.group_scored:
                return "batching"
            if config.prm.is_used and name not in past.prm_scored:
                return "prm"
            return "group_rewards" if config.compares_siblings else "batching"

        return tuple(one for one in past.scored if next_stage(one.trajectory.rollout_id) == stage)

    def _promises(self) -> dict[str, Any]:
        """What an independent checker of the ledger needs to know of the settings."""
        config = self._config
        return {
            "group_size": config.rollout.group_size,
            "has_greedy_baseline": self._adds_greedy,
            "groups_per_step": config.batch.groups_per_step,
            "max_row_tokens": config.batch.max_tokens,
            "max_turns": config.environment.max_turns if config.environment.function is not None else None,
            "max_staleness": self._schedule.max_staleness,
            "num_steps": config.trainer.steps,
            "has_prm": config.prm.is_used,
            "has_group_rewards": config.compares_siblings,
            "early_stop_threshold": config.prm.early_stop.threshold,
            "seed": config.run.seed,
        }


def _no_backpressure() -> None:
    """Nothing holds admission back but its own rule."""
