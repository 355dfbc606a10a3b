"""A run, from its first peer to its end: wait for the peers, train, save and evaluate the last policy, tell everyone to stop."""

from __future__ import annotations

import asyncio
import dataclasses

from orchestrator.elastic import role_changes_of
from orchestrator.ledger.rollouts import Counts
from orchestrator.observe.status import Status
from orchestrator.parts import Dependencies, Parts
from orchestrator.pipeline import Pipeline
from orchestrator.rules.dispatch import gauges_of
from orchestrator.stages.evaluation import Evaluation
from orchestrator.stages.scaling import Scaling
from orchestrator.stages.trainer_restart import TrainerRestart
from pipelinerl.config import Config
from pipelinerl.errors import PeerSilent
from pipelinerl.messages import Stop
from pipelinerl.observe.fold.rows import Alarm
from pipelinerl.runtime.watch import wait_for

STAGES_OF_TRAINER = ("training", "held_policies", "weight_sync")
"""Stages that go on while a stopped run saves: they hear of the last steps, and bring their policies to the engines."""

STARTS = 3
"""Times the deadline of a trainer that starts, where an earlier orchestrator had asked for another number of ranks: these have one, those
before have one (`stages.trainer_restart`), and then that stage says why the run ends.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run: how it ended."""

    reason: str
    """The text "finished", or the reason why it was stopped before."""
    rollouts: Counts
    """The rollouts by how they ended."""
    evaluations: tuple[tuple[int, float], ...]
    """The pair (version, mean reward) of each evaluation."""
    pauses_s: tuple[float, ...]


class Run:
    """The run of one orchestrator process. `run` returns when the last policy is published, or after `stop`."""

    def __init__(self, config: Config, given: Dependencies) -> None:
        self._config = config
        self._journal = given.journal
        self._ledger = given.ledger
        self.parts = parts = Parts(config, given)
        self.pipeline = Pipeline(parts)
        self.ready = asyncio.Event()
        """Set once every peer is there, and the stages run."""
        self.result: RunResult | None = None
        """How it ended; None until then."""
        self._stop_reason: str | None = None
        self._stopped = asyncio.Event()
        self._evaluates_when_stopped = False
        self._is_training = False
        """True while rows may be on their way to the trainer, and its messages about them on their way back."""
        self.evaluation = Evaluation(
            prompts=given.held_out,
            section=config.evaluation,
            correct_reward=config.algorithm.correct_reward,
            engines=parts.engines,
            scorers=parts.scorers,
            pins=self.pipeline.weight_sync,
            takes_turns=parts.alternation.is_in_turns,
            sampling=parts.sampling(temperature=config.evaluation.temperature),
            environment=self.pipeline.environment,
            journal=given.journal,
            ledger=given.ledger,
            watch=parts.watch,
            results=list(parts.past.evaluations),
            on_evaluated=parts.progress.evaluated,
        )
        prm, environment, leasing = self.pipeline.prm, self.pipeline.environment, self.pipeline.leasing
        self._status = Status(
            journal=given.journal,
            ledger=given.ledger,
            admission=parts.admission,
            engines=parts.engines,
            memberships=tuple(part.membership for part in (parts.engines, parts.prm, *parts.reward_models) if part is not None),
            scorers=parts.scorers,
            channels=self.pipeline.channels.queues,
            refused=parts.refused,
            watch=parts.watch,
            progress=parts.progress,
            num_steps=config.trainer.steps,
            num_booked=lambda: self.pipeline.training.steps.num_booked,
            prm=prm.gauges if prm else lambda: None,
            environment=environment.gauges if environment else lambda: None,
            gateway=leasing.gauges if leasing else lambda: None,
            dispatch=lambda: gauges_of(parts.dispatch, parts.group_cut, parts.relief and parts.relief.rule),
        )
        parts.progress.on_alarm = self._hear
        self._scaling = given.scale and Scaling(
            folder=given.scale,
            membership=parts.membership,
            engines=parts.engines,
            prm=parts.prm,
            rewards=parts.reward_models,
            limit=parts.limit,
            credits=parts.credits,
            journal=given.journal,
            trainer=TrainerRestart(
                folder=given.scale,
                change=parts.trainer_change,
                training=self.pipeline.training,
                engines=parts.engines,
                packing=parts.packing,
                journal=given.journal,
                watch=parts.watch,
                deadline_s=config.trainer.ready_deadline_s,
            ),
            ready_s=config.engine.ready_deadline_s,
            roles=role_changes_of(parts, self.pipeline) if config.pipeline.elastic else None,
        )

    async def reallocate(self, *, engines: int, drain_s: float) -> str:
        """Bring the run to a number of engines; return why that cannot be, or what is missing, and nothing where it has happened."""
        if self._scaling is None:
            return "it keeps the engines that it began with"
        return await self._scaling.reallocate(engines=engines, drain_s=drain_s, ready_s=self.parts.config.engine.ready_deadline_s)

    async def run(self) -> RunResult:
        """Wait for the peers, run the stages to the end, evaluate, tell everyone to stop. Raises the first error of any stage or peer."""
        async with asyncio.TaskGroup() as group:
            scaling = [] if self._scaling is None else [self._scaling]
            service = [group.create_task(task.run()) for task in (*self.parts.peers, self._status, *scaling)]
            main = group.create_task(self._main())
            stop = group.create_task(self._stopped.wait())
            await asyncio.wait((main, stop), return_when=asyncio.FIRST_COMPLETED)
            if self._is_training:  # it has heard of the stop; each of its waits has a deadline
                await asyncio.wait((main,))
            main.cancel()
            stop.cancel()
            for peers in self.parts.peers:
                peers.dismiss(Stop(reason=self._reason))
            for task in service:
                task.cancel()
        self.result = self._end()
        return self.result

    def stop(self, reason: str, *, evaluates: bool = True) -> None:
        """End the run early. The trainer saves and publishes its policy, which is recorded, and, with `evaluates`, evaluated."""
        self._stop_reason = reason
        self._evaluates_when_stopped = evaluates
        self._stopped.set()

    def _hear(self, alarm: Alarm) -> None:
        """End and save the run at an alarm of learning, where the settings say so."""
        if alarm.name in self._config.run.fatal_alarms:
            self.stop(f"alarm: {alarm}")

    async def _main(self) -> None:
        await self._wait_for_peers()
        past, version = self.parts.past, self.pipeline.training.session.version
        num_running = len(past.running_groups) if self.pipeline.script is None else self.pipeline.script.steps.num_running_groups
        self.parts.admission.restore(accepted=past.num_assigned_groups, running=num_running, version=version)
        async with asyncio.TaskGroup() as group:
            watchdog = group.create_task(self.parts.watch.run(), name="watchdog")
            last_version = await self._train(version)
            if last_version is not None and self.pipeline.script is None:
                await self.evaluation.evaluate(last_version)
            watchdog.cancel()

    async def _wait_for_peers(self) -> None:
        parts, engine, trainer = self.parts, self._config.engine, self._config.trainer
        session = self.pipeline.training.session
        trainer_s = trainer.ready_deadline_s * (STARTS if session.is_changing else 1)
        for peers, peer, what, deadline_s in (
            (parts.engines, "engines", "to load the model", engine.ready_deadline_s),
            (parts.scorers, "scorers", "to load the rewards", engine.ready_deadline_s),
            (parts.prm, "the process reward model", "to load", engine.ready_deadline_s),
            (parts.gateway, "the gateway", "to listen", engine.ready_deadline_s),
            (session, "trainer", "to load the model", trainer_s),
        ):
            if peers is not None:
                began = self._journal.clock()
                with parts.watch.waiting("start-up", f"{peer} {what}"):
                    await wait_for(peers.wait_until_ready(), peer=peer, what=what, deadline_s=deadline_s)
                self._journal.write("startup", what=f"waits for {peer} {what}", start=began, end=self._journal.clock())

    async def _train(self, version: int) -> int | None:
        """Run the stages until the last step is trained, or until stopped; return the version to evaluate at the end, None for none."""
        script = self.pipeline.script
        if not version and script is None:  # a script evaluates when it wants to
            await self.evaluation.evaluate(0)
        self._is_training = True
        self.ready.set()
        async with asyncio.TaskGroup() as group:
            stages = (*self.pipeline.stages, *([script.steps.held] if script is not None else ()))
            tasks = [group.create_task(stage.run(), name=stage.name) for stage in stages]
            if script is None:
                tasks.append(group.create_task(self.evaluation.follow(self.parts.engines.oldest_version), name="evaluation"))
            finished = group.create_task((self.pipeline.training.finished if script is None else script.steps.left).wait())
            stopped = group.create_task(self._stopped.wait())
            await asyncio.wait((finished, stopped), return_when=asyncio.FIRST_COMPLETED)
            if finished.done():
                self._is_training = False  # there is nothing left to save: a stop from now on ends at once
                last_version: int | None = self._config.trainer.steps
                await self.in_force(self._config.trainer.steps)
            else:
                for task in tasks:
                    if task.get_name() not in STAGES_OF_TRAINER:
                        task.cancel()
                last_version = await self._end_training()
            for task in (*tasks, finished, stopped):
                task.cancel()
        return last_version

    async def _end_training(self) -> int | None:
        """Have the trainer save and publish its policy, and record that; return the version to evaluate, None for none."""
        training, watch, deadline_s = self.pipeline.training, self.parts.watch, self._config.trainer.silent_after_s
        self._journal.write("stopping", reason=self._reason, evaluates=self._evaluates_when_stopped)
        try:
            with watch.waiting("pipeline", "the trainer to save what it has trained"):
                if not training.session.end_training(self._reason):
                    return None  # it is gone, and nobody starts it again: what its newest checkpoint holds is what there is
                await wait_for(training.session.ended.wait(), peer="trainer", what="to save what it has trained", deadline_s=deadline_s)
            if not self._evaluates_when_stopped or not training.last_version:
                return None
            await wait_for(self.in_force(training.last_version), peer="engines", what="to commit the last policy", deadline_s=deadline_s)
        except PeerSilent as error:
            self._journal.write("choice", text=f"the run ends without its last evaluation: {error}")
            return None
        return training.last_version

    async def in_force(self, version: int) -> None:
        """Wait until every engine is awake under a policy that no other follows, which an evaluation is to be about."""
        engines, alternation = self.parts.engines, self.parts.alternation
        with self.parts.watch.waiting("pipeline", f"engines to commit policy {version}"):
            while not (engines.all_hold(version) and all(map(alternation.is_awake, engines))):
                await engines.changed.wait()

    def _end(self) -> RunResult:
        now_s, reason = asyncio.get_running_loop().time(), self._reason
        rollouts = self._ledger.finish(reason, now_s=now_s)
        self._journal.write("status", **self._status.gauges(now_s=now_s))
        self.parts.function_errors.finish()
        self._journal.write("end", reason=reason, rollouts=dataclasses.asdict(rollouts), elapsed_s=now_s - self.parts.started_s)
        evaluations, pauses_s = tuple(self.evaluation.results), tuple(self.parts.progress.pauses_s)
        return RunResult(reason=reason, rollouts=rollouts, evaluations=evaluations, pauses_s=pauses_s)

    @property
    def _reason(self) -> str:
        return self._stop_reason or "finished"
