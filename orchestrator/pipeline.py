"""A run, from its first peer to its end: read this first, then the stages in the order of the flow.

    prompts -> generation -> scoring -> batching -> training      weight sync
                 |  ^          |  ^                   |  ^          |  ^
                engines      scorers                 trainer       engines

A run with an environment has the stage `environment` beside generation, one with a process reward model has `prm` around scoring, and one
whose rewards compare siblings has `group_rewards` after it. `assembly` makes and joins them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

from orchestrator.assembly import Assembly
from orchestrator.dependencies import Dependencies
from orchestrator.ledger.rollouts import Counts
from pipelinerl.config import Config
from pipelinerl.errors import PeerSilent
from pipelinerl.messages import Stop
from pipelinerl.observe.fold.rows import Alarm
from pipelinerl.runtime.watch import wait_for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run: how it ended."""

    reason: str
    """The text "finished", or the reason why it was stopped before."""
    identity: Counts
    evaluations: tuple[tuple[int, float], ...]
    """The pair (version, mean reward) of each evaluation."""
    pauses_s: tuple[float, ...]


STAGES_OF_TRAINER = ("training", "weight_sync")
"""Stages that go on while a stopped run saves: they hear of the last steps, and bring their policies to the engines."""


class Pipeline:
    """The pipeline of one orchestrator process. `run` returns when the last policy is published, or after `stop`."""

    def __init__(self, config: Config, dependencies: Dependencies) -> None:
        self._config = config
        self._dependencies = dependencies
        self._stop_reason: str | None = None
        self._stopped = asyncio.Event()
        self._evaluates_when_stopped = False
        self._is_training = False
        """True while rows may be on their way to the trainer, and its messages about them on their way back."""
        self._assembly = assembly = Assembly(config, dependencies)
        self._peers, self._stages, self._status = assembly.connections.all, assembly.stages, assembly.status
        self._evaluation = assembly.evaluation
        assembly.progress.on_alarm = self._hear

    async def run(self) -> RunResult:
        """Wait for the peers, run the stages to the end, evaluate, tell everyone to stop. Raises the first error of any stage or peer."""
        async with asyncio.TaskGroup() as group:
            service = [group.create_task(task.run()) for task in (*self._peers, self._status)]
            main = group.create_task(self._main())
            stop = group.create_task(self._stopped.wait())
            await asyncio.wait((main, stop), return_when=asyncio.FIRST_COMPLETED)
            if self._is_training:  # it has heard of the stop; each of its waits has a deadline
                await asyncio.wait((main,))
            main.cancel()
            stop.cancel()
            for peers in self._peers:
                peers.dismiss(Stop(reason=self._reason))
            for task in service:
                task.cancel()
        return self._end()

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
        past, admission, version = self._assembly.past, self._assembly.admission, self._assembly.training.session.version
        admission.restore(accepted=past.num_assigned_groups, running=len(past.running_groups), version=version)
        async with asyncio.TaskGroup() as group:
            watchdog = group.create_task(self._assembly.watch.run(), name="watchdog")
            version = await self._train()
            if version is not None:
                await self._evaluation.evaluate(version)
            watchdog.cancel()

    async def _wait_for_peers(self) -> None:
        parts, engine, trainer = self._assembly, self._config.engine, self._config.trainer

        async def ready(waiting: Coroutine[Any, Any, None], peer: str, what: str, deadline_s: float) -> None:
            with parts.watch.waiting("start-up", f"{peer} {what}"):
                await wait_for(waiting, peer=peer, what=what, deadline_s=deadline_s)

        await ready(parts.engines.wait_until_ready(), "engines", "to load the model", engine.ready_deadline_s)
        await ready(parts.scorers.wait_until_ready(), "scorers", "to load the rewards", engine.ready_deadline_s)
        if parts.prm is not None:
            await ready(parts.prm.wait_until_ready(), "the process reward model", "to load", engine.ready_deadline_s)
        await ready(parts.training.session.wait_until_ready(), "trainer", "to load the model", trainer.ready_deadline_s)

    async def _train(self) -> int | None:
        """Run the stages until the last step is trained, or until stopped; return the version to evaluate at the end, None for none."""
        parts = self._assembly
        if not parts.training.session.version:
            await self._evaluation.evaluate(0)
        self._is_training = True
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stage.run(), name=stage.name) for stage in self._stages]
            tasks.append(group.create_task(self._evaluation.follow(parts.engines.oldest_version), name="evaluation"))
            finished, stopped = group.create_task(parts.training.finished.wait()), group.create_task(self._stopped.wait())
            await asyncio.wait((finished, stopped), return_when=asyncio.FIRST_COMPLETED)
            if finished.done():
                self._is_training = False  # there is nothing left to save: a stop from now on ends at once
                version = self._config.trainer.steps
                await self._in_force(version)
            else:
                for task in tasks:
                    if task.get_name() not in STAGES_OF_TRAINER:
                        task.cancel()
                version = await self._end_training()
            for task in (*tasks, finished, stopped):
                task.cancel()
        return version

    async def _end_training(self) -> int | None:
        """Have the trainer save and publish its policy, and record that; return the version to evaluate, None for none."""
        training, watch, deadline_s = self._assembly.training, self._assembly.watch, self._config.trainer.silent_after_s
        self._dependencies.journal.write("stopping", reason=self._reason, evaluates=self._evaluates_when_stopped)
        try:
            with watch.waiting("pipeline", "the trainer to save what it has trained"):
                if not training.session.end_training(self._reason):
                    return None  # it is gone, and nobody starts it again: what its newest checkpoint holds is what there is
                await wait_for(training.session.ended.wait(), peer="trainer", what="to save what it has trained", deadline_s=deadline_s)
            if not self._evaluates_when_stopped or not training.last_version:
                return None
            await wait_for(self._in_force(training.last_version), peer="engines", what="to commit the last policy", deadline_s=deadline_s)
        except PeerSilent as error:
            self._dependencies.journal.write("choice", text=f"the run ends without its last evaluation: {error}")
            return None
        return training.last_version

    async def _in_force(self, version: int) -> None:
        """Wait until every engine samples under the last policy, which the final evaluation is about."""
        engines = self._assembly.engines
        with self._assembly.watch.waiting("pipeline", "engines to commit the last policy"):
            while not engines.all_hold(version):
                await engines.changed.wait()

    def _end(self) -> RunResult:
        now_s, journal = asyncio.get_running_loop().time(), self._dependencies.journal
        identity = self._dependencies.ledger.finish(self._reason, now_s=now_s)
        journal.write("status", **self._status.gauges(now_s=now_s))
        self._assembly.function_errors.finish()
        journal.write("end", reason=self._reason, identity=dataclasses.asdict(identity), elapsed_s=now_s - self._assembly.started_s)
        return RunResult(
            reason=self._reason,
            identity=identity,
            evaluations=tuple(self._evaluation.results),
            pauses_s=tuple(self._assembly.progress.pauses_s),
        )

    @property
    def _reason(self) -> str:
        return self._stop_reason or "finished"
