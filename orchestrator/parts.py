"""The parts of a run that its stages share: its peers and what each may say, admission, and what an earlier process of the run has left.

A ledger that holds an earlier process makes the run go on where that ended: see `ledger.ledger`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.data.prompt_progress import PromptProgress
from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import InterruptedGroup, read_snapshot
from orchestrator.observe.function_errors import FunctionErrors
from orchestrator.observe.progress import Progress
from orchestrator.peers.adaptive_concurrency import RunningLimit
from orchestrator.peers.engines import Engines
from orchestrator.peers.gateway import Gateway
from orchestrator.peers.peers import Peers
from orchestrator.peers.prm import Prm
from orchestrator.peers.relief import relief_of
from orchestrator.peers.reward_model import RewardModel
from orchestrator.peers.scorers import Scorers
from orchestrator.peers.trainer_ranks import trainer_change_of
from orchestrator.peers.transport_choice import TransportChoice
from orchestrator.rules.admission import Admission, schedule_of
from orchestrator.rules.batch import BatchCut, GroupAdvantages, StepRules
from orchestrator.rules.dispatch import Dispatch, dispatch_of
from orchestrator.rules.group_cut import GroupCut, group_cut_of
from orchestrator.rules.grouping import Grouping
from orchestrator.rules.kv import KvPolicy
from orchestrator.rules.membership import membership_of, prm_membership_of, reward_memberships_of
from orchestrator.rules.phases import sleep_bound
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.rules.validation.completions import CompletionCheck, Experts
from orchestrator.rules.validation.scores import ScoreCheck
from orchestrator.stages.agent_turns import AgentTurns
from orchestrator.stages.alternation import Alternation
from orchestrator.stages.leasing import Desk, Leasing, Seat, Table
from orchestrator.stages.prompts import Source
from orchestrator.stages.script_replay import ScriptRecord, ScriptReplay
from pipelinerl.algorithms.methods import method_of
from pipelinerl.algorithms.rules import makes_advantages_in_trainer
from pipelinerl.config import Config, Mode
from pipelinerl.data.packing import packing_of
from pipelinerl.messages import FunctionFailed, LayoutFixed, Prompt, Sampling, ScoredTrajectory, ScorerLoad, TrainerReady
from pipelinerl.observe.alarms.rules import Alarms
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.calls import reward_weights
from pipelinerl.runtime.membership import FIRST_PRM, Kind, ScaleFolder
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch
from pipelinerl.transport.base import Hub

MAX_ASKED_BY_SCRIPT = 1 << 20
"""Requests that engines may say they have in a script's run, where no count of groups bounds them. A larger value only lets a dishonest
engine fill memory.
"""
NUM_SCORERS = FIRST_PRM
"""Scorer processes that run reward functions; each runs `scorer.slots` calls at once in worker processes of its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything outside that a run depends on. The live run and the simulation differ in this alone."""

    engine_hub: Hub
    scorer_hub: Hub
    trainer_hub: Hub
    gateway_hub: Hub | None = None
    """None in a run without a gateway, and in those of several policies of which another speaks with it."""
    policy: str = ""
    """Its name among several policies."""
    table: Table | None = None
    """Where several policies meet; None in a run of one."""
    source: Source
    held_out: list[Prompt]
    stop_token_ids: tuple[int, ...] = ()
    """The tokens that end a completion, in training and in evaluations, see `pipelinerl.data.stop_tokens`."""
    group_advantages: GroupAdvantages
    journal: Journal
    ledger: Ledger
    step_rules: StepRules | None = None
    replace: Callable[[str], None] | None = None
    """See `Peers`."""
    vocabulary: int | None = None
    """Tokens that the model knows; None where its folder does not say."""
    experts: Experts | None = None
    """The size of a mixture of experts whose routes travel; None where none do."""
    record: ScriptRecord | None = None
    """The record of a script's calls, where it is led through them when it goes on."""
    scale: ScaleFolder | None = None
    """Where engines that join and leave are asked for; None where none do."""
    in_script: bool = False
    """True where a script says what is sampled, scored and trained (`orchestrator.controller`)."""
    is_replay: bool = False
    """True where recorded peers answer: what they say is not checked, and no number of dropped groups ends the run."""


class Parts:
    """The shared parts of one orchestrator process."""

    def __init__(self, config: Config, given: Dependencies) -> None:
        self.config = config
        self.given = given
        self.started_s = asyncio.get_running_loop().time()
        self.watch = Watch(stall_limit_s=config.pipeline.stall_limit_s)
        alarms = Alarms(correct_reward=config.algorithm.correct_reward, max_mismatch_kl=config.trainer.max_mismatch_kl)
        has_advantages = not makes_advantages_in_trainer(method_of(config))
        self.progress = Progress(journal=given.journal, started_s=self.started_s, alarms=alarms, has_advantages=has_advantages)
        self.function_errors = FunctionErrors(given.journal)
        self.credits = Signal()
        """Set whenever another group might be admitted."""
        self.adds_greedy = given.step_rules is not None and given.step_rules.adds_greedy
        self.num_siblings = config.rollout.group_size + self.adds_greedy
        self.schedule = schedule_of(
            config.pipeline.mode,
            max_staleness=config.pipeline.max_staleness,
            in_script=given.in_script,
            is_colocated=config.is_colocated,
        )
        given.ledger.begin(self._settings(), now_s=self.started_s, unix_s=given.journal.clock())
        self.past = read_snapshot(given.ledger)
        self.prompt_progress = PromptProgress(source=given.source, config=config, ledger=given.ledger)
        self.prompt_progress.restore(self.past.position)
        self.quarantine = Quarantine(self.past.deaths)
        self.kv_policy = KvPolicy(max_staleness=config.weights.kv_max_staleness, max_kl=config.weights.kv_max_kl)
        self.admission = Admission(
            schedule=self.schedule,
            groups_per_step=config.batch.groups_per_step,
            num_steps=config.trainer.steps,
            max_running=config.max_running_rollouts,
        )
        self.dispatch: Dispatch[Any] | None = dispatch_of(config, num_siblings=self.num_siblings)
        self.group_sizes: dict[int, int] = {}
        """Siblings of the groups of which a script wants another number than `num_siblings`, while they are not over."""
        if given.in_script:
            self.group_sizes.update(collections.Counter(one.group_id for one in given.ledger.rollouts_in_flight().values()))
        self.group_cut: GroupCut | None = group_cut_of(config, num_siblings=self.num_siblings, sizes=self.group_sizes)
        if self.group_cut is not None:
            self.group_cut.decisions.update(self.past.early_stops)
        self.replay: ScriptReplay | None = None
        """What leads a script that goes on through its calls; None in a run without a script."""
        self._connect()

    def _connect(self) -> None:
        config, given, ready_s = self.config, self.given, self.config.engine.ready_deadline_s
        completions = None if given.is_replay else CompletionCheck(vocabulary=given.vocabulary, experts=given.experts)
        num_admitted = (self.schedule.max_staleness + 1) * config.batch.groups_per_step * self.num_siblings  # `rules.admission`
        num_evaluated = len(given.held_out) * config.evaluation.samples
        # Not `max_running`: episodes go on, and what was lost is asked for again, above it.
        num_turns = 0 if config.gateway is None else config.gateway.max_episodes * config.gateway.max_parallel
        max_outstanding = num_admitted + num_evaluated + num_turns + MAX_ASKED_BY_SCRIPT * given.in_script
        self.announcement_check = (
            None if given.is_replay else AnnouncementCheck(max_outstanding=max_outstanding, num_steps=config.trainer.steps)
        )
        earlier = given.scale and given.scale.members()
        self._transport = TransportChoice(config=config, journal=given.journal)
        self.membership = membership_of(config, earlier=earlier, takes_all=given.is_replay, why_not_width=self._transport.why_not_width)
        self.trainer_change = trainer_change_of(config, earlier=given.scale and given.scale.trainer(), in_script=given.in_script)
        if not self.membership.goes_on:  # `engine.count` is another one
            self.trainer_change.keep_engines([Kind.ENGINES])
        self.packing = packing_of(config, num_replicas=self.trainer_change.num_replicas)
        self.engines = Engines(
            self._peers(
                given.engine_hub,
                "engine",
                0,
                ready_s,
                silent_after_s=config.engine.silent_after_s,
                has_spares=True,
                membership=None if given.is_replay else self.membership,
            ),
            expected=config.engine.count,
            watch=self.watch,
            credits=self.credits,
            completion_check=completions,
            announcement_check=self.announcement_check,
            newest=lambda: max(self.past.open_step, self.admission.version),
            membership=self.membership,
            why_unreached=self._transport.why_unreached,
        )
        prm = prm_membership_of(config, earlier=earlier and earlier.prm, takes_all=given.is_replay)
        scorers = self._peers(
            given.scorer_hub,
            "scorer",
            NUM_SCORERS,
            ready_s,
            silent_after_s=config.scorer.silent_after_s,
            membership=prm if config.prm.is_used and not given.is_replay else None,
        )
        scorers.on(FunctionFailed, lambda _, failed: self.function_errors.take(failed))
        self.watch.explain(lambda: self.function_errors.words() or None)
        weights = reward_weights(config.reward)
        self.scorers = Scorers(
            scorers,
            expected=NUM_SCORERS,
            ledger=given.ledger,
            watch=self.watch,
            quarantine=self.quarantine,
            score_check=None if completions is None else ScoreCheck(weights=weights, completion_check=completions),
            announcement_check=self.announcement_check,
            first_request_id=int(1e6 * given.journal.clock()),
        )
        rewards = reward_memberships_of(config, earlier=earlier, takes_all=given.is_replay)
        self.reward_models = tuple(RewardModel(membership=one, credits=self.credits) for one in rewards)
        self.scorers.on_load = self._hear_of_models
        self.prm = Prm(scorers, membership=prm, is_episodic=config.environment.is_used) if config.prm.is_used else None
        """The process reward model, in a run that has one."""
        self.trainer = self._peers(
            given.trainer_hub,
            "trainer",
            0,
            config.trainer.ready_deadline_s,
            silent_after_s=config.trainer.silent_after_s,
            failure_ends_run=True,
            membership=None if given.is_replay else self.trainer_change.replicas(),
        )
        self.peers = (self.engines.peers, scorers, self.trainer, *self._connect_gateway())
        self.alternation = self._alternation() if config.is_colocated else Alternation()
        """The phases of engines and trainer, where they share their devices."""
        self.limit = RunningLimit(
            admission=self.admission,
            most_in=config.max_running_in,
            group_size=self.num_siblings,
            credits=self.credits,
            journal=given.journal,
        )
        if config.pipeline.adaptive_concurrency:
            self.limit.adapt_to_caches(self.engines, num_engines=config.engine.count)
        self.relief = relief_of(
            config, num_siblings=self.num_siblings, engines=self.engines, check=self.announcement_check, journal=given.journal
        )

    def _hear_of_models(self, load: ScorerLoad) -> None:
        for model in self.reward_models:
            model.heard(load)

    def _alternation(self) -> Alternation:
        return Alternation(
            engines=self.engines,
            takes_turns=self.config.takes_turns,
            bound=sleep_bound(self.config),
            num_closable=self.admission.num_closable,
            journal=self.given.journal,
        )

    def _connect_gateway(self) -> tuple[Peers, ...]:
        self.gateway: Gateway | None = None
        """The process that speaks for agents outside of the run, in a run that has one."""
        section = self.config.gateway
        if section is None or self.given.gateway_hub is None:
            return ()
        ready_s = self.config.engine.ready_deadline_s
        peers = self._peers(self.given.gateway_hub, "gateway", 1, ready_s, silent_after_s=section.silent_after_s)
        self.gateway = Gateway(peers)
        return (peers,)

    def _peers(self, hub: Hub, role: str, expected: int, ready_deadline_s: float, **options: Any) -> Peers:
        replace = self.given.replace
        # Within an hour a launcher starts no more processes of one name than twice `run.restarts`, and ten.
        max_processes = None if replace is None else 2 * self.config.run.restarts + 10
        return Peers(
            hub,
            role=role,
            expected=0 if self.given.is_replay else expected,  # recorded peers are as many as came
            ready_deadline_s=ready_deadline_s,
            replace=replace,
            tell=self._report_violation,
            max_processes=max_processes,
            **options,
        )

    def _settings(self) -> dict[str, Any]:
        """Return the settings that an independent checker of the ledger needs."""
        config = self.config
        return {
            "group_size": config.rollout.group_size,
            "has_greedy_baseline": self.adds_greedy,
            "groups_per_step": None if self.given.in_script else config.batch.groups_per_step,
            "max_row_tokens": config.batch.max_tokens,
            "max_turns": config.environment.max_turns if config.environment.is_used else None,
            "has_stateful_environment": config.environment.cls is not None,
            "max_staleness": self.schedule.max_staleness,
            "num_steps": config.trainer.steps,
            "has_prm": config.prm.is_used,
            "has_group_rewards": config.compares_siblings,
            "early_stop_threshold": config.prm.early_stop.threshold,
            "cut_after": config.rollout.cut_after,
            "seed": config.run.seed,
        }

    def _report_violation(self, peer: str, kind: str, words: str, count: int) -> None:
        """Record a violation of a peer, or its consequence."""
        self.given.journal.write("violation", peer=peer, what=kind, words=words, count=count)
        is_verdict = kind in ("replaced", "banned", "failed")
        print(f"{peer}: {words}" if is_verdict else f"{peer}: refused: {kind}, {count} so far: {words}", flush=True)

    def refused(self) -> dict[str, int]:
        """Return the messages that were refused, by reason and kind, from unknown senders and from peers."""
        counts = [counter for peers in self.peers for counter in (peers.hub.refused, peers.refused)]
        return dict(sum(counts, collections.Counter[str]()))

    def layout_for(self, trainer: TrainerReady) -> LayoutFixed:
        """Return what a trainer that starts must know to publish."""
        return LayoutFixed(tensors=()) if self.given.is_replay else self._transport.layout_for(trainer, self.engines)

    def rollout_sampling(self) -> Sampling:
        """Return how engines sample rollouts; evaluations are held to no constraint."""
        rollout = self.config.rollout
        return msgspec.structs.replace(self.sampling(temperature=rollout.temperature), structured_outputs=rollout.structured_outputs)

    def sampling(self, *, temperature: float) -> Sampling:
        """Return how engines sample, for training or for evaluations.

        Where generation and training take turns, what an engine samples depends on the seed alone, not on when requests reach it: two
        runs then begin alike. In the other modes it depends on when swaps fall, and a generator for each request would only cost time.
        """
        rollout, stop_token_ids = self.config.rollout, self.given.stop_token_ids
        seed = self.config.run.seed if self.config.pipeline.mode is Mode.SYNC else None
        return Sampling(max_tokens=rollout.max_tokens, temperature=temperature, stop_token_ids=stop_token_ids, stop=rollout.stop, seed=seed)

    def leasing(self) -> Desk | None:
        """Return the way to the stage that lends rollouts to agents, in a run with a gateway."""
        config, table, section = self.config, self.given.table, self.config.gateway
        if section is None:
            return None
        stage = None
        if self.gateway is not None:
            stage = Leasing(gateway=self.gateway, seats={}, watch=self.watch, section=section, alternation=self.alternation)
        leasing = stage or (table and table.leasing)
        assert leasing is not None, "the policy that speaks with the gateway is the first"
        turns = AgentTurns(
            gateway=leasing.gateway,
            engines=self.engines,
            watch=self.watch,
            section=section,
            sampling=self.rollout_sampling(),
            max_context_tokens=min(config.batch.max_tokens, config.model.max_tokens or config.batch.max_tokens),
            max_tokens=section.max_episode_tokens or config.batch.max_tokens,
            vocabulary=self.given.vocabulary,
        )
        leasing.seats[self.given.policy] = Seat(turns=turns, watch=self.watch, ledger=self.given.ledger)
        if table is not None:
            table.leasing = leasing
        return Desk(leasing=leasing, policy=self.given.policy, stage=stage)

    def cut(self) -> BatchCut:
        """Return the rule that makes steps of groups as they come."""
        return BatchCut(
            groups_per_step=self.config.batch.groups_per_step,
            max_staleness=self.schedule.max_staleness,
            min_group_size=self.config.batch.min_group_size,
            group_advantages=self.given.group_advantages,
            rules=self.given.step_rules,
            first_step=self.past.open_step,
        )

    @property
    def interrupted(self) -> tuple[InterruptedGroup, ...]:
        """The groups to issue again; of a script that is gone, those that the one which goes on awaits, without what it has read."""
        if (replay := self.replay) is None:
            return self.past.interrupted
        return tuple(
            dataclasses.replace(group, rollouts=left)
            for group in self.past.interrupted
            if group.group_id in replay.groups and (left := tuple(one for one in group.rollouts if one.rollout_id not in replay.sampled))
        )

    def grouping(self) -> Grouping:
        """Return a collection of siblings, to which groups that were complete before do not come again."""
        past = self.past
        return Grouping(
            group_size=self.num_siblings, sizes=self.group_sizes, first_group_id=past.next_group_id, still_open=past.running_groups
        )

    def restored(self, stage: str) -> tuple[ScoredTrajectory, ...]:
        """Return the trajectories that were scored and not assigned before a restart, for the stage that is next to see them.

        Those of a script end with it, or wait until the one that goes on asks for their scores.
        """
        past = () if self.given.in_script else self.past.scored
        return tuple(one for one in past if self.next_stage(one.trajectory.rollout_id) == stage)

    def next_stage(self, rollout_id: str) -> str:
        """Name the stage that is next to see a trajectory that was scored before a restart."""
        past, compares = self.past, self.config.compares_siblings
        if compares and rollout_id in past.group_scored:
            return "batching"
        if self.prm is not None and rollout_id not in past.prm_scored:
            return "prm"
        return "group_rewards" if compares else "batching"
