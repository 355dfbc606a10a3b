"""Makes the parts of a run, each in one place: from the config, from what the run is joined to, and from the other parts it works with.

Whoever asks for a part gets it made, with all that it needs, so there is no order of making to keep. `orchestrator.pipeline` draws how
the stages are joined, and runs them.
"""

from __future__ import annotations

import asyncio
import functools
from functools import cached_property
from typing import Any

import msgspec

from orchestrator.channels import Channels, make_channels
from orchestrator.connections import NUM_SCORERS, Connections
from orchestrator.dependencies import Dependencies
from orchestrator.ledger.snapshot import read_snapshot
from orchestrator.observe.function_errors import FunctionErrors
from orchestrator.observe.progress import Progress
from orchestrator.observe.status import Status
from orchestrator.peers.adaptive_concurrency import adapt_concurrency
from orchestrator.peers.engines import Engines
from orchestrator.peers.prm import Prm
from orchestrator.peers.scorers import Scorers
from orchestrator.recovery.open_steps import OpenSteps
from orchestrator.resumption import PromptProgress, scored_for, settings_for_checker
from orchestrator.rules.admission import Admission, schedule_of
from orchestrator.rules.batch import BatchCut
from orchestrator.rules.early_stop import Audit, EarlyStop
from orchestrator.rules.grouping import Grouping
from orchestrator.rules.kv import KvPolicy
from orchestrator.rules.quarantine import Quarantine
from orchestrator.stages.batching import Batching
from orchestrator.stages.environment import EnvironmentStage
from orchestrator.stages.evaluation import Evaluation
from orchestrator.stages.generation import Generation
from orchestrator.stages.group_rewards import GroupRewards
from orchestrator.stages.prm import EarlyStopping, PrmScoring
from orchestrator.stages.prompts import Prompts
from orchestrator.stages.scoring import Scoring
from orchestrator.stages.training import Training
from orchestrator.stages.weight_sync import WeightSync
from pipelinerl.algorithms.mismatch import MismatchRule
from pipelinerl.config import Config
from pipelinerl.data.packing import Packing
from pipelinerl.messages import FunctionFailed, Sampling
from pipelinerl.observe.alarms.rules import Alarms
from pipelinerl.runtime.stage import Signal, Stage
from pipelinerl.runtime.watch import Watch

MAX_BARREN_STEPS = 10
"""Groups that may fail or be stale in a row before the run ends, in steps. A smaller value ends runs in a bad patch."""


class Assembly:
    """The parts of one orchestrator process. A ledger that holds an earlier one makes them go on where that ended: see `ledger.ledger`."""

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
        settings = settings_for_checker(config, has_greedy_baseline=self._adds_greedy, max_staleness=self._schedule.max_staleness)
        dependencies.ledger.begin(settings, now_s=self.started_s, unix_s=dependencies.journal.clock())
        self.past = read_snapshot(dependencies.ledger)
        self._prompt_progress = PromptProgress(dependencies.source, config=config, ledger=dependencies.ledger)
        self._prompt_progress.restore(self.past.position)
        self.connections = Connections(config, dependencies, max_staleness=self._schedule.max_staleness, num_siblings=self._num_siblings)

    # --- peers ---

    @cached_property
    def engines(self) -> Engines:
        return Engines(
            self.connections.engines,
            expected=self._config.engine.count,
            watch=self.watch,
            credits=self._credits,
            completion_check=self.connections.completion_check,
            announcement_check=self.connections.announcement_check,
            newest=lambda: max(self.past.open_step, self.admission.version),
        )

    @cached_property
    def scorers(self) -> Scorers:
        self.connections.scorers.on(FunctionFailed, lambda _, failed: self.function_errors.take(failed))
        self.watch.explain(lambda: self.function_errors.words() or None)
        return Scorers(
            self.connections.scorers,
            expected=NUM_SCORERS,
            ledger=self._dependencies.ledger,
            watch=self.watch,
            quarantine=self._quarantine,
            score_check=self.connections.score_check,
            announcement_check=self.connections.announcement_check,
            first_request_id=int(1e6 * self._dependencies.journal.clock()),
        )

    @cached_property
    def prm(self) -> Prm | None:
        """The process reward model, in a run that has one."""
        return Prm(self.connections.scorers) if self._config.prm.is_used else None

    # --- stages ---

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this run, in the order of the flow."""
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
            has_environment=config.environment.function is not None,
            has_prm=config.prm.is_used,
            compares_siblings=config.compares_siblings,
        )

    @cached_property
    def _prompts(self) -> Prompts:
        return Prompts(source=self._dependencies.source, prompts=self._channels.prompts)

    @cached_property
    def _generation(self) -> Generation:
        config, prm_scoring = self._config, self._prm_scoring
        return Generation(
            prompts=self._channels.prompts,
            completions=self._channels.completions,
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
            backpressure=prm_scoring.backpressure if prm_scoring else lambda: None,
            quarantine=self._quarantine,
            environment=self._environment,
            next_group_id=self.past.next_group_id,
            interrupted=self.past.interrupted,
        )

    @cached_property
    def _environment(self) -> EnvironmentStage | None:
        config = self._config
        if self._channels.turns is None:
            return None
        return EnvironmentStage(
            turns=self._channels.turns,
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
            restored=scored_for("prm", past=self.past, config=self._config),
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
            restored=scored_for("group_rewards", past=self.past, config=self._config),
        )

    @cached_property
    def _batching(self) -> Batching:
        config = self._config
        return Batching(
            scored=self._channels.group_scored,
            packed=self._channels.packed,
            rows=self._channels.rows,
            grouping=self._grouping(),
            cut=BatchCut(
                groups_per_step=config.batch.groups_per_step,
                max_staleness=self._schedule.max_staleness,
                min_group_size=config.batch.min_group_size,
                credit=self._dependencies.credit,
                rules=self._dependencies.step_rules,
                first_step=self.past.open_step,
            ),
            packing=Packing(max_tokens=config.batch.max_tokens, num_replicas=config.trainer.layout.replicas),
            admission=self.admission,
            credits=self._credits,
            ledger=self._dependencies.ledger,
            progress=self.progress,
            max_dropped=MAX_BARREN_STEPS * config.batch.groups_per_step,
            causes=self.function_errors.words,
            settled=self._prompt_progress.settled,
            restored=scored_for("batching", past=self.past, config=self._config),
            open_step=self.past.steps.get(self.past.open_step),
        )

    @cached_property
    def training(self) -> Training:
        config = self._config
        return Training(
            rows=self._channels.rows,
            published=self._channels.published,
            trainer=self.connections.trainer,
            num_replicas=config.trainer.layout.replicas,
            num_steps=config.trainer.steps,
            holds_batches=self._schedule.holds_batches,
            ledger=self._dependencies.ledger,
            progress=self.progress,
            watch=self.watch,
            steps=OpenSteps(self._dependencies.ledger, num_booked=self.past.num_done, recorded=self.past.steps),
            kv_policy=self._kv_policy,
            announcement_check=self.connections.announcement_check,
            quarantine=self._quarantine,
            mismatch=MismatchRule(limit=config.trainer.max_mismatch_kl),
            teachers=tuple(config.reference.teachers),
        )

    @cached_property
    def _weight_sync(self) -> WeightSync:
        return WeightSync(
            published=self._channels.published,
            engines=self.engines,
            trainer=self.connections.trainer,
            admission=self.admission,
            credits=self._credits,
            progress=self.progress,
            journal=self._dependencies.journal,
            layout_for=functools.partial(self.connections.layout_for, engines=self.engines),
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
            adapt_concurrency(
                admission,
                engines=self.engines,
                num_engines=config.engine.count,
                group_size=self._num_siblings,
                credits=self._credits,
                journal=self._dependencies.journal,
            )
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
            refused=self.connections.refused,
            watch=self.watch,
            progress=self.progress,
            num_steps=self._config.trainer.steps,
            num_booked=lambda: self.training.steps.num_booked,
            prm=self._prm_gauges,
            environment=self._environment_gauges,
        )

    # --- what is made for one part alone ---

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

    def _sampling(self, *, temperature: float) -> Sampling:
        rollout = self._config.rollout
        return Sampling(
            max_tokens=rollout.max_tokens, temperature=temperature, stop_token_ids=self._dependencies.stop_token_ids, stop=rollout.stop
        )

    def _prm_gauges(self) -> dict[str, Any] | None:
        if self.prm is None or self.prm.load is None or self._prm_scoring is None:
            return None
        has_stops = self._config.prm.early_stop.threshold is not None
        names = ("num_waiting_tokens", *(("num_flagged", "num_stopped", "num_saved_tokens") if has_stops else ()))
        return msgspec.structs.asdict(self.prm.load) | {name: getattr(self._prm_scoring, name) for name in names}

    def _environment_gauges(self) -> dict[str, Any] | None:
        replying = self._environment
        return None if replying is None else {"num_between": replying.num_between, "num_replies": replying.num_replies}
