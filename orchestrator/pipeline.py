"""The stages of a run and how they are joined: read this first, then the stages in the order of the flow.

    prompts -> generation -> scoring -> batching -> training      weight sync
                 |  ^          |  ^                   |  ^          |  ^
                engines      scorers                 trainer       engines

A run with an environment has the stage `environment` beside generation, one with a gateway has `leasing` there, one with a process reward
model has `prm` around scoring, and one whose rewards compare siblings has `group_rewards` after it. `orchestrator.parts` makes what stages
share, `orchestrator.run` runs them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from orchestrator.channels import make_channels
from orchestrator.parts import Parts
from orchestrator.recovery.open_steps import OpenSteps
from orchestrator.script_stage import join, script_of, settled_of
from orchestrator.stages.batching import Batching
from orchestrator.stages.environment import EnvironmentStage
from orchestrator.stages.generation import Generation
from orchestrator.stages.group_rewards import GroupRewards
from orchestrator.stages.prm import PrmScoring, early_stopping
from orchestrator.stages.prompts import Prompts
from orchestrator.stages.scoring import Scoring
from orchestrator.stages.training import Training
from orchestrator.stages.weight_sync import WeightSync
from pipelinerl.algorithms.mismatch import MismatchRule
from pipelinerl.runtime.stage import Stage

MAX_DROPPED_STEPS = 10
"""Groups that may fail or be stale in a row before the run ends, in steps. A smaller value ends runs in a bad patch."""


class Pipeline:
    """The stages of one orchestrator process, each given its channels and the parts that it works with."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self.channels = make_channels(
            watch=parts.watch,
            queue_bytes=config.pipeline.queue_bytes,
            num_policies=config.trainer.steps,
            has_environment=config.environment.is_used,
            has_prm=config.prm.is_used,
            compares_siblings=config.compares_siblings,
            in_script=parts.given.in_script,
        )
        self.script = script_of(parts, self.channels)
        every = (*self._stages_of_rollouts(parts), *self._stages_of_steps(parts))
        self.stages: tuple[Stage, ...] = tuple(stage for stage in every if stage is not None)
        """The stages of this run, in the order of the flow."""
        join(self.script, parts, self.stages, prm=self.prm)

    def _stages_of_rollouts(self, parts: Parts) -> Iterator[Stage | None]:
        config, past, channels, ledger = parts.config, parts.past, self.channels, parts.given.ledger
        self.environment = self.prm = None
        if channels.turns is not None:
            self.environment = EnvironmentStage(
                turns=channels.turns,
                scorers=parts.scorers,
                ledger=ledger,
                max_tokens=config.rollout.max_tokens,
                max_turns=config.environment.max_turns,
                max_alive=config.environment.max_alive if config.environment.cls is not None else None,
                credits=parts.credits,
            )
        if parts.prm is not None:
            self.prm = PrmScoring(
                generated=channels.generated,
                trajectories=channels.trajectories,
                scored=channels.scored,
                prm_scored=channels.prm_scored,
                prm=parts.prm,
                ledger=ledger,
                watch=parts.watch,
                credits=parts.credits,
                max_waiting_tokens=config.prm.max_waiting_tokens,
                stopping=early_stopping(config, requests=parts.engines.requests),
                restored=parts.restored("prm"),
                decisions=past.early_stops,
            )
            parts.engines.requests.on_tokens(self.prm.take)
        self.leasing = parts.leasing()
        yield self.script or Prompts(source=parts.given.source, prompts=channels.prompts)
        yield Generation(
            prompts=channels.prompts,
            completions=channels.completions,
            trajectories=channels.sampled,
            engines=parts.engines,
            admission=parts.admission,
            credits=parts.credits,
            ledger=ledger,
            watch=parts.watch,
            sampling=parts.rollout_sampling(),
            group_size=config.rollout.group_size,
            adds_greedy=parts.adds_greedy,
            chunk_tokens=config.prm.chunk_tokens if self.prm and not config.environment.is_used else 0,
            backpressure=self.prm.backpressure if self.prm else lambda: None,
            quarantine=parts.quarantine,
            environment=self.environment,
            leasing=self.leasing,
            dispatch=parts.dispatch,
            group_cut=parts.group_cut,
            next_group_id=past.next_group_id,
            interrupted=parts.interrupted,
        )
        yield self.environment
        yield self.leasing and self.leasing.stage
        yield Scoring(
            trajectories=channels.trajectories,
            scored=channels.scored,
            scorers=parts.scorers,
            ledger=ledger,
            group_cut=parts.group_cut,
            has_rewards=bool(config.reward) or self.leasing is None,
        )
        yield self.prm
        if config.compares_siblings:
            yield GroupRewards(
                scored=channels.prm_scored,
                group_scored=channels.group_scored,
                scorers=parts.scorers,
                ledger=ledger,
                grouping=parts.grouping(),
                min_group_size=config.batch.min_group_size,
                restored=parts.restored("group_rewards"),
            )

    def _stages_of_steps(self, parts: Parts) -> Iterator[Stage]:
        config, given, past, channels = parts.config, parts.given, parts.past, self.channels
        yield Batching(
            scored=channels.grouped,
            packed=channels.packed,
            rows=channels.rows,
            grouping=parts.grouping(),
            cut=parts.cut() if self.script is None else self.script.steps.cut,
            packing=parts.packing,
            admission=parts.admission,
            credits=parts.credits,
            ledger=given.ledger,
            progress=parts.progress,
            max_dropped=sys.maxsize if given.is_replay else MAX_DROPPED_STEPS * config.batch.groups_per_step,
            causes=parts.function_errors.words,
            settled=settled_of(self.script, parts, prm=self.prm),
            restored=parts.restored("batching"),
            open_step=past.steps.get(past.open_step) if self.script is None else None,
        )
        self.training = Training(
            rows=channels.rows,
            published=channels.policies,
            trainer=parts.trainer,
            num_replicas=parts.trainer_change.num_replicas,
            num_steps=config.trainer.steps,
            holds_batches=parts.schedule.holds_batches,
            alternation=parts.alternation,
            ledger=given.ledger,
            progress=parts.progress,
            watch=parts.watch,
            steps=OpenSteps(given.ledger, num_booked=past.num_done, recorded=past.steps),
            kv_policy=parts.kv_policy,
            announcement_check=parts.announcement_check,
            quarantine=parts.quarantine,
            mismatch=MismatchRule(limit=config.trainer.max_mismatch_kl),
            teachers=tuple(config.reference.teachers),
        )
        yield self.training
        self.weight_sync = WeightSync(
            published=channels.published,
            engines=parts.engines,
            trainer=parts.trainer,
            admission=parts.admission,
            credits=parts.credits,
            progress=parts.progress,
            journal=given.journal,
            layout_for=parts.layout_for,
            commit_deadline_s=config.pipeline.stall_limit_s,
            kv_policy=parts.kv_policy,
            alternation=parts.alternation,
        )
        yield self.weight_sync
