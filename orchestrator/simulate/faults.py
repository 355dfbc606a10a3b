"""Faults happen to a simulated run, each as the first row of a step begins, at steps drawn by seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from orchestrator.simulate.engine import SimulatedEngine
from orchestrator.simulate.events import Events
from orchestrator.simulate.generation import Generation
from orchestrator.simulate.links import Link
from orchestrator.simulate.record import Record
from orchestrator.simulate.scorers import Slots
from orchestrator.simulate.trainer import Trainer
from orchestrator.simulate.weight_sync import WeightSync
from orchestrator.simulate.world import Faults, faults_by_step


class Injection:
    """Kills processes, slows scorers down and takes links away; engines come back after `restart_s`."""

    def __init__(
        self,
        events: Events,
        *,
        faults: Faults,
        num_steps: int,
        seed: int,
        record: Record,
        generation: Generation,
        weight_sync: WeightSync,
        trainer: Trainer,
        slots: Slots,
        link: Link,
        restart_s: float,
        restarted: Callable[[int], SimulatedEngine],
    ) -> None:
        """`restarted` returns the process that takes the place of an engine."""
        self.num_tokens_of_dead = 0
        """Tokens that engines had written which were killed."""
        self._events, self._faults, self._record, self._restarted = events, faults, record, restarted
        self._by_step = faults_by_step(faults, num_steps=num_steps, seed=seed)
        self._chance = np.random.default_rng((seed, 2))
        self._generation, self._weight_sync, self._trainer = generation, weight_sync, trainer
        self._slots, self._link, self._restart_s = slots, link, restart_s
        trainer.on_begun = self._step_begun

    def _step_begun(self, step: int) -> None:
        for fault in self._by_step.pop(step, ()):
            match fault:
                case "engine":
                    self.kill_engine(int(self._chance.integers(len(self._generation.engines))))
                case "trainer":
                    self._record.line("fault", what="trainer")
                    self._events.after(0.0, self._trainer.die)
                case "scorer":
                    self._record.line("fault", what="scorer", seconds=self._faults.lasts_s)
                    self._slots.slowness *= self._faults.slowness
                    self._events.after(self._faults.lasts_s, self._scorer_recovers)
                case _:
                    self._record.line("fault", what="link", seconds=self._faults.lasts_s)
                    self._link.lose(self._faults.lasts_s)

    def _scorer_recovers(self) -> None:
        self._slots.slowness /= self._faults.slowness

    def kill_engine(self, engine_id: int) -> None:
        """Kill an engine; its process comes back."""
        generation = self._generation
        engine = generation.engines[engine_id]
        if not engine.is_alive:
            return
        self._record.line("fault", what="engine", engine_id=engine_id)
        engine.die()
        self.num_tokens_of_dead += engine.num_tokens
        generation.num_missing += 1
        generation.note(engine)
        generation.lost(engine_id)
        self._weight_sync.left(engine_id)
        self._events.after(self._restart_s, lambda: self._restart_engine(engine_id))

    def _restart_engine(self, engine_id: int) -> None:
        """Have a process take its place, which samples under the model that the run began with until it holds the newest policy."""
        generation = self._generation
        generation.num_missing -= 1
        if engine_id in generation.leaving:  # its device has another role meanwhile
            return
        engine = generation.engines[engine_id] = self._restarted(engine_id)
        generation.note(engine)
        self._weight_sync.joined(engine)
